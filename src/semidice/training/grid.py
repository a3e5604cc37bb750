"""`--on`: where the folds of a grid are trained, and one view of all of them.

    local:N      N worker processes on this machine
    local:auto   as many as the memory of a GPU allows; 1 on a CPU
    ray          a cluster of Ray, or Ray on this machine; ray:ADDRESS for a cluster at that address

Every engine writes the same files as one process does. Then `cross_validate` gathers the tables of the folds.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from ..console import Progress, say
from ..errors import UserError
from ..recipes.grid import Variant
from .command import RunBar
from .jobs import FoldJob, Pool, Report, Schedule, Worker, WorkerOptions, fold_jobs, run_jobs

_ALL = "all jobs"


def check_engine(on: str) -> tuple[str, str]:
    """Name and argument of an engine; a ValueError if there is no such engine.

    >>> check_engine("local:4"), check_engine("ray"), check_engine("ray:10.0.0.1:6379")
    (('local', '4'), ('ray', ''), ('ray', '10.0.0.1:6379'))
    """
    name, _, argument = on.partition(":")
    is_number = argument.isascii() and argument.isdigit() and int(argument) > 0
    if name == "ray" or (name == "local" and (argument == "auto" or is_number)):
        return name, argument
    raise UserError(f"--on {on}: expected local:N with a number of processes, local:auto, ray or ray:ADDRESS")


@contextmanager
def opened_pool(on: str, *, accelerator: str = "auto") -> Iterator[Pool]:
    """The workers of an engine."""
    name, argument = check_engine(on)
    if name == "ray":
        from .ray_pool import RayPool

        with RayPool(argument or None, accelerator=accelerator) as ray_pool:
            yield ray_pool
    else:
        from .local_pool import LocalPool

        num_workers = None if argument == "auto" else int(argument)
        with LocalPool(num_workers, accelerator=accelerator) as local_pool:
            yield local_pool


def finish_folds(
    variants: Sequence[Variant],
    on: str,
    console: Console,
    *,
    accelerator: str = "auto",
    command: str = "semidice compare",
) -> Mapping[str, str]:
    """Train the folds that are not finished on an engine; errors by run folder (absolute) that failed."""
    jobs = fold_jobs(variants, command=command)
    if not jobs:
        return {}
    with (
        Progress(console) as progress,
        opened_pool(on, accelerator=accelerator) as pool,
    ):
        return run_jobs(jobs, pool, JobsView(progress, variants))


class JobsView:
    """A bar for all jobs and one for each run; without a terminal, lines."""

    def __init__(self, progress: Progress, variants: Sequence[Variant]) -> None:
        self.progress = progress
        self.bar = progress.bar(_ALL, "jobs")
        self.bars = {
            str(variant.folder.absolute()): RunBar(progress, variant.recipe, name=variant.name)
            for variant in variants
        }

    def show_schedule(self, schedule: Schedule) -> None:
        failed = f", {len(schedule.errors)} runs failed" if schedule.errors else ""
        self.bar.to(schedule.num_finished, schedule.num_jobs)
        self.bar.status = f"{schedule.num_running} running{failed}"
        self.progress.print_line(self.bar)

    def show(self, job: Any, report: Report) -> None:
        if not isinstance(job, FoldJob):
            return
        bar = self.bars[job.group]
        if report.kind == "step":
            bar.show_step(report.content)
        elif report.kind == "phase":
            bar.show_phase(job.fold, report.content)
        elif report.kind == "lost":
            say(self.progress.console, f"{job}: its worker ended ({report.content}); it is continued")
        elif report.kind == "failed":
            # the command reports errors at its end, which may be hours away
            say(self.progress.console, f"{job} failed: {report.content}")
            bar.show_failed()


def job_lines(variants: Sequence[Variant], command: Sequence[str]) -> Iterator[str]:
    """`command --job NAME:FOLD` for each fold that is not finished.

    A comment stands between jobs and those that need them, because the latter have a teacher among them.
    """
    jobs, shell = fold_jobs(variants), shlex.join(command)
    while jobs:
        groups = {job.group for job in jobs}
        waiting = [job for job in jobs if job.after in groups]
        for job in jobs:
            if job.after not in groups:
                yield f"{shell} --job {shlex.quote(f'{job.name}:{job.fold}')}"
        if waiting:
            yield "# the jobs below need all jobs above: start them when those are finished"
        jobs = waiting


def run_job(variants: Sequence[Variant], job: str, console: Console, *, accelerator: str) -> None:
    """Work on the job NAME:FOLD in this process."""
    name, _, fold = job.rpartition(":")
    chosen = [variant for variant in variants if variant.name == name]
    folds = [str(number) for variant in chosen for number in variant.recipe.data.fold_numbers]
    if fold not in folds:
        examples = [f"{each.name}:{number}" for each in variants for number in each.recipe.data.fold_numbers]
        shown = ", ".join(examples[:5]) + (", ..." if len(examples) > 5 else "")
        raise UserError(f"--job {job}: expected NAME:FOLD; the jobs of this grid are {shown}")
    fold_job = FoldJob(name, chosen[0].recipe, chosen[0].folder, int(fold))
    worker = Worker(WorkerOptions(accelerator))
    with Progress(console) as progress:
        view = JobsView(progress, chosen)
        worker.send = lambda report: view.show(fold_job, report)
        fold_job.run(worker)
    say(console, f"{fold_job} is finished; when all jobs are, the same command without --job compares them")
