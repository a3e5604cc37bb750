"""Checks that a prediction can be scored against a target.

A target is never decided on behalf of the user: a soft label given to a hard metric is an error.
Unlike losses, metrics read values on every device, because one synchronisation per case costs little.
"""

from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import (
    MAX_CHANNELS_1D,
    WAYS_OUT,
    check_distribution,
    check_prediction,
    check_tensor,
    check_unit_range,
    describe,
    read_target,
    values_are_readable,
)


def check_prob(prob: Tensor, valid: Tensor | None = None) -> None:
    """Raise unless prob holds probabilities (N, C, *space), which sum to one over several channels."""
    check_prediction(prob)
    if not values_are_readable(prob):
        _check_unit_range_on_device("prediction", prob)
    check_distribution("prob", prob, valid, way_out=WAYS_OUT, waits=True)


def check_scored(
    prob: Tensor, target: Tensor, *, valid: Tensor | None = None, ignore_index: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Raise unless prob and target follow the contract; return target and valid as `arrays.read_target`.

    prob may be bool, one mask per channel, for scores that decide.
    """
    is_mask = isinstance(prob, Tensor) and prob.dtype == torch.bool
    if is_mask:
        _check_masks(prob)
    else:
        check_prediction(prob)
    # of a mask, the target is read as that of probabilities of the same shape
    like = prob.new_zeros((), dtype=torch.float32).expand(prob.shape) if is_mask else prob
    target, valid = read_target(like, target, valid=valid, ignore_index=ignore_index)
    if not is_mask:
        check_prob(prob, valid)
    if not values_are_readable(prob) and target.is_floating_point():
        counted = target if valid is None else target.masked_fill(~valid.unsqueeze(1), 0)
        _check_unit_range_on_device("target", counted)
    return target, valid


def _check_masks(masks: Tensor) -> None:
    check_tensor("masks", masks)
    if masks.ndim < 2 or masks.numel() == 0:
        raise ValueError(f"masks must be bool (N, C, *space) with a voxel; got {describe(masks)}")
    if masks.ndim == 3 and masks.shape[1] > MAX_CHANNELS_1D:
        raise ValueError(
            f"masks {describe(masks)} would be {masks.shape[1]} channels with one axis of space: "
            "add the class axis, masks.unsqueeze(1)"
        )


def check_empty(empty: object) -> None:
    """Raise unless `empty`, the score of two empty masks, is a number."""
    if not isinstance(empty, Real):
        raise ValueError(f"empty, the score of two empty masks, must be a number or NaN; got {empty!r}")


def _check_unit_range_on_device(name: str, tensor: Tensor) -> None:
    check_unit_range(name, torch.stack(tensor.aminmax()).cpu())


def check_hard_target(
    metric: str,
    target: Float[Tensor, "N C *space"] | Tensor,
    prob: Tensor,
    *,
    valid: Bool[Tensor, "N *space"] | None,
    full_target: Tensor | None = None,
) -> None:
    """Raise if a float target is soft, or not one-hot although the most probable class of prob is decided.

    full_target: what the message describes, if `target` is a part of it.
    """
    if not target.is_floating_point():
        return
    full_target = target if full_target is None else full_target
    counted = target if valid is None else torch.where(valid.unsqueeze(1), target, 0)
    between = (counted != 0) & (counted != 1)
    if bool(between.any()):
        value = float(counted[between][0])
        raise ValueError(
            f"{metric} needs a hard target, 0 and 1 or class indices; got a soft label "
            f"{describe(full_target)} with values such as {value:.4g}: decide yourself, by "
            "labels.majority_label(masks) or (target > 0.5).float(), or use soft_dice_score or "
            "binarized_dice_score"
        )
    if prob.dtype == torch.bool or prob.shape[1] == 1:
        return
    total = counted.sum(1)
    wrong = total != 1 if valid is None else (total != 1) & valid
    if bool(wrong.any()):
        raise ValueError(
            f"{metric} takes the most probable class, so a float target must be one-hot; got "
            f"{describe(full_target)} where {int(wrong.sum())} voxels hold no class or several: pass class "
            "indices, or masks, prob > 0.5, if each channel is a separate mask"
        )
