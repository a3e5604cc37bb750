"""Figures of scored cases, for print: reliability, the spread of scores over cases, and who beats whom."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..metrics.bins import CalibrationBins
from ..metrics.cases import PairedScores
from ..metrics.registry import display_scale
from ..metrics.statistics import Comparison, Correction
from ..metrics.tables import p_text
from .figures import COLOURS, LINES, MARKERS, new_axes

_BLUE, _ORANGE = COLOURS[1], COLOURS[0]


def draw_reliability(bins: Mapping[str, CalibrationBins]) -> Figure:
    """Accuracy against confidence, a line a method, and below it how many voxels are in each bin.

    On the diagonal is calibrated, below it overconfident. The bins are of a dataset or of one case and class,
    without leading axes; up to six methods. A bin without a voxel has no point.
    """
    if not 1 <= len(bins) <= len(COLOURS):
        raise ValueError(f"a reliability diagram shows 1 to {len(COLOURS)} methods; got {len(bins)}")
    figure = Figure(figsize=(5.0, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    above.plot([0, 1], [0, 1], color="0.6", linewidth=4, alpha=0.5, label="calibrated")
    lowest = 1.0
    for (name, one), colour, line, marker in zip(bins.items(), COLOURS, LINES, MARKERS, strict=False):
        if one.count.ndim != 1:
            raise ValueError(
                f"the bins of {name} have leading axes {tuple(one.count.shape[:-1])}: "
                "draw one case or class, or bins.over_cases()"
            )
        means = one.means()
        there = means.share > 0
        style = {"color": colour, "linestyle": line, "marker": marker, "fillstyle": "none"}
        confidence, accuracy, share = (
            part[there].numpy() for part in (means.confidence, means.accuracy, means.share)
        )
        above.plot(confidence, accuracy, label=f"{name}: ECE {100 * float(one.error()):.2f} %", **style)
        below.plot(confidence, 100 * share, **style)
        lowest = min(lowest, float(confidence.min(initial=1)))
    start = 0.5 if lowest >= 0.5 else 0.0
    # room for half a marker
    edge = 0.015
    lowest_accuracy = min(start, _least(above, skip=1))
    above.set(
        ylabel="accuracy in the bin",
        xlim=(start - edge, 1 + edge),
        ylim=(lowest_accuracy - edge, 1 + edge),
    )
    below.set(xlabel="mean confidence in the bin", ylabel="voxels (%)", yscale="log")
    # whole decades, as most voxels are in one bin and the others differ by orders of magnitude
    least = min(1.0, 10 ** np.floor(np.log10(_least(below, skip=0))))
    below.set_ylim(least / 1.5, 150)
    decades = 10.0 ** np.arange(np.log10(least), 2.5)
    below.set_yticks(decades, [f"{decade:g}" for decade in decades])
    below.minorticks_off()
    above.legend(loc="upper left", fontsize="small")
    above.set_title("Below the diagonal, confidence is too high", fontsize=11)
    return figure


def draw_case_scores(scores: PairedScores) -> Figure:
    """Every case's score as a point, a row a method, with quartiles and mean: failures stay in sight."""
    num_methods = len(scores.methods)
    figure, axes = new_axes(width=6.4, height=1.1 + 0.55 * num_methods)
    values = scores.values * display_scale(scores.metric)
    # the same height for a case in every row, so that it can be followed from method to method
    height = np.random.default_rng(0).uniform(-0.22, 0.22, len(values))
    for row in range(num_methods):
        column = values[:, row]
        axes.plot(
            column, row + height, linestyle="", marker="o", markersize=3, color="0.45", alpha=0.45, mew=0
        )
        low, median, high = np.percentile(column, [25, 50, 75])
        axes.add_patch(
            Rectangle((low, row - 0.3), high - low, 0.6, fill=False, edgecolor=_BLUE, linewidth=1.4, zorder=3)
        )
        axes.plot([median, median], [row - 0.3, row + 0.3], color=_BLUE, linewidth=2.2, zorder=4)
        axes.plot(
            column.mean(), row, marker="D", color=_ORANGE, markersize=6, markeredgecolor="white", zorder=5
        )
    axes.plot([], [], linestyle="", marker="o", markersize=3, color="0.45", label="case")
    axes.plot([], [], color=_BLUE, linewidth=1.4, label="quartiles, median")
    axes.plot([], [], linestyle="", marker="D", color=_ORANGE, markersize=6, label="mean")
    axes.set_yticks(range(num_methods), scores.methods)
    axes.set_ylim(num_methods - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    unit = " (%)" if display_scale(scores.metric) == 100 else ""
    of_class = "" if scores.class_name in ("mean", "all") else f" of {scores.class_name}"
    axes.set_xlabel(f"{scores.metric}{of_class}{unit}")
    axes.set_title(f"{len(values)} cases, each scored under every method")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def draw_significance(
    comparison: Comparison, *, level: float = 0.05, correction: Correction = "holm"
) -> Figure:
    """Row method minus column method in each cell, filled and with a triangle where it is significant."""
    methods = comparison.methods
    side = 1.8 + 0.78 * len(methods)
    figure, axes = new_axes(width=side + 1.0, height=side)
    superior = comparison.superior(level=level, correction=correction)
    p = comparison.p_holm if correction == "holm" else comparison.p
    scale = display_scale(comparison.metric)
    for row, column in np.ndindex(len(methods), len(methods)):
        if row == column:
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor="0.88", edgecolor="white"))
            continue
        better, worse = bool(superior[row, column]), bool(superior[column, row])
        # light enough for black text, and in grey print still darker where the row wins
        face = "#9CC8E8" if better else "#F8D9C4" if worse else "white"
        axes.add_patch(
            Rectangle(
                (column, row), 1, 1, facecolor=face, edgecolor="0.7", hatch="///" if worse else None, lw=0.6
            )
        )
        sign = "▲ " if better else "▼ " if worse else ""
        difference = f"{comparison.difference[row, column] * scale:+.2f}".replace("-", "−")
        box = {"facecolor": face, "edgecolor": "none", "pad": 1.5}
        axes.text(
            column + 0.5,
            row + 0.5,
            f"{sign}{difference}\np {_with_sign(p_text(float(p[row, column])))}",
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if better else "normal",
            bbox=box,
        )
    _label_matrix(axes, comparison, comparison.best(level=level, correction=correction))
    unit = " (percentage points)" if scale == 100 else ""
    corrected = "Holm-corrected" if correction == "holm" else "uncorrected"
    axes.set_title(f"{comparison.metric}: row minus column{unit}", loc="left", fontsize=10)
    figure.supxlabel(
        f"▲ row significantly better, ▼ worse; p < {level:g}, {corrected}, "
        f"{comparison.num_cases} cases.  ★ best: beaten by none.",
        fontsize=8,
    )
    return figure


def _label_matrix(axes: Axes, comparison: Comparison, best: tuple[str, ...]) -> None:
    count = len(comparison.methods)
    names = [f"{name} ★" if name in best else name for name in comparison.methods]
    axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
    centres = [number + 0.5 for number in range(count)]
    axes.set_xticks(centres, comparison.methods, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(centres, names)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _with_sign(text: str) -> str:
    return text if text.startswith("<") else f"= {text}"


def _least(axes: Axes, *, skip: int) -> float:
    """The lowest value drawn, but for the first `skip` lines."""
    drawn = [np.asarray(line.get_ydata()).min() for line in axes.lines[skip:]]
    return float(min(drawn, default=1.0))
