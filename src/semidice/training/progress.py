"""The progress of trainings: of the folds of one run, and of all jobs of a grid."""

from collections.abc import Sequence
from typing import Any

from ..console import Progress, say
from ..recipes import Recipe
from ..recipes.grid import Variant
from .context import Event
from .engine import StepStatus
from .jobs import FoldJob, Schedule


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

    def show(self, event: Event) -> None:
        if event.kind == "step":
            self._show_step(event.content)
        elif event.kind == "phase":
            self._show_phase(event.fold, event.content)
        elif event.kind == "warning":
            say(self.progress.console, event.content)

    def _show_phase(self, fold: int, phase: str) -> None:
        if phase == "finished":
            self.finished.add(fold)
            if len(self.finished) == len(self.folds):
                self.bar.status = f"{len(self.folds)} folds finished"
                self.progress.print_line(self.bar)
                return
        is_first = not self.bar.status
        self.bar.status = f"fold {fold}: {phase}"
        if is_first:
            self.progress.print_line(self.bar)

    def _show_step(self, status: StepStatus) -> None:
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


class GridBars:
    """A bar for all jobs and one for each run; without a terminal, lines."""

    def __init__(self, progress: Progress, variants: Sequence[Variant]) -> None:
        self.progress = progress
        self.bar = progress.bar("all jobs", "jobs")
        self.variants = {str(each.folder.absolute()): each for each in variants}
        self.bars: dict[str, RunBar] = {}

    def show(self, job: Any, event: Event) -> None:
        """What a job does."""
        if isinstance(job, FoldJob):
            if job.group not in self.bars:
                # a run that waits for others has no bar yet
                variant = self.variants[job.group]
                self.bars[job.group] = RunBar(self.progress, variant.recipe, name=variant.name)
            self.bars[job.group].show(event)

    def __call__(self, job: Any, event: Event | None, schedule: Schedule) -> None:
        if event is not None:
            self.show(job, event)
        if event is not None and event.kind == "lost":
            say(self.progress.console, f"{job}: its worker ended ({event.content}); it is continued")
        if event is not None and event.kind == "failed":
            # the command reports errors at its end, which may be hours away
            say(self.progress.console, f"{job} failed: {event.content}")
        if event is None or event.kind in ("finished", "failed", "lost"):
            failed = f", {len(schedule.errors)} runs failed" if schedule.errors else ""
            self.bar.to(schedule.num_finished, schedule.num_jobs)
            self.bar.status = f"{schedule.num_running} running{failed}"
            self.progress.print_line(self.bar)
