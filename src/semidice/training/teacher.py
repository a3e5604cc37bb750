"""The teacher of a fold: the same fold of another run, which never saw the student's validation cases."""

import json

import torch
from torch import nn

from ..calibration.calibrators import TemperatureScaling
from ..data.batches import Batches, WholeCases
from ..data.folds import read_folds
from ..losses.distillation import Teacher
from ..paths import RunFolder, write_text
from ..runs.run import FoldRun, TrainedRun, open_run


def load_teacher(fold_run: FoldRun, batches: Batches, device: torch.device) -> Teacher | None:
    """The frozen, calibrated teacher of `recipe.teacher`; None if the recipe has no teacher."""
    options = fold_run.recipe.teacher
    if options is None:
        return None
    if not RunFolder(options.run).recipe.is_file():
        raise ValueError(
            f"there is no teacher run in {options.run}: train it first, or give its folder with "
            "--set teacher.run=..."
        )
    teacher_run = open_run(options.run)
    _check_teacher(teacher_run, fold_run)
    network = teacher_run.network(fold_run.fold, device=device)
    temperature = options.temperature
    if options.calibration == "temperature" and temperature == "fit":
        temperature = _fit_temperature(network, fold_run, batches)
        fold_run.folder.path.mkdir(parents=True, exist_ok=True)
        write_text(fold_run.folder.teacher, json.dumps({"temperature": temperature}) + "\n")
    not_of_teacher = {"run", "temperature", "label_weight", "teacher_weight", "terms"}
    temperature = 1.0 if isinstance(temperature, str) else temperature
    teacher = Teacher(network, temperature=temperature, **options.model_dump(exclude=not_of_teacher))
    return teacher.to(device)


def _check_teacher(teacher: TrainedRun, student: FoldRun) -> None:
    """A ValueError unless the teacher has the student's folds, is finished, and gives logits."""
    path = teacher.folder.path
    # with other folds, the teacher would have seen cases that its student is scored on
    if read_folds(teacher.folder.folds, student.dataset) != list(student.fold_of_case):
        raise ValueError(
            f"the teacher in {path} has other folds than {student.run.folder.path}: it would have seen cases "
            "that its student is scored on; train both with the same dataset, data.num_folds and "
            "data.fold_seed"
        )
    if not teacher.folder.fold(student.fold).is_finished:
        raise ValueError(
            f"fold {student.fold} of the teacher in {path} is not finished: continue it first, "
            "with `semidice train --resume`"
        )
    system = teacher.recipe.system.name
    if system != "standard":
        raise ValueError(
            f"the teacher in {path} has system.name {system}, which has no logits to calibrate; "
            "a teacher needs system.name standard"
        )


def _fit_temperature(network: nn.Module, fold_run: FoldRun, batches: Batches) -> float:
    """The temperature of maximum likelihood on the training cases, with the labels of the student."""
    scaling = TemperatureScaling(activation="softmax")
    with torch.no_grad():
        for batch in WholeCases(batches.storage, batches.cases, batch_size=fold_run.recipe.batch_size):
            target = batches.labels(batch)
            scaling.partial_fit(network(batch.image).float(), target, valid=batch.valid)
    return scaling.temperature
