"""STAPLE: the hidden truth behind several raters, and the reliability of each (Warfield et al., TMI 2004)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import values_are_readable
from .raters import Array, Flags, read_raters


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
    if not tolerance >= 0 or max_iterations < 1:
        raise ValueError(
            "staple needs a tolerance of 0 or more and max_iterations of 1 or more; "
            f"got {tolerance} and {max_iterations}"
        )
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
