"""`semidice reproduce TABLE --data DIR`: run what is missing of a table, print ours beside the paper's.

    OUT/DATASET/METHOD/                   the runs, shared by all tables
        TABLE.md, .csv, .tex              the figures; the Markdown file has the conclusions too
        TABLE_conclusions.md, .csv, .tex  which of the paper's conclusions hold
        rater_agreement_cases.parquet     Dice of each rater on each case

Run again, finished folds are kept. A training that fails is told at the end, and the others are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from ..compare import run_variants, write_table
from ..console import say
from ..metrics.cases import CaseTable, concatenate, write_cases
from ..metrics.tables import Cell, Table
from ..paths import ReproductionFolder, atomic_write
from ..training.command import start_fabric
from .agreement import agreement_figures, agreement_of
from .comparison_tables import conclusions_table, figures_table
from .estimate import StepTimes, estimated_seconds, time_text
from .figures import Figures
from .plan import Plan, chosen_tables, folds_left, make_plan
from .scores import our_figures
from .tables import PaperTable


class ReproduceError(ValueError):
    """Some trainings failed: which ones, and why. Everything else was run, shown and written."""


@dataclass(frozen=True)
class Reproduction:
    """A table of the paper as we have it."""

    figures: Figures
    table: Table
    conclusions: Table


def run_reproduce(
    table: str,
    data: Path,
    out: Path,
    *,
    console: Console,
    epochs: int | None = None,
    folds: int | None = None,
    tasks: Sequence[str] = (),
    overrides: Sequence[str] = (),
    list_only: bool = False,
    accelerator: str = "auto",
) -> dict[str, Reproduction]:
    """Run, print and write a table of the paper, or `all`; a ReproduceError at the end if trainings failed.

    folds: run the first so many of the recipes' folds. tasks: datasets, such as kidney or lits; all if none.
    overrides: KEY=VALUE over every recipe. list_only: say what would be run and how long it takes, no more.
    """
    options = [] if epochs is None else [f"schedule.epochs={epochs}"]
    options += [] if folds is None else [f"data.folds={list(range(folds))}"]
    tables = chosen_tables(table)
    plan = make_plan(tables, data=data, out=out, tasks=tasks, overrides=[*options, *overrides])
    for message in plan.missing:
        say(console, message)
    if list_only:
        _print_list(plan, console, accelerator)
        return {}
    if not plan.datasets:
        raise ValueError(f"{data} holds none of the datasets of {table}: see the lines above")
    runs, failed = _run(plan, console, accelerator)
    results = {}
    for each in tables:
        there = [name for name in plan.datasets if name in each.datasets]
        if not there:
            say(console, f"{each.name}: none of its datasets was asked for and is there")
            continue
        if each.name == "rater_agreement":
            figures = _agreement(there, data, out, console, failed)
        else:
            figures = our_figures(each, runs)
        result = Reproduction(
            figures, figures_table(each, figures, there), conclusions_table(each, figures, there)
        )
        console.print(result.table.rich())
        _print_conclusions(result.conclusions, console)
        _write(each, result, out)
        say(console, f"written: {out / each.name}.md, .csv and .tex, and {each.name}_conclusions beside them")
        results[each.name] = result
    if failed:
        raise ReproduceError(
            f"{len(failed)} failed; the rest of the tables is shown above and written:\n"
            + "\n".join(f"  {name}: {why}" for name, why in failed.items())
        )
    return results


def _run(
    plan: Plan, console: Console, accelerator: str
) -> tuple[dict[tuple[str, str], CaseTable], dict[str, str]]:
    """Case tables by dataset and method, of the folds that were asked for; and what failed."""
    runs: dict[tuple[str, str], CaseTable] = {}
    failed: dict[str, str] = {}
    runnable = plan.runnable()
    if not runnable:
        return runs, failed
    fabric = start_fabric(accelerator=accelerator)
    left = sum(folds_left(variant) for variants in runnable.values() for variant in variants)
    if left:
        with console.status("measuring how long a step takes"):
            seconds = estimated_seconds(plan.variants, plan.datasets, StepTimes(fabric.device))
        say(console, f"{left} trainings to run, about {time_text(seconds)} on {fabric.device.type}")
    for dataset, variants in runnable.items():
        say(console, f"{dataset}: {len(variants)} methods")
        outcome = run_variants(variants, fabric, console)
        for variant in variants:
            if variant.name in outcome.failed:
                failed[f"{dataset}/{variant.name}"] = outcome.failed[variant.name]
            else:
                table = outcome.tables[variant.name]
                # a run may hold more folds, from a time when more were asked for
                asked = np.isin(table.columns["fold"], variant.recipe.data.fold_numbers)
                runs[dataset, variant.name] = CaseTable(
                    {name: column[asked] for name, column in table.columns.items()}
                )
    return runs, failed


def _agreement(
    names: Sequence[str], data: Path, out: Path, console: Console, failed: dict[str, str]
) -> Figures:
    tables = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    ) as progress:
        for name in names:
            bar = progress.add_task(f"raters of {name}", total=None)
            try:
                tables[name] = agreement_of(
                    data / name,
                    on_case=lambda done, total, bar=bar: progress.update(bar, completed=done, total=total),  # type: ignore[misc]
                )
            except ValueError as error:
                failed[f"rater agreement of {name}"] = str(error)
    if tables:
        out.mkdir(parents=True, exist_ok=True)
        named = [
            CaseTable(
                {
                    **table.columns,
                    "case": np.char.add(f"{name}/", table.columns["case"]),
                    "patient": np.char.add(f"{name}/", table.columns["patient"]),
                }
            )
            for name, table in tables.items()
        ]
        write_cases(concatenate(named), ReproductionFolder(out).rater_cases)
    return agreement_figures(tables)


def _print_conclusions(conclusions: Table, console: Console) -> None:
    """Two lines each: what became of it, and the numbers behind it."""
    console.print(f"{conclusions.title} ({conclusions.note})", style="italic", highlight=False, markup=False)
    colours = {"holds": "green", "tendency": "yellow", "fails": "red"}
    for record in conclusions.records:
        outcome = str(record["outcome"])
        line = Text(f"{outcome:<9}", style=colours.get(outcome, "")).append(
            str(record["conclusion"]), style=""
        )
        console.print(line)
        numbers = f"{'':<9}ours: {record['ours']}" + (
            f"; paper: {record['paper']}" if record["paper"] else ""
        )
        console.print(Text(numbers, style="dim"))


def _write(table: PaperTable, result: Reproduction, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    folder = ReproductionFolder(out)
    write_table(result.table, folder.table(table.name))
    write_table(result.conclusions, folder.conclusions(table.name))
    page = f"# {table.title}\n\n{result.table.markdown()}\n## Conclusions\n\n{result.conclusions.markdown()}"
    with atomic_write(folder.table(table.name).with_suffix(".md")) as temp_path:
        temp_path.write_text(page, encoding="utf-8")


def _print_list(plan: Plan, console: Console, accelerator: str) -> None:
    """Tables, trainings (a fold each) and an estimate of time; a shared training counts in every table."""
    device = torch.device(
        "cuda" if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available() else "cpu"
    )
    times = StepTimes(device)
    rows = []
    with console.status("measuring how long a step takes"):
        for table in plan.tables:
            rows.append(_listed(table.name, plan, times, table=table))
        if len(plan.tables) > 1:
            rows.append(_listed("all, shared runs once", plan, times))
    note = (
        "A training is one fold of one method. Time: steps x time of a step, measured just now on "
        f"{device.type}, without validation, prediction and reading from disk."
    )
    header = ("table", "datasets there", "trainings", "of them here", "finished", "left", "time")
    listing = Table("Tables of the paper", header, tuple(tuple(map(Cell, row)) for row in rows), note, ({},))
    console.print(listing.rich())


def _listed(name: str, plan: Plan, times: StepTimes, *, table: PaperTable | None = None) -> tuple[str, ...]:
    wanted = {
        dataset: [variant for variant in variants if table is None or variant.name in table.methods(dataset)]
        for dataset, variants in plan.variants.items()
        if table is None or dataset in table.datasets
    }
    here = {dataset: variants for dataset, variants in wanted.items() if dataset in plan.datasets}
    total, possible = (
        sum(len(variant.recipe.data.fold_numbers) for variants in part.values() for variant in variants)
        for part in (wanted, here)
    )
    left = sum(folds_left(variant) for variants in here.values() for variant in variants)
    seconds = estimated_seconds(here, {name: plan.datasets[name] for name in here}, times)
    return (
        name,
        f"{len(here)} of {len(wanted)}",
        str(total),
        str(possible),
        str(possible - left),
        str(left),
        time_text(seconds) if left else "",
    )
