"""A grid as jobs: one job per fold of each run, teachers before students, for one process or many.

    variants --fold_jobs--> jobs --Schedule--> pool of workers --> folders of folds --gather--> tables

A pool runs jobs: this process, processes of this machine (`local_pool`) or tasks of Ray (`ray_pool`). The
schedule is the same for all. A job is also one command of `semidice compare --list-jobs`. The folders of the
folds are the state: a job that is started again continues from the checkpoint of its fold, or finds it
finished.

A job is lost if its process died, or if it ended with an error of CUDA or out of memory. Then its worker is
replaced and the job continued, at most MAX_ATTEMPTS - 1 times. With any other error the job has failed.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..data.dataset import open_dataset
from ..data.folds import read_folds
from ..errors import UserError, described
from ..locks import locked
from ..paths import RunFolder, find_run, run_name
from ..recipes.grid import Variant
from ..runs.run import FoldRun, open_run
from ..runs.start import start_run
from .context import Context, Event
from .folds import finish_fold
from .processes import Processes, chosen_device
from .step import NUM_WARM_UP

# a worker that dies each time, such as for lack of memory, is not started again after that
MAX_ATTEMPTS = 4
_SECONDS_BETWEEN_REPORTS = 0.5
# a server of files may need this long to notice that a machine with a lock has died
PATIENCE_S = 120.0


@runtime_checkable
class Job(Protocol):
    """Work that a worker does. group: jobs that fail together. after: the group that must be finished first.

    A group that has no jobs counts as finished. A job is sent to other processes, and equals only itself.
    """

    @property
    def group(self) -> str: ...

    @property
    def after(self) -> str | None: ...

    def run(self, context: Context) -> None: ...


@dataclass(frozen=True, eq=False)
class FoldJob:
    """Train, predict and score one fold of a run. variant: with absolute folders, for other processes."""

    variant: Variant
    fold: int
    command: str = "semidice compare"

    @cached_property
    def group(self) -> str:
        return str(self.variant.folder)

    @cached_property
    def after(self) -> str | None:
        teacher = self.variant.recipe.teacher
        return None if teacher is None else str(teacher.run)

    def __str__(self) -> str:
        return f"{self.variant.name} fold {self.fold}"

    def run(self, context: Context) -> None:
        recipe, folder = self.variant.recipe, RunFolder(self.variant.folder)
        with context.phase("start"):
            self._check_teacher()
            with locked(folder, self.command, wait_s=PATIENCE_S):
                run = start_run(recipe, folder.path, resume=True, whole=False)
                dataset = open_dataset(recipe.data.dataset)
            fold = FoldRun(run, dataset, self.fold, read_folds(folder.folds, dataset))
        with locked(fold.folder, self.command, wait_s=PATIENCE_S):
            finish_fold(fold, context)

    def _check_teacher(self) -> None:
        """A UserError if the teacher is not finished: its temperature is fitted to all of its folds."""
        teacher = self.variant.recipe.teacher
        if teacher is None or not find_run(teacher.run).recipe.is_file():
            return
        missing = open_run(teacher.run).missing_folds
        if missing:
            folds = ", ".join(map(str, missing))
            raise UserError(f"its teacher {teacher.run} has not finished fold {folds}: run these jobs first")


def fold_jobs(variants: Iterable[Variant], *, command: str = "semidice compare") -> list[FoldJob]:
    """A job for each fold that is not finished, in the order of the variants: teachers before students."""
    jobs = []
    for each in variants:
        # a worker may have another working directory
        variant = replace(each, folder=each.folder.absolute())
        run, folds = RunFolder(variant.folder), variant.recipe.data.fold_numbers
        finished = run.finished_folds(folds) if run.path.exists() else ()
        jobs += [FoldJob(variant, fold, command) for fold in folds if fold not in finished]
    return jobs


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker process needs to know. num_threads: on a CPU, as in its parent, for equal bits."""

    accelerator: str = "auto"
    device: int = 0
    num_threads: int = field(default_factory=torch.get_num_threads)

    def context(self, say: Callable[[Event], object]) -> Context:
        """That of the worker; it says the state of some steps."""
        torch.set_num_threads(self.num_threads)
        context = Context(Processes(chosen_device(self.accelerator, self.device)))
        context.say = _SomeSteps(context, say)
        return context


