"""The runs of a report: found, checked to be comparable, and their case tables joined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...data.dataset import Dataset
from ...data.folds import read_folds
from ...metrics.cases import CaseTable, concatenate, read_cases
from ...paths import ComparisonFolder, RunFolder
from ...recipes import flat_options
from ...runs.run import TrainedRun, open_run
from ...runs.scoring import named_units

# options that may differ between runs of the same method
_NOT_SHOWN = ("name", "data.dataset")
# options that are paths, of which the last part is shown
_PATHS = ("teacher.run", "model.weights")
# names of the paper for Dice losses
_LOSS_OF_FORM = {"min": "DML1", "product": "DML2", "relaxed": "SDL"}


@dataclass(frozen=True)
class FoundRuns:
    """Finished runs by the name of their method, and notes on runs left out.

    dataset: of all runs; None without a run. tables: of `semidice compare`, which may have methods of other
    tools.
    """

    runs: dict[str, TrainedRun]
    dataset: Path | None
    notices: tuple[str, ...]
    tables: tuple[Path, ...] = ()


def find_runs(paths: Sequence[Path]) -> FoundRuns:
    """The finished runs in `paths`, each a run folder or a folder of run folders.

    An unfinished run is an error if its own folder is in `paths`; otherwise it is left out. A method has the
    name of its recipe, or the name of its folder if two recipes have the same name.
    """
    runs: list[TrainedRun] = []
    notices = []
    tables = []
    for path in paths:
        if _is_comparison(path):
            tables.append(ComparisonFolder(path).cases)
        for folder in _run_folders(path):
            if folder.cases.is_file():
                runs.append(open_run(folder))
            elif folder.path == path:
                raise ValueError(f"{path} is not finished: continue with `semidice train --resume`")
            else:
                notices.append(f"The run {folder.path.name} is not finished and is left out.")
    if paths and not runs and not tables:
        raise ValueError(
            f"no run in {', '.join(map(str, paths))} is finished, so there are no scores to report: "
            "continue with `semidice train --resume`"
        )
    dataset = _shared_dataset(runs) if runs else None
    named = dict(zip(_method_names(runs), runs, strict=True))
    return FoundRuns(named, dataset, tuple(notices), tuple(tables))


def _is_comparison(path: Path) -> bool:
    """Whether the folder holds the table of `semidice compare`; that of a run has the same name."""
    return ComparisonFolder(path).cases.is_file() and not RunFolder(path).recipe.is_file()


def _run_folders(path: Path) -> list[RunFolder]:
    if RunFolder(path).recipe.is_file():
        return [RunFolder(path)]
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}: name a run folder, or a folder of run folders")
    folders = [RunFolder(folder) for folder in sorted(path.iterdir()) if RunFolder(folder).recipe.is_file()]
    if not folders and not _is_comparison(path):
        raise ValueError(
            f"{path} is neither a run folder nor a folder of run folders: neither it nor a folder in it has "
            f"a {RunFolder(path).recipe.name}"
        )
    return folders


def _method_names(runs: Sequence[TrainedRun]) -> list[str]:
    names = [run.recipe.name for run in runs]
    unique = [
        name if names.count(name) == 1 else run.folder.path.name
        for name, run in zip(names, runs, strict=True)
    ]
    for name in unique:
        if unique.count(name) > 1:
            raise ValueError(f"two runs are called {name}: rename one of the recipes, or one of the folders")
    return unique


def _shared_dataset(runs: Sequence[TrainedRun]) -> Path:
    first = runs[0].recipe.data.dataset
    for run in runs:
        if run.recipe.data.dataset != first:
            raise ValueError(
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
    return Path(str(value)).name if key in _PATHS else str(value)


def check_comparable(runs: Mapping[str, TrainedRun], dataset: Dataset) -> None:
    """Raise unless all runs validated the same cases of `dataset` in the same folds; none is fine."""
    folds = {method: read_folds(run.folder.folds, dataset) for method, run in runs.items()}
    first = next(iter(folds), "")
    for method, fold_of_case in folds.items():
        for case, expected, fold in zip(dataset.cases, folds[first], fold_of_case, strict=True):
            if fold != expected:
                raise ValueError(
                    f"{first} and {method} have different folds: case {case.name} was validated in fold "
                    f"{expected} and in fold {fold}, so their networks have learned from different cases; "
                    "train with the same data.num_folds and data.fold_seed"
                )


def joined_cases(
    runs: Mapping[str, TrainedRun], others: Mapping[str, CaseTable], dataset: Dataset
) -> CaseTable:
    """The case tables of all runs and other methods in one; the runs have their names in `runs`."""
    tables = []
    for method, run in runs.items():
        table = named_units(read_cases(run.folder.cases), dataset)
        if len(table) == 0:
            raise ValueError(f"{run.folder.cases} has no scores: run `semidice evaluate {run.folder.path}`")
        tables.append(CaseTable({**table.columns, "method": np.full(len(table), method)}))
    return concatenate([*tables, *others.values()])
