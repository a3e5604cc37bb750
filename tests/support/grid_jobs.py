"""Grids of tiny trainings, and jobs whose worker dies."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from semidice.paths import RunFolder
from semidice.recipes.grid import read_variants
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

    def run(self, context):
        marker = self.variant.folder.parent / f"killed_{self.variant.name}_{self.fold}"
        last = RunFolder(self.variant.folder).fold(self.fold).last
        say = context.say

        def die(event):
            say(event)
            is_there = event.kind == "step" and event.content.step == self.dies_at and last.exists()
            if is_there and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        super().run(with_say(context, die, seconds_between_checkpoints=0.0))


@dataclass(frozen=True, eq=False)
class BuggyJob(FoldJob):
    """A job that meets a bug in its second step."""

    def run(self, context):
        def die(event):
            if event.kind == "step" and event.content.step == 2:
                raise TypeError("a bug of the second step")

        super().run(with_say(context, die))


def with_say(context, say, **changes):
    """The context of a worker for one job."""
    return replace(context, say=say, **changes)


@dataclass(frozen=True, eq=False)
class AlwaysDyingJob(FoldJob):
    def run(self, context):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, eq=False)
class FullMemoryJob(FoldJob):
    """The first process that works on it finds the memory of its GPU full."""

    def run(self, context):
        pids = self.variant.folder.parent.parent / "pids"
        with pids.open("a") as file:
            print(os.getpid(), file=file)
        if len(pids.read_text().split()) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().run(context)
