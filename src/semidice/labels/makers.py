"""From the masks of several raters to one label, probabilities (C, *space); how well the raters agree.

`masks` are numpy or torch; the label is a float32 tensor on their device:
  bool (R, *space)                      one mask per rater; two classes, background and foreground
  uint8 (R, *space) of 0 and 1          the same, as files store it; only on the CPU, where values can be read
  integers (R, *space), `num_classes`   one class map per rater
  `batched=True`                        a case axis in front: masks (N, R, *space), label (N, C, *space)
`present`, bool (R,) or (N, R), is False for a rater who did not look at the case, not for an empty mask.

Labels lie in [0, 1] and sum to one over the classes. Each maker is a pure function without a loop over
cases. On a GPU it needs no host synchronisation: shapes and dtypes are checked there, values are not.
Left out: reading files, resizing, and overlapping classes (one mask per channel).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ..arrays import one_hot
from ..overlap import overlap_stats, tversky_index
from .raters import Array, Flags, Raters, read_raters


def majority_label(
    masks: Array, *, num_classes: int | None = None, present: Flags | None = None, batched: bool = False
) -> Tensor:
    """One-hot label of the class that most present raters chose; a tie goes to the lowest class.

    With two classes, foreground is where strictly more than half of the present raters drew.

    >>> majority_label(np.array([[True, True, False], [True, False, False]]))[1]
    tensor([1., 0., 0.])
    """
    raters = read_raters(masks, num_classes, present, batched)
    label = one_hot(raters.majority(), raters.num_classes).float()
    return label if batched else label[0]


def random_rater_label(
    masks: Array,
    *,
    generator: torch.Generator | int,
    num_classes: int | None = None,
    present: Flags | None = None,
    batched: bool = False,
) -> Tensor:
    """One-hot label of one rater, drawn for each case among the present raters with equal probability.

    generator: a seed, or a generator on the device of the masks, which advances with every call.

    >>> random_rater_label(torch.tensor([[True, False], [True, False]]), generator=0)[1]
    tensor([1., 0.])
    """
    raters = read_raters(masks, num_classes, present, batched)
    device = raters.classes.device
    if isinstance(generator, int):
        generator = torch.Generator(device).manual_seed(generator)
    # not torch.multinomial, which synchronises with the device to check its weights
    draw = torch.rand(raters.present.shape, generator=generator, device=device)
    chosen = draw.masked_fill(~raters.present, -1).argmax(1)
    class_map = raters.classes[torch.arange(len(chosen), device=device), chosen]
    label = one_hot(class_map, raters.num_classes).float()
    return label if batched else label[0]


def mean_label(
    masks: Array, *, num_classes: int | None = None, present: Flags | None = None, batched: bool = False
) -> Tensor:
    """Share of the present raters that chose each class.

    >>> mean_label(np.array([[True, True, False], [True, False, False]]))[1]
    tensor([1.0000, 0.5000, 0.0000])
    """
    label = read_raters(masks, num_classes, present, batched).mean()
    return label if batched else label[0]


def dice_weighted_label(
    masks: Array, *, num_classes: int | None = None, present: Flags | None = None, batched: bool = False
) -> Tensor:
    """Mean of the raters weighted by `dice_weights`; the plain mean where all weights are 0.

    >>> dice_weighted_label(np.array([[True, True, False], [True, True, False], [False, True, True]]))[1]
    tensor([0.8000, 1.0000, 0.2000])
    """
    raters = read_raters(masks, num_classes, present, batched)
    weight = _majority_dice(raters)
    # raters without a common voxel, such as two disjoint ones, have an empty majority and weights of 0
    weight = torch.where(weight.sum(1, keepdim=True) > 0, weight, raters.present.float())
    label = raters.weighted_mean(weight)
    return label if batched else label[0]


@dataclass(frozen=True)
class RaterAgreement:
    """Dice of each rater against the majority, (R,), and of each pair, (R, R); NaN for absent raters."""

    majority: Float[Tensor, "*cases R"]
    pairwise: Float[Tensor, "*cases R R"]


def dice_weights(
    masks: Array, *, num_classes: int | None = None, present: Flags | None = None, batched: bool = False
) -> Tensor:
    """Dice of each rater against the majority label, (R,) or (N, R); 0 for an absent rater; not normalised.

    With more than two classes it is the mean over the foreground classes. Two empty masks have Dice 1.

    >>> dice_weights(np.array([[True, True, False], [True, True, False], [False, True, True]]))
    tensor([1.0000, 1.0000, 0.5000])
    """
    weights = _majority_dice(read_raters(masks, num_classes, present, batched))
    return weights if batched else weights[0]


def rater_agreement(
    masks: Array, *, num_classes: int | None = None, present: Flags | None = None, batched: bool = False
) -> RaterAgreement:
    """Dice of each rater against the majority label and against each other; NaN for absent raters.

    With more than two classes it is the mean over the foreground classes. Two empty masks have Dice 1.

    >>> rater_agreement(np.array([[True, True], [True, False]])).pairwise
    tensor([[1.0000, 0.6667],
            [0.6667, 1.0000]])
    """
    raters = read_raters(masks, num_classes, present, batched)
    absent = ~raters.present
    majority = _dice_against(raters, raters.majority()).masked_fill(absent, torch.nan)
    # one rater at a time: all pairs at once would take R times the memory of the masks
    pairwise = torch.stack([_dice_against(raters, classes) for classes in raters.classes.unbind(1)], 2)
    pairwise = pairwise.masked_fill(absent.unsqueeze(1) | absent.unsqueeze(2), torch.nan)
    return RaterAgreement(majority, pairwise) if batched else RaterAgreement(majority[0], pairwise[0])


def _majority_dice(raters: Raters) -> Float[Tensor, "N R"]:
    """Dice of each rater against the majority; 0 for an absent rater."""
    return _dice_against(raters, raters.majority()) * raters.present


def _dice_against(raters: Raters, reference: Integer[Tensor, "N *space"]) -> Float[Tensor, "N R"]:
    """Dice of each rater against one class map per case, mean over the foreground classes."""
    drawn = raters.votes()[:, :, 1:].float()
    target = one_hot(reference, raters.num_classes)[:, None, 1:].float().expand_as(drawn)
    stats = overlap_stats(drawn.flatten(0, 1), target.flatten(0, 1))
    return tversky_index(stats, alpha=0.5, beta=0.5).mean(1).view(raters.present.shape)
