"""What must be run: which datasets exist, and which trainings the tables need on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.manifest import Manifest, read_manifest
from ..paths import DatasetFolder, ReproductionFolder, RunFolder
from ..recipes.grid import Variant, read_variants
from .tables import PaperTable, grid_of, paper_tables
from .values import QUBIQ, TUMOURS


@dataclass(frozen=True)
class Plan:
    """The trainings of the chosen tables.

    variants: by dataset, teachers before students, also for datasets that do not exist yet. datasets: those
    that exist. missing: one message for each dataset that does not exist.
    """

    tables: tuple[PaperTable, ...]
    variants: Mapping[str, tuple[Variant, ...]]
    datasets: Mapping[str, Manifest]
    missing: tuple[str, ...]

    def runnable(self) -> dict[str, tuple[Variant, ...]]:
        """Trainings on the datasets that exist."""
        return {name: self.variants[name] for name in self.datasets if self.variants[name]}

    def of_table(self, table: PaperTable) -> dict[str, list[Variant]]:
        """The trainings of one table by dataset, with the teachers of its students."""
        chosen = {}
        for dataset, variants in self.variants.items():
            if dataset in table.datasets:
                methods = table.methods(dataset)
                teachers = {variant.teacher for variant in variants if variant.name in methods}
                chosen[dataset] = [variant for variant in variants if variant.name in methods | teachers]
        return chosen


def chosen_tables(table: str) -> tuple[PaperTable, ...]:
    """The table with that name, or all tables for "all"."""
    tables = paper_tables()
    if table == "all":
        return tuple(tables.values())
    if table not in tables:
        raise ValueError(f"the paper has no table {table!r}; choose one of {', '.join(tables)}, or all")
    return (tables[table],)


def make_plan(
    tables: Sequence[PaperTable],
    *,
    data: Path,
    out: Path,
    tasks: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Plan:
    """All trainings that the tables need on their datasets, or on those named in `tasks`.

    overrides: KEY=VALUE for every recipe.
    """
    variants, datasets, missing = {}, {}, []
    for name in _wanted_datasets(tables, tasks):
        try:
            datasets[name] = read_manifest(data / name)
        except ValueError as error:
            missing.append(_missing_message(name, data, str(error)))
        methods = {method for table in tables for method in table.methods(name)}
        variants[name] = tuple(
            read_variants(
                [grid_of(name)],
                dataset=data / name,
                out=ReproductionFolder(out).runs(name),
                overrides=overrides,
                only=methods,
            )
        )
    return Plan(tuple(tables), variants, datasets, tuple(missing))


def _wanted_datasets(tables: Sequence[PaperTable], tasks: Sequence[str]) -> list[str]:
    known = (*QUBIQ, *TUMOURS)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ValueError(f"unknown task {', '.join(unknown)}; choose from {', '.join(known)}")
    used = [name for name in known if any(name in table.datasets for table in tables)]
    wanted = [name for name in used if name in tasks or not tasks]
    if not wanted:
        asked = " and ".join(table.name for table in tables)
        raise ValueError(f"{asked} has no rows for {', '.join(tasks)}; choose from {', '.join(used)}")
    return wanted


def _missing_message(name: str, data: Path, error: str) -> str:
    if name in QUBIQ:
        command = f"semidice prepare qubiq QUBIQ_DIR {data} --task {name}"
    else:
        command = f"semidice prepare {name} {name.upper()}_DIR {data / name}"
    manifest = DatasetFolder(data / name).manifest
    problem = f"{manifest} cannot be used: {error}" if manifest.exists() else f"{manifest} does not exist"
    return f"no dataset {name}: {problem}; make it with: {command}"


def folds_left(variant: Variant) -> int:
    """How many folds of the variant are not finished."""
    folds = variant.recipe.data.fold_numbers
    return len(folds) - len(RunFolder(variant.folder).finished_folds(folds))
