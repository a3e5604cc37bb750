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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from .resampling import Estimate

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


def with_seed_variance(estimate: Estimate, variance: SeedVariance, alpha: float) -> Estimate:
    """The estimate with an interval at this level and a p-value that also cover the draw of the seeds."""
    t, z = -stdtrit(variance.freedom, alpha / 2), -ndtri(alpha / 2)
    more = np.maximum(0, t**2 * variance.of_seeds - z**2 * variance.of_cases)
    low = estimate.value - np.sqrt((estimate.value - estimate.low) ** 2 + more)
    high = estimate.value + np.sqrt((estimate.high - estimate.value) ** 2 + more)
    # exactly the interval over patients if the seeds add nothing
    unchanged = more == 0
    return estimate._replace(
        low=np.where(unchanged, estimate.low, low),
        high=np.where(unchanged, estimate.high, high),
        p=_p_value(estimate, variance),
    )


def _p_value(estimate: Estimate, variance: SeedVariance) -> np.ndarray:
    """The level at which the interval reaches 0; half widths over patients follow the normal distribution."""
    size = np.abs(estimate.value)
    tested = (size > 0) & (estimate.p < 1) & (variance.of_seeds > 0)
    # the standard error with which a normal distribution gives the p-value over patients
    error = np.where(tested, size / np.where(tested, -ndtri(estimate.p / 2), 1), 1)
    scale = np.sqrt(variance.freedom)
    # the half width grows with t
    below, above = np.zeros_like(size), np.full_like(size, np.pi / 2)
    for _ in range(_NUM_BISECTIONS):
        middle = (below + above) / 2
        t = scale * np.tan(middle)
        z = -ndtri(np.maximum(stdtr(variance.freedom, -t), 1e-300))
        more = np.maximum(0, t**2 * variance.of_seeds - z**2 * variance.of_cases)
        reaches = (z * error) ** 2 + more >= size**2
        below, above = np.where(reaches, below, middle), np.where(reaches, middle, above)
    tails = 2 * stdtr(variance.freedom, -scale * np.tan(below))
    p: np.ndarray = np.where(tested, np.maximum(estimate.p, tails), estimate.p)
    return p
