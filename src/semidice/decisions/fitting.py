"""The decision that scores best on cases with known masks, such as out-of-fold predictions.

The score of a case is its mean Dice over the foreground classes; a class that is empty in mask and target has
1. Scores are averaged within a patient, then over patients. The plain rule, argmax, is kept unless the best
candidate is better by more than one standard error of the paired difference between patients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import check_prediction, check_target
from .decision import Decision

PLAIN = Decision("argmax")
CANDIDATES: tuple[str, ...] = (
    "argmax",
    "dice",
    "jaccard",
    "nested",
    "mix:0.25",
    "mix:0.5",
    "mix:0.75",
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
    """The candidate with the best mean Dice, or argmax unless the gain exceeds its standard error.

    cases: (prob (C, *space), target class map (*space), valid (*space) or None, patient name), one at a time in
    memory. One channel is the foreground, class 1. At equal scores the earlier candidate is chosen;
    argmax comes first, and is scored also if it is not a candidate. A case without a valid voxel is skipped.
    With one patient there is no standard error, and argmax is kept.

    >>> prob, target = torch.tensor([[0.9, 0.4, 0.4, 0.1]]), torch.tensor([1, 1, 1, 0])
    >>> fit_decision([(prob, target, None, "a"), (prob, target, None, "b")], ["dice"]).scores
    {'argmax': 0.5, 'dice': 1.0}
    """
    return choose_decision(score_candidates(cases, candidates))


def score_candidates(cases: Iterable[Case], candidates: Sequence[str] = CANDIDATES) -> Iterator[ScoredCase]:
    """The scores of each case, for `choose_decision`: a case may have a part in several fits."""
    names = list(dict.fromkeys(chain([str(PLAIN)], (str(Decision.parse(text)) for text in candidates))))
    decisions = [Decision.parse(name) for name in names]
    for prob, target, valid, patient in cases:
        if valid is None or bool(valid.any()):
            scores = _case_scores(prob, target, valid, decisions)
            yield patient, dict(zip(names, scores.tolist(), strict=True))


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
    chosen = Decision.parse(names[best]) if gain.mean() > error else PLAIN
    num_cases = sum(len(rows) for rows in of_patient.values())
    return FittedDecision(chosen, dict(zip(names, means.tolist(), strict=True)), num_cases)


def _case_scores(
    prob: Float[Tensor, "C *space"],
    target: Integer[Tensor, "*space"],
    valid: Bool[Tensor, "*space"] | None,
    decisions: Sequence[Decision],
) -> np.ndarray:
    """Mean foreground Dice of each decision."""
    prob, target = prob.unsqueeze(0), target.unsqueeze(0)
    valid = None if valid is None else valid.unsqueeze(0)
    check_prediction(prob)
    check_target(prob, target, valid=valid, has_ignore_index=False)
    first = 0 if prob.shape[1] == 1 else 1
    wanted = torch.stack([target == number + 1 - first for number in range(first, prob.shape[1])], 1)
    if valid is not None:
        wanted &= valid.unsqueeze(1)
    scores = [_mean_dice(decision.masks(prob, valid=valid)[:, first:], wanted) for decision in decisions]
    return torch.stack(scores).cpu().numpy()


def _mean_dice(masks: Bool[Tensor, "1 F *space"], wanted: Bool[Tensor, "1 F *space"]) -> Float[Tensor, ""]:
    masks, wanted = masks.flatten(2), wanted.flatten(2)
    total = (masks.sum(2) + wanted.sum(2)).double()
    dice = 2 * (masks & wanted).sum(2) / total.clamp_min(1)
    return torch.where(total > 0, dice, 1.0).mean()
