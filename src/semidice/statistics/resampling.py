"""One test of mean differences over cases, for many columns at once: paired bootstrap and sign flips.

d is the mean of a column of per-case differences. Resample k draws cases, or groups of cases such as those of
a patient, with replacement. All columns share the draw, so one product of counts and differences serves them
all. With d and its standard error s in the data, d_k and s_k in the resample, t_k = (d_k - d) / s_k:

    p = the larger of twice the tail of t_k beyond d / s, and the p-value of flipped signs

The interval spans those of both tests, so it excludes 0 where p < 0.05. The test keeps its level where two
methods can be exchanged, and nearly so with moderately skewed differences. With very skewed differences and
few cases no test does (docs/metrics.md has the simulation).
Left out: which columns to compare (`compare`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from ..options import Bounds, check_value

ALPHA = 0.05
# counts of a chunk of resamples: 8 MB
_CHUNK = 1 << 20
# relative; sums of the same numbers in another order differ by less
ROUNDING = 1e-12


class Estimate(NamedTuple):
    """An estimate, its interval, and the two-sided p-value of the hypothesis 0; one entry per column."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray
    # by flipped signs alone
    p_flips: np.ndarray


def paired_test(
    differences: np.ndarray,
    *,
    groups: Sequence[str] | None = None,
    alpha: float = ALPHA,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Mean of each column of per-case differences (cases, columns), its interval and its p-value.

    groups: one name per case; cases of one group are drawn together. alpha: 1 minus the coverage of the
    interval. p is at least 1 / (num_resamples + 1), and at least 2^(1 - n) for n cases or groups, the
    smallest p of a sign test: with five or fewer, nothing is significant at 0.05, also where the interval
    excludes 0. A column of zeros has p 1. p_flips: if two methods can be exchanged, the difference of a case
    (or group) is as likely as its negative; exact where 2^n <= num_resamples.

    >>> estimate = paired_test(np.array([[0.1], [0.3], [0.2], [0.2], [0.1], [0.3]]))
    >>> round(float(estimate.value[0]), 3), float(estimate.p_flips[0])
    (0.2, 0.03125)
    """
    return Resamples.of(differences, groups, num_resamples, seed).estimate(alpha)


@dataclass(frozen=True)
class Resamples:
    """What all intervals and p-values of some differences are made of, at any level."""

    value: np.ndarray
    error: np.ndarray
    # t of each resample about the mean of the data
    ratio: np.ndarray
    # sums of the groups' differences, then their sizes
    columns: np.ndarray
    # sums over the groups of these columns, with flipped signs
    flipped: np.ndarray

    @classmethod
    def of(
        cls, differences: np.ndarray, groups: Sequence[str] | None, num_resamples: int, seed: int
    ) -> "Resamples":
        """Of `paired_test`."""
        sums, sizes = _group_sums(differences, groups)
        if len(sizes) < 2:
            raise ValueError(f"a paired comparison needs two or more cases or patients; got {len(sizes)}")
        check_value(Annotated[int, Bounds(at_least=100, at_most=1_000_000)], num_resamples=num_resamples)
        check_value(Annotated[int, Bounds(at_least=0)], seed=seed)
        value = sums.sum(0) / sizes.sum()
        residual = sums - value * sizes[:, None]
        error = np.sqrt((residual**2).sum(0) * (len(sizes) / (len(sizes) - 1))) / sizes.sum()
        drawn, drawn_error = _resampled(residual, sizes, num_resamples, seed)
        # a resample without spread has standard error 0: its ratio is infinite, or 0 if it equals the mean
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = drawn / drawn_error
        ratio[(drawn_error == 0) & (drawn == 0)] = 0
        columns = np.hstack([sums, sizes[:, None]])
        return cls(value, error, ratio, columns, _flip_signs(columns, num_resamples, seed))

    def estimate(self, alpha: float) -> Estimate:
        """The mean of each column with its interval at this level, which spans those of both tests."""
        check_value(Annotated[float, Bounds(above=0, at_most=1)], alpha=alpha)
        value, error, ratio = self.value, self.error, self.ratio
        with np.errstate(divide="ignore", invalid="ignore"):
            observed = value / error
        beyond = np.where(observed > 0, (ratio >= observed).sum(0), (ratio <= observed).sum(0))
        p = 2 * (beyond + 1) / (len(ratio) + 1)
        # the order statistic at which p crosses alpha; the interval contains the mean
        rank = min(len(ratio) - 1, int(np.ceil((1 - alpha / 2) * (len(ratio) + 1))) - 1)
        ends = (np.maximum(0, np.partition(part, rank, axis=0)[rank]) for part in (ratio, -ratio))
        # all differences are equal: the interval has no width, also if the ratio is infinite
        below, above = (np.where(error == 0, 0.0, end) * error for end in ends)
        low, high = self._flipped_interval(alpha)
        total = np.abs(self.columns[:, :-1].sum(0))
        # a sum of the same numbers in another order must count as equal
        p_flips = (np.abs(self.flipped[:, :-1]) >= total * (1 - ROUNDING)).mean(0)
        p = np.maximum(p, p_flips)
        # no difference in any case: there is no spread to resample
        p = np.where((error == 0) & (value == 0), 1.0, p)
        p = np.minimum(1.0, np.maximum(p, 2.0 ** (1 - len(self.columns))))
        return Estimate(value, np.minimum(low, value - below), np.maximum(high, value + above), p, p_flips)

    def _flipped_interval(self, alpha: float) -> tuple[np.ndarray, np.ndarray]:
        """All m for which flipping the signs of d_i - m gives p >= alpha.

        Flipping a part of the cases makes |sum| at least as large as observed if and only if m lies between
        the mean of that part and the mean of the rest. So p as a function of m counts these pairs of means.
        """
        *_, size = whole = self.columns.sum(0)
        kept = (whole + self.flipped) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            part, rest = (each[:, :-1] / each[:, -1:] for each in (kept, whole - kept))
        # if all signs or none are flipped, every m lies between
        trivial = (kept[:, -1:] == 0) | (kept[:, -1:] == size)
        below = np.where(trivial, -np.inf, np.minimum(part, rest))
        above = np.where(trivial, np.inf, np.maximum(part, rest))
        # with so few cases that no p is below alpha, the widest interval: all of these means
        most = len(self.flipped) - 1
        rank = min(most, max(int(trivial.sum()), int(np.ceil(alpha * len(self.flipped))) - 1))
        low = np.partition(below, rank, axis=0)[rank]
        high = np.partition(above, most - rank, axis=0)[most - rank]
        slack = ROUNDING * np.abs(self.value)
        return np.minimum(low, self.value) - slack, np.maximum(high, self.value) + slack


def _flip_signs(columns: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Sums of each column with flipped signs of its rows: all 2^n choices, or random ones and no flip."""
    num_groups = len(columns)
    if 2**num_groups <= num_resamples:
        numbers = np.arange(2**num_groups)[:, None]
        every: np.ndarray = ((numbers >> np.arange(num_groups) & 1) * 2.0 - 1) @ columns
        return every
    rng = np.random.default_rng(seed)
    chunks = [columns.sum(0, keepdims=True)]
    for rows in _chunk_sizes(num_groups, num_resamples):
        chunks.append((rng.integers(0, 2, (rows, num_groups), dtype=np.int8) * 2.0 - 1) @ columns)
    return np.concatenate(chunks)


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
        # of a sample of the groups
        square = np.maximum(square, 0) * (num_groups / (num_groups - 1))
        chunks.append((mean, np.sqrt(square) / size))
    drawn, drawn_error = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    return drawn, drawn_error


def _chunk_sizes(num_groups: int, num_resamples: int) -> Iterator[int]:
    step = max(1, _CHUNK // num_groups)
    for start in range(0, num_resamples, step):
        yield min(step, num_resamples - start)


def _group_sums(differences: np.ndarray, groups: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Sum of each group's differences (groups, columns), and the number of its cases."""
    differences = np.asarray(differences, np.float64)
    if differences.ndim != 2 or not np.isfinite(differences).all():
        raise ValueError(
            f"differences must be finite numbers (cases, columns); got shape {differences.shape} with "
            f"{int((~np.isfinite(differences)).sum())} that are not finite: leave such cases out"
        )
    if groups is None:
        return differences, np.ones(len(differences))
    if len(groups) != len(differences):
        raise ValueError(f"groups needs one name per case; got {len(groups)} for {len(differences)} cases")
    inverse = np.unique(np.array(groups), return_inverse=True)[1]
    membership = (np.arange(inverse.max() + 1)[:, None] == inverse).astype(np.float64)
    return membership @ differences, membership.sum(1)