class _SomeSteps:
    """Passes everything on, but not every step."""

    def __init__(self, context: Context, say: Callable[[Event], object]) -> None:
        self.context, self.say = context, say
        self.sent_at, self.num_steps = 0.0, 0

    def __call__(self, event: Event) -> None:
        if event.kind != "step":
            self.num_steps = 0
            self.say(event)
            return
        self.num_steps += 1
        # a graph is recorded by then, and later steps need no more memory
        if self.num_steps == 2 * NUM_WARM_UP and (share := self.context.memory_share()):
            self.say(Event("memory", share))
        now, status = time.monotonic(), event.content
        if now - self.sent_at >= _SECONDS_BETWEEN_REPORTS or status.step == status.num_steps:
            self.sent_at = now
            self.say(event)


def work(job: Job, context: Context) -> Event:
    """Run a job; how it ended."""
    on_gpu = context.processes.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.processes.device)
    try:
        job.run(context)
    # a wrong recipe must not stop the others
    except Exception as error:
        context.clear_seconds()
        # an error of the device can leave the process useless, and another one may find more memory
        is_lost = isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error)
        return Event("lost", str(error)) if is_lost else Event("failed", described(error))
    share = context.memory_share()
    if on_gpu:
        # a graph in a cycle of references would keep its memory
        gc.collect()
        torch.cuda.empty_cache()
    return Event("finished", share)


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

    def next_job(self) -> Job | None:
        """The first job that may be started now, which then counts as running; None if there is none."""
        if not self._ready:
            return None
        job = self._ready.popleft()
        self.num_running += 1
        self._attempts[job] = self._attempts.get(job, 0) + 1
        return job

    def finish(self, job: Job) -> None:
        self.num_running -= 1
        self.num_finished += 1
        self._left[job.group] -= 1
        if not self._left[job.group]:
            self._ready.extend(self._waiting.pop(job.group, ()))

    def lose(self, job: Job, reason: str) -> None:
        """The worker of a job ended: the job is tried again, before all others, or has failed."""
        if self._attempts[job] >= MAX_ATTEMPTS:
            self.fail(job, f"its worker ended {MAX_ATTEMPTS} times: {reason}")
            return
        self.num_running -= 1
        self._ready.appendleft(job)

    def fail(self, job: Job, error: str) -> None:
        self.num_running -= 1
        self._give_up(job.group, f"fold {job.fold}: {error}" if isinstance(job, FoldJob) else error)

    def _give_up(self, group: str, error: str) -> None:
        self.errors.setdefault(group, error)
        self._ready = deque(job for job in self._ready if job.group != group)
        for waiting in {job.group for job in self._waiting.pop(group, ())}:
            self._give_up(waiting, f"{run_name(Path(group))}, which it needs, failed")


@runtime_checkable
class Pool(Protocol):
    """Workers that run jobs."""

    def has_room(self) -> bool:
        """Whether one more job can be started."""
        ...

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[tuple[Job, Event]]:
        """What has come in from jobs; waits for the first event up to `seconds`."""
        ...


# called with each event of a job, and with None when a job has ended, or at the start
Show = Callable[[Any, Event | None, Schedule], object]


def run_jobs(jobs: Sequence[Job], pool: Pool, show: Show = lambda *_: None) -> Mapping[str, str]:
    """Run all jobs; the errors of the groups that failed."""
    schedule = Schedule(jobs)
    show(None, None, schedule)
    while True:
        while pool.has_room() and (job := schedule.next_job()) is not None:
            pool.start(job)
        if schedule.is_done:
            return schedule.errors
        for job, event in pool.wait(1.0):
            if event.kind == "finished":
                schedule.finish(job)
            elif event.kind == "failed":
                schedule.fail(job, event.content)
            elif event.kind == "lost":
                schedule.lose(job, event.content)
            show(job, event, schedule)


class OwnProcess:
    """A pool of this process alone. say: called with a job and each of its events, while it runs."""

    def __init__(self, accelerator: str, say: Callable[[Any, Event], object] = lambda *_: None) -> None:
        self.context = Context(Processes(chosen_device(accelerator)))
        self.say = say
        self.job: Job | None = None

    def has_room(self) -> bool:
        return self.job is None

    def start(self, job: Job) -> None:
        self.job = job

    def wait(self, seconds: float) -> list[tuple[Job, Event]]:
        job, self.job = self.job, None
        assert job is not None
        self.context.say = lambda event: self.say(job, event)
        ended = work(job, self.context)
        # no other process would find more memory
        return [(job, Event("failed", ended.content) if ended.kind == "lost" else ended)]
