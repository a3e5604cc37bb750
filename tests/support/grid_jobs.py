"""Grids of tiny trainings, and jobs whose worker dies."""

import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from semidice.recipes.grid import read_variants
from semidice.training import crossvalidation
from semidice.training.engine import train_fold
from semidice.training.jobs import FoldJob

GRID = """
recipe: quick
variants:
  teacher: {label.maker: mean}
  student: {teacher.run: teacher, teacher.calibration: temperature}
"""
SETS = ["data.num_folds=2", "schedule.epochs=3", "batch_size=4", "model.options.channels=[8,16]"]
SETS += ["workers=0", "log_every=1", "validation.metrics=[dice_score,brier_error]"]


def write_grid(folder: Path) -> Path:
    path = folder / "grid.yaml"
    path.write_text(GRID)
    return path


def variants_of(grid: Path, dataset: Path, out: Path):
    return read_variants([str(grid)], dataset=dataset, out=out, overrides=SETS, accelerator="cpu")


def set_options():
    return [part for option in SETS for part in ("--set", option)]


@dataclass(frozen=True, eq=False)
class DyingJob(FoldJob):
    """A job that saves after every step, and whose process is killed after step `dies_at`, the first time."""

    dies_at: int = 2

    def run(self, worker):
        marker = self.folder.parent / f"killed_{self.name}_{self.fold}"

        def train(fold_run, fabric, *, on_step, **options):
            def die(status):
                on_step(status)
                # the checkpoint of the step before is complete when the next one is put
                if status.step == self.dies_at and not marker.exists():
                    while not fold_run.folder.last.exists():
                        pass
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

            often = partial(train_fold, seconds_between_checkpoints=0)
            return often(fold_run, fabric, on_step=die, **options)

        with mock.patch.object(crossvalidation, "train_fold", train):
            super().run(worker)


@dataclass(frozen=True, eq=False)
class BuggyJob(FoldJob):
    """A job that meets a bug in its second step."""

    def run(self, worker):
        def die(status):
            if status.step == 2:
                raise TypeError("a bug of the second step")

        def train(fold_run, fabric, *, on_step, **options):
            return train_fold(fold_run, fabric, on_step=die, **options)

        with mock.patch.object(crossvalidation, "train_fold", train):
            super().run(worker)


@dataclass(frozen=True, eq=False)
class AlwaysDyingJob(FoldJob):
    def run(self, worker):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, eq=False)
class FullMemoryJob(FoldJob):
    """The first process that works on it finds the memory of its GPU full."""

    def run(self, worker):
        pids = self.folder.parent.parent / "pids"
        with pids.open("a") as file:
            print(os.getpid(), file=file)
        if len(pids.read_text().split()) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().run(worker)
