"""The teacher of a fold: the same fold of another run, which never saw the cases the student is judged on."""

import json
from pathlib import Path

import torch

from ..calibration.calibrators import TemperatureScaling
from ..data.batches import Batches, WholeCases
from ..data.folds import read_folds
from ..losses.distillation import Teacher
from ..paths import FoldFolder, RunFolder, atomic_write
from ..recipes import Recipe
from ..runs.run import load_fold, read_run


def load_teacher(
    recipe: Recipe, fold: int, batches: Batches, folder: FoldFolder, device: torch.device
) -> Teacher | None:
    """The frozen, calibrated teacher that `recipe.teacher` asks for; None if it asks for none."""
    options = recipe.teacher
    if options is None:
        return None
    run = RunFolder(Path(options.run))
    if not run.recipe.is_file():
        raise ValueError(
            f"there is no run of a teacher in {run.path}: train it first, "
            "or tell where it is with --set teacher.run=..."
        )
    check_same_folds(run, RunFolder(folder.path.parent), batches)
    if not run.fold(fold).cases.exists():
        raise ValueError(
            f"fold {fold} of the teacher in {run.path} is not finished: go on with it first, "
            "by `semidice train --resume`"
        )
    teacher = read_run(run)
    if teacher.recipe.system.name != "standard":
        raise ValueError(
            f"the teacher in {run.path} is a {teacher.recipe.system.name}, which has no logits to calibrate; "
            "a teacher has system.name standard"
        )
    network = load_fold(teacher, fold, device=device)
    temperature = options.temperature
    if options.calibration == "temperature" and temperature == "fit":
        temperature = _fitted_temperature(network, recipe, batches, device)
        folder.path.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder.teacher) as temp_path:
            temp_path.write_text(json.dumps({"temperature": temperature}) + "\n")
    return Teacher(
        network,
        calibration=options.calibration,
        temperature=1.0 if isinstance(temperature, str) else temperature,
        bandwidth=options.bandwidth,
        num_keys=options.num_keys,
        width=options.width,
        keys_per_image=options.keys_per_image,
        keys_from=options.keys_from,
        reweight_keys=options.reweight_keys,
    ).to(device)


def check_same_folds(teacher: RunFolder, student: RunFolder, batches: Batches) -> None:
    """A ValueError unless both runs split the same cases alike: else a teacher has seen what judges it."""
    theirs, ours = (read_folds(run.folds, batches.dataset) for run in (teacher, student))
    if list(theirs) != list(ours):
        raise ValueError(
            f"the teacher in {teacher.path} has other folds than {student.path}: it would have seen cases "
            "that judge its student; train both with the same dataset, data.num_folds and data.fold_seed"
        )


def _fitted_temperature(
    network: torch.nn.Module, recipe: Recipe, batches: Batches, device: torch.device
) -> float:
    """The temperature of maximum likelihood over the training cases, with the labels of the student."""
    scaling = TemperatureScaling(activation="softmax")
    whole = WholeCases(
        batches.dataset, batches.cases, batch_size=recipe.batch_size, device=device, resident_of=batches
    )
    with torch.no_grad():
        for batch in whole:
            logits = network(batch.image)
            target = batches.labels(batch.masks, batch.case)
            scaling.partial_fit(logits.float(), target, valid=batch.valid)
    return scaling.temperature
