"""Training as a user runs it, with real processes and files. Results are bitwise reproducible."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from prepared import make_prepared, rehash
from safetensors.torch import load_file
from trained import normalised
from typer.testing import CliRunner

from semidice import DiceLoss
from semidice.cli import app
from semidice.data.augment import AugmentOptions
from semidice.data.batches import Batches
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.label_making import LabelOptions
from semidice.data.manifest import manifest_text
from semidice.data.storage import Storage
from semidice.metrics import CaseTable, read_cases, write_cases
from semidice.networks import checkpoint
from semidice.networks.build import build_model
from semidice.networks.checkpoint import Checkpoint, CheckpointWriter, write_checkpoint
from semidice.networks.small_unet import SmallUNet
from semidice.networks.systems import network_probability
from semidice.paths import RunFolder
from semidice.recipes import Recipe
from semidice.runs.predictions import read_prediction
from semidice.runs.run import FoldRun, open_run
from semidice.runs.scoring import score_fold
from semidice.training.crossvalidation import cross_validate, start_run
from semidice.training.engine import DivergedError, train_fold
from semidice.training.step import TrainingStep, parameter_groups

SMALL = {"architecture": "small_unet", "encoder": "none", "weights": "none", "options": {"channels": [8, 16]}}


def recipe_for(dataset, **changes):
    options = {
        "name": "test",
        "data": {"dataset": str(dataset), "num_folds": 2},
        "model": SMALL,
        "augment": {"scale": [0.8, 1.25], "noise": 0.05},
        "optimiser": {"lr": 0.05},
        "schedule": {"epochs": 6},
        "batch_size": 4,
        "log_every": 2,
        "validation": {"every": 2, "metrics": ["dice_score", "calibration_error"]},
        "workers": 0,
    }
    return Recipe.model_validate(options | changes)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=12, size=(32, 32), num_raters=3)
    return path


@pytest.fixture(scope="module")
def fabric():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


def run(recipe, out, fabric):
    started = start_run(recipe, out, resume=False)
    return started.folder, cross_validate(started, fabric)


@pytest.fixture(scope="module")
def finished(dataset, fabric, tmp_path_factory):
    """An uninterrupted run and its table of scores."""
    return run(recipe_for(dataset), tmp_path_factory.mktemp("runs") / "uninterrupted", fabric)


def weights(folder, fold=0):
    return load_file(folder.fold(fold).last)


def assert_same_fold(expected, actual, fold=0):
    expected_weights, actual_weights = weights(expected, fold), weights(actual, fold)
    assert expected_weights.keys() == actual_weights.keys()
    for name, tensor in expected_weights.items():
        assert torch.equal(tensor, actual_weights[name]), name
    assert expected.fold(fold).log.read_text() == actual.fold(fold).log.read_text()


def test_every_case_is_scored_once_by_the_fold_that_did_not_train_on_its_patient(finished, dataset):
    folder, table = finished
    opened = Dataset(dataset)
    rows = [row for row in table.rows() if row.metric == "calibration_error"]
    assert sorted(row.case for row in rows) == sorted(case.name for case in opened.cases)
    folds = dict(zip((case.name for case in opened.cases), read_folds(folder.folds, opened), strict=True))
    assert all(row.fold == folds[row.case] for row in rows)
    assert list(read_cases(folder.cases).rows()) == list(table.rows())


def test_images_of_validation_cases_do_not_change_the_normalisation_of_their_fold(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "changed")
    before = start_run(recipe_for(dataset), tmp_path / "before", resume=False)
    changed = Dataset(tmp_path / "changed")
    folds, scans = read_folds(before.folder.folds, changed), []
    for case, fold in zip(changed.cases, folds, strict=True):
        if fold == 0:
            path = changed.folder.array("images", case.scan.name)
            np.save(path, np.load(path) // 2)
        # without its mean and std, as an older semidice wrote the manifest, so that images are read
        scans.append(case.scan.model_copy(update={"mean": None, "std": None}))
    manifest = changed.manifest.model_copy(update={"scans": tuple(scans)})
    changed.folder.manifest.write_text(manifest_text(manifest))
    after = start_run(recipe_for(tmp_path / "changed"), tmp_path / "after", resume=False)
    assert np.allclose(after.facts.mean_std(0), before.facts.mean_std(0), rtol=1e-12)
    assert after.facts.mean_std(1).mean[0] == pytest.approx(before.facts.mean_std(1).mean[0] / 2, rel=0.05)


def test_stored_predictions_are_of_images_normalised_with_the_training_cases(finished, dataset):
    folder, _ = finished
    opened = Dataset(dataset)
    folds = read_folds(folder.folds, opened)
    for number, fold in enumerate(folds):
        network = open_run(folder).network(fold, device="cpu")
        prob = network_probability(network, normalised(opened, number, folds), dtype="fp32")[0]
        stored = read_prediction(folder.fold(fold).prediction(opened.cases[number].name))
        np.testing.assert_allclose(stored, prob, rtol=0, atol=2e-5)


def test_the_run_folder_records_recipe_versions_and_log(finished):
    folder, _ = finished
    assert "small_unet" in folder.recipe.read_text()
    assert json.loads(folder.versions.read_text())["torch"] == torch.__version__
    lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
    assert lines[0].keys() == {"step", "lr", "loss", "cross_entropy", "region"}
    assert [line["epoch"] for line in lines if "epoch" in line] == [2, 4, 6]
    assert any(folder.fold(0).tensorboard.iterdir())


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(finished, dataset, fabric, tmp_path):
    again, _ = run(recipe_for(dataset), tmp_path / "again", fabric)
    for fold in (0, 1):
        assert_same_fold(finished[0], again, fold)
    reseeded, _ = run(recipe_for(dataset, seed=1), tmp_path / "reseeded", fabric)
    assert any(not torch.equal(t, weights(reseeded)[name]) for name, t in weights(finished[0]).items())


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(finished, dataset, fabric, tmp_path, stop_at):
    recipe = recipe_for(dataset)
    started = start_run(recipe, tmp_path / "stopped", resume=False)
    opened = Dataset(dataset)
    fold = FoldRun(started, opened, 0, read_folds(started.folder.folds, opened))

    def stop(status):
        if status.step == stop_at:
            raise Stopped

    with pytest.raises(Stopped):
        train_fold(fold, fabric, on_step=stop, seconds_between_checkpoints=0)
    train_fold(fold, fabric)
    assert_same_fold(finished[0], started.folder)


def train_command(dataset, out, *options):
    sets = ["schedule.epochs=40", f"data.dataset={dataset}", "data.num_folds=2", "data.folds=[0]"]
    sets += ["batch_size=4", "model.options.channels=[8,16]", "validation.every=10", *options]
    command = [sys.executable, "-m", "semidice", "train", "quick", "-o", str(out), "--accelerator", "cpu"]
    return [*command, *(part for option in sets for part in ("--set", option))]


@pytest.mark.slow
def test_a_run_killed_at_random_points_ends_with_the_weights_of_an_uninterrupted_run(dataset, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    subprocess.run(train_command(dataset, uninterrupted), check=True, env=environment)
    generator = torch.Generator().manual_seed(0)
    for attempt in range(6):
        command = train_command(dataset, killed) + (["--resume"] if (killed / "recipe.yaml").exists() else [])
        process = subprocess.Popen(command, env=environment)
        try:
            process.wait(timeout=6 + 4 * float(torch.rand((), generator=generator)) + 2 * attempt)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    subprocess.run([*train_command(dataset, killed), "--resume"], check=True, env=environment)
    assert_same_fold(RunFolder(uninterrupted), RunFolder(killed))


def test_resuming_does_not_rewrite_a_finished_fold(finished, dataset, fabric):
    folder, table = finished
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.path.rglob("*.safetensors"))}
    again = cross_validate(start_run(recipe_for(dataset), folder.path, resume=True), fabric)
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.path.rglob("*.safetensors"))} == before
    assert list(again.rows()) == list(table.rows())


def test_a_folder_of_another_run_is_refused_and_the_differing_key_is_named(finished, dataset):
    with pytest.raises(ValueError, match=r"differs in optimiser\.lr"):
        start_run(recipe_for(dataset, optimiser={"lr": 0.1}), finished[0].path, resume=True)
    with pytest.raises(ValueError, match="--resume"):
        start_run(recipe_for(dataset), finished[0].path, resume=False)


def test_a_folder_that_is_not_a_run_folder_is_left_unchanged(dataset, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a run folder"):
        start_run(recipe_for(dataset), tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_whole_volumes_are_refused_with_the_networks_that_fit_and_no_folder_is_made(tmp_path):
    make_prepared(tmp_path / "volumes", depth=3)
    words = r"whole volumes, but every network is 2D .*: prepare it with --slices all$"
    with pytest.raises(ValueError, match=words):
        start_run(recipe_for(tmp_path / "volumes"), tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def make_the_third_loss_nan(monkeypatch):
    original = TrainingStep._losses

    def diverging_losses(self, image, target, valid):
        total, parts = original(self, image, target, valid)
        diverging_losses.calls += 1
        return (total * torch.nan, parts) if diverging_losses.calls == 3 else (total, parts)

    diverging_losses.calls = 0
    monkeypatch.setattr(TrainingStep, "_losses", diverging_losses)


def test_a_nonfinite_loss_stops_training_and_reports_step_cases_and_weights(
    dataset, fabric, tmp_path, monkeypatch
):
    make_the_third_loss_nan(monkeypatch)
    recipe = recipe_for(dataset)
    started = start_run(recipe, tmp_path / "diverging", resume=False)
    folder = started.folder
    with pytest.raises(DivergedError, match=r"loss of step 2 .* cases are .*lr") as error:
        cross_validate(started, fabric)
    saved = Checkpoint(folder.fold(0).diverged(2))
    assert saved.progress["step"] == 2
    assert all(tensor.isfinite().all() for name, tensor in saved.tensors.items() if "running" not in name)
    names = str(error.value).split("its cases are ")[1].split(";")[0].split(", ")
    assert set(names) <= {case.name for case in Dataset(dataset).cases}
    assert len(names) == recipe.batch_size


def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, {"model/w": torch.ones(3)}, {"step": 1})

    write_whole = Path.write_bytes

    def fail_halfway(file, content):
        write_whole(file, content[: len(content) // 2])
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(Path, "write_bytes", fail_halfway)
    writer = CheckpointWriter()
    writer.put(path, torch.nn.Linear(1, 1), None, {"step": 2})
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert Checkpoint(path).progress == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


def test_after_a_checkpoint_that_could_not_be_written_no_later_one_is(tmp_path, monkeypatch):
    """The last checkpoint has the best score: a resumed training would not write the best one again."""
    failed = Event()

    def fail_once(path, tensors, progress):
        if not failed.is_set():
            failed.set()
            # the second checkpoint waits already
            time.sleep(0.2)
            raise OSError(28, "No space left on device", str(path))
        write_checkpoint(path, tensors, progress)

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail_once)
    writer = CheckpointWriter()
    for name in ("best", "last"):
        writer.put(tmp_path / name, torch.nn.Linear(1, 1), None, {"best": 0.5})
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert not list(tmp_path.iterdir())


def test_the_error_names_a_file_that_is_not_a_checkpoint(tmp_path):
    path = tmp_path / "last.safetensors"
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match=rf"{path} is not a complete checkpoint"):
        Checkpoint(path)


def test_accumulated_gradients_equal_the_whole_batch_if_the_loss_is_a_mean_over_images(
    dataset, fabric, tmp_path
):
    losses = []
    for accumulate in (1, 2):
        recipe = recipe_for(
            dataset,
            optimiser={"lr": 0.05, "accumulate": accumulate},
            loss={"over": "image", "cross_entropy_weight": 0.0, "region_weight": 1.0},
            model=SMALL | {"options": {"channels": [8, 16], "norm": "group"}},
            augment={"scale": [1.0, 1.0], "flip": False},
        )
        folder, _ = run(recipe, tmp_path / str(accumulate), fabric)
        lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
        losses.append(torch.tensor([line["loss"] for line in lines if "loss" in line]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"channels_last": True}], ids=str)
def test_other_precisions_train(dataset, fabric, tmp_path, options):
    recipe = recipe_for(dataset, precision=options, schedule={"epochs": 1})
    _, table = run(recipe, tmp_path / "run", fabric)
    assert len(table) > 0


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    """Six volumes of three slices, one per patient; nobody drew in the first slice."""
    path = tmp_path_factory.mktemp("data") / "sliced"
    dataset = make_prepared(path, num_cases=18, slices_per_scan=3, cases_per_patient=1, truth=False)
    for scan in dataset.manifest.scans:
        masks = np.load(dataset.folder.array("masks", scan.name))
        masks[0] = 0
        np.save(dataset.folder.array("masks", scan.name), masks)
    rehash(dataset)
    return path


def volume_dice(folder, dataset, fold):
    """Dice of each volume of a fold, from the stored predictions, with numpy alone."""
    scores = {}
    for number, case_fold in enumerate(read_folds(folder.folds, dataset)):
        if case_fold == fold:
            case = dataset.cases[number]
            prediction = read_prediction(folder.fold(fold).prediction(case.name))[1] > 0.5
            majority = (dataset.masks(number) == 1).sum(0) >= 2
            sums = scores.setdefault(case.scan.name, np.zeros(2))
            sums += 2 * (prediction & majority).sum(), prediction.sum() + majority.sum()
    return {name: overlap / total for name, (overlap, total) in scores.items()}


def test_volumes_are_validated_and_scored_as_volumes(sliced, fabric, tmp_path):
    folder, table = run(recipe_for(sliced), tmp_path / "run", fabric)
    dataset = Dataset(sliced)
    for fold in (0, 1):
        expected = volume_dice(folder, dataset, fold)
        rows = table.select(metric="dice_score", class_name="class1", fold=fold)
        assert dict(zip(rows.columns["case"], rows.columns["value"], strict=True)) == pytest.approx(
            expected, abs=1e-6
        )
        last = json.loads(folder.fold(fold).log.read_text().splitlines()[-1])
        # a stored probability is rounded, which may decide a voxel otherwise
        assert last["val_dice_score"] == pytest.approx(np.mean(list(expected.values())), abs=1e-3)


def test_slices_are_scored_on_their_own_if_the_recipe_says_so(sliced, fabric, tmp_path):
    validation = {"every": 6, "metrics": ["dice_score"], "unit": "slice"}
    folder, table = run(recipe_for(sliced, validation=validation), tmp_path / "run", fabric)
    assert table.metrics == ("dice_score_per_slice",)
    assert len(set(table.columns["case"].tolist())) == 18
    rows = table.select(class_name="class1", fold=0)
    last = json.loads(folder.fold(0).log.read_text().splitlines()[-1])
    assert last["val_dice_score"] == pytest.approx(rows.columns["value"].mean(), abs=1e-3)


def test_a_fold_that_an_older_semidice_scored_by_slices_is_scored_again(sliced, fabric, tmp_path):
    recipe = recipe_for(sliced, schedule={"epochs": 1})
    folder, table = run(recipe, tmp_path / "run", fabric)
    older = score_fold(
        Dataset(sliced),
        [number for number, fold in enumerate(read_folds(folder.folds, Dataset(sliced))) if fold == 0],
        folder.fold(0),
        metrics=recipe.validation.metrics,
        method=recipe.name,
        fold=0,
        unit="slice",
    )
    metric = np.char.replace(older.columns["metric"], "_per_slice", "")
    write_cases(CaseTable({**older.columns, "metric": metric}), folder.fold(0).cases)
    again = cross_validate(start_run(recipe, tmp_path / "run", resume=True), fabric)
    for name, column in again.columns.items():
        np.testing.assert_array_equal(column, table.columns[name])


@pytest.fixture
def with_one_and_two(tmp_path):
    """Train with these options in this process, and in two others; return both run folders."""

    def train(dataset, *options):
        command = [train_command(dataset, tmp_path / name, *options) for name in ("one", "two")]
        program = command[0].index("train")
        done = CliRunner().invoke(app, command[0][program:])
        assert done.exit_code == 0, done.output
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [*command[1], "--devices", "2", "--strategy", "ddp"]
        two = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
        assert two.returncode == 0, two.stderr
        return RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")

    return train


def test_two_processes_have_the_loss_curve_of_one_process_and_score_volumes(sliced, with_one_and_two):
    options = ["schedule.epochs=4", "validation.every=2", "log_every=1", "augment.noise=0.1"]
    folders = with_one_and_two(sliced, *options)
    logs = [[json.loads(line) for line in folder.fold(0).log.read_text().splitlines()] for folder in folders]
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]]
    losses = [torch.tensor([line["loss"] for line in log if "loss" in line]) for log in logs]
    assert len(losses[0]) >= 4
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)
    for folder in folders:
        rows = read_cases(folder.cases).select(metric="dice_score", class_name="class1")
        assert dict(zip(rows.columns["case"], rows.columns["value"], strict=True)) == pytest.approx(
            volume_dice(folder, Dataset(sliced), 0), abs=1e-6
        )


def test_two_processes_train_one_index_per_image_to_the_weights_of_one_process(dataset, with_one_and_two):
    # every voxel is valid, so that both processes have equal shares of the cross entropy
    folders = with_one_and_two(dataset, "schedule.epochs=3", "loss.over=image", "augment.scale=[1,1]")
    expected, actual = map(weights, folders)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_two_processes_accumulate_gradients_to_the_loss_curve_and_weights_of_one(dataset, with_one_and_two):
    options = ["optimiser.accumulate=2", "schedule.epochs=4", "log_every=1", "optimiser.clip_norm=1"]
    folders = with_one_and_two(dataset, *options)
    logs = [[json.loads(line) for line in folder.fold(0).log.read_text().splitlines()] for folder in folders]
    losses = [torch.tensor([line["loss"] for line in log if "loss" in line]) for log in logs]
    assert len(losses[0]) >= 4
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)
    expected, actual = map(weights, folders)
    for name, tensor in expected.items():
        # as for one piece: sums of other orders, over some steps
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_two_nodes_of_torchrun_have_the_loss_curve_of_one_process(dataset, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    one, two = (
        train_command(dataset, tmp_path / name, "log_every=1", "schedule.epochs=4") for name in ("one", "two")
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(one, env=environment, capture_output=True, check=True)
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    arguments += [
        "--rdzv-endpoint",
        endpoint,
        *two[1:],
        "--devices",
        "1",
        "--nodes",
        "2",
        "--strategy",
        "ddp",
    ]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--node-rank", str(rank), *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    logs = [RunFolder(tmp_path / name).fold(0).log.read_text().splitlines() for name in ("one", "two")]
    losses = [[json.loads(line).get("loss", 0) for line in log] for log in logs]
    assert len(losses[0]) > 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def network_with_encoder():
    return build_model(architecture="unet", encoder="resnet18", weights=None, num_channels=1, num_classes=2)


@pytest.mark.parametrize("build", [network_with_encoder, lambda: SmallUNet(1, 2)], ids=["smp", "small_unet"])
def test_decoder_and_last_layer_have_their_own_rate_and_one_dimensional_weights_need_not_decay(build):
    network = build()
    groups = parameter_groups(network, decoder_lr_factor=10, decay_one_dimensional=False)
    name_of = {id(parameter): name for name, parameter in network.named_parameters()}
    seen = []
    for group in groups:
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            seen.append(name)
            assert group["lr_factor"] == (1 if name.startswith(("encoder.", "down.")) else 10), name
            assert group["decays"] == (parameter.ndim > 1), name
    assert sorted(seen) == sorted(name_of.values())
    assert len(groups) == 4
    assert len(parameter_groups(network, decoder_lr_factor=1, decay_one_dimensional=True)) == 1


def test_the_rates_of_encoder_and_decoder_follow_one_schedule(dataset, fabric, tmp_path, monkeypatch):
    seen = []
    original = TrainingStep._run

    def record(self):
        seen.append([float(group["lr"]) for group in self.optimiser.param_groups])
        return original(self)

    monkeypatch.setattr(TrainingStep, "_run", record)
    options = {"lr": 0.01, "decoder_lr_factor": 10.0, "decay_one_dimensional": False, "weight_decay": 0.3}
    run(recipe_for(dataset, optimiser=options, schedule={"epochs": 2}), tmp_path / "run", fabric)
    rates = np.array(seen)
    assert rates[0].min() == pytest.approx(0.01)
    np.testing.assert_allclose(rates.max(1), 10 * rates.min(1))
    assert rates[-1].max() < rates[0].max()


@pytest.mark.parametrize("maker", ["majority", "random"])
def test_hard_labels_stay_hard_in_training_so_that_both_dice_losses_are_equal(dataset, maker):
    """The paper's soft Dice loss and DML1 are the same function of hard labels."""
    options = AugmentOptions(scale=(0.5, 2.0), rotate_degrees=30, elastic=0.02)
    batches = Batches(
        Storage(Dataset(dataset), "cpu"),
        range(12),
        batch_size=12,
        label=LabelOptions(maker=maker),
        augment=options,
        seed=0,
    )
    logits = torch.randn(12, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        batch = batches.make(batches.feed(step))
        assert torch.equal(batch.target, (batch.target == 1).float())
        assert batch.target[:, 1].any()
        minimum, relaxed = (
            DiceLoss(form=form)(logits, batch.target, batch.valid) for form in ("min", "relaxed")
        )
        torch.testing.assert_close(minimum, relaxed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cuda_graph_step_trains_like_an_eager_step(dataset, tmp_path, dtype):
    fabric = Fabric(accelerator="cuda", devices=1)
    fabric.launch()
    losses = []
    for graph in (False, True):
        recipe = recipe_for(dataset, precision={"dtype": dtype, "graph": graph}, log_every=1)
        folder, _ = run(recipe, tmp_path / str(graph), fabric)
        lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
        losses.append(torch.tensor([line["loss"] for line in lines if "loss" in line]))
    assert len(losses[0]) == 6
    # dropout uses the same seeds; convolutions may choose other algorithms during graph capture
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_nonfinite_loss_keeps_the_weights_before_it(dataset, tmp_path, monkeypatch):
    make_the_third_loss_nan(monkeypatch)
    fabric = Fabric(accelerator="cuda", devices=1)
    fabric.launch()
    recipe = recipe_for(dataset, precision={"graph": False}, log_every=10, schedule={"epochs": 12})
    started = start_run(recipe, tmp_path / "diverging", resume=False)
    folder = started.folder
    with pytest.raises(DivergedError, match="loss of step 2 "):
        cross_validate(started, fabric)
    saved = Checkpoint(folder.fold(0).diverged(2))
    weights = [tensor for name, tensor in saved.tensors.items() if name.endswith("weight")]
    assert weights
    assert all(tensor.isfinite().all() for tensor in weights)


def test_ctrl_c_leaves_a_run_that_can_be_resumed(dataset, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = train_command(dataset, tmp_path / "run", "schedule.epochs=4000")
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    log = RunFolder(tmp_path / "run").fold(0).log
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command with --resume continues from here" in errors
    assert "Traceback" not in errors
    assert log.stat().st_size
