"""A run: train every fold, predict every case with the network that never saw its patient, score all cases.

The run folder is the state. A fold that has scores is finished and is not trained again. A fold that has a
checkpoint continues from it. The case table of the run joins the tables of its finished folds.
"""

import json
import os
import platform
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from .. import __version__
from ..data.batches.feed import whole_cases
from ..data.batches.storage import shared_storage
from ..data.dataset import Dataset, ScoredUnit, open_dataset
from ..data.folds import read_folds, split_dataset, write_folds
from ..errors import UserError
from ..locks import locked
from ..networks.checkpoint import CheckpointWriter
from ..networks.predictor import Predictor
from ..paths import RunFolder, find_run, run_name, write_text
from ..recipes import Recipe, differing_keys, read_recipe, with_stored_choices, write_recipe
from ..runs.predictions import write_prediction
from ..runs.run import (
    MAY_DIFFER,
    FoldRun,
    TrainedRun,
    manifest_digest,
    mirrored_axes,
    read_dataset_facts,
    volume_problem,
    write_dataset_facts,
)
from ..runs.scoring import score_fold
from ..statistics.cases import CaseTable, concatenate, in_order, read_cases, write_cases
from .engine import StepStatus, train_fold
from .log import Logger
from .phases import PhaseClock

# files of predictions that are compressed and written at the same time
_NUM_WRITERS = 4

FoldPhase = Literal["training", "predicting", "finished"]


def start_run(recipe: Recipe, out: Path, *, resume: bool, whole: bool = True) -> TrainedRun:
    """The run of a recipe in the folder `out`, which is created or, with `resume`, continued.

    A ValueError says so if the folder holds the run of another recipe, or other files.
    whole: False if other processes may work on folds of the run.
    """
    folder = RunFolder(out)
    folder.check_links()
    dataset = open_dataset(recipe.data.dataset)
    stored = None
    if folder.recipe.exists():
        stored = read_recipe(folder.recipe, accelerator=None)
        recipe = with_stored_choices(recipe, stored)
        _check_same_recipe(recipe, stored, folder)
        if not resume:
            raise UserError(f"{out} already holds this run: continue it with --resume, or remove the folder")
        _check_same_dataset(dataset, folder)
    else:
        _create_run_folder(recipe, dataset, folder)
    # other processes may be reading the file
    if whole or recipe != stored:
        # written last: a folder that has a recipe is a run
        write_recipe(recipe, folder.recipe)
    return TrainedRun(folder, recipe, read_dataset_facts(folder))


def _check_same_recipe(recipe: Recipe, stored: Recipe, folder: RunFolder) -> None:
    may_differ = (*MAY_DIFFER, "teacher.run") if _teacher_has_moved(stored, recipe) else MAY_DIFFER
    different = [key for key in differing_keys(recipe, stored) if key not in may_differ]
    if not different:
        return
    hint = ""
    if stored.teacher and different == ["teacher.run"]:
        hint = f"if {stored.teacher.run} is the same teacher, correct {folder.recipe}; otherwise "
    raise UserError(
        f"{folder.path} holds a run of another recipe, which differs in {', '.join(different)}; "
        f"{hint}choose another folder with --out, or remove this one"
    )


def _check_same_dataset(dataset: Dataset, folder: RunFolder) -> None:
    """A ValueError if the dataset is not the one that the run was started with, although names may agree."""
    facts = read_dataset_facts(folder)
    if manifest_digest(dataset.manifest) != facts.manifest_sha256:
        raise UserError(
            f"{dataset.folder.path} is not the dataset that {folder.path} was started with, or it was "
            "prepared again since: name the right one with --set data.dataset=..., or start a new run with "
            "--out"
        )


def _teacher_has_moved(stored: Recipe, recipe: Recipe) -> bool:
    """Whether the stored teacher folder no longer exists and the new one is a run of the same name."""
    if stored.teacher is None or recipe.teacher is None:
        return False
    old, new = stored.teacher.run, find_run(recipe.teacher.run).path
    # os.path.exists returns False for a path that cannot be read here; Path.exists would raise
    return run_name(old) == run_name(new) and not os.path.exists(old) and RunFolder(new).recipe.is_file()


def _create_run_folder(recipe: Recipe, dataset: Dataset, folder: RunFolder) -> None:
    out = folder.path
    foreign = folder.foreign_files()
    if foreign:
        raise UserError(
            f"{out} exists and is not a run folder: it has {foreign[0].name}; choose another one with --out"
        )
    problem = volume_problem(dataset)
    if problem is not None:
        raise UserError(problem)
    # errors now, and not after the training
    weights = recipe.loss.class_weight
    if weights is not None and len(weights) != dataset.num_classes:
        raise UserError(
            f"loss.class_weight needs one number for each of the {dataset.num_classes} classes; got {weights}"
        )
    mirrored_axes(recipe, len(dataset.cases[0].shape))
    folds = split_dataset(dataset, num_folds=recipe.data.num_folds, seed=recipe.data.fold_seed)
    write_folds(folder.folds, dataset, folds)
    write_dataset_facts(folder, dataset, folds)
    write_text(folder.versions, json.dumps(versions(), indent=2) + "\n")


