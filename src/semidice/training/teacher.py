"""The teacher of a fold: the same fold of another run, which never saw the student's validation cases.

Its temperature is fitted where a teacher predicts cases that it was not trained on: the networks of the other
folds on their validation cases, all of which are training cases of the student. So the student's validation
cases take no part in the fit. But the labels of these cases trained the other networks: one number passes on
what they learned from them.
"""

from dataclasses import replace

import torch

from ..calibration.calibrators import TemperatureScaling
from ..data.batches.feed import Batches, whole_cases
from ..data.folds import read_folds
from ..errors import UserError
from ..losses.distillation import Teacher
from ..paths import find_run
from ..runs.run import FoldRun, TrainedRun, open_run


def load_teacher(
    fold_run: FoldRun, batches: Batches, device: torch.device, *, temperature: float | None = None
) -> Teacher | None:
    """The calibrated teacher of `recipe.teacher`; None if the recipe has no teacher.

    temperature: of the training that is resumed; None takes that of the recipe, or fits it.
    """
    options = fold_run.recipe.teacher
    if options is None:
        return None
    if not find_run(options.run).recipe.is_file():
        raise UserError(
            f"there is no teacher run in {options.run}: train it first, or give its folder with "
            "--set teacher.run=..."
        )
    teacher_run = open_run(options.run)
    _check_teacher(teacher_run, fold_run)
    network = teacher_run.network(fold_run.fold, device=device)
    if options.calibration == "temperature" and temperature is None and options.temperature == "fit":
        temperature = _fitted_temperature(teacher_run, fold_run, batches)
    if temperature is not None:
        options = replace(options, temperature=temperature)
    return Teacher(network, options).to(device)


def _check_teacher(teacher: TrainedRun, student: FoldRun) -> None:
    """A ValueError unless the teacher has the student's folds and images, is finished, and gives logits."""
    path = teacher.folder.path
    # with other folds, the teacher would have seen cases that its student is scored on
    if read_folds(teacher.folder.folds, student.dataset) != list(student.fold_of_case):
        raise UserError(
            f"the teacher in {path} has other folds than {student.run.folder.path}: it would have seen cases "
            "that its student is scored on; train both with the same dataset, data.num_folds and "
            "data.fold_seed"
        )
    if not teacher.folder.fold(student.fold).is_finished:
        raise UserError(
            f"fold {student.fold} of the teacher in {path} is not finished: continue it first, "
            "with `semidice train --resume`"
        )
    if student.run.facts.manifest_sha256 != teacher.facts.manifest_sha256:
        raise UserError(
            f"the teacher in {path} was trained on another dataset than {student.run.folder.path}, or on one "
            "that was prepared again since: train the teacher again"
        )
    system = teacher.recipe.system.name
    if system != "standard":
        raise UserError(
            f"the teacher in {path} has system.name {system}, which has no logits to calibrate; "
            "a teacher needs system.name standard"
        )


def _fitted_temperature(teacher: TrainedRun, student: FoldRun, batches: Batches) -> float:
    """The temperature that fits the teacher's other folds best."""
    folds = [fold for fold in teacher.finished_folds if fold != student.fold]
    if not folds:
        raise UserError(
            f"the temperature of a teacher is fitted to its other folds, but the teacher in "
            f"{teacher.folder.path} has no finished fold besides {student.fold}: train its other folds, or "
            "set teacher.temperature=NUMBER or teacher.calibration=kde"
        )
    scaling = TemperatureScaling(activation="softmax")
    for fold in folds:
        _fit_to_held_out_cases(
            scaling, FoldRun(teacher, student.dataset, fold, student.fold_of_case), batches
        )
    return scaling.temperature


@torch.no_grad()
def _fit_to_held_out_cases(scaling: TemperatureScaling, teacher: FoldRun, batches: Batches) -> None:
    """Fit to the validation cases of one fold of the teacher, with the labels of the student."""
    network = teacher.run.network(teacher.fold, device=batches.device)
    storage = teacher.storage(batches.device, load=False)
    cases = teacher.validation_cases
    for batch in whole_cases(storage, cases, teacher.mean_std, batch_size=batches.batch_size):
        target = batches.labels(batch)
        scaling.partial_fit(network(batch.image).float(), target, valid=batch.valid)
