"""Run folders, found from what a user names and checked to be comparable; their case tables joined."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ...data.dataset import Dataset
from ...data.folds import read_folds
from ...metrics.cases import CaseTable, concatenate, read_cases
from ...paths import RunFolder

# what two recipes may differ in without being two methods, and paths, of which the last part is enough
_NOT_SHOWN = ("name", "data.dataset")
_PATHS = ("teacher.run", "model.weights")


@dataclass(frozen=True)
class FoundRuns:
    """Finished runs by the name of their method, the dataset of all of them, and what was left out."""

    runs: dict[str, RunFolder]
    dataset: Path
    notices: tuple[str, ...]


def find_runs(paths: Sequence[Path]) -> FoundRuns:
    """The finished runs in `paths`, each a run folder or a folder of run folders.

    A run that was named must be finished; one that was found in a folder is left out if it is not. Methods
    have the names of their recipes, or of their folders where two recipes are called the same.
    """
    found: list[RunFolder] = []
    notices = []
    for path in paths:
        for run in _runs_in(path):
            if run.cases.is_file():
                found.append(run)
            elif run.path == path:
                raise ValueError(f"{path} is not finished: go on with `semidice train --resume`")
            else:
                notices.append(f"The run {run.path.name} is not finished and is left out.")
    if not found:
        raise ValueError(f"no run in {', '.join(map(str, paths))} is finished: there are no scores to report")
    recipes = [read_options(run) for run in found]
    runs = dict(zip(_method_names(found, recipes), found, strict=True))
    return FoundRuns(runs, _shared_dataset(found, recipes), tuple(notices))


def _runs_in(path: Path) -> list[RunFolder]:
    if RunFolder(path).recipe.is_file():
        return [RunFolder(path)]
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}: name a run folder, or a folder of run folders")
    below = [RunFolder(folder) for folder in sorted(path.iterdir()) if RunFolder(folder).recipe.is_file()]
    if not below:
        raise ValueError(
            f"{path} is neither a run folder nor a folder of run folders: neither it nor a folder in it has "
            f"a {RunFolder(path).recipe.name}"
        )
    return below


def _method_names(runs: Sequence[RunFolder], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [str(recipe.get("name", run.path.name)) for run, recipe in zip(runs, recipes, strict=True)]
    unique = [
        name if names.count(name) == 1 else run.path.name for name, run in zip(names, runs, strict=True)
    ]
    for name in unique:
        if unique.count(name) > 1:
            raise ValueError(f"two runs are called {name}: give one recipe another name, or one folder")
    return unique


def _shared_dataset(runs: Sequence[RunFolder], recipes: Sequence[Mapping[str, Any]]) -> Path:
    first = _dataset_of(runs[0], recipes[0])
    for run, recipe in zip(runs, recipes, strict=True):
        other = _dataset_of(run, recipe)
        if other != first:
            raise ValueError(
                f"{runs[0].path} was trained on {first}, but {run.path} on {other}: only runs on the same "
                "dataset can be compared"
            )
    return first


def _dataset_of(run: RunFolder, recipe: Mapping[str, Any]) -> Path:
    try:
        return Path(recipe["data"]["dataset"])
    except (KeyError, TypeError):
        raise ValueError(f"{run.recipe} does not say data.dataset: it is no recipe of a run") from None


def read_options(run: RunFolder) -> dict[str, Any]:
    """The recipe of a run as it is written; a ValueError names a file that holds none."""
    try:
        options = yaml.safe_load(run.recipe.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {run.recipe}: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{run.recipe} must hold the options of a recipe; got {type(options).__name__}")
    return options


def differing_options(runs: Mapping[str, RunFolder]) -> dict[str, list[str]]:
    """Options that the recipes have different, and what each of them has: a row an option."""
    flat = [dict(_flattened(read_options(run))) for run in runs.values()]
    keys = dict.fromkeys(key for options in flat for key in options if key not in _NOT_SHOWN)
    rows = {key: [_shown_option(key, options.get(key)) for options in flat] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flattened(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown_option(key: str, value: object) -> str:
    if value is None:
        return "–"
    return Path(str(value)).name if key in _PATHS else str(value)


def check_comparable(runs: Mapping[str, RunFolder], dataset: Dataset) -> None:
    """Raise unless all runs validated the same cases of `dataset` in the same folds."""
    folds = {method: read_folds(run.folds, dataset) for method, run in runs.items()}
    first = next(iter(folds))
    for method, fold_of_case in folds.items():
        for case, ours, theirs in zip(dataset.cases, folds[first], fold_of_case, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"{first} and {method} have different folds: case {case.name} was validated in fold "
                    f"{ours} and in fold {theirs}, so their networks have learned from different cases; "
                    "train with the same data.num_folds and data.fold_seed"
                )


def joined_cases(runs: Mapping[str, RunFolder]) -> CaseTable:
    """The case tables of all runs, with the methods called as in `runs`."""
    tables = []
    for method, run in runs.items():
        table = read_cases(run.cases)
        if len(table) == 0:
            raise ValueError(f"{run.cases} has no scores: run `semidice evaluate {run.path}`")
        tables.append(CaseTable({**table.columns, "method": np.full(len(table), method)}))
    return concatenate(tables)
