"""`semidice nnunet export | preprocess | train | collect`: nnU-Net's own commands with raters around them."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
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
from ..training.jobs import LostError, Worker, run_jobs
from .collect import collect_run, is_validated
from .folders import NnunetDataset, NnunetFolders
from .options import LossName, NnunetTeacher, trainer_name, trainer_options, write_options
from .process import run_group

_PLANNING = "experiment_planning.plan_and_preprocess_entrypoints"
_ENTRY = """
from semidice.nnunet.process import end_with
end_with({parent})
from nnunetv2.{module} import {function}
{function}()
"""
# the end of nnU-Net's messages, in which its error is
_TAIL_BYTES = 8192


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
    _check_engine(on, num_gpus)
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
        folder = results / f"fold_{fold}"
        if folder.is_dir() and not resume:
            raise ValueError(
                f"{folder} holds an unfinished training: continue it with --resume, or remove the folder"
            )
        arguments = [name, configuration, fold, "-tr", trainer, "-p", plans, "--npz", "-device", device]
        arguments += ["-num_gpus", str(num_gpus)] if num_gpus > 1 else []
        jobs.append(NnunetJob(folders, trainer, folder, arguments))
    if on is None:
        for job in jobs:
            say(console, f"nnU-Net trains {job}")
            job.train()
    elif jobs:
        _train_at_once(jobs, on, device, results, console)
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

    @property
    def messages(self) -> Path:
        """The messages of all attempts, if folds are trained at the same time."""
        return self.results.with_name(f"{self.results.name}.txt")

    def __str__(self) -> str:
        return f"{self.results.name.replace('_', ' ')} with {self.trainer}"

    def run(self, worker: Worker) -> None:
        # nnU-Net takes the first GPU that it sees
        self.train({"CUDA_VISIBLE_DEVICES": _gpu_name(worker.options.device)}, self.messages)

    def train(self, environment: Mapping[str, str] | None = None, messages: Path | None = None) -> None:
        """Run the command, with --c if nnU-Net has begun."""
        started = ["--c"] if self.results.is_dir() else []
        for path in self.results.glob(".*.part"):
            # of a checkpoint that was being written when its process was killed
            path.unlink()
        arguments = [*self.arguments, *started]
        _run_nnunet(self.folders, "run.run_training", "run_training_entry", arguments, environment, messages)


def _check_engine(on: str | None, num_gpus: int) -> None:
    """A ValueError if there is no such engine, or if it does not go with several GPUs per fold."""
    if on is None:
        return
    check_engine(on)
    if num_gpus > 1:
        raise ValueError(
            f"--on {on} trains each fold on one GPU, but --num-gpus is {num_gpus}: leave out one of them"
        )


def _train_at_once(jobs: Sequence[NnunetJob], on: str, device: str, results: Path, console: Console) -> None:
    """Train folds on an engine; a RuntimeError names those that failed. results: folder of the trainer."""
    results.mkdir(parents=True, exist_ok=True)
    say(console, f"nnU-Net's messages are in {results}, in fold_K.txt")
    with opened_pool(on, accelerator="cpu" if device == "cpu" else "auto") as pool:
        errors = run_jobs(jobs, pool, ListView(console))
    if errors:
        named = [f"{job}: {errors[job.group]}" for job in jobs if job.group in errors]
        raise RuntimeError(
            f"{len(errors)} of {len(jobs)} folds failed; the same command with --resume continues them: "
            + "; ".join(named)
        )


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


def _gpu_name(device: int) -> str:
    """The name for CUDA_VISIBLE_DEVICES of the GPU that has this number among those that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(device) if visible is None else visible.split(",")[device]


def _run_nnunet(
    folders: NnunetFolders,
    module: str,
    function: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    messages: Path | None = None,
) -> None:
    """Run one of nnU-Net's commands in a process of its own; a RuntimeError if it fails.

    messages: file to which nnU-Net's messages are added; None prints them.
    """
    code = _ENTRY.format(parent=os.getpid(), module=module, function=function)
    command = [sys.executable, "-c", code, *arguments]
    variables = {**os.environ, **folders.environment(), **(environment or {})}
    if module == _PLANNING and variables.get("nnUNet_n_proc_DA") == "0":
        # nnU-Net's planner takes this number for its threads, and fails at 0
        variables["nnUNet_n_proc_DA"] = "1"
    name = f"nnU-Net's {function.removesuffix('_entry')}"
    if messages is None:
        exit_code = run_group(command, variables)
        if exit_code:
            raise RuntimeError(f"{name} ended with code {exit_code}; its messages are above")
        return
    with messages.open("ab") as output:
        start = output.seek(0, os.SEEK_END)
        # so that the file has everything if the process is killed
        exit_code = run_group(command, {**variables, "PYTHONUNBUFFERED": "1"}, output)
    if exit_code:
        tail = _tail(messages, start)
        reason = f"{name} ended with code {exit_code}: {tail[-1] if tail else 'no message'}; see {messages}"
        # a process that was killed, such as for lack of memory, may succeed beside fewer
        is_lost = exit_code < 0 or any("OutOfMemoryError" in line or "CUDA error" in line for line in tail)
        raise LostError(reason) if is_lost else RuntimeError(reason)


def _tail(messages: Path, start: int) -> list[str]:
    """The last lines that were written after `start`, without empty ones."""
    with messages.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _work_option(work: Path | None) -> str:
    return "" if work is None else f" --work {work}"
