"""Stored predictions, networks of a run folder, windows, and `semidice predict` on real files."""

import csv
import io
import json
import shlex
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning_fabric import Fabric
from PIL import Image
from prepared import make_prepared
from raw_trees import make_nnunet
from rich.console import Console
from start import refused
from torch import nn
from trained import make_run, new_network, recipe_of, training_mean_std

from semidice.data.batches.feed import whole_cases
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.geometry import Grid
from semidice.data.intensities import MeanStd
from semidice.data.manifest import PrepareOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.resample import resize_image, resize_probability
from semidice.data.sources import find_datasets
from semidice.networks.predictor import network_probability
from semidice.networks.windows import windowed_probability
from semidice.prediction.command import run_predict
from semidice.prediction.inputs import InputCase, InputImage, find_inputs, read_input
from semidice.prediction.options import PredictOptions
from semidice.prediction.outputs import OutputFolder
from semidice.recipes import Recipe
from semidice.runs.predictions import read_prediction, write_prediction
from semidice.runs.run import DatasetFacts, FoldRun, open_run
from semidice.training.crossvalidation import cross_validate, start_run

AFFINE = np.array([[-0.7, 0.1, 0, 12.5], [0.05, 0.8, 0.2, -30], [0, -0.1, 2.5, 7], [0, 0, 0, 1]])
# as in raw_trees
UPRIGHT = np.diag([0.7, 0.8, 2.5, 1.0])


def new_console() -> Console:
    return Console(file=io.StringIO(), width=200)


def predict(run, inputs, out, *, console=None, **options) -> None:
    """`semidice predict` on the CPU."""
    run_predict(
        run.path, inputs, out, PredictOptions(device="cpu", **options), console=console or new_console()
    )


def printed(console: Console) -> str:
    return console.file.getvalue()


def write_nifti(path: Path, values: np.ndarray, *, affine: np.ndarray = AFFINE) -> Path:
    image = nibabel.Nifti1Image(values, affine)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code=2)
    image.set_qform(affine, code=1)
    image.header["descrip"] = b"scanner"
    nibabel.save(image, path)
    return path


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(0).numpy()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=4, size=(32, 32))


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run of two folds; its dataset was prepared with the window 0 to 1 and without resizing."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return make_run(path, dataset, options={"window": [0.0, 1.0]}, scored=False)


# Stored predictions


@given(
    shape=st.tuples(st.integers(2, 5), st.integers(1, 6), st.integers(1, 6)),
    spread=st.floats(0, 30),
    seed=st.integers(0, 2**16),
)
def test_a_stored_prediction_is_read_to_within_one_unit_and_sums_to_one(
    tmp_path_factory, shape, spread, seed
):
    prob = softmax(np.random.default_rng(seed).normal(0, spread, shape))
    path = tmp_path_factory.mktemp("stored") / "case.npz"
    write_prediction(path, prob)
    stored = read_prediction(path)
    assert stored.dtype == np.float32
    # one unit, plus the rounding of a float32 near 1
    assert np.abs(stored - prob).max() <= 1 / 65535 + 2**-24
    units = stored.astype(np.float64) * 65535
    np.testing.assert_allclose(units, units.round(), atol=0.01)
    assert (units.round().sum(0) == 65535).all()


def test_a_prediction_that_was_read_is_written_again_as_the_same_bytes(tmp_path):
    prob = softmax(np.random.default_rng(0).normal(0, 3, (3, 20, 20)))
    write_prediction(tmp_path / "a.npz", prob.astype(np.float32))
    write_prediction(tmp_path / "b.npz", torch.from_numpy(read_prediction(tmp_path / "a.npz")))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_two_classes_are_read_to_within_half_a_unit(tmp_path):
    foreground = np.random.default_rng(0).uniform(0, 1, (50, 50))
    write_prediction(tmp_path / "case.npz", np.stack([1 - foreground, foreground]))
    stored = read_prediction(tmp_path / "case.npz")
    assert np.abs(stored[1] - foreground).max() <= 0.5 / 65535 + 2**-24


def test_hard_probabilities_are_stored_exactly(tmp_path):
    prob = np.stack([np.eye(4), 1 - np.eye(4)]).astype(np.float32)
    write_prediction(tmp_path / "case.npz", prob)
    np.testing.assert_array_equal(read_prediction(tmp_path / "case.npz"), prob)


def test_a_softmax_of_bfloat16_is_scaled_to_one(tmp_path):
    prob = torch.randn(6, 30, 30).softmax(0).bfloat16()
    write_prediction(tmp_path / "case.npz", prob)
    exact = prob.double() / prob.double().sum(0)
    assert np.abs(read_prediction(tmp_path / "case.npz") - exact.numpy()).max() <= 1 / 65535 + 2**-24


@pytest.mark.parametrize(
    "prob",
    [np.full((2, 3), np.nan), np.full((2, 3), 0.7), np.array([[1.5], [-0.5]]), np.ones((1, 3))],
    ids=["NaN", "sum", "negative", "one class"],
)
def test_values_that_are_not_probabilities_are_not_stored(tmp_path, prob):
    with pytest.raises(ValueError, match=r"case\.npz: a stored prediction needs"):
        write_prediction(tmp_path / "case.npz", prob)
    assert list(tmp_path.iterdir()) == []


def test_a_stored_prediction_that_would_be_misread_is_refused(tmp_path):
    path = tmp_path / "case.npz"
    refused(lambda: read_prediction(path), str(path), "predict again")
    np.savez_compressed(path, foreground=np.full((2, 3), 40000, dtype=np.uint16))
    refused(lambda: read_prediction(path), str(path), "1.22")
    np.savez_compressed(path, foreground=np.zeros((2, 3)))
    refused(lambda: read_prediction(path), str(path), "float64", "predict again")


# Networks


