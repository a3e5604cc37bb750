"""Checks that a prediction can be scored against a target.

A target is never decided on behalf of the user: a soft label given to a hard metric is an error.
Unlike losses, metrics read values on every device, because one synchronisation per case costs little.
"""

from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import (
    check_number,
    check_prediction,
    check_target,
    check_unit_range,
    describe,
    values_are_readable,
)


def check_scored(
    prob: Tensor, target: Tensor, *, valid: Tensor | None = None, ignore_index: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Raise unless prob and target follow the contract; return target and valid as `arrays.read_target`."""
    check_prediction(prob)
    target, valid = check_target(prob, target, valid=valid, ignore_index=ignore_index)
    if not values_are_readable(prob):
        _check_unit_range_on_device("prediction", prob)
        if target.is_floating_point():
            counted = target if valid is None else target.masked_fill(~valid.unsqueeze(1), 0)
            _check_unit_range_on_device("target", counted)
    return target, valid


def check_rule_numbers(*, threshold: object = 0.5, empty: object = 1.0) -> None:
    """Raise unless the threshold lies in [0, 1], and `empty`, the score of two empty masks, is a number."""
    check_number(threshold=threshold)
    if not 0 <= float(threshold) <= 1:  # type: ignore[arg-type]
        raise ValueError(f"threshold must lie in [0, 1]; got {threshold}")
    if not isinstance(empty, Real):
        raise ValueError(f"empty, the score of two empty masks, must be a number or NaN; got {empty!r}")


def _check_unit_range_on_device(name: str, tensor: Tensor) -> None:
    check_unit_range(name, torch.stack(tensor.aminmax()).cpu())


def check_hard_target(
    metric: str, target: Tensor, *, one_hot: bool, valid: Tensor | None, full_target: Tensor | None = None
) -> None:
    """Raise if a float target holds a value between 0 and 1, or is not one-hot although it must be.

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
    if not one_hot:
        return
    total = counted.sum(1)
    wrong = total != 1 if valid is None else (total != 1) & valid
    if bool(wrong.any()):
        raise ValueError(
            f"{metric} takes the most probable class, so a float target must be one-hot; got "
            f"{describe(full_target)} where {int(wrong.sum())} voxels hold no class or several: pass class "
            "indices, or decision='threshold' if each channel is a separate mask"
        )


def check_sums_to_one(prob: Float[Tensor, "n C v"], valid: Bool[Tensor, "n v"] | None) -> None:
    """Raise unless several channels are probabilities of exclusive classes."""
    if prob.shape[1] == 1:
        return
    # bfloat16 keeps 8 bits, so softmax of many classes may be off by a percent
    off = (prob.sum(1) - 1).abs() > 2e-2
    if valid is not None:
        off &= valid
    if bool(off.any()):
        total = float(prob.sum(1)[off][0])
        raise ValueError(
            f"probabilities of classes must sum to one over the channels; got {describe(prob)} with a sum of "
            f"{total:.4g}: apply softmax, or score each sigmoid channel on its own, prob[:, c : c + 1]"
        )
