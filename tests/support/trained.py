"""Run folders as `semidice train` writes them, with a tiny untrained network for each fold."""

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from semidice.data.dataset import Dataset, Unit
from semidice.data.folds import read_folds, split_folds, write_folds
from semidice.data.manifest import PrepareOptions
from semidice.networks.build import Task, build_model
from semidice.networks.checkpoint import checkpoint_tensors, write_checkpoint
from semidice.networks.predictor import network_probability
from semidice.paths import FoldFolder, RunFolder
from semidice.recipes import Recipe, write_recipe
from semidice.runs.predictions import read_prediction, stored_cases, write_prediction
from semidice.runs.run import FoldRun, TrainedRun, open_run, write_dataset_facts
from semidice.runs.scoring import ScoreOptions, score_cases
from semidice.runs.start import start_run
from semidice.statistics.cases import CaseTable, write_cases
from semidice.training.context import Context, Event
from semidice.training.engine import train_fold
from semidice.training.folds import finish_run

SMALL = {"architecture": "small_unet", "encoder": "none", "weights": "none", "options": {"channels": [8, 16]}}
METRICS = ("dice_score", "binarized_dice_score", "calibration_error", "negative_log_likelihood")


def make_run(
    path: Path,
    dataset: Dataset,
    *,
    num_folds: int = 2,
    finished: Sequence[int] | None = None,
    options: dict | None = None,
    metrics: Sequence[str] = METRICS,
    scored: bool = True,
    change: Callable[[nn.Module], object] = lambda network: None,
) -> RunFolder:
    """A run of `num_folds` folds; `finished` (all if None) have weights, stored predictions and scores.

    options: options of `prepare` to store in the facts of the dataset. scored: if False, predictions and
    scores are not written, only the file that marks a fold as finished. change: called with each network.
    """
    run = RunFolder(path)
    path.mkdir(parents=True)
    recipe = recipe_of(dataset, num_folds=num_folds, metrics=metrics)
    write_recipe(recipe, run.recipe)
    folds = split_folds([case.patient for case in dataset.cases], num_folds=num_folds, seed=0)
    described = copy.copy(dataset)
    if options:
        described.manifest = dataset.manifest.model_copy(update={"options": PrepareOptions(**options)})
    write_dataset_facts(run, described, folds)
    facts = json.loads(run.dataset.read_text()) | {"manifest_sha256": dataset.manifest_sha256}
    run.dataset.write_text(json.dumps(facts))
    write_folds(run.folds, dataset, folds)
    for fold in range(num_folds) if finished is None else finished:
        network = new_network(recipe, dataset, seed=fold)
        change(network)
        write_network(run, fold, network)
        if not scored:
            run.fold(fold).cases.write_text("finished")
            continue
        cases = [number for number, case_fold in enumerate(folds) if case_fold == fold]
        for number in cases:
            prob = network_probability(network, normalised(dataset, number, folds), dtype="fp32")
            write_prediction(run.fold(fold).prediction(dataset.cases[number].name), prob[0])
        open_run(run).write_stamp(fold)
        table = score_fold(dataset, cases, run.fold(fold), metrics=metrics, method=recipe.name, fold=fold)
        write_cases(table, run.fold(fold).cases)
    return run


def write_network(run: RunFolder, fold: int, network: nn.Module) -> None:
    """The checkpoint of a fold."""
    progress = {"step": 1, "fold": fold, "run": open_run(run).identity}
    write_checkpoint(run.fold(fold).last, checkpoint_tensors(network), progress)


def score_fold(
    dataset: Dataset,
    cases: Sequence[int],
    folder: FoldFolder,
    *,
    metrics: Sequence[str],
    unit: Unit = "scan",
    tolerance: float = 1.0,
    **options: Any,
) -> CaseTable:
    """The scores of the predictions that are stored in the folder of a fold."""
    read = stored_cases(folder, dataset)
    return score_cases(dataset, cases, read, ScoreOptions(metrics, unit, tolerance), **options)


def recipe_of(dataset: Dataset, *, num_folds: int = 2, metrics: Sequence[str] = METRICS) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "data": {"dataset": str(dataset.folder.path), "num_folds": num_folds},
            "model": {
                "architecture": "small_unet",
                "encoder": "none",
                "weights": "none",
                "options": {"channels": [8, 16], "norm": "group"},
            },
            "validation": {"metrics": list(metrics)},
        }
    )


