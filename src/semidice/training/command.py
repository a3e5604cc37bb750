"""`semidice train`: a recipe to a run folder, with a progress bar, and a table at the end."""

from pathlib import Path

from lightning_fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from ..console import training_bars
from ..metrics.cases import CaseTable
from ..paths import RunFolder
from ..recipes import Recipe
from ..runs.evaluate import scores_table
from .crossvalidation import cross_validate, open_run
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
    """Train every fold of the recipe into `out`, then print the scores and what to do next."""
    fabric = start_fabric(accelerator=accelerator, devices=devices, nodes=nodes, strategy=strategy)
    if fabric.is_global_zero:
        open_run(recipe, out, resume=resume)
    fabric.barrier()
    run = RunFolder(out)
    # one process of several speaks
    console.quiet = console.quiet or not fabric.is_global_zero
    table = train_with_progress(recipe, run, fabric, console)
    if table is None:
        return
    console.print(scores_table(table, title=f"{recipe.name}: scores of the held-out cases"))
    console.print(f"scores of every case: {run.cases}", highlight=False, soft_wrap=True)
    console.print(f"next: semidice predict {out} IMAGE... -o predictions", highlight=False, soft_wrap=True)


def start_fabric(
    *, accelerator: str = "auto", devices: int | str = 1, nodes: int = 1, strategy: str = "auto"
) -> Fabric:
    """Processes, devices and their connection; precision is the engine's own."""
    fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    return fabric


def train_with_progress(recipe: Recipe, run: RunFolder, fabric: Fabric, console: Console) -> CaseTable | None:
    """`cross_validate` behind a progress bar over the steps of all folds."""
    folds = recipe.data.folds if recipe.data.folds is not None else tuple(range(recipe.data.num_folds))
    with training_bars(console, transient=True) as progress:
        bar = FoldBar(progress, recipe.name, len(folds))
        return cross_validate(recipe, run, fabric, on_step=bar.step, on_fold=bar.fold)


class FoldBar:
    """The bar: how far the folds are, the loss and its parts, Dice, images a second, time left."""

    def __init__(self, progress: Progress, name: str, num_folds: int) -> None:
        self.progress, self.name, self.num_folds = progress, name, num_folds
        self.done, self.task = 0, progress.add_task(name, total=None, status="")

    def fold(self, fold: int, what: str) -> None:
        if what == "finished":
            self.done += 1
        self.progress.update(self.task, status=f"fold {fold}: {what}")

    def fail(self) -> None:
        self.progress.update(self.task, total=1, completed=0, status="failed")

    def finish(self) -> None:
        self.progress.update(self.task, total=1, completed=1, status=f"{self.num_folds} folds finished")

    def step(self, status: StepStatus) -> None:
        losses = "  ".join(f"{name} {value:.3f}" for name, value in status.losses.items())
        dice = status.scores.get("dice_score")
        self.progress.update(
            self.task,
            completed=self.done * status.num_steps + status.step,
            total=self.num_folds * status.num_steps,
            status=f"fold {status.fold} epoch {status.epoch}/{status.num_epochs}  {losses}"
            + (f"  Dice {100 * dice:.1f}" if dice is not None else "")
            + f"  {status.images_per_second:.0f} images/s",
        )
