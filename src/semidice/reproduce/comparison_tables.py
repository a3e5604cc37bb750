"""Our numbers next to the paper's: three lines per row of the paper, and which conclusions hold."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from ..metrics.registry import SHORT_NAMES, higher_is_better
from ..statistics.tables import Cell, Table
from .conclusions import CONCLUSIONS
from .paper import METRICS, PaperTable, RowKey, TableValues
from .scores import comparable_paper_values

# percentage points between our number and the paper's that count as equal
_CLOSE = 1.0
# a network with a smaller overlap, in percent, has learned nothing
_NOTHING = 1.0


def values_table(table: PaperTable, ours: TableValues, datasets: Sequence[str], *, ran: str = "") -> Table:
    """Our number, the paper's and the difference for every cell; `datasets` are those that we have.

    ran: a sentence for the note on what was trained. One record per cell: every digit, the number of cases,
    and the run folders behind our number.
    """
    paper = comparable_paper_values(table, datasets)
    rows: list[tuple[Cell, ...]] = []
    records: list[dict[str, object]] = []
    for key in table.paper.values:
        name, runs = _row_name(table, key, datasets)
        our_line, paper_line, difference_line = [], [], []
        for column in paper.columns:
            our, theirs = ours.value(key, column), paper.value(key, column)
            our_best, paper_best = (column in values.best.get(key, ()) for values in (ours, paper))
            difference = None if our is None or theirs is None else our - theirs
            our_line.append(Cell(_number(our, column), our_best))
            paper_line.append(Cell(_number(theirs, column), paper_best and theirs is not None))
            difference_line.append(Cell(_number(difference, column, signed=True)))
            records.append(
                {
                    "table": table.name,
                    "row": key.name,
                    "metric": key.metric,
                    "column": column,
                    "ours": our,
                    "paper": theirs,
                    "difference": difference,
                    "ours_best": our_best if our is not None and key in ours.best else None,
                    "paper_best": paper_best if theirs is not None and paper.best.get(key) else None,
                    "num_cases": ours.num_cases.get(key) if our is not None else None,
                    "runs": " ".join(runs.get(column, ())) if our is not None else "",
                }
            )
        metric = METRICS[key.metric]
        arrow = "↑" if higher_is_better(metric) else "↓"
        # one column for all names: a narrow terminal has no space for a second one next to seven bandwidths
        per_slice = " per slice" if key in ours.per_slice else ""
        rows.append((Cell(f"{name}, {SHORT_NAMES[metric]}{per_slice} {arrow}"), *our_line))
        rows.append((Cell("  paper"), *paper_line))
        rows.append((Cell("  difference"), *difference_line))
    header = ("dataset, metric (%)", *paper.columns)
    return Table(
        table.title, header, tuple(rows), " ".join(filter(None, (ran, _note(table)))), tuple(records)
    )


def _row_name(table: PaperTable, key: RowKey, datasets: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """The name that is shown for a row, and its run folders by column."""
    row = next((row for row in table.rows if row.key == key), None)
    if row is None:
        return key.name, {}
    tasks = [dataset for dataset in row.datasets if dataset in datasets]
    runs = {
        column: [f"{dataset}/{methods[dataset]}" for dataset in tasks] for column, methods in row.runs.items()
    }
    partly = len(row.datasets) > 1 and 0 < len(tasks) < len(row.datasets)
    return (f"{key.name} ({len(tasks)} of {len(row.datasets)} tasks)" if partly else key.name), runs


def _note(table: PaperTable) -> str:
    if table.name == "rater_agreement":
        return (
            "First line: ours. Mean over raters of their mean Dice over cases, on the masks of the prepared "
            "datasets."
        )
    over_tasks = any(len(row.datasets) > 1 for row in table.rows)
    return (
        "First line: ours. Marked: not significantly worse than any other (p < 0.05, paired bootstrap "
        "over patients; ours also by permutation, Holm-corrected over pairs of a row)."
        + (" Over tasks of QUBIQ: mean of the tasks' means." if over_tasks else "")
    )


def conclusions_table(table: PaperTable, ours: TableValues, datasets: Sequence[str]) -> Table:
    """Outcome of each of the paper's conclusions for our numbers, and how many cells agree with the paper."""
    paper, ours = comparable_paper_values(table, datasets), learned(ours)
    lines: list[tuple[str, str, str, str]] = []
    for sentence, judge in CONCLUSIONS[table.name].items():
        verdict = judge(ours)
        lines.append((sentence, verdict.outcome, verdict.detail, judge(table.paper).detail))
    for sentence, (same, total) in {
        "pairs of methods in the paper's order": count_same_order(ours, paper),
        "cells marked as in the paper": count_same_marks(ours, paper),
        f"figures within {_CLOSE:g} point of the paper's": count_close(ours, paper, points=_CLOSE),
    }.items():
        if total:
            lines.append((sentence, "", f"{same} of {total}", ""))
    note = (
        "holds: significantly where the paper claims it; tendency: in the means, but not significantly; "
        "unknown: figures are missing, or no difference is significant."
    )
    header = ("conclusion of the paper", "in our run", "ours", "paper")
    rows = tuple(
        (Cell(sentence), Cell(outcome, outcome == "holds"), Cell(our), Cell(theirs))
        for sentence, outcome, our, theirs in lines
    )
    keys = ("conclusion", "outcome", "ours", "paper")
    records: list[dict[str, object]] = [dict(zip(keys, line, strict=True)) for line in lines]
    return Table(f"{table.title}: conclusions", header, rows, note, tuple(records))


def learned(values: TableValues) -> TableValues:
    """The rows in which a network learned something: nothing follows from the others."""
    overlaps = {key: cells for key, cells in values.values.items() if key.metric in ("dice", "bdice")}
    untrained = {key.name for key, cells in overlaps.items() if cells and max(cells.values()) < _NOTHING}
    kept = {key: cells for key, cells in values.values.items() if key.name not in untrained}
    return replace(values, values=kept)


def count_same_order(ours: TableValues, paper: TableValues) -> tuple[int, int]:
    """How many pairs of columns are in the paper's order, of how many; ties of the paper do not count."""
    same = []
    for key in paper.values:
        if key.metric == "agreement":
            continue
        for first, second in combinations(paper.columns, 2):
            theirs, our = paper.gain(key, first, second), ours.gain(key, first, second)
            if our is not None and theirs:
                same.append(our * theirs > 0)
    return sum(same), len(same)


def count_same_marks(ours: TableValues, paper: TableValues) -> tuple[int, int]:
    """How many cells are marked, or not marked, as in the paper, of how many."""
    same = [
        (column in marks) == (column in theirs)
        for key, marks in ours.best.items()
        if (theirs := paper.best.get(key))
        for column in ours.values[key]
    ]
    return sum(same), len(same)


def count_close(ours: TableValues, paper: TableValues, *, points: float) -> tuple[int, int]:
    """How many numbers are within so many points of the paper's, of how many."""
    close = [
        abs(value - theirs) <= points
        for key, cells in ours.values.items()
        for column, value in cells.items()
        if column != "raters" and (theirs := paper.value(key, column)) is not None
    ]
    return sum(close), len(close)


def _number(value: float | None, column: str, *, signed: bool = False) -> str:
    if value is None:
        return ""
    digits = 0 if column == "raters" else 2
    # a minus sign, not a hyphen
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")
