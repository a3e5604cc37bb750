"""Figures for a page: one message each, drawn off screen, told apart without colour."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..paths import atomic_write

# Okabe and Ito's palette, and a marker or line style beside it, so that no line is told by colour alone.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "x", "D", "v")


def new_axes(*, width: float = 6.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, in the style of every figure here."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` under its final name only once it is whole."""
    with atomic_write(path) as temp_path:
        figure.savefig(temp_path, dpi=160, format=path.suffix.removeprefix("."))
