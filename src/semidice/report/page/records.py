"""The content of the page as JSON records, from which the scripts of the page draw."""

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import matplotlib
import numpy as np

from ...metrics.bins import CalibrationBins
from ..curves import Curve
from ..figures import line_style, marker_of
from ..volumes import ClassVolumes, coverage, level_text
from .answer import Score
from .content import PageContent, case_values

# matplotlib's dashes, in multiples of the line width
_DASHES = {"-": (), "--": (3.7, 1.6), "-.": (6.4, 1.6, 1.0, 1.6), ":": (1.0, 1.65)}


def page_records(content: PageContent) -> dict[str, Any]:
    """Everything that the scripts draw; a missing number is None."""
    methods = content.methods
    cases = _case_records(content)
    number_of = {case["name"]: number for number, case in enumerate(cases)}
    layout = None
    if content.layout is not None:
        layout = {
            **asdict(content.layout),
            "raters": [_style_record(*each) for each in enumerate(content.layout.raters)],
            "methods": [methods.index(method) for method in content.bins],
        }
    return {
        "methods": [_style_record(*each) for each in enumerate(methods)],
        "scores": [
            _score_record(score, content.raters.get((score.key, score.paired.class_name)))
            for score in content.scores
        ],
        "cases": cases,
        "reliability": [_bins_record(methods.index(method), bins) for method, bins in content.bins.items()],
        "curves": [
            {
                "name": series,
                "methods": [_curve_record(methods.index(name), curve) for name, curve in of_methods.items()],
            }
            for series, of_methods in content.curves.items()
        ],
        "volumes": [
            _volumes_record(methods.index(method), volumes, number_of)
            for method, classes in content.volumes.items()
            for volumes in classes
        ],
        "layout": layout,
        "pictures": [{**asdict(picture), "case": number_of[picture.case]} for picture in content.pictures],
        "probability_colours": _colours("cividis"),
        "entropy_colours": _colours("inferno"),
    }


def embedded_json(records: dict[str, Any]) -> str:
    """JSON for a script element. Such an element ends at the first `</`, so `<` is escaped."""
    text = json.dumps(records, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _case_records(content: PageContent) -> list[dict[str, Any]]:
    cases = content.table.drop_duplicates("case").sort_values("case")
    values = [case_values(content.table, score.key, score.paired.class_name) for score in content.scores]
    return [
        {
            "name": row.case,
            "patient": row.patient,
            "fold": int(row.fold),
            "values": [
                [_finite(of_score.get((row.case, method))) for method in content.methods]
                for of_score in values
            ],
        }
        for row in cases.itertuples()
    ]


def _score_record(score: Score, raters: float | None) -> dict[str, Any]:
    return {
        "name": score.name,
        "heading": score.comparison.heading,
        "scale": score.key.scale,
        "higher_is_better": score.key.higher_is_better,
        "is_main": score.is_main,
        "raters": raters,
        "seeds": [
            {"seed": seed, "means": [_finite(float(mean)) for mean in means]}
            for seed, means in zip(score.comparison.seeds, score.comparison.seed_means, strict=True)
        ],
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


def _volumes_record(method: int, volumes: ClassVolumes, number_of: Mapping[str, int]) -> dict[str, Any]:
    """Cases are numbers of the case table; None for a case that it does not have."""
    numbers = {
        "expected": volumes.expected,
        "low": volumes.nested[0],
        "high": volumes.nested[1],
        "conformal_low": volumes.conformal[0],
        "conformal_high": volumes.conformal[1],
    }
    return {
        "method": method,
        "class_name": volumes.class_name,
        "unit": volumes.unit,
        "level": level_text(volumes.level),
        "is_corrected": volumes.is_corrected,
        "coverage": _finite(coverage(volumes.shown, volumes.raters)),
        "names": volumes.cases,
        "cases": [number_of.get(case) for case in volumes.cases],
        "rater_names": volumes.rater_names,
        **{name: [_finite(value) for value in ends.tolist()] for name, ends in numbers.items()},
        "raters": [[_finite(value) for value in row] for row in volumes.raters.tolist()],
    }


def _colours(name: str) -> str:
    """256 colours of matplotlib as bytes of red, green and blue."""
    colours = matplotlib.colormaps[name](np.linspace(0, 1, 256), bytes=True)[:, :3]
    return base64.b64encode(colours.tobytes()).decode()


def _curve_record(method: int, curve: Curve) -> dict[str, Any]:
    values = {
        name: [float(f"{value:.5g}") for value in getattr(curve, name)] for name in ("mean", "low", "high")
    }
    return {"method": method, "num_folds": curve.num_folds, "step": curve.step.tolist(), **values}


def _style_record(number: int, name: str) -> dict[str, Any]:
    """Colour, dashes and marker of a method or rater, the same as in the figures."""
    colour, line = line_style(number)
    dashes = _DASHES[line] if isinstance(line, str) else line[1]
    return {
        "name": name,
        "colour": colour,
        "on_light": readable_on(colour, (255, 255, 255)),
        "on_dark": readable_on(colour, (20, 23, 26)),
        "dashes": [2 * part for part in dashes],
        "marker": marker_of(number),
    }


def readable_on(colour: str, background: tuple[int, int, int]) -> str:
    """The colour, moved towards black or white until it has the contrast 3:1 that lines need (WCAG 2.1).

    >>> readable_on("#0072B2", (255, 255, 255)), readable_on("#E69F00", (255, 255, 255))
    ('#0072b2', '#c68900')
    """
    luminance = _luminance(np.array(background))
    end = np.full(3, 0.0 if luminance > 0.5 else 255.0)
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=float)
    for share in np.linspace(0, 1, 101):
        moved = ((1 - share) * rgb + share * end).round()
        bright, dark = sorted((_luminance(moved), luminance), reverse=True)
        if (bright + 0.05) / (dark + 0.05) >= 3:
            break
    return "#" + "".join(f"{int(part):02x}" for part in moved)


def _luminance(rgb: np.ndarray) -> float:
    share = rgb / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
