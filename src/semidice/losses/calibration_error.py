"""Average calibration error as a loss, for hard and soft labels (after Barfoot et al., MICCAI 2024: mL1-ACE).

    gap_b  = sum_i w_b(x_i) (x_i - y_i)          mass_b = sum_i w_b(x_i)
    loss   = sum_b min(1, mass_b) |gap_b / mass_b|  /  sum_b min(1, mass_b)

over the valid voxels i of one image and class (marginal: each class against the rest); then the mean over
classes and images. "hard" bins: w_b(x) is 1 if x is in [b/B, (b+1)/B), else 0, and only x has a gradient.
"soft" bins: w_b is a triangle from one neighbouring centre to the other, so membership has a gradient too.
With hard bins, min(1, mass) is 1 for a bin with voxels and 0 for an empty one: the mean over non-empty bins.
Decided here: with soft bins, less than one voxel counts less. So a bin appears without a jump of the loss,
and gradients are bounded.

Loss and gradient are exactly 0 at x = y. This is not the only minimum: every calibrated prediction has the
loss 0, also the mean label everywhere. So it is a term to add to other losses, not a loss on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import (
    Activation,
    check_choice,
    check_prediction,
    check_result,
    check_target,
    class_weights,
    one_hot,
)
from ..overlap.mixture import check_background, mean_over_classes_and_images
from ..overlap.options import Classes, Over, check_averaging
from ..overlap.stats import sum_across_processes
from ..overlap.sums import probability
from .tversky import check_options

Binning = Literal["hard", "soft"]

# Neighbouring voxels add to different partial sums. A GPU adds atomically, and most voxels of an image are in
# the same bin; and a float32 that counts voxels one by one would stop at 2^24.
_NUM_PARTIAL_SUMS = 128


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How confidence is binned and errors are averaged; `calibration_error_loss` explains the options."""

    num_bins: int = 20
    binning: Binning = "hard"
    over: Over = "image"
    classes: Classes = "all"
    background: bool = True
    sync: bool = False

    def __post_init__(self) -> None:
        check_choice("binning", self.binning, Binning)
        check_averaging(self.over, self.classes, sync=self.sync)
        if self.num_bins < 2:
            raise ValueError(
                f"num_bins must be 2 or more: one bin compares volumes alone; got {self.num_bins}"
            )


class CalibrationKeywords(TypedDict, total=False):
    """The options of `CalibrationOptions`, as the types of keyword arguments."""

    num_bins: int
    binning: Binning
    over: Over
    classes: Classes
    background: bool
    sync: bool


def calibration_error_loss(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation = "none",
    class_weight: Sequence[float] | Tensor | None = None,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    **options: Unpack[CalibrationKeywords],
) -> Float[Tensor, ""]:
    """Average calibration error, 0 at prediction = target; a soft target has a gradient as well.

    Args:
        prediction: probabilities (N, C, *space), or logits if `activation` is softmax or sigmoid.
        target: class indices (N, *space) or soft labels (N, C, *space); other shapes: see `arrays`.
        num_bins: equal-width bins of the predicted probability, 2 or more; 20 by default.
        binning: hard or soft, see the module.
        over: which voxels share bins. batch: those of the whole batch. image: those of one image, averaged
            over the image's classes, then over images (the default, as published). class: over images first.
        classes: all, or those present in the target.
        class_weight, background, valid, ignore_index, sync: as in `tversky_loss`.

    Sums are float32 for inputs of lower precision; float64 stays float64. An image without a valid voxel
    leaves the mean. If no voxel is valid, loss and gradient are 0.

    >>> prob, label = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.7, 0.3]]])
    >>> float(calibration_error_loss(prob, label)), float(calibration_error_loss(prob, prob))
    (0.0, 0.0)
    """
    check_options("calibration_error_loss", options, CalibrationKeywords.__annotations__)
    checked = CalibrationOptions(**options)
    return _checked_loss(prediction, target, valid, activation, checked, class_weight, ignore_index)


