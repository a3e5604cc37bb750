"""Every chart of a report: scores of the cases, significance, reliability, curves, rules, volumes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..errors import UserError
from ..metrics.bins import CalibrationBins
from ..statistics.compare import Comparison
from ..statistics.tables import number_text, p_text
from .answer import spoken
from .curves import Curve
from .decisions import PLAIN, ClassVolumes, RuleScore, level_text
from .figures import (
    COLOURS,
    LINES,
    MARKERS,
    line_style,
    method_labels,
    name_points,
    new_axes,
    new_figure,
    plain_label,
    style_axes,
)

# a chart of more points is a picture: the case table has their names and values
MAX_NAMED_POINTS = 2000
_BLUE, _ORANGE, _LIGHT_BLUE = COLOURS[1], COLOURS[0], "#9CC8E8"
# markers that can be filled
_FILLED = ("o", "s", "^", "D", "v", "P", "*", "<", ">")
# space for half a marker at the ends of an axis of probabilities
_MARGIN = 0.015


def draw_case_scores(comparison: Comparison) -> Figure:
    """Every score as a point, one row per method, with quartiles and mean: failures stay visible."""
    scale = comparison.key.scale
    values, methods = comparison.values * scale, list(method_labels(comparison.methods).values())
    figure, axes = new_axes(width=8.0, height=1.2 + 0.55 * len(methods))
    # a case has the same height in every row, so that it can be followed from method to method
    height = np.random.default_rng(0).uniform(-0.22, 0.22, len(values))
    is_named = values.size <= MAX_NAMED_POINTS
    for row, column in enumerate(values.T):
        style: dict[str, Any] = {"s": 12, "color": "0.45", "alpha": 0.5, "linewidths": 0, "clip_on": False}
        points = axes.scatter(column, row + height, rasterized=not is_named, **style)
        if is_named:
            name_points(points, comparison.cases, [number_text(value) for value in column])
        low, median, high = np.percentile(column, [25, 50, 75])
        box: dict[str, Any] = {"fill": False, "edgecolor": _BLUE, "linewidth": 1.4, "zorder": 3}
        axes.add_patch(Rectangle((low, row - 0.3), high - low, 0.6, **box))
        axes.plot([median, median], [row - 0.3, row + 0.3], color=_BLUE, linewidth=2.2, zorder=4)
        axes.plot(column.mean(), row, marker="D", color=_ORANGE, markersize=6, mec="white", zorder=5)
    axes.plot([], [], linestyle="", marker="o", markersize=3, color="0.45", label="case")
    axes.plot([], [], color=_BLUE, linewidth=1.4, label="quartiles, median")
    axes.plot([], [], linestyle="", marker="D", color=_ORANGE, markersize=6, label="mean")
    if comparison.seeds:
        for of_seed in comparison.seed_means * scale:
            axes.plot(of_seed, range(len(methods)), "^", markersize=5, mfc="white", color=_ORANGE, zorder=6)
        axes.plot([], [], "^", markersize=5, mfc="white", color=_ORANGE, label="mean of a seed")
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(plain_label(spoken(comparison)))
    axes.set_title(f"{len(values)} cases, each scored under every method", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def draw_significance(comparison: Comparison) -> Figure:
    """Row method minus column method in each cell; a significant cell is filled and has a triangle."""
    methods, scale = comparison.methods, comparison.key.scale
    size = 2.2 + 0.78 * len(methods)
    figure, axes = new_axes(width=size + 1.0, height=size)
    for row, column in np.ndindex(len(methods), len(methods)):
        if row == column:
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor="0.88", edgecolor="white"))
            continue
        pair = comparison.pairs.loc[(methods[row], methods[column])]
        better, worse = pair.better, comparison.pairs.loc[(methods[column], methods[row])].better
        # light enough for black text, and in grey print still darker if the row is better
        face = _LIGHT_BLUE if better else "#F8D9C4" if worse else "white"
        hatch = "///" if worse else None
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor="0.7", hatch=hatch, lw=0.6))
        sign, p = "▲ " if better else "▼ " if worse else "", p_text(pair.p)
        axes.text(
            column + 0.5,
            row + 0.5,
            f"{sign}{number_text(pair.difference * scale, signed=True)}\np {p if '<' in p else f'= {p}'}",
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if better else "normal",
            bbox={"facecolor": face, "edgecolor": "none", "pad": 1.5},
        )
    axes.set(xlim=(0, len(methods)), ylim=(len(methods), 0), aspect="equal")
    centres, names = np.arange(len(methods)) + 0.5, method_labels(methods)
    axes.set_xticks(centres, list(names.values()), rotation=30, ha="right", rotation_mode="anchor")
    starred = [f"{names[method]} ★" if method in comparison.best else names[method] for method in methods]
    axes.set_yticks(centres, starred)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    unit = " (percentage points)" if scale == 100 else ""
    figure.suptitle(plain_label(f"{spoken(comparison)}: row minus column{unit}"), fontsize=10)
    figure.supxlabel(
        f"▲ row significantly better, ▼ worse: p < {comparison.alpha:g},\n"
        f"Holm-corrected, {comparison.num_cases} cases. ★ beaten by none.",
        fontsize=8,
    )
    return figure


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
    labels, points = method_labels(list(bins)), []
    for (name, counts), colour, line, marker in zip(bins.items(), COLOURS, LINES, MARKERS, strict=False):
        if counts.count.ndim != 1:
            raise UserError(
                f"the bins of {name} have leading axes {tuple(counts.count.shape[:-1])}: "
                "draw one case or class, or bins.over_cases()"
            )
        means = counts.means()
        filled = means.share > 0
        parts = (means.confidence, means.accuracy, 100 * means.share)
        points.append([part[filled].numpy() for part in parts])
        confidence, accuracy, percentage = points[-1]
        style = {"color": colour, "linestyle": line, "marker": marker, "fillstyle": "none"}
        error = f"{labels[name]}: ECE {100 * float(counts.error()):.2f} %"
        above.plot(confidence, accuracy, label=error, **style)
        below.plot(confidence, percentage, **style)
    lowest_confidence, lowest_accuracy, lowest_percentage = np.concatenate(points, axis=1).min(1, initial=1)
    start = 0.5 if lowest_confidence >= 0.5 else 0.0
    xlim, ylim = ((low - _MARGIN, 1 + _MARGIN) for low in (start, min(start, lowest_accuracy)))
    above.set(ylabel="accuracy in the bin", xlim=xlim, ylim=ylim)
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


def draw_curves(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """One panel per series and one line per method, with the range over the folds behind it."""
    figure, panels = _panels(len(curves), columns=3, width=3.2, height=2.5)
    labels = method_labels(list(dict.fromkeys(name for of_methods in curves.values() for name in of_methods)))
    styles = {method: line_style(number) for number, method in enumerate(labels)}
    for axes, (series, of_methods) in zip(panels, curves.items(), strict=True):
        axes.set_title(plain_label(series), fontsize=9)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("step", fontsize=7)
        for method, curve in of_methods.items():
            colour, line = styles[method]
            axes.fill_between(curve.step, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(curve.step, curve.mean, color=colour, linestyle=line, linewidth=1.3)
    for method, (colour, line) in styles.items():
        panels[0].plot([], [], color=colour, linestyle=line, label=labels[method])
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def draw_rules(score: RuleScore) -> Figure:
    """Each rule's difference from argmax with its corrected interval, one row per method; filled if real."""
    rules = [rule for rule in score.rules if rule != PLAIN]
    rows = score.rows[score.rows["rule"] != PLAIN]
    labels = method_labels(list(dict.fromkeys(rows["method"])))
    figure, axes = new_axes(width=6.4, height=1.3 + (0.3 + 0.2 * len(rules)) * len(labels))
    axes.axvline(0, color="0.35", linewidth=1)
    ends = (rows[["low", "high"]] * score.key.scale).to_numpy()
    reach = 1.05 * np.abs(ends[np.isfinite(ends)]).max(initial=0) or 1.0
    for row, method in enumerate(labels):
        for each in rows[rows["method"] == method].itertuples():
            number = rules.index(each.rule)
            height = row + (number - (len(rules) - 1) / 2) * 0.7 / len(rules)
            colour, _ = line_style(number)
            # an interval without an end reaches the border
            limits = np.clip(np.array([each.low, each.high]) * score.key.scale, -reach, reach)
            axes.plot(limits, [height, height], color=colour, linewidth=1.4)
            style: dict[str, Any] = {
                "marker": _FILLED[number % len(_FILLED)],
                "markersize": 5.5,
                "color": colour,
            }
            face = colour if each.significant else "white"
            axes.plot(each.difference * score.key.scale, height, markerfacecolor=face, **style)
    for number, rule in enumerate(rules):
        marker = _FILLED[number % len(_FILLED)]
        axes.plot([], [], color=line_style(number)[0], marker=marker, label=plain_label(rule))
    axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(labels)), list(labels.values()))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    unit = " (percentage points)" if score.key.scale == 100 else ""
    axes.set_xlabel(plain_label(f"{spoken(score)}: rule minus {PLAIN}{unit}"))
    axes.set_title("Filled: significant after Holm's correction", fontsize=10)
    figure.legend(loc="outside lower center", ncols=min(4, len(rules)), fontsize="small", frameon=False)
    return figure


