"""Which method is better: all pairs compared on the same cases, Holm's correction, and the best set.

The test is that of `resampling`: a paired bootstrap and flipped signs over cases, or over patients with all
their cases if a patient has several. A method is in the best set if it is not significantly worse than any
other; the paper marks its tables by this rule. Holm's correction is over the m pairs of one metric.
The corrected intervals are at level 0.05 / m (Bonferroni). Where Holm's method finds more, the divisor is
the largest at which they agree with it: an interval excludes 0 exactly where its p is below 0.05.
With several seeds, the score of a case is the mean over them, and intervals also cover the draw of the seeds
(`seeds`). Left out: the resampling (`resampling`), tables and figures (`tables`, `report`), unpaired
comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ..errors import UserError
from ..metrics.registry import ScoreKey
from .cases import CaseTable
from .pairing import PairedScores, paired
from .resampling import ALPHA, ROUNDING, Estimate, Resamples
from .seeds import SeedVariance, seed_variance, with_seed_variance


def several_per_patient(patients: Sequence[str] | np.ndarray, cases: Sequence[str] | np.ndarray) -> bool:
    """Whether to resample patients with all their cases, because a patient has several.

    Not where all cases are of one patient, because one patient cannot be resampled.

    >>> several_per_patient(["p", "p", "q"], ["a", "b", "c"]), several_per_patient(["p", "p"], ["a", "b"])
    (True, False)
    """
    return 1 < len(set(patients)) < len(set(cases))


@dataclass(frozen=True)
class Comparison:
    """The mean of each method and the difference of each pair, for one metric and class.

    means: one row per method, with columns mean, low, high (the interval), spread (standard deviation over
    the seeds of the mean; NaN with one training), and best (whether it is in the best set).
    pairs: one row per ordered pair, the first method minus the second, so `pairs.loc["DML1", "SDL"]`:
    difference; low, high and p after Holm's correction for all pairs; low_single, high_single and p_single of
    this pair alone; p_flips, by flipped signs alone; spread, over the seeds; better, whether the first is
    significantly better. by_patient: whether patients were resampled. covers_seeds: whether intervals and p
    cover the draw of the seeds; p_flips never does.
    """

    scores: PairedScores
    means: pd.DataFrame
    pairs: pd.DataFrame
    by_patient: bool
    alpha: float
    covers_seeds: bool

    @property
    def key(self) -> ScoreKey:
        return self.scores.key

    @property
    def class_name(self) -> str:
        return self.scores.class_name

    @property
    def methods(self) -> tuple[str, ...]:
        return self.scores.methods

    @property
    def num_cases(self) -> int:
        return len(self.scores.cases)

    @property
    def num_patients(self) -> int:
        return len(set(self.scores.patients))

    @property
    def num_pairs(self) -> int:
        return len(self.pairs) // 2

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that the scores are means over; empty without several."""
        return self.scores.of_seeds.seeds if self.scores.of_seeds else ()

    @property
    def seed_means(self) -> np.ndarray:
        """The mean over cases of each seed, (seeds, methods); NaN for a method with one training."""
        return _seed_means(self.scores)

    @property
    def heading(self) -> str:
        """Metric, class, unit and direction, as the head of a column."""
        return self.key.heading(self.class_name)

    @property
    def best(self) -> tuple[str, ...]:
        """The methods that are not significantly worse than any other; the paper marks them red."""
        return tuple(self.means.index[self.means["best"]])


def compare_cases(
    table: CaseTable,
    score: ScoreKey | str,
    *,
    class_name: str | None = None,
    methods: Sequence[str] = (),
    drop: bool = False,
    **options: Any,
) -> Comparison:
    """`compare_scores` of `paired` scores of a case table; the order of the rows does not change the result.

    >>> from semidice.statistics import case_table
    >>> rows = [
    ...     {"case": f"case{i}", "method": method, "metric": "dice_score", "value": 0.8 + gain * (i % 3)}
    ...     for i in range(20)
    ...     for method, gain in (("SDL", 0.0), ("DML1", 0.02))
    ... ]
    >>> comparison = compare_cases(case_table(rows), "dice_score")
    >>> comparison.best, round(float(comparison.pairs.loc["DML1", "SDL"].difference), 3)
    (('DML1',), 0.019)
    """
    return compare_scores(paired(table, score, class_name, methods=methods, drop=drop), **options)


