"""Raters' masks, or a hard mask, to the label a network learns from: probabilities (C, *space).

What the raters drew comes as `masks`, numpy or torch, and the label goes back as the same kind, float32:
  bool (R, *space)                      one mask a rater; two classes, background and foreground
  uint8 (R, *space) of 0 and 1          the same, as files hold it; only on the CPU, where values can be read
  integers (R, *space), `num_classes`   one class map a rater
  a list of R of these                  each (*space)
  `batched=True`                        a case axis in front: masks (N, R, *space), label (N, C, *space)
`present`, bool (R,) or (N, R), is False for a rater who did not look at the case: not one who drew nothing.

Labels lie in [0, 1] and sum to one over the classes. Each maker is a pure function without a loop over
cases, and on a GPU without a host synchronisation: there values are not checked (shapes and dtypes are).
Left out: reading files, resizing, and one mask a channel (classes that overlap).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import one_hot, values_are_readable
from ..overlap.stats import overlap_stats, tversky_index
from .boundary import boundary_band
from .raters import Array, Present, Raters, read_label, read_raters, read_valid, to_input_type


@dataclass(frozen=True)
class RaterAgreement(Generic[Array]):
    """Dice of each rater against the majority, (R,), and of each pair of raters, (R, R); NaN where absent."""

    majority: Array
    pairwise: Array


@dataclass(frozen=True)
class Staple(Generic[Array]):
    """What STAPLE estimates: the label (C, *space), and how each rater answers when the truth is known.

    confusion (R, C, C): confusion[r, k, j] is the probability that rater r says j where the truth is k, so
    with two classes [r, 1, 1] is the sensitivity and [r, 0, 0] the specificity. NaN for an absent rater,
    and in the row of a class that holds no probability. num_iterations: () or, batched, (N,).
    """

    label: Array
    confusion: Array
    num_iterations: Array


def majority_label(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """One-hot label of the class that most present raters chose; a tie goes to the lowest class.

    So with two classes, foreground is what strictly more than half of the present raters drew, and half
    of an even number is background.

    >>> majority_label(np.array([[True, True, False], [True, False, False]]))[1]
    array([1., 0., 0.], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    label = one_hot(_majority(raters), raters.num_classes).float()
    return to_input_type(label, masks, batched)


def random_rater_label(
    masks: Array | Sequence[Array],
    *,
    generator: torch.Generator | int,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """One-hot label of one rater, drawn for each case with equal chances among those present.

    generator: a seed, or a generator on the device of the masks, which moves on with every call.

    >>> random_rater_label(torch.tensor([[True, False], [True, False]]), generator=0)[1]
    tensor([1., 0.])
    """
    raters = read_raters(masks, num_classes, present, batched)
    device = raters.classes.device
    if isinstance(generator, int):
        generator = torch.Generator(device).manual_seed(generator)
    elif generator.device.type != device.type:
        raise ValueError(f"generator is on {generator.device} but masks on {device}: make it on that device")
    # not torch.multinomial, which waits for the device to check its weights
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
    return to_input_type(_weighted(raters, raters.present.float()), masks, batched)


def dice_weights(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """Each rater's Dice against the majority label, (R,) or (N, R), 0 for an absent rater; not normalised.

    More than two classes: the mean over the foreground ones. Empty against empty counts 1.

    >>> dice_weights(np.array([[True, True, False], [True, True, False], [False, True, True]]))
    array([1. , 1. , 0.5], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    return to_input_type(_dice_weights(raters), masks, batched)


def dice_weighted_label(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> Array:
    """Mean of the raters weighted by `dice_weights` over their sum; plain mean where all weights are 0.

    >>> dice_weighted_label(np.array([[True, True, False], [True, True, False], [False, True, True]]))[1]
    array([0.8, 1. , 0.2], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    weight = _dice_weights(raters)
    # raters who share nothing, such as two disjoint ones, have an empty majority and weights of 0
    weight = torch.where(weight.sum(1, keepdim=True) > 0, weight, raters.present.float())
    return to_input_type(_weighted(raters, weight), masks, batched)


def rater_agreement(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
) -> RaterAgreement[Array]:
    """Dice of each rater against the majority label and against each other; NaN for absent raters.

    More than two classes: the mean over the foreground ones. Empty against empty counts 1.

    >>> rater_agreement(np.array([[True, True], [True, False]])).pairwise.round(3)
    array([[1.   , 0.667],
           [0.667, 1.   ]], dtype=float32)
    """
    raters = read_raters(masks, num_classes, present, batched)
    there = raters.present
    majority = _dice_against(raters, _majority(raters)).masked_fill(~there, torch.nan)
    # one rater at a time: all pairs at once would take R times the memory of the masks
    pairwise = torch.stack([_dice_against(raters, one) for one in raters.classes.unbind(1)], 2)
    pairwise = pairwise.masked_fill(~(there.unsqueeze(1) & there.unsqueeze(2)), torch.nan)
    return RaterAgreement(to_input_type(majority, masks, batched), to_input_type(pairwise, masks, batched))


def staple_label(masks: Array | Sequence[Array], **options: Any) -> Array:
    """Probability of the hidden truth that best explains all raters: the label of `staple`, its options too.

    >>> staple_label(np.array([[True, True, False, False], [True, False, False, False]]))[1]
    array([1. , 0.5, 0. , 0. ], dtype=float32)
    """
    estimate: Staple[Array] = staple(masks, **options)
    return estimate.label


def staple(
    masks: Array | Sequence[Array],
    *,
    num_classes: int | None = None,
    present: Present | None = None,
    batched: bool = False,
    tolerance: float = 1e-7,
    max_iterations: int = 200,
) -> Staple[Array]:
    """Hidden truth and raters' confusion matrices by expectation maximisation (Warfield et al., TMI 2004).

    With prior π_k, the share of class k among all votes of the case, and rater r saying j at a voxel,

        truth_k  ∝  π_k Π_r confusion[r, k, j],      confusion[r, k, j]  ∝  Σ_voxels truth_k [r says j],

    from truth = mean label, in float64 and log space, until no voxel's probability changes by more than
    `tolerance`; a case with num_iterations = max_iterations may not have got there. Absent raters are
    skipped. One rater, or all agreed: the label is theirs, so all empty is background with probability 1.
    On a GPU all iterations run, as stopping early would need a synchronisation; results are the same.

    >>> masks = np.array([[True, True, False, False], [True, False, False, False]])
    >>> staple(masks).confusion[:, 1, 1].round(3)
    array([1.   , 0.667], dtype=float32)
    """
    if not tolerance >= 0 or max_iterations < 1:
        raise ValueError(
            "staple needs tolerance of 0 or more and max_iterations of 1 or more; "
            f"got {tolerance} and {max_iterations}"
        )
    raters = read_raters(masks, num_classes, present, batched)
    votes = raters.votes().double().view(*raters.present.shape, raters.num_classes, -1)
    truth, num_iterations = _maximise(votes, raters.present, tolerance, max_iterations)
    mass = truth.sum(-1)[:, None, :, None]
    confusion = torch.einsum("nrjv,nkv->nrkj", votes, truth) / mass
    confusion = confusion.masked_fill(~raters.present[:, :, None, None], torch.nan)
    space = raters.classes.shape[2:]
    return Staple(
        to_input_type(truth.float().reshape(*truth.shape[:2], *space), masks, batched),
        to_input_type(confusion.float(), masks, batched),
        to_input_type(num_iterations, masks, batched),
    )


def smooth_label(label: Array, *, eps: float, batched: bool = False) -> Array:
    """(1 - eps) label + eps / C: a share `eps` of every voxel spread evenly over the classes.

    eps in [0, 1]: 0 changes nothing, 1 leaves nothing of the label.

    >>> smooth_label(np.array([[1.0, 0.0], [0.0, 1.0]]), eps=0.2)[1].round(3)
    array([0.1, 0.9], dtype=float32)
    """
    return to_input_type(_smoothed(read_label(label, batched), eps), label, batched)


def boundary_smooth_label(
    label: Array,
    *,
    eps: float = 0.5,
    width: int = 3,
    valid: Array | None = None,
    batched: bool = False,
) -> Array:
    """The label smoothed by `eps` in a band around class boundaries, and unchanged elsewhere.

    A voxel is in the band when the cube of `width` voxels a side around it, cut at the image's border,
    holds more than one class (the most probable of each voxel, the lowest at a tie). So width 3 takes one
    voxel on either side of a boundary, diagonals included, width 5 two, and width 1 none. Odd widths only.
    valid: bool (*space) or (N, *space), False where there is no image, as beyond its border.

    >>> label = np.stack([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    >>> boundary_smooth_label(label)[1]
    array([0.  , 0.  , 0.25, 0.75], dtype=float32)
    """
    soft = read_label(label, batched, has_space=True)
    if width < 1 or width % 2 == 0:
        raise ValueError(f"width must be odd and 1 or more, so that a voxel is in the middle; got {width}")
    inside = read_valid(valid, soft, batched)
    near = boundary_band(soft.argmax(1), width=width // 2, valid=inside).unsqueeze(1)
    return to_input_type(torch.where(near, _smoothed(soft, eps), soft), label, batched)


def spatially_smooth_label(
    label: Array, *, sigma: float = 1.0, valid: Array | None = None, batched: bool = False
) -> Array:
    """The label filtered with a Gaussian over its one to three space axes.

    sigma: standard deviation in voxels, above 0; the filter ends at int(4 sigma + 0.5) voxels. Near the
    border the weights inside the image are scaled to sum to one: nothing is assumed outside.
    valid: bool (*space) or (N, *space), False where there is no image; the label stays there as it is.

    >>> spatially_smooth_label(np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]), sigma=0.5)[1].round(2)
    array([0.  , 0.11, 0.89, 1.  ], dtype=float32)
    """
    soft = read_label(label, batched, has_space=True)
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be above 0, in voxels; got {sigma}")
    flags = read_valid(valid, soft, batched)
    inside = None if flags is None else flags.unsqueeze(1)
    filtered = soft if inside is None else soft * inside
    for axis in range(2, soft.ndim):
        filtered = _gaussian_along(filtered, axis, sigma)
    # the classes' total is the weight that fell inside the image
    filtered = filtered / filtered.sum(1, keepdim=True)
    return to_input_type(filtered if inside is None else torch.where(inside, filtered, soft), label, batched)


class ReferenceLabels:
    """The labels that predictions of N cases are scored against, from masks (N, R, *space) of their raters.

    >>> masks = torch.tensor([[[True, True, False], [True, False, False]]])
    >>> reference = ReferenceLabels(masks, num_classes=2, present=None)
    >>> reference.majority(), reference.mean()[:, 1]
    (tensor([[1, 0, 0]]), tensor([[1.0000, 0.5000, 0.0000]]))
    """

    def __init__(self, masks: Tensor, *, num_classes: int, present: Tensor | None) -> None:
        self._raters = read_raters(masks, num_classes, present, batched=True)

    def majority(self) -> Integer[Tensor, "N *space"]:
        """The class that most present raters chose, as in `majority_label`."""
        return _majority(self._raters)

    def mean(self) -> Float[Tensor, "N C *space"]:
        """The share of the present raters that chose each class, as in `mean_label`."""
        return _weighted(self._raters, self._raters.present.float())


def _majority(raters: Raters) -> Integer[Tensor, "N *space"]:
    # argmax gives the first of equal counts, the lowest class
    return raters.votes().sum(1).argmax(1)


def _weighted(raters: Raters, weight: Float[Tensor, "N R"]) -> Float[Tensor, "N C *space"]:
    """Weighted mean of the raters. Where all of them agree it is exactly 0 or 1."""
    votes = raters.votes()
    weight = weight.view(*weight.shape, *[1] * (votes.ndim - 2))
    # one rater after the other: the same votes give the same bits wherever a voxel lies in memory
    total = votes[:, 0] * weight[:, 0]
    for rater in range(1, votes.shape[1]):
        total = total + votes[:, rater] * weight[:, rater]
    # not by the weights' sum: added in another order it may differ in the last bit, and x / (x + 0) is 1
    return total / total.sum(1, keepdim=True)


def _dice_weights(raters: Raters) -> Float[Tensor, "N R"]:
    return _dice_against(raters, _majority(raters)) * raters.present


def _dice_against(raters: Raters, reference: Integer[Tensor, "N *space"]) -> Float[Tensor, "N R"]:
    """Dice of each rater against one class map a case, mean over the foreground classes."""
    drawn = raters.votes()[:, :, 1:].float()
    target = one_hot(reference, raters.num_classes)[:, None, 1:].float().expand_as(drawn)
    stats = overlap_stats(drawn.flatten(0, 1), target.flatten(0, 1))
    return tversky_index(stats, alpha=0.5, beta=0.5).mean(1).view(raters.present.shape)


def _maximise(
    votes: Float[Tensor, "N R C V"], present: Bool[Tensor, "N R"], tolerance: float, max_iterations: int
) -> tuple[Float[Tensor, "N C V"], Integer[Tensor, " N"]]:
    """Truth at the fixed point of STAPLE's two steps, and how many rounds each case took."""
    tiny = torch.finfo(votes.dtype).tiny
    truth = votes.sum(1) / present.sum(1)[:, None, None]
    log_prior = truth.mean(-1, keepdim=True).clamp_(min=tiny).log_()
    num_iterations = torch.zeros(len(votes), dtype=torch.int64, device=votes.device)
    active = torch.ones_like(num_iterations, dtype=torch.bool)
    for _ in range(max_iterations):
        confusion = torch.einsum("nrjv,nkv->nrkj", votes, truth)
        confusion = confusion / truth.sum(-1)[:, None, :, None].clamp(min=tiny)
        # tiny for 0: a vote that is impossible under a class must meet its weight of 0 without a NaN
        log_truth = log_prior + torch.einsum("nrjv,nrkj->nkv", votes, confusion.clamp_(min=tiny).log_())
        updated = log_truth.softmax(1)
        change = (updated - truth).abs().amax((1, 2))
        # a case that has converged stays as it is, so a batch equals its cases one by one
        truth = torch.where(active[:, None, None], updated, truth)
        num_iterations += active
        active = active & (change > tolerance)
        if values_are_readable(active) and not bool(active.any()):
            break
    return truth, num_iterations


def _smoothed(soft: Tensor, eps: float) -> Tensor:
    if not 0 <= eps <= 1:
        raise ValueError(f"eps must lie in [0, 1]; got {eps}")
    return (1 - eps) * soft + eps / soft.shape[1]


def _gaussian_along(soft: Tensor, axis: int, sigma: float) -> Tensor:
    """Gaussian filter along one axis, zero outside.

    Shifted sums rather than a convolution, which a GPU may round to TF32.
    """
    length = soft.shape[axis]
    radius = int(4 * sigma + 0.5)
    weights = [math.exp(-0.5 * (shift / sigma) ** 2) for shift in range(radius + 1)]
    total = weights[0] + 2 * sum(weights[1:])
    filtered = soft * (weights[0] / total)
    for shift in range(1, min(radius, length - 1) + 1):
        inside = length - shift
        for to, since in ((shift, 0), (0, shift)):
            shifted = soft.narrow(axis, since, inside)
            filtered.narrow(axis, to, inside).add_(shifted, alpha=weights[shift] / total)
    return filtered
