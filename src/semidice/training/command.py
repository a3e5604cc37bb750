"""`semidice train`: train the folds of a recipe into a run folder, then print its scores."""

import json
from pathlib import Path

from lightning_fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from ..console import say, training_bars
from ..recipes import Recipe, option_value
from ..runs.evaluate import scores_table
from ..runs.run import open_run
from .crossvalidation import FoldPhase, cross_validate, start_run
from .engine import StepStatus


def run_train(
    recipe: Recipe,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    accelerator: str = "auto",
    devices: int | str = 1,
    nodes: int = 1,
    strategy: str = "auto",
) -> None:
    """Train every fold of the recipe into `out`, then print the scores and the next command."""
    fabric = start_fabric(accelerator=accelerator, devices=devices, nodes=nodes, strategy=strategy)
    if fabric.is_global_zero:
        start_run(recipe, out, resume=resume)
    fabric.barrier()
    run = open_run(out)
    # only the first process prints
    console.quiet = console.quiet or not fabric.is_global_zero
    _print_choices(run.recipe, console)
    with training_bars(console, transient=True) as progress:
        bar = RunBar(progress, run.recipe)
        table = cross_validate(run, fabric, on_step=bar.show_step, on_phase=bar.show_phase)
    if table is None:
        return
    console.print(scores_table(table, title=f"{recipe.name}: scores of the held-out cases"))
    say(console, f"scores of every case: {run.folder.cases}")
    say(console, f"next: semidice predict {out} IMAGE... -o predictions")


def _print_choices(recipe: Recipe, console: Console) -> None:
    """One line for each option that `auto` chose: its value and the reason."""
    for key, reason in recipe.reasons.items():
        say(console, f"{key} = {json.dumps(option_value(recipe, key))}: {reason}")


def start_fabric(
    *, accelerator: str = "auto", devices: int | str = 1, nodes: int = 1, strategy: str = "auto"
) -> Fabric:
    """The processes and their devices. Precision is left to `TrainingStep`."""
    fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    return fabric


class RunBar:
    """The progress bar of a run over the steps of all its folds, with losses, Dice and speed."""

    def __init__(self, progress: Progress, recipe: Recipe) -> None:
        self.progress, self.num_folds = progress, len(recipe.data.fold_numbers)
        self.num_finished, self.task = 0, progress.add_task(recipe.name, total=None, status="")

    def show_phase(self, fold: int, phase: FoldPhase) -> None:
        if phase == "finished":
            self.num_finished += 1
        self.progress.update(self.task, status=f"fold {fold}: {phase}")

    def show_step(self, status: StepStatus) -> None:
        losses = "  ".join(f"{name} {value:.3f}" for name, value in status.losses.items())
        dice = status.scores.get("dice_score")
        self.progress.update(
            self.task,
            completed=self.num_finished * status.num_steps + status.step,
            total=self.num_folds * status.num_steps,
            status=f"fold {status.fold} epoch {status.epoch}/{status.num_epochs}  {losses}"
            + (f"  Dice {100 * dice:.1f}" if dice is not None else "")
            + f"  {status.images_per_second:.0f} images/s",
        )

    def show_failed(self) -> None:
        self.progress.update(self.task, total=1, completed=0, status="failed")

    def show_finished(self) -> None:
        self.progress.update(self.task, total=1, completed=1, status=f"{self.num_folds} folds finished")
