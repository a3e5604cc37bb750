"""From the masks of several raters to one label, probabilities (C, *space); how well the raters agree.

`masks` are numpy or torch; the label has the same type, float32:
  bool (R, *space)                      one mask per rater; two classes, background and foreground
  uint8 (R, *space) of 0 and 1          the same, as files store it; only on the CPU, where values can be read
  integers (R, *space), `num_classes`   one class map per rater
  a list of R of these                  each (*space)
  `batched=True`                        a case axis in front: masks (N, R, *space), label (N, C, *space)
`present`, bool (R,) or (N, R), is False for a rater who did not look at the case, not for an empty mask.

Labels lie in [0, 1] and sum to one over the classes. Each maker is a pure function without a loop over
cases. On a GPU it needs no host synchronisation: shapes and dtypes are checked there, values are not.
Left out: reading files, resizing, and overlapping classes (one mask per channel).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ..arrays import one_hot
from ..overlap.stats import overlap_stats, tversky_index
from .raters import Array, Present, Raters, read_raters, to_input_type


def majority_label(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """One-hot label of the class that most present raters chose; a tie goes to the lowest class.

    With two classes, foreground is where strictly more than half of the present raters drew.

    >>> majority_label(np.array([[True, True, False], [True, False, False]]))[1]
    array([1., 0., 0.], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    label = one_hot(raters.majority(), raters.num_classes).float()
    return to_input_type(label, masks, batched)


def random_rater_label(
    masks: Array | Sequence[Array],
    *,
    generator: torch.Generator | int,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """One-hot label of one rater, drawn for each case among the present raters with equal probability.

    generator: a seed, or a generator on the device of the masks, which advances with every call.

    >>> random_rater_label(torch.tensor([[True, False], [True, False]]), generator=0)[1]
    tensor([1., 0.])
    """
    raters = read_raters(masks, num_classes, present, batched)
    device = raters.classes.device
    if isinstance(generator, int):
        generator = torch.Generator(device).manual_seed(generator)
    elif not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a seed or a torch.Generator; got {generator!r}")
    elif generator.device.type != device.type:
        raise ValueError(
            f"generator is on {generator.device}, but masks are on {device}: create it on that device"
        )
    # not torch.multinomial, which synchronises with the device to check its weights
    draw = torch.rand(raters.present.shape, generator=generator, device=device)
    chosen = draw.masked_fill(~raters.present, -1).argmax(1)
    class_map = raters.classes[torch.arange(len(chosen), device=device), chosen]
    return to_input_type(one_hot(class_map, raters.num_classes).float(), masks, batched)


def mean_label(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """Share of the present raters that chose each class.

    >>> mean_label(np.array([[True, True, False], [True, False, False]]))[1]
    array([1. , 0.5, 0. ], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    return to_input_type(raters.mean(), masks, batched)


def dice_weighted_label(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """Mean of the raters weighted by `dice_weights`; the plain mean where all weights are 0.

    >>> dice_weighted_label(np.array([[True, True, False], [True, True, False], [False, True, True]]))[1]
    array([0.8, 1. , 0.2], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    weight = _majority_dice(raters)
    # raters without a common voxel, such as two disjoint ones, have an empty majority and weights of 0
    weight = torch.where(weight.sum(1, keepdim=True) > 0, weight, raters.present.float())
    return to_input_type(raters.weighted_mean(weight), masks, batched)


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
    return to_input_type(_majority_dice(raters), masks, batched)


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


def _majority_dice(raters: Raters) -> Float[Tensor, "N R"]:
    """Dice of each rater against the majority; 0 for an absent rater."""
    return _dice_against(raters, raters.majority()) * raters.present


def _dice_against(raters: Raters, reference: Integer[Tensor, "N *space"]) -> Float[Tensor, "N R"]:
    """Dice of each rater against one class map per case, mean over the foreground classes."""
    drawn = raters.votes()[:, :, 1:].float()
    target = one_hot(reference, raters.num_classes)[:, None, 1:].float().expand_as(drawn)
    stats = overlap_stats(drawn.flatten(0, 1), target.flatten(0, 1))
    return tversky_index(stats, alpha=0.5, beta=0.5).mean(1).view(raters.present.shape)
