"""The style of all figures: colours, lines, outlines of raters, and how a figure is made and saved.

Figures are drawn without a screen. Lines also differ by style or marker, so that they can be told apart
without colour.
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..paths import atomic_write

# the palette of Okabe and Ito
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "x", "D", "v")
# for more than six methods or raters; of medium brightness, to be seen on white and on dark tissue
_MORE_COLOURS = ("#7A5CD6", "#8C8C8C", "#A3A300", "#A0522D")
_MORE_MARKERS = ("P", "*", "<", ">")


def new_figure(*, width: float, height: float) -> Figure:
    """An empty figure, sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(*, width: float = 6.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure with one pair of axes in the common style."""
    figure = new_figure(width=width, height=height)
    axes = figure.subplots()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Remove the upper and the right border, and add a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def line_style(number: int) -> tuple[str, Any]:
    """Colour and line of a rater or method; the first ten have different colours, and the first 60 differ."""
    colours = COLOURS + _MORE_COLOURS
    turn = number // len(colours)
    return colours[number % len(colours)], LINES[(number + turn) % len(LINES)]


def marker_of(number: int) -> str:
    """Marker of a method; the first ten differ, and two methods of one colour never share it.

    >>> [marker_of(number) for number in (0, 6, 10)]
    ['o', 'P', 's']
    """
    markers = MARKERS + _MORE_MARKERS
    return markers[(number + number // len(markers)) % len(markers)]


def draw_outlines(axes: Axes, masks: Bool[np.ndarray, "R H W"], *, width: float = 1.5) -> None:
    """The outline of each rater's mask in the rater's style, `width` points wide; nothing if it is empty."""
    # matplotlib warns if a contour has no points
    drawn = {number: mask.astype(float) for number, mask in enumerate(masks) if mask.any() and not mask.all()}
    # dark lines below the coloured ones are visible in their gaps, on light and on dark tissue; all dark
    # lines are drawn first, so that equal outlines are visible in each other's gaps
    for mask in drawn.values():
        axes.contour(mask, levels=[0.5], colors=["0.1"], linewidths=width + 0.7)
    for number, mask in drawn.items():
        colour, line = line_style(number)
        axes.contour(mask, levels=[0.5], colors=[colour], linestyles=[line], linewidths=width)


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the suffix of `path` names; an equal figure gives equal bytes."""
    kind = path.suffix.removeprefix(".")
    # without these, an SVG has the time and random names in it
    metadata = {"Date": None} if kind == "svg" else None
    with atomic_write(path) as temp_path, rc_context({"svg.hashsalt": "semidice"}):
        figure.savefig(temp_path, dpi=160, format=kind, metadata=metadata)
