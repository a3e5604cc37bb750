"""`semidice reproduce TABLE --data DIR`: run the missing trainings of a table and compare it with the paper.

    OUT/DATASET/METHOD/seed_0/            the runs, shared by all tables
        TABLE.md, .csv, .tex              the numbers; the Markdown file also has the conclusions
        TABLE_conclusions.md, .csv, .tex  which of the paper's conclusions hold
        rater_agreement_cases.parquet     Dice of each rater on each case
        authors/                          all of this for --protocol authors

A second run keeps finished folds. If a training fails, the others continue and the error is reported at the
end.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ..console import Progress, progress_bar, say
from ..errors import UserError
from ..paths import ReproductionFolder, write_text
from ..recipes.grid import Variant
from ..statistics.cases import CaseTable, concatenate, write_cases
from ..statistics.tables import Cell, Table
from ..training.grid import check_engine, train_grid
from ..training.processes import chosen_device
from .comparison_tables import conclusions_table, values_table
from .paper import PaperTable, TableValues
from .plan import (
    Plan,
    StepTimes,
    chosen_tables,
    estimated_seconds,
    folds_left,
    make_plan,
    setting_text,
    time_text,
)
from .protocols import PROTOCOLS
from .scores import agreement_scores, agreement_values, our_values


class ReproduceError(UserError):
    """Some trainings failed: which ones, and why. All others were run, shown and written."""


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
    protocol: str = "text",
    list_only: bool = False,
    accelerator: str = "auto",
    on: str | None = None,
) -> dict[str, TableValues]:
    """Run, print and write one table of the paper, or `all`, and return our numbers by table.

    A ReproduceError at the end names the trainings that failed. folds: run only the first N folds. tasks:
    datasets such as kidney or lits; all if empty. overrides: KEY=VALUE for every recipe. protocol: text
    or authors, see `protocols`. list_only: only show how many trainings are left and how long they take.
    on: where the folds are trained, see `training.grid`; None trains one after the other in this process.
    """
    _check_choices(protocol, on)
    out = ReproductionFolder.of(out, protocol).path
    options = [] if epochs is None else [f"schedule.epochs={epochs}"]
    options += [] if folds is None else [f"data.folds={list(range(folds))}"]
    tables = chosen_tables(table)
    plan = make_plan(
        tables, data=data, out=out, tasks=tasks, overrides=[*options, *overrides], protocol=protocol
    )
    say(console, _protocol_line(protocol))
    for message in plan.missing:
        say(console, message)
    if list_only:
        _print_list(plan, console, accelerator)
        return {}
    if not plan.datasets:
        raise UserError(
            f"{data} has no dataset of table {table}; make one with a command shown above, or change --data"
        )
    paper_plan = make_plan(tables, data=data, out=out, tasks=tasks, protocol=protocol)
    runs, failed = _run(plan, console, accelerator, on)
    results = {}
    for paper_table in tables:
        datasets = [name for name in plan.datasets if name in paper_table.datasets]
        if not datasets:
            say(console, f"{paper_table.name}: skipped, none of its datasets was chosen and exists")
            continue
        if paper_table.name == "rater_agreement":
            values = _agreement(datasets, data, out, console, failed)
        else:
            values = our_values(paper_table, runs)
        ran = _ran(paper_table, plan, paper_plan, datasets)
        _show_and_write(paper_table, values, datasets, out, console, protocol, ran)
        results[paper_table.name] = values
    _raise_if_failed(failed)
    return results


def _raise_if_failed(failed: Mapping[str, str]) -> None:
    if failed:
        raise ReproduceError(
            f"{len(failed)} failed; all other results are shown above and written:\n"
            + "\n".join(f"  {name}: {error}" for name, error in failed.items())
        )


def _check_choices(protocol: str, on: str | None) -> None:
    """A ValueError if there is no such protocol or engine."""
    if on is not None:
        check_engine(on)
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")


def _run(
    plan: Plan, console: Console, accelerator: str, on: str | None
) -> tuple[dict[tuple[str, str], CaseTable], dict[str, str]]:
    """Scores by dataset and method, of the folds that the recipes ask for; and errors by failed training."""
    runs: dict[tuple[str, str], CaseTable] = {}
    failed: dict[str, str] = {}
    runnable = plan.runnable()
    if not runnable:
        return runs, failed
    every = [(dataset, variant) for dataset, variants in runnable.items() for variant in variants]
    left = 0 if on is not None else sum(folds_left(variant) for _, variant in every)
    if left:
        device = chosen_device(accelerator)
        with progress_bar(console, "measuring the time of a training step"):
            seconds = estimated_seconds(runnable, plan.datasets, StepTimes(device))
        say(console, f"{left} trainings to run, about {time_text(seconds)} on {device.type}")
    for dataset, variants in runnable.items():
        say(console, f"{dataset}: {len(variants)} methods")
    outcome = train_grid(
        [variant for _, variant in every],
        console,
        on=on,
        accelerator=accelerator,
        command="semidice reproduce",
    )
    for (dataset, variant), trained in zip(every, outcome.trained, strict=True):
        if trained.table is None:
            failed[f"{dataset}/{variant.name}"] = trained.error
        else:
            # the run can have more folds, from an earlier command that asked for more
            wanted = trained.table["fold"].isin(variant.recipe.data.fold_numbers)
            runs[dataset, variant.name] = trained.table[wanted]
    return runs, failed


def _agreement(
    datasets: Sequence[str], data: Path, out: Path, console: Console, failed: dict[str, str]
) -> TableValues:
    tables = {}
    with Progress(console) as progress:
        for name in datasets:
            bar = progress.bar(f"raters of {name}", "cases")
            try:
                tables[name] = agreement_scores(data / name, on_case=bar.to)
            except UserError as error:
                failed[f"rater agreement of {name}"] = str(error)
    if tables:
        named = [
            table.assign(case=f"{name}/" + table["case"], patient=f"{name}/" + table["patient"])
            for name, table in tables.items()
        ]
        write_cases(concatenate(named), ReproductionFolder(out).rater_cases)
    return agreement_values(tables)


def _protocol_line(protocol: str) -> str:
    return f"protocol {protocol}: {PROTOCOLS[protocol]}"


def _ran(table: PaperTable, plan: Plan, paper_plan: Plan, datasets: Sequence[str]) -> str:
    """A sentence on the networks, epochs and folds that ran, and one more if they are not the paper's."""
    if table.name == "rater_agreement":
        return ""
    ours, paper = (
        setting_text({name: each.of_table(table)[name] for name in datasets}) for each in (plan, paper_plan)
    )
    if ours == paper:
        return f"Ran: {ours}, as in the paper."
    return f"Ran: {ours}. The paper has {paper}, so the outcomes are of another setting than its own."


