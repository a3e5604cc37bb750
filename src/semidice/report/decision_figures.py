"""Figures of decisions, for print: what each rule changes, and volumes with their intervals."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..statistics.resampling import ALPHA
from .figures import COLOURS, line_style, new_axes, new_figure, style_axes
from .rules import PLAIN, RuleScore, differences
from .volumes import ClassVolumes, coverage, level_text

_BLUE, _ORANGE = COLOURS[1], COLOURS[0]
_LIGHT_BLUE = "#9CC8E8"
# markers that can be filled
_MARKERS = ("o", "s", "^", "D", "v", "P", "*", "<", ">")


def draw_rules(score: RuleScore) -> Figure:
    """Each rule's difference from argmax with its corrected interval, one row per method; filled if real."""
    rules = [rule for rule in score.rules if rule != PLAIN]
    methods = list(score.comparisons)
    figure, axes = new_axes(width=6.4, height=1.3 + (0.3 + 0.2 * len(rules)) * len(methods))
    axes.axvline(0, color="0.35", linewidth=1)
    shown = [differences(score, method) for method in methods]
    ends = [end for of_rules in shown for each in of_rules.values() for end in (each.low, each.high)]
    reach = 1.05 * max((abs(end) for end in ends if np.isfinite(end)), default=0) or 1.0
    for row, of_rules in enumerate(shown):
        for number, rule in enumerate(rules):
            if rule not in of_rules:
                continue
            each = of_rules[rule]
            height = row + (number - (len(rules) - 1) / 2) * 0.7 / len(rules)
            colour, _ = line_style(number)
            # an interval without an end reaches the border
            limits = np.clip([each.low, each.high], -reach, reach)
            axes.plot(limits, [height, height], color=colour, linewidth=1.4)
            axes.plot(
                each.difference,
                height,
                marker=_MARKERS[number % len(_MARKERS)],
                color=colour,
                markersize=5.5,
                markerfacecolor=colour if each.significant else "white",
            )
    for number, rule in enumerate(rules):
        axes.plot([], [], color=line_style(number)[0], marker=_MARKERS[number % len(_MARKERS)], label=rule)
    axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    unit = " (percentage points)" if score.key.scale == 100 else ""
    axes.set_xlabel(f"{score.key}: rule minus {PLAIN}{unit}")
    axes.set_title(
        f"Filled: significant, p < {ALPHA:g}, Holm-corrected",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=min(4, len(rules)), fontsize="small", frameon=False)
    return figure


def draw_volumes(volumes: Mapping[str, ClassVolumes]) -> Figure:
    """Every case with its intervals, its expected volume and the raters' volumes; one panel per method."""
    columns = 1 if len(volumes) == 1 else 2
    rows = -(-len(volumes) // columns)
    figure = new_figure(width=4.2 * columns + 0.6, height=2.6 * rows + 0.6)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, (method, each) in zip(panels, volumes.items(), strict=False):
        style_axes(axes)
        _draw_intervals(axes, each)
        share = coverage(each.shown, each.raters)
        axes.set_title(f"{method}: {100 * share:.0f} % of the raters covered", fontsize=9)
    for axes in panels[len(volumes) :]:
        axes.set_axis_off()
    first = next(iter(volumes.values()))
    panels[0].plot([], [], color=_BLUE, linewidth=1, label="corrected interval")
    panels[0].plot([], [], color=_LIGHT_BLUE, linewidth=4, label="nested interval")
    panels[0].plot([], [], linestyle="", marker="_", color="black", label="expected")
    panels[0].plot([], [], linestyle="", marker="o", markersize=3, color="0.35", label="rater, covered")
    panels[0].plot([], [], linestyle="", marker="x", markersize=4, color=_ORANGE, label="rater, not covered")
    figure.supylabel(f"volume of {first.class_name} ({first.unit})", fontsize=9)
    nominal = "" if first.level is None else f"; nominal {level_text(first.level)}"
    for axes in panels[max(0, len(volumes) - columns) : len(volumes)]:
        axes.set_xlabel(f"cases by expected volume{nominal}", fontsize=8)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def _draw_intervals(axes: Axes, volumes: ClassVolumes) -> None:
    place = np.arange(len(volumes.cases))
    axes.vlines(place, *volumes.nested, color=_LIGHT_BLUE, linewidth=max(1, min(4, 160 / len(place))))
    axes.vlines(place, *volumes.conformal, color=_BLUE, linewidth=0.8)
    axes.plot(place, volumes.expected, linestyle="", marker="_", markersize=4, color="black")
    low, high = (end[:, None] for end in volumes.shown)
    inside = (volumes.raters >= low) & (volumes.raters <= high)
    every = np.broadcast_to(place[:, None], volumes.raters.shape)
    outside = ~inside & ~np.isnan(volumes.raters)
    axes.plot(every[inside], volumes.raters[inside], linestyle="", marker="o", markersize=1.8, color="0.35")
    axes.plot(every[outside], volumes.raters[outside], linestyle="", marker="x", markersize=3, color=_ORANGE)
    axes.tick_params(labelsize=7)
    # space for half a marker at 0
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
