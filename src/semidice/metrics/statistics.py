"""Which method is better: all pairs compared on the same cases, Holm's correction, and the best set.

The tests are those of `resampling`: a paired bootstrap and a permutation test over cases, or over patients
with all their cases if a patient has several. A method is in the best set if it is not significantly worse
than any other; the paper marks its tables by this rule. Holm's correction is over the m pairs of one metric.
The corrected intervals are at level 0.05 / m (Bonferroni). Where Holm's method finds more, the divisor is
the largest at which they agree with it: an interval excludes 0 exactly where its p is below 0.05.
With several seeds, the score of a case is the mean over them, and intervals also cover the draw of the seeds
(`seeds`). Left out: the resampling (`resampling`), tables and figures (`tables`, `report`), unpaired
comparisons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np

from ..arrays import check_choice
from . import registry
from .cases import CaseTable
from .pairing import Missing, PairedScores
from .resampling import ROUNDING, Estimate, Interval, paired_bootstrap, permutation_test
from .seeds import SeedVariance, seed_variance, with_seed_variance

Unit = Literal["case", "patient"]
Correction = Literal["holm", "none"]


def resampling_unit(patients: Sequence[str] | np.ndarray, cases: Sequence[str] | np.ndarray) -> Unit:
    """What to resample: patients with all their cases where a patient has several, else cases.

    Cases also where all are of one patient, because one patient cannot be resampled.

    >>> resampling_unit(["p1", "p1", "p2"], ["a", "b", "c"]), resampling_unit(["p1", "p1"], ["a", "b"])
    ('patient', 'case')
    """
    return "patient" if 1 < len(np.unique(patients)) < len(np.unique(cases)) else "case"


@dataclass(frozen=True)
class Comparison:
    """The mean of each method and the difference of each pair, for one metric and class.

    Matrices are (methods, methods); entry [i, j] is method i minus method j. The diagonal has difference 0
    and p 1. low, high and p are of a single pair; low_holm, high_holm and p_holm are corrected for all pairs
    of this metric. `corrected` takes one kind or the other, so that interval and p agree.

    seeds: those that the scores are means over; empty without several seeds. seed_means: the mean over cases
    of each seed, (seeds, methods); NaN for a method with one training. covers_seeds: whether intervals and p
    cover the draw of the seeds; p_permutation never does.
    """

    metric: str
    class_name: str
    methods: tuple[str, ...]
    higher_is_better: bool
    num_cases: int
    num_patients: int
    num_dropped: int
    unit: Unit
    interval: Interval
    mean: np.ndarray
    mean_low: np.ndarray
    mean_high: np.ndarray
    difference: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray
    low_holm: np.ndarray
    high_holm: np.ndarray
    p_holm: np.ndarray
    p_permutation: np.ndarray
    seeds: tuple[int, ...] = ()
    seed_means: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    covers_seeds: bool = False

    @property
    def seed_spread(self) -> np.ndarray:
        """Standard deviation over the seeds of each method's mean; NaN with one training."""
        if not self.seeds:
            return np.full(len(self.methods), np.nan)
        spread: np.ndarray = self.seed_means.std(0, ddof=1)
        return spread

    @property
    def pair_spread(self) -> np.ndarray:
        """Standard deviation over the seeds of each difference, (methods, methods); NaN as above."""
        if not self.seeds:
            return np.full((len(self.methods),) * 2, np.nan)
        # a method with one training adds nothing that is known
        means = np.where(np.isnan(self.seed_means), 0, self.seed_means)
        spread: np.ndarray = (means[:, :, None] - means[:, None, :]).std(0, ddof=1)
        unknown = np.isnan(self.seed_spread)
        return np.where(unknown[:, None] & unknown, np.nan, spread)

    @property
    def num_pairs(self) -> int:
        return len(self.methods) * (len(self.methods) - 1) // 2

    @property
    def heading(self) -> str:
        """Metric, class, unit and direction, as the head of a column."""
        return registry.heading(self.metric, self.class_name, higher_is_better=self.higher_is_better)

    def corrected(self, correction: Correction = "holm") -> Estimate:
        """Differences, intervals and p-values that belong together, each (methods, methods)."""
        check_choice("correction", correction, Correction)
        if correction == "holm":
            return Estimate(self.difference, self.low_holm, self.high_holm, self.p_holm)
        return Estimate(self.difference, self.low, self.high, self.p)

    def superior(self, *, level: float = 0.05, correction: Correction = "holm") -> np.ndarray:
        """Bool (methods, methods): whether method i is significantly better than method j."""
        p = self.corrected(correction).p
        gain = self.difference if self.higher_is_better else -self.difference
        better: np.ndarray = (gain > 0) & (p < level)
        return better

    def best(self, *, level: float = 0.05, correction: Correction = "holm") -> tuple[str, ...]:
        """The methods that are not significantly worse than any other; the paper marks them red."""
        superior = self.superior(level=level, correction=correction)
        return tuple(method for number, method in enumerate(self.methods) if not superior[:, number].any())


