"""The teacher of a fold: the same fold of another run, which never saw the student's validation cases.

Its temperature is fitted where a teacher predicts cases that it was not trained on: the networks of the other
folds on their validation cases, all of which are training cases of the student. So the student's validation
cases take no part in the fit. But the labels of these cases trained the other networks: one number passes on
what they learned from them.
"""

import json
from pathlib import Path

import numpy as np
import torch

from ..calibration.temperature import TemperatureScaling
from ..data.batches import Batches, WholeCases
from ..data.folds import read_folds
from ..limits import read_json
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
        temperature = _fitted_temperature(teacher_run, fold_run, batches)
    not_of_teacher = {"run", "temperature", "label_weight", "teacher_weight", "terms"}
    temperature = 1.0 if isinstance(temperature, str) else temperature
    teacher = Teacher(network, temperature=temperature, **options.model_dump(exclude=not_of_teacher))
    return teacher.to(device)


def _check_teacher(teacher: TrainedRun, student: FoldRun) -> None:
    """A ValueError unless the teacher has the student's folds and images, is finished, and gives logits."""
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
    ours, theirs = (run.facts.mean_std(student.fold) for run in (student.run, teacher))
    if not np.allclose(ours, theirs, rtol=1e-6, atol=0):
        raise ValueError(
            f"the teacher in {path} has images of mean {theirs.mean} and std {theirs.std}, but fold "
            f"{student.fold} of {student.run.folder.path} has {ours.mean} and {ours.std}: the dataset was "
            "changed, or an older semidice trained the teacher; train the teacher again"
        )
    system = teacher.recipe.system.name
    if system != "standard":
        raise ValueError(
            f"the teacher in {path} has system.name {system}, which has no logits to calibrate; "
            "a teacher needs system.name standard"
        )


def _fitted_temperature(teacher: TrainedRun, student: FoldRun, batches: Batches) -> float:
    """The temperature of the student's fold; the stored one, if any, so that resuming does not change it."""
    path = student.folder.teacher
    if path.is_file():
        return _read_temperature(path)
    folds = [fold for fold in teacher.finished_folds if fold != student.fold]
    if not folds:
        raise ValueError(
            f"the temperature of a teacher is fitted to its other folds, but the teacher in "
            f"{teacher.folder.path} has no finished fold besides {student.fold}: train its other folds, or "
            "set teacher.temperature=NUMBER or teacher.calibration=kde"
        )
    scaling = TemperatureScaling(activation="softmax")
    for fold in folds:
        _fit_to_held_out_cases(
            scaling, FoldRun(teacher, student.dataset, fold, student.fold_of_case), batches
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"temperature": scaling.temperature, "fitted_to_folds": folds}) + "\n")
    return scaling.temperature


@torch.no_grad()
def _fit_to_held_out_cases(scaling: TemperatureScaling, teacher: FoldRun, batches: Batches) -> None:
    """Fit to the validation cases of one fold of the teacher, with the labels of the student."""
    network = teacher.run.network(teacher.fold, device=batches.device)
    storage = teacher.storage(batches.device, load=False)
    for batch in WholeCases(storage, teacher.validation_cases, batch_size=batches.batch_size):
        target = batches.labels(batch)
        scaling.partial_fit(network(batch.image).float(), target, valid=batch.valid)


def _read_temperature(path: Path) -> float:
    try:
        return float(read_json(path)["temperature"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold a temperature: remove the file, then it is fitted again"
        ) from error
