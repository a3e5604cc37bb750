"""The mean over mirrored images: in a network, in windows, in `predict`, and at the end of a training."""

import json

import numpy as np
import pytest
import torch
from case_rows import rows_of, select
from lightning_fabric import Fabric
from PIL import Image
from prepared import make_prepared
from torch import nn
from trained import make_run, training_mean_std
from typer.testing import CliRunner

from semidice.cli import app
from semidice.data.folds import read_folds
from semidice.networks.build import ModelOptions, Task
from semidice.networks.predictor import network_probability
from semidice.networks.systems import SystemOptions, build_network
from semidice.networks.windows import windowed_probability
from semidice.recipes import Recipe, read_recipe, write_recipe
from semidice.runs.predictions import read_prediction
from semidice.runs.run import mirrored_axes, open_run
from semidice.statistics.cases import read_cases
from semidice.training.crossvalidation import cross_validate, start_run

SMALL = ModelOptions("small_unet", "none", "none", {"channels": [8, 16]})
SYSTEMS = ["standard", "mc_dropout", "multi_head", "softseg"]
# axes of space, and the mirrored axes of each image (N, C, H, W)
AXES = {"both": ((0, 1), [(), (2,), (3,), (2, 3)]), "columns": ((1,), [(), (3,)])}


def network_of(system="standard"):
    torch.manual_seed(0)
    return build_network(SMALL, SystemOptions(system, num_samples=3), Task(1, 3, 2), seed=0)


def random_image(*space):
    return torch.randn(2, 1, *space, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_mirrored_image_has_exactly_the_mirrored_probability(system, dtype):
    network, image = network_of(system), random_image(32, 64)
    prob = network_probability(network, image, dtype=dtype, flips=(0, 1))
    assert prob.dtype == torch.float32
    torch.testing.assert_close(prob.sum(1), torch.ones(2, 32, 64))
    plain = network_probability(network, image, dtype=dtype)
    for axes in AXES["both"][1][1:]:
        mirrored = image.flip(axes)
        assert torch.equal(network_probability(network, mirrored, dtype=dtype, flips=(0, 1)), prob.flip(axes))
        assert not torch.equal(network_probability(network, mirrored, dtype=dtype), plain.flip(axes))


def test_volumes_are_mirrored_along_three_axes():
    torch.manual_seed(0)
    network, image = nn.Conv3d(1, 2, 3, padding=1), random_image(4, 5, 6)
    flips = (0, 1, 2)
    prob = network_probability(network, image, dtype="fp32", flips=flips)
    for axes in [(2,), (3,), (4,), (2, 4), (2, 3, 4)]:
        assert torch.equal(
            network_probability(network, image.flip(axes), dtype="fp32", flips=flips), prob.flip(axes)
        )


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", AXES)
def test_the_probability_is_the_mean_over_mirrored_images(name, system):
    network, image = network_of(system), random_image(32, 32)
    flips, mirrors = AXES[name]
    probs = []
    for axes in mirrors:
        mirrored = torch.from_numpy(np.flip(image.numpy(), axes).copy())
        probs.append(np.flip(network_probability(network, mirrored, dtype="fp32").numpy(), axes))
    prob = network_probability(network, image, dtype="fp32", flips=flips)
    np.testing.assert_allclose(prob.numpy(), np.mean(probs, 0, dtype=np.float64), atol=1e-6)
    assert np.abs(prob.numpy() - probs[0]).max() > 1e-3


def test_without_flips_the_network_sees_the_image_once():
    network, image = network_of(), random_image(32, 32)
    images = []
    network.register_forward_pre_hook(lambda _, inputs: images.append(inputs[0]))
    prob = network_probability(network, image, dtype="fp32")
    assert len(images) == 1
    assert images[0] is image
    with torch.no_grad():
        assert torch.equal(prob, network(image).softmax(1))


def test_every_window_is_mirrored_on_its_own():
    network, image = network_of(), random_image(96, 96)
    sizes = []

    def predictor(window):
        sizes.append(window.shape[-2:])
        return network_probability(network, window, dtype="fp32", flips=(0, 1))

    # windows of 64 begin at 0 and 32, so those of the mirrored image are the mirrored windows
    prob, of_mirrored = (
        windowed_probability(predictor, part, device="cpu", window=64) for part in (image, image.flip(3))
    )
    assert set(sizes) == {(64, 64)}
    torch.testing.assert_close(of_mirrored, prob.flip(3), atol=1e-6, rtol=0)


# `semidice predict`


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=8, size=(32, 32))


@pytest.fixture
def run(dataset, tmp_path):
    return make_run(tmp_path / "run", dataset, scored=False)


def change_recipe(run, *overrides):
    write_recipe(read_recipe(run.recipe, overrides), run.recipe)


def write_picture(dataset, number, folder):
    folder.mkdir(exist_ok=True)
    path = folder / f"{dataset.cases[number].name}.png"
    Image.fromarray(dataset.stored("images", number)[0]).save(path)
    return path


def predict(run, source, out, *options):
    command = ["predict", str(run.path), str(source), "-o", str(out), "--device", "cpu", *options]
    return CliRunner().invoke(app, command)


def predicted_units(run, source, out, *options):
    """The foreground's probability in units of 1/65535, as `semidice predict` writes it."""
    done = predict(run, source, out, *options)
    assert done.exit_code == 0, done.output
    return np.array(Image.open(out / f"{source.stem}_prob.png"))