def compare_scores(
    scores: PairedScores,
    *,
    baseline: str | None = None,
    alpha: float = ALPHA,
    num_resamples: int = 10_000,
    seed: int = 0,
    cover_seeds: bool = True,
) -> Comparison:
    """All pairs of methods compared; see the module docstring.

    baseline: compare each method with this one only, so that the correction is over fewer pairs. alpha: level
    of the tests, and 1 minus the coverage of the intervals. cover_seeds: whether intervals and p cover the
    draw of the training seeds, or patients alone, given these trainings; without several seeds there is no
    difference.
    """
    higher_is_better = scores.key.higher_is_better
    pairs = _pairs(scores.methods, baseline)
    num_pairs = len(pairs)
    contrasts = _contrasts(pairs, len(scores.methods))
    by_patient = several_per_patient(scores.patients, scores.cases)
    groups = scores.patients if by_patient else None
    variance = _seed_variance(scores, contrasts, groups) if cover_seeds else None
    resamples = Resamples.of(_differences(scores.values, contrasts), groups, num_resamples, seed)

    def estimated(level: float) -> Estimate:
        estimate = resamples.estimate(level)
        return estimate if variance is None else with_seed_variance(estimate, variance, level)

    # the interval of few cases may extend beyond the possible means
    lowest, highest = possible_means(scores.key, scores.values)
    most = highest - lowest
    every = estimated(alpha)
    of_methods = _within(_part(every, slice(num_pairs, None)), lowest, highest)
    single = _part(every, slice(num_pairs))
    p_holm = holm(single.p)
    corrected_level = agreeing_level(single.p, p_holm, alpha)
    wider = single if corrected_level == alpha else _part(estimated(corrected_level), slice(num_pairs))
    single, corrected = (
        _agreeing(_within(each, -most, most), alpha) for each in (single, wider._replace(p=p_holm))
    )
    columns = {
        "difference": corrected.value,
        "low": corrected.low,
        "high": corrected.high,
        "p": corrected.p,
        "low_single": single.low,
        "high_single": single.high,
        "p_single": single.p,
        "p_flips": single.p_flips,
        "spread": _pair_spread(scores, pairs),
    }
    of_pairs = _pair_frame(scores.methods, pairs, columns)
    gain = of_pairs["difference"] if higher_is_better else -of_pairs["difference"]
    of_pairs["better"] = (gain > 0) & (of_pairs["p"] < alpha)
    beaten = set(of_pairs.index.get_level_values("second")[of_pairs["better"]])
    means = pd.DataFrame(
        {
            "mean": of_methods.value,
            "low": of_methods.low,
            "high": of_methods.high,
            "spread": _spread(_seed_means(scores)),
            "best": [method not in beaten for method in scores.methods],
        },
        index=pd.Index(scores.methods, name="method"),
    )
    return Comparison(scores, means, of_pairs, by_patient, alpha, variance is not None)


def _pair_frame(
    methods: Sequence[str], pairs: Sequence[tuple[int, int]], columns: dict[str, np.ndarray]
) -> pd.DataFrame:
    """One row per ordered pair, from the numbers of each pair (i, j), i < j."""
    forward = pd.DataFrame(columns)
    backward = forward.assign(
        **{name: 0 - forward[name] for name in ("difference",)},
        **{f"low{end}": 0 - forward[f"high{end}"] for end in ("", "_single")},
        **{f"high{end}": 0 - forward[f"low{end}"] for end in ("", "_single")},
    )
    names = [(methods[i], methods[j]) for i, j in pairs]
    index = pd.MultiIndex.from_tuples([*names, *((j, i) for i, j in names)], names=["first", "second"])
    return pd.concat([forward, backward]).set_axis(index)


def _seed_variance(
    scores: PairedScores, contrasts: np.ndarray, groups: Sequence[str] | None
) -> SeedVariance | None:
    """Of each contrast; None without several seeds."""
    if scores.of_seeds is None:
        return None
    per_seed = np.stack([_differences(values, contrasts) for values in scores.of_seeds.values])
    return seed_variance(per_seed, scores.of_seeds.folds, groups)


