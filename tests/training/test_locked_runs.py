"""One process works on a run at a time, and a start that was stopped can be repeated."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from lightning_fabric import Fabric
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from trained import make_run
from typer.testing import CliRunner

from semidice.cli import app
from semidice.locks import FolderLock, Owner
from semidice.networks import checkpoint
from semidice.paths import ComparisonFolder, FoldFolder, PredictionFolder, ReportFolder, RunFolder
from semidice.recipes import read_recipe
from semidice.training import crossvalidation
from semidice.training.command import run_train
from semidice.training.crossvalidation import start_run

SETS = ["data.num_folds=2", "data.folds=[0]", "schedule.epochs=2", "batch_size=4"]
SETS += ["model.options.channels=[8,16]", "workers=0", "log_every=1"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, truth=False)
    return path


def recipe_for(dataset):
    return read_recipe("quick", [f"data.dataset={dataset}", *SETS], accelerator="cpu")


def command(name, dataset, out, *options):
    sets = [part for option in (f"data.dataset={dataset}", *SETS) for part in ("--set", option)]
    return ["train", "quick", "-o", str(out), "--accelerator", "cpu", *sets, *options]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_of_two_resumes_the_second_says_who_has_the_run_and_changes_nothing(dataset, tmp_path, monkeypatch):
    out = tmp_path / "run"
    answers = []

    def second_resume(*arguments, **options):
        before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
        process = [sys.executable, "-m", "semidice", *command("train", dataset, out, "--resume")]
        done = subprocess.run(process, capture_output=True, text=True, check=False)
        answers.append((done.returncode, done.stderr))
        assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before
        return original(*arguments, **options)

    original = crossvalidation._score
    monkeypatch.setattr(crossvalidation, "_score", second_resume)
    run_train(recipe_for(dataset), out, Console(quiet=True), accelerator="cpu")
    [(code, message)] = answers
    assert code == 1
    assert message.startswith(
        f"semidice train: {out} is in use by `semidice train` (process {os.getpid()} on"
    )
    assert "Traceback" not in message
    assert not RunFolder(out).lock.exists()


def test_a_run_of_a_dead_process_is_resumed(dataset, tmp_path):
    out = tmp_path / "run"
    start_run(recipe_for(dataset), out, resume=False)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = replace(Owner.this_process("semidice train"), pid=process.pid, start="1")
    RunFolder(out).lock.write_text(json.dumps(asdict(dead)))
    run_train(recipe_for(dataset), out, Console(quiet=True), resume=True, accelerator="cpu")
    assert RunFolder(out).cases.exists()
    assert not RunFolder(out).lock.exists()


def test_a_run_of_another_machine_is_not_resumed(dataset, tmp_path):
    start_run(recipe_for(dataset), tmp_path / "run", resume=False)
    other = replace(Owner.this_process("semidice train"), host="node7")
    RunFolder(tmp_path / "run").lock.write_text(json.dumps(asdict(other)))
    done = invoke(*command("train", dataset, tmp_path / "run", "--resume"))
    assert done.exit_code == 1
    assert f"in use by `semidice train` (process {os.getpid()} on node7" in done.stderr


def test_evaluate_waits_for_nobody_and_names_the_training(dataset, tmp_path):
    run = make_run(tmp_path / "run", make_prepared(tmp_path / "data"))
    with FolderLock(run, "semidice train"):
        for options in ((), ("--decide", "dice"), ("--interval", "0.9")):
            done = invoke("evaluate", run.path, *options)
            assert done.exit_code == 1
            assert "is in use by `semidice train`" in done.stderr
        # a file elsewhere needs no lock
        assert invoke("evaluate", run.path, "-o", tmp_path / "scores.csv").exit_code == 0
    assert invoke("evaluate", run.path).exit_code == 0


def test_commands_that_write_to_a_run_or_a_folder_name_who_has_it(tmp_path):
    """Of another machine: this process could have the lock itself."""
    dataset = make_prepared(tmp_path / "data", num_cases=6)
    run = make_run(tmp_path / "run", dataset)
    image = tmp_path / "a.png"
    Image.fromarray(np.arange(1024, dtype=np.uint8).reshape(32, 32)).save(image)
    out, page = tmp_path / "out", tmp_path / "page.html"
    table = tmp_path / "table.csv"
    assert invoke("evaluate", run.path, "-o", table).exit_code == 0
    other = asdict(replace(Owner.this_process("semidice train"), host="node7"))
    for folder in (run, PredictionFolder(out), ReportFolder.of(page)):
        folder.path.mkdir(exist_ok=True)
        folder.lock.write_text(json.dumps(other))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    commands = (
        ["evaluate", run.path, "--decide", "fitted", "-o", tmp_path / "scores.csv"],
        ["calibrate", run.path, "--by", "temperature"],
        ["predict", run.path, image, "-o", out],
        ["report", "--cases", table, "--dataset", dataset.folder.path, "-o", page],
    )
    for arguments in commands:
        done = invoke(*arguments)
        assert done.exit_code == 1, arguments
        assert "is in use by `semidice train`" in done.stderr, done.stderr
        assert "on node7" in done.stderr
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert not page.exists()
    # without a rule that is stored in the run, scores in another file need no lock
    assert invoke("evaluate", run.path, "--decide", "dice", "-o", tmp_path / "scores.csv").exit_code == 0


def test_compare_names_who_has_its_folder_or_the_run_of_a_variant(dataset, tmp_path):
    sets = [part for option in SETS for part in ("--set", option)]
    arguments = ["compare", dataset, "quick", "-o", tmp_path / "out", "--accelerator", "cpu", *sets]
    with FolderLock(ComparisonFolder(tmp_path / "out"), "semidice compare"):
        done = invoke(*arguments)
        assert "out is in use by `semidice compare`" in done.stderr
    with FolderLock(RunFolder(tmp_path / "out" / "quick"), "semidice train"):
        done = invoke(*arguments)
        assert done.exit_code == 1
        assert "quick is in use by `semidice train`" in done.stderr


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("num_written", range(4))
def test_a_start_that_was_stopped_is_repeated_with_and_without_resume(
    dataset, tmp_path, monkeypatch, num_written, resume
):
    """The disk is full at each of the four files that a start writes."""
    recipe, out = recipe_for(dataset), tmp_path / "run"
    written = []

    def full(path):
        if len(written) == num_written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr("semidice.paths.force_to_disk", full)
        with pytest.raises(OSError, match="No space"):
            start_run(recipe, out, resume=False)
    assert not RunFolder(out).temp_files()
    start_run(recipe, out, resume=resume)
    names = {path.name for path in out.iterdir()}
    assert names == {"recipe.yaml", "versions.json", "folds.json", "dataset.json"}


def test_a_training_that_lost_its_lock_stops(dataset, tmp_path, monkeypatch):
    def lose(lock):
        lock._lost = True
        original(lock)

    original = FolderLock.check
    monkeypatch.setattr(FolderLock, "check", lose)
    done = invoke(*command("train", dataset, tmp_path / "run"))
    assert done.exit_code == 1
    assert "was taken over by" in done.stderr
    assert not RunFolder(tmp_path / "run").cases.exists()


def test_no_temporary_file_of_another_name_is_used_for_a_checkpoint(tmp_path, monkeypatch):
    """A checkpoint that is being written has the one temporary name that a later start removes."""
    seen = []
    monkeypatch.setattr("semidice.paths.force_to_disk", lambda path: seen.extend(tmp_path.iterdir()))
    checkpoint.write_checkpoint(tmp_path / "last.safetensors", {}, {"step": 1})
    (name,) = [path.name for path in seen]
    assert re.fullmatch(rf"\.last\.safetensors\.{os.getpid()}-[0-9a-f]{{8}}\.part", name)
    seen[0].touch()
    assert FoldFolder(tmp_path).temp_files() == seen


@pytest.fixture(scope="module", autouse=True)
def _launched():
    Fabric(accelerator="cpu", devices=1).launch()