def compare_cases(
    table: CaseTable,
    metric: str,
    *,
    class_name: str | None = None,
    methods: Sequence[str] | None = None,
    unit: Unit | None = None,
    missing: Missing = "error",
    interval: Interval = "combined",
    num_resamples: int = 10_000,
    level: float = 0.05,
    seed: int = 0,
    higher_is_better: bool | None = None,
    cover_seeds: bool = True,
) -> Comparison:
    """All pairs of methods of a case table compared on one metric; see the module docstring.

    unit: what is resampled; None takes patients with all their cases if a patient has several, see
    `resampling_unit`. Single cases of such patients are not independent, and too many differences are found.
    missing: see `CaseTable.paired`. level: 1 minus the coverage of the intervals. higher_is_better: for a
    metric whose name does not tell. The same seed gives the same result for any order of the rows.
    cover_seeds: whether intervals and p cover the draw of the training seeds, or patients alone, given these
    trainings; without several seeds there is no difference.

    >>> from semidice.metrics.cases import CaseRow
    >>> rows = [
    ...     CaseRow(f"case{i}", f"case{i}", 0, method, "mean", "dice_score", 0.8 + gain * (i % 3))
    ...     for i in range(20)
    ...     for method, gain in (("SDL", 0.0), ("DML1", 0.02))
    ... ]
    >>> compare_cases(CaseTable.from_rows(rows), "dice_score").best()
    ('DML1',)
    """
    scores = table.paired(metric, class_name=class_name, methods=methods, missing=missing)
    return compare_scores(
        scores,
        unit=unit,
        interval=interval,
        num_resamples=num_resamples,
        level=level,
        seed=seed,
        higher_is_better=higher_is_better,
        cover_seeds=cover_seeds,
    )