def test_probability_is_softmax_of_the_logits_without_gradient():
    module = nn.Conv2d(1, 3, 1).train()
    image = torch.randn(2, 1, 4, 4)
    prob = network_probability(module, image, dtype="fp32")
    assert not module.training
    assert not prob.requires_grad
    torch.testing.assert_close(prob, module(image).softmax(1))
    half = network_probability(module, image, dtype="bf16")
    assert half.dtype == torch.float32
    # bfloat16 keeps eight bits of a logit
    torch.testing.assert_close(half, prob, atol=2e-2, rtol=0)
    assert not torch.equal(half, prob)
    with pytest.raises(ValueError, match="fp32, bf16, fp16; got 'float'"):
        network_probability(module, image, dtype="float")


def test_a_network_is_loaded_with_the_weights_of_its_fold(run, dataset):
    image = torch.randn(1, 1, 32, 32)
    for fold in (0, 1):
        expected = new_network(recipe_of(dataset), dataset, seed=fold)
        loaded = open_run(run).network(fold, device="cpu")
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        torch.testing.assert_close(loaded(image), expected(image), atol=0, rtol=0)
    assert open_run(run.path).finished_folds == (0, 1)


# Windows


def test_images_are_padded_with_zeros_on_all_sides_and_cropped_after_prediction():
    batches = []

    def network(image):
        batches.append(image)
        return image

    image = torch.rand(2, 1, 33, 40) + 1
    prob = windowed_probability(network, image, device="cpu", window=None, batch_size=2)
    torch.testing.assert_close(prob, image)
    assert batches[0].shape == (2, 1, 64, 64)
    assert torch.equal(batches[0][:, :, 16:49, 12:52], image)
    assert (batches[0] != 0).sum() == image.numel()


def pointwise(image: torch.Tensor) -> torch.Tensor:
    return torch.cat([image.sigmoid(), (-image).sigmoid()], 1)


@pytest.mark.parametrize("size", [(96, 96), (97, 130), (64, 300), (50, 200)])
def test_windows_give_the_same_as_the_full_image_for_a_pointwise_network(size):
    image = torch.randn(2, 1, *size)
    sizes = []

    def network(batch):
        sizes.append(batch.shape)
        return pointwise(batch)

    prob = windowed_probability(network, image, device="cpu", window=64, batch_size=3)
    torch.testing.assert_close(prob, pointwise(image))
    assert all(shape[0] <= 3 and max(shape[2:]) <= 64 for shape in sizes)
    assert len(sizes) > 1


def test_an_image_that_fits_into_the_window_is_predicted_at_once():
    torch.manual_seed(1)
    blur = nn.Conv2d(1, 2, 9, padding=4)
    image = torch.randn(1, 1, 64, 50)
    with torch.no_grad():
        prob = windowed_probability(lambda batch: blur(batch).softmax(1), image, device="cpu", window=64)
        expected = blur(nn.functional.pad(image, (7, 7))).softmax(1)[..., 7:57]
    assert torch.equal(prob, expected)


def test_a_window_must_fit_the_network():
    image = torch.randn(1, 1, 64, 64)
    refused(lambda: windowed_probability(pointwise, image, device="cpu", window=50), "multiple of 32")


# Predicting files


def expected_prob(run, dataset, images: np.ndarray, *, folds=(0, 1)) -> np.ndarray:
    """Mean softmax over folds, computed by hand for images (S, H, W) in [0, 1] with the window 0 to 1."""
    stored = np.rint(images * 32767) / 32767
    image = torch.from_numpy(stored).float()[:, None]
    height, width = images.shape[1:]
    top, left = (-height % 32 + 1) // 2, (-width % 32 + 1) // 2
    padded = torch.zeros(len(image), 1, height + -height % 32, width + -width % 32)
    total = 0
    for fold in folds:
        mean, std = training_mean_std(dataset, read_folds(run.folds, dataset), fold)
        padded[..., top : top + height, left : left + width] = (image - mean) / std
        network = new_network(recipe_of(dataset), dataset, seed=fold)
        with torch.no_grad():
            total = total + network(padded).softmax(1) / len(folds)
    return total[..., top : top + height, left : left + width].numpy()


