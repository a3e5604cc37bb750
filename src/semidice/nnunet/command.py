"""`semidice nnunet export | preprocess | train | collect`: nnU-Net's own commands with raters around them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..console import counting_bar, say
from ..data.dataset import Dataset
from ..data.folds import fold_cases, split_folds
from ..data.label_making import Maker
from ..extras import need
from ..limits import read_json
from ..paths import write_text
from ..training.grid import ListView, check_engine, opened_pool
from ..training.jobs import Worker, run_jobs
from .collect import collect_run, is_validated
from .folders import NnunetDataset, NnunetFolders
from .options import LossName, NnunetTeacher, trainer_name, trainer_options, write_options

_PLANNING = "experiment_planning.plan_and_preprocess_entrypoints"
_ENTRY = "from nnunetv2.{module} import {function}; {function}()"


def run_export(data: Path, name: str, work: Path | None, console: Console) -> None:
    """Write a prepared dataset as nnU-Net's raw dataset `name`."""
    from .export import export_dataset

    dataset, target = Dataset(data), NnunetFolders.of(work).dataset(name)
    with counting_bar(console, doing="exporting", unit="cases") as progress:
        bar = progress.add_task("", total=len(dataset))
        export_dataset(dataset, target, on_case=lambda: progress.advance(bar))
    say(console, f"wrote {len(dataset)} cases of {len(dataset.manifest.raters)} raters to {target.raw}")
    say(console, f"next: semidice nnunet preprocess {name}{_work_option(work)}")