def new_network(recipe: Recipe, dataset: Dataset, *, seed: int) -> nn.Module:
    """A network of the recipe whose probabilities are not all near 0.5."""
    torch.manual_seed(seed)
    network = build_model(recipe.model, Task(dataset.num_channels, dataset.num_classes))
    with torch.no_grad():
        network.segmentation_head[0].weight.mul_(4)
    return network.eval()


def normalised(dataset: Dataset, number: int, fold_of_case: Sequence[int]) -> torch.Tensor:
    """The image of a case, (1, channels, H, W), as the network of the fold that validates it gets it."""
    mean, std = training_mean_std(dataset, fold_of_case, fold_of_case[number])
    return ((torch.from_numpy(dataset.image(number)) - mean) / std).unsqueeze(0)


def training_mean_std(
    dataset: Dataset, fold_of_case: Sequence[int], fold: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (channels, 1, 1) of all voxels of the training cases of a fold."""
    images = [dataset.image(number) for number, of_case in enumerate(fold_of_case) if of_case != fold]
    voxels = np.concatenate([image.reshape(len(image), -1).astype(np.float64) for image in images], 1)
    mean, std = (
        torch.from_numpy(values).float().view(-1, 1, 1) for values in (voxels.mean(1), voxels.std(1))
    )
    return mean, std


def recipe_for(dataset: Path, **changes: Any) -> Recipe:
    """A recipe that trains six epochs of two folds in a second; changes: whole sections."""
    options = {
        "name": "test",
        "data": {"dataset": str(dataset), "num_folds": 2},
        "model": SMALL,
        "augment": {"scale": [0.8, 1.25], "noise": 0.05},
        "optimiser": {"lr": 0.05},
        "schedule": {"epochs": 6},
        "batch_size": 4,
        "log_every": 2,
        "validation": {"every": 2, "metrics": ["dice_score", "calibration_error"]},
        "workers": 0,
    }
    return Recipe.model_validate(options | changes)


def run_recipe(recipe: Recipe, out: Path) -> tuple[RunFolder, CaseTable]:
    """Train a recipe; the run and its table of scores."""
    started = start_run(recipe, out, resume=False)
    return started.folder, finished_table(started)


def finished_table(run: TrainedRun) -> CaseTable:
    """The scores of a run, whose folds are trained unless they are finished."""
    finish_run(run, Context())
    return run.gather()


class Stopped(BaseException):
    pass


def train_until(fold: FoldRun, step: int) -> None:
    """Train a fold, with a checkpoint after every line of the log, and stop after a step, as a kill does."""

    def stop(event: Event) -> None:
        if event.kind == "step" and event.content.step == step:
            raise Stopped

    with suppress(Stopped):
        train_fold(fold, Context(say=stop, seconds_between_checkpoints=0))


def fold_of(run: TrainedRun, fold: int = 0) -> FoldRun:
    dataset = Dataset(run.recipe.data.dataset)
    return FoldRun(run, dataset, fold, read_folds(run.folder.folds, dataset))


def weights(folder: RunFolder, fold: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder.fold(fold).last)


def assert_same_fold(expected: RunFolder, actual: RunFolder, fold: int = 0) -> None:
    """The weights and the log of two runs are the same to the last bit."""
    expected_weights, actual_weights = weights(expected, fold), weights(actual, fold)
    assert expected_weights.keys() == actual_weights.keys()
    for name, tensor in expected_weights.items():
        assert torch.equal(tensor, actual_weights[name]), name
    assert expected.fold(fold).log.read_text() == actual.fold(fold).log.read_text()


def volume_dice(folder: RunFolder, dataset: Dataset, fold: int) -> dict[str, float]:
    """Dice of each volume of a fold, from the stored predictions, with numpy alone."""
    scores: dict[str, Any] = {}
    for number, case_fold in enumerate(read_folds(folder.folds, dataset)):
        if case_fold == fold:
            case = dataset.cases[number]
            prediction = read_prediction(folder.fold(fold).prediction(case.name))[1] > 0.5
            majority = (dataset.masks(number) == 1).sum(0) >= 2
            sums = scores.setdefault(case.scan.name, np.zeros(2))
            sums += 2 * (prediction & majority).sum(), prediction.sum() + majority.sum()
    return {name: overlap / total for name, (overlap, total) in scores.items()}
