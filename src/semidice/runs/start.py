"""Starting a run, or continuing it: the run folder of a recipe, with folds and facts of the dataset."""

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__
from ..data.dataset import Dataset, open_dataset
from ..data.folds import split_dataset, write_folds
from ..errors import UserError
from ..paths import RunFolder, find_run, run_name, write_text
from ..recipes import Recipe, differing_keys, read_recipe, with_stored_choices, write_recipe
from .run import MAY_DIFFER, TrainedRun, mirrored_axes, open_run, write_dataset_facts


def start_run(recipe: Recipe, out: Path, *, resume: bool, whole: bool = True) -> TrainedRun:
    """The run of a recipe in the folder `out`, which is created or, with `resume`, continued.

    A UserError says so if the folder holds the run of another recipe, or other files.
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
        open_run(folder).check_dataset(dataset, "--set data.dataset=...")
    else:
        _create_run_folder(recipe, dataset, folder)
    # other processes may be reading the file
    if whole or recipe != stored:
        # written last: a folder that has a recipe is a run
        write_recipe(recipe, folder.recipe)
    return open_run(folder)


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


def volume_problem(dataset: Dataset) -> str | None:
    """Why no network can be trained on the dataset: its cases are whole volumes. None if they are not."""
    if len(dataset.manifest.scans[0].shape) < 3:
        return None
    return (
        f"{dataset.folder.path} has whole volumes, but every network is 2D (small_unet and those of "
        "segmentation_models_pytorch): prepare it with --slices all"
    )


def versions() -> dict[str, str | None]:
    """Versions and devices on which results can depend; None for what is missing on this machine."""
    packages = ("numpy", "segmentation-models-pytorch", "timm", "triton")
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
