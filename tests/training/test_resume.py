"""A training that was stopped continues to the same bits, and only from its own parts."""

import json
import shutil
import signal

import pytest
import torch
from case_rows import rows_of
from prepared import make_prepared
from start import refused
from trained import assert_same_fold, finished_table, fold_of, recipe_for, run_recipe, train_until

from semidice.networks.checkpoint import Checkpoint, write_checkpoint
from semidice.paths import RunFolder
from semidice.runs.run import open_run
from semidice.runs.start import start_run
from semidice.statistics import read_cases
from semidice.training.context import Context
from semidice.training.engine import train_fold


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, truth=False)
    return path


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    return run_recipe(recipe_for(dataset), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def stopped_run(dataset, tmp_path_factory):
    """Both folds stopped after step 3 of 6, with a checkpoint at step 2."""
    started = start_run(recipe_for(dataset), tmp_path_factory.mktemp("runs") / "stopped", resume=False)
    for fold in (0, 1):
        train_until(fold_of(started, fold), 3)
    return started


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of that run, to be changed."""
    shutil.copytree(stopped_run.folder.path, tmp_path / "run")
    return start_run(stopped_run.recipe, tmp_path / "run", resume=True)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_stopped_training_ends_with_the_same_bits(finished, dataset, tmp_path, step):
    started = start_run(recipe_for(dataset), tmp_path / "run", resume=False)
    train_until(fold_of(started), step)
    train_fold(fold_of(started), Context())
    assert_same_fold(finished[0], started.folder)


def test_lines_of_the_log_after_the_checkpoint_are_written_again(finished, stopped):
    log = stopped.folder.fold(0).log
    log.write_text(log.read_text() + '{"step": 6, "loss": 1.0}\n{"step": 6, "lo')
    train_fold(fold_of(stopped), Context())
    assert_same_fold(finished[0], stopped.folder)


def test_a_log_that_was_lost_does_not_stop_a_training(stopped):
    stopped.folder.fold(0).log.unlink()
    train_fold(fold_of(stopped), Context())
    steps = [json.loads(line)["step"] for line in stopped.folder.fold(0).log.read_text().splitlines()]
    assert min(steps) > 2
    assert max(steps) == 6


def test_a_finished_fold_is_not_written_again(finished, dataset):
    folder, table = finished
    before = {path: path.stat().st_ino for path in sorted(folder.path.rglob("*.safetensors"))}
    again = finished_table(start_run(recipe_for(dataset), folder.path, resume=True))
    assert {path: path.stat().st_ino for path in sorted(folder.path.rglob("*.safetensors"))} == before
    assert (
        list(again.pipe(rows_of)) == list(table.pipe(rows_of)) == list(read_cases(folder.cases).pipe(rows_of))
    )


def test_the_checkpoint_of_another_fold_is_refused(stopped):
    shutil.copy(stopped.folder.fold(1).last, stopped.folder.fold(0).last)
    refused(lambda: train_fold(fold_of(stopped), Context()), "last.safetensors", "of fold 1, not of fold 0")
    refused(lambda: stopped.network(0, device="cpu"), "of fold 1, not of fold 0")


@pytest.mark.parametrize("changes", [{"seed": 1}, {"optimiser": {"lr": 0.5}}, {"schedule": {"epochs": 4}}])
def test_the_checkpoint_of_another_recipe_is_refused(stopped, dataset, tmp_path, changes):
    other = start_run(recipe_for(dataset, **changes), tmp_path / "other", resume=False)
    shutil.copytree(stopped.folder.fold(0).path, other.folder.fold(0).path)
    refused(lambda: train_fold(fold_of(other), Context()), "last.safetensors", "of another run")


def test_the_weights_of_another_network_are_refused(stopped):
    path = stopped.folder.fold(0).last
    checkpoint = Checkpoint(path)
    del checkpoint.tensors[next(name for name in checkpoint.tensors if name.startswith("model/"))]
    write_checkpoint(path, checkpoint.tensors, checkpoint.progress)
    refused(lambda: train_fold(fold_of(stopped), Context()), "last.safetensors", "another model")


def test_a_folder_of_another_run_is_refused_and_the_differing_key_is_named(finished, dataset):
    path = finished[0].path
    other = recipe_for(dataset, optimiser={"lr": 0.1})
    refused(lambda: start_run(other, path, resume=True), "differs in optimiser.lr")
    refused(lambda: start_run(recipe_for(dataset), path, resume=False), "--resume")


def test_a_folder_that_is_not_a_run_folder_is_left_unchanged(dataset, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    refused(lambda: start_run(recipe_for(dataset), tmp_path, resume=True), "is not a run folder", "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_another_dataset_with_the_same_names_is_refused_and_a_moved_one_is_not(stopped, dataset, tmp_path):
    make_prepared(tmp_path / "other", num_cases=8, truth=False, seed=1)
    other = recipe_for(tmp_path / "other")
    refused(lambda: start_run(other, stopped.folder.path, resume=True), "other is not the dataset")
    shutil.copytree(dataset, tmp_path / "moved")
    start_run(recipe_for(tmp_path / "moved"), stopped.folder.path, resume=True)


def test_a_dataset_that_was_copied_in_part_is_refused(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "copy")
    path = tmp_path / "copy" / "images" / "scan003.npy"
    path.write_bytes(path.read_bytes()[:-10])
    refused(lambda: start_run(recipe_for(tmp_path / "copy"), tmp_path / "run", resume=False), "scan003.npy")
    path.unlink()
    refused(lambda: start_run(recipe_for(tmp_path / "copy"), tmp_path / "run", resume=False), "scan003.npy")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["fold_0", "fold_0/predictions", "fold_0/tensorboard"])
def test_a_folder_of_a_run_that_leads_out_of_it_is_refused(stopped, tmp_path, name):
    path, outside = stopped.folder.path / name, tmp_path / "outside"
    outside.mkdir()
    (outside / ".mine.part").touch()
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(outside)
    for act in (
        lambda: start_run(stopped.recipe, stopped.folder.path, resume=True),
        lambda: open_run(stopped.folder),
    ):
        refused(act, str(path), "link")
    assert [each.name for each in outside.iterdir()] == [".mine.part"]


def test_a_run_that_is_reached_through_a_link_is_read(stopped, tmp_path):
    (tmp_path / "link").symlink_to(stopped.folder.path)
    linked = start_run(stopped.recipe, tmp_path / "link", resume=True)
    train_fold(fold_of(linked), Context())
    assert Checkpoint(stopped.folder.fold(0).last).progress["step"] == 6


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, {"model/w": torch.ones(3)}, {"step": 1})

    def fail(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("semidice.paths.force_to_disk", fail)
    tensors = {"model/w": torch.zeros(3)}
    refused(lambda: write_checkpoint(path, tensors, {"step": 2}), "cannot write", path.name, "No space left")
    assert Checkpoint(path).progress == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


def test_ctrl_c_leaves_a_run_that_can_be_resumed(dataset, tmp_path, start):
    sets = ["schedule.epochs=4000", f"data.dataset={dataset}", "data.num_folds=2", "batch_size=4"]
    sets += ["model.options.channels=[8,16]", "log_every=1"]
    options = [part for option in sets for part in ("--set", option)]
    run = tmp_path / "run"
    process = start("-m", "semidice", "train", "quick", "-o", run, "--accelerator", "cpu", *options)
    log = RunFolder(run).fold(0).log
    process.wait_until(lambda: log.exists() and log.stat().st_size)
    process.send_signal(signal.SIGINT)
    ended = process.end()
    assert ended.code == 130
    assert "interrupted; the same command with --resume continues from here" in ended.err
    assert "Traceback" not in ended.err
    assert log.stat().st_size