def compare_scores(
    scores: PairedScores,
    *,
    unit: Unit | None = None,
    interval: Interval = "combined",
    num_resamples: int = 10_000,
    level: float = 0.05,
    seed: int = 0,
    higher_is_better: bool | None = None,
    baseline: str | None = None,
    cover_seeds: bool = True,
) -> Comparison:
    """`compare_cases` of paired scores.

    baseline: compare each method with this one only, so that the correction is over fewer pairs; the entries
    of all other pairs are NaN.
    """
    unit = resampling_unit(scores.patients, scores.cases) if unit is None else unit
    check_choice("unit", unit, Unit)
    num_methods, pairs = len(scores.methods), _pairs(scores.methods, baseline)
    contrasts = _contrasts(pairs, num_methods)
    per_case = _differences(scores.values, contrasts)
    groups = scores.patients if unit == "patient" else None
    variance = _seed_variance(scores, contrasts, groups) if cover_seeds else None
    options: dict[str, Any] = {"groups": groups, "num_resamples": num_resamples, "seed": seed}
    estimated: Callable[[int, float], Estimate] = partial(
        _estimated, per_case, variance, interval=interval, **options
    )
    p_permutation = permutation_test(per_case[:, : len(pairs)], **options)
    # the interval of few cases may extend beyond the possible means
    lowest, highest = possible_means(scores.metric, scores.values)
    estimate = estimated(len(contrasts), level)
    of_methods = _within(Estimate(*(part[len(pairs) :] for part in estimate)), lowest, highest)
    single = Estimate(*(part[: len(pairs)] for part in estimate))
    p_holm = holm(single.p)
    corrected_level = agreeing_level(single.p, p_holm, level)
    wider = single if corrected_level == level else estimated(len(pairs), corrected_level)
    most = highest - lowest
    of_pairs, corrected = (
        _agreeing(_within(each, -most, most), level) for each in (single, wider._replace(p=p_holm))
    )
    return Comparison(
        metric=scores.metric,
        class_name=scores.class_name,
        methods=scores.methods,
        higher_is_better=registry.higher_is_better(scores.metric)
        if higher_is_better is None
        else higher_is_better,
        num_cases=len(scores.cases),
        num_patients=len(set(scores.patients)),
        num_dropped=scores.num_dropped,
        unit=unit,
        interval=interval,
        mean=of_methods.value,
        mean_low=of_methods.low,
        mean_high=of_methods.high,
        **_pair_matrices(partial(_matrix, pairs, num_methods), of_pairs, corrected, p_permutation),
        **_seed_means(scores),
        covers_seeds=variance is not None,
    )


def _estimated(
    per_case: np.ndarray, variance: SeedVariance | None, num_columns: int, level: float, **options: Any
) -> Estimate:
    """Estimates of the first columns. variance: of the seeds, which intervals and p then cover."""
    estimate = paired_bootstrap(per_case[:, :num_columns], level=level, **options)
    if variance is None:
        return estimate
    of_seeds, of_cases = variance.of_seeds[:num_columns], variance.of_cases[:num_columns]
    return with_seed_variance(estimate, SeedVariance(of_seeds, of_cases, variance.freedom), level)


def _pair_matrices(
    matrix: Callable[[np.ndarray, np.ndarray, float], np.ndarray],
    of_pairs: Estimate,
    corrected: Estimate,
    p_permutation: np.ndarray,
) -> dict[str, Any]:
    """The fields of a `Comparison` with an entry for each method and each other method."""
    return {
        "difference": matrix(of_pairs.value, -of_pairs.value, 0.0),
        "low": matrix(of_pairs.low, 0 - of_pairs.high, 0.0),
        "high": matrix(of_pairs.high, 0 - of_pairs.low, 0.0),
        "p": matrix(of_pairs.p, of_pairs.p, 1.0),
        "low_holm": matrix(corrected.low, 0 - corrected.high, 0.0),
        "high_holm": matrix(corrected.high, 0 - corrected.low, 0.0),
        "p_holm": matrix(corrected.p, corrected.p, 1.0),
        "p_permutation": matrix(p_permutation, p_permutation, 1.0),
    }


def _seed_variance(
    scores: PairedScores, contrasts: np.ndarray, groups: Sequence[str] | None
) -> SeedVariance | None:
    """Of each contrast; None without several seeds."""
    if scores.of_seeds is None:
        return None
    per_seed = np.stack([_differences(values, contrasts) for values in scores.of_seeds.values])
    return seed_variance(per_seed, scores.of_seeds.folds, groups)


def _seed_means(scores: PairedScores) -> dict[str, Any]:
    """The fields of a comparison on seeds."""
    if scores.of_seeds is None:
        return {}
    means = np.where(scores.of_seeds.trained, scores.of_seeds.values.mean(1), np.nan)
    return {"seeds": scores.of_seeds.seeds, "seed_means": means}


def _pairs(methods: Sequence[str], baseline: str | None) -> list[tuple[int, int]]:
    """The pairs of methods that are compared: all, or those with the baseline."""
    pairs = list(combinations(range(len(methods)), 2))
    if baseline is None:
        return pairs
    if baseline not in methods:
        raise ValueError(f"baseline must be one of {', '.join(methods)}; got {baseline!r}")
    return [pair for pair in pairs if methods.index(baseline) in pair]


