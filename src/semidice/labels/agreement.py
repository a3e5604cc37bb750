"""How well the raters of a case agree: Dice of each rater against the majority and against each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ..arrays import one_hot
from ..overlap.stats import overlap_stats, tversky_index
from .raters import Array, Present, Raters, read_raters, to_input_type


@dataclass(frozen=True)
class RaterAgreement(Generic[Array]):
    """Dice of each rater against the majority, (R,), and of each pair, (R, R); NaN for absent raters."""

    majority: Array
    pairwise: Array


def dice_weights(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """Dice of each rater against the majority label, (R,) or (N, R); 0 for an absent rater; not normalised.

    With more than two classes it is the mean over the foreground classes. Two empty masks have Dice 1.

    >>> dice_weights(np.array([[True, True, False], [True, True, False], [False, True, True]]))
    array([1. , 1. , 0.5], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    return to_input_type(majority_dice(raters), masks, batched)


def rater_agreement(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> RaterAgreement[Array]:
    """Dice of each rater against the majority label and against each other; NaN for absent raters.

    With more than two classes it is the mean over the foreground classes. Two empty masks have Dice 1.

    >>> rater_agreement(np.array([[True, True], [True, False]])).pairwise.round(3)
    array([[1.   , 0.667],
           [0.667, 1.   ]], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    present_of = raters.present
    majority = _dice_against(raters, raters.majority()).masked_fill(~present_of, torch.nan)
    # one rater at a time: all pairs at once would take R times the memory of the masks
    pairwise = torch.stack([_dice_against(raters, classes) for classes in raters.classes.unbind(1)], 2)
    pairwise = pairwise.masked_fill(~(present_of.unsqueeze(1) & present_of.unsqueeze(2)), torch.nan)
    return RaterAgreement(to_input_type(majority, masks, batched), to_input_type(pairwise, masks, batched))


def majority_dice(raters: Raters) -> Float[Tensor, "N R"]:
    """Dice of each rater against the majority; 0 for an absent rater."""
    return _dice_against(raters, raters.majority()) * raters.present


def _dice_against(raters: Raters, reference: Integer[Tensor, "N *space"]) -> Float[Tensor, "N R"]:
    """Dice of each rater against one class map per case, mean over the foreground classes."""
    drawn = raters.votes()[:, :, 1:].float()
    target = one_hot(reference, raters.num_classes)[:, None, 1:].float().expand_as(drawn)
    stats = overlap_stats(drawn.flatten(0, 1), target.flatten(0, 1))
    return tversky_index(stats, alpha=0.5, beta=0.5).mean(1).view(raters.present.shape)