def volumes(out: Path) -> list[dict[str, str]]:
    with (out / "volumes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("axis", [0, 2])
def test_a_volume_is_predicted_slice_by_slice_and_its_outputs_keep_its_grid(run, dataset, tmp_path, axis):
    slices = np.random.default_rng(axis).uniform(0, 1, (5, 40, 36)).astype(np.float32)
    source = write_nifti(tmp_path / "scan.1.nii.gz", np.moveaxis(slices, 0, axis))
    out = tmp_path / "out"
    predict(run, [source], out, slice_axis=axis, batch_size=2)
    prob, mask = (nibabel.load(out / f"scan.1_{kind}.nii.gz") for kind in ("prob", "mask"))
    expected = np.moveaxis(expected_prob(run, dataset, slices)[:, 1], 0, axis)
    np.testing.assert_allclose(prob.get_fdata(), expected, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(mask.dataobj), (np.asarray(prob.dataobj) > 0.5).astype(np.uint8))
    assert prob.get_data_dtype() == np.float32
    assert mask.get_data_dtype() == np.uint8
    original = nibabel.load(source)
    for image in (prob, mask):
        np.testing.assert_array_equal(image.affine, original.affine)
        np.testing.assert_array_equal(image.get_sform(), original.get_sform())
        np.testing.assert_array_equal(image.get_qform(), original.get_qform())
        assert (int(image.header["sform_code"]), int(image.header["qform_code"])) == (2, 1)
        assert image.header.get_zooms() == original.header.get_zooms()
        assert image.header.get_xyzt_units() == original.header.get_xyzt_units()
    (row,) = volumes(out)
    voxel_ml = np.prod(original.header.get_zooms()) / 1000
    assert (row["case"], row["class"]) == ("scan.1", "class1")
    assert float(row["volume_ml"]) == pytest.approx((expected > 0.5).sum() * voxel_ml, rel=1e-5)
    assert float(row["expected_ml"]) == pytest.approx(expected.sum() * voxel_ml, rel=1e-5)
    assert int(row["volume_voxels"]) == (expected > 0.5).sum()
    assert float(row["expected_voxels"]) == pytest.approx(expected.sum(), abs=1e-2)


def test_the_default_slice_axis_is_the_one_of_the_dataset(dataset, tmp_path):
    options = {"window": [0.0, 1.0], "slices": "foreground", "slice_axis": 1}
    run = make_run(tmp_path / "run", dataset, options=options, scored=False)
    slices = np.random.default_rng(3).uniform(0, 1, (4, 32, 48)).astype(np.float32)
    source = write_nifti(tmp_path / "scan.nii", np.moveaxis(slices, 0, 1))
    predict(run, [source], tmp_path / "out")
    prob = nibabel.load(tmp_path / "out" / "scan_prob.nii.gz").get_fdata()
    np.testing.assert_allclose(prob, np.moveaxis(expected_prob(run, dataset, slices)[:, 1], 0, 1), atol=2e-6)


@pytest.mark.parametrize("shape", [(40, 36), (40, 36, 1), (1, 40, 36), (40, 1, 36, 1)])
def test_a_single_image_in_a_nifti_keeps_the_axes_of_its_file(run, dataset, tmp_path, shape):
    image = np.random.default_rng(0).uniform(0, 1, (40, 36)).astype(np.float32)
    source = write_nifti(tmp_path / "one.nii.gz", image.reshape(shape))
    predict(run, [source], tmp_path / "out")
    prob = nibabel.load(tmp_path / "out" / "one_prob.nii.gz")
    space = shape[:3]
    assert prob.shape == space
    np.testing.assert_allclose(
        prob.get_fdata().reshape(40, 36), expected_prob(run, dataset, image[None])[0, 1], atol=2e-6
    )
    (row,) = volumes(tmp_path / "out")
    assert (row["volume_ml"] == "") == (len(shape) == 2)
    assert len(row["spacing_mm"].split(" x ")) == len(space)


def test_the_outputs_of_a_picture_are_pictures(run, dataset, tmp_path):
    """A window in raw values is applied to 8-bit images too; here 0 to 255 becomes 0 to 1."""
    run = make_run(tmp_path / "run", dataset, options={"window": [0.0, 255.0]}, scored=False)
    pixels = np.random.default_rng(0).integers(0, 256, (45, 33), dtype=np.uint8)
    (tmp_path / "in").mkdir()
    Image.fromarray(pixels).save(tmp_path / "in" / "photo.png")
    Image.fromarray(pixels[::-1]).save(tmp_path / "in" / "other.TIF", format="TIFF")
    (tmp_path / "in" / "notes.txt").write_text("not an image")
    out = tmp_path / "out"
    predict(run, [tmp_path / "in"], out)
    expected = expected_prob(run, dataset, pixels[None] / 255)[0, 1]
    prob = np.array(Image.open(out / "photo_prob.png"))
    assert prob.dtype in (np.uint16, np.int32)
    np.testing.assert_allclose(prob / 65535, expected, atol=1e-5)
    mask = np.array(Image.open(out / "photo_mask.png"))
    assert set(np.unique(mask)) <= {0, 255}
    np.testing.assert_array_equal(mask > 0, expected > 0.5)
    assert sorted(path.name for path in out.glob("[!.]*")) == [
        "other_mask.png",
        "other_prob.png",
        "photo_mask.png",
        "photo_prob.png",
        "prediction.json",
        "volumes.csv",
    ]
    rows = volumes(out)
    assert [row["case"] for row in rows] == ["other", "photo"]
    assert [(row["volume_ml"], row["expected_ml"], row["spacing_mm"]) for row in rows] == [("", "", "")] * 2
    assert int(rows[1]["volume_voxels"]) == (mask > 0).sum()


def test_the_pages_of_a_tiff_are_predicted_as_slices(run, dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset, options={"window": [0.0, 255.0]}, scored=False)
    pages = np.random.default_rng(0).integers(0, 256, (3, 32, 40), dtype=np.uint8)
    first, *rest = (Image.fromarray(page) for page in pages)
    first.save(tmp_path / "stack.tif", save_all=True, append_images=rest)
    predict(run, [tmp_path / "stack.tif"], tmp_path / "out")
    expected = expected_prob(run, dataset, pages / 255)[:, 1]
    with Image.open(tmp_path / "out" / "stack_prob.tif") as prob:
        assert prob.n_frames == 3
        for number in range(3):
            prob.seek(number)
            np.testing.assert_allclose(np.array(prob) / 65535, expected[number], atol=1e-5)
    with Image.open(tmp_path / "out" / "stack_mask.tif") as mask:
        mask.seek(2)
        np.testing.assert_array_equal(np.array(mask) > 0, expected[2] > 0.5)


def test_without_a_chosen_fold_the_prediction_is_the_mean_over_folds(run, dataset, tmp_path):
    image = np.random.default_rng(0).uniform(0, 1, (32, 32)).astype(np.float32)
    source = write_nifti(tmp_path / "one.nii.gz", image)
    probs = {}
    for fold in (None, 0, 1):
        out = tmp_path / f"out{fold}"
        predict(run, [source], out, fold=fold)
        probs[fold] = nibabel.load(out / "one_prob.nii.gz").get_fdata()
    np.testing.assert_allclose(probs[None], (probs[0] + probs[1]) / 2, atol=1e-6)
    assert np.abs(probs[0] - probs[1]).max() > 0.01


def test_a_threshold_replaces_the_choice_of_the_most_probable_class(run, tmp_path):
    source = write_nifti(tmp_path / "one.nii.gz", np.random.default_rng(0).uniform(0, 1, (32, 32)))
    predict(run, [source], tmp_path / "out", decide="threshold:0.3")
    prob, mask = (
        np.asarray(nibabel.load(tmp_path / "out" / f"one_{kind}.nii.gz").dataobj) for kind in ("prob", "mask")
    )
    np.testing.assert_array_equal(mask, prob > np.float32(0.3))


def test_three_classes_are_stored_along_the_last_axis_or_in_one_picture_each(tmp_path):
    dataset = make_prepared(tmp_path / "dataset", num_cases=4, size=(32, 32), num_classes=3)
    run = make_run(tmp_path / "run", dataset, options={"window": [0.0, 255.0]}, scored=False)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 36), dtype=np.uint8)
    inputs = [write_nifti(tmp_path / f"{name}.nii.gz", values) for name, values in (
        ("volume", np.moveaxis(pixels, 0, 2)), ("flat", pixels[0])
    )]  # fmt: skip
    # some scanners write 0 as the length of axes that the file does not have
    flat = nibabel.load(inputs[1])
    flat.header["pixdim"][3:5] = 0
    nibabel.save(flat, tmp_path / "flat2.nii.gz")
    inputs[1] = (tmp_path / "flat2.nii.gz").rename(tmp_path / "flat.nii.gz")
    assert nibabel.load(inputs[1]).header["pixdim"][4] == 0
    Image.fromarray(pixels[0]).save(tmp_path / "photo.png")
    out = tmp_path / "out"
    predict(run, [*inputs, tmp_path / "photo.png"], out)
    expected = expected_prob(run, dataset, pixels / 255)
    prob = nibabel.load(out / "volume_prob.nii.gz")
    assert prob.shape == (40, 36, 2, 3)
    np.testing.assert_array_equal(prob.affine, nibabel.load(inputs[0]).affine)
    np.testing.assert_allclose(prob.get_fdata(), expected.transpose(2, 3, 0, 1), atol=2e-6)
    mask = np.asarray(nibabel.load(out / "volume_mask.nii.gz").dataobj)
    np.testing.assert_array_equal(mask, np.asarray(prob.dataobj).argmax(-1))
    flat = nibabel.load(out / "flat_prob.nii.gz")
    assert flat.shape == (40, 36, 1, 3)
    assert flat.header.get_zooms()[2:] == (1, 1)
    for number in (1, 2):
        picture = np.array(Image.open(out / f"photo_prob_{number}.png"))
        np.testing.assert_allclose(picture / 65535, expected[0, number], atol=1e-5)
    np.testing.assert_array_equal(np.array(Image.open(out / "photo_mask.png")), mask[:, :, 0])
    rows = [row for row in volumes(out) if row["case"] == "volume"]
    assert [row["class"] for row in rows] == ["class1", "class2"]
    assert [int(row["volume_voxels"]) for row in rows] == [(mask == 1).sum(), (mask == 2).sum()]


