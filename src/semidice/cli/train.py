"""`semidice train`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console
from .application import Accelerator, Overrides, command


@command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="YAML file or name of a shipped recipe, such as auto or quick.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder. Default: runs/NAME, NAME from the recipe.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue an existing run.")] = False,
    accelerator: Accelerator = "auto",
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this machine; for several machines, start it by torchrun.")
    ] = 1,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Also log to mlflow or wandb, in the run folder; nothing is sent. Repeatable."),
    ] = None,
) -> None:
    """Train and cross-validate a recipe. Each case is scored by a network that never saw its patient.

    Writes the recipe, folds, logs, checkpoints, predictions and a table of scores. A run can be stopped at
    any time; with --resume it ends with the same weights as a run that was never stopped.

    Example: **semidice train auto --set data.dataset=data --set schedule.epochs=30 -o runs/first**
    """
    from ..integrations.loggers import new_loggers
    from ..recipes import read_recipe
    from ..recipes.grid import folder_name
    from ..training.command import run_train

    loggers = new_loggers(log or ())
    resolved = read_recipe(recipe, overrides or (), accelerator=accelerator)
    run_train(
        resolved,
        out or Path("runs") / folder_name(resolved.name),
        new_console(),
        resume=resume,
        accelerator=accelerator,
        devices=devices,
        loggers=loggers,
    )
