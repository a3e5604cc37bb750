"""The style of all figures: colours, lines, outlines of raters, labels; how a figure is saved or inlined.

Figures are drawn without a screen. Lines also differ by style or marker, so that they can be told apart
without colour. A figure is drawn once: the same drawing is a file for print and an SVG on the page.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from jaxtyping import Bool
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from ..paths import atomic_write

# the palette of Okabe and Ito
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "x", "D", "v")
# for more than six methods or raters; of medium brightness, to be seen on white and on dark tissue
_MORE_COLOURS = ("#7A5CD6", "#8C8C8C", "#A3A300", "#A0522D")
_MAX_LABEL_LENGTH = 24
# a point of a case in matplotlib's SVG: its link has the name and the value, quoted
_POINT = re.compile(
    r'<a xlink:href="([^"|]*)\|([^"]*)"[^>]*>\s*(?:<g[^>]*>\s*)?(<use [^>]*/>)\s*(?:</g>\s*)?</a>'
)


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


def method_labels(methods: Sequence[str]) -> dict[str, str]:
    """The labels of the methods in figures; of a long name, its start and its end.

    >>> method_labels(["DML1", "_a", "a uniform average of all the raters, DML1"])
    {'DML1': 'DML1', '_a': ' _a', 'a uniform average of all the raters, DML1': 'a uniform a…raters, DML1'}
    """
    labels: dict[str, str] = {}
    for number, method in enumerate(methods, start=1):
        short = method if len(method) <= _MAX_LABEL_LENGTH else f"{method[:11]}…{method[-12:]}"
        # two long names may have the same start and end
        labels[method] = plain_label(f"{number}. {short}" if plain_label(short) in labels.values() else short)
    return labels


def plain_label(text: str) -> str:
    """The text as a label: matplotlib omits one after an underscore, and reads mathematics between $."""
    return f"{' ' if text.startswith('_') else ''}{text}".replace("$", r"\$")


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


def name_points(points: PathCollection, names: Sequence[str], values: Sequence[str]) -> None:
    """Give each point the name and the value of its case, which `inline_svg` shows under the pointer."""
    points.set_urls([f"{quote(name)}|{quote(value)}" for name, value in zip(names, values, strict=True)])


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the suffix of `path` names; an equal figure gives equal bytes."""
    with atomic_write(path) as temp_path:
        if path.suffix == ".svg":
            temp_path.write_text(_POINT.sub(r"\3", _svg_text(figure)), encoding="utf-8")
        else:
            figure.savefig(temp_path, dpi=160, format=path.suffix.removeprefix("."))


def inline_svg(figure: Figure, name: str, number_of_case: Mapping[str, int]) -> Markup:
    """The figure as an element of a page, with texts that can be selected.

    A point of a case shows its name and value, and leads to the images of the case if there are any.
    number_of_case: of the cases with images. name: of the figure; no two figures of a page have the
    same.
    """

    def point(found: re.Match[str]) -> str:
        case, value = (unquote(found[part]) for part in (1, 2))
        number = number_of_case.get(case)
        link = f' href="#case-{number}" tabindex="-1"' if number is not None else ""
        title = f"<title>{escape(case)}: {escape(value)}</title>"
        return f'<a data-case="{escape(case)}"{link}>{title}{found[3]}</a>'

    text = _svg_text(figure, salt=name, fonttype="none")
    # what is before the drawing would count for the whole page
    _, size, drawing = re.split(r"(viewBox=\"[^\"]*\").*?</defs>", text, maxsplit=1, flags=re.S)
    drawing = re.sub(r'<g id="[^"]*">', "<g>", _POINT.sub(point, drawing))
    width = f'style="max-width: {figure.get_figwidth():.1f}in"'
    return Markup(f'<svg role="group" aria-label="{escape(name)}" {width} {size}>{drawing}')


def _svg_text(figure: Figure, *, salt: str = "semidice", fonttype: str = "path") -> str:
    file = io.StringIO()
    # without the salt and the date, an SVG has the time and random names in it
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": fonttype}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
