"""Intervals of volumes that cover the raters of a new patient, by conformal prediction.

An interval [low, high] of each case, such as `volume_interval`, is corrected with cases whose raters are
known and whose predictions are from networks that did not see them. With m the expected volume, limited to
the interval, each end has a scale, and an observation, the volume v of one rater of one case, has a score:

    s_low = m - low + m / 10 + voxel,    s_high = high - m + m / 10 + voxel
    score = max((low - v) / s_low, (v - high) / s_high)

A quantile c of the scores moves the ends to low - c s_low and high + c s_high: wider if c > 0. The units are
patients, as cases and raters of one patient are alike. Each of K patients has weight 1 / (K + 1), shared by
its observations, and the new patient has the rest, at infinity. If patients are exchangeable, a random
observation of a new patient lies in the interval with probability `level` or more, however wrong predictions
are (docs/theory.md, section 8). Left out: a guarantee for each case.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from .volumes import check_level

# of a score: an observation at an end of the interval must stay inside when the end is rounded
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Intervals:
    """Intervals of the volumes of cases and classes, (cases, classes), in one unit.

    low, high: the ends, such as those of `volume_interval`. expected: `volume_ml` of the probabilities.
    voxel: volume of a voxel in this unit, a number or one per case. NaN for a case without a valid voxel.
    """

    low: np.ndarray
    high: np.ndarray
    expected: np.ndarray
    voxel: float | np.ndarray = 1.0

    def __post_init__(self) -> None:
        low, high, expected, voxel = self.low, self.high, self.expected, np.asarray(self.voxel)
        if not low.shape == high.shape == expected.shape or low.ndim == 0:
            raise ValueError(
                "low, high and expected must have one shape, (cases, classes); got "
                f"{low.shape}, {high.shape} and {expected.shape}"
            )
        # NaN compares as false
        if bool((low < 0).any() or (low > high).any() or (expected < 0).any() or np.isinf(high).any()):
            raise ValueError("an interval needs 0 <= low <= high and expected >= 0, all finite; got others")
        if not bool((voxel > 0).all()) or voxel.shape not in ((), low.shape[:-1]):
            raise ValueError(
                f"voxel must be a positive volume, or one per case {low.shape[:-1]}; got {voxel}"
            )

    def part(self, cases: np.ndarray | slice) -> "Intervals":
        """Those of some cases."""
        voxel = np.broadcast_to(self.voxel, self.low.shape[:-1])[cases]
        return Intervals(self.low[cases], self.high[cases], self.expected[cases], voxel)

    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        """How far a correction of 1 moves the low and the high end."""
        middle = np.clip(self.expected, self.low, self.high)
        # a hard mask has low = high: its error grows with its volume, and an empty one can still be wrong
        least = middle / 10 + np.asarray(self.voxel, dtype=np.float64)[..., None]
        return middle - self.low + least, self.high - middle + least


@dataclass(frozen=True)
class ConformalInterval:
    """A fitted correction of intervals.

    level: the probability that an interval covers a rater of a new patient. correction: c of each class.
    num_patients: the patients that it was fitted on.
    """

    level: float
    correction: tuple[float, ...]
    num_patients: int

    def apply(self, intervals: Intervals) -> tuple[np.ndarray, np.ndarray]:
        """The corrected ends, (cases, classes), in the unit of the given ones.

        No end is below 0. Where a correction would move the ends past each other, both are the point at which
        they meet. NaN stays NaN.

        >>> wider = ConformalInterval(level=0.9, correction=(0.5,), num_patients=20)
        >>> wider.apply(Intervals(np.array([[8.0]]), np.array([[14.0]]), expected=np.array([[10.0]])))
        (array([[6.]]), array([[17.]]))
        """
        low, high = intervals.low, intervals.high
        if low.shape[-1] != len(self.correction):
            raise ValueError(
                f"the correction is of {len(self.correction)} classes; got intervals {low.shape}, whose last "
                "axis must be these classes"
            )
        below, above = intervals.scales()
        # the ends meet at this correction
        correction = np.maximum(np.array(self.correction), -(high - low) / (below + above))
        new_low, new_high = low - correction * below, high + correction * above
        # rounding may leave ends that meet in the wrong order
        return np.maximum(np.minimum(new_low, new_high), 0), np.maximum(new_high, 0)


def fit_conformal(
    intervals: Intervals, rater_volumes: np.ndarray, patients: Sequence[str], level: float = 0.9
) -> ConformalInterval:
    """The correction of intervals of M cases, one for each of C classes; the module docstring has the rule.

    rater_volumes: (M, C, R), NaN for an absent rater. patients: of each case, any names. level: of the
    corrected interval; that of the given one may differ. It needs level / (1 - level) patients, 9 for 0.9;
    fewer are a ValueError, because only an infinite interval would keep the promise.

    >>> volumes, nothing = np.arange(1.0, 20.0).reshape(19, 1, 1), np.zeros((19, 1))
    >>> intervals = Intervals(nothing, nothing, expected=nothing)
    >>> fitted = fit_conformal(intervals, volumes, [str(k) for k in range(19)])
    >>> fitted.apply(intervals)[1][0].round(6)
    array([18.])
    """
    check_level(level)
    low, high = intervals.low, intervals.high
    shapes = low.shape, rater_volumes.shape[:-1], (len(patients), low.shape[-1])
    if low.ndim != 2 or len(set(shapes)) > 1:
        raise ValueError(
            "fit_conformal needs intervals (cases, classes), rater_volumes (cases, classes, raters), and the "
            f"patient of each case; got {low.shape}, {rater_volumes.shape} and {len(patients)} patients"
        )
    if bool((rater_volumes < 0).any()) or bool(np.isinf(rater_volumes).any()):
        raise ValueError("rater_volumes must be finite and 0 or more, or NaN for an absent rater; got others")
    below, above = (scale[..., None] for scale in intervals.scales())
    scores = np.maximum((low[..., None] - rater_volumes) / below, (rater_volumes - high[..., None]) / above)
    fitted = [patient_quantile(of_class, patients, level) for of_class in np.moveaxis(scores, 1, 0)]
    seen = np.asarray(patients)[np.isfinite(scores).any((1, 2))]
    corrections = tuple(c + _ROUNDING * max(1, abs(c)) for c in fitted)
    return ConformalInterval(float(level), corrections, len(set(seen.tolist())))


def patient_quantile(scores: Float[np.ndarray, "M R"], patients: Sequence[str], level: float) -> float:
    """The score that a random observation of a new patient does not exceed with probability `level` or more.

    Each of K patients has weight 1 / (K + 1), and so has infinity. NaN is not an observation. A ValueError if
    there are fewer patients than level / (1 - level).
    """
    is_seen = np.isfinite(scores)
    numbers = np.unique(np.asarray(patients), return_inverse=True)[1]
    counts = np.bincount(numbers, weights=is_seen.sum(1))
    num_patients = int((counts > 0).sum())
    needed = math.ceil(level / (1 - level) - _ROUNDING)
    if num_patients < needed:
        raise ValueError(
            f"an interval that covers {100 * level:g} % of the raters of a new patient needs {needed} "
            f"patients with raters or more; got {num_patients}: lower the level, or add patients"
        )
    weights = np.broadcast_to(1 / np.maximum(counts, 1)[numbers][:, None], scores.shape)[is_seen]
    order = np.argsort(scores[is_seen], kind="stable")
    reached = np.cumsum(weights[order]) / (num_patients + 1)
    # a sum of weights that equals the level but for rounding has reached it
    first = int(np.searchsorted(reached, level - _ROUNDING))
    return float(scores[is_seen][order[min(first, len(order) - 1)]])
