"""Figures of labels and what they are made of, for print: one case as small multiples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from .figures import COLOURS, LINES


def draw_labels(
    image: Float[Tensor, "H W"],
    masks: Bool[Tensor, "R H W"],
    labels: Mapping[str, Float[Tensor, "H W"]],
    *,
    columns: int = 5,
) -> Figure:
    """The image, the raters' outlines on it and the foreground of each label, cut to what is drawn.

    labels are probabilities by title. Raters are told apart by colour and line; one who drew nothing has no
    outline.
    """
    window = _window(masks, labels)
    rows = -(-(2 + len(labels)) // columns)
    figure = Figure(figsize=(1.75 * columns + 0.6, 1.98 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Sequence[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.set_axis_off()
    grey = image[window].numpy()
    for axes, title in zip(panels, ("image", f"outlines of {len(masks)} raters"), strict=False):
        axes.imshow(grey, cmap="gray", interpolation="nearest")
        axes.set_title(title, fontsize=9)
    draw_outlines(panels[1], masks[:, window[0], window[1]].numpy())
    shown = None
    for axes, (title, label) in zip(panels[2:], labels.items(), strict=False):
        shown = axes.imshow(label[window].numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=9)
    if shown is not None:
        bar = figure.colorbar(shown, ax=panels, shrink=0.7, aspect=30, pad=0.01)
        bar.set_label("probability of lesion", fontsize=9)
        bar.ax.tick_params(labelsize=8)
    return figure


def outline_style(number: int) -> tuple[str, Any]:
    """Colour and line of a rater; no two of the first 36 have both in common."""
    turn = number // len(COLOURS)
    return COLOURS[number % len(COLOURS)], LINES[(number + turn) % len(LINES)]


def draw_outlines(axes: Axes, masks: Bool[np.ndarray, "R H W"], *, width: float = 1.5) -> None:
    """The outline of each rater's mask in the rater's style, `width` points wide; none of an empty mask."""
    # matplotlib warns of a contour that is nowhere
    drawn = {number: mask.astype(float) for number, mask in enumerate(masks) if mask.any() and not mask.all()}
    # a dark line beneath shows in the gaps of the others, on light and dark tissue; all of them come first,
    # so that where outlines coincide each shows in the gaps of the next
    for mask in drawn.values():
        axes.contour(mask, levels=[0.5], colors=["0.1"], linewidths=width + 0.7)
    for number, mask in drawn.items():
        colour, line = outline_style(number)
        axes.contour(mask, levels=[0.5], colors=[colour], linestyles=[line], linewidths=width)


def _window(masks: Tensor, labels: Mapping[str, Tensor], margin: float = 0.25) -> tuple[slice, slice]:
    """Rows and columns of everything drawn or half probable, with a margin; all if nothing is."""
    drawn = masks.any(0)
    for label in labels.values():
        drawn = drawn | (label > 0.5)
    if not bool(drawn.any()):
        return slice(None), slice(None)
    bounds = []
    for other_axis, length in ((1, drawn.shape[0]), (0, drawn.shape[1])):
        places = drawn.any(other_axis).nonzero().flatten()
        first, last = int(places[0]), int(places[-1]) + 1
        border = max(2, round(margin * (last - first)))
        bounds.append(slice(max(0, first - border), min(length, last + border)))
    return bounds[0], bounds[1]
