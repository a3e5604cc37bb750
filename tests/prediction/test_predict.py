"""`semidice predict` on real files: probabilities, masks, volumes, and what is predicted again."""

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
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from start import refused, semidice
from torch import nn
from trained import make_run, new_network, recipe_of, training_mean_std, write_network

from semidice.data.batches.feed import whole_cases
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.prepare import prepare_dataset
from semidice.data.resample import resize_image, resize_probability
from semidice.data.sources import find_datasets
from semidice.networks.predictor import Predictor
from semidice.paths import RunFolder
from semidice.prediction.command import run_predict
from semidice.prediction.inputs import find_inputs
from semidice.prediction.options import PredictOptions
from semidice.prediction.outputs import OutputFolder
from semidice.recipes import Recipe, read_recipe, write_recipe
from semidice.runs.predictions import read_prediction
from semidice.runs.run import FoldRun, mirrored_axes, open_run

AFFINE = np.array([[-0.7, 0.1, 0, 12.5], [0.05, 0.8, 0.2, -30], [0, -0.1, 2.5, 7], [0, 0, 0, 1]])


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


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=4, size=(32, 32))


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run of two folds; its dataset was prepared with the window 0 to 1 and without resizing."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return make_run(path, dataset, options={"window": [0.0, 1.0]}, scored=False)


def test_a_network_is_loaded_with_the_weights_of_its_fold(run, dataset):
    image = torch.randn(1, 1, 32, 32)
    for fold in (0, 1):
        expected = new_network(recipe_of(dataset), dataset, seed=fold)
        loaded = open_run(run).network(fold, device="cpu")
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        torch.testing.assert_close(loaded(image), expected(image), atol=0, rtol=0)
    assert open_run(run.path).finished_folds == (0, 1)


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


@pytest.mark.parametrize(
    ("flip", "in_recipe", "option", "axes"),
    [
        (True, False, None, ()),
        (True, False, True, (0, 1)),
        (True, True, None, (0, 1)),
        (True, True, False, ()),
        ([False, True], False, True, (1,)),
    ],
)
def test_predict_gives_what_the_networks_of_the_run_give_for_a_case_of_the_dataset(
    dataset, tmp_path, flip, in_recipe, option, axes
):
    """From the raw 8-bit file, to the bit; over mirrored images as the option or the recipe says."""
    run = make_run(tmp_path / "run", dataset, scored=False)
    overrides = [f"augment.flip={json.dumps(flip)}", f"validation.flips={json.dumps(in_recipe)}"]
    write_recipe(read_recipe(run.recipe, overrides), run.recipe)
    # a checkpoint belongs to one recipe
    write_network(run, 0, new_network(recipe_of(dataset), dataset, seed=0))
    source = tmp_path / f"{dataset.cases[1].name}.png"
    Image.fromarray(dataset.stored("images", 1)[0]).save(source)
    predict(run, [source], tmp_path / "out", fold=0, flips=option)
    trained = open_run(run)
    fold = FoldRun(trained, dataset, 0, read_folds(run.folds, dataset))
    batches = whole_cases(fold.storage("cpu"), [1], fold.mean_std, batch_size=1)
    ((_, prob),) = Predictor(trained.network(0, device="cpu"), dtype="fp32", flips=axes).cases(batches)
    picture = np.array(Image.open(tmp_path / "out" / f"{source.stem}_prob.png"))
    np.testing.assert_array_equal(picture, np.rint(prob[1].numpy() * np.float32(65535)))
    settings = json.loads((tmp_path / "out" / "prediction.json").read_text())["settings"]
    assert settings["flips"] is bool(axes)
    if not axes:
        refused(
            lambda: predict(run, [source], tmp_path / "out", fold=0, flips=True), "(flips)", "--overwrite"
        )


def test_flips_need_a_training_with_flips(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset, scored=False)
    write_recipe(read_recipe(run.recipe, ["augment.flip=false"]), run.recipe)
    source = write_nifti(tmp_path / "one.nii.gz", np.random.default_rng(0).uniform(0, 255, (32, 32)))
    refused(lambda: predict(run, [source], tmp_path / "out", flips=True), "augment.flip false")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flip", "num_axes", "expected"),
    [(True, 2, (0, 1)), (True, 3, (0, 1, 2)), ([True, False], 2, (0,)), ([False, True, True], 3, (1, 2))],
)
def test_a_prediction_mirrors_the_axes_of_the_training(flip, num_axes, expected):
    recipe = Recipe.model_validate({"name": "a", "data": {"dataset": "prepared"}, "augment": {"flip": flip}})
    assert mirrored_axes(recipe, num_axes, flips=True) == expected
    assert mirrored_axes(recipe, num_axes) == ()


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


def test_a_foreign_volumes_file_is_not_overwritten(run, tmp_path):
    source = write_nifti(tmp_path / "one.nii.gz", np.random.default_rng(0).uniform(0, 1, (32, 32)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "volumes.csv").write_text("name,litres\nbarrel,159\n")
    refused(lambda: predict(run, [source], tmp_path / "out"), "volumes.csv", "-o")
    assert "barrel" in (tmp_path / "out" / "volumes.csv").read_text()


def test_predict_gives_the_stored_predictions_of_a_training_with_flips(dataset, tmp_path):
    changes = {
        "data.dataset": dataset.folder.path,
        "data.num_folds": 2,
        "schedule.epochs": 1,
        "batch_size": 2,
        "validation.flips": "true",
        "augment.flip": "[false,true]",
    }
    options = [text for key, value in changes.items() for text in ("--set", f"{key}={value}")]
    trained = semidice("train", "quick", "-o", tmp_path / "run", "--accelerator", "cpu", *options)
    assert trained.code == 0, trained.err
    run = RunFolder(tmp_path / "run")
    folds = read_folds(run.folds, dataset)
    for number, (case, fold) in enumerate(zip(dataset.cases, folds, strict=True)):
        source = tmp_path / f"{case.name}.png"
        Image.fromarray(dataset.stored("images", number)[0]).save(source)
        predict(run, [source], tmp_path / f"out{fold}", fold=int(fold))
        picture = np.array(Image.open(tmp_path / f"out{fold}" / f"{case.name}_prob.png"))
        stored = read_prediction(run.fold(fold).prediction(case.name))[1]
        np.testing.assert_allclose(picture, 65535 * stored, atol=1)