class CalibrationErrorLoss(nn.Module):
    """`calibration_error_loss` of logits; `activation` is softmax by default.

    >>> loss = CalibrationErrorLoss(binning="soft")
    >>> loss, float(loss(torch.zeros(1, 2, 4), torch.full((1, 2, 4), 0.5)))
    (CalibrationErrorLoss(activation='softmax', num_bins=20, binning='soft', over='image'), 0.0)
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        activation: Activation = "softmax",
        class_weight: Sequence[float] | Tensor | None = None,
        ignore_index: int | None = None,
        **options: Unpack[CalibrationKeywords],
    ) -> None:
        super().__init__()
        check_choice("activation", activation, Activation)
        check_options("CalibrationErrorLoss", options, CalibrationKeywords.__annotations__)
        self.options = CalibrationOptions(**options)
        weight = None if class_weight is None else torch.as_tensor(class_weight, dtype=torch.float32)
        self.register_buffer("class_weight", weight, persistent=False)
        self.activation, self.ignore_index = activation, ignore_index

    def forward(self, logits: Tensor, target: Tensor, valid: Tensor | None = None) -> Float[Tensor, ""]:
        return _checked_loss(
            logits, target, valid, self.activation, self.options, self.class_weight, self.ignore_index
        )

    def extra_repr(self) -> str:
        options = self.options
        return (
            f"activation={self.activation!r}, num_bins={options.num_bins}, binning={options.binning!r}, "
            f"over={options.over!r}"
        )


def _checked_loss(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    activation: Activation,
    options: CalibrationOptions,
    class_weight: Sequence[float] | Tensor | None,
    ignore_index: int | None,
) -> Tensor:
    check_prediction(prediction, activation)
    check_background(prediction, options.background)
    target, valid = check_target(
        prediction, target, activation=activation, valid=valid, ignore_index=ignore_index
    )
    weight = class_weights(class_weight, prediction)
    loss = unchecked_calibration_error(prediction, target, valid, activation, options, weight)
    return check_result(loss, prediction)


def unchecked_calibration_error(
    prediction: Float[Tensor, "N C *space"],
    target: Tensor,
    valid: Tensor | None,
    activation: Activation,
    options: CalibrationOptions,
    weight: Float[Tensor, " C"],
) -> Float[Tensor, ""]:
    """`calibration_error_loss` of checked inputs; ignored voxels must be in `valid` already."""
    # half precision ends here, before the exponential
    prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
    if valid is not None:
        # before the activation: its gradient at NaN or infinity would be NaN
        prediction = torch.where(valid.unsqueeze(1), prediction, 0)
    prob = probability(prediction, activation)
    soft = target.to(prob.dtype) if target.is_floating_point() else one_hot(target, prob.shape[1])
    if not options.background:
        prob, soft, weight = prob[:, 1:], soft[:, 1:], weight[1:]
    counted = torch.ones_like(prob[:, :1]) if valid is None else valid.unsqueeze(1).to(prob.dtype)
    if valid is not None:
        # torch.where and not a product: an ignored voxel may hold NaN
        prob, soft = (torch.where(valid.unsqueeze(1), part, 0) for part in (prob, soft))
    # class predictions without space have one voxel per image
    prob, soft, counted = (
        part.flatten(2) if part.ndim > 2 else part.unsqueeze(-1) for part in (prob, soft, counted)
    )
    gap, mass = _BinSums.apply(prob, soft, counted, options.num_bins, options.binning)
    label_mass = soft.sum(2, dtype=prob.dtype).detach()
    if options.over == "batch":
        gap, mass, label_mass = (part.sum(0, keepdim=True) for part in (gap, mass, label_mass))
        if options.sync:
            gap, mass, label_mass = (sum_across_processes(part) for part in (gap, mass, label_mass))
    share = mass.clamp_max(1).sum(2)
    # |gap| / max(1, mass) is min(1, mass) |gap / mass| without 0 / 0
    error = (gap.abs() / mass.clamp_min(1)).sum(2) / torch.where(share > 0, share, 1)
    is_counted = share > 0
    if options.classes == "present":
        is_counted = is_counted & (label_mass > 0)
    return mean_over_classes_and_images(error, is_counted, weight.to(error.dtype), options.over)


class _BinSums(torch.autograd.Function):
    """The sums gap and mass (N, C, bins) of prob and target (N, C, V); counted (N, 1, V) is 0 or 1.

    gap is the sum of differences: at prob = target it is exactly 0, in any order of additions. A Function
    rather than plain autograd: it saves only its inputs, and no index of 8 bytes per voxel and class.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, y: Tensor, counted: Tensor, num_bins: int, binning: Binning
    ) -> tuple[Tensor, Tensor]:
        difference, counted = (x - y) * counted, counted.expand_as(x)
        if binning == "hard":
            index = _bin_index(x * num_bins, num_bins)
            return _sums_of_bins(difference, index, num_bins), _sums_of_bins(counted, index, num_bins)
        first, share, _ = _soft_bins(x, num_bins)
        gap, mass = (
            _sums_of_bins(part * (1 - share), first, num_bins)
            + _sums_of_bins(part * share, first + 1, num_bins)
            for part in (difference, counted)
        )
        return gap, mass

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, y, counted, ctx.num_bins, ctx.binning = inputs
        ctx.save_for_backward(x, y, counted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, counted = ctx.saved_tensors
        grad_gap, grad_mass = gradients
        if ctx.binning == "hard":
            grad_x = grad_gap.gather(2, _bin_index(x * ctx.num_bins, ctx.num_bins)) * counted
            return grad_x, -grad_x, None, None, None
        first, share, slope = _soft_bins(x, ctx.num_bins)
        gap_first, gap_next = grad_gap.gather(2, first), grad_gap.gather(2, first + 1)
        mass_rise = grad_mass.gather(2, first + 1) - grad_mass.gather(2, first)
        grad_y = -(gap_first + share * (gap_next - gap_first)) * counted
        grad_x = slope * ((gap_next - gap_first) * (x - y) + mass_rise) * counted - grad_y
        return grad_x, grad_y, None, None, None


def _bin_index(position: Tensor, num_bins: int) -> Tensor:
    """The whole part of `position`, within 0 and num_bins - 1.

    NaN, of a network that diverged, is in some bin: an index out of range would stop a GPU.
    """
    return position.detach().long().clamp(0, num_bins - 1)


def _soft_bins(x: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """The lower of the two bins that share a voxel, the share of the next bin, and its derivative."""
    # in bins, from the centre of the first one; beyond the outer centres, one bin has all of a voxel
    position = x * num_bins - 0.5
    first = _bin_index(position, num_bins - 1)
    share = position - first
    inside = (share > 0) & (share < 1)
    return first, share.clamp(0, 1), inside * float(num_bins)


def _sums_of_bins(part: Tensor, index: Tensor, num_bins: int) -> Tensor:
    """The sum of `part` (N, C, V) in each bin, (N, C, bins)."""
    num_voxels = part.shape[2]
    num_sums = min(_NUM_PARTIAL_SUMS, num_voxels)
    offset = torch.arange(num_voxels, device=part.device) % num_sums * num_bins
    sums = part.new_zeros(*part.shape[:2], num_sums * num_bins).scatter_add(2, index + offset, part)
    return sums.view(*part.shape[:2], num_sums, num_bins).sum(2)
