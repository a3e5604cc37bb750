"""What a training writes, and what its options mean. Results are the same to the last bit."""

import json
import shutil

import numpy as np
import pytest
import torch
from case_rows import metrics_of, rows_of, select
from prepared import make_prepared, rehash
from start import refused
from trained import SMALL, assert_same_fold, normalised, recipe_for, run_recipe, volume_dice, weights

from semidice import DiceLoss
from semidice.data.batches.augment import AugmentOptions
from semidice.data.batches.feed import Batches, BatchOptions
from semidice.data.batches.label_making import LabelOptions
from semidice.data.batches.storage import Storage
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.networks.build import ModelOptions, Task, build_model
from semidice.networks.predictor import network_probability
from semidice.networks.small_unet import SmallUNet
from semidice.recipes.options import OptimiserOptions
from semidice.runs.predictions import read_prediction
from semidice.runs.run import open_run
from semidice.runs.start import start_run
from semidice.statistics import read_cases
from semidice.training.context import Context
from semidice.training.folds import finish_run
from semidice.training.processes import Processes, chosen_device
from semidice.training.step import TrainingStep, build_optimiser, parameter_groups


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=12)
    return path


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """A run and its table of scores."""
    return run_recipe(recipe_for(dataset), tmp_path_factory.mktemp("runs") / "run")


def test_every_case_is_scored_once_by_the_fold_that_did_not_train_on_its_patient(finished, dataset):
    folder, table = finished
    opened = Dataset(dataset)
    rows = [row for row in table.pipe(rows_of) if row.metric == "calibration_error"]
    assert sorted(row.case for row in rows) == sorted(case.name for case in opened.cases)
    folds = dict(zip((case.name for case in opened.cases), read_folds(folder.folds, opened), strict=True))
    assert all(row.fold == folds[row.case] for row in rows)
    assert list(read_cases(folder.cases).pipe(rows_of)) == list(table.pipe(rows_of))


def test_images_of_validation_cases_do_not_change_the_normalisation_of_their_fold(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "changed")
    before = start_run(recipe_for(dataset), tmp_path / "before", resume=False)
    folds = read_folds(before.folder.folds, Dataset(dataset))
    # the images of fold 0 become darker, as if they had been prepared like that
    changed, scans = Dataset(tmp_path / "changed"), []
    for case, fold in zip(changed.cases, folds, strict=True):
        if fold == 0:
            path = changed.folder.array("images", case.scan.name)
            np.save(path, np.load(path) // 2)
        image = np.load(changed.folder.array("images", case.scan.name)) / 255
        scans.append(case.scan.model_copy(update={"mean": (image.mean(),), "std": (image.std(),)}))
    changed.manifest = changed.manifest.model_copy(update={"scans": tuple(scans)})
    rehash(changed)
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


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(finished, dataset, tmp_path):
    again, _ = run_recipe(recipe_for(dataset), tmp_path / "again")
    for fold in (0, 1):
        assert_same_fold(finished[0], again, fold)
    reseeded, _ = run_recipe(recipe_for(dataset, seed=1), tmp_path / "reseeded")
    assert any(not torch.equal(t, weights(reseeded)[name]) for name, t in weights(finished[0]).items())


def test_whole_volumes_are_refused_with_the_networks_that_fit_and_no_folder_is_made(tmp_path):
    make_prepared(tmp_path / "volumes", depth=3)
    recipe = recipe_for(tmp_path / "volumes")
    refused(lambda: start_run(recipe, tmp_path / "run", resume=False), "whole volumes", "--slices all")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_training_and_names_step_cases_and_ways_out(
    dataset, tmp_path, monkeypatch
):
    original = TrainingStep._losses

    def diverging_losses(self, image, target, valid):
        total, parts = original(self, image, target, valid)
        diverging_losses.calls += 1
        return (total * torch.nan, parts) if diverging_losses.calls == 3 else (total, parts)

    diverging_losses.calls = 0
    monkeypatch.setattr(TrainingStep, "_losses", diverging_losses)
    recipe = recipe_for(dataset)
    text = refused(lambda: run_recipe(recipe, tmp_path / "run"), "diverged", "loss of step 2", "optimiser.lr")
    names = text.split("its cases are ")[1].split(".")[0].split(", ")
    assert set(names) <= {case.name for case in Dataset(dataset).cases}
    assert len(names) == recipe.batch_size
    assert not open_run(tmp_path / "run").folder.fold(0).last.exists()


def test_accumulated_gradients_equal_the_whole_batch_if_the_loss_is_a_mean_over_images(dataset, tmp_path):
    losses = []
    for accumulate in (1, 2):
        recipe = recipe_for(
            dataset,
            optimiser={"lr": 0.05, "accumulate": accumulate},
            loss={"over": "image", "cross_entropy_weight": 0.0, "region_weight": 1.0},
            model=SMALL | {"options": {"channels": [8, 16], "norm": "group"}},
            augment={"scale": [1.0, 1.0], "flip": False},
        )
        folder, _ = run_recipe(recipe, tmp_path / str(accumulate))
        lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
        losses.append(torch.tensor([line["loss"] for line in lines if "loss" in line]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"channels_last": True}], ids=str)
def test_other_precisions_train(dataset, tmp_path, options):
    recipe = recipe_for(dataset, precision=options, schedule={"epochs": 1})
    _, table = run_recipe(recipe, tmp_path / "run")
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