def _seed_means(scores: PairedScores) -> np.ndarray:
    if scores.of_seeds is None:
        return np.empty((0, len(scores.methods)))
    return np.where(scores.of_seeds.trained, scores.of_seeds.values.mean(1), np.nan)


def _spread(means: np.ndarray) -> np.ndarray:
    """Standard deviation over the seeds (rows); NaN without seeds."""
    return means.std(0, ddof=1) if len(means) > 1 else np.full(means.shape[1], np.nan)


def _pair_spread(scores: PairedScores, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Standard deviation over the seeds of each difference; NaN if neither method has several."""
    means = _seed_means(scores)
    unknown = np.isnan(_spread(means))
    # a method with one training adds nothing that is known
    known = np.where(np.isnan(means), 0, means)
    first, second = np.array(pairs, dtype=int).reshape(-1, 2).T
    return np.where(unknown[first] & unknown[second], np.nan, _spread(known[:, first] - known[:, second]))


def _part(estimate: Estimate, columns: slice) -> Estimate:
    return Estimate(*(part[columns] for part in estimate))


def _pairs(methods: Sequence[str], baseline: str | None) -> list[tuple[int, int]]:
    """The pairs of methods that are compared: all, or those with the baseline."""
    pairs = list(combinations(range(len(methods)), 2))
    if baseline is None:
        return pairs
    if baseline not in methods:
        raise UserError(f"baseline must be one of {', '.join(methods)}; got {baseline!r}")
    return [pair for pair in pairs if methods.index(baseline) in pair]


def _differences(values: np.ndarray, contrasts: np.ndarray) -> np.ndarray:
    """Each contrast of the methods' scores, one row per case; exactly 0 where only the last digit differs."""
    per_case: np.ndarray = values @ contrasts.T
    # equal scores may differ in their last digit, for every case in the same way, which is no difference
    rounding = ROUNDING * (np.abs(values) @ np.abs(contrasts).T)
    per_case[np.abs(per_case) <= rounding] = 0
    return per_case


def possible_means(key: ScoreKey, values: np.ndarray) -> tuple[float, float]:
    """Between which numbers the mean of these scores must lie: 0 and 1 for a share, such as Dice.

    >>> possible_means(ScoreKey("dice_score"), np.array([0.2, 0.9]))
    (0.0, 1.0)
    """
    is_share = key.scale == 100 and np.min(values) >= 0 and np.max(values) <= 1
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


def _agreeing(estimate: Estimate, alpha: float) -> Estimate:
    """The estimate whose interval contains 0 if and only if p is not below alpha.

    With few cases, p cannot be below alpha, however far the cases are from 0: the interval of the
    resamples is too narrow, and is extended to 0. An interpolated end on the wrong side of 0 is moved to 0.
    """
    low, high = estimate.low, estimate.high
    found = estimate.p < alpha
    above, below = found & (estimate.value > 0), found & (estimate.value < 0)
    tiny = np.finfo(np.float64).tiny
    low = np.where(found, np.where(above, np.maximum(low, tiny), low), np.minimum(low, 0))
    high = np.where(found, np.where(below, np.minimum(high, -tiny), high), np.maximum(high, 0))
    return estimate._replace(low=low, high=high)


def agreeing_level(p: np.ndarray, p_holm: np.ndarray, alpha: float) -> float:
    """The level of corrected intervals: alpha / m, or the largest divisor that agrees with Holm's decisions.

    If Holm's method leaves r of m pairs, every other p is below alpha / (r + 1), and none of the r is below
    alpha / r. So the divisor is r + 1 or more.
    """
    found = p[p_holm < alpha]
    for divisor in range(len(p), 1, -1):
        if (found < alpha / divisor).all():
            return alpha / divisor
    return alpha


def holm(p: np.ndarray) -> np.ndarray:
    """p-values after Holm's step-down correction, which bounds the family-wise error over all of `p`.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p)
    if p.ndim != 1 or p.dtype.kind != "f" or not ((p >= 0) & (p <= 1)).all():
        raise UserError(f"p must be p-values, numbers from 0 to 1; got {p}")
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, stepped)
    return corrected
