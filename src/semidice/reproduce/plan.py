"""What is to be run: which datasets are there, and which trainings the asked tables need on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.manifest import Manifest, read_manifest
from ..paths import DatasetFolder, RunFolder
from ..recipes import shipped_recipes
from ..recipes.grid import Variant
from .figures import QUBIQ, TUMOURS
from .methods import method_of, variant_of
from .tables import PaperTable, paper_tables


@dataclass(frozen=True)
class Plan:
    """Trainings of tables.

    variants: by dataset, teachers before students, for all datasets that were asked for. datasets: those that
    are there. missing: what is not, a message each.
    """

    tables: tuple[PaperTable, ...]
    variants: Mapping[str, tuple[Variant, ...]]
    datasets: Mapping[str, Manifest]
    missing: tuple[str, ...]

    def runnable(self) -> dict[str, tuple[Variant, ...]]:
        """Trainings on the datasets that are there."""
        return {name: self.variants[name] for name in self.datasets if self.variants[name]}


def chosen_tables(table: str) -> tuple[PaperTable, ...]:
    """The table of that name, or all of them."""
    tables = paper_tables()
    if table == "all":
        return tuple(tables.values())
    if table not in tables:
        raise ValueError(
            f"the paper has no table {table!r}; there are {', '.join(tables)}, or all of them: all"
        )
    return (tables[table],)


def make_plan(
    tables: Sequence[PaperTable],
    *,
    data: Path,
    out: Path,
    tasks: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Plan:
    """Everything the tables need on their datasets, or on those named in `tasks`.

    overrides: KEY=VALUE over every recipe.
    """
    names = _wanted(tables, tasks)
    datasets, missing = {}, []
    for name in names:
        try:
            datasets[name] = read_manifest(data / name)
        except ValueError as error:
            missing.append(_missing_message(name, data, str(error)))
    methods = {name: _methods_on(tables, name) for name in names}
    known = shipped_recipes()
    lacking: dict[str, list[str]] = {}
    variants: dict[str, tuple[Variant, ...]] = {}
    for name in names:
        there = [method for method in methods[name] if method_of(method, name).recipe in known]
        for method in methods[name]:
            if method not in there:
                methods_of_recipe = lacking.setdefault(method_of(method, name).recipe, [])
                methods_of_recipe += [method] if method not in methods_of_recipe else []
        variants[name] = tuple(
            variant_of(method, name, data=data, out=out, overrides=overrides) for method in there
        )
    missing += [
        f"this semidice ships no recipe {recipe}: {', '.join(without)} cannot be run, their cells stay empty"
        for recipe, without in lacking.items()
    ]
    return Plan(tuple(tables), variants, datasets, tuple(missing))


def _wanted(tables: Sequence[PaperTable], tasks: Sequence[str]) -> list[str]:
    known = (*QUBIQ, *TUMOURS)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ValueError(f"there is no task {', '.join(unknown)}; there are {', '.join(known)}")
    used = [name for name in known if any(name in table.datasets for table in tables)]
    wanted = [name for name in used if name in tasks or not tasks]
    if not wanted:
        asked = " and ".join(table.name for table in tables)
        raise ValueError(f"{asked} has nothing on {', '.join(tasks)}; it is about {', '.join(used)}")
    return wanted


def _methods_on(tables: Sequence[PaperTable], dataset: str) -> list[str]:
    """Of all tables, each once, teachers first."""
    names = [name for table in tables if dataset in table.datasets for name in table.methods(dataset)]
    teachers = [name for name in names if any(method_of(other, dataset).teacher == name for other in names)]
    return list(dict.fromkeys([*teachers, *names]))


def _missing_message(name: str, data: Path, error: str) -> str:
    raw, out, task = ("LITS_DIR" if name == "lits" else "KITS_DIR"), data / name, ""
    source = name
    if name in QUBIQ:
        source, raw, out, task = "qubiq", "QUBIQ_DIR", data, f" --task {name}"
    looked_for = DatasetFolder(data / name).manifest
    what = f"{looked_for} cannot be used: {error}" if looked_for.exists() else f"looked for {looked_for}"
    return f"no dataset {name}: {what}; make it with: semidice prepare {source} {raw} {out}{task}"


def folds_left(variant: Variant) -> int:
    """How many folds of the variant are not finished."""
    folds = variant.recipe.data.fold_numbers
    return len(folds) - len(RunFolder(variant.folder).finished_folds(folds))
