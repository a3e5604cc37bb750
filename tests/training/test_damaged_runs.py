"""A run is resumed only from its own checkpoints, log and dataset; anything else is named."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from prepared import make_prepared
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.integrity import check_arrays
from semidice.networks.checkpoint import Checkpoint, write_checkpoint
from semidice.recipes import Recipe
from semidice.runs.run import FoldRun
from semidice.training.crossvalidation import cross_validate, start_run
from semidice.training.engine import train_fold

SMALL = {"architecture": "small_unet", "encoder": "none", "weights": "none", "options": {"channels": [8, 16]}}


def recipe_for(dataset, **changes):
    options = {
        "name": "test",
        "data": {"dataset": str(dataset), "num_folds": 2},
        "model": SMALL,
        "schedule": {"epochs": 3},
        "batch_size": 2,
        "log_every": 2,
        "validation": {"every": 2, "metrics": ["dice_score"]},
        "workers": 0,
    }
    return Recipe.model_validate(options | changes)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, truth=False)
    return path


@pytest.fixture(scope="module")
def fabric():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


class Stopped(BaseException):
    pass


def stop_at(step):
    def stop(status):
        if status.step == step:
            raise Stopped

    return stop


def fold_run(started, fold=0):
    dataset = Dataset(started.recipe.data.dataset)
    return FoldRun(started, dataset, fold, read_folds(started.folder.folds, dataset))


@pytest.fixture(scope="module")
def stopped_run(dataset, fabric, tmp_path_factory):
    """Both folds stopped after step 4 of 6, with a checkpoint there."""
    started = start_run(recipe_for(dataset), tmp_path_factory.mktemp("runs") / "stopped", resume=False)
    for fold in (0, 1):
        with pytest.raises(Stopped):
            train_fold(fold_run(started, fold), fabric, on_step=stop_at(4), seconds_between_checkpoints=0)
    return started


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of that run, to be damaged."""
    shutil.copytree(stopped_run.folder.path, tmp_path / "run")
    return start_run(stopped_run.recipe, tmp_path / "run", resume=True)


def resume(started, fabric, fold=0):
    return train_fold(fold_run(started, fold), fabric)


def rewrite(path, change, *, keep_digest=False):
    """Change (progress, tensors) of a checkpoint and write it as semidice does, or with the old digest."""
    checkpoint = Checkpoint(path)
    with safe_open(path, framework="pt") as file:
        digest = json.loads(file.metadata()["progress"])["digest"]
    progress, tensors = checkpoint.progress, checkpoint.tensors
    change(progress, tensors)
    if keep_digest:
        save_file(tensors, path, metadata={"progress": json.dumps({**progress, "digest": digest})})
    else:
        write_checkpoint(path, tensors, progress)


def test_a_stopped_run_is_resumed(stopped, fabric):
    resume(stopped, fabric)
    progress = Checkpoint(stopped.folder.fold(0).last).progress
    assert (progress["step"], progress["fold"]) == (6, 0)
    assert progress["run"] == fold_run(stopped).identity


def test_the_checkpoint_of_another_fold_is_refused(stopped, fabric):
    shutil.copy(stopped.folder.fold(1).last, stopped.folder.fold(0).last)
    with pytest.raises(ValueError, match=r"last\.safetensors is the checkpoint of fold 1, not of fold 0"):
        resume(stopped, fabric)
    with pytest.raises(ValueError, match=r"is the checkpoint of fold 1, not of fold 0"):
        stopped.network(0, device="cpu")


@pytest.mark.parametrize("changes", [{"seed": 1}, {"optimiser": {"lr": 0.5}}, {"schedule": {"epochs": 4}}])
def test_the_checkpoint_of_another_recipe_is_refused(stopped, dataset, fabric, tmp_path, changes):
    other = start_run(recipe_for(dataset, **changes), tmp_path / "other", resume=False)
    shutil.copytree(stopped.folder.fold(0).path, other.folder.fold(0).path)
    with pytest.raises(ValueError, match=r"is the checkpoint of another run: its recipe, folds or dataset"):
        resume(other, fabric)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9, 0.999])
def test_a_flipped_bit_is_found(stopped, fabric, position):
    path = stopped.folder.fold(0).last
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little") + 8
    content[size + int(position * (len(content) - size))] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.safetensors was damaged after it was written"):
        resume(stopped, fabric)


def test_a_changed_step_is_found(stopped, fabric):
    def change(progress, tensors):
        progress["step"] = 2

    rewrite(stopped.folder.fold(0).last, change, keep_digest=True)
    with pytest.raises(ValueError, match="was damaged after it was written"):
        resume(stopped, fabric)


@pytest.mark.parametrize("step", [-1, 0, 1, 3, 7, 10**9, 2.5, "4", None])
def test_a_step_that_the_training_does_not_have_is_refused(stopped, fabric, step):
    rewrite(stopped.folder.fold(0).last, lambda progress, tensors: progress.update(step=step))
    with pytest.raises(ValueError, match=rf"is of step {step}, but this training has checkpoints"):
        resume(stopped, fabric)


