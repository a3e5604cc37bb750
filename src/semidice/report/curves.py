"""Curves of a training from its logs: mean, lowest and highest value over the folds.

The points of a fold's series are averaged in windows with equally many log lines and joined by straight
lines. A curve ends at the last step that all folds have.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ..errors import reading
from ..paths import RunFolder
from .figures import line_style, new_figure, style_axes

MAX_POINTS = 120
# keys of a log line that are not series
_NO_SERIES = ("step", "epoch")


@dataclass(frozen=True)
class Curve:
    """Mean, lowest and highest value over the folds at some steps."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_folds: int


def read_curves(runs: Mapping[str, RunFolder]) -> dict[str, dict[str, Curve]]:
    """Curves by series, such as loss or val_dice_score, then by method.

    The loss comes first and the learning rate, which is known beforehand, last. Others keep the log's order.
    """
    curves: dict[str, dict[str, Curve]] = {}
    for method, run in runs.items():
        logs = [read_log(fold.log) for fold in run.existing_folds() if fold.log.exists()]
        for series in dict.fromkeys(series for log in logs for series in log):
            folds = [log[series] for log in logs if series in log]
            curves.setdefault(series, {})[method] = over_folds(folds)
    return dict(sorted(curves.items(), key=lambda item: {"loss": 0, "lr": 2}.get(item[0], 1)))


def read_log(path: Path) -> dict[str, np.ndarray]:
    """Each series of a log as (points, 2): step and value; a ValueError names a line that is wrong."""
    series: dict[str, list[tuple[float, float]]] = {}
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        with reading(Path(f"{path}, line {number}"), "a JSON object with a step and numbers is expected"):
            values = json.loads(line)
            step = float(values["step"])
            pairs = [(name, float(value)) for name, value in values.items() if name not in _NO_SERIES]
        for name, value in pairs:
            if math.isfinite(value):
                series.setdefault(name, []).append((step, value))
    return {name: np.array(points) for name, points in series.items()}


def over_folds(folds: Sequence[np.ndarray]) -> Curve:
    """The curve of one series from its (points, 2) in each fold."""
    folds = [_averaged(points) for points in folds]
    longest = max(folds, key=len)
    # a fold with fewer cases has fewer steps; after its last step, np.interp would continue it as a flat line
    last = min(points[-1, 0] for points in folds)
    step = longest[:, 0][longest[:, 0] <= last]
    if len(step) == 0:
        step = np.array([last])
    values = np.stack([np.interp(step, points[:, 0], points[:, 1]) for points in folds])
    return Curve(step, values.mean(0), values.min(0), values.max(0), len(folds))


def _averaged(points: np.ndarray) -> np.ndarray:
    """At most `MAX_POINTS` points, each the mean over a window of equally many."""
    size = -(-len(points) // MAX_POINTS)
    return np.stack([points[first : first + size].mean(0) for first in range(0, len(points), size)])


def draw_curves(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """One panel per series and one line per method, with the range over the folds behind it."""
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = new_figure(width=3.2 * columns + 0.4, height=2.5 * rows + 0.5)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    methods = dict.fromkeys(method for of_methods in curves.values() for method in of_methods)
    styles = {method: line_style(number) for number, method in enumerate(methods)}
    for axes, (series, of_methods) in zip(panels, curves.items(), strict=False):
        style_axes(axes)
        axes.set_title(series, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("step", fontsize=7)
        for method, curve in of_methods.items():
            colour, line = styles[method]
            axes.fill_between(curve.step, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(curve.step, curve.mean, color=colour, linestyle=line, linewidth=1.3)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    for method, (colour, line) in styles.items():
        panels[0].plot([], [], color=colour, linestyle=line, label=method)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
