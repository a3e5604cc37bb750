"""From the masks of several raters to one label, probabilities (C, *space); how well the raters agree.

`masks` are numpy or torch; the label is a float32 tensor on their device:
  bool (R, *space)                      one mask per rater; two classes, background and foreground
  uint8 (R, *space) of 0 and 1          the same, as files store it
  integers (R, *space), `num_classes`   one class map per rater
  `batched=True`                        a case axis in front: masks (N, R, *space), label (N, C, *space)
`present`, bool (R,) or (N, R), is False for a rater who did not look at the case, not for an empty mask.

Labels lie in [0, 1] and sum to one over the classes. There is no loop over cases and, on a GPU, no host
synchronisation but for the first masks of a type, whose values are read (`raters`).
Left out: reading files, resizing, and overlapping classes (one mask per channel).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import one_hot, values_are_readable
from ..options import Count, Weight, check_value
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
    """Mean of the raters weighted by their Dice against the majority; the plain mean where all are 0.

    >>> dice_weighted_label(np.array([[True, True, False], [True, True, False], [False, True, True]]))[1]
    tensor([0.8000, 1.0000, 0.2000])
    """
    raters = read_raters(masks, num_classes, present, batched)
    weight = _dice_against(raters, raters.majority()) * raters.present
    # raters without a common voxel, such as two disjoint ones, have an empty majority and weights of 0
    weight = torch.where(weight.sum(1, keepdim=True) > 0, weight, raters.present.float())
    label = raters.weighted_mean(weight)
    return label if batched else label[0]


@dataclass(frozen=True)
class RaterAgreement:
    """Dice of each rater against the majority, (R,), and of each pair, (R, R); NaN for absent raters."""

    majority: Float[Tensor, "*cases R"]
    pairwise: Float[Tensor, "*cases R R"]


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


def _dice_against(raters: Raters, reference: Integer[Tensor, "N *space"]) -> Float[Tensor, "N R"]:
    """Dice of each rater against one class map per case, mean over the foreground classes."""
    drawn = raters.votes()[:, :, 1:].float()
    target = one_hot(reference, raters.num_classes)[:, None, 1:].float().expand_as(drawn)
    stats = overlap_stats(drawn.flatten(0, 1), target.flatten(0, 1))
    return tversky_index(stats, alpha=0.5, beta=0.5).mean(1).view(raters.present.shape)


@dataclass(frozen=True)
class Staple:
    """The result of STAPLE: the label (C, *space), and the confusion matrix of each rater.

    confusion (R, C, C): confusion[r, k, j] is the probability that rater r says j where the truth is k. With
    two classes, [r, 1, 1] is the sensitivity and [r, 0, 0] the specificity. NaN for an absent rater, and in
    the row of a class without any probability. num_iterations: () or, batched, (N,).
    """

    label: Float[Tensor, "..."]
    confusion: Float[Tensor, "*cases R C C"]
    num_iterations: Integer[Tensor, "*cases"]


def staple_label(masks: Array, **options: Any) -> Float[Tensor, "..."]:
    """Probability of the hidden truth that best explains all raters: the label of `staple`, same options.

    >>> staple_label(np.array([[True, True, False, False], [True, False, False, False]]))[1]
    tensor([1.0000, 0.5000, 0.0000, 0.0000])
    """
    return staple(masks, **options).label


def staple(
    masks: Array,
    *,
    num_classes: int | None = None,
    present: Flags | None = None,
    batched: bool = False,
    tolerance: float = 1e-7,
    max_iterations: int = 200,
) -> Staple:
    """Hidden truth and confusion matrices of the raters, by expectation maximisation.

    With the prior π_k, the share of class k among all votes of the case, and rater r saying j at a voxel,

        truth_k  ∝  π_k Π_r confusion[r, k, j],      confusion[r, k, j]  ∝  Σ_voxels truth_k [r says j],

    The iteration starts from the mean label, in float64 and log space. It stops when no probability changes
    by more than `tolerance`; a case with num_iterations = max_iterations may not have converged. Absent
    raters are skipped. If there is one rater, or all agree, the label is their mask. On a GPU all iterations
    run, because stopping early would need a synchronisation; results are the same.

    >>> masks = np.array([[True, True, False, False], [True, False, False, False]])
    >>> staple(masks).confusion[:, 1, 1]
    tensor([1.0000, 0.6667])
    """
    check_value(Weight, tolerance=tolerance)
    check_value(Count, max_iterations=max_iterations)
    raters = read_raters(masks, num_classes, present, batched)
    votes = raters.votes().double().view(*raters.present.shape, raters.num_classes, -1)
    truth, num_iterations = _maximise(votes, raters.present, tolerance, max_iterations)
    mass = truth.sum(-1)[:, None, :, None]
    confusion = torch.einsum("nrjv,nkv->nrkj", votes, truth) / mass
    confusion = confusion.masked_fill(~raters.present[:, :, None, None], torch.nan)
    label = truth.float().reshape(*truth.shape[:2], *raters.classes.shape[2:])
    found = label, confusion.float(), num_iterations
    return Staple(*(part if batched else part[0] for part in found))


def _maximise(
    votes: Float[Tensor, "N R C V"], present: Bool[Tensor, "N R"], tolerance: float, max_iterations: int
) -> tuple[Float[Tensor, "N C V"], Integer[Tensor, " N"]]:
    """Truth at the fixed point of the two steps, and the number of iterations of each case."""
    tiny = torch.finfo(votes.dtype).tiny
    truth = votes.sum(1) / present.sum(1)[:, None, None]
    log_prior = truth.mean(-1, keepdim=True).clamp_(min=tiny).log_()
    num_iterations = torch.zeros(len(votes), dtype=torch.int64, device=votes.device)
    active = torch.ones_like(num_iterations, dtype=torch.bool)
    for _ in range(max_iterations):
        confusion = torch.einsum("nrjv,nkv->nrkj", votes, truth)
        confusion = confusion / truth.sum(-1)[:, None, :, None].clamp(min=tiny)
        # tiny instead of 0: a vote that is impossible under a class must not give 0 x inf = NaN
        log_truth = log_prior + torch.einsum("nrjv,nrkj->nkv", votes, confusion.clamp_(min=tiny).log_())
        updated = log_truth.softmax(1)
        change = (updated - truth).abs().amax((1, 2))
        # a converged case does not change any more, so a batch equals its cases one by one
        truth = torch.where(active[:, None, None], updated, truth)
        num_iterations += active
        active = active & (change > tolerance)
        if values_are_readable(active) and not bool(active.any()):
            break
    return truth, num_iterations