def run_preprocess(
    name: str,
    work: Path | None,
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

    folders = NnunetFolders.of(work)
    dataset = folders.dataset(name)
    record = dataset.read_record() if dataset.record.is_file() else None
    number = str(int(name[7:10]))
    if not (dataset.preprocessed / f"{plans}.json").is_file():
        say(console, "nnU-Net plans the training")
        arguments = ["-d", number, "--verify_dataset_integrity", "--no_pp", "-npfp", str(num_processes)]
        _run_nnunet(folders, _PLANNING, "plan_and_preprocess_entry", arguments)
    manager = PlansManager(str(dataset.preprocessed / f"{plans}.json"))
    planned = [each for each in configurations if each in manager.available_configurations]
    if not planned:
        raise ValueError(
            f"nnU-Net has planned {', '.join(manager.available_configurations)} for {name}, but not "
            f"{', '.join(configurations)}"
        )
    for configuration in planned:
        identifier = manager.get_configuration(configuration).data_identifier
        if not _is_preprocessed(dataset, identifier):
            say(console, f"nnU-Net preprocesses {configuration}")
            arguments = ["-d", number, "-plans_name", plans, "-c", configuration, "-np", str(num_processes)]
            _run_nnunet(folders, _PLANNING, "preprocess_entry", arguments)
        _preprocess_raters(dataset, plans, configuration, num_processes, console)
    if record is not None and not dataset.splits.is_file():
        _write_splits(dataset, record.patients, num_folds)
        say(console, f"{num_folds} folds by patient: {dataset.splits}")
    say(console, f"next: semidice nnunet train {name} {planned[0]} 0{_work_option(work)}")


def run_train(
    name: str,
    configuration: str,
    folds: Sequence[str],
    work: Path | None,
    console: Console,
    *,
    label: Maker = "mean",
    loss: LossName = "dml1",
    run_name: str | None = None,
    epochs: int | None = None,
    iterations: int | None = None,
    teacher: NnunetTeacher | None = None,
    plans: str = "nnUNetPlans",
    device: str = "cuda",
    num_gpus: int = 1,
    resume: bool = False,
    on: str | None = None,
) -> str:
    """Train folds with nnU-Net's own command; returns the name of the trainer.

    on: where folds are trained at the same time, see `training.grid`; None trains one after the other.
    """
    if on is not None:
        check_engine(on)
    need("nnunetv2", "this command")
    folders = NnunetFolders.of(work)
    dataset = folders.dataset(name)
    if not (dataset.preprocessed / f"{plans}.json").is_file():
        raise ValueError(
            f"{dataset.preprocessed} has no {plans}.json: run `semidice nnunet preprocess {name}`"
        )
    trainer = trainer_name(label, loss, run_name, teacher)
    options = trainer_options(label, loss, epochs=epochs, iterations=iterations, teacher=teacher)
    results = dataset.results(trainer, plans, configuration)
    write_options(dataset.preprocessed, trainer, options, has_results=results.is_dir())
    jobs = []
    for fold in folds:
        if is_validated(results, fold):
            say(console, f"fold {fold} of {trainer} is finished")
            continue
        started = (results / f"fold_{fold}").is_dir()
        if started and not resume:
            raise ValueError(
                f"{results / f'fold_{fold}'} holds an unfinished training: continue it with --resume, or "
                "remove the folder"
            )
        arguments = [name, configuration, fold, "-tr", trainer, "-p", plans, "--npz", "-device", device]
        arguments += ["-num_gpus", str(num_gpus)] if num_gpus > 1 else []
        jobs.append(NnunetJob(folders, trainer, results / f"fold_{fold}", arguments))
    if on is None:
        for job in jobs:
            say(console, f"nnU-Net trains {job}")
            job.train()
    elif jobs:
        with opened_pool(on) as pool:
            errors = run_jobs(jobs, pool, ListView(console))
        if errors:
            raise RuntimeError("; ".join(errors.values()))
    say(
        console,
        f"next: semidice nnunet collect {name} {configuration} --trainer {trainer}{_work_option(work)} "
        f"-o runs/{trainer.partition('_')[2]}",
    )
    return trainer


@dataclass(frozen=True, eq=False)
class NnunetJob:
    """Train one fold with nnU-Net's own command, which continues a training that was stopped."""

    folders: NnunetFolders
    trainer: str
    results: Path
    arguments: Sequence[str]

    @property
    def group(self) -> str:
        # a fold that fails does not stop the others
        return str(self.results)

    @property
    def after(self) -> str | None:
        return None

    def __str__(self) -> str:
        return f"{self.results.name.replace('_', ' ')} with {self.trainer}"

    def run(self, worker: Worker) -> None:
        self.train()

    def train(self) -> None:
        """Run the command, with --c if nnU-Net has begun."""
        started = ["--c"] if self.results.is_dir() else []
        _run_nnunet(self.folders, "run.run_training", "run_training_entry", [*self.arguments, *started])


def run_collect(
    name: str,
    configuration: str,
    trainer: str,
    out: Path,
    work: Path | None,
    console: Console,
    *,
    plans: str = "nnUNetPlans",
    run_name: str | None = None,
    data: Path | None = None,
    metrics: Sequence[str] | None = None,
) -> None:
    """Collect nnU-Net's held-out predictions into a run folder."""
    source = NnunetFolders.of(work).dataset(name)
    dataset = Dataset(data or Path(source.read_record().dataset))
    with counting_bar(console, doing="collecting", unit="cases") as progress:
        bar = progress.add_task("", total=len(dataset))
        folds = collect_run(
            source,
            dataset,
            out,
            trainer=trainer,
            plans=plans,
            configuration=configuration,
            name=run_name or out.resolve().name,
            metrics=None if metrics is None else tuple(metrics),
            on_case=lambda: progress.advance(bar),
        )
    say(console, f"collected folds {', '.join(map(str, folds))} into {out}")
    say(console, f"next: semidice report {out} -o report.html")


def _preprocess_raters(
    dataset: NnunetDataset, plans: str, configuration: str, num_processes: int, console: Console
) -> None:
    from .raters import preprocess_raters

    with counting_bar(console, doing=f"raters, {configuration}", unit="cases") as progress:
        bar = progress.add_task("", total=_num_cases(dataset))
        raters = preprocess_raters(
            dataset,
            plans,
            configuration,
            num_processes=num_processes,
            on_case=lambda: progress.advance(bar),
        )
    say(console, f"{configuration}: {len(raters)} raters")


def _write_splits(dataset: NnunetDataset, patients: dict[str, str], num_folds: int) -> None:
    """nnU-Net's splits_final.json, with all cases of a patient in one fold."""
    cases = list(patients)
    fold_of_case = split_folds([patients[case] for case in cases], num_folds=num_folds)
    splits = []
    for fold in range(num_folds):
        train, held_out = fold_cases(fold_of_case, fold)
        splits.append({"train": [cases[k] for k in train], "val": [cases[k] for k in held_out]})
    write_text(dataset.splits, json.dumps(splits, indent=1) + "\n")


def _is_preprocessed(dataset: NnunetDataset, identifier: str) -> bool:
    folder = dataset.preprocessed / identifier
    return folder.is_dir() and len(list(folder.glob("*.pkl"))) == _num_cases(dataset)


def _num_cases(dataset: NnunetDataset) -> int:
    return int(read_json(dataset.raw / "dataset.json")["numTraining"])


def _run_nnunet(folders: NnunetFolders, module: str, function: str, arguments: Sequence[str]) -> None:
    """Run one of nnU-Net's commands in a process of its own; a RuntimeError if it fails."""
    code = _ENTRY.format(module=module, function=function)
    environment = {**os.environ, **folders.environment()}
    if module == _PLANNING and environment.get("nnUNet_n_proc_DA") == "0":
        # nnU-Net's planner takes this number for its threads, and fails at 0
        environment["nnUNet_n_proc_DA"] = "1"
    process = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=False)
    if process.returncode:
        raise RuntimeError(
            f"nnU-Net's {function.removesuffix('_entry')} ended with code {process.returncode}; its messages "
            "are above"
        )


def _work_option(work: Path | None) -> str:
    return "" if work is None else f" --work {work}"
