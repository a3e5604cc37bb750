"""Average calibration error as a term of a loss, for hard and soft labels (Barfoot et al., 2024: mL1-ACE).

    gap_b  = sum_i w_b(x_i) (x_i - y_i)          mass_b = sum_i w_b(x_i)
    loss   = sum_b min(1, mass_b) |gap_b / mass_b|  /  sum_b min(1, mass_b)

over the valid voxels i of one image and class (marginal: each class against the rest); then the mean over
classes and images. "hard" bins: w_b(x) is 1 if x is in [b/B, (b+1)/B), else 0, and only x has a gradient.
"soft" bins: w_b is a triangle from one neighbouring centre to the other, so membership has a gradient too.
With hard bins, min(1, mass) is 1 for a bin with voxels and 0 for an empty one: the mean over non-empty bins.
Decided here: with soft bins, less than one voxel counts less. So a bin appears without a jump of the loss,
and gradients are bounded. The backward pass keeps about 20 bytes per voxel and class.

Loss and gradient are exactly 0 at x = y. This is not the only minimum: every calibrated prediction has the
loss 0, also the mean label everywhere. So it is a term to add to other losses, not a loss on its own.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, class_weights
from ..overlap import clear_ignored, cleared, mean_over_classes_and_images, probability, sum_across_processes
from .options import LossOptions

# Neighbouring voxels add to different partial sums. A GPU adds atomically, and most voxels of an image are in
# the same bin; and a float32 that counts voxels one by one would stop at 2^24.
_NUM_PARTIAL_SUMS = 128


def calibration_error_of(
    prediction: Float[Tensor, "N C *space"],
    target: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
    sync: bool,
) -> Float[Tensor, ""]:
    """The error of checked inputs; ignored voxels must be in `valid` already.

    An image without a valid voxel leaves the mean; if no voxel is valid, the error is 0.
    """
    weight = class_weights(weight, prediction)
    prediction, soft = cleared(prediction, target, valid)
    prob = clear_ignored(probability(prediction, activation), valid)
    counted = clear_ignored(torch.ones_like(prob[:, :1]), valid)
    if not options.background:
        prob, soft, weight = prob[:, 1:], soft[:, 1:], weight[1:]
    # class predictions without space have one voxel per image
    prob, soft, counted = (
        part.flatten(2) if part.ndim > 2 else part.unsqueeze(-1) for part in (prob, soft, counted)
    )
    gap, mass = _sums_of_bins(prob, soft, counted, options)
    label_mass = soft.sum(2, dtype=prob.dtype).detach()
    if options.over == "batch":
        gap, mass, label_mass = (part.sum(0, keepdim=True) for part in (gap, mass, label_mass))
        if sync:
            gap, mass, label_mass = (sum_across_processes(part) for part in (gap, mass, label_mass))
    share = mass.clamp_max(1).sum(2)
    # |gap| / max(1, mass) is min(1, mass) |gap / mass| without 0 / 0
    error = (gap.abs() / mass.clamp_min(1)).sum(2) / torch.where(share > 0, share, 1)
    is_counted = share > 0
    if options.classes == "present":
        is_counted = is_counted & (label_mass > 0)
    return mean_over_classes_and_images(error, is_counted, weight.to(error.dtype), options.over)


def _sums_of_bins(x: Tensor, y: Tensor, counted: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The sums gap and mass (N, C, bins) of prob and target (N, C, V); counted (N, 1, V) is 0 or 1.

    gap is the sum of differences: at prob = target it is exactly 0, in any order of additions.
    """
    num_bins, difference, counted = options.calibration_bins, (x - y) * counted, counted.expand_as(x)
    if options.calibration_binning == "hard":
        index = _whole_part(x * num_bins, num_bins - 1)
        return _sums(difference, index, num_bins), _sums(counted, index, num_bins)
    # in bins, from the centre of the first one; beyond the outer centres, one bin has all of a voxel
    position = x * num_bins - 0.5
    first = _whole_part(position, num_bins - 2)
    share = position - first
    # no gradient at the centres, where it jumps
    share = torch.where((share > 0) & (share < 1), share, share.detach().clamp(0, 1))
    gap, mass = (
        _sums(part * (1 - share), first, num_bins) + _sums(part * share, first + 1, num_bins)
        for part in (difference, counted)
    )
    return gap, mass


def _whole_part(position: Tensor, highest: int) -> Tensor:
    """The whole part of `position`, within 0 and `highest`.

    NaN, of a network that diverged, is in some bin: an index out of range would stop a GPU.
    """
    return position.detach().long().clamp(0, highest)


def _sums(part: Tensor, index: Tensor, num_bins: int) -> Tensor:
    """The sum of `part` (N, C, V) in each bin, (N, C, bins)."""
    num_voxels = part.shape[2]
    num_sums = min(_NUM_PARTIAL_SUMS, num_voxels)
    offset = torch.arange(num_voxels, device=part.device) % num_sums * num_bins
    sums = part.new_zeros(*part.shape[:2], num_sums * num_bins).scatter_add(2, index + offset, part)
    return sums.view(*part.shape[:2], num_sums, num_bins).sum(2)
