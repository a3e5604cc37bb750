"""From probabilities to masks and class maps, by a threshold or by the most probable class.

The rule: one channel is foreground where prob > threshold (1/2 by default; a tie is background, as in
`labels.majority_label`). Several channels take the most probable class, the lowest one at a tie. Several
sigmoid channels are each compared with the threshold if decision="threshold".
"""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ..arrays import check_choice, check_prediction, one_hot

PlainRule = Literal["argmax", "threshold"]


def chosen_rule(decision: PlainRule | None, num_channels: int) -> PlainRule:
    """The rule that applies: `decision`, or if it is None threshold for one channel and argmax for several.

    >>> chosen_rule(None, 1), chosen_rule(None, 3)
    ('threshold', 'argmax')
    """
    if decision is None:
        return "threshold" if num_channels == 1 else "argmax"
    check_choice("decision", decision, PlainRule)
    if decision == "argmax" and num_channels == 1:
        raise ValueError("decision='argmax' of one channel is 0 everywhere: use decision='threshold'")
    return decision


def decided_classes(
    prob: Float[Tensor, "N C *space"], *, threshold: float | None = None
) -> Integer[Tensor, "N *space"]:
    """Class map of the most probable class of each voxel, the lowest one at a tie; uint8 up to 256 classes.

    With a threshold, a voxel is foreground if its foreground classes together have a higher probability; it
    gets the most probable of them. For two classes, argmax equals the threshold 0.5.

    >>> prob = torch.tensor([[[0.5, 0.6, 0.2], [0.1, 0.1, 0.5], [0.4, 0.3, 0.3]]])
    >>> decided_classes(prob), decided_classes(prob, threshold=0.45)
    (tensor([[0, 0, 1]], dtype=torch.uint8), tensor([[2, 0, 1]], dtype=torch.uint8))
    """
    num_classes = prob.shape[1]
    first = 0 if threshold is None else 1
    highest = prob[:, first]
    dtype = torch.uint8 if num_classes <= 256 else torch.int64
    classes = torch.full_like(highest, first, dtype=dtype)
    # comparisons one class after the other are several times faster than argmax on a CPU
    for number in range(first + 1, num_classes):
        higher = prob[:, number] > highest
        classes.masked_fill_(higher, number)
        highest = torch.where(higher, prob[:, number], highest)
    if threshold is None:
        return classes
    foreground = prob[:, 1]
    for number in range(2, num_classes):
        foreground = foreground + prob[:, number]
    return torch.where(foreground > threshold, classes, 0)


def decided_masks(prob: Tensor, *, rule: PlainRule, threshold: float) -> Iterator[Tensor]:
    """The decided mask, bool (N, *space), of each channel in turn; one mask is in memory at a time."""
    classes = decided_classes(prob) if rule == "argmax" else None
    for channel in range(prob.shape[1]):
        yield prob[:, channel] > threshold if classes is None else classes == channel


def decide(prob: Tensor, *, decision: PlainRule | None = None, threshold: float = 0.5) -> Tensor:
    """Float32 masks (N, C, *space) of 0 and 1, as hard metrics compare them.

    >>> decide(torch.tensor([[0.2, 0.5, 0.3]])), decide(torch.tensor([[0.5]]))
    (tensor([[0., 1., 0.]]), tensor([[0.]]))
    """
    check_prediction(prob)
    if chosen_rule(decision, prob.shape[1]) == "threshold":
        return (prob > threshold).float()
    return one_hot(decided_classes(prob), prob.shape[1]).float()
