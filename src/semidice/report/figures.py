"""Figures for a page: one message each, drawn off screen, told apart without colour."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from ..losses import tversky_loss
from ..rundir import whole_file

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
    with whole_file(path) as half_written:
        figure.savefig(half_written, dpi=160, format=path.suffix.removeprefix("."))


def draw_landing(label: Float[Tensor, " n"], landed: Mapping[str, Float[Tensor, " n"]]) -> Figure:
    """Fitted prediction against soft label, a series a loss; on the diagonal is right."""
    figure, axes = new_axes()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=4, alpha=0.5, label="prediction = label")
    for (name, prob), colour, marker in zip(landed.items(), COLOURS, MARKERS, strict=False):
        axes.plot(label, prob, linestyle="", marker=marker, color=colour, label=name, fillstyle="none")
    axes.set(
        xlabel="soft label of the voxel",
        ylabel="prediction at the minimum of the loss",
        title="The soft Dice loss lands on 0 or 1, the others on the label",
    )
    axes.legend()
    return figure


def draw_focal_curves(*, alpha: float, beta: float, label: float, gammas: Sequence[float]) -> Figure:
    """The compatible focal Tversky loss of one voxel against its prediction (paper, figure of appendix F)."""
    figure, axes = new_axes()
    prob = torch.linspace(0, 1, 401)
    target = torch.tensor([[[label]]])
    for gamma, colour, line in zip(gammas, COLOURS, LINES, strict=False):
        loss = [tversky_loss(p.reshape(1, 1, 1), target, alpha=alpha, beta=beta, gamma=gamma) for p in prob]
        axes.plot(prob, torch.stack(loss), color=colour, linestyle=line, label=f"γ = {gamma:g}")
    axes.axvline(label, color="0.4", linewidth=1)
    axes.annotate(f"label {label:g}", (label, 0.9), xytext=(4, 0), textcoords="offset points", color="0.3")
    axes.set(
        xlabel="prediction",
        ylabel="loss",
        title=f"Compatible focal Tversky loss, α = {alpha:g}, β = {beta:g}",
        ylim=(0, 1),
        xlim=(0, 1),
    )
    axes.legend()
    return figure
