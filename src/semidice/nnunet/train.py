"""`semidice nnunet preprocess | train`: nnU-Net's own commands with raters around them.

A command of nnU-Net is a process that leads a group of its own. Whatever ends this process, also SIGKILL,
ends the group: nothing of nnU-Net stays on a GPU, or writes to a fold that is started again.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from ..console import say
from ..data.folds import fold_cases, split_folds
from ..errors import UserError, read_json
from ..extras import need
from ..paths import write_text
from ..processes import end_with_parent
from .folders import NnunetDataset, NnunetTraining, read_export, write_training
from .options import TrainerOptions

_PLANNING = "experiment_planning.plan_and_preprocess_entrypoints"


def preprocess(
    dataset: NnunetDataset,
    configurations: Sequence[str],
    console: Console,
    *,
    plans: str = "nnUNetPlans",
    num_folds: int = 5,
    num_processes: int = 2,
) -> None:
    """nnU-Net's planning and preprocessing, then the raters' masks and the folds by patient.

    Configurations that nnU-Net does not plan for this dataset are left out.
    """
    need("nnunetv2", "this command")
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    from .raters import preprocess_raters

    export, copy = read_export(dataset.raw), dataset.preprocessed / "dataset.json"
    # finished work is skipped, and would be that of the other export
    if copy.is_file() and read_export(dataset.preprocessed) != export:
        raise UserError(
            f"{dataset.preprocessed} was preprocessed from what {dataset.name} was before it was exported "
            "again: remove this folder, and results of it"
        )
    plans_file = dataset.preprocessed / f"{plans}.json"
    common = ["-d", str(int(dataset.name[7:10]))]
    num_cases = int(read_json(dataset.raw / "dataset.json")["numTraining"])
    if not plans_file.is_file():
        say(console, "nnU-Net plans the training")
        arguments = [*common, "--verify_dataset_integrity", "--no_pp", "-npfp", str(num_processes)]
        _run_nnunet(dataset, _PLANNING, "plan_and_preprocess_entry", arguments)
    manager = PlansManager(str(plans_file))
    planned = [each for each in configurations if each in manager.available_configurations]
    if not planned:
        raise UserError(
            f"nnU-Net has planned {', '.join(manager.available_configurations)} for {dataset.name}, but not "
            f"{', '.join(configurations)}"
        )
    for configuration in planned:
        folder = dataset.preprocessed / manager.get_configuration(configuration).data_identifier
        if len(list(folder.glob("*.pkl"))) != num_cases:
            say(console, f"nnU-Net preprocesses {configuration}")
            arguments = [*common, "-plans_name", plans, "-c", configuration, "-np", str(num_processes)]
            _run_nnunet(dataset, _PLANNING, "preprocess_entry", arguments)
        preprocess_raters(dataset, plans, configuration, num_processes, console)
    if export is not None and not dataset.splits.is_file():
        write_splits(dataset.splits, export.patients, num_folds)
        say(console, f"{num_folds} folds by patient: {dataset.splits}")
    say(console, f"next: {dataset.command('train', planned[0], 0)}")


def train(
    training: NnunetTraining,
    folds: Sequence[str],
    options: TrainerOptions,
    console: Console,
    *,
    device: str = "cuda",
    num_gpus: int = 1,
    resume: bool = False,
) -> None:
    """Train folds with nnU-Net's own command, one after the other; finished ones are skipped.

    num_gpus: of one training. resume: continue an unfinished training.
    """
    need("nnunetv2", "this command")
    dataset = training.dataset
    if not (dataset.preprocessed / f"{training.plans}.json").is_file():
        raise UserError(
            f"{dataset.preprocessed} has no {training.plans}.json: run `{dataset.command('preprocess')}`"
        )
    write_training(training, options)
    left = [fold for fold in folds if not training.is_validated(fold)]
    begun = [fold for fold in left if training.validation(fold).parent.is_dir()]
    if begun and not resume:
        folder = training.validation(begun[0]).parent
        raise UserError(
            f"{folder} holds an unfinished training: continue it with --resume, or remove the folder"
        )
    for fold in folds:
        if fold not in left:
            say(console, f"fold {fold} of {training.trainer} is finished")
            continue
        for path in training.validation(fold).parent.glob(".*.part"):
            # of a checkpoint that was being written when its process was killed
            path.unlink()
        arguments = [dataset.name, training.configuration, fold, "-tr", training.trainer]
        arguments += ["-p", training.plans, "--npz", "-device", device]
        arguments += ["-num_gpus", str(num_gpus)] if num_gpus > 1 else []
        arguments += ["--c"] if fold in begun else []
        say(console, f"nnU-Net trains fold {fold} with {training.trainer}")
        _run_nnunet(dataset, "run.run_training", "run_training_entry", arguments)
    out = Path("runs") / training.trainer.partition("_")[2]
    chosen = (training.configuration, "--trainer", training.trainer, "-o", out)
    say(console, f"next: {dataset.command('collect', *chosen)}")


def write_splits(path: Path, patients: dict[str, str], num_folds: int) -> None:
    """nnU-Net's splits_final.json, with all cases of a patient in one fold."""
    cases = list(patients)
    fold_of_case = split_folds(list(patients.values()), num_folds=num_folds)
    splits = []
    for fold in range(num_folds):
        train, held_out = fold_cases(fold_of_case, fold)
        splits.append({"train": [cases[k] for k in train], "val": [cases[k] for k in held_out]})
    write_text(path, json.dumps(splits, indent=1) + "\n")


def _run_nnunet(dataset: NnunetDataset, module: str, function: str, arguments: Sequence[str]) -> None:
    """Run one of nnU-Net's commands; a UserError if it fails. Nothing that it started is left."""
    environment = dataset.environment()
    if module == _PLANNING and os.environ.get("nnUNet_n_proc_DA") == "0":  # noqa: SIM112
        # nnU-Net's planner takes this number for its threads, and fails at 0
        environment["nnUNet_n_proc_DA"] = "1"
    process = get_context("spawn").Process(
        target=_be_nnunet, args=(module, function, [function, *arguments], environment)
    )
    process.start()
    assert process.pid is not None
    try:
        process.join()
    finally:
        if process.exitcode != 0:
            # Windows has no process groups
            with suppress(ProcessLookupError, AttributeError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if process.exitcode:
        raise UserError(
            f"nnU-Net's {function.removesuffix('_entry')} ended with code {process.exitcode}; its messages "
            "are above"
        )


def _be_nnunet(module: str, function: str, arguments: list[str], environment: dict[str, str]) -> None:
    """The main function of a process that is one of nnU-Net's commands."""
    # a group with the processes of nnU-Net that load and augment
    if hasattr(os, "setsid"):
        os.setsid()
    end_with_parent()
    # nnU-Net reads both when it is imported
    os.environ.update(environment)
    sys.argv = arguments
    getattr(import_module(f"nnunetv2.{module}"), function)()