def test_an_image_is_resized_like_the_dataset_and_its_probabilities_are_resized_back(dataset, tmp_path):
    options = {"window": [0.0, 1.0], "size": [32, 64]}
    run = make_run(tmp_path / "run", dataset, options=options, scored=False)
    image = np.random.default_rng(0).uniform(0, 1, (50, 70)).astype(np.float32)
    source = write_nifti(tmp_path / "one.nii.gz", image)
    # an image of the training size is predicted at once, for any window
    predict(run, [source], tmp_path / "out", window=32)
    small = expected_prob(run, dataset, resize_image(image, (32, 64))[None])[0]
    prob = nibabel.load(tmp_path / "out" / "one_prob.nii.gz").get_fdata()
    np.testing.assert_allclose(prob, resize_probability(small, (50, 70))[1], atol=2e-6)


def test_a_large_image_is_predicted_in_windows(run, dataset, tmp_path, monkeypatch):
    image = np.random.default_rng(0).uniform(0, 1, (100, 130)).astype(np.float32)
    source = write_nifti(tmp_path / "one.nii.gz", image)
    shapes = []

    class Pointwise(nn.Module):
        def forward(self, image):
            shapes.append(tuple(image.shape))
            return torch.cat([image, -image], 1)

    monkeypatch.setattr("semidice.runs.run.TrainedRun.network", lambda *_, **__: Pointwise())
    predict(run, [source], tmp_path / "out", window=64, batch_size=2, fold=1)
    mean, std = (float(number) for number in training_mean_std(dataset, read_folds(run.folds, dataset), 1))
    normal = (image - mean) / std
    prob = nibabel.load(tmp_path / "out" / "one_prob.nii.gz").get_fdata()
    # the image is stored in steps of 1/32767
    np.testing.assert_allclose(prob, 1 / (1 + np.exp(2 * normal)), atol=2e-4)
    assert set(shapes) == {(2, 1, 64, 64)}


def test_predicting_a_case_of_the_dataset_gives_the_same_as_validation(dataset, tmp_path):
    """The network gets the same image from the prepared dataset and from the raw 8-bit file."""
    run = make_run(tmp_path / "run", dataset, scored=False)
    case = dataset.cases[1]
    Image.fromarray(dataset.stored("images", 1)[0]).save(tmp_path / f"{case.name}.png")
    predict(run, [tmp_path / f"{case.name}.png"], tmp_path / "out", fold=0)
    trained = open_run(run)
    fold = FoldRun(trained, dataset, 0, read_folds(run.folds, dataset))
    (batch,) = whole_cases(fold.storage("cpu"), [1], fold.mean_std, batch_size=1)
    network = trained.network(0, device="cpu")
    prob = network_probability(network, batch.image, dtype="fp32")[0, 1].numpy()
    picture = np.array(Image.open(tmp_path / "out" / f"{case.name}_prob.png"))
    np.testing.assert_array_equal(picture, np.rint(prob * np.float32(65535)))


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_an_input_is_normalised_to_the_same_bits_as_in_training(tmp_path, dtype):
    dataset = make_prepared(tmp_path / "dataset", num_cases=8, num_channels=3, dtype=dtype)
    folder = make_run(tmp_path / "run", dataset, num_folds=4, finished=[])
    run, folds = open_run(folder), read_folds(folder.folds, dataset)
    stored = np.stack([dataset.stored("images", number) for number in range(8)])
    case = InputCase("volume", (tmp_path / "volume.nii",))
    image = InputImage(case, stored, Grid((8, 32, 32)), 0)
    for fold in range(4):
        trained = FoldRun(run, dataset, fold, folds)
        (batch,) = whole_cases(trained.storage("cpu"), range(8), trained.mean_std, batch_size=8)
        assert torch.equal(image.normalised(slice(None), trained.mean_std), batch.image)


