"""What the page is made of: scores of every case, calibration bins, curves and pictures, as plain records.

Scores are those of the case tables, to the last bit. Calibration bins are counted again from the stored
predictions, and refused where they do not give the calibration error that the table has.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from ...data.dataset import Dataset
from ...labels.raters import read_raters
from ...metrics.bins import CalibrationBins, calibration_bins
from ...metrics.cases import CaseTable
from ...metrics.registry import display_scale
from ...paths import RunFolder
from ..curves import Curve
from ..figures import MARKERS, line_style
from ..images import Picture, PictureLayout
from .answer import Score

ReadPrediction = Callable[[Path], np.ndarray]

# a voxel more in a bin is less than this in the smallest images
_TOLERANCE = 1e-4
# matplotlib's dashes, in widths of the line
_DASHES = {"-": (), "--": (3.7, 1.6), "-.": (6.4, 1.6, 1.0, 1.6), ":": (1.0, 1.65)}


@dataclass(frozen=True)
class Predictions:
    """Stored predictions of the runs that have any, by the case's number."""

    dataset: Dataset
    runs: Mapping[str, RunFolder]
    fold_of_case: Mapping[str, int]
    read_prediction: ReadPrediction

    def of(self, number: int) -> list[np.ndarray]:
        """Probabilities (C, *space) of each method; a ValueError names a file that does not fit its case."""
        case = self.dataset.cases[number]
        probs = []
        for run in self.runs.values():
            path = run.fold(self.fold_of_case[case.name]).prediction(case.name)
            prob = self.read_prediction(path)
            expected = (self.dataset.num_classes, *case.shape)
            if prob.shape != expected:
                raise ValueError(
                    f"{path} has shape {prob.shape}, but {self.dataset.folder.path} says {expected}: "
                    "it was made from another dataset"
                )
            probs.append(prob)
        return probs


def with_predictions(runs: Mapping[str, RunFolder]) -> tuple[dict[str, RunFolder], list[str]]:
    """The runs whose predictions are stored, and what to say of the others."""
    stored, notices = {}, []
    for method, run in runs.items():
        if run.has_predictions():
            stored[method] = run
        else:
            notices.append(f"{method} has no stored predictions: its pictures and reliability are left out.")
    return stored, notices


def count_bins(
    predictions: Predictions,
    numbers: Sequence[int],
    table: CaseTable,
    *,
    on_case: Callable[[int, int], object] = lambda _, __: None,
) -> dict[str, CalibrationBins]:
    """Bins over all voxels of the cases by method, against the majority of the raters, as the paper's ECE."""
    errors = _case_values(table, "calibration_error", "all")
    total: dict[str, CalibrationBins] = {}
    dataset = predictions.dataset
    for done, number in enumerate(numbers, start=1):
        case = dataset.cases[number].name
        target = read_raters(
            torch.from_numpy(dataset.masks(number))[None],
            dataset.num_classes,
            torch.from_numpy(dataset.present[number : number + 1]),
            batched=True,
        ).majority()
        for method, prob in zip(predictions.runs, predictions.of(number), strict=True):
            bins = calibration_bins(torch.from_numpy(prob)[None], target)
            scored, stored = errors.get((case, method)), float(bins.error()[0])
            if scored is not None and abs(scored - stored) > _TOLERANCE:
                raise ValueError(
                    f"{method} has calibration_error {scored:.6f} of case {case} in its table, but what is "
                    f"stored gives {stored:.6f}: the dataset or the prediction has changed since; run "
                    f"`semidice evaluate {predictions.runs[method].path}`"
                )
            whole = bins.over_cases()
            total[method] = total[method] + whole if method in total else whole
        on_case(done, len(numbers))
    return total


def choose_pictures(scores: Sequence[Score], numbers: Mapping[str, int], *, most: int) -> list[int]:
    """Numbers of up to `most` cases: by the first score in turn the worst, the best, where methods differ.

    numbers: of the cases that have a prediction, by name. Cases without a score come last.
    """
    first = scores[0]
    values = first.paired.values if first.comparison.higher_is_better else -first.paired.values
    cases = [numbers.get(case) for case in first.paired.cases]
    mean, spread = values.mean(1), np.ptp(values, axis=1)
    ranks = [np.argsort(mean, kind="stable"), np.argsort(-mean, kind="stable")]
    if values.shape[1] > 1:
        ranks.append(np.argsort(-spread, kind="stable"))
    in_turn = [cases[at] for row in zip(*ranks, strict=True) for at in row]
    chosen = dict.fromkeys([*in_turn, *numbers.values()])
    return [number for number in chosen if number is not None][:most]


