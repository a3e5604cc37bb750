"""A grid as jobs: one job per fold of each run, teachers before students, for one process or many.

    variants --fold_jobs--> jobs --Schedule--> pool of workers --> folders of folds --cross_validate--> tables

A pool runs jobs: processes of this machine (`local_pool`) or tasks of Ray (`ray_pool`). The schedule is the
same for both. A job is also one command of `semidice compare --list-jobs`. The folders of the folds are the
state: a job that is started again continues from the checkpoint of its fold, or finds it finished.

A job is lost if its process died, or if it ended with an error of CUDA or out of memory. Then its worker is
replaced and the job continued, at most MAX_ATTEMPTS - 1 times. With any other error the job has failed.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning_fabric import Fabric

from ..data.dataset import open_dataset
from ..data.folds import read_folds
from ..errors import UserError, described
from ..locks import locked
from ..paths import RunFolder, find_run, run_name
from ..recipes import Recipe
from ..recipes.grid import Variant
from ..runs.run import FoldRun, open_run
from .command import start_fabric
from .crossvalidation import finish_fold, start_run
from .engine import StepStatus
from .phases import PhaseClock
from .step import NUM_WARM_UP

# a worker that dies each time, such as for lack of memory, is not started again after that
MAX_ATTEMPTS = 4
_SECONDS_BETWEEN_REPORTS = 0.5
# a server of files may need this long to notice that a machine with a lock has died
_PATIENCE_S = 120.0
# memory of a CUDA context and of libraries, which PyTorch does not count
_CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True)
class Report:
    """What a worker says about its job. content: status of a step, phase, share of GPU memory, or error."""

    kind: Literal["step", "phase", "memory", "finished", "failed", "lost"]
    content: Any = None


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker process needs to know. num_threads: on a CPU, as in its parent, for equal bits."""

    accelerator: str = "auto"
    device: int = 0
    num_threads: int = field(default_factory=torch.get_num_threads)


class Worker:
    """A process that works on jobs, one after the other: with its device.

    send: called with the reports of a job.
    """

    def __init__(self, options: WorkerOptions, *, import_seconds: float = 0.0) -> None:
        self.options, self.import_seconds = options, import_seconds
        self.send: Callable[[Report], object] = lambda _: None
        torch.set_num_threads(options.num_threads)

    @cached_property
    def fabric(self) -> Fabric:
        on_gpu = self.options.accelerator != "cpu" and torch.cuda.is_available()
        devices: Any = [self.options.device] if on_gpu else 1
        return start_fabric(accelerator=self.options.accelerator, devices=devices)

    def work(self, job: "Job") -> Report:
        """Run a job; the report of its end."""
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.options.device)
        try:
            job.run(self)
        # a wrong recipe must not stop the others
        except Exception as error:
            # an error of the device can leave the process useless, and another one may find more memory
            is_lost = isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error)
            return Report("lost", str(error)) if is_lost else Report("failed", described(error))
        share = self.memory_share()
        if share:
            # a graph in a cycle of references would keep its memory
            gc.collect()
            torch.cuda.empty_cache()
        return Report("finished", share)

    def memory_share(self) -> float:
        """The share of the memory of the GPU that the job has needed; 0 on a CPU."""
        if not torch.cuda.is_initialized():
            return 0.0
        device = self.options.device
        used = torch.cuda.max_memory_reserved(device) + _CONTEXT_BYTES
        return used / torch.cuda.get_device_properties(device).total_memory


@runtime_checkable
class Job(Protocol):
    """Work that a worker does. group: jobs that fail together. after: the group that must be finished first.

    A group that has no jobs counts as finished. A job is sent to other processes, and equals only itself.
    """

    @property
    def group(self) -> str: ...

    @property
    def after(self) -> str | None: ...

    def run(self, worker: Worker) -> None: ...


@dataclass(frozen=True, eq=False)
class FoldJob:
    """Train, predict and score one fold of a run."""

    name: str
    recipe: Recipe
    folder: Path
    fold: int
    command: str = "semidice compare"

    @cached_property
    def group(self) -> str:
        return str(self.folder.absolute())

    @cached_property
    def after(self) -> str | None:
        return None if self.recipe.teacher is None else str(self.recipe.teacher.run.absolute())

    def __str__(self) -> str:
        return f"{self.name} fold {self.fold}"

    def run(self, worker: Worker) -> None:
        clock, folder = PhaseClock(), RunFolder(self.folder)
        clock.seconds["import"], worker.import_seconds = worker.import_seconds, 0.0
        with clock.phase("start"):
            self._check_teacher()
            with locked(folder, self.command, wait_s=_PATIENCE_S):
                run = start_run(self.recipe, self.folder, resume=True, whole=False)
                dataset = open_dataset(self.recipe.data.dataset)
            fold_run = FoldRun(run, dataset, self.fold, read_folds(folder.folds, dataset))
            fabric = worker.fabric
        with locked(fold_run.folder, self.command, wait_s=_PATIENCE_S):
            finish_fold(
                fold_run,
                fabric,
                clock,
                on_step=_StepReports(worker),
                on_phase=lambda _, phase: worker.send(Report("phase", phase)),
            )

    def _check_teacher(self) -> None:
        """A ValueError if the teacher is not finished: its temperature is fitted to all of its folds."""
        teacher = self.recipe.teacher
        if teacher is None or not find_run(teacher.run).recipe.is_file():
            return
        missing = open_run(teacher.run).missing_folds
        if missing:
            folds = ", ".join(map(str, missing))
            raise UserError(f"its teacher {teacher.run} has not finished fold {folds}: run these jobs first")


