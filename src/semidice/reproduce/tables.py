"""The tables of the paper: their numbers, and which training fills which cell.

All numbers are percentages, except the number of raters. A method is superior to another if the difference is
significant. The paper shows only which methods are marked, so for its numbers each marked method counts as
superior to each method that is not marked.

The trainings are the variants of two shipped grids, paper_qubiq and paper_tumours. The rows "all" and "qubiq"
are over the seven tasks of QUBIQ: the mean of the means of the tasks, as in the paper.
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
_TITLES = {
    "rater_agreement": "Raters against the majority vote on QUBIQ",
    "qubiq_labels": "Hard against soft labels on QUBIQ",
    "qubiq_sota": "Comparison systems on QUBIQ",
    "sdl_against_dml": "Soft Dice loss against DML1 and DML2 on soft labels",
    "ce_against_dml": "Cross entropy against DML",
    "lits_kits": "Hard labels, label smoothing and distillation on LiTS and KiTS",
    "distillation_terms": "What each term of distillation adds",
    "kde_bandwidth": "Bandwidth of the teacher's calibration",
}
_STUDENT = "unet_resnet18_distillation"
# table -> column -> variant of the grid; a column that is missing has the name of its variant
_QUBIQ_VARIANTS: dict[str, dict[str, str]] = {
    "qubiq_sota": {"dropout": "mc_dropout", "ours": "weighted"},
    "sdl_against_dml": {
        "hard": "majority",
        "sdl": "weighted_sdl",
        "dml1": "weighted",
        "dml2": "weighted_dml2",
    },
    "ce_against_dml": {"dml": "majority"},
}
_TUMOUR_VARIANTS: dict[str, dict[str, str]] = {
    "sdl_against_dml": {
        "hard": "unet_resnet18_hard",
        **{column: f"{_STUDENT}_{column}" for column in ("sdl", "dml1", "dml2")},
    },
    "ce_against_dml": {"ce": "unet_resnet50_ce", "dml": "unet_resnet50_hard"},
    "distillation_terms": {
        "hard": "unet_resnet18_hard",
        "ce": f"{_STUDENT}_ce",
        "dml": f"{_STUDENT}_dml1",
        "kde": _STUDENT,
    },
    "kde_bandwidth": {
        "0": f"{_STUDENT}_dml1",
        "1e-3": _STUDENT,
        **{column: f"{_STUDENT}_h{column}" for column in ("5e-5", "1e-4", "5e-4", "5e-3", "1e-2")},
    },
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
    columns = tuple(map(column_name, content["columns"]))
    values, superior, best = {}, {}, {}
    for key, (numbers, marks) in lines.items():
        cells = {name: number for name, number in zip(columns, numbers, strict=True) if number is not None}
        values[key] = cells
        best[key] = frozenset(map(column_name, marks))
        superior[key] = frozenset(
            (better, worse) for better in best[key] for worse in cells if worse not in best[key]
        )
    return TableValues(columns, values, superior, best)


@dataclass(frozen=True)
class Row:
    """A row of a table: runs[column][dataset] is the method whose run is scored, in all of the datasets."""

    key: RowKey
    datasets: tuple[str, ...]
    runs: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper and the runs behind its rows."""

    name: str
    title: str
    rows: tuple[Row, ...]

    @property
    def paper(self) -> TableValues:
        return paper_values(self.name)

    @property
    def datasets(self) -> tuple[str, ...]:
        """In the order of the table."""
        if self.name == "rater_agreement":
            return QUBIQ
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
    """All tables of the paper by name, in the order of its text.

    >>> list(paper_tables())[:2]
    ['rater_agreement', 'qubiq_labels']
    """
    return {name: PaperTable(name, title, _rows(name)) for name, title in _TITLES.items()}


def _rows(table: str) -> tuple[Row, ...]:
    if table == "rater_agreement":
        return ()
    rows = []
    for key, cells in paper_values(table).values.items():
        network, _, dataset = key.name.rpartition(" on ")
        datasets = QUBIQ if dataset in ("all", "qubiq") else (dataset,)
        runs = {
            column: {name: _variant(table, network, column, name) for name in datasets} for column in cells
        }
        rows.append(Row(key, datasets, runs))
    return tuple(rows)


def _variant(table: str, network: str, column: str, dataset: str) -> str:
    if network:
        return f"{network}_{column}"
    # the paper averages the raters with equal weights where they agree least
    if (column, dataset) == ("ours", "brain_tumor_task2"):
        return "uniform"
    variants = _TUMOUR_VARIANTS if dataset in TUMOURS else _QUBIQ_VARIANTS
    return variants.get(table, {}).get(column, column)
