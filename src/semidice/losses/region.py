"""From the sums of a batch to its region loss: the Tversky index, made focal or logarithmic, and averaged.

    loss = mean over classes and images of (1 - index)^gamma  or  (-log index)^gamma

Left out: where the sums come from (`kernels`), and cross entropy (`cross_entropy`).
"""

from typing import Literal, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from ..overlap.stats import OverlapStats, sum_over_images, tversky_error
from ..overlap.sums import SegmentationSums

Over = Literal["batch", "image", "class"]
Classes = Literal["all", "present"]

# -log of the index is held here, so a class that is missed altogether costs 16 and not infinity
MIN_INDEX = 1e-7


class IndexOptions(TypedDict, total=False):
    """What becomes of the overlap; meanings and defaults as in `losses.tversky_loss`."""

    gamma: float
    log: bool
    smooth: float
    over: Over
    classes: Classes
    background: bool


def region_loss_of(
    sums: SegmentationSums,
    weight: Float[Tensor, " C"],
    alpha: float,
    beta: float,
    *,
    sync: bool = False,
    gamma: float = 1.0,
    log: bool = False,
    smooth: float = 0.0,
    over: Over = "batch",
    classes: Classes = "all",
    background: bool = True,
) -> Float[Tensor, ""]:
    """`tversky_loss` from the sums of a batch."""
    assert sums.overlap is not None
    stats, weight = sums.overlap, weight.to(sums.overlap.tp.dtype)
    if not background:
        stats, weight = OverlapStats(*(part[:, 1:] for part in stats)), weight[1:]
    if over == "batch":
        stats = sum_over_images(stats, sync=sync)
    loss = tversky_error(stats, alpha=alpha, beta=beta, smooth=smooth)
    if log:
        loss = -torch.log1p(-loss.clamp_max(1 - MIN_INDEX))
    # In every form, tp + fn is 0 exactly where the target is 0 throughout.
    counted = stats.tp + stats.fn > 0 if classes == "present" else torch.ones_like(loss, dtype=torch.bool)
    return _mean(_focal(loss, gamma), counted, weight, over)


def _focal(loss: Tensor, gamma: float) -> Tensor:
    if gamma == 1:
        return loss
    # The slope of loss ** gamma at 0 is infinite for gamma < 1; at the minimum the gradient is to be 0.
    positive = loss > 0
    return torch.where(positive, torch.where(positive, loss, 1) ** gamma, 0)


def _mean(loss: Tensor, counted: Tensor, weight: Tensor, over: Over) -> Tensor:
    """Mean of `loss` (N, C) over classes then images, or over images then classes, of what is counted."""
    weights = counted * weight
    if over == "class":
        per_class = _weighted_mean(loss, counted.to(loss.dtype), dim=0)
        return _weighted_mean(per_class, weights.amax(0), dim=0)
    per_image = _weighted_mean(loss, weights, dim=1)
    return _weighted_mean(per_image, (weights.amax(1) > 0).to(loss.dtype), dim=0)


def _weighted_mean(values: Tensor, weight: Tensor, *, dim: int) -> Tensor:
    total = weight.sum(dim)
    return (values * weight).sum(dim) / torch.where(total > 0, total, 1)
