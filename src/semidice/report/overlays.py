"""Predictions of several methods beside what the raters drew: a row a case, a column a method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .label_figures import draw_outlines


@dataclass(frozen=True)
class CaseOverlay:
    """One case to draw: image, raters' foreground, and probabilities of the foreground by title."""

    name: str
    image: Float[np.ndarray, "H W"]
    masks: Bool[np.ndarray, "R H W"]
    prob: Mapping[str, Float[np.ndarray, "H W"]]


def draw_overlays(cases: Sequence[CaseOverlay]) -> Figure:
    """The image with the raters' outlines, then each probability, with its half-way line in white."""
    titles = list(cases[0].prob)
    num_columns = 1 + len(titles)
    figure = Figure(figsize=(1.7 * num_columns + 0.6, 1.85 * len(cases) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(cases), num_columns, squeeze=False)
    shown = None
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
            shown = axes.imshow(prob, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
            if prob.min() < 0.5 < prob.max():
                axes.contour(prob, levels=[0.5], colors=["white"], linewidths=0.8)
    for axes, title in zip(grid[0], ["raters", *titles], strict=True):
        axes.set_title(title, fontsize=8)
    if shown is not None:
        bar = figure.colorbar(shown, ax=grid, shrink=0.6, aspect=30, pad=0.01)
        bar.set_label("probability of lesion", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return figure
