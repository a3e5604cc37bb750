"""The contact sheet of a dataset: cases in grey, each with the outlines that its raters drew.

The cases are taken evenly across the dataset and shown the most contested first. A panel shows the part of
the image around what was drawn, of a volume the slice with most of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..data.dataset import INTENSITY_UNITS, Dataset
from .images import fullest_slice
from .label_figures import draw_outlines, outline_style

MAX_CASES = 24
_MAX_COLUMNS = 6
# share of a panel's side that what was drawn takes, and the most it takes where the image is narrow
_DRAWN_SHARE = 0.5
_MAX_SHARE = 0.8
# pixels of a panel's side: fewer show no surroundings
_MIN_SIDE = 24
_MAX_TITLE_LENGTH = 26


@dataclass(frozen=True)
class SheetPanel:
    """One case: an image in [0, 1], class maps on it, and a pixel's height divided by its width."""

    name: str
    agreement: float
    image: Float32[np.ndarray, "H W"]
    masks: UInt8[np.ndarray, "R H W"]
    aspect: float = 1.0


def choose_cases(
    agreement: Float[np.ndarray, " N"], usable: Bool[np.ndarray, " N"], *, most: int = MAX_CASES
) -> list[int]:
    """Numbers of up to `most` usable cases, evenly across the dataset, the lowest agreement first, NaN last.

    >>> choose_cases(np.array([0.9, 0.5, np.nan, 0.7]), np.array([True, True, True, True]), most=3)
    [3, 0, 2]
    """
    numbers = np.flatnonzero(usable)
    if len(numbers) > most:
        numbers = numbers[np.linspace(0, len(numbers) - 1, most).round().astype(int)]
    return sorted(numbers.tolist(), key=lambda number: (math.isnan(agreement[number]), agreement[number]))


def case_panel(dataset: Dataset, number: int, agreement: float) -> SheetPanel:
    """The panel of a case: its first channel, cut to what was drawn; of a volume, its fullest slice."""
    case = dataset.cases[number]
    stored, masks = dataset.stored("images", number)[0], dataset.masks(number)
    spacing = case.scan.spacing_mm[: len(case.shape)]
    if stored.ndim == 3:
        axis, fullest = fullest_slice(dataset, masks)
        stored, masks = stored.take(fullest, axis), masks.take(fullest, axis + 1)
        spacing = tuple(side for other, side in enumerate(spacing) if other != axis)
    rows, columns = _window(np.asarray(masks.any(axis=0)))
    image = stored[rows, columns].astype(np.float32) * np.float32(INTENSITY_UNITS[stored.dtype.name])
    return SheetPanel(case.name, agreement, image, masks[:, rows, columns], spacing[0] / spacing[1])


def draw_contact_sheet(panels: Sequence[SheetPanel], raters: Sequence[str], *, num_cases: int) -> Figure:
    """The panels in rows, with one legend of the raters, told apart by colour and line.

    With more than two classes, the outline of each region of one class. num_cases: of the whole dataset.
    """
    columns = _num_columns(len(panels))
    rows = -(-len(panels) // columns)
    shapes = [panel.image.shape[0] * panel.aspect / panel.image.shape[1] for panel in panels]
    # very long images are given room, but not a whole page
    panel_height = 1.9 * min(2.0, max(0.4, float(np.median(shapes))))
    width = max(1.9 * columns + 0.2, 6.0)
    legend_columns = _legend_columns(raters, width)
    legend_rows = -(-len(raters) // legend_columns)
    height = rows * (panel_height + 0.36) + 0.65 + 0.2 * legend_rows
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes_grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in axes_grid:
        axes.set_axis_off()
    for axes, panel in zip(axes_grid, panels, strict=False):
        low, high = np.percentile(panel.image, [0.5, 99.5])
        axes.imshow(
            panel.image, cmap="gray", vmin=low, vmax=high, interpolation="nearest", aspect=panel.aspect
        )
        for number in np.unique(panel.masks[panel.masks > 0]):
            draw_outlines(axes, panel.masks == number, width=0.9)
        score = "" if math.isnan(panel.agreement) else f"\nDice {panel.agreement:.3f}"
        axes.set_title(f"{_shortened(panel.name)}{score}", fontsize=7, pad=3)
    _add_legend(figure, raters, legend_columns)
    figure.suptitle(_title(panels, num_cases), fontsize=9)
    return figure


def _add_legend(figure: Figure, raters: Sequence[str], columns: int) -> None:
    handles = []
    for number, rater in enumerate(raters):
        colour, line = outline_style(number)
        # matplotlib leaves out labels with an underscore in front, and takes dollars for mathematics
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


def _title(panels: Sequence[SheetPanel], num_cases: int) -> str:
    chosen = f"{len(panels)} of {num_cases} cases"
    if all(math.isnan(panel.agreement) for panel in panels):
        return chosen
    return f"{chosen}, the most contested first: mean Dice of the raters against their majority"


def _num_columns(num_panels: int) -> int:
    """As many as fill the rows best, from the most down to four.

    >>> [_num_columns(number) for number in (1, 5, 6, 8, 15, 24)]
    [1, 5, 6, 4, 5, 6]
    """
    if num_panels <= _MAX_COLUMNS:
        return num_panels
    return min(range(_MAX_COLUMNS, 3, -1), key=lambda columns: -num_panels % columns)


def _legend_columns(raters: Sequence[str], width: float) -> int:
    """Entries that fit side by side, each a line of half an inch and its name."""
    longest = max(len(_shortened(rater)) for rater in raters)
    fitting = max(1, int(width / (0.65 + 0.08 * longest)))
    # the same number in every row, but for the last
    return -(-len(raters) // -(-len(raters) // fitting))


def _shortened(name: str) -> str:
    """The name, or its two ends: what differs between names is mostly at the end."""
    if len(name) <= _MAX_TITLE_LENGTH:
        return name
    return f"{name[:8]}…{name[-(_MAX_TITLE_LENGTH - 9) :]}"


def _window(drawn: Bool[np.ndarray, "H W"]) -> tuple[slice, slice]:
    """Rows and columns around what is drawn, square unless the drawing is long; all if nothing is."""
    if not drawn.any():
        return slice(None), slice(None)
    bounds = []
    for other_axis in (1, 0):
        places = np.flatnonzero(drawn.any(axis=other_axis))
        bounds.append((int(places[0]), int(places[-1]) + 1))
    longest = max(last - first for first, last in bounds)
    square = min(*drawn.shape, max(_MIN_SIDE, math.ceil(longest / _DRAWN_SHARE)))
    window = []
    for (first, last), length in zip(bounds, drawn.shape, strict=True):
        side = min(length, max(square, math.ceil((last - first) / _MAX_SHARE)))
        start = min(max(0, (first + last - side) // 2), length - side)
        window.append(slice(start, start + side))
    return window[0], window[1]
