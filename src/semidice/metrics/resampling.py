"""Paired bootstrap and permutation test of mean differences over cases, for many columns at once.

d is the mean of a column of per-case differences. Resample k draws cases, or groups of cases such as those of
a patient, with replacement. All columns share the draw, so one product of counts and differences serves them
all. With d and its standard error s in the data, d_k and s_k in the resample:

    studentised   p = share of |d_k - d| / s_k >= |d| / s;  interval d -+ q s, q their 95 % quantile
    percentile    p = twice the smaller share of d_k < 0 and d_k > 0;  2.5 and 97.5 % quantiles of d_k
    bca           the percentile interval corrected for bias and skewness (Efron, 1987)

In each, the interval excludes 0 where p < 0.05. The default is studentised, because only it keeps its level
with few cases (docs/metrics.md has the simulation). Where a few failures make up nearly all of the
differences it is cautious, and the permutation test has more power.
Left out: which columns to compare (`statistics`).
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from ..arrays import check_choice

Interval = Literal["studentised", "percentile", "bca"]

# counts of a chunk of resamples: 8 MB
_CHUNK = 1 << 20


class Estimate(NamedTuple):
    """An estimate, its interval, and the two-sided p-value of the hypothesis 0; one entry per column."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray


def paired_bootstrap(
    differences: np.ndarray,
    *,
    groups: Sequence[str] | None = None,
    interval: Interval = "studentised",
    num_resamples: int = 10_000,
    level: float = 0.05,
    seed: int = 0,
) -> Estimate:
    """Mean of each column of per-case differences (cases, columns), its interval and its p-value.

    groups: one name per case; cases of one group are drawn together. p is at least 1 / (num_resamples + 1),
    and at least 2^(1 - n) for n cases or groups, the smallest p of a sign test: with five or fewer, nothing
    is significant at 0.05. A column of zeros has p 1.

    >>> estimate = paired_bootstrap(np.array([[0.1], [0.3], [0.2], [0.2], [0.1], [0.3], [0.2]]))
    >>> round(float(estimate.value[0]), 3), bool(estimate.p[0] < 0.05)
    (0.2, True)
    """
    check_choice("interval", interval, Interval)
    sums, sizes = _group_sums(differences, groups)
    _check_resampling(len(sizes), num_resamples, level)
    value = sums.sum(0) / sizes.sum()
    residual = sums - value * sizes[:, None]
    error = np.sqrt((residual**2).sum(0) * _small_sample(len(sizes))) / sizes.sum()
    drawn, drawn_error = _resampled(residual, sizes, num_resamples, seed)
    if interval == "studentised":
        low, high, p = _studentised(value, error, drawn, drawn_error, level)
    else:
        plain = np.zeros_like(value), np.zeros_like(value)
        bias, skew = plain if interval == "percentile" else _bca_terms(residual, sizes, drawn)
        low, high, p = _percentile(value, drawn, bias, skew, level)
    # all differences are equal: there is no spread to resample
    p = np.where((error == 0) & (value == 0), 1.0, p)
    return Estimate(value, low, high, np.minimum(1.0, np.maximum(p, 2.0 ** (1 - len(sizes)))))


