"""The runs of a report, and methods of other tools: found, checked to be comparable, tables joined."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..data.dataset import Dataset
from ..data.folds import read_folds
from ..errors import UserError, listing
from ..paths import ComparisonFolder, MethodFolder, RunFolder, method_path, run_name
from ..recipes import flat_options
from ..runs.run import TrainedRun, open_run
from ..runs.scoring import fingerprint
from ..statistics.cases import CaseTable, concatenate, methods_of, read_cases

# options that may differ between runs of the same method
_NOT_SHOWN = ("name", "data.dataset")
# the finished runs of each method with several seeds, by seed
SeedRuns = Mapping[str, Mapping[int, TrainedRun]]
# options that are paths, of which the last part is shown
_PATHS = ("teacher.run", "model.weights")
# names of the paper for Dice losses
_LOSS_OF_FORM = {"min": "DML1", "product": "DML2", "relaxed": "SDL"}


@dataclass(frozen=True)
class FoundRuns:
    """Finished runs by the name of their method, and notes on runs left out.

    dataset: of all runs; None without a run. tables: of `semidice compare`, which may have methods of other
    tools. seeds: all finished runs of the methods with several seeds; `runs` has one of them, with the first
    seed that all these methods have.
    """

    runs: dict[str, TrainedRun]
    dataset: Path | None
    notices: tuple[str, ...]
    tables: tuple[Path, ...] = ()
    seeds: SeedRuns = field(default_factory=dict)


def find_runs(paths: Sequence[Path]) -> FoundRuns:
    """The finished runs in `paths`, each a run folder, the folder of a method with seeds, or one of such.

    An unfinished run is an error if its own folder is in `paths`; otherwise it is left out. A method has the
    name of its recipe, or the name of its folder if two recipes have the same name.
    """
    runs: list[TrainedRun] = []
    seeds: dict[Path, dict[int, TrainedRun]] = {}
    notices = []
    tables = []
    for path in paths:
        if _is_comparison(path):
            tables.append(ComparisonFolder(path).cases)
        for folder in _run_folders(path):
            method = MethodFolder(method_path(folder.path))
            if folder.cases.is_file() and folder.path != path and len(method.seeds()) > 1:
                run = open_run(folder)
                seeds.setdefault(method.path, {})[run.recipe.seed] = run
            elif folder.cases.is_file():
                runs.append(open_run(folder))
            elif folder.path == path:
                raise UserError(f"{path} is not finished: continue with `semidice train --resume`")
            else:
                notices.append(f"The run {run_name(folder.path)} is not finished and is left out.")
    folder_names = [run_name(run.folder.path) for run in runs] + [path.name for path in seeds]
    shared = set.intersection(*(set(of_method) for of_method in seeds.values())) if seeds else set()
    runs += [of_method[min(shared or of_method)] for of_method in seeds.values()]
    if paths and not runs and not tables:
        raise UserError(
            f"no run in {', '.join(map(str, paths))} is finished, so there are no scores to report: "
            "continue with `semidice train --resume`"
        )
    every = [*runs, *(run for of_method in seeds.values() for run in of_method.values())]
    dataset = _shared_dataset(every) if runs else None
    names = _method_names(runs, folder_names)
    # the methods with several seeds are the last ones
    of_methods = dict(zip(names[len(names) - len(seeds) :], seeds.values(), strict=True))
    named = dict(zip(names, runs, strict=True))
    return FoundRuns(named, dataset, tuple(notices), tuple(tables), of_methods)


def _is_comparison(path: Path) -> bool:
    """Whether the folder holds the table of `semidice compare`; that of a run has the same name."""
    return ComparisonFolder(path).cases.is_file() and not RunFolder(path).recipe.is_file()


def _run_folders(path: Path) -> list[RunFolder]:
    if RunFolder(path).recipe.is_file():
        return [RunFolder(path)]
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: name a run folder, or a folder of run folders")
    folders = list(MethodFolder(path).seeds().values())
    for folder in sorted(path.iterdir()) if not folders else ():
        is_run = RunFolder(folder).recipe.is_file()
        folders += [RunFolder(folder)] if is_run else MethodFolder(folder).seeds().values()
    if not folders and not _is_comparison(path):
        raise UserError(
            f"{path} is neither a run folder nor a folder of run folders: neither it nor a folder in it has "
            f"a {RunFolder(path).recipe.name}"
        )
    return folders


def _method_names(runs: Sequence[TrainedRun], folder_names: Sequence[str]) -> list[str]:
    names = [run.recipe.name for run in runs]
    unique = [
        name if names.count(name) == 1 else folder_name
        for name, folder_name in zip(names, folder_names, strict=True)
    ]
    for name in unique:
        if unique.count(name) > 1:
            raise UserError(f"two runs are called {name}: rename one of the recipes, or one of the folders")
    return unique


def _shared_dataset(runs: Sequence[TrainedRun]) -> Path:
    first = runs[0].recipe.data.dataset
    for run in runs:
        if run.recipe.data.dataset != first:
            raise UserError(
                f"{runs[0].folder.path} was trained on {first}, but {run.folder.path} on "
                f"{run.recipe.data.dataset}: only runs on the same dataset can be compared"
            )
    return first


def differing_options(runs: Mapping[str, TrainedRun]) -> dict[str, list[str]]:
    """One row per option in which the recipes differ: its value in each of them."""
    recipes = [flat_options(run.recipe) for run in runs.values()]
    keys = dict.fromkeys(key for options in recipes for key in options if key not in _NOT_SHOWN)
    rows = {key: [_option_text(key, options.get(key)) for options in recipes] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _option_text(key: str, value: object) -> str:
    if value is None:
        return "–"
    if key == "loss.form" and value in _LOSS_OF_FORM:
        return f"{value} ({_LOSS_OF_FORM[str(value)]})"
    return method_path(Path(str(value))).name if key in _PATHS else str(value)


def check_comparable(
    runs: Mapping[str, TrainedRun], dataset: Dataset, seeds: SeedRuns = MappingProxyType({})
) -> None:
    """Raise unless all runs validated the same cases of `dataset` in the same folds; none is fine."""
    of_seeds = {
        f"{method}/seed_{seed}": run for method, of_method in seeds.items() for seed, run in of_method.items()
    }
    runs = {**{method: run for method, run in runs.items() if method not in seeds}, **of_seeds}
    for run in runs.values():
        run.check_dataset(dataset)
        # the page reads the predictions, too; a run without any still has its scores
        run.stamps(whole=run.folder.has_predictions())
    folds = {method: read_folds(run.folder.folds, dataset) for method, run in runs.items()}
    first = next(iter(folds), "")
    for method, fold_of_case in folds.items():
        for case, expected, fold in zip(dataset.cases, folds[first], fold_of_case, strict=True):
            if fold != expected:
                raise UserError(
                    f"{first} and {method} have different folds: case {case.name} was validated in fold "
                    f"{expected} and in fold {fold}, so their networks have learned from different cases; "
                    "train with the same data.num_folds and data.fold_seed"
                )


def joined_cases(
    runs: Mapping[str, TrainedRun],
    others: Mapping[str, CaseTable],
    dataset: Dataset,
    seeds: SeedRuns = MappingProxyType({}),
) -> CaseTable:
    """The case tables of all runs and other methods in one; the runs have their names in `runs`."""
    tables = []
    for method, run in runs.items():
        if method not in seeds:
            tables.append(_cases_of(run, method, dataset))
        for seed, of_seed in seeds.get(method, {}).items():
            tables.append(_cases_of(of_seed, method, dataset).assign(seed=seed))
    return concatenate([*tables, *others.values()])


def _cases_of(run: TrainedRun, method: str, dataset: Dataset) -> CaseTable:
    table = read_cases(run.folder.cases)
    if len(table) == 0:
        raise UserError(f"{run.folder.cases} has no scores: run `semidice evaluate {run.folder.path}`")
    return table.assign(method=method)


def read_other_methods(
    paths: Sequence[Path], dataset: Dataset, taken: Collection[str]
) -> dict[str, CaseTable]:
    """The table of each method in the files; a ValueError for a name that is taken or a foreign case."""
    tables: dict[str, CaseTable] = {}
    for path in paths:
        table = read_cases_of(dataset, path, "semidice evaluate --predictions -o")
        for method in methods_of(table):
            if method in tables or method in taken:
                raise UserError(
                    f"{path} has scores of {method}, but another method has this name: choose another one "
                    "with `semidice evaluate --name`"
                )
            tables[method] = table[table["method"] == method]
    return tables


def compared_methods(path: Path, dataset: Dataset, taken: Collection[str]) -> dict[str, CaseTable]:
    """The methods of other tools in a table of `semidice compare`, without those whose names are taken.

    They have no folds; the others are of runs.
    """
    table = read_cases_of(dataset, path, "semidice evaluate --predictions -o")
    of_methods = {method: table[table["method"] == method] for method in methods_of(table)}
    return {
        method: rows
        for method, rows in of_methods.items()
        if method not in taken and (rows["fold"] == -1).all()
    }


def read_cases_of(dataset: Dataset, path: Path, command: str) -> CaseTable:
    """The case table in a file; a ValueError if it is of another dataset, or tells another patient of a case.

    A table without a patient takes that of the dataset.

    command: what writes the file, for the message.
    """
    if not path.is_file():
        raise UserError(f"there is no case table {path}: write it with `{command}`")
    table = read_cases(path)
    others = table[~table["dataset"].isin(["", fingerprint(dataset)])]
    if len(others):
        raise UserError(
            f"{path} has scores of {others['method'].iloc[0]} on another dataset than {dataset.folder.path}, "
            f"or before it was prepared again, such as case {others['case'].iloc[0]}: score the predictions "
            f"on this one with `{command}`, or name the other dataset"
        )
    if (table["patient"] == table["case"]).all():
        # no column: patients that the dataset knows must not count as independent cases
        known = _patients(dataset)
        table["patient"] = table["case"].map(lambda case: known.get(case, case))
    check_cases(dict(zip(table["case"], table["patient"], strict=True)), dataset, path, command)
    return table


def _patients(dataset: Dataset) -> dict[str, str]:
    """The patient of each case and scan."""
    known = {case.name: case.patient for case in dataset.cases}
    return known | {scan.name: scan.patient for scan in dataset.manifest.scans}


def check_cases(patient_of: Mapping[str, str], dataset: Dataset, path: Path, command: str) -> None:
    """Raise unless the cases in a file are scans or slices of the dataset, and of the same patients there."""
    known = _patients(dataset)
    foreign = sorted(case for case in patient_of if case not in known)
    if foreign:
        raise UserError(f"{path} has {listing(foreign, 'case')} that {dataset.folder.path} does not have")
    for case, patient in patient_of.items():
        if patient != known[case]:
            raise UserError(
                f"{path} says that case {case} is of patient {patient}, but {dataset.folder.path} says "
                f"{known[case]}: write the file again with `{command}`"
            )
