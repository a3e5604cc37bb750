"""`semidice train`: train the folds of a recipe into a run folder, then print its scores."""

import json
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from ..console import Progress, new_console, say
from ..locks import locked
from ..paths import RunFolder
from ..recipes import Recipe, option_value
from ..runs.evaluate import scores_table
from ..runs.run import open_run
from ..runs.start import start_run
from .context import Context
from .folds import finish_run
from .log import OpenLogger
from .processes import Processes, run_processes
from .progress import RunBar


def run_train(
    recipe: Recipe,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    accelerator: str = "auto",
    devices: int = 1,
    loggers: Mapping[str, OpenLogger] | None = None,
) -> None:
    """Train every fold of the recipe into `out`, then print the scores and the next command.

    devices: processes on this machine, each with a device. loggers: by their names, see `TrainingLog`;
    log.jsonl and TensorBoard are always written.
    """
    work = partial(_train, recipe, out, resume)
    # a copy prints and logs nothing
    first = partial(work, console=console, loggers=loggers or {})
    run_processes(first, work, accelerator=accelerator, number=devices)


def _train(
    recipe: Recipe,
    out: Path,
    resume: bool,
    processes: Processes,
    *,
    console: Console | None = None,
    loggers: Mapping[str, OpenLogger] | None = None,
) -> None:
    """What each process does."""
    console = console or new_console()
    console.quiet = console.quiet or not processes.is_first
    with ExitStack() as stack:
        if processes.is_first:
            stack.enter_context(locked(RunFolder(out), "semidice train"))
            start_run(recipe, out, resume=resume)
        processes.barrier()
        run = open_run(out)
        for key, why in run.recipe.reasons.items():
            say(console, f"{key} = {json.dumps(option_value(run.recipe, key))}: {why}")
        with Progress(console) as progress:
            finish_run(run, Context(processes, RunBar(progress, run.recipe).show, loggers or {}))
        if processes.is_first:
            title = f"{run.recipe.name}: scores of the held-out cases"
            console.print(scores_table(run.gather(), title=title))
            say(console, f"scores of every case: {run.folder.cases}")
            say(console, f"next: semidice predict {shlex.quote(str(out))} IMAGE... -o predictions")
