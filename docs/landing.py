"""Where each loss has its minimum: figure and table of docs/landing.md, and focal curves of the theory."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from semidice import dice_loss, tversky_loss
from semidice.report.figures import COLOURS, LINES, MARKERS, new_axes

Loss = Callable[[Tensor, Tensor], Tensor]

SHOWN_LOSSES: Mapping[str, Loss] = {
    "soft Dice (SDL)": partial(dice_loss, form="relaxed"),
    "DML1": dice_loss,
    "DML2": partial(dice_loss, form="product"),
    "focal Tversky (CFTL)": partial(tversky_loss, alpha=0.7, beta=0.3, gamma=2.0),
}


def fit_free_logits(
    loss: Loss,
    target: Tensor,
    *,
    steps: int = 500,
    activation: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Tensor:
    """Probabilities, in the shape of `target`, that minimise `loss` over free logits.

    Adam starts from logits 0. Its rate falls linearly from 0.1 to 0, because the losses are not smooth at
    their minimum.
    """
    logits = torch.zeros_like(target, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1, betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(activation(logits), target).backward()
        optimiser.step()
        schedule.step()
    return activation(logits).detach()


@cache
def landed() -> tuple[Tensor, dict[str, Tensor]]:
    """The soft labels 0, 0.05, ..., 1, and by loss the predictions that were fitted to them."""
    target = torch.linspace(0, 1, 21).reshape(1, 1, -1)
    return target.flatten(), {
        name: fit_free_logits(loss, target).flatten() for name, loss in SHOWN_LOSSES.items()
    }


def landing_table() -> list[Sequence[str]]:
    """Fitted predictions of some of the labels, one column per loss."""
    label, by_loss = landed()
    shown = [number for number, value in enumerate(label.tolist()) if number % 4 == 0 or 0.3 < value < 0.45]
    rows: list[Sequence[str]] = [("label", *by_loss)]
    rows += [[f"{values[number]:.2f}" for values in (label, *by_loss.values())] for number in shown]
    return rows


def draw_landing() -> Figure:
    """Fitted prediction against soft label, one series per loss; right predictions are on the diagonal."""
    label, by_loss = landed()
    figure, axes = new_axes()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=4, alpha=0.5, label="prediction = label")
    for (name, prob), colour, marker in zip(by_loss.items(), COLOURS, MARKERS, strict=False):
        axes.plot(label, prob, linestyle="", marker=marker, color=colour, label=name, fillstyle="none")
    axes.set(
        xlabel="soft label of the voxel",
        ylabel="prediction at the minimum of the loss",
        title="The soft Dice loss lands on 0 or 1, the others on the label",
    )
    axes.legend()
    return figure


def draw_focal_curves(*, alpha: float, beta: float, label: float, gammas: Sequence[float]) -> Figure:
    """The compatible focal Tversky loss of one voxel against its prediction (paper, figure of appendix D)."""
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
