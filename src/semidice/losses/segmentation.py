"""Cross entropy and a region loss in one pass over the voxels, for one output or for deep supervision."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from ..arrays import check_non_negative, downsample_target, fold_ignored
from ..kernels import segmentation_losses
from ..overlap.mixture import Losses
from ..overlap.options import CROSS_ENTROPY_WEIGHT, REGION_WEIGHT, MixtureOptions
from .tversky import DiceLoss, TverskyLoss


class SegmentationLoss(nn.Module):
    """Cross entropy and a region loss in one: 0.25 CE + 0.75 DML1 by default (paper, section 3).

    The activation, ignore_index, class_weight and sync of `region` hold for both terms. A term of
    weight 0 is not computed. For a list of outputs (deep supervision, finest first), the target is averaged
    by area to the size of each output, and the losses are summed with `scale_weights`; the default is
    1, 1/2, 1/4, ... divided by their sum.

    >>> loss = SegmentationLoss(TverskyLoss(alpha=0.7, beta=0.3))
    >>> total, parts = loss(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long), parts=True)
    >>> sorted(parts)
    ['cross_entropy', 'region']
    """

    def __init__(
        self,
        region: TverskyLoss | None = None,
        *,
        cross_entropy_weight: float = CROSS_ENTROPY_WEIGHT,
        region_weight: float = REGION_WEIGHT,
        scale_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_non_negative(cross_entropy_weight=cross_entropy_weight, region_weight=region_weight)
        self.region = DiceLoss() if region is None else region
        self.cross_entropy_weight, self.region_weight = cross_entropy_weight, region_weight
        self.scale_weights = None if scale_weights is None else tuple(scale_weights)

    @overload
    def forward(
        self, logits: Tensor | Sequence[Tensor], target: Tensor, valid: Tensor | None = None
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        logits: Tensor | Sequence[Tensor],
        target: Tensor,
        valid: Tensor | None = None,
        *,
        parts: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self,
        logits: Tensor | Sequence[Tensor],
        target: Tensor,
        valid: Tensor | None = None,
        *,
        parts: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The total; with `parts`, also the unweighted terms by name, detached, for a log."""
        # looked up once: an attribute that is a module takes longer to find
        region = self.region
        if region.ignore_index is not None:
            valid = fold_ignored(target, valid, region.ignore_index)
        if parts:
            return self.total_and_terms(logits, target, valid)
        return self._losses(region, logits, target, valid, parts=False).total

    def total_and_terms(
        self, logits: Tensor | Sequence[Tensor], target: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`forward` with `parts`, but it does not read `ignore_index`: `valid` must hold ignored voxels."""
        total, (cross_entropy, region) = self._losses(self.region, logits, target, valid, parts=True)
        return total, {"cross_entropy": cross_entropy.detach(), "region": region.detach()}

    def _losses(
        self,
        region: TverskyLoss,
        logits: Tensor | Sequence[Tensor],
        target: Tensor,
        valid: Tensor | None,
        *,
        parts: bool,
    ) -> Losses:
        """The losses of one output, or the weighted sums of the losses of several."""
        options = MixtureOptions(
            region.activation, region.options, self.cross_entropy_weight, self.region_weight
        )
        weight = region.class_weight
        if isinstance(logits, Tensor):
            return segmentation_losses(logits, target, valid, options, class_weight=weight, parts=parts)
        scales = self._weights_of_scales(len(logits))
        losses = []
        for output in logits:
            coarse = downsample_target(target, valid, output.shape)
            losses.append(segmentation_losses(output, *coarse, options, class_weight=weight, parts=parts))
        total = _weighted_sum(scales, [each.total for each in losses])
        terms = zip(*(each.terms for each in losses), strict=True)
        return Losses(total, tuple(_weighted_sum(scales, term) for term in terms))

    def _weights_of_scales(self, num_scales: int) -> Sequence[float]:
        halved = [0.5**level for level in range(num_scales)]
        weights = self.scale_weights or [weight / sum(halved) for weight in halved]
        if num_scales == 0 or len(weights) != num_scales:
            raise ValueError(
                f"scale_weights needs one number per output; got {len(weights)} for {num_scales} outputs"
            )
        return weights

    def extra_repr(self) -> str:
        return f"cross_entropy_weight={self.cross_entropy_weight}, region_weight={self.region_weight}"


def _weighted_sum(weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()
