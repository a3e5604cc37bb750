"""The figure and tables of docs/volumes.md: intervals of volumes on phantoms, before and after correction.

Each distortion is applied to the true probability p* of `NUM_SEEDS` phantoms. The correction is fitted on the
first half of the patients of a phantom and judged on the second. A quarter of the patients has images of each
of four sizes, and lengths scale with the image: volumes differ by a factor of 64 and more, as those of
lesions do. Volumes are in voxels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import avg_pool2d

from semidice.data.phantom import Phantom, make_phantom
from semidice.decisions import (
    Intervals,
    fit_conformal,
    rater_volumes_ml,
    volume_interval,
    volume_ml,
    volume_quantiles,
)
from semidice.decisions.conformal import patient_quantile
from semidice.report.figures import COLOURS, MARKERS, new_figure, style_axes

Row = Sequence[str]
Ends = tuple[np.ndarray, np.ndarray]

# a voxel of 1 ml, so that ml are voxels
VOXELS = (10.0, 10.0, 10.0)
LEVEL, NUM_SEEDS, NUM_PATIENTS = 0.9, 20, 80
KNOWN, NEW = slice(0, NUM_PATIENTS // 2), slice(NUM_PATIENTS // 2, NUM_PATIENTS)
SIZES = (12, 24, 48, 96)
NAMES = [f"patient {number}" for number in range(NUM_PATIENTS // 2)]


def _temperature(prob: Tensor, value: float) -> Tensor:
    return torch.sigmoid(torch.logit(prob.double(), eps=1e-9) / value).float()


DISTORTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "p*": lambda prob: prob,
    "hard mask": lambda prob: (prob > 0.5).float(),
    "overconfident": lambda prob: _temperature(prob, 0.25),
    "underconfident": lambda prob: _temperature(prob, 3.0),
    "blurred": lambda prob: avg_pool2d(prob, 9, stride=1, padding=4),
    "too small": lambda prob: prob**4,
    "too large": lambda prob: prob**0.1,
}


class Volumes(NamedTuple):
    """Expected volume and interval of each patient, and the volumes of the raters."""

    expected: np.ndarray
    low: np.ndarray
    high: np.ndarray
    of_raters: np.ndarray

    def part(self, patients: slice) -> "Volumes":
        return Volumes(*(values[patients] for values in self))


class Judged(NamedTuple):
    """Means over patients, raters and seeds.

    relative_width: width over the mean of the raters' volumes, plus a voxel because a lesion can be missed.
    small, large: coverage of the third of patients with the smallest and largest expected volume.
    """

    coverage: float
    relative_width: float
    small: float
    large: float


@cache
def _phantoms(seed: int) -> list[Phantom]:
    num_cases = NUM_PATIENTS // len(SIZES)
    return [make_phantom(num_cases, size=(side, side), seed=100 * seed + side) for side in SIZES]


@cache
def volumes_of(distortion: str, seed: int) -> Volumes:
    """Volumes of all patients of a seed in random order, from distorted probabilities."""
    parts = []
    for phantom in _phantoms(seed):
        prob = DISTORTIONS[distortion](phantom.prob[:, 1:])
        expected = volume_ml(prob, spacing_mm=VOXELS).double()
        low, high = volume_interval(prob, LEVEL, spacing_mm=VOXELS)
        of_raters = rater_volumes_ml(phantom.masks, num_channels=1, spacing_mm=VOXELS)
        parts.append((expected.numpy(), low.numpy(), high.numpy(), of_raters.numpy()))
    order = np.random.default_rng(seed).permutation(NUM_PATIENTS)
    return Volumes(*(np.concatenate(values)[order] for values in zip(*parts, strict=True)))


@cache
def judged(distortion: str, interval: Callable[[Volumes, Volumes], Ends]) -> Judged:
    """Scores of interval(known, new) on the new patients of all seeds."""
    results = []
    for seed in range(NUM_SEEDS):
        volumes = volumes_of(distortion, seed)
        new = volumes.part(NEW)
        low, high = interval(volumes.part(KNOWN), new)
        inside = ((new.of_raters >= low[..., None]) & (new.of_raters <= high[..., None])).mean((1, 2))
        width = ((high - low) / (new.of_raters.mean(2) + 1)).mean()
        order, third = new.expected[:, 0].argsort(), len(inside) // 3
        results.append((inside.mean(), width, inside[order[:third]].mean(), inside[order[-third:]].mean()))
    return Judged(*np.mean(results, axis=0))


def nested(known: Volumes, new: Volumes) -> Ends:
    """The interval of nested raters, not corrected."""
    return new.low, new.high


def corrected(known: Volumes, new: Volumes) -> Ends:
    """The interval after the correction of the package."""
    of_known, of_new = (Intervals(each.low, each.high, each.expected) for each in (known, new))
    return fit_conformal(of_known, known.of_raters, NAMES, LEVEL).apply(of_new)


def _sides(volumes: Volumes) -> Ends:
    middle = np.clip(volumes.expected, volumes.low, volumes.high)
    return middle - volumes.low, volumes.high - middle


def _equal(scale: Callable[[Volumes], np.ndarray]) -> Callable[[Volumes], Ends]:
    return lambda volumes: (scale(volumes), scale(volumes))


def _own(scale: Callable[[Volumes], np.ndarray]) -> Callable[[Volumes], Ends]:
    return lambda volumes: tuple(side + scale(volumes) for side in _sides(volumes))


SCALES: Mapping[str, Callable[[Volumes], Ends]] = {
    "one voxel": _equal(lambda v: np.ones_like(v.expected)),
    "√ expected volume": _equal(lambda v: np.sqrt(v.expected + 1)),
    "expected volume": _equal(lambda v: v.expected + 1),
    "width": _equal(lambda v: v.high - v.low + 1),
    "own side": _own(lambda v: np.ones_like(v.expected)),
    "own side + volume / 10 (ours)": _own(lambda v: np.clip(v.expected, v.low, v.high) / 10 + 1),
}


def scaled(name: str) -> Callable[[Volumes, Volumes], Ends]:
    """The corrected interval if the scores are divided by another scale."""

    def interval(known: Volumes, new: Volumes) -> Ends:
        below, above = SCALES[name](known)
        excess = known.of_raters - known.high[..., None], known.low[..., None] - known.of_raters
        scores = np.maximum(excess[0] / above[..., None], excess[1] / below[..., None])
        correction = patient_quantile(scores[:, 0], NAMES, LEVEL)
        below, above = SCALES[name](new)
        correction = np.maximum(correction, -(new.high - new.low) / (below + above)) + 1e-9
        return np.maximum(new.low - correction * below, 0), new.high + correction * above

    return interval


def coverage_rows() -> list[Row]:
    """Coverage and width of both intervals for each distortion."""
    rows: list[Row] = [("prediction", "covers (%)", "corrected", "width / volume", "corrected")]
    for name in DISTORTIONS:
        pair = judged(name, nested), judged(name, corrected)
        coverage = (f"{100 * result.coverage:.1f}" for result in pair)
        rows.append((name, *coverage, *(f"{result.relative_width:.2f}" for result in pair)))
    return rows


def scale_rows() -> list[Row]:
    """Width / volume of the corrected interval with each scale, and the coverage by size."""
    parts = ("coverage (%)", "of small ones", "of large ones")
    rows: list[Row] = [("scale of a score", *DISTORTIONS, *parts)]
    for scale in SCALES:
        interval = scaled(scale)
        results = [judged(name, interval) for name in DISTORTIONS]
        shares = [
            100 * np.mean([getattr(result, part) for result in results])
            for part in ("coverage", "small", "large")
        ]
        widths = (f"{result.relative_width:.2f}" for result in results)
        rows.append((scale, *widths, *(f"{share:.0f}" for share in shares)))
    return rows


def draw_volume_interval() -> Figure:
    """The distribution of one volume with its raters, and the coverage of intervals before and after."""
    figure = new_figure(width=9.0, height=3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_distribution(left)
    _draw_coverage(right)
    return figure


def _draw_distribution(axes: Axes) -> None:
    phantom = make_phantom(1, num_raters=12, seed=4, miss=0.0)
    prob = phantom.prob[:, 1:]
    levels = np.linspace(0, 1, 401)
    volumes = volume_quantiles(prob, levels.tolist(), spacing_mm=VOXELS).flatten()
    low, high = (float(end) for end in volume_interval(prob, LEVEL, spacing_mm=VOXELS))
    expected = float(volume_ml(prob, spacing_mm=VOXELS))
    drawn = rater_volumes_ml(phantom.masks, num_channels=1, spacing_mm=VOXELS).flatten()
    style_axes(axes)
    axes.axvspan(low, high, color=COLOURS[5], alpha=0.25, label="90 % interval")
    axes.plot(volumes, levels, color=COLOURS[1], label="P(V ≤ v), from one map")
    axes.axvline(expected, color="0.3", linestyle="--", linewidth=1, label="expected volume")
    axes.plot(drawn, np.zeros(len(drawn)), "|", color=COLOURS[0], markersize=14, label="12 raters")
    axes.set(xlabel="volume v (voxels)", ylabel="probability", ylim=(-0.06, 1.02), xlim=(0, 1.5 * high))
    axes.set_title("The volume of one lesion", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)


def _draw_coverage(axes: Axes) -> None:
    style_axes(axes)
    places = np.arange(len(DISTORTIONS))
    for interval, name, colour, marker in (
        (nested, "from one map", COLOURS[0], MARKERS[0]),
        (corrected, "corrected with 40 patients", COLOURS[1], MARKERS[1]),
    ):
        shares = [100 * judged(distortion, interval).coverage for distortion in DISTORTIONS]
        axes.plot(shares, places, marker, color=colour, label=name)
    axes.axvline(100 * LEVEL, color="0.3", linestyle="--", linewidth=1, label="nominal level")
    axes.set(xlabel="raters covered (%)", xlim=(0, 102), yticks=places, yticklabels=list(DISTORTIONS))
    axes.invert_yaxis()
    axes.set_title("Coverage on new patients", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=3, frameon=False)


FIGURES: Mapping[str, Callable[[], Figure]] = {"volume_interval": draw_volume_interval}
TABLES: Mapping[str, Callable[[], list[Row] | None]] = {
    "volume_coverage": coverage_rows,
    "volume_scales": scale_rows,
}