def draw_volumes(volumes: Sequence[ClassVolumes]) -> Figure:
    """Every case with its intervals, its expected volume and the raters' volumes; one panel per method."""
    columns = min(2, len(volumes))
    figure, panels = _panels(len(volumes), columns=columns, width=4.2, height=2.6, sharey=True)
    labels = method_labels([each.method for each in volumes])
    for axes, each in zip(panels, volumes, strict=True):
        _draw_intervals(axes, each)
        title = f"{labels[each.method]}: {100 * each.coverage(each.shown):.0f} % of the raters covered"
        axes.set_title(title, fontsize=9)
    axes, first = panels[0], volumes[0]
    axes.plot([], [], color=_BLUE, linewidth=1, label="corrected interval")
    axes.plot([], [], color=_LIGHT_BLUE, linewidth=4, label="nested interval")
    axes.plot([], [], linestyle="", marker="_", color="black", label="expected")
    axes.plot([], [], linestyle="", marker="o", markersize=3, color="0.35", label="rater, covered")
    axes.plot([], [], linestyle="", marker="x", markersize=4, color=_ORANGE, label="rater, not covered")
    figure.supylabel(plain_label(f"volume of {first.class_name} ({first.unit})"), fontsize=9)
    nominal = f"cases by expected volume; nominal {level_text(first.level)}"
    for axes in panels[-columns:]:
        axes.set_xlabel(nominal, fontsize=8)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def _draw_intervals(axes: Axes, volumes: ClassVolumes) -> None:
    table, raters = volumes.table, volumes.raters
    place = np.arange(len(table))
    width = max(1, min(4, 160 / len(place)))
    axes.vlines(place, table["low"], table["high"], color=_LIGHT_BLUE, linewidth=width)
    axes.vlines(place, table["conformal_low"], table["conformal_high"], color=_BLUE, linewidth=0.8)
    expected = axes.scatter(place, table["expected"], marker="_", s=20, color="black", linewidths=1)
    if len(place) <= MAX_NAMED_POINTS:
        ends = table[list(volumes.shown)].to_numpy()
        texts = [
            f"{number_text(value)} {volumes.unit} [{', '.join(map(number_text, interval))}]"
            for value, interval in zip(table["expected"], ends, strict=True)
        ]
        name_points(expected, list(table["case"]), texts)
    inside = volumes.is_inside(volumes.shown)
    every = np.broadcast_to(place[:, None], raters.shape)
    outside = ~inside & ~np.isnan(raters)
    axes.plot(every[inside], raters[inside], linestyle="", marker="o", markersize=1.8, color="0.35")
    axes.plot(every[outside], raters[outside], linestyle="", marker="x", markersize=3, color=_ORANGE)
    axes.tick_params(labelsize=7)
    # space for half a marker at 0
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])


def _panels(
    number: int, *, columns: int, width: float, height: float, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with this many axes in rows of `columns`."""
    columns = min(columns, number)
    rows = -(-number // columns)
    figure = new_figure(width=width * columns + 0.6, height=height * rows + 0.6)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for axes in panels[:number]:
        style_axes(axes)
    for axes in panels[number:]:
        axes.set_axis_off()
    return figure, panels[:number]