def expected_units(run, dataset, number, mirrors):
    """The mean of the networks of both folds over mirrored images."""
    probs = []
    for fold in (0, 1):
        mean, std = training_mean_std(dataset, read_folds(run.folds, dataset), fold)
        image = (torch.from_numpy(dataset.image(number)) - mean) / std
        network = open_run(run).network(fold, device="cpu")
        for axes in mirrors:
            with torch.no_grad():
                probs.append(network(image[None].flip(axes)).softmax(1).flip(axes)[0, 1].double())
    return 65535 * torch.stack(probs).mean(0).numpy()


@pytest.mark.parametrize(
    ("in_recipe", "options", "is_mirrored"),
    [
        (False, [], False),
        (False, ["--flips"], True),
        (True, [], True),
        (True, ["--no-flips"], False),
    ],
)
def test_predict_mirrors_images_as_its_option_or_the_recipe_says(
    run, dataset, tmp_path, in_recipe, options, is_mirrored
):
    change_recipe(run, f"validation.flips={str(in_recipe).lower()}")
    source = write_picture(dataset, 1, tmp_path / "in")
    units = predicted_units(run, source, tmp_path / "out", *options)
    mirrors = AXES["both"][1]
    np.testing.assert_allclose(
        units, expected_units(run, dataset, 1, mirrors if is_mirrored else [()]), atol=0.6
    )
    other = expected_units(run, dataset, 1, [()] if is_mirrored else mirrors)
    assert np.abs(units - other).max() > 100
    assert json.loads((tmp_path / "out" / "prediction.json").read_text())["settings"]["flips"] is is_mirrored


def test_predict_mirrors_only_the_axes_of_the_training(run, dataset, tmp_path):
    change_recipe(run, "augment.flip=[false,true]")
    source = write_picture(dataset, 1, tmp_path / "in")
    units = predicted_units(run, source, tmp_path / "out", "--flips")
    np.testing.assert_allclose(units, expected_units(run, dataset, 1, AXES["columns"][1]), atol=0.6)
    assert np.abs(units - expected_units(run, dataset, 1, AXES["both"][1])).max() > 100


def test_predictions_with_and_without_flips_are_not_mixed(run, dataset, tmp_path):
    source = write_picture(dataset, 1, tmp_path / "in")
    predicted_units(run, source, tmp_path / "out")
    done = predict(run, source, tmp_path / "out", "--flips")
    assert done.exit_code == 1
    assert "predictions with other settings (flips)" in done.output


def test_flips_need_a_training_with_flips(run, dataset, tmp_path):
    change_recipe(run, "augment.flip=false")
    source = write_picture(dataset, 1, tmp_path / "in")
    done = predict(run, source, tmp_path / "out", "--flips")
    assert done.exit_code == 1
    assert "tiny has augment.flip false: predict without flips" in done.output
    assert not (tmp_path / "out").exists()
    assert predict(run, source, tmp_path / "out").exit_code == 0
    with pytest.raises(ValueError, match=r"augment\.flip false"):
        start_run(read_recipe(run.recipe, ["validation.flips=true"]), tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flip", "num_axes", "expected"),
    [(True, 2, (0, 1)), (True, 3, (0, 1, 2)), ([True, False], 2, (0,)), ([False, True, True], 3, (1, 2))],
)
def test_a_prediction_mirrors_the_axes_of_the_training(flip, num_axes, expected):
    recipe = Recipe(name="a", data={"dataset": "prepared"}, augment={"flip": flip})
    assert mirrored_axes(recipe, num_axes, flips=True) == expected
    assert mirrored_axes(recipe, num_axes) == ()


# the end of a training


def test_a_run_with_flips_scores_what_predict_gives(dataset, tmp_path):
    recipe = Recipe.model_validate(
        {
            "name": "mirrored",
            "data": {"dataset": str(dataset.folder.path), "num_folds": 2},
            "model": SMALL,
            "schedule": {"epochs": 2},
            "batch_size": 4,
            "validation": {"metrics": ["dice_score"], "flips": True},
            "workers": 0,
        }
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    trained = start_run(recipe, tmp_path / "run", resume=False)
    cross_validate(trained, fabric)
    dice = read_cases(trained.folder.cases).pipe(select, metric="dice_score", class_name="mean")
    assert len(dice) == len(dataset)
    for row in dice.pipe(rows_of):
        (number,) = dataset.numbers_of([row.case])
        source = write_picture(dataset, number, tmp_path / "in")
        units = predicted_units(
            trained.folder, source, tmp_path / f"out{row.fold}", "--fold", str(row.fold), "--batch-size", "4"
        )
        stored = read_prediction(trained.folder.fold(row.fold).prediction(row.case))
        np.testing.assert_allclose(units, 65535 * stored[1], atol=1)
        mask = units > 65535 / 2
        masks = dataset.masks(number)
        target = 2 * masks.sum(0) > len(masks)
        union = mask.sum() + target.sum()
        assert row.value == pytest.approx(2 * (mask & target).sum() / union if union else 1, abs=0.02)
    without = tmp_path / "without"
    units = predicted_units(trained.folder, source, without, "--fold", str(row.fold), "--no-flips")
    assert np.abs(units - 65535 * stored[1]).max() > 100
