"""Figures of scored cases, for print: reliability, scores of all cases, significance, and overlays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..errors import UserError
from ..metrics.bins import CalibrationBins
from ..statistics.compare import Comparison
from ..statistics.pairing import PairedScores
from ..statistics.tables import p_text
from .figures import COLOURS, LINES, MARKERS, draw_outlines, new_axes, new_figure, style_axes

_BLUE, _ORANGE = COLOURS[1], COLOURS[0]
# space for half a marker at the ends of an axis of probabilities
_MARGIN = 0.015


def draw_reliability(bins: Mapping[str, CalibrationBins]) -> Figure:
    """Accuracy against confidence, one line per method, and below it the share of voxels in each bin.

    A method on the diagonal is calibrated; below it, it is overconfident. The bins are those of a dataset, or
    of one case and class, without leading axes. Up to six methods. An empty bin has no point.
    """
    if not 1 <= len(bins) <= len(COLOURS):
        raise UserError(f"a reliability diagram shows 1 to {len(COLOURS)} methods; got {len(bins)}")
    figure = new_figure(width=5.0, height=5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    style_axes(above)
    style_axes(below)
    above.plot([0, 1], [0, 1], color="0.6", linewidth=4, alpha=0.5, label="calibrated")
    points = []
    for (name, counts), colour, line, marker in zip(bins.items(), COLOURS, LINES, MARKERS, strict=False):
        if counts.count.ndim != 1:
            raise UserError(
                f"the bins of {name} have leading axes {tuple(counts.count.shape[:-1])}: "
                "draw one case or class, or bins.over_cases()"
            )
        means = counts.means()
        filled = means.share > 0
        style = {"color": colour, "linestyle": line, "marker": marker, "fillstyle": "none"}
        confidence, accuracy, percentage = (
            part[filled].numpy() for part in (means.confidence, means.accuracy, 100 * means.share)
        )
        above.plot(confidence, accuracy, label=f"{name}: ECE {100 * float(counts.error()):.2f} %", **style)
        below.plot(confidence, percentage, **style)
        points.append([confidence, accuracy, percentage])
    lowest_confidence, lowest_accuracy, lowest_percentage = (
        np.concatenate(points, axis=1).min(axis=1, initial=1).tolist()
    )
    start = 0.5 if lowest_confidence >= 0.5 else 0.0
    above.set(
        ylabel="accuracy in the bin",
        xlim=(start - _MARGIN, 1 + _MARGIN),
        ylim=(min(start, lowest_accuracy) - _MARGIN, 1 + _MARGIN),
    )
    # whole decades: most voxels are in one bin, and the other bins differ by orders of magnitude
    below.set(xlabel="mean confidence in the bin", ylabel="voxels (%)", yscale="log")
    lowest = 10 ** np.floor(np.log10(lowest_percentage))
    below.set_ylim(lowest / 1.5, 150)
    decades = 10.0 ** np.arange(np.log10(lowest), 2.5)
    below.set_yticks(decades, [f"{decade:g}" for decade in decades])
    below.minorticks_off()
    above.legend(loc="upper left", fontsize="small")
    above.set_title("Below the diagonal, confidence is too high", fontsize=11)
    return figure


def draw_case_scores(scores: PairedScores) -> Figure:
    """Every score as a point, one row per method, with quartiles and mean: failures stay visible."""
    num_methods = len(scores.methods)
    figure, axes = new_axes(width=6.4, height=1.1 + 0.55 * num_methods)
    values = scores.values * scores.key.scale
    # a case has the same height in every row, so that it can be followed from method to method
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
    unit = " (%)" if scores.key.scale == 100 else ""
    of_class = "" if scores.class_name in ("mean", "all") else f" of {scores.class_name}"
    axes.set_xlabel(f"{scores.key}{of_class}{unit}")
    axes.set_title(f"{len(values)} cases, each scored under every method")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def draw_significance(comparison: Comparison, *, labels: Sequence[str] | None = None) -> Figure:
    """Row method minus column method in each cell; a significant cell is filled and has a triangle.

    labels: of the methods; None takes their names.
    """
    methods = comparison.methods
    size = 1.8 + 0.78 * len(methods)
    figure, axes = new_axes(width=size + 1.0, height=size)
    scale = comparison.key.scale
    for row, column in np.ndindex(len(methods), len(methods)):
        if row == column:
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor="0.88", edgecolor="white"))
            continue
        pair = comparison.pairs.loc[(methods[row], methods[column])]
        better, worse = pair.better, comparison.pairs.loc[(methods[column], methods[row])].better
        # light enough for black text, and in grey print still darker if the row is better
        face = "#9CC8E8" if better else "#F8D9C4" if worse else "white"
        hatch = "///" if worse else None
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor="0.7", hatch=hatch, lw=0.6))
        sign = "▲ " if better else "▼ " if worse else ""
        difference = f"{pair.difference * scale:+.2f}".replace("-", "−")
        p_value = p_text(pair.p)
        axes.text(
            column + 0.5,
            row + 0.5,
            f"{sign}{difference}\np {p_value if p_value.startswith('<') else f'= {p_value}'}",
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if better else "normal",
            bbox={"facecolor": face, "edgecolor": "none", "pad": 1.5},
        )
    axes.set(xlim=(0, len(methods)), ylim=(len(methods), 0), aspect="equal")
    centres = [number + 0.5 for number in range(len(methods))]
    names = labels or methods
    starred = [
        f"{name} ★" if best else name for name, best in zip(names, comparison.means["best"], strict=True)
    ]
    axes.set_xticks(centres, names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(centres, starred)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    unit = " (percentage points)" if scale == 100 else ""
    axes.set_title(f"{comparison.key}: row minus column{unit}", loc="left", fontsize=10)
    figure.supxlabel(
        f"▲ row significantly better, ▼ worse; p < {comparison.alpha:g}, Holm-corrected, "
        f"{comparison.num_cases} cases.  ★ best: beaten by none.",
        fontsize=8,
    )
    return figure


@dataclass(frozen=True)
class CaseOverlay:
    """One case to draw: its image, the foreground of each rater, and foreground probabilities by title."""

    name: str
    image: Float[np.ndarray, "H W"]
    masks: Bool[np.ndarray, "R H W"]
    prob: Mapping[str, Float[np.ndarray, "H W"]]


def draw_overlays(cases: Sequence[CaseOverlay]) -> Figure:
    """One row per case: the image with the raters' outlines, then each probability with its contour 0.5."""
    titles = list(cases[0].prob)
    num_columns = 1 + len(titles)
    figure = new_figure(width=1.7 * num_columns + 0.6, height=1.85 * len(cases) + 0.3)
    grid = figure.subplots(len(cases), num_columns, squeeze=False)
    picture = None
    for row, case in zip(grid, cases, strict=True):
        for axes in row:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        row[0].imshow(case.image, cmap="gray", interpolation="nearest")
        draw_outlines(row[0], case.masks, width=1.0)
        row[0].set_ylabel(case.name, fontsize=8)
        for axes, title in zip(row[1:], titles, strict=True):
            prob = case.prob[title]
            picture = axes.imshow(prob, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
            if prob.min() < 0.5 < prob.max():
                axes.contour(prob, levels=[0.5], colors=["white"], linewidths=0.8)
    for axes, title in zip(grid[0], ["raters", *titles], strict=True):
        axes.set_title(title, fontsize=8)
    if picture is not None:
        bar = figure.colorbar(picture, ax=grid, shrink=0.6, aspect=30, pad=0.01)
        bar.set_label("probability of lesion", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return figure
