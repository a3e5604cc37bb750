"""From probabilities to a decision, and the check that a target can be scored at all.

A hard metric compares decided masks. The rule: one channel is foreground where prob > threshold (1/2 unless
told otherwise; a tie is background, as in `labels.majority_label`); several channels take the most probable
class, the lowest at a tie; several sigmoid channels are thresholded each with decision="threshold".
A target is never decided on behalf of the user: a soft label given to a hard metric is an error.

Unlike losses, metrics read values on every device: a synchronisation per case costs nothing here.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from ..arrays import (
    check_choice,
    check_prediction,
    check_target,
    check_unit_range,
    describe,
    one_hot,
    values_are_readable,
)

Decision = Literal["argmax", "threshold"]


def check_scored(
    prob: Tensor, target: Tensor, *, valid: Tensor | None = None, ignore_index: int | None = None
) -> Tensor | None:
    """Raise unless prob and target keep the contract of `arrays`; `valid` with `ignore_index` folded in."""
    check_prediction(prob, "none")
    valid = check_target(prob, target, valid=valid, ignore_index=ignore_index)
    if not values_are_readable(prob):
        _check_unit_range_on_device("prediction", prob)
        if target.is_floating_point():
            counted = target if valid is None else target.masked_fill(~valid.unsqueeze(1), 0)
            _check_unit_range_on_device("target", counted)
    return valid


def chosen_rule(decision: Decision | None, num_channels: int) -> Decision:
    """The rule that applies: the one named, or threshold for one channel and argmax for several.

    >>> chosen_rule(None, 1), chosen_rule(None, 3)
    ('threshold', 'argmax')
    """
    if decision is None:
        return "threshold" if num_channels == 1 else "argmax"
    check_choice("decision", decision, Decision)
    if decision == "argmax" and num_channels == 1:
        raise ValueError("decision='argmax' of one channel is 0 everywhere: use decision='threshold'")
    return decision


def decided_masks(prob: Tensor, *, rule: Decision, threshold: float) -> Iterator[Tensor]:
    """Bool (N, *space) for each channel in turn: where it is decided for. One mask in memory at a time."""
    classes = prob.argmax(1) if rule == "argmax" else None
    for channel in range(prob.shape[1]):
        yield prob[:, channel] > threshold if classes is None else classes == channel


def decide(prob: Tensor, *, decision: Decision | None = None, threshold: float = 0.5) -> Tensor:
    """Float32 masks (N, C, *space) of 0 and 1: what a hard metric compares, or a next step can store.

    >>> decide(torch.tensor([[0.2, 0.5, 0.3]])), decide(torch.tensor([[0.5]]))
    (tensor([[0., 1., 0.]]), tensor([[0.]]))
    """
    check_prediction(prob, "none")
    if chosen_rule(decision, prob.shape[1]) == "threshold":
        return (prob > threshold).float()
    return one_hot(prob.argmax(1), prob.shape[1]).float()


def check_hard_target(
    metric: str, target: Tensor, *, rule: Decision, valid: Tensor | None, whole: Tensor | None = None
) -> None:
    """Raise if a float target holds a value between 0 and 1, or is no one-hot label where classes exclude.

    whole: what the message describes, if `target` is a part of it.
    """
    whole = target if whole is None else whole
    if not target.is_floating_point():
        return
    counted = target if valid is None else torch.where(valid.unsqueeze(1), target, 0)
    between = (counted != 0) & (counted != 1)
    if bool(between.any()):
        value = float(counted[between][0])
        raise ValueError(
            f"{metric} needs a hard target, 0 and 1 or class indices; got a soft label {describe(whole)} "
            f"with values such as {value:.4g}: decide yourself, by labels.majority_label(masks) or "
            "(target > 0.5).float(), or use soft_dice_score or binarized_dice_score"
        )
    if rule == "threshold":
        return
    total = counted.sum(1)
    wrong = total != 1 if valid is None else (total != 1) & valid
    if bool(wrong.any()):
        raise ValueError(
            f"{metric} takes the most probable class, so a float target must be one-hot; got "
            f"{describe(whole)} where {int(wrong.sum())} voxels hold no class or several: pass class "
            "indices, or decision='threshold' if each channel is a mask of its own"
        )


def _check_unit_range_on_device(name: str, tensor: Tensor) -> None:
    check_unit_range(name, torch.stack(tensor.aminmax()).cpu())


def cases_with_voxels(prob: Tensor, valid: Tensor | None) -> Tensor:
    """Bool (N,): whether a case has a valid voxel; the score of one that has none is NaN."""
    if valid is None:
        return torch.ones(len(prob), dtype=torch.bool, device=prob.device)
    return valid.flatten(1).any(1) if valid.ndim > 1 else valid
