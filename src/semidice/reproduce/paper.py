"""The tables of the paper: their numbers, and which training fills which cell.

All numbers are percentages, except the number of raters. A method is superior to another if the difference is
significant. The paper shows only which methods are marked, so for its numbers each marked method counts as
superior to each method that is not marked.

The trainings are the variants of two shipped grids, paper_qubiq and paper_tumours. The rows "all" and "qubiq"
are over the seven tasks of QUBIQ: the mean of the means of the tasks, as in the paper.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from ..metrics.registry import higher_is_better

QUBIQ = (
    "prostate_task1",
    "prostate_task2",
    "brain_growth",
    "brain_tumor_task1",
    "brain_tumor_task2",
    "brain_tumor_task3",
    "kidney",
)
TUMOURS = ("lits", "kits")
NETWORKS = (
    "unet_resnet50",
    "unet_resnet18",
    "unet_efficientnet_b0",
    "unet_mobilenet_v2",
    "deeplabv3plus_resnet18",
)
# metric of the paper -> name in `metrics.registry.SCORES`
METRICS = {
    "dice": "dice_score",
    "bdice": "binarized_dice_score",
    "ece": "calibration_error",
    "agreement": "dice_score",
}


class RowKey(NamedTuple):
    """What a row of a table shows: a dataset (`lits`, `all`) or `NETWORK on DATASET`, and a metric."""

    name: str
    metric: str


@dataclass(frozen=True)
class TableValues:
    """The numbers of one table.

    values: by row and column, without empty cells. superior: pairs of columns; the first is significantly
    better than the second. best: the columns to which no other is superior. num_cases: cases behind our rows.
    per_slice: our rows in which each slice of a volume was scored on its own.
    """

    columns: tuple[str, ...]
    values: Mapping[RowKey, Mapping[str, float]]
    superior: Mapping[RowKey, frozenset[tuple[str, str]]] = field(default_factory=dict)
    best: Mapping[RowKey, frozenset[str]] = field(default_factory=dict)
    num_cases: Mapping[RowKey, int] = field(default_factory=dict)
    per_slice: frozenset[RowKey] = frozenset()

    def value(self, row: RowKey, column: str) -> float | None:
        """The number in a cell; None if the cell is empty."""
        return self.values.get(row, {}).get(column)

    def gain(self, row: RowKey, better: str, worse: str) -> float | None:
        """How much better the first column is than the second; None if a cell is empty."""
        first, second = self.value(row, better), self.value(row, worse)
        if first is None or second is None:
            return None
        return first - second if higher_is_better(METRICS[row.metric]) else second - first

    def present(self, rows: Iterable[RowKey]) -> list[RowKey]:
        """Those of the rows that have at least one number."""
        return [key for key in rows if self.values.get(key)]


@dataclass(frozen=True)
class Row:
    """A row of a table: runs[column][dataset] is the method whose run is scored, in all of the datasets."""

    key: RowKey
    datasets: tuple[str, ...]
    runs: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper and the runs behind its rows; the agreement of raters needs no runs."""

    name: str
    title: str
    rows: tuple[Row, ...]
    paper: TableValues

    @property
    def datasets(self) -> tuple[str, ...]:
        """In the order of the table."""
        return tuple(dict.fromkeys(dataset for row in self.rows for dataset in row.datasets))

    def methods(self, dataset: str) -> set[str]:
        """The methods that are scored on a dataset, without teachers that are not scored."""
        rows = [row for row in self.rows if dataset in row.datasets]
        return {methods[dataset] for row in rows for methods in row.runs.values()}


def grid_of(dataset: str) -> str:
    """The shipped grid that holds the methods of a dataset."""
    return "paper_tumours" if dataset in TUMOURS else "paper_qubiq"


@cache
def paper_tables() -> dict[str, PaperTable]:
    """All tables of the paper by name.

    >>> paper_tables()["kde_bandwidth"].paper.value(RowKey("lits", "dice"), "1e-3")
    60.3
    """
    text = (resources.files("semidice") / "reproduce" / "paper.yaml").read_text(encoding="utf-8")
    return {name: _table(name, content) for name, content in yaml.safe_load(text).items()}


def _table(name: str, content: Mapping[str, Any]) -> PaperTable:
    columns = tuple(content["columns"])
    values, superior, best, rows = {}, {}, {}, []
    for line in content["rows"]:
        key = RowKey(line["row"], line["metric"])
        cells = dict(zip(columns, line["values"], strict=True))
        values[key] = cells = {column: value for column, value in cells.items() if value is not None}
        if "best" in line:
            best[key] = frozenset(line["best"])
            worse = [column for column in cells if column not in best[key]]
            superior[key] = frozenset((better, other) for better in best[key] for other in worse)
        network, _, dataset = key.name.rpartition(" on ")
        methods = dict(zip(columns, line.get("methods", columns), strict=True))
        datasets = QUBIQ if dataset in ("all", "qubiq") else (dataset,)
        runs = {}
        for column in cells if key.metric != "agreement" else ():
            method = f"{network}_{column}" if network else methods[column]
            other = content.get("methods_on", {})
            runs[column] = {task: other.get(task, {}).get(column, method) for task in datasets}
        rows.append(Row(key, datasets, runs))
    return PaperTable(name, content["title"], tuple(rows), TableValues(columns, values, superior, best))
