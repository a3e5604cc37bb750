"""Training of one fold: steps, log, validation and checkpoints.

A fold is a function of recipe, dataset and fold number: on one machine's CPU the same bits come out whether
it ran through or was killed and resumed, since batches, augmentation and dropout are drawn from the seed and
the number of the step, and a checkpoint is taken only where a line of the log ends.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from ..data.batches import Batches, CaseBatch, WholeCases
from ..data.dataset import Dataset
from ..labels.makers import ReferenceLabels
from ..metrics.accumulators import CaseScores
from ..metrics.registry import higher_is_better
from ..networks.checkpoint import Checkpoint, CheckpointWriter, checkpoint_tensors, write_checkpoint
from ..networks.systems import System, build_network
from ..paths import FoldFolder, RunFolder, atomic_write
from ..recipes import Recipe
from ..runs.run import load_network, network_probability
from .distributed import synchronise_norms
from .step import TrainingStep, build_optimiser, step_seed
from .teacher import load_teacher

# what is scored at every validation: cheap, and enough to see where training goes
_WATCHED = ("dice_score", "soft_dice_score", "calibration_error")
_SECONDS_BETWEEN_CHECKPOINTS = 60.0


class DivergedError(RuntimeError):
    """A loss was not finite: names the step, its cases, and the file with the weights before it."""


@dataclass
class StepStatus:
    """What a progress bar shows; `on_step` is called with it after every step."""

    fold: int
    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    losses: Mapping[str, float]
    scores: Mapping[str, float]
    images_per_second: float


@dataclass(frozen=True)
class FoldRun:
    """One fold of a run: what it trains on, what it is judged on, and where it is kept."""

    recipe: Recipe
    dataset: Dataset
    fold: int
    fold_of_case: Sequence[int]
    folder: FoldFolder

    @property
    def training_cases(self) -> list[int]:
        return [case for case, fold in enumerate(self.fold_of_case) if fold != self.fold]

    @property
    def validation_cases(self) -> list[int]:
        return [case for case, fold in enumerate(self.fold_of_case) if fold == self.fold]


def train_fold(
    run: FoldRun,
    fabric: Fabric,
    *,
    on_step: Callable[[StepStatus], object] = lambda _: None,
    seconds_between_checkpoints: float = _SECONDS_BETWEEN_CHECKPOINTS,
) -> nn.Module:
    """The trained model of a fold, from its last checkpoint on if there is one. All processes call this."""
    loop = _Loop(run, fabric, on_step, seconds_between_checkpoints)
    try:
        loop.run()
    finally:
        loop.close()
    return loop.model


class _Loop:
    def __init__(
        self,
        run: FoldRun,
        fabric: Fabric,
        on_step: Callable[[StepStatus], object],
        seconds_between_checkpoints: float,
    ) -> None:
        self.fold_run, self.fabric, self.on_step = run, fabric, on_step
        recipe, dataset, device = run.recipe, run.dataset, fabric.device
        torch.manual_seed(step_seed(recipe.seed, run.fold, -1))
        model = build_network(
            recipe.model.build_options(),
            **recipe.system.model_dump(),
            num_channels=dataset.num_channels,
            num_classes=dataset.num_classes,
            num_raters=len(dataset.manifest.raters),
            seed=recipe.seed,
        )
        if fabric.world_size > 1:
            model = synchronise_norms(model, device)
        model = model.to(device)
        self.model = model.to(memory_format=torch.channels_last) if recipe.precision.channels_last else model
        system = self.model if isinstance(self.model, System) else None
        self.optimiser = build_optimiser(recipe, self.model, device)
        self.batches = Batches(
            dataset,
            run.training_cases,
            batch_size=recipe.batch_size,
            label=recipe.label,
            augment=recipe.augment,
            seed=step_seed(recipe.seed, run.fold, 0) % 2**32,
            device=device,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            workers=recipe.workers,
            with_raters=system is not None and system.needs_raters,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.num_steps = recipe.schedule.epochs * self.steps_per_epoch
        self.start, self.best = 0, -math.inf
        network: Any = torch.compile(self.model) if recipe.precision.compile else self.model
        if fabric.world_size > 1:
            network = fabric.setup_module(network)
        self.step = TrainingStep(
            recipe,
            fabric=fabric,
            network=network,
            optimiser=self.optimiser,
            batches=self.batches,
            teacher=load_teacher(recipe, run.fold, self.batches, run.folder, device),
            num_steps=self.num_steps,
            fold=run.fold,
            system=system,
        )
        self._resume()
        self.log = _Log(run.folder, self.start) if fabric.is_global_zero else None
        self.writer = CheckpointWriter() if fabric.is_global_zero else None
        self.seconds_between_checkpoints = seconds_between_checkpoints
        self.saved_at = time.monotonic()
        self.losses: dict[str, float] = {}
        self.scores: dict[str, float] = {}

    def _resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        # by the process that writes: another might be later, and take what is being written for a leftover
        if self.fabric.is_global_zero:
            for leftover in self.fold_run.folder.temp_files():
                leftover.unlink(missing_ok=True)
        if not self.fold_run.folder.last.exists():
            return
        checkpoint = Checkpoint(self.fold_run.folder.last)
        checkpoint.load_model(self.model)
        checkpoint.load_optimiser(self.optimiser)
        self.start, self.best = checkpoint.progress["step"], checkpoint.progress["best"]
        if checkpoint.progress["scaler"]:
            self.step.scaler.load_state_dict(checkpoint.progress["scaler"])

    def run(self) -> None:
        recipe = self.fold_run.recipe
        window = _Window(recipe.log_every, self.fabric.device)
        since, images = time.monotonic(), 0
        self.model.train()
        for number, feed in zip(
            range(self.start, self.num_steps), self.batches.feeds(self.start, self.num_steps), strict=True
        ):
            window.add(number, self.step(feed, number))
            images += recipe.batch_size
            epoch, within = divmod(number + 1, self.steps_per_epoch)
            ends_epoch = within == 0
            if ends_epoch or within % recipe.log_every == 0:
                self._log_window(window, number + 1)
                if ends_epoch and (epoch % recipe.validation.every == 0 or epoch == recipe.schedule.epochs):
                    self._validate(number + 1, epoch)
                self._save(number + 1, finished=number + 1 == self.num_steps)
            elapsed = time.monotonic() - since
            self.on_step(self._status(number + 1, images / max(elapsed, 1e-9)))
            if elapsed > 10:
                since, images = time.monotonic(), 0

    def _status(self, step: int, images_per_second: float) -> StepStatus:
        return StepStatus(
            fold=self.fold_run.fold,
            epoch=(step - 1) // self.steps_per_epoch + 1,
            num_epochs=self.fold_run.recipe.schedule.epochs,
            step=step,
            num_steps=self.num_steps,
            losses=self.losses,
            scores=self.scores,
            images_per_second=images_per_second,
        )

    def _log_window(self, window: "_Window", step: int) -> None:
        for first, values in window.take():
            bad = next((k for k, row in enumerate(values) if not math.isfinite(row[0])), None)
            if bad is not None:
                self._stop_diverged(first + bad)
            means = [math.fsum(column) / len(values) for column in zip(*values, strict=True)]
            self.losses = dict(zip(self.step.names, means, strict=True))
        if self.log is not None:
            self.log.write(step, {"lr": self.step.rate(step - 1), **self.losses})

    def _stop_diverged(self, number: int) -> None:
        cases = [self.fold_run.dataset.cases[int(case)].name for case in self.batches.feed(number).case]
        path = self.fold_run.folder.diverged(number)
        if self.fabric.is_global_zero:
            progress = {"step": number, "best": self.best, "scaler": self.step.scaler.state_dict()}
            write_checkpoint(path, checkpoint_tensors(self.model, self.optimiser), progress)
        raise DivergedError(
            f"fold {self.fold_run.fold}: the loss of step {number} is not finite; its cases are "
            f"{', '.join(cases)}; the weights before it are in {path}. Lower optimiser.lr, set "
            "optimiser.clip_norm, or use precision.dtype=fp32"
        )

    def _validate(self, step: int, epoch: int) -> None:
        recipe = self.fold_run.recipe
        self.scores = self._scores()
        self.model.train()
        if self.log is not None:
            self.log.write(step, {"epoch": epoch, **{f"val_{k}": v for k, v in self.scores.items()}})
        score = self.scores[recipe.validation.best_by]
        score = score if higher_is_better(recipe.validation.best_by) else -score
        if score > self.best:
            self.best = score
            if self.writer is not None:
                self.writer.put(self.fold_run.folder.best, self.model, None, self._progress(step))

    def _scores(self) -> dict[str, float]:
        run = self.fold_run
        names = list(dict.fromkeys((*_WATCHED, run.recipe.validation.best_by)))
        scores = CaseScores(names, class_names=run.dataset.manifest.class_names, method=run.recipe.name)
        scores = scores.to(self.fabric.device)
        mine = run.validation_cases[self.fabric.global_rank :: self.fabric.world_size]
        for batch, prob in self._predictions(mine):
            reference = ReferenceLabels(
                batch.masks, num_classes=run.dataset.num_classes, present=batch.present
            )
            names_of = [run.dataset.cases[int(case)].name for case in batch.case]
            scores.update(
                prob,
                reference.majority(),
                soft_target=reference.mean(),
                valid=batch.valid,
                case=names_of,
                masks=batch.masks,
                present=batch.present,
            )
        return {name: float(value) for name, value in scores.compute().items()}

    def _predictions(self, cases: Sequence[int]) -> Iterator[tuple[CaseBatch, Tensor]]:
        """Batches and their probabilities; the next one is under way while the last is looked at."""
        run = self.fold_run
        whole = WholeCases(
            run.dataset,
            cases,
            batch_size=run.recipe.batch_size,
            device=self.fabric.device,
            resident_of=self.batches,
        )
        waiting: tuple[CaseBatch, Tensor] | None = None
        for batch in whole:
            prob = network_probability(self.model, batch.image, dtype=run.recipe.precision.dtype)
            if waiting is not None:
                yield waiting
            waiting = batch, prob
        if waiting is not None:
            yield waiting

    def _progress(self, step: int) -> dict[str, Any]:
        return {"step": step, "best": self.best, "scaler": self.step.scaler.state_dict()}

    def _save(self, step: int, *, finished: bool) -> None:
        due = finished or time.monotonic() - self.saved_at >= self.seconds_between_checkpoints
        if self.writer is not None and due:
            self.writer.put(self.fold_run.folder.last, self.model, self.optimiser, self._progress(step))
            self.saved_at = time.monotonic()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        if self.writer is not None:
            self.writer.close()


class _Window:
    """Loss values of the steps since the last line of the log, kept on the device until then."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.first, self.rows = -1, 0
        self.values: Tensor | None = None

    def add(self, number: int, parts: Tensor) -> None:
        if self.values is None:
            self.values = torch.empty(self.size, len(parts), device=self.device)
        if self.rows == 0:
            self.first = number
        self.values[self.rows].copy_(parts)
        self.rows += 1

    def take(self) -> Iterator[tuple[int, list[list[float]]]]:
        """First step and values of the window, which starts anew."""
        if self.rows and self.values is not None:
            yield self.first, self.values[: self.rows].tolist()
        self.rows = 0


class _Log:
    """log.jsonl, which holds nothing that differs between equal trainings, and TensorBoard."""

    def __init__(self, folder: FoldFolder, start: int) -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        lines = folder.log.read_text().splitlines() if folder.log.exists() else []
        # what a killed run logged after its last checkpoint is trained, and logged, again
        kept = [line for line in lines if _is_line_until(line, start)]
        with atomic_write(folder.log) as temp_path:
            temp_path.write_text("".join(f"{line}\n" for line in kept))
        self.file = folder.log.open("a")
        self.board = SummaryWriter(str(folder.tensorboard), purge_step=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        print(json.dumps({"step": step, **values}), file=self.file, flush=True)
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        self.board.close()


def _is_line_until(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def load_trained(run: FoldRun, device: torch.device) -> nn.Module:
    """The model of a finished fold that is judged: the last one, or the best if the recipe says so."""
    return load_network(
        RunFolder(run.folder.path.parent), run.fold, which=run.recipe.validation.checkpoint, device=device
    )
