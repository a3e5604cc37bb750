"""Which training fills which cell of the paper's tables.

"all" and "qubiq" are rows over the seven tasks of QUBIQ: the mean of the tasks' means, as the paper has it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from .figures import QUBIQ, TUMOURS, Figures, RowKey, paper_figures
from .methods import distillation_method, method_of

# columns to the name of a method, on a dataset; None where the paper has no cell
MethodOf = Callable[[str, str], str | None]


@dataclass(frozen=True)
class Row:
    """A line: runs[column][dataset] is the method that is scored."""

    key: RowKey
    runs: Mapping[str, Mapping[str, str]]

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dataset for of_column in self.runs.values() for dataset in of_column))


@dataclass(frozen=True)
class PaperTable:
    """A table: its lines, and in `title` what it is about."""

    name: str
    title: str
    rows: tuple[Row, ...] = ()

    @property
    def paper(self) -> Figures:
        return paper_figures(self.name)

    @property
    def datasets(self) -> tuple[str, ...]:
        """In the order of the table."""
        if self.name == "rater_agreement":
            return QUBIQ
        return tuple(dict.fromkeys(dataset for row in self.rows for dataset in row.datasets))

    def methods(self, dataset: str) -> tuple[str, ...]:
        """What is trained on a dataset for this table, teachers before their students."""
        names = dict.fromkeys(
            of_column[dataset] for row in self.rows for of_column in row.runs.values() if dataset in of_column
        )
        teachers = {name: method_of(name, dataset).teacher for name in names}
        return tuple(dict.fromkeys([teacher for teacher in teachers.values() if teacher] + list(names)))


def _row(key: RowKey, datasets: tuple[str, ...], columns: tuple[str, ...], method: MethodOf) -> Row:
    runs: dict[str, dict[str, str]] = {}
    for column in columns:
        of_column = {dataset: method(column, dataset) for dataset in datasets}
        runs[column] = {dataset: name for dataset, name in of_column.items() if name is not None}
    return Row(key, runs)


def _table(name: str, title: str, method: MethodOf) -> PaperTable:
    """A table in which a column is the same method in all lines of a dataset."""
    paper = paper_figures(name)
    rows = []
    for key in paper.values:
        datasets = QUBIQ if key.name in ("all", "qubiq") else (key.name,)
        rows.append(_row(key, datasets, paper.columns, method))
    return PaperTable(name, title, tuple(rows))


def _system(column: str, dataset: str) -> str:
    if column == "ours":
        # where raters agree least, each counts the same
        return "uniform" if dataset == "brain_tumor_task2" else "weighted"
    return "mc_dropout" if column == "dropout" else column


def _ce_or_dml(column: str, dataset: str) -> str:
    if dataset in TUMOURS:
        return {"ce": "unet_resnet50_ce", "dml": "unet_resnet50_hard"}[column]
    return {"ce": "ce", "dml": "majority"}[column]


def _sdl_or_dml(column: str, dataset: str) -> str:
    if dataset in TUMOURS:
        return "unet_resnet18_hard" if column == "hard" else f"unet_resnet18_distillation_{column}"
    return {"hard": "majority", "dml1": "weighted"}.get(column, f"weighted_{column}")


def _terms(column: str, dataset: str) -> str:
    return {
        "hard": "unet_resnet18_hard",
        "ce": "unet_resnet18_distillation_ce",
        "dml": distillation_method("0"),
        "kde": distillation_method("1e-3"),
    }[column]


def _lits_kits() -> PaperTable:
    title = "Hard labels, label smoothing and distillation on LiTS and KiTS"
    paper = paper_figures("lits_kits")
    rows = []
    for key in paper.values:
        network, _, dataset = key.name.partition(" on ")
        columns = tuple(column for column in paper.columns if paper.value(key, column) is not None)
        rows.append(
            _row(key, (dataset,), columns, lambda column, _, network=network: f"{network}_{column}")  # type: ignore[misc]
        )
    return PaperTable("lits_kits", title, tuple(rows))


@cache
def paper_tables() -> dict[str, PaperTable]:
    """All tables of the paper by name, in the order of its text.

    >>> list(paper_tables())[:2]
    ['rater_agreement', 'qubiq_labels']
    """
    tables = (
        PaperTable("rater_agreement", "Raters against the majority vote on QUBIQ"),
        _table("qubiq_labels", "Hard against soft labels on QUBIQ, UNet-ResNet50", lambda column, _: column),
        _table("qubiq_sota", "Comparison systems on QUBIQ, UNet-ResNet50", _system),
        _table("sdl_against_dml", "Soft Dice loss against DML1 and DML2 on soft labels", _sdl_or_dml),
        _table("ce_against_dml", "Cross entropy against DML, UNet-ResNet50", _ce_or_dml),
        _lits_kits(),
        _table("distillation_terms", "What each term of distillation adds, UNet-ResNet18", _terms),
        _table(
            "kde_bandwidth",
            "Bandwidth of the teacher's calibration, UNet-ResNet18",
            lambda column, _: distillation_method(column),
        ),
    )
    return {table.name: table for table in tables}
