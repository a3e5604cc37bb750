"""Curves of a training from its logs: mean, lowest and highest value over the folds.

The points of a fold's series are averaged in windows with equally many log lines and joined by straight
lines. A curve ends at the last step that all folds have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import reading
from ..paths import RunFolder

MAX_POINTS = 120


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
    """Each series of a log as (points, 2): step and value, without values that are not finite."""
    with reading(path, "each line must be a JSON object with a step and numbers"):
        lines = pd.read_json(path, lines=True, dtype=False).set_index("step").astype(float)
    series = lines.drop(columns="epoch", errors="ignore").replace([np.inf, -np.inf], np.nan).items()
    points = {str(name): values.dropna() for name, values in series}
    return {name: np.stack([each.index, each], axis=1) for name, each in points.items() if len(each)}


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
