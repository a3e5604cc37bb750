"""The numbers of one table, ours or the paper's: one value per row and column, and the marked columns.

All numbers are percentages, except the number of raters. A method is superior to another if the difference is
significant. The paper shows only which methods are marked, so for its numbers each marked method counts as
superior to each method that is not marked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from ..metrics.registry import higher_is_better
from ..recipes.text import parse_yaml

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
    """

    columns: tuple[str, ...]
    values: Mapping[RowKey, Mapping[str, float]]
    superior: Mapping[RowKey, frozenset[tuple[str, str]]] = field(default_factory=dict)
    best: Mapping[RowKey, frozenset[str]] = field(default_factory=dict)
    num_cases: Mapping[RowKey, int] = field(default_factory=dict)

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


def column_name(column: object) -> str:
    """The name of a column; bandwidths are written as in the paper.

    >>> column_name("dml1"), column_name(5e-05), column_name(0)
    ('dml1', '5e-5', '0')
    """
    if isinstance(column, str) or not column:
        return str(column)
    return f"{column:.0e}".replace("e-0", "e-")


@cache
def paper_yaml() -> dict[str, Any]:
    """The content of paper.yaml."""
    text = (resources.files("semidice") / "reproduce" / "paper.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = parse_yaml(text, "paper.yaml")
    return content


@cache
def paper_values(table: str) -> TableValues:
    """The paper's numbers of a table.

    >>> paper_values("kde_bandwidth").value(RowKey("lits", "dice"), "1e-3")
    60.3
    """
    content, marked = paper_yaml()[table], paper_yaml()["marked"].get(table, {})
    if table == "rater_agreement":
        values = {RowKey(task, "agreement"): dict(cells) for task, cells in content.items()}
        return TableValues(("raters", "dice"), values)
    lines: dict[RowKey, tuple[Sequence[float | None], Sequence[Any]]] = {}
    for name, line in content.items():
        if name == "columns":
            continue
        if table == "qubiq_labels":
            lines |= {
                RowKey(name, metric): (cells["values"], cells["best"]) for metric, cells in line.items()
            }
        elif table == "qubiq_sota":
            lines[RowKey(name, "bdice")] = (line["values"], line["best"])
        elif table == "lits_kits":
            lines |= {
                RowKey(f"{name} on {dataset}", metric): (cells, marked[name][dataset][metric])
                for dataset, metrics in line.items()
                for metric, cells in metrics.items()
            }
        else:
            metric = "bdice" if (table, name) == ("sdl_against_dml", "qubiq") else "dice"
            lines[RowKey(name, metric)] = (line, marked[name])
    return _from_marks(tuple(map(column_name, content["columns"])), lines)


def _from_marks(
    columns: tuple[str, ...], lines: Mapping[RowKey, tuple[Sequence[float | None], Sequence[Any]]]
) -> TableValues:
    values, superior, best = {}, {}, {}
    for key, (numbers, marks) in lines.items():
        cells = {name: number for name, number in zip(columns, numbers, strict=True) if number is not None}
        values[key] = cells
        best[key] = frozenset(map(column_name, marks))
        superior[key] = frozenset(
            (better, worse) for better in best[key] for worse in cells if worse not in best[key]
        )
    return TableValues(columns, values, superior, best)
