"""Where a loss leads: free predictions fitted to soft labels, so that a loss shows where its minimum lies."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .losses import dice_loss, tversky_loss
from .progress import counting_bar
from .report.figures import draw_focal_curves, draw_landing, save_figure

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
    steps: int = 1500,
    activation: Callable[[Tensor], Tensor] = torch.sigmoid,
    on_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Probabilities, in the shape of `target`, at which minimising `loss` over free logits ends.

    Starts from logits 0 with Adam, whose rate falls linearly from 0.1 to 0, since the losses are not smooth
    at their minimum.
    """
    logits = torch.zeros_like(target, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1, betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(activation(logits), target).backward()
        optimiser.step()
        schedule.step()
        on_step()
    return activation(logits).detach()


def run_landing(out: Path, steps: int, console: Console) -> None:
    """Fit the soft labels 0, 0.05, ... 1 with each loss, print where they land and draw two figures."""
    out.mkdir(parents=True, exist_ok=True)
    target = torch.linspace(0, 1, 21).reshape(1, 1, -1)
    landed: dict[str, Tensor] = {}
    with counting_bar(console, doing="fitting", unit="steps") as progress:
        bar = progress.add_task("", total=steps * len(SHOWN_LOSSES))
        for name, loss in SHOWN_LOSSES.items():
            progress.update(bar, description=name)
            landed[name] = fit_free_logits(loss, target, steps=steps, on_step=lambda: progress.advance(bar))
    console.print(_landing_table(target, landed))
    figures = {
        "landing.png": draw_landing(target.flatten(), {name: p.flatten() for name, p in landed.items()}),
        "cftl.png": draw_focal_curves(alpha=0.7, beta=0.3, label=0.8, gammas=(0.5, 1.0, 2.0, 3.0, 4.0)),
    }
    for name, figure in figures.items():
        save_figure(figure, out / name)
        console.print(f"wrote {out / name}", highlight=False, soft_wrap=True)


def _landing_table(target: Tensor, landed: Mapping[str, Tensor]) -> Table:
    table = Table(title="Where the prediction lands after minimising each loss over 21 voxels")
    table.add_column("soft label", justify="right")
    for name in landed:
        table.add_column(name, justify="right")
    for voxel in range(2, 20, 2):
        values = (landed[name][0, 0, voxel] for name in landed)
        table.add_row(f"{target[0, 0, voxel]:.1f}", *(f"{value:.3f}" for value in values))
    table.add_section()
    table.add_row("mean error", *(f"{(p - target).abs().mean():.4f}" for p in landed.values()))
    return table
