"""The decision that scores best on cases with known masks, such as out-of-fold predictions.

The score of a case is its mean Dice over the foreground classes; a class that is empty in mask and target has
1. Scores are averaged within a patient, then over patients. The plain rule, argmax, is kept unless the best
candidate is better by more than 1.645 standard errors of the paired difference between patients (one-sided
5 %): the best of many candidates is always a little better by chance.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import check_prob, describe, read_target
from .decision import Decision
from .masks import decide, limits

PLAIN = Decision("argmax")
MIN_STANDARD_ERRORS = 1.645
CANDIDATES: tuple[str, ...] = (
    *("argmax", "dice", "jaccard", "nested", "mix:0.25", "mix:0.5", "mix:0.75"),
    *(f"threshold:{percent / 100:g}" for percent in range(10, 91, 5)),
)

Case = tuple[Tensor, Tensor, Tensor | None, str]
# the patient, and the score of each candidate by its text, argmax first
ScoredCase = tuple[str, Mapping[str, float]]


@dataclass(frozen=True)
class FittedDecision:
    """The chosen decision, the mean score of each candidate by its text, and the number of scored cases."""

    decision: Decision
    scores: Mapping[str, float]
    num_cases: int


def fit_decision(cases: Iterable[Case], candidates: Sequence[str] = CANDIDATES) -> FittedDecision:
    """The candidate with the best mean Dice, or argmax unless the gain exceeds 1.645 standard errors.

    cases: (prob (C, *space), target class map (*space), valid (*space) or None, patient name); one case is
    in memory at a time. One channel is the foreground, class 1. At equal scores the earlier candidate is
    chosen; argmax comes first, and is scored also if it is not a candidate. A case without a valid
    voxel is skipped. With one patient there is no standard error, and argmax is kept.

    >>> prob, target = torch.tensor([[0.9, 0.4, 0.4, 0.1]]), torch.tensor([1, 1, 1, 0])
    >>> fit_decision([(prob, target, None, "a"), (prob, target, None, "b")], ["dice"]).scores
    {'argmax': 0.5, 'dice': 1.0}
    """
    return choose_decision(score_candidates(cases, candidates))


def score_candidates(cases: Iterable[Case], candidates: Sequence[str] = CANDIDATES) -> Iterator[ScoredCase]:
    """The scores of each case, for `choose_decision`: a case may have a part in several fits."""
    rules = list(dict.fromkeys([PLAIN, *map(Decision.parse, candidates)]))
    for prob, target, valid, patient in cases:
        if valid is None or bool(valid.any()):
            scores = _case_scores(prob, target, valid, rules)
            yield patient, dict(zip(map(str, rules), scores.tolist(), strict=True))


def choose_decision(scored: Iterable[ScoredCase]) -> FittedDecision:
    """The decision that `fit_decision` chooses, from the scores of its cases, all by the same candidates."""
    of_patient: dict[str, list[list[float]]] = {}
    names: list[str] = []
    for patient, of_case in scored:
        names = list(of_case)
        of_patient.setdefault(patient, []).append(list(of_case.values()))
    if not of_patient:
        raise ValueError("no case to fit a decision on; give predictions and targets with a valid voxel")
    scores = np.stack([np.mean(rows, axis=0) for rows in of_patient.values()])
    means = scores.mean(axis=0)
    best = int(means.argmax())
    gain = scores[:, best] - scores[:, 0]
    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
    chosen = Decision.parse(names[best]) if gain.mean() > MIN_STANDARD_ERRORS * error else PLAIN
    num_cases = sum(len(rows) for rows in of_patient.values())
    return FittedDecision(chosen, dict(zip(names, means.tolist(), strict=True)), num_cases)


def _case_scores(
    prob: Float[Tensor, "C *space"],
    target: Tensor,
    valid: Bool[Tensor, "*space"] | None,
    decisions: Sequence[Decision],
) -> np.ndarray:
    """Mean foreground Dice of each decision."""
    if target.is_floating_point() or target.shape != prob.shape[1:]:
        raise ValueError(
            f"target must be a class map {tuple(prob.shape[1:])}; got {describe(target)}: use "
            "majority_label(masks).argmax(0), or label.argmax(0) for a label"
        )
    prob, target = prob.unsqueeze(0), target.unsqueeze(0)
    valid = None if valid is None else valid.unsqueeze(0)
    check_prob(prob, valid)
    read_target(prob, target, valid=valid)
    if prob.shape[1] <= 2:
        return _binary_scores(prob[0, -1], target[0] == 1, valid, decisions)
    wanted = torch.stack([target == number for number in range(1, prob.shape[1])], 1)
    if valid is not None:
        wanted &= valid.unsqueeze(1)
    scores = []
    for decision in decisions:
        masks = decide(prob, decision, valid=valid)[:, 1:]
        sizes = (part.flatten(2).sum(2) for part in (masks & wanted, masks, wanted))
        scores.append(float(_dice(*sizes).mean()))
    return np.array(scores)


def _binary_scores(
    p: Float[Tensor, "*space"],
    wanted: Bool[Tensor, "*space"],
    valid: Bool[Tensor, "1 *space"] | None,
    decisions: Sequence[Decision],
) -> np.ndarray:
    """Dice of each decision: all of them choose {p > t}, so the voxels are sorted once."""
    if valid is not None:
        p, wanted = p[valid[0]], wanted[valid[0]]
    p = p.flatten().to(torch.promote_types(p.dtype, torch.float32))
    ordered, order = p.sort(descending=True)
    true_positive = F.pad(wanted.flatten()[order].cumsum(0), (1, 0))
    sizes = len(p) - torch.searchsorted(ordered.flip(0), limits(ordered[None], decisions)[0], right=True)
    return _dice(true_positive[sizes], sizes, true_positive[-1]).cpu().numpy()


def _dice(common: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Float64 Dice from the sizes of two sets and of their intersection; 1 if both are empty."""
    total = (first + second).double()
    return torch.where(total > 0, 2 * common / total.clamp_min(1), 1.0)
