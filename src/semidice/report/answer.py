"""Every score compared over its cases, and the answer: which method is best, by how much, and is it real.

A score is one metric of the mean over classes, or of one class if there are more than two. A comparison
of networks that are far below the raters' own agreement says little; so a warning takes its place.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ..data.dataset import Dataset, ScoredUnit
from ..errors import UserError
from ..metrics.registry import SHORT_NAMES, ScoreKey, higher_is_better
from ..statistics.agreement import OVERLAP_SCORES, raters_own_scores
from ..statistics.cases import MAIN_CLASSES, CaseTable, keys_of, rows_of
from ..statistics.compare import Comparison, compare_scores
from ..statistics.pairing import paired, shared_seeds
from ..statistics.tables import Cell, Table, interval_text, number_text, p_text
from .decisions import RuleScore

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
# the best method is far below the raters if its score is below this share of theirs; all trained networks of
# the paper but those of one task of QUBIQ are above it
_FAR_BELOW = 0.75
# a network whose overlap is below this has learned nothing, whatever the raters
_NOTHING = 0.01
RatersScores = Mapping[tuple[ScoreKey, str], float]


def compare_all(
    table: CaseTable,
    methods: Sequence[str],
    class_names: Sequence[str],
    *,
    num_resamples: int = 10_000,
    on_metric: Callable[[int, int], object] = lambda _, __: None,
) -> tuple[list[Comparison], list[str]]:
    """Every score that all methods have in two cases or more, and a sentence on each score left out."""
    comparisons: list[Comparison] = []
    notices = []
    ordered = sorted(keys_of(table), key=_place)
    for done, key in enumerate(ordered):
        on_metric(done, len(ordered))
        of_metric = rows_of(table, key)
        missing = [method for method in methods if method not in set(of_metric["method"])]
        if missing:
            notices.append(f"{key} is left out: {', '.join(missing)} was not scored by it.")
            continue
        try:
            higher_is_better(key.metric)
        except ValueError:
            notices.append(f"{key} is left out: its name does not say whether higher is better.")
            continue
        classes = set(of_metric["class"])
        single = [name for name in class_names[1:] if name in classes] if len(class_names) > 2 else []
        for class_name in (*([None] if classes & {*MAIN_CLASSES} else []), *single):
            found = paired(table, key, class_name, methods=methods, drop=True)
            if len(found.cases) < 2:
                notices.append(f"{key} of {found.class_name} is left out: fewer than two cases have it.")
                continue
            comparisons.append(compare_scores(found, num_resamples=num_resamples))
    if not any(map(is_main, comparisons)):
        raise UserError(
            f"nothing to report: no metric has scores of {', '.join(methods)} in two cases or more; the "
            f"table has {', '.join(map(str, ordered))}"
        )
    return comparisons, notices


def _place(key: ScoreKey) -> tuple[bool, int]:
    return key.per == "slice", _ORDER.index(key.metric) if key.metric in _ORDER else len(_ORDER)


def is_main(comparison: Comparison) -> bool:
    """Whether it is of a score over all classes, not of a single class."""
    return comparison.class_name in MAIN_CLASSES


def spoken(scored: Comparison | RuleScore) -> str:
    """The score as people say it, with class, unit and direction; the heading of tables has its key."""
    key = scored.key
    short = SHORT_NAMES.get(key.metric)
    return scored.heading.replace(key.metric, short, 1) if short else scored.heading


def file_name(comparison: Comparison) -> str:
    """The name of the score in names of files."""
    of_class = "" if is_main(comparison) else f" {comparison.class_name}"
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{comparison.key}{of_class}").strip("_")


def abbreviations_in(texts: Sequence[str]) -> dict[str, str]:
    """The abbreviations that occur as words in the texts, and what they stand for.

    >>> list(abbreviations_in(["uniform + DML1", "majority_sdl", "dice"]))
    ['SDL', 'DML1']
    """
    words = {word.upper() for text in texts for word in re.split(r"[^A-Za-z0-9]+", text)}
    return {name: meaning for name, meaning in _ABBREVIATIONS.items() if name in words}


def raters_of(dataset: Dataset, cases: Collection[str], keys: Sequence[ScoreKey]) -> RatersScores:
    """`raters_own_scores` of the scans and slices that are `cases`; empty if there is one rater."""
    if len(dataset.manifest.raters) < 2:
        return {}
    raters = {}
    for unit in ("scan", "slice"):
        names = {key.metric: key for key in keys if key.per == unit}
        units = [each for each in dataset.units(range(len(dataset)), unit) if each.name in cases]
        own = raters_own_scores(
            (_drawn_by_raters(dataset, each) for each in units if names),
            class_names=dataset.manifest.class_names,
            metrics=names,
            drawn=dataset.drawn_classes,
        )
        raters.update({(names[metric], class_name): value for (metric, class_name), value in own.items()})
    return raters


def _drawn_by_raters(dataset: Dataset, unit: ScoredUnit) -> np.ndarray:
    """The class maps (R, voxels) of the raters who looked at a scan or slice."""
    present = dataset.present[unit.cases[0]]
    masks = [dataset.masks(case)[present] for case in unit.cases]
    return np.concatenate([mask.reshape(len(mask), -1) for mask in masks], axis=1)


def raters_warning(comparisons: Sequence[Comparison], raters: RatersScores) -> str | None:
    """A sentence if the best method is far below the raters' own agreement, by the first score of overlap.

    With one rater, nothing is known of the agreement: then only networks that learned nothing are named.
    """
    # of a score that was computed both ways, that of scans
    scans_last = sorted(filter(is_main, comparisons), key=lambda each: each.key.per != "slice")
    by_metric = {each.key.metric: each for each in scans_last}
    metric = next((name for name in OVERLAP_SCORES if name in by_metric), None)
    if metric is None:
        return None
    comparison = by_metric[metric]
    best, own = float(comparison.means["mean"].max()), raters.get((comparison.key, comparison.class_name))
    if best >= (_NOTHING if own is None else _FAR_BELOW * own):
        return None
    below = "" if own is None else f", far below the raters' own agreement, {number_text(100 * own)} %"
    return (
        f"The best {comparison.key} is {number_text(100 * best)} %{below}. The networks are not trained well "
        "enough to compare them: train longer, or look at the images first."
    )


def seeds_sentences(table: CaseTable) -> list[str]:
    """Which seeds are left out and why, and which methods have one training among others with several."""
    shared = shared_seeds(table)
    sentences = [
        f"Seed {seed} is left out of every method: there are no scores of {listed(lacking)} with it."
        for seed, lacking in shared.lacking.items()
    ]
    single = sorted(set(table["method"][table["seed"] == -1]))
    if shared.seeds and single:
        sentences.append(
            f"There is one training of {listed(single)}: its spread over seeds is not known, and no interval "
            "covers it."
        )
    return sentences


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Which method is best by the scores over all classes, in one sentence.

    A difference counts if it is significant and not 0.00 as it is shown.
    """
    main = [each for each in comparisons if is_main(each)]
    methods = main[0].methods
    if len(methods) == 1:
        return f"One method, {methods[0]}: there is nothing to compare it with."
    beaten = [method for method in methods if any(_is_beaten(each, method) for each in main)]
    unbeaten = [method for method in methods if method not in beaten]
    if not beaten:
        return f"No difference between the {len(methods)} methods is significant by any score."
    if not unbeaten:
        return "It depends on the score: every method is significantly worse than another by some score."
    if len(unbeaten) > 1:
        return f"No other method is significantly better than {listed(unbeaten)} by any score."
    (winner,) = unbeaten
    others = [method for method in methods if method != winner]
    ahead = [str(each.key) for each in main if all(_is_ahead(each, winner, other) for other in others)]
    if not ahead:
        return f"{winner} is the only method that no other method beats significantly by any score."
    by = "all scores" if len(ahead) == len(main) else listed(ahead)
    return f"{winner} is best: significantly ahead of every other method by {by}, and behind by none."