def _differences(values: np.ndarray, contrasts: np.ndarray) -> np.ndarray:
    """Each contrast of the methods' scores, one row per case; exactly 0 where only the last digit differs."""
    per_case: np.ndarray = values @ contrasts.T
    # equal scores may differ in their last digit, for every case in the same way, which is no difference
    rounding = ROUNDING * (np.abs(values) @ np.abs(contrasts).T)
    per_case[np.abs(per_case) <= rounding] = 0
    return per_case


def _matrix(
    pairs: Sequence[tuple[int, int]], size: int, upper: np.ndarray, lower: np.ndarray, diagonal: float
) -> np.ndarray:
    """A matrix from the numbers of each pair (i, j): `upper` at [i, j], `lower` at [j, i]; else NaN."""
    full = np.full((size, size), np.nan)
    np.fill_diagonal(full, diagonal)
    for (first, second), above, below in zip(pairs, upper, lower, strict=True):
        full[first, second], full[second, first] = above, below
    return full


def possible_means(metric: str, values: np.ndarray) -> tuple[float, float]:
    """Between which numbers the mean of these scores must lie: 0 and 1 for a share, such as Dice.

    >>> possible_means("dice_score", np.array([0.2, 0.9])), possible_means("volume_error_ml", np.array([0.5]))
    ((0.0, 1.0), (-inf, inf))
    """
    is_share = registry.display_scale(metric) == 100 and np.min(values) >= 0 and np.max(values) <= 1
    return (0.0, 1.0) if is_share else (-np.inf, np.inf)


def _contrasts(pairs: Sequence[tuple[int, int]], num_methods: int) -> np.ndarray:
    """One row per pair, the first method minus the second; then one row per method."""
    contrasts = np.zeros((len(pairs) + num_methods, num_methods))
    for row, (first, second) in enumerate(pairs):
        contrasts[row, first], contrasts[row, second] = 1, -1
    contrasts[len(pairs) :] = np.eye(num_methods)
    return contrasts


def _within(estimate: Estimate, lowest: float, highest: float) -> Estimate:
    return estimate._replace(
        low=np.clip(estimate.low, lowest, highest), high=np.clip(estimate.high, lowest, highest)
    )


def _agreeing(estimate: Estimate, level: float) -> Estimate:
    """The estimate whose interval contains 0 if and only if p is not below the level.

    With few cases, p cannot be below the level, however far the cases are from 0: the interval of the
    resamples is too narrow, and is extended to 0. An interpolated end on the wrong side of 0 is moved to 0.
    """
    low, high = estimate.low, estimate.high
    found = estimate.p < level
    above, below = found & (estimate.value > 0), found & (estimate.value < 0)
    tiny = np.finfo(np.float64).tiny
    low = np.where(found, np.where(above, np.maximum(low, tiny), low), np.minimum(low, 0))
    high = np.where(found, np.where(below, np.minimum(high, -tiny), high), np.maximum(high, 0))
    return estimate._replace(low=low, high=high)


def agreeing_level(p: np.ndarray, p_holm: np.ndarray, level: float) -> float:
    """The level of corrected intervals: level / m, or the largest divisor that agrees with Holm's decisions.

    If Holm's method leaves r of m pairs, every other p is below level / (r + 1), and none of the r is below
    level / r. So the divisor is r + 1 or more.
    """
    found = p[p_holm < level]
    for divisor in range(len(p), 1, -1):
        if (found < level / divisor).all():
            return level / divisor
    return level


def holm(p: np.ndarray) -> np.ndarray:
    """p-values after Holm's step-down correction, which bounds the family-wise error over all of `p`.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p)
    if p.ndim != 1 or p.dtype.kind != "f" or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"p must be p-values, numbers from 0 to 1; got {p}")
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, stepped)
    return corrected
