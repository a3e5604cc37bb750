"""From the sums of a batch to its losses: cross entropy, region loss, and their weighted sum.

    cross entropy = sum_c w_c entropy_c / sum_c w_c mass_c
    region loss   = mean over classes and images of (1 - index)^gamma  or  (-log index)^gamma

This is the definition, in plain operations; `kernels` compute the same numbers in fewer launches.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import Activation, check_prediction, check_target, describe
from .options import MixtureOptions, Over, RegionOptions
from .stats import OverlapStats, sum_across_processes, sum_over_images, tversky_error
from .sums import SegmentationSums

# -log of the index stops here: a class that is missed completely costs 16, not infinity
MIN_INDEX = 1e-7


class Losses(NamedTuple):
    """The weighted total; and its terms, cross entropy and region loss, if they were asked for.

    A term of weight 0 is not computed and is 0.
    """

    total: Tensor
    terms: tuple[Tensor, ...]


def check_batch(prediction: Tensor, target: Tensor, valid: Tensor | None, options: MixtureOptions) -> Tensor:
    """Raise unless the losses can be computed for this batch; return the target as `arrays.read_target` does.

    Ignored voxels must be in `valid` already.
    """
    activation, form, entropy = options.sums
    check_prediction(prediction, activation)
    target, _ = check_target(prediction, target, activation=activation, valid=valid)
    if entropy:
        check_entropy(prediction, activation)
    if form is not None:
        check_background(prediction, options.region.background)
    return target


def check_background(prediction: Tensor, background: bool) -> None:
    """Raise if no class is left without the background."""
    if not background and prediction.shape[1] == 1:
        raise ValueError(
            "background=False leaves no class of a one-channel prediction; "
            f"got {describe(prediction)}: use background=True"
        )


def check_entropy(prediction: Tensor, activation: Activation) -> None:
    """Raise if the prediction is one channel of probabilities, whose other class is not known."""
    if activation == "none" and prediction.shape[1] == 1:
        raise ValueError(
            f"cross entropy of one channel needs logits and activation='sigmoid'; got {describe(prediction)}"
        )


def losses_of(
    sums: SegmentationSums, weight: Float[Tensor, " C"], options: MixtureOptions, *, parts: bool
) -> Losses:
    """The losses from the sums of a batch."""
    _, region, cross_entropy_weight, region_weight = options
    cross_entropy = region_loss = torch.zeros((), device=weight.device)
    if cross_entropy_weight > 0:
        cross_entropy = cross_entropy_of(sums, weight, region.sync)
    if region_weight > 0:
        region_loss = region_loss_of(sums, weight, region)
    total = region_loss
    if parts or cross_entropy_weight > 0 or region_weight != 1:
        total = cross_entropy_weight * cross_entropy + region_weight * region_loss
    return Losses(total, (cross_entropy, region_loss) if parts else ())


def cross_entropy_of(sums: SegmentationSums, weight: Float[Tensor, " C"], sync: bool) -> Float[Tensor, ""]:
    """The weighted mean from the sums of a batch; with `sync`, from the batches of all processes."""
    assert sums.entropy is not None
    assert sums.mass is not None
    weight = weight.to(sums.entropy.dtype)
    totals = torch.stack([(sums.entropy * weight).sum(), (sums.mass * weight).sum()])
    if sync:
        totals = sum_across_processes(totals)
    return totals[0] / torch.where(totals[1] > 0, totals[1], 1)


def region_loss_of(
    sums: SegmentationSums, weight: Float[Tensor, " C"], options: RegionOptions
) -> Float[Tensor, ""]:
    """`losses.tversky_loss` from the sums of a batch."""
    assert sums.overlap is not None
    stats, weight = sums.overlap, weight.to(sums.overlap.tp.dtype)
    if not options.background:
        stats, weight = OverlapStats(*(part[:, 1:] for part in stats)), weight[1:]
    if options.over == "batch":
        stats = sum_over_images(stats, sync=options.sync)
    loss = tversky_error(stats, alpha=options.alpha, beta=options.beta, smooth=options.smooth)
    if options.log:
        loss = -torch.log1p(-loss.clamp_max(1 - MIN_INDEX))
    counted = torch.ones_like(loss, dtype=torch.bool)
    if options.classes == "present":
        # In every form, tp + fn is 0 exactly if the target is 0 everywhere.
        counted = stats.tp + stats.fn > 0
    return mean_over_classes_and_images(focal(loss, options.gamma), counted, weight, options.over)


def focal(loss: Tensor, gamma: float) -> Tensor:
    """`loss` to the power of gamma; at 0 the gradient is 0, also for gamma below 1."""
    if gamma == 1:
        return loss
    # for gamma < 1 the slope at 0 is infinite, but the gradient at the minimum must be 0
    positive = loss > 0
    return torch.where(positive, torch.where(positive, loss, 1) ** gamma, 0)


def mean_over_classes_and_images(
    loss: Float[Tensor, "N C"], counted: Bool[Tensor, "N C"], weight: Float[Tensor, " C"], over: Over
) -> Float[Tensor, ""]:
    """Mean of the counted entries of `loss` (N, C); over="class" averages over images first."""
    weights = counted * weight
    if over == "class":
        per_class = _weighted_mean(loss, counted.to(loss.dtype), dim=0)
        return _weighted_mean(per_class, weights.amax(0), dim=0)
    per_image = _weighted_mean(loss, weights, dim=1)
    return _weighted_mean(per_image, (weights.amax(1) > 0).to(loss.dtype), dim=0)


def _weighted_mean(values: Tensor, weight: Tensor, *, dim: int) -> Tensor:
    total = weight.sum(dim)
    return (values * weight).sum(dim) / torch.where(total > 0, total, 1)
