"""Cross entropy and a region loss in one pass over the voxels, for one output or for deep supervision.

The average calibration error is a further term, computed in a pass of its own; by default its weight is 0.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ..arrays import (
    Activation,
    check_non_negative,
    check_target,
    check_tensor,
    class_weights,
    describe,
    downsample_target,
    read_target,
)
from ..kernels import segmentation_losses
from ..overlap.mixture import Losses, check_background
from ..overlap.options import CROSS_ENTROPY_WEIGHT, REGION_WEIGHT, MixtureOptions
from .calibration_error import Binning, CalibrationOptions, unchecked_calibration_error
from .tversky import DiceLoss, ModuleKeywords, TverskyLoss, check_options

# of one output or, for deep supervision, of several; targets and valid voxels: for all, or one per output
Outputs = Tensor | Sequence[Tensor]
Targets = Tensor | Sequence[Tensor]
Valid = Tensor | Sequence[Tensor | None] | None


class MixtureKeywords(ModuleKeywords, total=False):
    """The options of the region loss of a `SegmentationLoss`."""

    alpha: float
    beta: float


class SegmentationLoss(nn.Module):
    """Cross entropy and a region loss in one: 0.25 CE + 0.75 DML1 by default (paper, section 3).

    The region loss is `region`, or a `TverskyLoss` with the options given here; without alpha and beta it is
    the Dice loss. Its activation, ignore_index, class_weight and sync hold for all terms. A term of
    weight 0 is not computed. For a list of outputs (deep supervision, finest first), the target is averaged
    by area to the size of each output, unless there is a list of targets, one for each output. The losses are
    summed with `scale_weights`; the default is 1, 1/2, 1/4, ... divided by their sum.
    calibration_weight: of `calibration_error_loss` with `calibration_bins` and `calibration_binning`. This
    third term has the options over, classes and background of the region loss.

    >>> loss = SegmentationLoss(alpha=0.7, beta=0.3, ignore_index=255)
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
        calibration_weight: float = 0.0,
        calibration_bins: int = CalibrationOptions.num_bins,
        calibration_binning: Binning = CalibrationOptions.binning,
        scale_weights: Sequence[float] | None = None,
        **options: Unpack[MixtureKeywords],
    ) -> None:
        super().__init__()
        check_options("SegmentationLoss", options, MixtureKeywords.__annotations__)
        check_non_negative(
            cross_entropy_weight=cross_entropy_weight,
            region_weight=region_weight,
            calibration_weight=calibration_weight,
        )
        if cross_entropy_weight == region_weight == calibration_weight == 0:
            raise ValueError(
                "cross_entropy_weight, region_weight and calibration_weight are all 0: nothing would be "
                "learned"
            )
        if scale_weights is not None:
            _check_scale_weights(scale_weights)
        if region is not None and options:
            raise ValueError(
                f"got a region loss and options of a region loss: {', '.join(options)}; "
                "give the options to the region loss"
            )
        self.region = _region_loss(options) if region is None else region
        self.cross_entropy_weight, self.region_weight = cross_entropy_weight, region_weight
        self.calibration_weight = calibration_weight
        averaging = self.region.options
        self.calibration = CalibrationOptions(
            num_bins=calibration_bins,
            binning=calibration_binning,
            over=averaging.over,
            classes=averaging.classes,
            background=averaging.background,
            sync=averaging.sync,
        )
        self.scale_weights = None if scale_weights is None else tuple(scale_weights)

    @overload
    def forward(self, logits: Outputs, target: Targets, valid: Valid = None) -> Tensor: ...
    @overload
    def forward(
        self, logits: Outputs, target: Targets, valid: Valid = None, *, parts: Literal[True]
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self, logits: Outputs, target: Targets, valid: Valid = None, *, parts: bool = False
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The total; with `parts`, also the unweighted terms by name, detached, for a log."""
        # looked up once: an attribute that is a module takes longer to find
        region = self.region
        # one output and nothing to ignore: `segmentation_losses` reads the target
        if region.ignore_index is not None or not isinstance(logits, Tensor):
            target, valid = read_targets(logits, target, valid, region)
        if parts:
            return self.total_and_terms(logits, target, valid)
        return self._losses(region, logits, target, valid, parts=False).total

    def total_and_terms(
        self, logits: Outputs, target: Targets, valid: Valid
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`forward` with `parts`, of a target and valid voxels that `read_targets` returned."""
        total, terms = self._losses(self.region, logits, target, valid, parts=True)
        names = ("cross_entropy", "region", *(("calibration",) if self.calibration_weight > 0 else ()))
        return total, {name: term.detach() for name, term in zip(names, terms, strict=True)}

    def _losses(
        self, region: TverskyLoss, logits: Outputs, target: Targets, valid: Valid, *, parts: bool
    ) -> Losses:
        """The losses of one output, or the weighted sums of the losses of several."""
        if isinstance(logits, Tensor):
            one: tuple[Any, Any] = (target, valid)
            return self._losses_of_output(region, logits, *one, parts=parts)
        scales = self._weights_of_scales(len(logits))
        _check_outputs(logits)
        if isinstance(target, Tensor):
            _check_fine_target(logits[0], target, valid, region.activation)
        losses = [
            self._losses_of_output(region, output, label, counted, parts=parts)
            for output, label, counted in zip(logits, *_per_output(logits, target, valid), strict=True)
        ]
        total = _weighted_sum(scales, [each.total for each in losses])
        terms = zip(*(each.terms for each in losses), strict=True)
        return Losses(total, tuple(_weighted_sum(scales, term) for term in terms))

    def _losses_of_output(
        self, region: TverskyLoss, logits: Tensor, target: Tensor, valid: Tensor | None, *, parts: bool
    ) -> Losses:
        options = MixtureOptions(
            region.activation, region.options, self.cross_entropy_weight, self.region_weight
        )
        class_weight = region.class_weight
        losses = segmentation_losses(logits, target, valid, options, class_weight=class_weight, parts=parts)
        if self.calibration_weight == 0:
            return losses
        # the inputs are checked by now, except for what this term alone needs
        check_background(logits, self.calibration.background)
        target, valid = read_target(logits, target, activation=region.activation, valid=valid)
        weight = class_weights(class_weight, logits)
        calibration = unchecked_calibration_error(
            logits, target, valid, region.activation, self.calibration, weight
        )
        total = losses.total + self.calibration_weight * calibration
        return Losses(total, (*losses.terms, calibration) if parts else ())

    def _weights_of_scales(self, num_scales: int) -> Sequence[float]:
        halved = [0.5**level for level in range(num_scales)]
        weights: Sequence[float] = [weight / sum(halved) for weight in halved]
        if self.scale_weights is not None:
            weights = self.scale_weights
        if num_scales == 0 or len(weights) != num_scales:
            raise ValueError(
                f"scale_weights needs one number per output; got {len(weights)} for {num_scales} outputs"
            )
        return weights

    def extra_repr(self) -> str:
        shown = f"cross_entropy_weight={self.cross_entropy_weight}, region_weight={self.region_weight}"
        if self.calibration_weight == 0:
            return shown
        options = self.calibration
        return (
            f"{shown}, calibration_weight={self.calibration_weight}, calibration_bins={options.num_bins}, "
            f"calibration_binning={options.binning!r}"
        )


def _region_loss(options: Mapping[str, Any]) -> TverskyLoss:
    is_tversky = "alpha" in options or "beta" in options
    return TverskyLoss(**options) if is_tversky else DiceLoss(**options)


def read_targets(
    logits: Outputs, target: Targets, valid: Valid, region: TverskyLoss
) -> tuple[Targets, Valid]:
    """`arrays.read_target` of one target, or of one per output; a ValueError if lists do not match."""
    activation, ignore_index = region.activation, region.ignore_index
    if isinstance(target, Tensor):
        if valid is not None and not isinstance(valid, Tensor):
            raise ValueError(
                f"valid is a list, but target is one tensor, {describe(target)}: pass one tensor"
            )
        if not isinstance(logits, Tensor) and not logits:
            return target, valid
        if not isinstance(logits, Tensor):
            _check_outputs(logits)
        output = logits if isinstance(logits, Tensor) else logits[0]
        return read_target(output, target, activation=activation, valid=valid, ignore_index=ignore_index)
    if not isinstance(target, Sequence):
        raise ValueError(f"target must be a tensor, or a list with one per output; got {describe(target)}")
    if isinstance(logits, Tensor) or len(logits) != len(target):
        outputs = "one output" if isinstance(logits, Tensor) else f"{len(logits)} outputs"
        raise ValueError(f"a list of targets needs one per output; got {len(target)} for {outputs}")
    if valid is None:
        valid = [None] * len(target)
    if isinstance(valid, Tensor) or len(valid) != len(target):
        got = "one tensor" if isinstance(valid, Tensor) else str(len(valid))
        raise ValueError(f"with {len(target)} targets, valid must be a list of {len(target)}; got {got}")
    pairs = [
        read_target(output, label, activation=activation, valid=counted, ignore_index=ignore_index)
        for output, label, counted in zip(logits, target, valid, strict=True)
    ]
    return [label for label, _ in pairs], [counted for _, counted in pairs]


def _check_scale_weights(weights: Any) -> None:
    if isinstance(weights, str) or not isinstance(weights, Sequence) or not weights:
        raise ValueError(f"scale_weights must be a list with one number per output; got {weights!r}")
    check_non_negative(**{f"scale_weights[{number}]": weight for number, weight in enumerate(weights)})
    if not any(weights):
        raise ValueError(f"scale_weights are all 0, so nothing would be learned; got {list(weights)}")


def _check_outputs(logits: Sequence[Tensor]) -> None:
    """Raise unless the outputs of deep supervision have the same images and channels, the finest first."""
    for number, output in enumerate(logits):
        check_tensor(f"output {number}", output)
        if output.shape[:2] != logits[0].shape[:2] or output.ndim != logits[0].ndim:
            raise ValueError(
                f"output {number} is {describe(output)}, but output 0 is {describe(logits[0])}: all outputs "
                "need the same images, channels and number of axes"
            )
    sizes = [tuple(output.shape[2:]) for output in logits]
    for finer, coarser in pairwise(sizes):
        if any(length > limit for length, limit in zip(coarser, finer, strict=True)):
            raise ValueError(f"outputs must come finest first; got sizes {sizes}: reverse the list")


def _check_fine_target(output: Tensor, target: Tensor, valid: Valid, activation: Activation) -> None:
    """Raise unless a target that is finer than every output would fit outputs of its own size."""
    space = target.shape[2 if target.is_floating_point() else 1 :]
    if space == output.shape[2:] or len(space) != output.ndim - 2:
        # checked together with the output
        return
    # a view of one element, because only its shape, type and device are looked at
    as_fine = output.detach().flatten()[:1].view([1] * output.ndim).expand(*output.shape[:2], *space)
    assert valid is None or isinstance(valid, Tensor)
    check_target(as_fine, target, activation=activation, valid=valid)


def _per_output(
    logits: Sequence[Tensor], target: Targets, valid: Valid
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """A target and the valid voxels for each output; a single target is averaged to the output's size."""
    if not isinstance(target, Tensor):
        assert valid is not None
        assert not isinstance(valid, Tensor)
        return target, valid
    assert valid is None or isinstance(valid, Tensor)
    pairs = [downsample_target(target, valid, output.shape) for output in logits]
    return [label for label, _ in pairs], [counted for _, counted in pairs]


def _weighted_sum(weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()
