"""A grid: every fold of every variant is trained, here or on an engine, then the tables are gathered.

    local:N      N worker processes on this machine
    local:auto   as many as the memory of a GPU allows; 1 on a CPU
    ray          a cluster of Ray, or Ray on this machine; ray:ADDRESS for a cluster at that address
                 ray:ADDRESS,K or ray:,K runs K jobs on each GPU

Every engine writes the same files as one process does.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import Progress, say
from ..errors import UserError, message
from ..locks import locked
from ..paths import RunFolder, run_name
from ..recipes.grid import Variant
from ..runs.evaluate import EvaluateOptions, run_evaluate
from ..runs.run import TrainedRun
from ..runs.start import start_run
from ..statistics.cases import CaseTable, concatenate, in_order
from .context import Context, Event
from .jobs import PATIENCE_S, FoldJob, Job, OwnProcess, Pool, fold_jobs, run_jobs
from .progress import GridBars


class GridError(UserError):
    """Some variants failed; the message names them and their errors."""


@dataclass(frozen=True)
class Trained:
    """A variant with its run and case table, or with the error that it failed with.

    The table has the column `seed` if the method has several.
    """

    variant: Variant
    run: TrainedRun | None = None
    table: CaseTable | None = None
    error: str = ""


class Outcome:
    """What has become of all variants of a grid."""

    def __init__(self, trained: Sequence[Trained]) -> None:
        self.trained = trained
        self.runs = {each.variant.name: each.run for each in trained if each.run is not None}
        self.tables = {each.variant.name: each.table for each in trained if each.table is not None}

    def table(self) -> CaseTable:
        """All scores; the methods are those of the variants."""
        return in_order(concatenate(self.tables.values()))

    def raise_if_failed(self) -> None:
        """A GridError that names the failed variants, if there are any."""
        failed = [each for each in self.trained if each.run is None]
        if failed:
            raise GridError(
                f"{len(failed)} of {len(self.trained)} variants failed; the others are finished:\n"
                + "\n".join(f"  {each.variant.name}: {each.error}" for each in failed)
            )


def check_engine(on: str) -> tuple[str, str, int]:
    """Name, number or address, and jobs per GPU of an engine; a UserError if there is no such engine.

    >>> check_engine("local:4"), check_engine("ray"), check_engine("ray:10.0.0.1:6379,2")
    (('local', '4', 1), ('ray', '', 1), ('ray', '10.0.0.1:6379', 2))
    """
    name, _, argument = on.partition(":")
    address, comma, per_gpu = argument.partition(",")
    if name == "local" and (argument == "auto" or _is_number(argument)):
        return name, argument, 1
    if name == "ray" and (_is_number(per_gpu) or not comma):
        return name, address, int(per_gpu or 1)
    raise UserError(
        f"--on {on}: expected local:N with a number of processes, local:auto, ray, ray:ADDRESS or "
        "ray:ADDRESS,K with K jobs per GPU"
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


@contextmanager
def opened_pool(
    on: str | None, *, accelerator: str = "auto", say: Callable[[Any, Event], object] = lambda *_: None
) -> Iterator[Pool]:
    """The workers of an engine; None is this process, whose jobs report to `say`."""
    if on is None:
        yield OwnProcess(accelerator, say)
        return
    name, argument, per_gpu = check_engine(on)
    if name == "ray":
        from .ray_pool import RayPool

        with RayPool(argument or None, accelerator=accelerator, per_gpu=per_gpu) as ray_pool:
            yield ray_pool
    else:
        from .local_pool import LocalPool

        num_workers = None if argument == "auto" else int(argument)
        with LocalPool(num_workers, accelerator=accelerator) as local_pool:
            yield local_pool


def train_grid(
    variants: Sequence[Variant],
    console: Console,
    *,
    on: str | None = None,
    accelerator: str = "auto",
    command: str = "semidice compare",
    rules: Sequence[str] = (),
) -> Outcome:
    """Train every fold that is not finished, and gather the scores. A variant that fails stops no other.

    rules: that make masks; each run is also scored by them, into its decisions.parquet.
    """
    jobs: list[Job] = [*fold_jobs(variants, command=command)]
    jobs += [RulesJob(each.folder.absolute(), tuple(rules)) for each in variants if rules]
    errors: Mapping[str, str] = {}
    if jobs:
        with Progress(console) as progress:
            bars = GridBars(progress, variants)
            with opened_pool(on, accelerator=accelerator, say=bars.show) as pool:
                errors = run_jobs(jobs, pool, bars)
    return Outcome([_gathered(variant, errors, command) for variant in variants])


def _gathered(variant: Variant, errors: Mapping[str, str], command: str) -> Trained:
    folder = RunFolder(variant.folder.absolute())
    try:
        for group in (str(folder.path), RulesJob(folder.path).group):
            if group in errors:
                raise UserError(errors[group])
        with locked(folder, command):
            run = start_run(variant.recipe, variant.folder, resume=True)
            if run.missing_folds:
                missing = ", ".join(map(str, run.missing_folds))
                raise UserError(
                    f"its jobs are finished, but {folder.path} has no scores of fold {missing}: every "
                    "machine must see this folder under this name"
                )
            table = run.gather()
            return Trained(variant, run, table if variant.seed is None else table.assign(seed=variant.seed))
    except Exception as error:
        text = message(error)
        if text is None:
            raise
        return Trained(variant, error=text)


@dataclass(frozen=True, eq=False)
class RulesJob:
    """Score the masks of a run by rules, when all its folds are finished."""

    folder: Path
    rules: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return f"{self.folder} by rules"

    @property
    def after(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return f"{run_name(self.folder)} by rules"

    def run(self, context: Context) -> None:
        with locked(RunFolder(self.folder), "semidice compare", wait_s=PATIENCE_S):
            run_evaluate(self.folder, EvaluateOptions(rules=self.rules), Console(quiet=True))


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
                yield f"{shell} --job {shlex.quote(f'{job.variant.name}:{job.fold}')}"
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
    fold_job = FoldJob(chosen[0], int(fold))
    with Progress(console) as progress:
        pool = OwnProcess(accelerator, GridBars(progress, chosen).show)
        fold_job.run(pool.context)
    say(console, f"{fold_job} is finished; when all jobs are, the same command without --job compares them")