def prepared_folder(root: Path, images: dict[str, np.ndarray], save) -> Dataset:
    """A dataset prepared from images/NAME and masks/NAME, which `save(path, values)` writes."""
    for name, values in images.items():
        for kind, content in (("images", values), ("masks", (values > values.mean()).astype(np.uint8))):
            (root / "raw" / kind).mkdir(parents=True, exist_ok=True)
            save(root / "raw" / kind / name, content)
    (raw,) = find_datasets("folder", root / "raw")
    prepare_dataset(raw, root / "data", workers=1)
    return Dataset(root / "data")


def test_copies_of_a_nifti_in_other_types_have_the_same_prediction(tmp_path):
    values = np.random.default_rng(0).integers(0, 90, (4, 32, 40))
    scans = {f"case{number}.nii": values[number].astype(np.float32) for number in range(4)}
    scans["case0.nii"] = values[0].astype(np.uint8)
    run = make_run(tmp_path / "run", prepared_folder(tmp_path, scans, write_nifti), scored=False)
    copies = {
        dtype: write_nifti(tmp_path / f"{dtype}.nii", values[1].astype(dtype))
        for dtype in ("uint8", "int16", "float32")
    }
    predict(run, list(copies.values()), tmp_path / "out")
    probs = [nibabel.load(tmp_path / "out" / f"{dtype}_prob.nii.gz").get_fdata() for dtype in copies]
    assert np.ptp(probs[0]) > 0.01
    for prob in probs[1:]:
        np.testing.assert_array_equal(prob, probs[0])


def test_a_run_on_8_bit_pictures_takes_0_to_255_of_any_type_and_refuses_other_values(tmp_path):
    def save(path: Path, values: np.ndarray) -> None:
        Image.fromarray(values).save(path)

    pixels = np.random.default_rng(0).integers(0, 200, (4, 32, 32), dtype=np.uint8)
    pictures = {f"case{number}.png": pixels[number] for number in range(4)}
    run = make_run(tmp_path / "run", prepared_folder(tmp_path, pictures, save), scored=False)
    save(tmp_path / "byte.png", pixels[0])
    save(tmp_path / "deep.png", pixels[0].astype(np.uint16))
    save(tmp_path / "share.tif", pixels[0] / np.float32(255))
    save(tmp_path / "large.png", pixels[0].astype(np.uint16) * 257)
    names = ("byte.png", "deep.png", "share.tif", "large.png")
    with pytest.raises(ValueError, match="2 of 4 inputs could not be predicted") as error:
        predict(run, [tmp_path / name for name in names], tmp_path / "out")
    highest = int(pixels[0].max())
    for name, high in (("share.tif", highest / 255), ("large.png", highest * 257)):
        words = f"{name}: channel 1 holds values from 0 to {high:g}, but the dataset has 8-bit pictures"
        assert words in str(error.value)
    probs = [np.array(Image.open(tmp_path / "out" / f"{name}_prob.png")) for name in ("byte", "deep")]
    np.testing.assert_array_equal(*probs)


def test_inputs_that_the_networks_were_trained_on_are_named_in_one_line(tmp_path):
    values = np.random.default_rng(0).integers(0, 90, (5, 32, 32)).astype(np.float32)
    scans = {f"case{number}.nii": values[number] for number in range(4)}
    dataset = prepared_folder(tmp_path, scans, write_nifti)
    run = make_run(tmp_path / "run", dataset, scored=False)
    new = write_nifti(tmp_path / "new.nii", values[4])
    # a copy under another name is the same image
    copied = shutil.copy(tmp_path / "raw/images/case2.nii", tmp_path / "copied.nii")
    folds = dict(zip([case.name for case in dataset.cases], read_folds(run.folds, dataset), strict=True))
    inputs = [tmp_path / "raw/images/case1.nii", new, copied]

    def warnings(inputs, **options):
        console = new_console()
        predict(run, inputs, tmp_path / "out", console=console, overwrite=True, **options)
        return [line for line in printed(console).splitlines() if "warning" in line]

    (line,) = warnings(inputs)
    assert line.startswith("warning: the networks were trained on 2 inputs (case1, copied): their scores")
    assert f"semidice evaluate {shlex.quote(str(run.path))}" in line
    assert warnings([new]) == []
    # the network of one fold was not trained on the cases that this fold holds out
    assert warnings([inputs[0]], fold=folds["case1"]) == []
    assert len(warnings([inputs[0]], fold=1 - folds["case1"])) == 1
    shutil.rmtree(dataset.folder.path)
    assert warnings(inputs) == []


