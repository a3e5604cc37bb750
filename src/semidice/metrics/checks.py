"""Checks that a prediction can be scored against a target.

A target is never decided on behalf of the user: a soft label given to a hard metric is an error.
Unlike losses, metrics read values on every device and at every voxel. Channels of a sigmoid network sum to
one nearly everywhere but at the edges of objects: a sample of the voxels would miss a small one.
"""

from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import (
    WAYS_OUT,
    check_prediction,
    check_unit_range,
    describe,
    read_target,
    values_are_readable,
)
from ..arrays import check_prob as check_masks
from .slabs import slabs


def check_prob(prob: Tensor, valid: Tensor | None = None) -> None:
    """Raise unless prob holds probabilities (N, C, *space), which sum to one over several channels."""
    check_prediction(prob)
    _check_values(prob, valid)


def check_scored(
    prob: Tensor,
    target: Tensor,
    *,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    hard: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Raise unless prob and target follow the contract; return target and valid as `arrays.read_target`.

    hard: name of a score that decides. Its target must be hard, and prob may be bool, one mask per channel.
    """
    if hard and isinstance(prob, Tensor) and prob.dtype == torch.bool:
        check_masks(prob)
        # the target is read as that of probabilities of the same shape
        like = prob.new_zeros((), dtype=torch.float32).expand(prob.shape)
        target, valid = read_target(like, target, valid=valid, ignore_index=ignore_index)
    else:
        check_prediction(prob)
        target, valid = read_target(prob, target, valid=valid, ignore_index=ignore_index)
        _check_values(prob, valid)
    if target.is_floating_point():
        _check_unit_range_on_device("target", target, valid)
        if hard:
            _check_hard(hard, prob, target, valid)
    return target, valid


def _check_values(prob: Tensor, valid: Tensor | None) -> None:
    _check_unit_range_on_device("prediction", prob)
    if prob.shape[1] == 1:
        return
    ends = []
    for slab in slabs(prob, prob, valid):
        total = slab.prob.sum(1)
        ends.append(
            torch.stack((total if slab.valid is None else torch.where(slab.valid, total, 1)).aminmax())
        )
    low, high = torch.stack(ends).T.cpu()
    # bfloat16 rounds each probability by up to 0.4 %
    if low.min() < 1 - 2e-2 or high.max() > 1 + 2e-2:
        raise ValueError(
            f"prob must sum to one over its classes; got {describe(prob)} with sums from {low.min():.4g} to "
            f"{high.max():.4g}: {WAYS_OUT}"
        )


def _check_unit_range_on_device(name: str, tensor: Tensor, valid: Tensor | None = None) -> None:
    """`check_unit_range` where it does not read values, because it would have to wait."""
    if not values_are_readable(tensor):
        counted = tensor if valid is None else tensor.masked_fill(~valid.unsqueeze(1), 0)
        check_unit_range(name, torch.stack(counted.aminmax()).cpu())


def _check_hard(metric: str, prob: Tensor, target: Float[Tensor, "N C *space"], valid: Tensor | None) -> None:
    """Raise for a soft label, and for one that is not one-hot although the most probable class is decided."""
    for slab in slabs(prob, target, valid):
        counted = slab.target if slab.valid is None else torch.where(slab.valid.unsqueeze(1), slab.target, 0)
        between = counted[(counted != 0) & (counted != 1)]
        if len(between):
            raise ValueError(
                f"{metric} needs a hard target, 0 and 1 or class indices; got a soft label "
                f"{describe(target)} with values such as {float(between[0]):.4g}: decide yourself, by "
                "labels.majority_label(masks) or (target > 0.5).float(), or use soft_dice_score or "
                "binarized_dice_score"
            )
        if prob.dtype == torch.bool or prob.shape[1] == 1:
            continue
        wrong = counted.sum(1) != 1
        if bool((wrong if slab.valid is None else wrong & slab.valid).any()):
            raise ValueError(
                f"{metric} takes the most probable class, so a float target must be one-hot; got "
                f"{describe(target)} where voxels hold no class or several: pass class indices, or masks, "
                "prob > 0.5, if each channel is a separate mask"
            )


def check_empty(empty: object) -> None:
    """Raise unless `empty`, the score of two empty masks, is a number."""
    if not isinstance(empty, Real):
        raise ValueError(f"empty, the score of two empty masks, must be a number or NaN; got {empty!r}")
