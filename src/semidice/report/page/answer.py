"""Every score compared over its cases, and the answer in words: which is best, by how much, and is it real.

A score is one metric of the mean over classes, or of one class if there are more than two.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...metrics.cases import CaseTable
from ...metrics.pairing import PairedScores
from ...metrics.registry import PER_SLICE, display_scale, higher_is_better, score_name, spoken_name
from ...metrics.statistics import Comparison, compare_scores
from ...metrics.tables import number_text, p_text
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
    def metric(self) -> str:
        return self.paired.metric

    @property
    def is_main(self) -> bool:
        """Whether it is a score over all classes, not of a single class."""
        return self.paired.class_name in ("mean", "all")

    @property
    def name(self) -> str:
        name = spoken_name(self.metric)
        return name if self.is_main else f"{name}, {self.paired.class_name}"

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
    ordered = sorted(table.metrics, key=_place)
    for done, metric in enumerate(ordered):
        on_metric(done, len(table.metrics))
        of_metric = table.select(metric=metric)
        missing = [method for method in methods if method not in of_metric.methods]
        if missing:
            notices.append(f"{metric} is left out: {', '.join(missing)} was not scored by it.")
            continue
        try:
            higher_is_better(metric)
        except ValueError:
            notices.append(f"{metric} is left out: its name does not say whether higher is better.")
            continue
        scored_classes = set(of_metric.columns["class"].tolist())
        main_class = "mean" if "mean" in scored_classes else "all"
        for class_name in (main_class, *(class_names[1:] if len(class_names) > 2 else ())):
            if class_name not in scored_classes:
                continue
            paired = table.paired(metric, class_name=class_name, methods=methods, missing="drop")
            if len(paired.cases) < 2:
                notices.append(f"{metric} of {class_name} is left out: fewer than two cases have it.")
                continue
            comparison = compare_scores(paired, num_resamples=num_resamples, level=LEVEL)
            scores.append(Score(paired, comparison))
    if not any(score.is_main for score in scores):
        raise ValueError(
            f"nothing to report: no metric has scores of {', '.join(methods)} in two cases or more; the "
            f"table has {', '.join(table.metrics)}"
        )
    return scores, notices


def _place(metric: str) -> tuple[bool, int]:
    name = score_name(metric)
    return metric.endswith(PER_SLICE), _ORDER.index(name) if name in _ORDER else len(_ORDER)


def abbreviations_in(texts: Sequence[str]) -> dict[str, str]:
    """The abbreviations that occur as words in the texts, and what they stand for.

    >>> list(abbreviations_in(["uniform + DML1", "majority_sdl", "dice"]))
    ['SDL', 'DML1']
    """
    words = {word.upper() for text in texts for word in re.split(r"[^A-Za-z0-9]+", text)}
    return {name: meaning for name, meaning in _ABBREVIATIONS.items() if name in words}


def answer_of(score: Score, raters: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """For the template: the method with the best mean, and its lead over the second and the worst method.

    raters: their own scores by metric and class, to stand next to the mean.
    """
    comparison = score.comparison
    mean = comparison.mean if comparison.higher_is_better else -comparison.mean
    ranked = [int(number) for number in np.argsort(-mean, kind="stable")]
    scale = display_scale(score.metric)
    first = ranked[0]
    others = dict.fromkeys((ranked[1], ranked[-1])) if len(ranked) > 1 else ()
    leads = []
    corrected = comparison.corrected()
    for other in others:
        p = float(corrected.p[first, other])
        low, high = (float(part[first, other]) * scale for part in (corrected.low, corrected.high))
        leads.append(
            {
                "over": comparison.methods[other],
                "difference": number_text(float(comparison.difference[first, other]) * scale, signed=True),
                "interval": f"[{number_text(low, signed=True)}, {number_text(high, signed=True)}]",
                "p": f"p {p_text(p)}" if p < 0.001 else f"p = {p_text(p)}",
                "significant": bool(comparison.superior(level=LEVEL)[first, other]),
            }
        )
    own = raters.get((score.metric, score.paired.class_name))
    low, high = (float(part[first]) * scale for part in (comparison.mean_low, comparison.mean_high))
    spread = float(comparison.seed_spread[first]) * scale
    return {
        "heading": comparison.heading,
        "leader": comparison.methods[first],
        "mean": number_text(float(comparison.mean[first]) * scale),
        "interval": f"[{number_text(low)}, {number_text(high)}]",
        "spread": "" if math.isnan(spread) else f"± {number_text(spread)} over {len(comparison.seeds)} seeds",
        "raters": None if own is None else number_text(own * scale),
        "leads": leads,
    }


def headline(scores: Sequence[Score]) -> str:
    """The answer in one or two sentences, from the best sets of the main scores."""
    return verdict({score.name: score.comparison for score in scores if score.is_main}, level=LEVEL)
