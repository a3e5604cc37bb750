"""The figures of docs/results.md: scores by label and loss, and by the number of raters."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_tables import NOT_RUN, Results, heading

from semidice.report.figures import COLOURS, MARKERS, new_figure, style_axes

_METRICS = ("binarized_dice_score", "calibration_error")
_LABELS = {
    "majority": "majority",
    "smoothing": "smoothed majority",
    "random": "random rater",
    "weighted": "Dice-weighted mean",
    "uniform": "mean",
}
_LOSSES = {"": "DML1", "_sdl": "soft Dice", "_ce": "cross entropy", "_dml2": "DML2"}


def draw_labels(results: Results) -> Figure:
    """BDice and ECE of each label and loss, with 95 % intervals over patients."""
    figure = new_figure(width=8.4, height=3.6)
    both = figure.subplots(1, 2, sharey=True)
    for axes, metric in zip(both, _METRICS, strict=True):
        found = results.comparison("labels", metric)
        scale = found.key.scale
        for number, (ending, loss) in enumerate(_LOSSES.items()):
            pairs = [
                (row + 0.17 * (number - 1.5), f"{label}{ending}")
                for row, label in enumerate(_LABELS)
                if f"{label}{ending}" in found.methods
            ]
            rows, names = (list(part) for part in zip(*pairs, strict=True))
            mean, low, high = (found.means.loc[names, name] * scale for name in ("mean", "low", "high"))
            ends = np.stack([mean - low, high - mean])
            axes.errorbar(
                mean, rows, xerr=ends, fmt=MARKERS[number], color=COLOURS[number], label=loss, markersize=5
            )
        axes.set_yticks(range(len(_LABELS)), list(_LABELS.values()))
        axes.set_xlabel(heading(found.key))
        if metric == "calibration_error":
            # label smoothing is far from all others
            axes.set_xscale("log")
            axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
            axes.minorticks_off()
        style_axes(axes)
    both[0].invert_yaxis()
    figure.legend(*both[1].get_legend_handles_labels(), loc="outside upper center", ncols=len(_LOSSES))
    return figure


def draw_raters(results: Results) -> Figure:
    """The difference to one rater in three scores, by the number of raters."""
    figure = new_figure(width=9.6, height=3.2)
    metrics = ("dice_score", *_METRICS)
    all_axes = figure.subplots(1, len(metrics))
    for axes, metric in zip(all_axes, metrics, strict=True):
        _draw_gains(axes, results, metric)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _draw_gains(axes: Axes, results: Results, metric: str) -> None:
    found = results.comparison("raters", metric)
    axes.axhline(0, color="0.4", linewidth=1)
    for number, (kind, name) in enumerate((("mean", "mean"), ("random", "random rater"))):
        counts = np.array([2, 3, 4])
        gains = found.pairs.loc[[(f"raters_{count}_{kind}", "raters_1") for count in counts]]
        value, low, high = (
            gains[name] * found.key.scale for name in ("difference", "low_single", "high_single")
        )
        ends = np.stack([value - low, high - value])
        shifted = counts + 0.06 * (2 * number - 1)
        axes.errorbar(
            shifted, value, yerr=ends, fmt=MARKERS[number], color=COLOURS[number], label=name, markersize=5
        )
    axes.set_xticks([2, 3, 4])
    axes.set_xlabel("raters in the label")
    axes.set_ylabel(f"{heading(found.key)}, minus one rater")
    style_axes(axes)


# name of the figure -> study, function, and what it shows
DRAW: Mapping[str, tuple[str, Callable[[Results], Figure], str]] = {
    "results_labels": (
        "labels",
        draw_labels,
        "BDice and ECE of each label and loss; bars are 95 % intervals of the mean, over patients and seeds",
    ),
    "results_raters": (
        "raters",
        draw_raters,
        "Dice, BDice and ECE with 2, 3 and 4 raters minus one rater; bars are 95 % intervals of a difference",
    ),
}


def link(results: Results, name: str) -> str:
    """The figure as a part of the page."""
    study, _, caption = DRAW[name]
    return f"![{caption}](figures/{name}.png)\n\n{caption}." if results.has(study) else NOT_RUN