def _is_beaten(comparison: Comparison, method: str) -> bool:
    return any(_is_ahead(comparison, other, method) for other in comparison.methods if other != method)


def _is_ahead(comparison: Comparison, first: str, second: str) -> bool:
    pair = comparison.pairs.loc[(first, second)]
    return bool(pair.better) and number_text(pair.difference * comparison.key.scale) != "0.00"


def answer_table(comparisons: Sequence[Comparison], raters: RatersScores) -> Table:
    """A row per score over all classes: the best mean, and its lead over the second and the worst method."""
    main = [each for each in comparisons if is_main(each)]
    methods = main[0].methods
    rows = []
    for each in main:
        key, means = each.key, each.means
        ranked = list(means.sort_values("mean", ascending=not key.higher_is_better, kind="stable").index)
        leader = means.loc[ranked[0]]
        shown = f"{number_text(leader['mean'] * key.scale)} {interval_text(key, leader.low, leader.high)}"
        if not math.isnan(leader.spread):
            shown += f" ± {number_text(leader.spread * key.scale)}"
        own = raters.get((key, each.class_name))
        cells = [Cell(each.heading), Cell(ranked[0]), Cell(shown)]
        for other in (ranked[1], *ranked[2:][-1:]) if len(ranked) > 1 else ():
            pair = each.pairs.loc[(ranked[0], other)]
            # a line is not broken within the p-value
            p = f"p {p_text(pair.p)}" if pair.p < 0.001 else f"p = {p_text(pair.p)}"
            p = p.replace(" ", "\N{NO-BREAK SPACE}")
            lead = number_text(pair.difference * key.scale, signed=True)
            ends = interval_text(key, pair.low, pair.high, signed=True)
            chance = "" if pair.better else ", may be chance"
            cells.append(Cell(f"{lead} {ends} over {other}: {p}{chance}", bool(pair.better)))
        if raters:
            cells.append(Cell("–" if own is None else number_text(own * key.scale)))
        rows.append(tuple(cells))
    leads = ("lead over the second", "lead over the worst")[: max(0, len(methods) - 1)]
    best = ("best method", "mean [95 % interval]") if len(methods) > 1 else ("method", "mean [95 % interval]")
    header = ("score", *best, *leads, *(["raters"] if raters else []))
    note = "Marked leads are significant." if len(methods) > 1 else "Mean over cases."
    return Table("The best mean of each score, and its lead", header, tuple(rows), note, ())


def listed(names: Sequence[str]) -> str:
    """The names as a part of a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