def versions() -> dict[str, str | None]:
    """Versions and devices on which results can depend; None for what is missing on this machine."""
    packages = ("numpy", "segmentation-models-pytorch", "timm", "lightning-fabric", "triton")
    has_gpu = torch.cuda.is_available()
    return {
        "semidice": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version_of(package) for package in packages},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if has_gpu else None,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "cpu": _cpu_name(),
        "system": platform.platform(),
    }


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The model of the processor; only Linux has a file with it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def cross_validate(
    run: TrainedRun,
    fabric: Fabric,
    *,
    on_step: Callable[[StepStatus], object] = lambda _: None,
    on_phase: Callable[[int, FoldPhase], object] = lambda _, __: None,
    loggers: Mapping[str, Callable[[FoldRun], Logger]] | None = None,
    on_warning: Callable[[str], object] = print,
) -> CaseTable | None:
    """Train the folds that are not finished and return the case table of the run; None unless rank 0.

    on_phase(fold, phase) is called when a fold starts to be trained or predicted, and when it is finished.
    loggers, on_warning: see `TrainingLog`.
    """
    dataset = open_dataset(run.recipe.data.dataset)
    fold_of_case = read_folds(run.folder.folds, dataset)
    for fold in run.recipe.data.fold_numbers:
        fold_run = FoldRun(run, dataset, fold, fold_of_case)
        # only the first process writes; a worker of a grid may be at this fold
        with locked(fold_run.folder, "semidice train") if fabric.is_global_zero else nullcontext():
            finish_fold(
                fold_run,
                fabric,
                PhaseClock(),
                on_step=on_step,
                on_phase=on_phase,
                loggers=loggers,
                on_warning=on_warning,
            )
    return _gathered(run, fabric)


def finish_fold(
    fold_run: FoldRun,
    fabric: Fabric,
    clock: PhaseClock,
    *,
    on_step: Callable[[StepStatus], object],
    on_phase: Callable[[int, FoldPhase], object],
    loggers: Mapping[str, Callable[[FoldRun], Logger]] | None = None,
    on_warning: Callable[[str], object] = print,
) -> None:
    """Train, predict and score a fold, unless it is finished, and store the seconds of the clock."""
    fold, folder = fold_run.fold, fold_run.folder
    if not folder.is_finished:
        on_phase(fold, "training")
        # the last checkpoint is written while cases are predicted
        with closing(CheckpointWriter()) as writer:
            network = train_fold(
                fold_run,
                fabric,
                on_step=on_step,
                loggers=loggers,
                on_warning=on_warning,
                clock=clock,
                writer=writer,
            )
            # several processes have wrapped it
            in_memory = fabric.world_size == 1
            if not in_memory:
                with clock.phase("checkpoints"):
                    writer.close()
            fabric.barrier()
            on_phase(fold, "predicting")
            with clock.phase("prediction"):
                _predict(fold_run, fabric, network if in_memory else None)
            with clock.phase("checkpoints"):
                writer.close()
        with clock.phase("scoring"):
            _score(fold_run, fabric)
        fabric.barrier()
        if fabric.is_global_zero:
            clock.store(folder)
    on_phase(fold, "finished")


def _gathered(run: TrainedRun, fabric: Fabric) -> CaseTable | None:
    """The case table of the finished folds, which is also written; None unless rank 0."""
    if not fabric.is_global_zero:
        return None
    table = in_order(concatenate(read_cases(run.folder.fold(fold).cases) for fold in run.finished_folds))
    write_cases(table, run.folder.cases)
    return table


def predict_cases(
    run: TrainedRun,
    fold: int,
    dataset: Dataset,
    cases: Sequence[int],
    *,
    device: torch.device,
    flips: bool | None = None,
    network: nn.Module | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """The number and the class probabilities (C, *space) of each case, by the network of a fold.

    flips: mean over mirrored images; None takes `validation.flips`. network: of the last checkpoint; None
    loads it.
    """
    recipe = run.recipe
    axes = mirrored_axes(recipe, len(dataset.cases[0].shape), flips=flips)
    network = run.network(fold, device=device) if network is None else network.eval()
    predictor = Predictor(network, dtype=recipe.precision.dtype, flips=axes)
    storage = shared_storage(dataset, device, load=False)
    mean_std = run.facts.mean_std(fold)
    return predictor.cases(whole_cases(storage, cases, mean_std, batch_size=recipe.batch_size))


def _own_units(fold_run: FoldRun, fabric: Fabric) -> list[ScoredUnit]:
    """The scans of the fold, or slices, that this process predicts and scores."""
    units = fold_run.dataset.units(fold_run.validation_cases, fold_run.recipe.validation.unit)
    return units[fabric.global_rank :: fabric.world_size]


def _predict(fold_run: FoldRun, fabric: Fabric, network: nn.Module | None) -> None:
    """Predict and store the validation cases. Each process takes some scans; threads write the files.

    network: with the weights of the last checkpoint; None loads it.
    """
    dataset, folder = fold_run.dataset, fold_run.folder
    cases = [number for unit in _own_units(fold_run, fabric) for number in unit.cases]
    predictions = predict_cases(
        fold_run.run, fold_run.fold, dataset, cases, device=fabric.device, network=network
    )
    with ThreadPoolExecutor(_NUM_WRITERS) as threads:
        writing: deque[Future[None]] = deque()
        for number, prob in predictions:
            path = folder.prediction(dataset.cases[number].name)
            writing.append(threads.submit(write_prediction, path, prob))
            if len(writing) > 4 * _NUM_WRITERS:
                writing.popleft().result()
        for each in writing:
            each.result()


def _score(fold_run: FoldRun, fabric: Fabric) -> None:
    """Score the stored predictions of the validation cases. Each process takes those that it predicted."""
    recipe = fold_run.recipe
    # `score_fold` returns the scores of all processes
    table = score_fold(
        fold_run.dataset,
        [number for unit in _own_units(fold_run, fabric) for number in unit.cases],
        fold_run.folder,
        metrics=recipe.validation.metrics,
        method=recipe.name,
        fold=fold_run.fold,
        unit=recipe.validation.unit,
        tolerance=recipe.validation.tolerance,
    )
    if fabric.is_global_zero:
        write_cases(table, fold_run.folder.cases)