class _StepReports:
    """Sends the status of some steps."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.sent_at = worker, 0.0
        self.num_steps = 0

    def __call__(self, status: StepStatus) -> None:
        now = time.monotonic()
        self.num_steps += 1
        # a graph is recorded by then, and later steps need no more memory
        if self.num_steps == 2 * NUM_WARM_UP and (share := self.worker.memory_share()):
            self.worker.send(Report("memory", share))
        if now - self.sent_at >= _SECONDS_BETWEEN_REPORTS or status.step == status.num_steps:
            self.sent_at = now
            self.worker.send(Report("step", status))


def fold_jobs(variants: Iterable[Variant], *, command: str = "semidice compare") -> list[FoldJob]:
    """A job for each fold that is not finished, in the order of the variants: teachers before students."""
    jobs = []
    for variant in variants:
        run, folds = RunFolder(variant.folder), variant.recipe.data.fold_numbers
        finished = run.finished_folds(folds) if run.path.exists() else ()
        jobs += [
            FoldJob(variant.name, variant.recipe, variant.folder, fold, command)
            for fold in folds
            if fold not in finished
        ]
    return jobs


class Schedule:
    """Which job is next, and what the end of a job means for the others.

    errors: by group, of a job that failed. A group that fails, or whose `after` failed, is not continued.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.num_jobs, self.num_finished, self.num_running = len(jobs), 0, 0
        self.errors: dict[str, str] = {}
        self._left: dict[str, int] = {}
        for job in jobs:
            self._left[job.group] = self._left.get(job.group, 0) + 1
        self._ready: deque[Job] = deque()
        self._waiting: dict[str, list[Job]] = {}
        self._attempts: dict[Job, int] = {}
        for job in jobs:
            if job.after is None or job.after not in self._left:
                self._ready.append(job)
            else:
                self._waiting.setdefault(job.after, []).append(job)

    @property
    def is_done(self) -> bool:
        return not self._ready and not self.num_running

    def next_job(self, can_start: Callable[[Job], bool] = lambda _: True) -> Job | None:
        """The first job that may be started now, which then counts as running; None if there is none."""
        for position, job in enumerate(self._ready):
            if can_start(job):
                del self._ready[position]
                self.num_running += 1
                self._attempts[job] = self._attempts.get(job, 0) + 1
                return job
        return None

    def finish(self, job: Job) -> None:
        self.num_running -= 1
        self.num_finished += 1
        self._left[job.group] -= 1
        if not self._left[job.group]:
            self._ready.extend(self._waiting.pop(job.group, ()))

    def lose(self, job: Job, reason: str) -> bool:
        """The worker of a job ended: whether the job is tried again, before all others."""
        if self._attempts[job] >= MAX_ATTEMPTS:
            self.fail(job, f"its worker ended {MAX_ATTEMPTS} times: {reason}")
            return False
        self.num_running -= 1
        self._ready.appendleft(job)
        return True

    def fail(self, job: Job, error: str) -> None:
        self.num_running -= 1
        self._give_up(job.group, f"fold {job.fold}: {error}" if isinstance(job, FoldJob) else error)

    def _give_up(self, group: str, error: str) -> None:
        self.errors.setdefault(group, error)
        self._ready = deque(job for job in self._ready if job.group != group)
        for student in {job.group for job in self._waiting.pop(group, ())}:
            self._give_up(student, f"its teacher {run_name(Path(group))} failed")


@runtime_checkable
class Pool(Protocol):
    """Workers that run jobs."""

    def has_room(self) -> bool:
        """Whether one more job can be started."""
        ...

    def can_start(self, job: Job) -> bool:
        """Whether this job can be started, if there is room."""
        ...

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[tuple[Job, Report]]:
        """The reports that have come in; waits for the first one up to `seconds`."""
        ...


@runtime_checkable
class View(Protocol):
    """Shows the progress of jobs."""

    def show(self, job: Any, report: Report) -> None: ...

    def show_schedule(self, schedule: Schedule) -> None: ...


def run_jobs(jobs: Sequence[Job], pool: Pool, view: View) -> Mapping[str, str]:
    """Run all jobs; the errors of the groups that failed."""
    schedule = Schedule(jobs)
    view.show_schedule(schedule)
    while True:
        while pool.has_room() and (job := schedule.next_job(pool.can_start)) is not None:
            pool.start(job)
        if schedule.is_done:
            return schedule.errors
        for job, report in pool.wait(1.0):
            if report.kind == "finished":
                schedule.finish(job)
            elif report.kind == "failed":
                schedule.fail(job, report.content)
            elif report.kind == "lost":
                schedule.lose(job, report.content)
            view.show(job, report)
            if report.kind in ("finished", "failed", "lost"):
                view.show_schedule(schedule)
