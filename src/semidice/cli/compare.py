"""`semidice compare`, `semidice report` and `semidice reproduce`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console
from ..errors import UserError
from .application import Accelerator, Engine, Interval, Overrides, PreparedDataset, Rules, command


@command()
def compare(
    dataset: PreparedDataset,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the runs and tables.")],
    recipes: Annotated[
        list[str] | None,
        typer.Argument(help="Grids and recipes: YAML files or shipped names, such as labels, distillation."),
    ] = None,
    overrides: Overrides = None,
    cases: Annotated[
        list[Path] | None,
        typer.Option(help="Also compare this table of `evaluate --predictions -o`. Repeatable."),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Score to compare. Repeatable. Default: all scores."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trainings of each method, on the same folds. Default: as in the grid, or 1."
        ),
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also print the difference of every pair of methods.")
    ] = False,
    decide: Rules = None,
    interval: Interval = None,
    accelerator: Accelerator = "auto",
    on: Engine = None,
    list_jobs: Annotated[
        bool, typer.Option("--list-jobs", help="Print one command per unfinished fold, and stop.")
    ] = False,
    job: Annotated[
        str | None, typer.Option(metavar="NAME:FOLD", help="Work on one fold, as --list-jobs prints it.")
    ] = None,
) -> None:
    """Find out which label and loss are best on your data, by how much, and whether it is significant.

    Trains every recipe on the same folds; finished folds are kept. Then compares the recipes case by case,
    and prints the verdict and the mean of each method and score. Files in OUT also have the difference of
    each pair with confidence interval and p-value. If a recipe fails, the others continue.

    With --seeds 3, every recipe is trained with three seeds, in OUT/NAME/seed_K. Scores are means over the
    seeds; intervals also cover the draw of the seeds, and the spread over seeds stands next to them.

    With --decide, every run is scored by each rule and by argmax, without another training, and the methods
    are NAME, RULE. With --interval, volumes.csv of each run gets the volumes of its cases.

    With --on, folds are trained at the same time. The commands of --list-jobs can run on many machines with
    one shared folder; compare then gathers what they wrote.

    Example: **semidice compare data labels -o comparison --set schedule.epochs=50**
    """
    from ..compare import run_compare
    from ..recipes.grid import read_variants
    from ..training.grid import job_lines, run_job

    if not recipes and not cases:
        raise UserError("name a grid or recipe, such as labels, or tables of scores with --cases")
    variants = read_variants(
        recipes or (),
        dataset=dataset,
        out=out,
        overrides=overrides or (),
        accelerator=accelerator,
        seeds=seeds,
    )
    if list_jobs:
        command = _job_command(dataset, out, recipes or (), overrides or (), accelerator, seeds)
        for line in job_lines(variants, command):
            typer.echo(line)
        return
    if job is not None:
        run_job(variants, job, new_console(), accelerator=accelerator)
        return
    run_compare(
        variants,
        out,
        new_console(),
        dataset=dataset,
        case_tables=cases or (),
        metrics=metrics,
        rules=decide or (),
        interval=interval,
        show_pairs=pairs,
        accelerator=accelerator,
        on=on,
    )


def _job_command(
    dataset: Path,
    out: Path,
    recipes: Sequence[str],
    overrides: Sequence[str],
    accelerator: str,
    seeds: int | None,
) -> list[str]:
    """The command of the jobs of a grid; folders and files are absolute, so it works in every folder."""
    sources = [str(Path(source).absolute()) if Path(source).is_file() else source for source in recipes]
    sets = [part for override in overrides for part in ("--set", override)]
    device = [] if accelerator == "auto" else ["--accelerator", accelerator]
    folders = [str(dataset.absolute()), *sources, "-o", str(out.absolute())]
    trainings = [] if seeds is None else ["--seeds", str(seeds)]
    return ["semidice", "compare", *folders, *sets, *trainings, *device]


@command()
def report(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or a folder written by `semidice compare`.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="HTML file to write.")] = Path("report.html"),
    cases: Annotated[
        list[Path] | None,
        typer.Option(help="Also report this table of `evaluate --predictions -o`. Repeatable."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset: without a run, or if it was moved since the training."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    max_cases: Annotated[
        int, typer.Option(min=1, help="Number of cases with images; best and worst first.")
    ] = 100,
) -> None:
    """Write one HTML page about runs: scores, significance, calibration, curves, and images of the cases.

    The page works offline. Figures (PNG, SVG) and tables (CSV, Markdown, LaTeX) are written next to it.
    Methods of other tools are shown with their scores.

    Example: **semidice report comparison -o report.html**
    """
    from ..report.page import PageOptions, run_report

    options = PageOptions(title=title, max_cases=max_cases)
    run_report(paths or (), out, new_console(), options, case_tables=cases or (), dataset=dataset)


@command()
def reproduce(
    table: Annotated[
        str,
        typer.Argument(help="A table of the paper (--list shows their names), or all.", metavar="[TABLE]"),
    ] = "all",
    data: Annotated[
        Path, typer.Option(help="Folder with the prepared datasets: prostate_task1, ..., lits, kits.")
    ] = Path("data"),
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for runs and tables.")] = Path(
        "reproduce_out"
    ),
    show: Annotated[
        bool, typer.Option("--list", help="Show tables, number of trainings and time, and stop.")
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs, instead of the paper's 150 or 60.")
    ] = None,
    folds: Annotated[int | None, typer.Option(min=1, help="Run only the first N folds.")] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="A dataset, such as kidney. Repeatable.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="text: options of the paper's text. authors: of its released configuration.")
    ] = "text",
    overrides: Overrides = None,
    accelerator: Accelerator = "auto",
    on: Engine = None,
) -> None:
    """Run the paper's tables again: print our numbers next to the paper's, and which conclusions hold.

    Expects prepared datasets in --data, made with `semidice prepare qubiq RAW data` and `semidice prepare
    lits RAW data/lits`. Only missing trainings are run. After an interrupt, the same command continues.

    Example: **semidice reproduce qubiq_labels --data data --task kidney --epochs 20**
    """
    from ..reproduce import run_reproduce

    run_reproduce(
        table,
        data,
        out,
        console=new_console(),
        epochs=epochs,
        folds=folds,
        tasks=tasks or (),
        overrides=overrides or (),
        protocol=protocol,
        list_only=show,
        accelerator=accelerator,
        on=on,
    )
