"""nnU-Net's predictions of its held-out cases as a run folder of semidice.

`evaluate`, `compare`, `report` and decisions then treat it like any run. The folds are those of nnU-Net's
splits_final.json. Probabilities are the .npz files that `--npz` stores in fold_K/validation. The networks
stay with nnU-Net: predict new scans with nnUNetv2_predict.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from ..data.folds import fold_cases, write_folds
from ..limits import read_json
from ..locks import FolderLock
from ..metrics.cases import concatenate, read_cases, write_cases
from ..paths import FoldFolder, RunFolder
from ..recipes import Recipe, read_recipe, write_recipe
from ..runs.prediction_files import PredictionFiles
from ..runs.predictions import write_prediction
from ..runs.run import manifest_digest, write_dataset_facts
from ..runs.scoring import inapplicable_metrics, score_fold
from .folders import TRAINER_PREFIX, NnunetDataset
from .options import read_options


def collect_run(
    source: NnunetDataset,
    dataset: Dataset,
    out: Path,
    *,
    trainer: str,
    plans: str,
    configuration: str,
    name: str,
    metrics: tuple[str, ...] | None = None,
    on_case: Callable[[], object] = lambda: None,
) -> tuple[int, ...]:
    """Write the run folder; returns the folds that nnU-Net has finished.

    out: may hold an earlier collection. dataset: the one that was exported.
    """
    if manifest_digest(dataset.manifest) != source.read_record().manifest_sha256:
        raise ValueError(
            f"{dataset.folder.path} is not the dataset that {source.raw} was exported from, or it was "
            "prepared again: export and train again, or name the right one with --dataset"
        )
    results = source.results(trainer, plans, configuration)
    fold_of_case = read_splits(source.splits, dataset)
    num_folds = max(fold_of_case) + 1
    finished = tuple(fold for fold in range(num_folds) if is_validated(results, fold))
    if not finished:
        raise ValueError(
            f"{results} has no fold with validated cases: train it with `semidice nnunet train`, or with "
            "nnUNetv2_train and --npz"
        )
    recipe = _recipe(source, dataset, trainer, plans, configuration, name, num_folds, finished)
    if metrics is not None:
        changed = recipe.validation.model_copy(update={"metrics": metrics})
        recipe = recipe.model_copy(update={"validation": changed})
    folder = RunFolder(out)
    _check_target(folder)
    with FolderLock(folder, "semidice nnunet collect"):
        write_folds(folder.folds, dataset, fold_of_case)
        write_dataset_facts(folder, dataset, fold_of_case)
        for fold in finished:
            cases = fold_cases(fold_of_case, fold)[1]
            _collect_fold(results, folder.fold(fold), dataset, cases, recipe, fold, on_case)
        write_recipe(recipe, folder.recipe)
        tables = (read_cases(folder.fold(fold).cases) for fold in finished)
        write_cases(concatenate(tables).sorted(), folder.cases)
    return finished


def is_validated(results: Path, fold: int | str) -> bool:
    """Whether nnU-Net has trained a fold and predicted its held-out cases."""
    return (results / f"fold_{fold}" / "validation" / "summary.json").is_file()


def _check_target(folder: RunFolder) -> None:
    """A ValueError unless the folder is new, empty, or an earlier collection."""
    if not folder.path.exists():
        return
    if folder.recipe.is_file():
        if read_recipe(folder.recipe, accelerator=None).model.architecture == "nnunet":
            return
        raise ValueError(
            f"{folder.path} holds a run of `semidice train`, which would be lost: choose another "
            "folder with -o"
        )
    if any(folder.path.iterdir()):
        raise ValueError(f"{folder.path} exists and is not a run folder: choose another one with -o")


def _collect_fold(
    results: Path,
    folder: FoldFolder,
    dataset: Dataset,
    cases: Sequence[int],
    recipe: Recipe,
    fold: int,
    on_case: Callable[[], object],
) -> None:
    """Store the probabilities of a fold's held-out cases, and score them."""
    source = results / f"fold_{fold}" / "validation"
    files = PredictionFiles(source, dataset)
    missing = [dataset.cases[number].name for number in cases if number not in set(files.cases)]
    if missing or files.are_masks:
        raise ValueError(
            f"{source} has no probabilities of {missing[0] if missing else 'any case'}: validate again with "
            "nnUNetv2_train --val --npz"
        )
    for number in cases:
        write_prediction(folder.prediction(dataset.cases[number].name), files.read(number))
        on_case()
    metrics = recipe.validation.metrics
    left_out = inapplicable_metrics(dataset, metrics)
    wanted = [metric for metric in metrics if metric not in left_out]
    write_cases(
        score_fold(dataset, cases, folder, metrics=wanted, method=recipe.name, fold=fold), folder.cases
    )


def read_splits(path: Path, dataset: Dataset) -> list[int]:
    """The fold in which nnU-Net holds out each case; a ValueError if it is not a cross-validation."""
    try:
        splits = read_json(path)
        held_out = [set(map(str, split["val"])) for split in splits]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read nnU-Net's folds from {path}: {error}") from error
    fold_of_case = []
    for case in dataset.cases:
        folds = [fold for fold, names in enumerate(held_out) if case.name in names]
        if len(folds) != 1:
            raise ValueError(
                f"{path} holds out case {case.name} in {len(folds)} folds; a cross-validation holds out "
                "every case in one"
            )
        fold_of_case.append(folds[0])
    return fold_of_case


def _recipe(
    source: NnunetDataset,
    dataset: Dataset,
    trainer: str,
    plans: str,
    configuration: str,
    name: str,
    num_folds: int,
    finished: tuple[int, ...],
) -> Recipe:
    """A recipe that says what nnU-Net trained; its network cannot be built here."""
    data: dict[str, Any] = {"dataset": dataset.folder.path, "num_folds": num_folds}
    if len(finished) < num_folds:
        data["folds"] = finished
    options: Mapping[str, Any] = {"trainer": trainer, "plans": plans, "configuration": configuration}
    recipe: dict[str, Any] = {
        "name": name,
        "data": data,
        "model": {"architecture": "nnunet", "encoder": "none", "weights": "none", "options": options},
    }
    if trainer.startswith(TRAINER_PREFIX):
        stored = read_options(source.preprocessed, trainer)
        recipe["label"] = stored.label.model_dump()
        if stored.loss is not None:
            recipe["loss"] = stored.loss.model_dump()
        if stored.epochs is not None:
            recipe["schedule"] = {"epochs": stored.epochs}
    return Recipe.model_validate(recipe)
