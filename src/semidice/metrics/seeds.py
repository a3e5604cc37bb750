"""How far the mean over seeds may be from the mean over all seeds, added to an interval over patients.

Resampled patients are scored by the same trainings in every resample, so their interval is about these
trainings. Every pair of a seed and a fold is a training of its own. With S seeds and n cases, T_kf is the sum
over the cases of fold f of the difference in seed k minus its mean over the seeds:

    v = sum of T_kf^2 / ((S - 1) S n^2)     variance of the mean over seeds
    w = its part that stems from single cases, which the resampled patients already have
    half width^2 = h^2 + max(0, t^2 v - z^2 w)

h is the half width over patients; t and z are the quantiles of Student's distribution, with F (S - 1) degrees
of freedom for F folds, and of the normal distribution.
Half widths of two sources are added as squares (Zou and Donner, 2008). Effects of trainings are assumed to be
normal and about equally large in all folds. docs/metrics.md has the coverage in simulations.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from .resampling import Estimate, normal_quantile

# of the angle whose tangent is t / sqrt(degrees of freedom)
_NUM_BISECTIONS = 55


class SeedVariance(NamedTuple):
    """v and w of the module docstring, one entry per column, and the degrees of freedom of v."""

    of_seeds: np.ndarray
    of_cases: np.ndarray
    freedom: int


def seed_variance(
    differences: np.ndarray, folds: Sequence[int], groups: Sequence[str] | None = None
) -> SeedVariance:
    """Variance of the mean over seeds of differences (seeds, cases, columns).

    groups: one name per case; what differs in one group, such as a patient, is not independent. Of a fold
    with one group, no part can be told to stem from single cases.
    """
    num_seeds, num_cases, _ = differences.shape
    deviation = differences - differences.mean(0)
    of_seeds = np.zeros(differences.shape[2])
    of_cases = np.zeros(differences.shape[2])
    names = np.arange(num_cases) if groups is None else np.unique(groups, return_inverse=True)[1]
    numbers = np.unique(folds)
    for fold in numbers:
        in_fold = np.asarray(folds) == fold
        inverse = np.unique(names[in_fold], return_inverse=True)[1]
        membership = (np.arange(inverse.max() + 1)[:, None] == inverse).astype(np.float64)
        # (seeds, groups, columns)
        sums = membership @ deviation[:, in_fold]
        total = sums.sum(1)
        of_seeds += (total**2).sum(0)
        sizes = membership.sum(1)
        if len(sizes) > 1:
            rest = sums - sizes[:, None] * total[:, None] / sizes.sum()
            of_cases += (rest**2).sum((0, 1)) * len(sizes) / (len(sizes) - 1)
    scale = (num_seeds - 1) * num_seeds * num_cases**2
    return SeedVariance(of_seeds / scale, of_cases / scale, len(numbers) * (num_seeds - 1))


def with_seed_variance(estimate: Estimate, variance: SeedVariance, level: float) -> Estimate:
    """The estimate with an interval at this level and a p-value that also cover the draw of the seeds."""
    t, z = student_quantile(level, variance.freedom), -normal_quantile(np.array(level / 2))
    more = np.maximum(0, t**2 * variance.of_seeds - z**2 * variance.of_cases)
    low = estimate.value - np.sqrt((estimate.value - estimate.low) ** 2 + more)
    high = estimate.value + np.sqrt((estimate.high - estimate.value) ** 2 + more)
    # exactly the interval over patients if the seeds add nothing
    unchanged = more == 0
    return Estimate(
        estimate.value,
        np.where(unchanged, estimate.low, low),
        np.where(unchanged, estimate.high, high),
        _p_value(estimate, variance),
    )


def _p_value(estimate: Estimate, variance: SeedVariance) -> np.ndarray:
    """The level at which the interval reaches 0; half widths over patients follow the normal distribution."""
    size = np.abs(estimate.value)
    tested = (size > 0) & (estimate.p < 1) & (variance.of_seeds > 0)
    # the standard error with which a normal distribution gives the p-value over patients
    error = np.where(tested, size / np.where(tested, -normal_quantile(estimate.p / 2), 1), 1)
    # the half width grows with t
    below, above = np.zeros_like(size), np.full_like(size, np.pi / 2)
    for _ in range(_NUM_BISECTIONS):
        middle = (below + above) / 2
        t = math.sqrt(variance.freedom) * np.tan(middle)
        z = -normal_quantile(np.maximum(student_tails(t, variance.freedom) / 2, 1e-300))
        more = np.maximum(0, t**2 * variance.of_seeds - z**2 * variance.of_cases)
        reaches = (z * error) ** 2 + more >= size**2
        below, above = np.where(reaches, below, middle), np.where(reaches, middle, above)
    tails = student_tails(math.sqrt(variance.freedom) * np.tan(below), variance.freedom)
    p: np.ndarray = np.where(tested, np.maximum(estimate.p, tails), estimate.p)
    return p


def student_tails(t: np.ndarray, freedom: int) -> np.ndarray:
    """Probability of |T| >= t for Student's T with a whole number of degrees of freedom.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4; exact to about 1e-15.

    >>> student_tails(np.array([0.0, 2.2281]), 10).round(3).tolist()
    [1.0, 0.05]
    """
    angle = np.arctan(np.asarray(t, dtype=np.float64) / math.sqrt(freedom))
    sine, cosine = np.sin(angle), np.cos(angle)
    if freedom == 1:
        return np.asarray(1 - 2 * angle / np.pi)
    odd = freedom % 2
    term = cosine if odd else np.ones_like(cosine)
    total = term
    for number in range(2 + odd, freedom, 2):
        term = term * cosine**2 * (number - 1) / number
        total = total + term
    inside = 2 / np.pi * (angle + sine * total) if odd else sine * total
    return np.asarray(np.clip(1 - inside, 0, 1))


@cache
def student_quantile(level: float, freedom: int) -> float:
    """The t with probability `level` of |T| >= t.

    >>> round(student_quantile(0.05, 2), 3), round(student_quantile(0.05, 10), 3)
    (4.303, 2.228)
    """
    below, above = 0.0, math.pi / 2
    for _ in range(_NUM_BISECTIONS):
        middle = (below + above) / 2
        t = math.sqrt(freedom) * math.tan(middle)
        beyond = float(student_tails(np.array(t), freedom)) > level
        below, above = (middle, above) if beyond else (below, middle)
    return math.sqrt(freedom) * math.tan(below)
