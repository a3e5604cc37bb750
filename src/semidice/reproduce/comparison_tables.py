"""Ours beside the paper's: figures, three lines for each of the paper, and what became of its conclusions."""

from collections.abc import Sequence

from ..metrics.registry import SCORES
from ..metrics.tables import Cell, Table
from .conclusions import CONCLUSIONS, Match, best_match, close_match, order_match
from .figures import METRICS, Figures, RowKey
from .scores import paper_beside
from .tables import PaperTable

# how near a figure must be to count as the paper's
_CLOSE = 1.0


def figures_table(table: PaperTable, ours: Figures, datasets: Sequence[str]) -> Table:
    """Ours, below it the paper's figure and the difference, for every cell; `datasets` are those that ran.

    A record a cell, with every digit, the number of cases and the run folders that it comes from.
    """
    paper = paper_beside(table, datasets)
    rows: list[tuple[Cell, ...]] = []
    records: list[dict[str, object]] = []
    for key in table.paper.values:
        name, runs = _row_name(table, key, datasets)
        lines: dict[str, list[Cell]] = {"ours": [], "paper": [], "difference": []}
        for column in paper.columns:
            here, theirs = ours.value(key, column), paper.value(key, column)
            best = {
                "ours": column in ours.best.get(key, ()),
                "paper": column in paper.best.get(key, ()),
            }
            difference = None if here is None or theirs is None else here - theirs
            lines["ours"].append(Cell(_number(here, column), best["ours"]))
            lines["paper"].append(Cell(_number(theirs, column), best["paper"] and theirs is not None))
            lines["difference"].append(Cell(_number(difference, column, signed=True)))
            records.append(
                {
                    "table": table.name,
                    "row": key.name,
                    "metric": key.metric,
                    "column": column,
                    "ours": here,
                    "paper": theirs,
                    "difference": difference,
                    "ours_best": best["ours"] if here is not None and key in ours.best else None,
                    "paper_best": best["paper"] if theirs is not None and paper.best.get(key) else None,
                    "num_cases": ours.num_cases.get(key) if here is not None else None,
                    "runs": " ".join(runs.get(column, ())) if here is not None else "",
                }
            )
        score = SCORES[METRICS[key.metric]]
        arrow = "↑" if score.higher_is_better else "↓"
        # one column for all names: seven bandwidths and their marks fill a narrow terminal
        heads = {"ours": f"{name}, {score.short_name} {arrow}"}
        rows += [(Cell(heads.get(whose, f"  {whose}")), *cells) for whose, cells in lines.items()]
    header = ("dataset, metric (%)", *paper.columns)
    return Table(table.title, header, tuple(rows), _note(table), tuple(records))


def _row_name(table: PaperTable, key: RowKey, datasets: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """The row as it is shown, and by column the run folders behind it."""
    row = next((row for row in table.rows if row.key == key), None)
    if row is None:
        return key.name, {}
    there = [dataset for dataset in row.datasets if dataset in datasets]
    runs = {
        column: [f"{dataset}/{of_column[dataset]}" for dataset in there if dataset in of_column]
        for column, of_column in row.runs.items()
    }
    partly = len(row.datasets) > 1 and 0 < len(there) < len(row.datasets)
    return (f"{key.name} ({len(there)} of {len(row.datasets)} tasks)" if partly else key.name), runs


def _note(table: PaperTable) -> str:
    if table.name == "rater_agreement":
        return (
            "First line: ours. Mean over raters of their mean Dice over cases, on the masks of the prepared "
            "datasets."
        )
    over_tasks = any(len(row.datasets) > 1 for row in table.rows)
    return (
        "First line: ours. Marked: no other method is significantly superior (p < 0.05, paired bootstrap "
        "over patients; ours Holm-corrected over pairs of a row)."
        + (" Over tasks of QUBIQ: mean of the tasks' means." if over_tasks else "")
    )


def conclusions_table(table: PaperTable, ours: Figures, datasets: Sequence[str]) -> Table:
    """Each conclusion of the paper, what became of it in our run, and how far order and marks agree."""
    rows: list[tuple[Cell, ...]] = []
    records: list[dict[str, object]] = []
    beside = paper_beside(table, datasets)
    lines = [
        (conclusion.sentence, conclusion.judge(ours), conclusion.judge(table.paper).detail)
        for conclusion in CONCLUSIONS[table.name]
    ]
    for sentence, verdict, in_paper in lines:
        rows.append(
            (
                Cell(sentence),
                Cell(verdict.outcome, verdict.outcome == "holds"),
                Cell(verdict.detail),
                Cell(in_paper),
            )
        )
        records.append(
            {"conclusion": sentence, "outcome": verdict.outcome, "ours": verdict.detail, "paper": in_paper}
        )
    matches: dict[str, Match] = {
        "pairs of methods in the paper's order": order_match(ours, beside),
        "cells marked as in the paper": best_match(ours, beside),
        f"figures within {_CLOSE:g} point of the paper's": close_match(ours, beside, points=_CLOSE),
    }
    for sentence, match in matches.items():
        if match.total:
            rows.append((Cell(sentence), Cell(""), Cell(str(match)), Cell("")))
            records.append({"conclusion": sentence, "outcome": "", "ours": str(match), "paper": ""})
    note = (
        "holds: significantly where the paper claims it; tendency: in the means, but not significantly; "
        "unknown: figures are missing, or no difference is significant."
    )
    header = ("conclusion of the paper", "in our run", "ours", "paper")
    return Table(f"{table.title}: conclusions", header, tuple(rows), note, tuple(records))


def _number(value: float | None, column: str, *, signed: bool = False) -> str:
    if value is None:
        return ""
    digits = 0 if column == "raters" else 2
    # a minus sign, not a hyphen
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")
