"""Which training fills which cell of the paper's tables.

The trainings are the variants of two shipped grids, paper_qubiq and paper_tumours. The rows "all" and "qubiq"
are over the seven tasks of QUBIQ: the mean of the means of the tasks, as in the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .values import QUBIQ, TUMOURS, RowKey, TableValues, paper_values

_TITLES = {
    "rater_agreement": "Raters against the majority vote on QUBIQ",
    "qubiq_labels": "Hard against soft labels on QUBIQ, UNet-ResNet50",
    "qubiq_sota": "Comparison systems on QUBIQ, UNet-ResNet50",
    "sdl_against_dml": "Soft Dice loss against DML1 and DML2 on soft labels",
    "ce_against_dml": "Cross entropy against DML, UNet-ResNet50",
    "lits_kits": "Hard labels, label smoothing and distillation on LiTS and KiTS",
    "distillation_terms": "What each term of distillation adds, UNet-ResNet18",
    "kde_bandwidth": "Bandwidth of the teacher's calibration, UNet-ResNet18",
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


@dataclass(frozen=True)
class Row:
    """A row of a table: runs[column][dataset] is the method whose run is scored."""

    key: RowKey
    runs: Mapping[str, Mapping[str, str]]

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dataset for methods in self.runs.values() for dataset in methods))


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
        return {methods[dataset] for row in self.rows for methods in row.runs.values() if dataset in methods}


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
        rows.append(Row(key, runs))
    return tuple(rows)


def _variant(table: str, network: str, column: str, dataset: str) -> str:
    if network:
        return f"{network}_{column}"
    # the paper averages the raters with equal weights where they agree least
    if (column, dataset) == ("ours", "brain_tumor_task2"):
        return "uniform"
    variants = _TUMOUR_VARIANTS if dataset in TUMOURS else _QUBIQ_VARIANTS
    return variants.get(table, {}).get(column, column)
