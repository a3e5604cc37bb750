"""`semidice train`: train the folds of a recipe into a run folder, then print its scores."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from lightning_fabric import Fabric
from rich.console import Console
from torch.distributed import is_torchelastic_launched

from ..console import Progress, say
from ..errors import UserError, reason
from ..locks import locked
from ..paths import RunFolder
from ..recipes import Recipe, option_value
from ..runs.evaluate import scores_table
from ..runs.run import FoldRun, open_run
from .crossvalidation import FoldPhase, cross_validate, start_run
from .engine import StepStatus
from .log import Logger


def run_train(
    recipe: Recipe,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    accelerator: str = "auto",
    devices: int | str = 1,
    loggers: Mapping[str, Callable[[FoldRun], Logger]] | None = None,
) -> None:
    """Train every fold of the recipe into `out`, then print the scores and the next command.

    loggers: by their names, see `TrainingLog`; log.jsonl and TensorBoard are always written.
    """
    fabric = start_fabric(accelerator=accelerator, devices=devices)
    with ExitStack() as stack:
        # only the first process writes
        if fabric.is_global_zero:
            stack.enter_context(locked(RunFolder(out), "semidice train"))
            start_run(recipe, out, resume=resume)
        fabric.barrier()
        run = open_run(out)
        # only the first process prints
        console.quiet = console.quiet or not fabric.is_global_zero
        _print_choices(run.recipe, console)
        progress = stack.enter_context(Progress(console))
        bar = RunBar(progress, run.recipe)
        table = cross_validate(
            run,
            fabric,
            on_step=bar.show_step,
            on_phase=bar.show_phase,
            loggers=loggers,
            on_warning=lambda text: say(console, text),
        )
    if table is None:
        return
    console.print(scores_table(table, title=f"{recipe.name}: scores of the held-out cases"))
    say(console, f"scores of every case: {run.folder.cases}")
    say(console, f"next: semidice predict {out} IMAGE... -o predictions")


def _print_choices(recipe: Recipe, console: Console) -> None:
    """One line for each option that `auto` chose: its value and the reason."""
    for key, why in recipe.reasons.items():
        say(console, f"{key} = {json.dumps(option_value(recipe, key))}: {why}")


def start_fabric(*, accelerator: str = "auto", devices: int | str = 1) -> Fabric:
    """The processes and their devices; torchrun has its own. Precision is left to `TrainingStep`."""
    nodes = 1
    if is_torchelastic_launched():
        devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    try:
        fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes)
    # what this machine does not have
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--accelerator {accelerator} --devices {devices}: {reason(error)}") from error
    fabric.launch()
    return fabric


class RunBar:
    """The progress of a run over the steps of all its folds, with losses, learning rate, Dice and speed.

    name: None takes that of the recipe.
    """

    def __init__(self, progress: Progress, recipe: Recipe, *, name: str | None = None) -> None:
        self.progress, self.folds = progress, recipe.data.fold_numbers
        self.bar = progress.bar(name or recipe.name)
        # steps of each fold; those that a resumed fold had done before
        self.num_done: dict[int, int] = {}
        self.num_before: dict[int, int] = {}
        self.finished: set[int] = set()

    def show_phase(self, fold: int, phase: FoldPhase) -> None:
        if phase == "finished":
            self.finished.add(fold)
        is_first = not self.bar.status
        self.bar.status = f"fold {fold}: {phase}"
        if is_first:
            self.progress.print_line(self.bar)

    def show_step(self, status: StepStatus) -> None:
        self.num_done[status.fold] = status.step
        self.num_before.setdefault(status.fold, status.step - 1)
        # folds that were finished before have no steps here
        before = len(self.finished - set(self.num_done)) * status.num_steps
        dice = status.scores.get("dice_score")
        # the first is the whole loss; the log has its terms
        loss = next((f"{name} {value:.3f}" for name, value in status.losses.items()), "loss ...")
        # the most important first: a narrow terminal cuts the end
        parts = [
            f"fold {status.fold} epoch {status.epoch}/{status.num_epochs}",
            loss,
            *([] if dice is None else [f"Dice {100 * dice:.1f}"]),
            *([] if status.rate is None else [f"lr {status.rate:.2g}"]),
            f"{status.images_per_second:.0f} images/s",
        ]
        self.bar.before = before + sum(self.num_before.values())
        self.bar.to(before + sum(self.num_done.values()), len(self.folds) * status.num_steps)
        self.bar.status = "  ".join(parts)

    def show_failed(self) -> None:
        self._show_end("failed", done=0)

    def show_finished(self) -> None:
        self._show_end(f"{len(self.folds)} folds finished", done=1)

    def _show_end(self, status: str, *, done: int) -> None:
        self.bar.status = status
        self.bar.to(done, 1)
        self.progress.print_line(self.bar)
