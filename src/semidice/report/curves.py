"""Curves of a training from its logs: the mean over folds of a loss or validation score, and their range.

A fold's series is cut into windows of equally many lines, whose means are joined by straight lines; at each
step that all folds have come to, the curve is the mean over the folds and reaches from the lowest to the
highest of them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..paths import RunFolder
from .label_figures import outline_style

MAX_POINTS = 120
# what a line of the log has beside its series
_NO_SERIES = ("step", "epoch")


@dataclass(frozen=True)
class Curve:
    """Mean, lowest and highest over the folds at each of some steps."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_folds: int


def read_curves(runs: Mapping[str, RunFolder]) -> dict[str, dict[str, Curve]]:
    """Curves by series, such as loss or val_dice_score, then by method; series of no log are not there."""
    curves: dict[str, dict[str, Curve]] = {}
    for method, run in runs.items():
        logs = [read_log(fold.log) for fold in run.existing_folds() if fold.log.exists()]
        for name in dict.fromkeys(name for log in logs for name in log):
            folds = [log[name] for log in logs if name in log]
            curves.setdefault(name, {})[method] = over_folds(folds)
    return dict(sorted(curves.items(), key=lambda item: _place(item[0])))


def _place(series: str) -> int:
    """The loss first, the rest as the log has it, the learning rate last: it is known beforehand."""
    return {"loss": 0, "lr": 2}.get(series, 1)


def read_log(path: Path) -> dict[str, np.ndarray]:
    """Each series of a log as (points, 2): step and value; a ValueError names a line that is none."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            values = json.loads(line)
            step = float(values["step"])
            pairs = [(name, float(value)) for name, value in values.items() if name not in _NO_SERIES]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no line of a log: {error}") from error
        for name, value in pairs:
            if math.isfinite(value):
                series.setdefault(name, []).append((step, value))
    return {name: np.array(points) for name, points in series.items()}


def over_folds(folds: Sequence[np.ndarray]) -> Curve:
    """The curve of one series from its (points, 2) in each fold."""
    folds = [_windows(points) for points in folds]
    longest = max(folds, key=len)
    # a fold with fewer cases has fewer steps: beyond its last one it would be a flat line that nobody saw
    last = min(points[-1, 0] for points in folds)
    step = longest[:, 0][longest[:, 0] <= last]
    if len(step) == 0:
        step = np.array([last])
    values = np.stack([np.interp(step, points[:, 0], points[:, 1]) for points in folds])
    return Curve(step, values.mean(0), values.min(0), values.max(0), len(folds))


def _windows(points: np.ndarray) -> np.ndarray:
    size = -(-len(points) // MAX_POINTS)
    return np.stack([points[first : first + size].mean(0) for first in range(0, len(points), size)])


def draw_curves(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Small multiples, a panel a series and a line a method, with the range over folds behind it."""
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.4, 2.5 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    styles = {
        method: outline_style(number)
        for number, method in enumerate(dict.fromkeys(name for one in curves.values() for name in one))
    }
    for axes, (series, of_methods) in zip(grid, curves.items(), strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_title(series, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("step", fontsize=7)
        for method, curve in of_methods.items():
            colour, line = styles[method]
            axes.fill_between(curve.step, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(curve.step, curve.mean, color=colour, linestyle=line, linewidth=1.3)
    for axes in grid[len(curves) :]:
        axes.set_axis_off()
    for method, (colour, line) in styles.items():
        grid[0].plot([], [], color=colour, linestyle=line, label=method)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