def permutation_test(
    differences: np.ndarray,
    *,
    groups: Sequence[str] | None = None,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> np.ndarray:
    """Two-sided p-value of each column's mean being 0, by flipping signs; exact where 2^n <= num_resamples.

    Under the null hypothesis that two methods can be exchanged, the difference of a case (or group) is as
    likely as its negative. p counts the observed signs as one of the resamples.

    >>> permutation_test(np.array([[0.1], [0.3], [0.2], [0.2], [0.1], [0.3]])).tolist()
    [0.03125]
    """
    sums, sizes = _group_sums(differences, groups)
    _check_resampling(len(sizes), num_resamples, 0.05)
    # a sum of the same numbers in another order must count as equal
    observed = np.abs(sums.sum(0)) * (1 - 1e-12)
    if 2 ** len(sizes) <= num_resamples:
        numbers = np.arange(2 ** len(sizes))[:, None]
        signs = (numbers >> np.arange(len(sizes)) & 1) * 2.0 - 1
        share: np.ndarray = (np.abs(signs @ sums) >= observed).mean(0)
        return share
    as_extreme = np.ones(sums.shape[1])
    rng = np.random.default_rng(seed)
    for rows in _chunk_sizes(len(sizes), num_resamples):
        signs = rng.integers(0, 2, (rows, len(sizes)), dtype=np.int8) * 2.0 - 1
        as_extreme += (np.abs(signs @ sums) >= observed).sum(0)
    return as_extreme / (num_resamples + 1)


def _studentised(
    value: np.ndarray, error: np.ndarray, drawn: np.ndarray, drawn_error: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # a resample without spread has standard error 0: its ratio is infinite, or 0 if it equals the mean
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(drawn) / drawn_error
        observed = np.abs(value) / error
    ratio[(drawn_error == 0) & (drawn == 0)] = 0
    num_resamples = len(ratio)
    p = ((ratio >= observed).sum(0) + 1) / (num_resamples + 1)
    # the order statistic at which p crosses the level, so that interval and p agree
    rank = min(num_resamples - 1, int(np.ceil((1 - level) * (num_resamples + 1))) - 1)
    quantile = np.partition(ratio, rank, axis=0)[rank]
    half_width = np.where(error == 0, 0.0, quantile * error)
    return value - half_width, value + half_width, p


def _percentile(
    value: np.ndarray, drawn: np.ndarray, bias: np.ndarray, skew: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Percentile interval with the bias and acceleration of BCa (0: the plain one), and its p-value."""
    num_resamples = len(drawn)
    ends = []
    for end in (level / 2, 1 - level / 2):
        reached = bias + _normal_quantile(np.array(end))
        share = _normal_cdf(bias + reached / (1 - skew * reached))
        ends.append(np.array([np.quantile(column, at) for column, at in zip(drawn.T, share, strict=True)]))
    smallest = 1 / (num_resamples + 1)
    # half of the draws at exactly 0 count below it
    below = ((drawn + value < 0).sum(0) + 0.5 * (drawn + value == 0).sum(0) + 0.5) / (num_resamples + 1)
    shifted = _normal_quantile(np.clip(below, smallest / 2, 1 - smallest / 2)) - bias
    tail = _normal_cdf(shifted / (1 + skew * shifted) - bias)
    return value + ends[0], value + ends[1], np.maximum(smallest, 2 * np.minimum(tail, 1 - tail))


def _bca_terms(residual: np.ndarray, sizes: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bias correction, and acceleration from the jackknife over cases or groups (Efron, 1987)."""
    share = ((drawn < 0).sum(0) + 0.5 * (drawn == 0).sum(0)) / len(drawn)
    bias = _normal_quantile(np.clip(share, 0.5 / len(drawn), 1 - 0.5 / len(drawn)))
    left_out = -residual / (sizes.sum() - sizes)[:, None]
    centred = left_out.mean(0) - left_out
    spread = (centred**2).sum(0)
    skew = (centred**3).sum(0) / np.where(spread > 0, 6 * spread**1.5, 1)
    return bias, skew


def _resampled(
    residual: np.ndarray, sizes: np.ndarray, num_resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each resample minus that of the data, and its standard error: both (num_resamples, columns)."""
    num_groups, num_columns = residual.shape
    # with cluster sizes n, the mean is sum r / sum n, and its error follows from the sums of r^2, r n and n^2
    sums_of = np.hstack(
        [residual, residual**2, residual * sizes[:, None], sizes[:, None], sizes[:, None] ** 2]
    )
    chunks = []
    rng = np.random.default_rng(seed)
    for rows in _chunk_sizes(num_groups, num_resamples):
        chosen = rng.integers(0, num_groups, (rows, num_groups)) + num_groups * np.arange(rows)[:, None]
        # how often each group is drawn in each resample
        counts = np.bincount(chosen.ravel(), minlength=rows * num_groups)
        sums = counts.reshape(rows, num_groups).astype(np.float64) @ sums_of
        first, second, cross = np.split(sums[:, : 3 * num_columns], 3, axis=1)
        size, size_square = sums[:, -2:-1], sums[:, -1:]
        mean = first / size
        square = second - 2 * mean * cross + mean**2 * size_square
        chunks.append((mean, np.sqrt(np.maximum(square, 0) * _small_sample(num_groups)) / size))
    drawn, drawn_error = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    return drawn, drawn_error


def _chunk_sizes(num_groups: int, num_resamples: int) -> Iterator[int]:
    step = max(1, _CHUNK // num_groups)
    for start in range(0, num_resamples, step):
        yield min(step, num_resamples - start)


def _group_sums(differences: np.ndarray, groups: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Sum of each group's differences (groups, columns), and the number of its cases."""
    if differences.ndim != 2 or not np.isfinite(differences).all():
        raise ValueError(
            f"differences must be finite numbers (cases, columns); got shape {differences.shape} "
            f"with {int((~np.isfinite(differences)).sum())} that are not finite: leave such cases out"
        )
    if groups is None:
        return differences, np.ones(len(differences))
    if len(groups) != len(differences):
        raise ValueError(f"groups needs one name per case; got {len(groups)} for {len(differences)} cases")
    inverse = np.unique(np.array(groups), return_inverse=True)[1]
    membership = np.zeros((inverse.max() + 1, len(inverse)))
    membership[inverse, np.arange(len(inverse))] = 1
    return membership @ differences, membership.sum(1)


def _small_sample(num_groups: int) -> float:
    return num_groups / (num_groups - 1)


def _check_resampling(num_groups: int, num_resamples: int, level: float) -> None:
    if num_groups < 2:
        raise ValueError(f"a paired comparison needs two or more cases or patients; got {num_groups}")
    if num_resamples < 100:
        raise ValueError(f"num_resamples must be 100 or more; got {num_resamples}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1; got {level}")


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    cdf: np.ndarray = torch.special.ndtr(torch.as_tensor(z, dtype=torch.float64)).numpy()
    return cdf


def _normal_quantile(p: np.ndarray) -> np.ndarray:
    quantile: np.ndarray = torch.special.ndtri(torch.as_tensor(p, dtype=torch.float64)).numpy()
    return quantile
