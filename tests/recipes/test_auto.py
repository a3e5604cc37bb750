"""`auto`: what it chooses, that it keeps what is given, and that a run keeps its choices."""

import numpy as np
import pytest
import torch
from prepared import dataset_with, make_prepared

from semidice.networks.build import ModelOptions, Task, build_model
from semidice.recipes import auto, option_value, read_recipe, write_recipe
from semidice.recipes.auto import choose_options
from semidice.runs.start import start_run


@pytest.fixture
def dataset(tmp_path):
    return make_prepared(tmp_path / "set", num_cases=20, size=(64, 64))


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    """Weights are never on this machine, whatever its cache holds."""
    monkeypatch.setattr(auto, "weights_can_be_had", lambda encoder, weights: False)


def chosen(dataset, device="cpu", **given):
    given = {key.replace("__", "."): value for key, value in given.items()}
    choices = choose_options(dataset, given, num_folds=5, device=device)
    return {choice.key: choice.value for choice in choices}


def read(dataset, *overrides, name="auto"):
    return read_recipe(name, [f"data.dataset={dataset.folder.path}", *overrides], accelerator="cpu")


def test_every_choice_is_an_option_with_a_reason_and_the_recipe_has_its_value(dataset):
    recipe = read(dataset)
    assert len(recipe.reasons) > 15
    assert all(recipe.reasons.values())
    for key, value in chosen(dataset).items():
        assert option_value(recipe, key) == value, key
    assert not recipe.auto


def test_an_option_that_is_given_is_kept_and_has_no_reason(dataset):
    recipe = read(dataset, "optimiser.lr=0.5", "augment.flip=false", "loss.over=class")
    assert (recipe.optimiser.lr, recipe.augment.flip, recipe.loss.over) == (0.5, False, "class")
    assert not {"optimiser.lr", "augment.flip", "loss.over"} & recipe.reasons.keys()
    assert "augment.scale" in recipe.reasons


def test_the_rates_of_adamw_are_not_given_to_another_optimiser(dataset):
    recipe = read(dataset, "optimiser.name=sgd")
    assert (recipe.optimiser.lr, recipe.optimiser.weight_decay) == (0.01, 5e-4)


def test_any_recipe_can_ask_for_auto(dataset, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("auto: true\nlabel: {maker: majority}\n")
    recipe = read(dataset, name=str(path))
    assert (recipe.label.maker, recipe.optimiser.name) == ("majority", "adamw")
    assert not read(dataset, name="quick").reasons


def test_centred_foreground_stays_centred_and_other_foreground_may_lie_anywhere(tmp_path):
    centred, spread = np.zeros((2, 10, 64, 64), dtype=np.uint8)
    centred[:, 30:36, 28:34] = 1
    for number, mask in enumerate(spread):
        mask[6 * number : 6 * number + 4, 50 - 4 * number : 54 - 4 * number] = 1
    assert chosen(dataset_with(tmp_path / "centred", centred))["augment.shift"] == 0
    assert chosen(dataset_with(tmp_path / "spread", spread))["augment.shift"] == 1


def test_images_are_not_mirrored_where_classes_have_an_order_or_lie_on_one_side(tmp_path):
    masks = np.zeros((10, 64, 64), dtype=np.uint8)
    masks[:, 24:28, 30:34], masks[:, 36:40, 30:34] = 1, 2
    ordered = dataset_with(tmp_path / "ordered", masks, num_classes=3)
    assert chosen(ordered)["augment.flip"] == [False, True]
    masks = np.zeros((10, 64, 64), dtype=np.uint8)
    masks[:, 30:34, 4:8] = 1
    assert chosen(dataset_with(tmp_path / "left", masks))["augment.flip"] == [True, False]


def test_large_images_are_trained_in_windows_that_find_the_foreground(tmp_path):
    large = make_prepared(tmp_path / "set", num_cases=4, size=(300, 700))
    on_cpu, on_gpu = chosen(large), chosen(large, "cuda")
    assert (on_cpu["augment.crop"], on_gpu["augment.crop"]) == ([256, 256], [320, 512])
    assert on_cpu["augment.foreground"] == on_gpu["augment.foreground"] == 0.5
    assert on_cpu["augment.shift"] == on_gpu["augment.shift"] == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [(32, 32), (64, 96), (128, 128), (256, 256)])
