"""The contact sheet of a dataset: grey images of cases with the outlines of their raters.

The cases with the lowest agreement of their raters are shown; if there are too few with two raters or more,
also others, evenly across the dataset. A panel shows the part of the image around the outlines. Of a volume,
it shows the slice with the most foreground.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, UInt8
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..data.dataset import Dataset, ScoredUnit
from ..data.intensities import INTENSITY_UNITS
from .figures import draw_outlines, line_style, new_figure
from .pictures import shown_planes

MAX_CASES = 24
_MAX_COLUMNS = 6
# share of a panel's side that the outlines take, and the largest share if the image is narrow
_DRAWN_SHARE = 0.5
_MAX_SHARE = 0.8
# pixels of a panel's side: fewer do not show the surroundings
_MIN_SIDE = 24
_MAX_TITLE_LENGTH = 26


@dataclass(frozen=True)
class SheetPanel:
    """One case: an image in [0, 1], its class maps, and the height of a pixel divided by its width."""

    name: str
    agreement: float
    image: Float32[np.ndarray, "H W"]
    masks: UInt8[np.ndarray, "R H W"]
    aspect: float = 1.0


def choose_cases(
    agreement: Float[np.ndarray, " N"], usable: Bool[np.ndarray, " N"], *, max_cases: int = MAX_CASES
) -> list[int]:
    """Numbers of up to `max_cases` usable cases: those with the lowest agreement first, then those with NaN.

    >>> choose_cases(np.array([0.9, 0.5, np.nan, 0.7]), np.array([True, True, True, True]), max_cases=2)
    [1, 3]
    """
    rated, unrated = (
        np.flatnonzero(usable & is_kind) for is_kind in (~np.isnan(agreement), np.isnan(agreement))
    )
    contested = rated[np.argsort(agreement[rated], kind="stable")][:max_cases]
    num_others = min(len(unrated), max_cases - len(contested))
    others = unrated[np.linspace(0, len(unrated) - 1, num_others).round().astype(int)]
    return [*contested.tolist(), *others.tolist()]


def case_panel(dataset: Dataset, number: int, agreement: float) -> SheetPanel:
    """The panel of a case: its first channel, cropped to the outlines; of a volume, its fullest slice."""
    shown = shown_planes(dataset, ScoredUnit(dataset.cases[number].name, (number,)))[0]
    stored, masks = shown.cut(dataset.stored("images", number)[:1])[0], shown.cut(dataset.masks(number))
    rows, columns = _window(np.asarray(masks.any(axis=0)))
    image = stored[rows, columns].astype(np.float32) * np.float32(INTENSITY_UNITS[stored.dtype.name])
    return SheetPanel(dataset.cases[number].name, agreement, image, masks[:, rows, columns], shown.aspect)


def draw_contact_sheet(panels: Sequence[SheetPanel], raters: Sequence[str], *, num_cases: int) -> Figure:
    """The panels in rows, with one legend for the colours and lines of the raters.

    Every class has its own outlines. num_cases: number of cases in the dataset.
    """
    columns = _num_columns(len(panels))
    rows = -(-len(panels) // columns)
    shapes = [panel.image.shape[0] * panel.aspect / panel.image.shape[1] for panel in panels]
    # a panel grows with long images, within limits
    panel_height = 1.9 * min(2.0, max(0.4, float(np.median(shapes))))
    width = max(1.9 * columns + 0.2, 6.0)
    legend_columns = _legend_columns(raters, width)
    legend_rows = -(-len(raters) // legend_columns)
    height = rows * (panel_height + 0.36) + 0.65 + 0.2 * legend_rows
    figure = new_figure(width=width, height=height)
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes:
        axes.set_axis_off()
    for axes, panel in zip(all_axes, panels, strict=False):
        low, high = np.percentile(panel.image, [0.5, 99.5])
        axes.imshow(
            panel.image, cmap="gray", vmin=low, vmax=high, interpolation="nearest", aspect=panel.aspect
        )
        for number in np.unique(panel.masks[panel.masks > 0]):
            draw_outlines(axes, panel.masks == number, width=0.9)
        score = "" if math.isnan(panel.agreement) else f"\nDice {100 * panel.agreement:.1f} %"
        axes.set_title(f"{_shortened(panel.name)}{score}", fontsize=7, pad=3)
    _add_legend(figure, raters, legend_columns)
    title = f"{len(panels)} of {num_cases} cases"
    if not all(math.isnan(panel.agreement) for panel in panels):
        title += ", the most contested first: mean Dice of the raters against their majority"
    figure.suptitle(title, fontsize=9)
    return figure


def _add_legend(figure: Figure, raters: Sequence[str], columns: int) -> None:
    handles = []
    for number, rater in enumerate(raters):
        colour, line = line_style(number)
        # matplotlib omits labels that start with an underscore, and reads text between dollars as mathematics
        label = " " + _shortened(rater).replace("$", r"\$")
        handles.append(Line2D([], [], color=colour, linestyle=line, linewidth=1.4, label=label))
    figure.legend(
        handles=handles,
        title="rater",
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        title_fontsize=8,
        frameon=False,
        handlelength=3,
    )


def _num_columns(num_panels: int) -> int:
    """The number of columns, from six down to four, that leaves the fewest empty panels in the last row.

    >>> [_num_columns(number) for number in (1, 5, 6, 8, 15, 24)]
    [1, 5, 6, 4, 5, 6]
    """
    if num_panels <= _MAX_COLUMNS:
        return num_panels
    return min(range(_MAX_COLUMNS, 3, -1), key=lambda columns: -num_panels % columns)


def _legend_columns(raters: Sequence[str], width: float) -> int:
    """How many entries, a line of half an inch and a name, fit next to each other."""
    longest = max(len(_shortened(rater)) for rater in raters)
    fitting = max(1, int(width / (0.65 + 0.08 * longest)))
    # the same number in every row, except the last one
    return -(-len(raters) // -(-len(raters) // fitting))


def _shortened(name: str) -> str:
    """The name; of a long one its start and a longer end, as names mostly differ at the end."""
    if len(name) <= _MAX_TITLE_LENGTH:
        return name
    return f"{name[:8]}…{name[-(_MAX_TITLE_LENGTH - 9) :]}"


def _window(drawn: Bool[np.ndarray, "H W"]) -> tuple[slice, slice]:
    """Rows and columns around the drawn pixels, square unless they are long; everything if there are none."""
    if not drawn.any():
        return slice(None), slice(None)
    bounds = []
    for other_axis in (1, 0):
        numbers = np.flatnonzero(drawn.any(axis=other_axis))
        bounds.append((int(numbers[0]), int(numbers[-1]) + 1))
    longest = max(last - first for first, last in bounds)
    square = min(*drawn.shape, max(_MIN_SIDE, math.ceil(longest / _DRAWN_SHARE)))
    window = []
    for (first, last), length in zip(bounds, drawn.shape, strict=True):
        side = min(length, max(square, math.ceil((last - first) / _MAX_SHARE)))
        start = min(max(0, (first + last - side) // 2), length - side)
        window.append(slice(start, start + side))
    return window[0], window[1]