def page_data(
    *,
    table: CaseTable,
    scores: Sequence[Score],
    bins: Mapping[str, CalibrationBins],
    curves: Mapping[str, Mapping[str, Curve]],
    layout: PictureLayout | None,
    pictures: Sequence[Picture],
    pictured_methods: Sequence[str],
) -> dict[str, Any]:
    """Everything that the scripts of the page draw from; numbers that are not there are None."""
    methods = scores[0].comparison.methods
    cases, first = np.unique(table.columns["case"], return_index=True)
    values = [_case_values(table, score.metric, score.paired.class_name) for score in scores]
    records = [
        {
            "name": str(case),
            "patient": str(table.columns["patient"][row]),
            "fold": int(table.columns["fold"][row]),
            "values": [
                [_finite(of_score.get((str(case), method))) for method in methods] for of_score in values
            ],
        }
        for case, row in zip(cases, first, strict=True)
    ]
    number_of = {record["name"]: number for number, record in enumerate(records)}
    return {
        "methods": [{"name": name, **_style(number)} for number, name in enumerate(methods)],
        "scores": [_score_record(score) for score in scores],
        "cases": records,
        "reliability": [_bins_record(methods.index(method), one) for method, one in bins.items()],
        "curves": [
            {"name": name, "methods": [_curve_record(methods.index(m), c) for m, c in of_methods.items()]}
            for name, of_methods in curves.items()
        ],
        "layout": None
        if layout is None
        else _layout_record(layout, [methods.index(m) for m in pictured_methods]),
        "pictures": [{**asdict(picture), "case": number_of[picture.case]} for picture in pictures],
        "probability_colours": _colours("cividis"),
    }


def _score_record(score: Score) -> dict[str, Any]:
    return {
        "name": score.name,
        "heading": score.heading,
        "scale": display_scale(score.metric),
        "higher_is_better": score.comparison.higher_is_better,
        "is_main": score.is_main,
    }


def _bins_record(method: int, bins: CalibrationBins) -> dict[str, Any]:
    means = bins.means()
    return {
        "method": method,
        "error": _finite(float(bins.error())),
        "confidence": [_finite(value) for value in means.confidence.tolist()],
        "accuracy": [_finite(value) for value in means.accuracy.tolist()],
        "share": means.share.tolist(),
    }


def _curve_record(method: int, curve: Curve) -> dict[str, Any]:
    parts = {
        name: [float(f"{value:.5g}") for value in getattr(curve, name)] for name in ("mean", "low", "high")
    }
    return {"method": method, "num_folds": curve.num_folds, "step": curve.step.tolist(), **parts}


def _layout_record(layout: PictureLayout, methods: Sequence[int]) -> dict[str, Any]:
    raters = [{"name": name, **_style(number)} for number, name in enumerate(layout.raters)]
    return {**asdict(layout), "raters": raters, "methods": list(methods)}


def _style(number: int) -> dict[str, Any]:
    """Colour, dashes and marker of a method or rater, as the figures have them."""
    colour, line = line_style(number)
    dashes = _DASHES[line] if isinstance(line, str) else line[1]
    return {
        "colour": colour,
        "on_light": readable_on(colour, (255, 255, 255)),
        "on_dark": readable_on(colour, (20, 23, 26)),
        "dashes": [2 * part for part in dashes],
        "marker": MARKERS[number % len(MARKERS)],
    }


def readable_on(colour: str, back: tuple[int, int, int]) -> str:
    """The colour, moved towards black or white until it has the contrast 3:1 that lines need (WCAG 2.1).

    >>> readable_on("#0072B2", (255, 255, 255)), readable_on("#E69F00", (255, 255, 255))
    ('#0072b2', '#c68900')
    """
    away = np.full(3, 0.0 if _luminance(np.array(back)) > 0.5 else 255.0)
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=float)
    for share in np.linspace(0, 1, 101):
        moved = ((1 - share) * rgb + share * away).round()
        bright, dark = sorted((_luminance(moved), _luminance(np.array(back))), reverse=True)
        if (bright + 0.05) / (dark + 0.05) >= 3:
            break
    return "#" + "".join(f"{int(part):02x}" for part in moved)


def _luminance(rgb: np.ndarray) -> float:
    share = rgb / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _colours(name: str) -> str:
    """256 colours as bytes of red, green and blue, in base64."""
    colours = matplotlib.colormaps[name](np.linspace(0, 1, 256), bytes=True)[:, :3]
    return base64.b64encode(colours.tobytes()).decode()


def _case_values(table: CaseTable, metric: str, class_name: str) -> dict[tuple[str, str], float]:
    rows = table.select(metric=metric, class_name=class_name).columns
    keys = zip(rows["case"].tolist(), rows["method"].tolist(), strict=True)
    return dict(zip(keys, rows["value"].tolist(), strict=True))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
