"""Training of one fold: steps, log, validation and checkpoints.

A fold is a function of recipe, dataset and fold number. On the CPU of one machine the result has the same
bits whether the training ran through or was killed and resumed: batches, augmentation and dropout depend
on the seed and the step number alone, and a checkpoint is written only after a line of the log.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arrays import NotFiniteError
from ..data.batches.feed import Batches, BatchOptions, Share
from ..errors import UserError
from ..networks.checkpoint import Checkpoint, checkpoint_tensors, write_checkpoint
from ..networks.systems import System
from ..runs.run import FoldRun
from ..runs.scoring import ScoreOptions, score_cases
from ..statistics.cases import MAIN_CLASSES
from .context import Context, Event
from .log import TrainingLog
from .step import NUM_WARM_UP, TrainingStep, build_optimiser, step_seed
from .teacher import load_teacher

# scores of every validation: cheap, and enough to see whether training works
_VALIDATION_SCORES = ("dice_score", "soft_dice_score", "calibration_error")
# images per second are measured over windows of this length
_SECONDS_OF_SPEED = 10.0


@dataclass
class StepStatus:
    """The state of a training after a step, for a progress bar."""

    fold: int
    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    losses: Mapping[str, float]
    scores: Mapping[str, float]
    images_per_second: float
    # learning rate at the last line of the log, None before it
    rate: float | None
    ends_epoch: bool


def train_fold(fold: FoldRun, context: Context) -> nn.Module:
    """The trained network of a fold. Training continues from the last checkpoint, if there is one.

    All processes call this together; only the first one logs and writes. `context.say` gets every step.
    """
    with context.phase("network"):
        trainer = _FoldTrainer(fold, context)
    try:
        with context.phase("steps"):
            trainer.train()
    finally:
        if trainer.log is not None:
            trainer.log.close()
    return trainer.model


class _FoldTrainer:
    def __init__(self, fold: FoldRun, context: Context) -> None:
        self.fold, self.context, self.recipe = fold, context, fold.recipe
        recipe, processes = fold.recipe, context.processes
        torch.manual_seed(step_seed(recipe.seed, fold.fold, -1))
        self.model = processes.placed(fold.run.new_network())
        self.predictor = fold.predictor(self.model, flips=False)
        self.optimiser = build_optimiser(recipe, self.model, processes.device)
        with context.phase("data"):
            storage = fold.storage(processes.device)
        self.batches = Batches(
            storage,
            fold.training_cases,
            fold.mean_std,
            BatchOptions(
                batch_size=recipe.batch_size,
                label=recipe.label,
                augment=recipe.augment,
                seed=step_seed(recipe.seed, fold.fold, 0) % 2**32,
                with_raters=isinstance(self.model, System) and self.model.needs_raters,
            ),
            Share(processes.rank, processes.number, pieces=recipe.optimiser.accumulate),
            workers=recipe.workers,
        )
        checkpoint = None
        if fold.folder.last.exists():
            checkpoint = Checkpoint(fold.folder.last)
            checkpoint.check_origin(run=fold.run.identity, fold=fold.fold)
        self.progress: dict[str, Any] = {} if checkpoint is None else checkpoint.progress
        self.start = int(self.progress.get("step", 0))
        # fitted once: a resumed training has the temperature that it began with
        teacher = load_teacher(
            fold, self.batches, processes.device, temperature=self.progress.get("temperature")
        )
        self.progress["temperature"] = None if teacher is None else teacher.temperature
        self.step = TrainingStep(
            recipe, processes, self.model, self.optimiser, self.batches, teacher=teacher, fold=fold.fold
        )
        if checkpoint is not None:
            checkpoint.load_model(self.model)
            checkpoint.load_optimiser(self.optimiser)
            self.step.scaler.load_state_dict(self.progress["scaler"])
        context.first_step = context.last_step = self.start
        self.log: TrainingLog | None = None
        if processes.is_first:
            self.log = TrainingLog(fold, self.start, context.loggers, context.warn)
        self.saved_at = time.monotonic()
        self.rate: float | None = None
        self.losses: dict[str, float] = {}
        self.scores: dict[str, float] = {}

    def train(self) -> None:
        recipe, context, num_steps = self.recipe, self.context, self.step.num_steps
        steps_per_epoch = self.batches.steps_per_epoch
        # losses of the steps since the last line of the log; they stay on the device until then
        losses: list[Tensor] = []
        since, images = time.monotonic(), 0
        self.model.train()
        feeds = self.batches.feeds(self.start, num_steps)
        for step, feed in zip(range(self.start, num_steps), feeds, strict=True):
            is_first = step <= self.start + NUM_WARM_UP
            try:
                with context.phase("first_steps") if is_first else nullcontext():
                    losses.append(self.step(feed, step).clone())
            except NotFiniteError:
                # on the CPU a loss checks its own value
                self._stop_diverged(step)
            images += recipe.batch_size
            num_done = context.last_step = step + 1
            epoch, step_in_epoch = divmod(num_done, steps_per_epoch)
            ends_epoch = step_in_epoch == 0
            if ends_epoch or step_in_epoch % recipe.log_every == 0:
                self._log_losses(losses, num_done)
                losses.clear()
                if ends_epoch and (epoch % recipe.validation.every == 0 or epoch == recipe.schedule.epochs):
                    with context.phase("validation"):
                        self._validate(num_done, epoch)
                with context.phase("checkpoints"):
                    self._save(num_done)
            elapsed = time.monotonic() - since
            status = StepStatus(
                fold=self.fold.fold,
                epoch=step // steps_per_epoch + 1,
                num_epochs=recipe.schedule.epochs,
                step=num_done,
                num_steps=num_steps,
                losses=self.losses,
                scores=self.scores,
                images_per_second=images / max(elapsed, 1e-9),
                rate=self.rate,
                ends_epoch=ends_epoch,
            )
            context.say(Event("step", status))
            if elapsed > _SECONDS_OF_SPEED:
                since, images = time.monotonic(), 0

    def _log_losses(self, losses: Sequence[Tensor], num_done: int) -> None:
        """Log the mean of the losses; a UserError if one is not finite. The device is read here only."""
        rows = torch.stack(list(losses)).tolist()
        for number, row in enumerate(rows):
            if not math.isfinite(row[0]):
                self._stop_diverged(num_done - len(rows) + number)
        means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        self.losses = dict(zip(self.step.names, means, strict=True))
        self.rate = self.step.rate(num_done - 1)
        if self.log is not None:
            self.log.write(num_done, {"lr": self.rate, **self.losses})

    def _stop_diverged(self, step: int) -> None:
        cases = [self.fold.dataset.cases[int(case)].name for case in self.batches.feed(step).case]
        raise UserError(
            f"fold {self.fold.fold}: the training diverged: the loss of step {step} is not finite; its "
            f"cases are {', '.join(cases)}. Lower optimiser.lr, set optimiser.clip_norm, or use "
            "precision.dtype=fp32"
        )

    def _validate(self, num_done: int, epoch: int) -> None:
        """Score the held-out cases of all processes together, without flips."""
        fold, processes = self.fold, self.context.processes
        units = processes.share(fold.dataset.units(fold.validation_cases, self.recipe.validation.unit))
        table = score_cases(
            fold.dataset,
            [number for unit in units for number in unit.cases],
            lambda cases: fold.predicted(cases, self.predictor, processes.device),
            ScoreOptions(_VALIDATION_SCORES, self.recipe.validation.unit, only=True),
            method=self.recipe.name,
        )
        means = table[table["class"].isin(MAIN_CLASSES)].groupby("metric")["value"].mean()
        self.scores = {name: float(means[name]) for name in _VALIDATION_SCORES if name in means}
        self.model.train()
        if self.log is not None:
            self.log.write(num_done, {"epoch": epoch, **{f"val_{k}": v for k, v in self.scores.items()}})

    def _save(self, num_done: int) -> None:
        """Write a checkpoint at the end, and when the last one is old enough."""
        is_due = time.monotonic() - self.saved_at >= self.context.seconds_between_checkpoints
        if self.log is not None and (is_due or num_done == self.step.num_steps):
            # a checkpoint after a loss of power has all lines of the log before it
            self.log.force_to_disk()
            progress = {
                "run": self.fold.run.identity,
                "fold": self.fold.fold,
                "step": num_done,
                "temperature": self.progress["temperature"],
                "scaler": self.step.scaler.state_dict(),
            }
            tensors = checkpoint_tensors(self.model, self.optimiser)
            write_checkpoint(self.fold.folder.last, tensors, progress)
            self.saved_at = time.monotonic()
