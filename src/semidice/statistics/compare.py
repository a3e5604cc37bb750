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
from .seeds import seed_variance, with_seed_variance


@dataclass(frozen=True, kw_only=True)
class Comparison(PairedScores):
    """The mean of each method and the difference of each pair, for one metric and class.

    means: one row per method, with columns mean, low, high (the interval), spread (standard deviation over
    the seeds of the mean; NaN with one training), and best (whether it is in the best set).
    pairs: one row per ordered pair, the first method minus the second, so `pairs.loc["DML1", "SDL"]`:
    difference; low, high and p after Holm's correction for all pairs; low_single, high_single and p_single of
    this pair alone; p_flips, by flipped signs alone; spread, over the seeds; better, whether the first is
    significantly better. covers_seeds: whether intervals and p cover the draw of the seeds; p_flips never
    does.
    """

    means: pd.DataFrame
    pairs: pd.DataFrame
    alpha: float
    covers_seeds: bool

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
    draw of the training seeds, or patients alone, given these trainings.
    """
    if baseline not in (None, *scores.methods):
        raise UserError(f"baseline must be one of {', '.join(scores.methods)}; got {baseline!r}")
    pairs = [pair for pair in combinations(scores.methods, 2) if baseline is None or baseline in pair]
    contrasts = _contrasts(scores.methods, pairs)
    groups = scores.patients if scores.by_patient else None
    resamples = Resamples.of(_differences(scores.values, contrasts), groups, num_resamples, seed)
    variance = None
    if cover_seeds and scores.of_seeds is not None:
        of_seeds = np.stack([_differences(values, contrasts) for values in scores.of_seeds])
        variance = seed_variance(of_seeds, scores.folds, groups)

    def estimated(level: float) -> Estimate:
        estimate = resamples.estimate(level)
        return estimate if variance is None else with_seed_variance(estimate, variance, level)

    single = estimated(alpha)
    of_methods = Estimate(*(part[len(pairs) :] for part in single))
    p_single = single.p[: len(pairs)]
    p = holm(p_single)
    level = agreeing_level(p_single, p, alpha)
    corrected = single if level == alpha else estimated(level)
    # the mean of shares lies between 0 and 1; the interval of few cases may extend further
    values, is_share = scores.values, scores.key.scale == 100
    is_bounded = is_share and values.min() >= 0 and values.max() <= 1
    lowest, highest = (0.0, 1.0) if is_bounded else (-np.inf, np.inf)
    spread = _spread(scores, contrasts)
    forward = pd.DataFrame(
        {
            "difference": single.value[: len(pairs)],
            **_agreeing(corrected, p, alpha, highest - lowest, ""),
            "p": p,
            **_agreeing(single, p_single, alpha, highest - lowest, "_single"),
            "p_single": p_single,
            "p_flips": single.p_flips[: len(pairs)],
            "spread": spread[: len(pairs)],
        }
    )
    of_pairs = _both_ways(forward, pairs)
    gain = of_pairs["difference"] if scores.key.higher_is_better else -of_pairs["difference"]
    of_pairs["better"] = (gain > 0) & (of_pairs["p"] < alpha)
    beaten = set(of_pairs.index.get_level_values("second")[of_pairs["better"]])
    means = pd.DataFrame(
        {
            "mean": of_methods.value,
            "low": np.clip(of_methods.low, lowest, highest),
            "high": np.clip(of_methods.high, lowest, highest),
            "spread": spread[len(pairs) :],
            "best": [method not in beaten for method in scores.methods],
        },
        index=pd.Index(scores.methods, name="method"),
    )
    found = {"means": means, "pairs": of_pairs, "alpha": alpha, "covers_seeds": variance is not None}
    return Comparison(**vars(scores), **found)


def _contrasts(methods: Sequence[str], pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """One row per pair, the first method minus the second; then one row per method."""
    of_method = dict(zip(methods, np.eye(len(methods)), strict=True))
    return np.stack([*(of_method[first] - of_method[second] for first, second in pairs), *of_method.values()])


def _differences(values: np.ndarray, contrasts: np.ndarray) -> np.ndarray:
    """Each contrast of the methods' scores, one row per case; exactly 0 where only the last digit differs."""
    per_case: np.ndarray = values @ contrasts.T
    # equal scores may differ in their last digit, for every case in the same way, which is no difference
    rounding = ROUNDING * (np.abs(values) @ np.abs(contrasts).T)
    per_case[np.abs(per_case) <= rounding] = 0
    return per_case


def _spread(scores: PairedScores, contrasts: np.ndarray) -> np.ndarray:
    """Standard deviation over the seeds of each contrast; NaN if none of its methods has several."""
    if not scores.seeds:
        return np.full(len(contrasts), np.nan)
    # a method with one training adds nothing that is known
    of_seeds = np.nan_to_num(scores.seed_means) @ contrasts.T
    has_seeds = np.abs(contrasts) @ np.array(scores.trained, float) > 0
    return np.where(has_seeds, of_seeds.std(0, ddof=1), np.nan)


def _both_ways(forward: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """One row per ordered pair, from the numbers of the pairs one way."""
    backward = forward.copy()
    backward["difference"] = 0 - forward["difference"]
    for end in ("", "_single"):
        backward[f"low{end}"], backward[f"high{end}"] = 0 - forward[f"high{end}"], 0 - forward[f"low{end}"]
    names = [*pairs, *((second, first) for first, second in pairs)]
    index = pd.MultiIndex.from_tuples(names, names=["first", "second"])
    return pd.concat([forward, backward]).set_axis(index)


def _agreeing(
    estimate: Estimate, p: np.ndarray, alpha: float, most: float, end: str
) -> dict[str, np.ndarray]:
    """Columns low and high of the pairs: an interval that contains 0 if and only if p is not below alpha.

    With few cases, p cannot be below alpha, however far the cases are from 0: the interval of the
    resamples is too narrow, and is extended to 0. An interpolated end on the wrong side of 0 is moved to 0.
    most: the largest possible difference.
    """
    value, *ends = (part[: len(p)] for part in (estimate.value, estimate.low, estimate.high))
    low, high = (np.clip(part, -most, most) for part in ends)
    found, tiny = p < alpha, np.finfo(np.float64).tiny
    low = np.where(found, np.where(value > 0, np.maximum(low, tiny), low), np.minimum(low, 0))
    high = np.where(found, np.where(value < 0, np.minimum(high, -tiny), high), np.maximum(high, 0))
    return {f"low{end}": low, f"high{end}": high}


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