def _show_and_write(
    table: PaperTable,
    values: TableValues,
    datasets: Sequence[str],
    out: Path,
    console: Console,
    protocol: str,
    ran: str,
) -> None:
    """Compare a table with the paper; print and write it."""
    numbers = values_table(table, values, datasets, ran=ran)
    conclusions = conclusions_table(table, values, datasets)
    if ran:
        say(console, ran)
    console.print(numbers)
    _print_conclusions(conclusions, console)
    folder = ReproductionFolder(out)
    numbers.write(folder.table(table.name))
    conclusions.write(folder.conclusions(table.name))
    page = f"# {table.title}\n\n{_protocol_line(protocol)}\n\n{numbers.markdown()}"
    page += f"\n## Conclusions\n\n{conclusions.markdown()}"
    write_text(folder.table(table.name).with_suffix(".md"), page)
    say(console, f"written to {out}: {table.name} and {table.name}_conclusions, as .md, .csv and .tex")


def _print_conclusions(conclusions: Table, console: Console) -> None:
    """Two lines per conclusion: the outcome, and the numbers behind it."""
    console.print(f"{conclusions.title} ({conclusions.note})", style="italic", highlight=False, markup=False)
    colours = {"holds": "green", "tendency": "yellow", "fails": "red"}
    for record in conclusions.records:
        outcome = str(record["outcome"])
        sentence = str(record["conclusion"])
        console.print(Text(f"{outcome:<9}", style=colours.get(outcome, "")).append(sentence, style=""))
        numbers = f"{'':<9}ours: {record['ours']}"
        numbers += f"; paper: {record['paper']}" if record["paper"] else ""
        console.print(Text(numbers, style="dim"))


def _print_list(plan: Plan, console: Console, accelerator: str) -> None:
    """Tables, their trainings and the estimated time; a shared training counts in every table."""
    device = torch.device(
        "cuda" if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available() else "cpu"
    )
    times = StepTimes(device)
    with progress_bar(console, "measuring the time of a training step"):
        rows = [_list_row(table.name, plan.of_table(table), plan, times) for table in plan.tables]
        if len(plan.tables) > 1:
            rows.append(_list_row("all, shared runs once", plan.variants, plan, times))
    note = (
        "A training is one fold of one method. Time: number of steps x time of a step, measured now on "
        f"{device.type}, without validation, prediction and reading from disk."
    )
    header = ("table", "datasets found", "trainings", "with data", "finished", "left", "time")
    cells = tuple(tuple(map(Cell, row)) for row in rows)
    console.print(Table("Tables of the paper", header, cells, note, ({},)))


def _list_row(
    name: str, variants: Mapping[str, Sequence[Variant]], plan: Plan, times: StepTimes
) -> tuple[str, ...]:
    runnable = {dataset: variants[dataset] for dataset in variants if dataset in plan.datasets}
    total, possible = (
        sum(len(variant.recipe.data.fold_numbers) for of_dataset in part.values() for variant in of_dataset)
        for part in (variants, runnable)
    )
    left = sum(folds_left(variant) for of_dataset in runnable.values() for variant in of_dataset)
    seconds = estimated_seconds(runnable, plan.datasets, times)
    return (
        name,
        f"{len(runnable)} of {len(variants)}",
        str(total),
        str(possible),
        str(possible - left),
        str(left),
        time_text(seconds) if left else "",
    )