def test_inputs_that_fail_are_listed_and_the_others_are_predicted(run, tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (32, 32)).astype(np.float32)
    source = tmp_path / "in"
    source.mkdir()
    write_nifti(source / "good.nii.gz", values)
    intact = (source / "good.nii.gz").read_bytes()
    (source / "cut.nii.gz").write_bytes(intact[: len(intact) // 2])
    (source / "text.png").write_text("not a picture")
    write_nifti(source / "nan.nii.gz", np.full((32, 32), np.nan, dtype=np.float32))
    write_nifti(source / "dark.nii.gz", values - 50)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
        source / "colour.png"
    )
    out = tmp_path / "out"
    text = refused(lambda: predict(run, [source], out), "5 of 6 inputs")
    for name in ("cut.nii.gz", "text.png", "nan.nii.gz", "dark.nii.gz", "colour.png"):
        assert str(source / name) in text
    assert str(source / "good.nii.gz") not in text
    names = sorted(path.name for path in out.glob("[!.]*"))
    assert names == ["good_mask.nii.gz", "good_prob.nii.gz", "prediction.json", "volumes.csv"]


def test_finished_predictions_are_skipped_unless_overwrite_is_set(run, tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (3, 32, 32)).astype(np.float32)
    inputs = [write_nifti(tmp_path / f"{name}.nii.gz", values[n]) for n, name in enumerate("abc")]
    out = tmp_path / "out"
    predict(run, inputs[:2], out)
    # a file that is written again is a new one
    first = {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
    console = new_console()
    predict(run, inputs, out, console=console)
    assert "2 of 3 inputs are predicted already" in printed(console)
    for name in ("a_prob.nii.gz", "b_mask.nii.gz"):
        assert (out / name).stat().st_ino == first[name][0]
    assert [row["case"] for row in volumes(out)] == ["a", "b", "c"]
    predict(run, inputs[:1], out, overwrite=True)
    assert (out / "a_prob.nii.gz").stat().st_ino != first["a_prob.nii.gz"][0]
    assert (out / "a_prob.nii.gz").read_bytes() == first["a_prob.nii.gz"][1]
    assert [row["case"] for row in volumes(out)] == ["a", "b", "c"]


def test_predictions_with_other_settings_are_not_mixed(run, tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (2, 32, 32)).astype(np.float32)
    inputs = [write_nifti(tmp_path / f"{name}.nii.gz", values[n]) for n, name in enumerate("ab")]
    out = tmp_path / "out"
    predict(run, inputs, out)
    with pytest.raises(ValueError, match=r"\(checkpoints\).*--overwrite"):
        predict(run, inputs, out, fold=0)
    predict(run, inputs[:1], out, fold=0, overwrite=True)
    # b was predicted by the ensemble: it is neither listed nor counted as finished
    assert [row["case"] for row in volumes(out)] == ["a"]
    console = new_console()
    predict(run, inputs, out, fold=0, console=console)
    assert "1 of 2 inputs are predicted already" in printed(console)


def test_predictions_with_other_settings_do_not_count_as_finished_even_if_the_next_run_is_killed(
    run, tmp_path
):
    source = write_nifti(tmp_path / "a.nii.gz", np.random.default_rng(0).uniform(0, 1, (32, 32)))
    out = tmp_path / "out"
    predict(run, [source], out)
    (case,) = find_inputs([source], out, open_run(run).facts)
    folder = OutputFolder(out, ("background", "class1"))
    folder.open({"threshold": 0.3}, overwrite=True)
    assert folder.remaining([case], overwrite=False) == [case]
    # as after a kill: nothing but the settings was written
    folder = OutputFolder(out, ("background", "class1"))
    folder.open({"threshold": 0.3}, overwrite=False)
    assert folder.remaining([case], overwrite=False) == [case]


def test_a_foreign_volumes_file_is_not_overwritten(run, tmp_path):
    source = write_nifti(tmp_path / "one.nii.gz", np.random.default_rng(0).uniform(0, 1, (32, 32)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "volumes.csv").write_text("name,litres\nbarrel,159\n")
    with pytest.raises(ValueError, match=r"volumes\.csv was not written by"):
        predict(run, [source], tmp_path / "out")
    assert "barrel" in (tmp_path / "out" / "volumes.csv").read_text()


def test_predicting_with_an_unfinished_run_names_the_folds_it_leaves_out(dataset, tmp_path):
    source = write_nifti(tmp_path / "one.nii.gz", np.random.default_rng(0).uniform(0, 255, (32, 32)))
    run = make_run(tmp_path / "run", dataset, finished=[1], scored=False)
    console = new_console()
    predict(run, [source], tmp_path / "out", console=console)
    assert "without fold 0, which is not finished" in printed(console)
    run.fold(1).cases.unlink()
    with pytest.raises(ValueError, match=r"no finished fold to predict with.*--resume"):
        predict(run, [source], tmp_path / "out", console=console)
    predict(run, [source], tmp_path / "out", fold=1, console=console)
    assert "fold 1 of" in printed(console)


def test_the_last_axis_of_an_input_is_its_channels(tmp_path):
    dataset = make_prepared(tmp_path / "dataset", num_cases=4, size=(32, 32), num_channels=3, dtype="int16")
    run = make_run(tmp_path / "run", dataset, scored=False)
    facts = open_run(run).facts
    values = np.random.default_rng(0).uniform(-5, 9, (20, 24, 6, 3)).astype(np.float32)
    image = read_single_input(write_nifti(tmp_path / "volume.nii.gz", values), facts)
    low, high = np.percentile(values, (0.5, 99.5), axis=(0, 1, 2))
    scaled = np.clip((values - low) / (high - low), 0, 1)
    np.testing.assert_allclose(image.stored / 32767, scaled.transpose(2, 3, 0, 1), atol=2e-5)
    assert (image.space, image.grid.shape, image.slice_axis) == ((20, 24), (20, 24, 6), 2)
    mean_std = MeanStd(mean=(0.3, 0.4, 0.5), std=(0.1, 0.2, 0.3))
    normal = (scaled - np.array(mean_std.mean)) / np.array(mean_std.std)
    np.testing.assert_allclose(
        image.normalised(slice(1, 3), mean_std), normal.transpose(2, 3, 0, 1)[1:3], atol=1e-3
    )
    colours = (scaled[:, :, 0] * 255).astype(np.uint8)
    Image.fromarray(colours).save(tmp_path / "colours.png")
    of_bytes = facts.model_copy(update={"options": PrepareOptions(keep_bytes=True)})
    picture = read_single_input(tmp_path / "colours.png", of_bytes)
    np.testing.assert_array_equal(picture.stored[0], colours.transpose(2, 0, 1))


def read_single_input(path: Path, facts: DatasetFacts) -> InputImage:
    """Read the only input that a file is or belongs to."""
    (case,) = find_inputs([path], path.parent / "out", facts)
    return read_input(case, facts)


@pytest.fixture(scope="module")
def two_channels(tmp_path_factory):
    """A run on two-channel volumes in nnU-Net's layout, its dataset, and the folder of the raw dataset."""
    root = tmp_path_factory.mktemp("nnunet")
    make_nnunet(root / "raw", num_cases=4, size=(32, 40))
    (raw,) = find_datasets("nnunet", root / "raw")
    prepare_dataset(raw, root / "data", workers=1)
    dataset = Dataset(root / "data")
    return make_run(root / "run", dataset, scored=False), dataset, root / "raw"


def test_a_raw_nnunet_dataset_can_be_prepared_trained_and_predicted_by_case(tmp_path):
    raw = make_nnunet(tmp_path / "raw", num_cases=4, size=(32, 32))
    (source,) = find_datasets("nnunet", raw)
    prepare_dataset(source, tmp_path / "data", workers=1)
    options = {
        "name": "tiny",
        "data": {"dataset": str(tmp_path / "data"), "num_folds": 2},
        "model": {
            "architecture": "small_unet",
            "encoder": "none",
            "weights": "none",
            "options": {"channels": [8, 16]},
        },
        "schedule": {"epochs": 1},
        "batch_size": 8,
        "validation": {"metrics": ["dice_score"]},
        "workers": 0,
    }
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    recipe = Recipe.model_validate(options)
    run = start_run(recipe, tmp_path / "run", resume=False)
    cross_validate(run, fabric)
    out = tmp_path / "out"
    predict(run.folder, [raw / "imagesTr", raw / "imagesTs"], out)
    cases = [f"brain_{number:03d}" for number in range(1, 6)]
    kinds = ("mask", "prob")
    assert sorted(path.name for path in out.glob("*.nii.gz")) == [
        f"{case}_{kind}.nii.gz" for case in cases for kind in kinds
    ]
    assert list(dict.fromkeys(row["case"] for row in volumes(out))) == cases
    for case in cases[:4]:
        label = nibabel.load(raw / "labelsTr" / f"{case}.nii.gz")
        prob, mask = (nibabel.load(out / f"{case}_{kind}.nii.gz") for kind in ("prob", "mask"))
        assert mask.shape == label.shape
        assert prob.shape == (*label.shape, 3)
        np.testing.assert_array_equal(mask.affine, label.affine)
        np.testing.assert_array_equal(prob.affine, label.affine)


def test_channels_in_separate_files_are_read_as_they_were_prepared(two_channels):
    run, dataset, raw = two_channels
    facts = open_run(run).facts
    inputs = find_inputs([raw / "imagesTr"], raw / "out", facts)
    assert [case.name for case in inputs] == [scan.name for scan in dataset.manifest.scans]
    for case in inputs:
        stored = np.load(dataset.folder.path / "images" / f"{case.name}.npy")
        np.testing.assert_array_equal(read_input(case, facts).stored, stored)


def test_naming_one_channel_file_finds_the_others_and_a_file_with_all_channels_is_one_case(
    two_channels, tmp_path
):
    run, dataset, raw = two_channels
    facts = open_run(run).facts
    files = [raw / "imagesTr" / f"brain_001_000{number}.nii.gz" for number in range(2)]
    for inputs in (
        files[:1],
        files[1:],
        files,
        [*reversed(files), raw / "imagesTr" / "brain_001_0000.nii.gz"],
    ):
        (case,) = find_inputs(inputs, tmp_path, facts)
        assert (case.name, case.files) == ("brain_001", tuple(files))
    channels = [np.asarray(nibabel.load(path).dataobj) for path in files]
    for name in ("whole", "scan_0000", "scan_0001", "year_2023"):
        write_nifti(tmp_path / f"{name}.nii.gz", np.stack(channels, axis=-1), affine=UPRIGHT)
        image = read_single_input(tmp_path / f"{name}.nii.gz", facts)
        assert image.case.name == name
        stored = np.load(dataset.folder.path / "images" / "brain_001.npy")
        np.testing.assert_array_equal(image.stored, stored)
    assert len(find_inputs([tmp_path], tmp_path / "out", facts)) == 4


def test_a_volume_with_as_many_slices_as_channels_is_read_as_one_channel(two_channels, tmp_path):
    run, _, raw = two_channels
    for number in range(2):
        values = nibabel.load(raw / "imagesTr" / f"brain_001_000{number}.nii.gz").dataobj[:, :, 2:4]
        write_nifti(tmp_path / f"thin_000{number}.nii.gz", values, affine=UPRIGHT)
    image = read_single_input(tmp_path / "thin_0000.nii.gz", open_run(run).facts)
    assert (image.case.name, image.grid.shape) == ("thin", (32, 40, 2))
    assert image.stored.shape == (2, 2, 32, 40)


def test_each_coloured_frame_is_a_separate_image(tmp_path):
    dataset = make_prepared(tmp_path / "dataset", num_cases=4, size=(32, 32), num_channels=3)
    facts = open_run(make_run(tmp_path / "run", dataset, scored=False)).facts
    (tmp_path / "in").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    for number in range(3):
        Image.fromarray(pixels).save(tmp_path / "in" / f"frame_000{number}.png")
        write_nifti(tmp_path / "in" / f"flat_000{number}.nii", pixels)
        Image.fromarray(pixels[..., number]).save(tmp_path / "in" / f"grey_000{number}.png")
    inputs = find_inputs([tmp_path / "in"], tmp_path / "out", facts)
    frames = [f"{name}_000{number}" for name in ("flat", "frame") for number in range(3)]
    assert sorted(case.name for case in inputs) == [*frames, "grey"]
    for case in inputs:
        expected = pixels.transpose(2, 0, 1)
        np.testing.assert_array_equal(read_input(case, facts).stored[0], expected)


def test_a_name_of_a_one_channel_image_may_end_in_0000(run, tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (32, 32)).astype(np.float32)
    inputs = [write_nifti(tmp_path / f"scan_000{number}.nii.gz", values) for number in range(2)]
    predict(run, inputs[:1], tmp_path / "out")
    assert (tmp_path / "out" / "scan_0000_mask.nii.gz").is_file()
    names = [case.name for case in find_inputs([tmp_path], tmp_path / "out", open_run(run).facts)]
    assert names == ["scan_0000", "scan_0001"]


def test_a_case_with_a_missing_or_misaligned_or_extra_channel_is_named(two_channels, tmp_path):
    run, _, raw = two_channels
    source = tmp_path / "in"
    shutil.copytree(raw / "imagesTr", source)
    (source / "brain_001_0001.nii.gz").unlink()
    (source / "brain_002_0000.nii.gz").unlink()
    moved = nibabel.load(source / "brain_003_0001.nii.gz")
    write_nifti(source / "brain_003_0001.nii.gz", np.asarray(moved.dataobj), affine=AFFINE)
    shutil.copy(source / "brain_004_0001.nii.gz", source / "brain_004_0002.nii.gz")
    with pytest.raises(ValueError, match="4 of 5 inputs could not be predicted") as caught:
        predict(run, [source], tmp_path / "out")
    text = str(caught.value)
    for words in (
        f"case 'brain_001' has no file {source / 'brain_001_0001.nii.gz'} for channel FLAIR",
        f"case 'brain_002' has no file {source / 'brain_002_0000.nii.gz'} for channel T1",
        f"{source / 'brain_003_0001.nii.gz'} is not aligned with image {source / 'brain_003_0000.nii.gz'}",
        "copy the header of the first",
        "brain_004_0002.nii.gz has",
    ):
        assert words in text, text
    assert "--ignore-placement" not in text
    assert {path.name for path in (tmp_path / "out").glob("*mask*")} == {"brain_004_mask.nii.gz"}


def test_a_channel_of_a_different_shape_is_named(two_channels, tmp_path):
    run, _, raw = two_channels
    shutil.copy(raw / "imagesTr" / "brain_001_0000.nii.gz", tmp_path / "a_0000.nii.gz")
    short = np.asarray(nibabel.load(raw / "imagesTr" / "brain_001_0001.nii.gz").dataobj)[:-2]
    write_nifti(tmp_path / "a_0001.nii.gz", short)
    with pytest.raises(ValueError, match=r"a_0001.* has shape \(30, 40, 6\)"):
        read_single_input(tmp_path / "a_0000.nii.gz", open_run(run).facts)


def test_a_run_keeps_the_facts_of_its_dataset(run, dataset):
    facts = DatasetFacts.model_validate_json(run.dataset.read_bytes())
    assert facts.class_names == dataset.manifest.class_names
    assert (facts.mean, facts.std, facts.channels) == (
        dataset.manifest.mean, dataset.manifest.std, dataset.manifest.channels
    )  # fmt: skip
    folds = read_folds(run.folds, dataset)
    for fold in (0, 1):
        mean, std = training_mean_std(dataset, folds, fold)
        assert facts.mean_std(fold).mean == pytest.approx(mean.flatten().tolist(), rel=1e-6)
        assert facts.mean_std(fold).std == pytest.approx(std.flatten().tolist(), rel=1e-6)
    assert facts.options.window == (0.0, 1.0)
    assert "scans" not in json.loads(run.dataset.read_text())


def test_another_input_with_the_name_of_a_finished_one_is_refused(run, tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (2, 32, 32)).astype(np.float32)
    source = write_nifti(tmp_path / "one.nii.gz", values[0])
    out = tmp_path / "out"
    predict(run, [source], out)
    first = nibabel.load(out / "one_prob.nii.gz").get_fdata()
    (tmp_path / "other").mkdir()
    other = write_nifti(tmp_path / "other/one.nii.gz", values[1])
    write_nifti(source, values[1])
    for path in (source, other):
        refused(lambda path=path: predict(run, [path], out), str(path), "other files", "--overwrite")
    np.testing.assert_array_equal(nibabel.load(out / "one_prob.nii.gz").get_fdata(), first)
    predict(run, [other], out, overwrite=True)
    assert np.abs(nibabel.load(out / "one_prob.nii.gz").get_fdata() - first).max() > 0.001
    predict(run, [other], out)


def test_an_input_whose_axes_lead_elsewhere_is_refused_unless_its_slice_axis_is_named(two_channels, tmp_path):
    folder, _, raw = two_channels
    facts = open_run(folder).facts
    assert facts.orientations == ("RAS",)
    for number in range(2):
        values = np.asarray(nibabel.load(raw / "imagesTr" / f"brain_001_000{number}.nii.gz").dataobj)
        turned = UPRIGHT[[0, 2, 1, 3]]
        write_nifti(tmp_path / f"turned_000{number}.nii.gz", values, affine=turned)
    (case,) = find_inputs([tmp_path], tmp_path / "out", facts)
    refused(lambda: read_input(case, facts), "turned_0000.nii.gz", "RSA", "RAS", "--slice-axis")
    assert read_input(case, facts, slice_axis=2).slice_axis == 2
    pictures = facts.model_copy(update={"orientations": ("",)})
    refused(lambda: read_input(case, pictures), "pictures", "--slice-axis")