@pytest.mark.parametrize("best", [None, "high", float("nan")])
def test_a_best_score_that_is_no_number_is_refused(stopped, fabric, best):
    rewrite(stopped.folder.fold(0).last, lambda progress, tensors: progress.update(best=best))
    with pytest.raises(ValueError, match="has the best score"):
        resume(stopped, fabric)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update({"optimiser/0/momentum_buffer": torch.zeros(1)}), "of another network"),
        (lambda state: state.update({"optimiser/999/momentum_buffer": torch.zeros(1)}), "of another network"),
        (lambda state: state.update({"optimiser/0/exp_avg": torch.zeros(3)}), "SGD needs momentum_buffer"),
        (
            lambda state: [state.pop(name) for name in list(state) if name.startswith("optimiser/")],
            "has the state of no optimiser, but SGD needs momentum_buffer",
        ),
        (lambda state: state.pop(next(iter(state))), "holds the weights of another model"),
    ],
)
def test_the_state_of_another_optimiser_or_network_is_refused(stopped, fabric, change, message):
    rewrite(stopped.folder.fold(0).last, lambda progress, tensors: change(tensors))
    with pytest.raises(ValueError, match=message):
        resume(stopped, fabric)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_shortened_log_is_refused_with_the_missing_steps(stopped, fabric, kept):
    log = stopped.folder.fold(0).log
    lines = log.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 4]
    log.write_text("".join(f"{line}\n" for line in lines[:kept]))
    missing = "2 steps (2, 4)" if not kept else "1 step (4)"
    with pytest.raises(ValueError, match=f"log.jsonl was shortened: it has no line for {missing[:7]}"):
        resume(stopped, fabric)
    # the log is not replaced by the attempt
    assert len(log.read_text().splitlines()) == kept


def test_lines_after_the_checkpoint_are_logged_again(stopped, fabric):
    log = stopped.folder.fold(0).log
    whole = log.read_text()
    log.write_text(whole + '{"step": 6, "loss": 1.0}\n{"step": 6, "lo')
    resume(stopped, fabric)
    assert log.read_text().startswith(whole)
    assert '{"step": 6, "loss": 1.0}\n' not in log.read_text()


def test_a_checkpoint_of_an_older_semidice_is_accepted(stopped, fabric):
    path = stopped.folder.fold(0).last
    progress = {key: Checkpoint(path).progress[key] for key in ("step", "best", "scaler")}
    save_file(load_file(path), path, metadata={"progress": json.dumps(progress)})
    resume(stopped, fabric)


def copy_of(dataset, path, **changes):
    shutil.copytree(dataset, path)
    return path


def test_another_dataset_with_the_same_names_is_refused(stopped, dataset, tmp_path):
    make_prepared(tmp_path / "other", num_cases=8, truth=False, seed=1)
    with pytest.raises(ValueError, match=r"other is not the dataset that .*run was started with"):
        start_run(recipe_for(tmp_path / "other"), stopped.folder.path, resume=True)
    start_run(recipe_for(copy_of(dataset, tmp_path / "moved")), stopped.folder.path, resume=True)


class TestArrays:
    def test_training_refuses_an_array_that_was_changed(self, dataset, fabric, tmp_path):
        path = copy_of(dataset, tmp_path / "data")
        image = Dataset(path).folder.array("images", "scan003")
        np.save(image, 255 - np.load(image))
        started = start_run(recipe_for(path), tmp_path / "run", resume=False)
        with pytest.raises(
            ValueError, match=r"data has 1 array \(images/scan003\.npy\) that `semidice prepare`"
        ):
            cross_validate(started, fabric)
        assert not started.folder.fold(0).path.exists()

    def test_training_refuses_masks_that_were_swapped(self, dataset, fabric, tmp_path):
        path = copy_of(dataset, tmp_path / "data")
        first, second = (Dataset(path).folder.array("masks", f"scan00{number}") for number in (1, 2))
        (tmp_path / "swap").write_bytes(first.read_bytes())
        shutil.copy(second, first)
        shutil.copy(tmp_path / "swap", second)
        started = start_run(recipe_for(path), tmp_path / "run", resume=False)
        with pytest.raises(ValueError, match=r"2 arrays \(masks/scan001\.npy, masks/scan002\.npy\)"):
            cross_validate(started, fabric)

    def test_an_array_is_read_again_only_if_its_size_or_time_changed(self, dataset, tmp_path, monkeypatch):
        path = copy_of(dataset, tmp_path / "data")
        read = []
        from semidice.data import integrity

        original = integrity.file_hash
        monkeypatch.setattr(integrity, "file_hash", lambda path: read.append(path.name) or original(path))
        check_arrays(Dataset(path), tmp_path / "seen.json")
        assert len(read) == 16
        read.clear()
        check_arrays(Dataset(path), tmp_path / "seen.json")
        assert read == []
        image = Dataset(path).folder.array("images", "scan003")
        os.utime(image)
        check_arrays(Dataset(path), tmp_path / "seen.json")
        assert read == ["scan003.npy"]
        (tmp_path / "seen.json").write_text("{")
        check_arrays(Dataset(path), tmp_path / "seen.json")
        assert len(read) == 17

    def test_a_missing_array_is_named(self, dataset, tmp_path):
        path = copy_of(dataset, tmp_path / "data")
        Dataset(path).folder.array("images", "scan003").unlink()
        with pytest.raises(ValueError, match=r"cannot read .*scan003\.npy: No such file"):
            check_arrays(Dataset(path), tmp_path / "seen.json")
