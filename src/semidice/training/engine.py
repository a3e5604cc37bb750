"""Training of one fold: steps, log, validation and checkpoints.

A fold is a function of recipe, dataset and fold number. On the CPU of one machine the result has the same
bits whether the training ran through or was killed and resumed: batches, augmentation and dropout depend
on the seed and the step number alone, and a checkpoint is written only after a line of the log.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from ..arrays import NotFiniteError
from ..data.batches.feed import Batches, BatchOptions, CaseBatch, Share, whole_cases
from ..data.dataset import ScoredUnit
from ..errors import UserError
from ..labels.raters import read_raters
from ..metrics.registry import ScoredBatch
from ..networks.checkpoint import Checkpoint, CheckpointWriter
from ..networks.predictor import Predictor
from ..networks.systems import System
from ..runs.run import FoldRun
from ..runs.scoring import scan_slices, volume_of
from ..statistics.collect import CaseScores
from .distributed import synchronise_norms
from .log import Logger, TrainingLog
from .phases import PhaseClock
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


def train_fold(
    fold_run: FoldRun,
    fabric: Fabric,
    *,
    on_step: Callable[[StepStatus], object] = lambda _: None,
    loggers: Mapping[str, Callable[[FoldRun], Logger]] | None = None,
    on_warning: Callable[[str], object] = print,
    seconds_between_checkpoints: float = 60.0,
    clock: PhaseClock | None = None,
    writer: CheckpointWriter | None = None,
) -> nn.Module:
    """The trained network of a fold. Training continues from the last checkpoint, if there is one.

    All processes call this together. on_step is called after every step. loggers, on_warning: see
    `TrainingLog`; only the first process logs. clock: counts the phases. writer: the caller closes it; None
    waits here until all checkpoints are written.
    """
    clock = clock or PhaseClock()
    with ExitStack() as stack:
        if writer is None:
            writer = CheckpointWriter()
            stack.callback(writer.close)
        with clock.phase("network"):
            trainer = _FoldTrainer(fold_run, fabric, on_step, seconds_between_checkpoints, clock, writer)
        stack.callback(trainer.close)
        if fabric.is_global_zero:
            trainer.log = TrainingLog(fold_run, trainer.start, loggers=loggers, on_warning=on_warning)
        with clock.phase("steps"):
            trainer.train()
    return trainer.model


class _FoldTrainer:
    def __init__(
        self,
        fold_run: FoldRun,
        fabric: Fabric,
        on_step: Callable[[StepStatus], object],
        seconds_between_checkpoints: float,
        clock: PhaseClock,
        writer: CheckpointWriter,
    ) -> None:
        self.fold_run, self.fabric, self.on_step, self.clock = fold_run, fabric, on_step, clock
        self.seconds_between_checkpoints = seconds_between_checkpoints
        recipe, self.dataset, self.folder = fold_run.recipe, fold_run.dataset, fold_run.folder
        self.recipe = recipe
        torch.manual_seed(step_seed(recipe.seed, fold_run.fold, -1))
        model = fold_run.run.new_network()
        if fabric.world_size > 1:
            model = synchronise_norms(model, fabric.device)
        self.model = model.to(fabric.device)
        self.predictor = Predictor(self.model, dtype=recipe.precision.dtype)
        self.optimiser = build_optimiser(recipe, self.model, fabric.device)
        with clock.phase("data"):
            storage = fold_run.storage(fabric.device)
        self.batches = Batches(
            storage,
            fold_run.training_cases,
            fold_run.mean_std,
            BatchOptions(
                batch_size=recipe.batch_size,
                label=recipe.label,
                augment=recipe.augment,
                seed=step_seed(recipe.seed, fold_run.fold, 0) % 2**32,
                with_raters=isinstance(self.model, System) and self.model.needs_raters,
            ),
            Share(fabric.global_rank, fabric.world_size, pieces=recipe.optimiser.accumulate),
            workers=recipe.workers,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.num_steps = recipe.schedule.epochs * self.steps_per_epoch
        checkpoint = self._last_checkpoint()
        self.progress: dict[str, Any] = {} if checkpoint is None else checkpoint.progress
        self.step = self._build_step()
        self.start = int(self.progress.get("step", 0))
        if checkpoint is not None:
            checkpoint.load_model(self.model)
            checkpoint.load_optimiser(self.optimiser)
            self.step.scaler.load_state_dict(self.progress["scaler"])
        clock.first_step = clock.last_step = self.start
        # of the first process alone
        self.log: TrainingLog | None = None
        self.writer = writer if fabric.is_global_zero else None
        self.saved_at = time.monotonic()
        self.rate: float | None = None
        self.losses: dict[str, float] = {}
        self.scores: dict[str, float] = {}

    def _build_step(self) -> TrainingStep:
        network: Any = torch.compile(self.model) if self.recipe.precision.compile else self.model
        if self.fabric.world_size > 1:
            network = self.fabric.setup_module(network)
        # fitted once: a resumed training has the temperature that it began with
        teacher = load_teacher(
            self.fold_run, self.batches, self.fabric.device, temperature=self.progress.get("temperature")
        )
        self.progress["temperature"] = None if teacher is None else teacher.temperature
        return TrainingStep(
            self.recipe,
            fabric=self.fabric,
            network=network,
            optimiser=self.optimiser,
            batches=self.batches,
            teacher=teacher,
            num_steps=self.num_steps,
            fold=self.fold_run.fold,
            system=self.model if isinstance(self.model, System) else None,
        )

    def _last_checkpoint(self) -> Checkpoint | None:
        if not self.folder.last.exists():
            return None
        checkpoint = Checkpoint(self.folder.last)
        checkpoint.check_origin(run=self.fold_run.identity, fold=self.fold_run.fold)
        return checkpoint

    def train(self) -> None:
        recipe = self.recipe
        # losses of the steps since the last line of the log; they stay on the device until then
        losses: list[Tensor] = []
        since, images = time.monotonic(), 0
        self.model.train()
        feeds = self.batches.feeds(self.start, self.num_steps)
        for step, feed in zip(range(self.start, self.num_steps), feeds, strict=True):
            is_first = step <= self.start + NUM_WARM_UP
            try:
                with self.clock.phase("first_steps") if is_first else nullcontext():
                    losses.append(self.step(feed, step).clone())
            except NotFiniteError:
                # on the CPU a loss checks its own value
                self._stop_diverged(step)
            images += recipe.batch_size
            num_done = self.clock.last_step = step + 1
            epoch, step_in_epoch = divmod(num_done, self.steps_per_epoch)
            ends_epoch = step_in_epoch == 0
            if ends_epoch or step_in_epoch % recipe.log_every == 0:
                self._log_losses(losses, num_done)
                losses.clear()
                if ends_epoch and (epoch % recipe.validation.every == 0 or epoch == recipe.schedule.epochs):
                    with self.clock.phase("validation"):
                        self._validate(num_done, epoch)
                with self.clock.phase("checkpoints"):
                    self._save(num_done)
            elapsed = time.monotonic() - since
            status = StepStatus(
                fold=self.fold_run.fold,
                epoch=step // self.steps_per_epoch + 1,
                num_epochs=recipe.schedule.epochs,
                step=num_done,
                num_steps=self.num_steps,
                losses=self.losses,
                scores=self.scores,
                images_per_second=images / max(elapsed, 1e-9),
                rate=self.rate,
                ends_epoch=ends_epoch,
            )
            self.on_step(status)
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
        cases = [self.dataset.cases[int(case)].name for case in self.batches.feed(step).case]
        raise UserError(
            f"fold {self.fold_run.fold}: the training diverged: the loss of step {step} is not finite; its "
            f"cases are {', '.join(cases)}. Lower optimiser.lr, set optimiser.clip_norm, or use "
            "precision.dtype=fp32"
        )

    def _validate(self, num_done: int, epoch: int) -> None:
        self.scores = self._validation_scores()
        self.model.train()
        if self.log is not None:
            self.log.write(num_done, {"epoch": epoch, **{f"val_{k}": v for k, v in self.scores.items()}})

    def _validation_scores(self) -> dict[str, float]:
        """Mean scores of the validation cases, of all processes together."""
        names, method = self.dataset.manifest.class_names, self.recipe.name
        scores = CaseScores(_VALIDATION_SCORES, class_names=names, method=method)
        unit = self.recipe.validation.unit
        units = self.dataset.units(self.fold_run.validation_cases, unit)
        own = units[self.fabric.global_rank :: self.fabric.world_size]
        for cases, prob, masks, present, valid in self._scored_batches(own):
            reference = read_raters(masks, self.dataset.num_classes, present, batched=True)
            target, soft_target = reference.majority(), reference.mean()
            drawn = self.dataset.drawn_classes
            batch = ScoredBatch(prob, target, soft_target, masks, present, valid=valid, drawn=drawn)
            scores.update(batch, cases)
        return scores.means()

    def _scored_batches(
        self, units: Sequence[ScoredUnit]
    ) -> Iterator[tuple[list[str], Tensor, Tensor, Tensor, Tensor]]:
        """Names, probabilities, masks, present and valid of units; slices of a scan are put together."""
        dataset = self.dataset
        predictions = self._predictions([number for unit in units for number in unit.cases])
        if not dataset.has_slices or self.recipe.validation.unit == "slice":
            for batch, prob in predictions:
                names = [dataset.cases[int(case)].name for case in batch.case]
                yield names, prob, batch.masks, batch.present, batch.valid
            return
        # predicted slices of a scan that is not complete yet
        waiting: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        remaining = list(units)
        for batch, prob in predictions:
            waiting += zip(prob, batch.masks, batch.present, batch.valid.unsqueeze(1), strict=True)
            while remaining and len(waiting) >= len(remaining[0].cases):
                unit = remaining.pop(0)
                slices = scan_slices(dataset, unit)
                probs, masks, present, valid = zip(*waiting[: len(unit.cases)], strict=True)
                del waiting[: len(unit.cases)]
                whole, drawn = (volume_of(part, slices).unsqueeze(0) for part in (probs, masks))
                yield [unit.name], whole, drawn, present[0].unsqueeze(0), volume_of(valid, slices)

    def _predictions(self, cases: Sequence[int]) -> Iterator[tuple[CaseBatch, Tensor]]:
        """Batches and their probabilities. The device computes one batch ahead of the one that is scored."""
        previous: tuple[CaseBatch, Tensor] | None = None
        storage, mean_std = self.batches.storage, self.fold_run.mean_std
        for batch in whole_cases(storage, cases, mean_std, batch_size=self.recipe.batch_size):
            prob = self.predictor(batch.image)
            if previous is not None:
                yield previous
            previous = batch, prob
        if previous is not None:
            yield previous

    def _progress(self, step: int) -> dict[str, Any]:
        return {
            "run": self.fold_run.identity,
            "fold": self.fold_run.fold,
            "step": step,
            "temperature": self.progress["temperature"],
            "scaler": self.step.scaler.state_dict(),
        }

    def _save(self, num_done: int) -> None:
        """Write a checkpoint at the end, and when the last one is old enough."""
        if self.writer is None or self.log is None:
            return
        is_due = time.monotonic() - self.saved_at >= self.seconds_between_checkpoints
        if is_due or num_done == self.num_steps:
            # a checkpoint after a loss of power has all lines of the log before it
            self.log.force_to_disk()
            self.writer.put(self.folder.last, self.model, self.optimiser, self._progress(num_done))
            self.saved_at = time.monotonic()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
