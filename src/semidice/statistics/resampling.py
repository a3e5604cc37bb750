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
from typing import NamedTuple

import numpy as np

from ..arrays import check_number, check_whole_number, describe

ALPHA = 0.05
# more would take hours and gigabytes, and change no digit that is printed
MAX_RESAMPLES = 1_000_000
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
    sums: np.ndarray
    sizes: np.ndarray
    # sums and sizes with flipped signs
    flipped: np.ndarray

    @classmethod
    def of(
        cls, differences: np.ndarray, groups: Sequence[str] | None, num_resamples: int, seed: int
    ) -> "Resamples":
        """Of `paired_test`."""
        sums, sizes = _group_sums(differences, groups)
        _check_resampling(len(sizes), num_resamples, seed)
        value = sums.sum(0) / sizes.sum()
        residual = sums - value * sizes[:, None]
        error = np.sqrt((residual**2).sum(0) * _small_sample(len(sizes))) / sizes.sum()
        drawn, drawn_error = _resampled(residual, sizes, num_resamples, seed)
        # a resample without spread has standard error 0: its ratio is infinite, or 0 if it equals the mean
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = drawn / drawn_error
        ratio[(drawn_error == 0) & (drawn == 0)] = 0
        flipped = _flip_signs(np.hstack([sums, sizes[:, None]]), num_resamples, seed)
        return cls(value, error, ratio, sums, sizes, flipped)

    def estimate(self, alpha: float) -> Estimate:
        """The mean of each column with its interval at this level."""
        check_number(alpha=alpha)
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie between 0 and 1; got {alpha}")
        value, error = self.value, self.error
        with np.errstate(divide="ignore", invalid="ignore"):
            observed = value / error
        low, high, p = _equal_tails(value, error, self.ratio, observed, alpha)
        flipped_low, flipped_high = _permutation_interval(self.sums, self.sizes, self.flipped, alpha)
        low, high = np.minimum(low, flipped_low), np.maximum(high, flipped_high)
        p_flips = _permutation_p(self.sums, self.flipped[:, :-1])
        p = np.maximum(p, p_flips)
        # all differences are equal: there is no spread to resample
        p = np.where((error == 0) & (value == 0), 1.0, p)
        p = np.minimum(1.0, np.maximum(p, 2.0 ** (1 - len(self.sizes))))
        return Estimate(value, low, high, p, p_flips)


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


def _permutation_p(sums: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    # a sum of the same numbers in another order must count as equal
    share: np.ndarray = (np.abs(flipped) >= np.abs(sums.sum(0)) * (1 - ROUNDING)).mean(0)
    return share


def _permutation_interval(
    sums: np.ndarray, sizes: np.ndarray, flipped: np.ndarray, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """All m for which flipping the signs of d_i - m gives p >= alpha.

    Flipping a part of the cases makes |sum| at least as large as observed if and only if m lies between the
    mean of that part and the mean of the rest. So p as a function of m counts these pairs of means.
    """
    total, size = sums.sum(0), sizes.sum()
    kept, kept_size = (total + flipped[:, :-1]) / 2, (size + flipped[:, -1:]) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        part, rest = kept / kept_size, (total - kept) / (size - kept_size)
    # if all signs or none are flipped, every m lies between
    trivial = (kept_size == 0) | (kept_size == size)
    value = total / size
    below = np.where(trivial, -np.inf, np.minimum(part, rest))
    above = np.where(trivial, np.inf, np.maximum(part, rest))
    # with so few cases that no p is below alpha, the widest interval: all of these means
    num_trivial = int(trivial.sum())
    rank = min(len(flipped) - 1, max(num_trivial, int(np.ceil(alpha * len(flipped))) - 1))
    low = np.partition(below, rank, axis=0)[rank]
    high = np.partition(above, len(flipped) - 1 - rank, axis=0)[len(flipped) - 1 - rank]
    slack = ROUNDING * np.abs(value)
    return np.minimum(low, value) - slack, np.maximum(high, value) + slack


def _equal_tails(
    value: np.ndarray, error: np.ndarray, ratio: np.ndarray, observed: np.ndarray, alpha: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Studentised interval with alpha / 2 in each tail, and its p-value: twice the tail on the side of d."""
    beyond = np.where(observed > 0, (ratio >= observed).sum(0), (ratio <= observed).sum(0))
    p = np.minimum(1.0, 2 * (beyond + 1) / (len(ratio) + 1))
    # the interval contains d
    upper, lower = (np.maximum(0, _upper_end(part, alpha / 2)) for part in (ratio, -ratio))
    return value - _times_error(upper, error), value + _times_error(lower, error), p


def _upper_end(ratio: np.ndarray, alpha: float) -> np.ndarray:
    """The order statistic at which p crosses alpha, so that interval and p agree."""
    rank = min(len(ratio) - 1, int(np.ceil((1 - alpha) * (len(ratio) + 1))) - 1)
    end: np.ndarray = np.partition(ratio, rank, axis=0)[rank]
    return end


def _times_error(ratio: np.ndarray, error: np.ndarray) -> np.ndarray:
    # all differences are equal: the interval has no width, also if the ratio is infinite
    product: np.ndarray = np.where(error == 0, 0.0, ratio) * error
    return product


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
    if not isinstance(differences, np.ndarray) or differences.dtype.kind not in "fiu":
        raise ValueError(
            f"differences must be a numpy array of numbers (cases, columns); got {describe(differences)}: "
            "use numpy.asarray"
        )
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


def _check_resampling(num_groups: int, num_resamples: int, seed: int) -> None:
    if num_groups < 2:
        raise ValueError(f"a paired comparison needs two or more cases or patients; got {num_groups}")
    check_whole_number(num_resamples=num_resamples, seed=seed)
    if not 100 <= num_resamples <= MAX_RESAMPLES:
        raise ValueError(f"num_resamples must be 100 to {MAX_RESAMPLES}; got {num_resamples}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more; got {seed}")
