"""Everything a loss needs of a batch, as sums over the valid voxels of each image and class (N, C).

    overlap   tp, fp and fn in one of the `forms`
    entropy   sum of -y log p;                        sigmoid: sum of the binary cross entropy
    mass      sum of y, the weight of these entropies; sigmoid: number of valid voxels

Scores and losses are small functions of these numbers. This is their definition, in plain operations; the
`kernels` compute the same numbers with less memory traffic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, one_hot
from .options import SumsOptions
from .stats import OverlapStats, unchecked_overlap_stats


class SegmentationSums(NamedTuple):
    """The sums of a batch; a sum that was not asked for is None."""

    overlap: OverlapStats | None
    entropy: Float[Tensor, "N C"] | None
    mass: Float[Tensor, "N C"] | None


def reference_sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
) -> SegmentationSums:
    """The sums of checked inputs."""
    activation, form, entropy = options
    # half precision ends here, before the exponential
    prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
    if valid is not None:
        # before the activation: it would turn a NaN of an ignored voxel into a gradient of NaN
        prediction = torch.where(valid.unsqueeze(1), prediction, 0)
    overlap = None
    if form is not None:
        prob = probability(prediction, activation)
        overlap = unchecked_overlap_stats(prob, target, form=form, valid=valid)
    entropy_sums = _entropy_sums(prediction, target, activation, valid) if entropy else (None, None)
    return SegmentationSums(overlap, *entropy_sums)


def requested_sums(sums: Sequence[Tensor], options: SumsOptions) -> SegmentationSums:
    """The record of tp, fp, fn, entropy and mass, without those that were not requested."""
    tp, fp, fn, entropy, mass = sums
    overlap = None if options.form is None else OverlapStats(tp, fp, fn)
    return SegmentationSums(overlap, *((entropy, mass) if options.entropy else (None, None)))


def reference_gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    options: SumsOptions,
    gradients: Sequence[Tensor],
) -> Tensor:
    """Gradient in the prediction from the gradients of tp, fp, fn and entropy; it is differentiable."""
    sums = reference_sums(prediction, target, valid, options)
    outputs = [*(sums.overlap or ()), *(() if sums.entropy is None else (sums.entropy,))]
    incoming = [*(gradients[:3] if sums.overlap else ()), *(gradients[3:4] if options.entropy else ())]
    (gradient,) = torch.autograd.grad(outputs, prediction, incoming, create_graph=True)
    return gradient


def probability(prediction: Tensor, activation: Activation) -> Tensor:
    """The prediction after `activation`."""
    if activation == "softmax":
        return prediction.softmax(1)
    return prediction.sigmoid() if activation == "sigmoid" else prediction


def _entropy_sums(
    prediction: Tensor, target: Tensor, activation: Activation, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    soft = target if target.is_floating_point() else one_hot(target, prediction.shape[1])
    soft = soft.to(prediction.dtype)
    if valid is not None:
        # torch.where and not a product: an ignored voxel may hold NaN
        soft = torch.where(valid.unsqueeze(1), soft, 0)
    if activation == "sigmoid":
        entropy = F.binary_cross_entropy_with_logits(prediction, soft, reduction="none")
        mass = torch.ones_like(soft)
        if valid is not None:
            entropy, mass = (torch.where(valid.unsqueeze(1), part, 0) for part in (entropy, mass))
    else:
        entropy, mass = -soft * log_probability(prediction, activation), soft
    if entropy.ndim == 2:
        return entropy, mass
    space = tuple(range(2, entropy.ndim))
    return entropy.sum(space), mass.sum(space)


def log_probability(prediction: Tensor, activation: Activation) -> Tensor:
    """Logarithm of the softmax, or of probabilities; those below the smallest normal number count as it."""
    if activation == "softmax":
        return prediction.log_softmax(1)
    return prediction.clamp_min(torch.finfo(prediction.dtype).tiny).log()
