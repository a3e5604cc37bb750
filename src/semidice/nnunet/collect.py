"""nnU-Net's predictions of its held-out cases as a run folder of semidice.

`evaluate`, `compare`, `report` and decisions then treat it like any run. The folds are those of nnU-Net's
splits_final.json. Probabilities are the .npz files that `--npz` stores in fold_K/validation. The networks
stay with nnU-Net: predict new scans with nnUNetv2_predict.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import progress_bar, say
from ..data.dataset import Dataset
from ..data.folds import fold_cases, write_folds
from ..errors import UserError, given, read_json, reading
from ..locks import locked
from ..paths import RunFolder, file_hash
from ..recipes import Recipe, read_recipe, write_recipe
from ..runs.prediction_files import PredictionFiles
from ..runs.predictions import stored_cases, write_prediction
from ..runs.run import open_run, write_dataset_facts
from ..runs.scoring import ScoreOptions, score_cases
from ..statistics.cases import write_cases
from .folders import OPTIONS, NnunetTraining, read_export, read_training


def collect(
    training: NnunetTraining,
    out: Path,
    console: Console,
    *,
    name: str | None = None,
    dataset: Path | None = None,
    metrics: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Write the run folder; returns the folds that nnU-Net has finished.

    out: may hold an earlier collection. dataset: folder of the prepared one, if it was moved, or if nnU-Net's
    dataset was not written by `export`.
    """
    splits = read_json(training.dataset.splits)
    finished = tuple(fold for fold in range(len(splits)) if training.is_validated(fold))
    if not finished:
        raise UserError(
            f"{training.results} has no fold with validated cases: train it with `semidice nnunet train`, or "
            "with nnUNetv2_train and --npz"
        )
    opened = _trained_on(training, dataset)
    fold_of_case = read_splits(training.dataset.splits, opened)
    options = _recipe(training, opened, max(fold_of_case) + 1, finished)
    options["name"] = name or out.resolve().name
    if metrics:
        options["validation"] = {"metrics": tuple(metrics)}
    with given("--name or --metric"):
        recipe = Recipe.model_validate(options)
    folder = RunFolder(out)
    _check_target(folder)
    with locked(folder, "semidice nnunet collect"):
        write_folds(folder.folds, opened, fold_of_case)
        write_dataset_facts(folder, opened, fold_of_case)
        write_recipe(recipe, folder.recipe)
        with progress_bar(console, "collecting", "cases", total=len(opened)) as bar:
            for fold in finished:
                cases = fold_cases(fold_of_case, fold)[1]
                predicted = _predictions(training.validation(fold), opened, cases)
                files, wanted = folder.fold(fold), recipe.validation.metrics
                for number in cases:
                    write_prediction(files.prediction(opened.cases[number].name), predicted.read(number))
                    bar.advance()
                open_run(folder).write_stamp(fold)
                table = score_cases(
                    opened,
                    cases,
                    stored_cases(files, opened),
                    ScoreOptions(wanted),
                    method=recipe.name,
                    fold=fold,
                )
                write_cases(table, files.cases)
        open_run(folder).gather()
    say(console, f"collected folds {', '.join(map(str, finished))} into {out}")
    say(console, f"next: semidice report {shlex.quote(str(out))} -o report.html")
    return finished


def _trained_on(training: NnunetTraining, folder: Path | None) -> Dataset:
    """The prepared dataset with the cases and masks of the training; a UserError if it is another one."""
    raw, export = training.dataset.raw, read_export(training.results)
    if export is not None:
        opened = Dataset(folder or Path(export.dataset))
        is_same = opened.manifest_sha256 == export.manifest_sha256
    elif folder is not None:
        opened = Dataset(folder)
        inputs = [file for scan in opened.manifest.scans for file in scan.inputs.items()]
        masks = [(raw / name, digest) for name, digest in inputs if not name.startswith("imagesTr/")]
        is_same = all(path.is_file() and file_hash(path) == digest for path, digest in masks)
    else:
        raise UserError(
            f"{raw} was not written by `semidice nnunet export`: run `semidice prepare nnunet {raw} data`, "
            "and name the folder it makes with --dataset data"
        )
    if not is_same:
        raise UserError(
            f"{opened.folder.path} is not what {training.results} was trained on, or it was prepared again: "
            "name the right one with --dataset, or train again"
        )
    return opened


def read_splits(path: Path, dataset: Dataset) -> list[int]:
    """The fold in which nnU-Net holds out each case; a UserError if it is not a cross-validation."""
    splits = read_json(path)
    with reading(path):
        held_out = [set(map(str, split["val"])) for split in splits]
    fold_of_case = []
    for case in dataset.cases:
        folds = [fold for fold, names in enumerate(held_out) if case.scan.name in names]
        if len(folds) != 1:
            raise UserError(
                f"{path} holds out case {case.scan.name} in {len(folds)} folds; a cross-validation holds out "
                "every case in one"
            )
        fold_of_case += folds
    return fold_of_case


def _check_target(folder: RunFolder) -> None:
    """A UserError unless the folder is new, empty, or an earlier collection, which may have been killed."""
    folder.check_links()
    if folder.recipe.is_file():
        if read_recipe(folder.recipe, accelerator=None).model.architecture == "nnunet":
            return
        raise UserError(
            f"{folder.path} holds a run of `semidice train`, which would be lost: choose another "
            "folder with -o"
        )
    if folder.foreign_files():
        raise UserError(f"{folder.path} exists and is not a run folder: choose another one with -o")


def _predictions(source: Path, dataset: Dataset, cases: Sequence[int]) -> PredictionFiles:
    """nnU-Net's probabilities of a fold's held-out cases; a UserError if there are none of some case."""
    files = PredictionFiles(source, dataset)
    missing = [dataset.cases[number].name for number in cases if number not in set(files.cases)]
    if missing or files.are_masks:
        raise UserError(
            f"{source} has no probabilities of {missing[0] if missing else 'any case'}: validate again with "
            "nnUNetv2_train --val --npz"
        )
    return files


def _recipe(
    training: NnunetTraining, dataset: Dataset, num_folds: int, finished: tuple[int, ...]
) -> dict[str, Any]:
    """The options of a recipe that says what nnU-Net trained; its network cannot be built here."""
    options = {each: getattr(training, each) for each in ("trainer", "plans", "configuration")}
    recipe: dict[str, Any] = {
        "data": {"dataset": dataset.folder.path, "num_folds": num_folds},
        "model": {"architecture": "nnunet", "encoder": "none", "weights": "none", "options": options},
    }
    if len(finished) < num_folds:
        recipe["data"]["folds"] = finished
    if (training.results / OPTIONS).is_file():
        stored = read_training(training.results)
        recipe["label"] = {"maker": stored.label}
        if stored.uses_raters:
            recipe["loss"] = asdict(stored.loss_options())
        if stored.epochs is not None:
            recipe["schedule"] = {"epochs": stored.epochs}
    return recipe
