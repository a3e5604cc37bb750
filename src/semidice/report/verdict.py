"""A comparison in words: which method is best, and whether the methods are good enough for the question.

A verdict between networks that are far below the raters' own agreement says little; so a warning comes first.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..data.dataset import Dataset, ScoredUnit
from ..metrics.registry import ScoreKey
from ..statistics.agreement import OVERLAP_SCORES, raters_own_scores
from ..statistics.cases import CaseTable
from ..statistics.compare import Comparison
from ..statistics.pairing import shared_seeds
from ..statistics.tables import number_text

# the best method is far below the raters if its score is below this share of theirs; all trained networks of
# the paper but those of one task of QUBIQ are above it
_FAR_BELOW = 0.75


def raters_of(
    dataset: Dataset, cases: Collection[str], keys: Sequence[ScoreKey]
) -> dict[tuple[ScoreKey, str], float]:
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
    return np.concatenate(
        [dataset.masks(case)[present].reshape(present.sum(), -1) for case in unit.cases], axis=1
    )


def raters_warning(
    comparisons: Sequence[Comparison], raters: Mapping[tuple[ScoreKey, str], float]
) -> str | None:
    """A sentence if the best method is far below the raters' own agreement, by the first score of overlap."""
    # of a score that was computed both ways, that of scans
    scans_last = sorted(comparisons, key=lambda each: each.key.per != "slice")
    by_metric = {each.key.metric: each for each in scans_last if (each.key, each.class_name) in raters}
    metric = next((name for name in OVERLAP_SCORES if name in by_metric), None)
    if metric is None:
        return None
    comparison = by_metric[metric]
    best, own = float(comparison.means["mean"].max()), raters[comparison.key, comparison.class_name]
    if best >= _FAR_BELOW * own:
        return None
    return (
        f"The best {comparison.key}, {number_text(100 * best)} %, is far below the raters' own agreement, "
        f"{number_text(100 * own)} %. The networks may not be trained well enough to compare them: train "
        "longer, or look at the images first."
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


def verdict(comparisons: Mapping[ScoreKey, Comparison] | Mapping[str, Comparison]) -> str:
    """Which method is best, in a few sentences; comparisons: of the same methods, by name of a score."""
    sentence = _which_is_best({str(name): comparison for name, comparison in comparisons.items()})
    counts = sorted({max(1, len(comparison.seeds)) for comparison in comparisons.values()})
    if counts == [1]:
        return sentence
    trainings = " or ".join(map(str, counts))
    return (
        f"{sentence} Each score is the mean of {trainings} seeds, and intervals cover the draw of the seeds."
    )


def _which_is_best(comparisons: Mapping[str, Comparison]) -> str:
    methods = next(iter(comparisons.values())).methods
    best = {name: comparison.best for name, comparison in comparisons.items()}
    if len(methods) == 1:
        return f"One method, {methods[0]}: there is nothing to compare it with."
    unbeaten = [method for method in methods if all(method in names for names in best.values())]
    leading_by = {
        method: [
            name
            for name, comparison in comparisons.items()
            if comparison.pairs["better"].xs(method, level="first").all()
        ]
        for method in methods
    }
    if len(unbeaten) == len(methods):
        return (
            f"No difference between the {len(methods)} methods is significant by any score: "
            f"with these cases, each of them may be the best."
        )
    if len(unbeaten) == 1:
        (winner,) = unbeaten
        ahead = leading_by[winner]
        if len(ahead) == len(best):
            by_all = f"all {len(best)} scores" if len(best) > 1 else ahead[0]
            return f"{winner} is best, significantly ahead of every other method by {by_all}."
        if ahead:
            return (
                f"{winner} is best: significantly ahead of every other method by {listed(ahead)}, and no "
                "other method is significantly better by any score."
            )
        return f"{winner} is the only method that no other method beats significantly by any score."
    if unbeaten:
        return (
            f"No other method is significantly better than {listed(unbeaten)} by any score; these cases do "
            "not decide between them."
        )
    leading = [f"{method} by {listed(names)}" for method, names in leading_by.items() if names]
    if leading:
        more = f"Significantly ahead of every other method: {'; '.join(leading)}."
    else:
        counts = {method: sum(method in names for names in best.values()) for method in methods}
        most = max(counts.values())
        often = [method for method, count in counts.items() if count == most]
        more = f"Most often in the best set: {listed(often)} (by {most} of {len(best)} scores)."
    return f"It depends on the score: every method is significantly worse than another by some score. {more}"


def listed(names: Sequence[str]) -> str:
    """The names as a part of a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
