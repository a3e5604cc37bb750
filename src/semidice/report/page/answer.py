"""Every score compared over its cases, and the answer in words: which is best, by how much, and is it real.

A score is one metric of the mean over classes, or of one class if there are more than two.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UserError
from ...metrics.registry import ScoreKey
from ...statistics.cases import MAIN_CLASSES, CaseTable, keys_of, rows_of
from ...statistics.compare import Comparison, compare_scores
from ...statistics.pairing import PairedScores, paired
from ...statistics.tables import interval_text, number_text, p_text
from ..verdict import verdict

# the paper's columns come first; other metrics follow in the order of the table
_ORDER = (
    "dice_score",
    "binarized_dice_score",
    "calibration_error",
    "rater_calibration_error",
    "soft_dice_score",
    "iou_score",
    "brier_error",
    "negative_log_likelihood",
    "truth_error",
)
LEVEL = 0.05
# what names of methods and options abbreviate
_ABBREVIATIONS = {
    "SDL": "soft Dice loss; its best prediction for a soft label is 0 or 1",
    "DML1": "Dice semimetric loss, first form; its best prediction is the soft label itself",
    "DML2": "Dice semimetric loss, second form; its best prediction is the soft label itself",
    "DML": "Dice semimetric loss; its best prediction is the soft label itself",
    "JML1": "Jaccard metric loss, first form",
    "JML2": "Jaccard metric loss, second form",
    "CFTL": "compatible focal Tversky loss",
    "CE": "cross entropy",
    "KD": "distillation: a student learns from a teacher's probabilities",
    "KDE": "kernel density estimate, which calibrates the teacher",
}


@dataclass(frozen=True)
class Score:
    """One metric and class: the scores of all cases, and their comparison."""

    paired: PairedScores
    comparison: Comparison

    @property
    def key(self) -> ScoreKey:
        return self.paired.key

    @property
    def is_main(self) -> bool:
        """Whether it is a score over all classes, not of a single class."""
        return self.paired.class_name in MAIN_CLASSES

    @property
    def name(self) -> str:
        return str(self.key) if self.is_main else f"{self.key}, {self.paired.class_name}"

    @property
    def file_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "_", self.name).strip("_")


def compare_all(
    table: CaseTable,
    methods: Sequence[str],
    class_names: Sequence[str],
    *,
    num_resamples: int = 10_000,
    on_metric: Callable[[int, int], object] = lambda _, __: None,
) -> tuple[list[Score], list[str]]:
    """Every score that all methods have in two cases or more, and a sentence on each score left out."""
    scores: list[Score] = []
    notices = []
    ordered = sorted(keys_of(table), key=_place)
    for done, key in enumerate(ordered):
        on_metric(done, len(ordered))
        of_metric = rows_of(table, key)
        scored = set(of_metric["method"])
        missing = [method for method in methods if method not in scored]
        if missing:
            notices.append(f"{key} is left out: {', '.join(missing)} was not scored by it.")
            continue
        try:
            key.heading()
        except ValueError:
            notices.append(f"{key} is left out: its name does not say whether higher is better.")
            continue
        scored_classes = set(of_metric["class"])
        for class_name in (None, *(class_names[1:] if len(class_names) > 2 else ())):
            if (
                not scored_classes & {*MAIN_CLASSES}
                if class_name is None
                else class_name not in scored_classes
            ):
                continue
            found = paired(table, key, class_name, methods=methods, drop=True)
            if len(found.cases) < 2:
                notices.append(f"{key} of {found.class_name} is left out: fewer than two cases have it.")
                continue
            scores.append(Score(found, compare_scores(found, num_resamples=num_resamples)))
    if not any(score.is_main for score in scores):
        raise UserError(
            f"nothing to report: no metric has scores of {', '.join(methods)} in two cases or more; the "
            f"table has {', '.join(map(str, ordered))}"
        )
    return scores, notices


def _place(key: ScoreKey) -> tuple[bool, int]:
    return key.per == "slice", _ORDER.index(key.metric) if key.metric in _ORDER else len(_ORDER)


def abbreviations_in(texts: Sequence[str]) -> dict[str, str]:
    """The abbreviations that occur as words in the texts, and what they stand for.

    >>> list(abbreviations_in(["uniform + DML1", "majority_sdl", "dice"]))
    ['SDL', 'DML1']
    """
    words = {word.upper() for text in texts for word in re.split(r"[^A-Za-z0-9]+", text)}
    return {name: meaning for name, meaning in _ABBREVIATIONS.items() if name in words}


def answer_of(score: Score, raters: Mapping[tuple[ScoreKey, str], float]) -> dict[str, Any]:
    """For the template: the method with the best mean, and its lead over the second and the worst method.

    raters: their own scores by metric and class, to stand next to the mean.
    """
    comparison = score.comparison
    ranked = list(
        comparison.means.sort_values("mean", ascending=not score.key.higher_is_better, kind="stable").index
    )
    scale, first = score.key.scale, ranked[0]
    others = dict.fromkeys((ranked[1], ranked[-1])) if len(ranked) > 1 else ()
    leads = []
    for other in others:
        pair = comparison.pairs.loc[(first, other)]
        leads.append(
            {
                "over": other,
                "difference": number_text(pair.difference * scale, signed=True),
                "interval": interval_text(score.key, pair.low, pair.high, signed=True),
                "p": f"p {p_text(pair.p)}" if pair.p < 0.001 else f"p = {p_text(pair.p)}",
                "significant": bool(pair.better),
            }
        )
    own = raters.get((score.key, score.paired.class_name))
    leader = comparison.means.loc[first]
    spread = leader.spread * scale
    return {
        "heading": comparison.heading,
        "leader": first,
        "mean": number_text(leader["mean"] * scale),
        "interval": interval_text(score.key, leader.low, leader.high),
        "spread": "" if math.isnan(spread) else f"± {number_text(spread)} over {len(comparison.seeds)} seeds",
        "raters": None if own is None else number_text(own * scale),
        "leads": leads,
    }


def headline(scores: Sequence[Score]) -> str:
    """The answer in one or two sentences, from the best sets of the main scores."""
    return verdict({score.name: score.comparison for score in scores if score.is_main})