def test_volumes_are_validated_and_scored_as_volumes(sliced, tmp_path):
    folder, table = run_recipe(recipe_for(sliced), tmp_path / "run")
    dataset = Dataset(sliced)
    for fold in (0, 1):
        expected = volume_dice(folder, dataset, fold)
        rows = table.pipe(select, metric="dice_score", class_name="class1", fold=fold)
        assert dict(zip(rows["case"], rows["value"], strict=True)) == pytest.approx(expected, abs=1e-6)
        last = json.loads(folder.fold(fold).log.read_text().splitlines()[-1])
        # a stored probability is rounded, which may decide a voxel otherwise
        assert last["val_dice_score"] == pytest.approx(np.mean(list(expected.values())), abs=1e-3)


def test_slices_are_scored_on_their_own_if_the_recipe_says_so(sliced, tmp_path):
    validation = {"every": 6, "metrics": ["dice_score"], "unit": "slice"}
    folder, table = run_recipe(recipe_for(sliced, validation=validation), tmp_path / "run")
    assert table.pipe(metrics_of) == ("dice_score",)
    assert set(table["per"]) == {"slice"}
    assert len(set(table["case"].tolist())) == 18
    rows = table.pipe(select, class_name="class1", fold=0)
    last = json.loads(folder.fold(0).log.read_text().splitlines()[-1])
    assert last["val_dice_score"] == pytest.approx(rows["value"].mean(), abs=1e-3)


def network_with_encoder():
    return build_model(ModelOptions("unet", "resnet18", "none"), Task(1, 2))


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


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_two_steps_of_the_optimiser_as_the_formulas_say(name, dataset):
    lr, momentum, decay = 0.1, 0.8, 0.3
    options = OptimiserOptions(
        name=name, lr=lr, momentum=momentum, weight_decay=decay, decay_one_dimensional=False
    )
    recipe = recipe_for(dataset).model_copy(update={"optimiser": options})
    layer = torch.nn.Linear(3, 2).double()
    optimiser = build_optimiser(recipe, layer, torch.device("cpu"))
    expected = [parameter.detach().clone() for parameter in layer.parameters()]
    first, second = ([torch.zeros_like(value) for value in expected] for _ in range(2))
    for step in (1, 2):
        for number, parameter in enumerate(layer.parameters()):
            gradient = parameter.grad = torch.randn_like(parameter)
            decays = decay if parameter.ndim > 1 else 0.0
            value = expected[number]
            if name == "sgd":
                first[number] = momentum * first[number] + gradient + decays * value
                expected[number] = value - lr * first[number]
            else:
                first[number] = 0.9 * first[number] + 0.1 * gradient
                second[number] = 0.999 * second[number] + 0.001 * gradient**2
                root = (second[number] / (1 - 0.999**step)).sqrt() + 1e-8
                expected[number] = value * (1 - lr * decays) - lr * first[number] / (1 - 0.9**step) / root
        optimiser.step()
    for parameter, value in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def test_the_rates_of_encoder_and_decoder_follow_one_schedule(dataset, tmp_path, monkeypatch):
    seen = []
    original = TrainingStep._run

    def record(self):
        seen.append([float(group["lr"]) for group in self.optimiser.param_groups])
        return original(self)

    monkeypatch.setattr(TrainingStep, "_run", record)
    options = {"lr": 0.01, "decoder_lr_factor": 10.0, "decay_one_dimensional": False, "weight_decay": 0.3}
    run_recipe(recipe_for(dataset, optimiser=options, schedule={"epochs": 2}), tmp_path / "run")
    rates = np.array(seen)
    assert rates[0].min() == pytest.approx(0.01)
    np.testing.assert_allclose(rates.max(1), 10 * rates.min(1))
    assert rates[-1].max() < rates[0].max()


@pytest.mark.parametrize("maker", ["majority", "random"])
def test_hard_labels_stay_hard_in_training_so_that_both_dice_losses_are_equal(dataset, maker):
    """The paper's soft Dice loss and DML1 are the same function of hard labels."""
    options = AugmentOptions(scale=(0.5, 2.0), rotate_degrees=30)
    storage = Storage(Dataset(dataset), "cpu")
    chosen = BatchOptions(12, LabelOptions(maker=maker), options)
    batches = Batches(storage, range(12), storage.dataset.mean_std(range(12)), chosen)
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
    context = Context(Processes(chosen_device("cuda")))
    losses = []
    for graph in (False, True):
        recipe = recipe_for(dataset, precision={"dtype": dtype, "graph": graph}, log_every=1)
        run = start_run(recipe, tmp_path / str(graph), resume=False)
        finish_run(run, context)
        folder = run.folder
        lines = [json.loads(line) for line in folder.fold(0).log.read_text().splitlines()]
        losses.append(torch.tensor([line["loss"] for line in lines if "loss" in line]))
    assert len(losses[0]) == 6
    # dropout uses the same seeds; convolutions may choose other algorithms during graph capture
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)


def test_the_command_imports_no_other_framework(start):
    """Each takes as long as torch, or half of it."""
    others = "lightning_fabric torchmetrics tensorboard timm segmentation_models_pytorch matplotlib monai ray"
    code = "import sys, semidice.training.command\n"
    ended = start("-c", f"{code}print(*set({others.split()!r}) & sys.modules.keys())").end()
    assert (ended.code, ended.out.split()) == (0, []), ended.err
