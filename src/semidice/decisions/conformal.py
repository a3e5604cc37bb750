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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Float

from .volumes import check_level

# of a score: an observation at an end of the interval must stay inside when the end is rounded
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ConformalInterval:
    """A fitted correction of intervals.

    level: the probability that an interval covers a rater of a new patient. correction: c of each class.
    num_patients: the patients that it was fitted on.
    """

    level: float
    correction: tuple[float, ...]
    num_patients: int

    def apply(
        self,
        low: np.ndarray,
        high: np.ndarray,
        *,
        expected: np.ndarray,
        voxel: float | np.ndarray = 1.0,
    ) -> tuple[Float[np.ndarray, "*cases C"], Float[np.ndarray, "*cases C"]]:
        """The corrected ends, (cases, classes), in the unit of the given ones.

        voxel: volume of a voxel in this unit, a number or one per case. No end is below 0. Where a correction
        would move the ends past each other, both are the point at which they meet. NaN stays NaN.

        >>> wider = ConformalInterval(level=0.9, correction=(0.5,), num_patients=20)
        >>> wider.apply(np.array([[8.0]]), np.array([[14.0]]), expected=np.array([[10.0]]))
        (array([[6.]]), array([[17.]]))
        """
        _check_intervals(low, high, expected)
        if low.shape[-1] != len(self.correction):
            raise ValueError(
                f"the correction is of {len(self.correction)} classes; got intervals {low.shape}, whose last "
                "axis must be these classes"
            )
        below, above = _scales(low, high, expected, voxel)
        # the ends meet at this correction
        correction = np.maximum(np.array(self.correction), -(high - low) / (below + above))
        new_low, new_high = low - correction * below, high + correction * above
        # rounding may leave ends that meet in the wrong order
        return np.maximum(np.minimum(new_low, new_high), 0), np.maximum(new_high, 0)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a JSON file."""
        return asdict(self) | {"correction": list(self.correction)}

    @classmethod
    def from_dict(cls, values: object) -> "ConformalInterval":
        """The record of `to_dict`; a ValueError names what is wrong in a file that was changed."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            got = ", ".join(map(repr, values)) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(f"a conformal interval has the entries {', '.join(names)}; got {got[:200]}")
        level, correction, num_patients = (values[name] for name in names)
        if not _is_number(level) or not 0 < level < 1:
            raise ValueError(f"level must be a number between 0 and 1; got {_shown(level)}")
        if not isinstance(correction, list | tuple) or not correction or not all(map(_is_number, correction)):
            raise ValueError(f"correction must be a list of finite numbers; got {_shown(correction)}")
        if not isinstance(num_patients, int) or isinstance(num_patients, bool) or num_patients < 1:
            raise ValueError(f"num_patients must be a number of patients; got {_shown(num_patients)}")
        return cls(float(level), tuple(map(float, correction)), num_patients)


def fit_conformal(
    low: np.ndarray,
    high: np.ndarray,
    rater_volumes: np.ndarray,
    patients: Sequence[str],
    level: float = 0.9,
    *,
    expected: np.ndarray,
    voxel: float | np.ndarray = 1.0,
) -> ConformalInterval:
    """The correction of intervals of M cases, one for each of C classes; the module docstring has the rule.

    low, high: (M, C). rater_volumes: (M, C, R), NaN for an absent rater. patients: of each case, any names.
    expected: (M, C), `volume_ml(of="probability")`. voxel: volume of a voxel, a number or one per case, in
    the unit of the volumes.
    level: of the corrected interval; that of the given one may differ. It needs level / (1 - level) patients,
    9 for 0.9; fewer are a ValueError, because only an infinite interval would keep the promise.

    >>> volumes = np.arange(1.0, 20.0).reshape(19, 1, 1)
    >>> nothing = np.zeros((19, 1))
    >>> fitted = fit_conformal(nothing, nothing, volumes, [str(k) for k in range(19)], expected=nothing)
    >>> fitted.apply(nothing[:1], nothing[:1], expected=nothing[:1])[1].round(6)
    array([[18.]])
    """
    check_level(level)
    _check_intervals(low, high, expected)
    if low.ndim != 2 or rater_volumes.ndim != 3 or rater_volumes.shape[:2] != low.shape:
        raise ValueError(
            "intervals must be (cases, classes) and rater_volumes (cases, classes, raters); got "
            f"{low.shape} and {rater_volumes.shape}"
        )
    if len(patients) != len(low):
        raise ValueError(f"patients must name the patient of each of {len(low)} cases; got {len(patients)}")
    if bool((rater_volumes < 0).any()) or bool(np.isinf(rater_volumes).any()):
        raise ValueError("rater_volumes must be finite and 0 or more, or NaN for an absent rater; got others")
    below, above = (scale[..., None] for scale in _scales(low, high, expected, voxel))
    scores = np.maximum((low[..., None] - rater_volumes) / below, (rater_volumes - high[..., None]) / above)
    fitted = [patient_quantile(of_class, patients, level) for of_class in np.moveaxis(scores, 1, 0)]
    seen = np.isfinite(scores).any((1, 2))
    num_patients = len({patient for patient, has_rater in zip(patients, seen, strict=True) if has_rater})
    return ConformalInterval(
        float(level), tuple(c + _ROUNDING * max(1, abs(c)) for c in fitted), num_patients
    )


def patient_quantile(scores: Float[np.ndarray, "M R"], patients: Sequence[str], level: float) -> float:
    """The score that a random observation of a new patient does not exceed with probability `level` or more.

    Each of K patients has weight 1 / (K + 1), and so has infinity. NaN is not an observation. A ValueError if
    there are fewer patients than level / (1 - level).

    >>> patient_quantile(np.array([[1.0, 2.0], [3.0, np.nan], [9.0, 9.0]]), ["a", "b", "c"], level=0.5)
    3.0
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


def _scales(
    low: np.ndarray, high: np.ndarray, expected: np.ndarray, voxel: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How far a correction of 1 moves the low and the high end."""
    voxel = np.asarray(voxel, dtype=np.float64)
    if not bool((voxel > 0).all()) or voxel.shape not in ((), low.shape[:-1]):
        raise ValueError(f"voxel must be a positive volume, or one per case {low.shape[:-1]}; got {voxel}")
    middle = np.clip(expected, low, high)
    # a hard mask has low = high: its error grows with its volume, and one that is empty can still be wrong
    least = middle / 10 + voxel[..., None]
    return middle - low + least, high - middle + least


def _check_intervals(low: np.ndarray, high: np.ndarray, expected: np.ndarray) -> None:
    if not low.shape == high.shape == expected.shape or low.ndim == 0:
        raise ValueError(
            "low, high and expected must have one shape, (cases, classes); got "
            f"{low.shape}, {high.shape} and {expected.shape}"
        )
    # NaN compares as false: a case without a valid voxel has no interval
    if bool((low < 0).any() or (low > high).any() or (expected < 0).any() or np.isinf(high).any()):
        raise ValueError("an interval needs 0 <= low <= high and expected >= 0, all finite; got others")


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: object) -> str:
    """The value for a message, shortened: a file of a stranger may hold anything."""
    try:
        return repr(value)[:100]
    except ValueError:
        return "an integer of thousands of digits"