def test_the_network_runs_and_its_coarsest_level_has_about_eight_pixels(tmp_path, device, size):
    values = chosen(make_prepared(tmp_path / "set", num_cases=4, size=size), device)
    channels = values["model.options"]["channels"]
    assert 8 <= min(size) >> (len(channels) - 1) < 16
    network = build_model(ModelOptions("small_unet", "none", "none", {"channels": channels}), Task(1, 2))
    with torch.no_grad():
        assert network(torch.zeros(2, 1, *size)).shape == (2, 2, *size)


def test_a_pretrained_encoder_is_chosen_on_a_gpu_where_its_weights_can_be_had(tmp_path, monkeypatch):
    large = make_prepared(tmp_path / "large", num_cases=4, size=(128, 128))
    small = make_prepared(tmp_path / "small", num_cases=4, size=(64, 64))
    monkeypatch.setattr(auto, "weights_can_be_had", lambda encoder, weights: True)
    values = chosen(large, "cuda")
    assert (values["model.architecture"], values["model.weights"]) == ("unet", "imagenet")
    options = values["model.options"]
    assert options["encoder_depth"] == len(options["decoder_channels"]) == 4
    assert chosen(large, "cpu")["model.architecture"] == "small_unet"
    assert chosen(small, "cuda")["model.architecture"] == "small_unet"
    network = build_model(ModelOptions("unet", values["model.encoder"], "none", options), Task(1, 2))
    with torch.no_grad():
        assert network.eval()(torch.zeros(1, 1, 128, 128)).shape == (1, 2, 128, 128)


def test_weights_of_a_file_are_used_on_any_device_and_an_architecture_is_left_alone(dataset):
    recipe = read(dataset, "model.weights=some.safetensors")
    assert (recipe.model.architecture, recipe.model.encoder) == ("unet", "tf_efficientnet_lite0")
    recipe = read(dataset, "model.architecture=fpn", "model.weights=none")
    assert (recipe.model.encoder, recipe.model.options) == ("resnet50", {})


@pytest.mark.parametrize("num_cases", [10, 40, 400])
def test_few_cases_get_more_epochs(tmp_path, num_cases):
    values = chosen(make_prepared(tmp_path / "set", num_cases=num_cases, size=(32, 32)))
    num_training = num_cases - num_cases // 5
    steps = values["schedule.epochs"] * (num_training // values["batch_size"])
    assert values["schedule.epochs"] <= 300
    assert steps >= 1500 or values["schedule.epochs"] == 300
    assert values["schedule.warmup_steps"] <= steps / 10


def test_volumes_are_refused_with_the_way_out(tmp_path):
    volumes = make_prepared(tmp_path / "set", num_cases=4, size=(32, 32), depth=4)
    with pytest.raises(ValueError, match="volumes: prepare it with --slices all"):
        chosen(volumes)


def test_the_recipe_of_a_run_is_read_without_its_dataset(dataset, tmp_path):
    recipe = read(dataset)
    (tmp_path / "run").mkdir()
    write_recipe(recipe, tmp_path / "run" / "recipe.yaml")
    dataset.folder.path.rename(tmp_path / "moved")
    assert read_recipe(tmp_path / "run" / "recipe.yaml", accelerator=None) == recipe


def test_a_resumed_run_keeps_what_was_chosen_on_another_device(dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        on_gpu = read_recipe("auto", [f"data.dataset={dataset.folder.path}"])
    assert on_gpu.precision.dtype == "bf16"
    start_run(on_gpu, tmp_path / "run", resume=False)
    resumed = start_run(read(dataset), tmp_path / "run", resume=True)
    assert resumed.recipe == on_gpu
    with pytest.raises(ValueError, match=r"differs in optimiser\.lr"):
        start_run(read(dataset, "optimiser.lr=0.5"), tmp_path / "run", resume=True)
