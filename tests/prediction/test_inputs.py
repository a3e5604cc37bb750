"""Files become the input that the network was trained on: channels, slices, intensities."""

import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared
from raw_trees import make_nnunet
from start import refused
from trained import make_run

from semidice.data.batches.feed import whole_cases
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.geometry import Grid
from semidice.data.intensities import MeanStd
from semidice.data.manifest import PrepareOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.prediction.inputs import InputCase, InputImage, find_inputs, read_input
from semidice.runs.run import DatasetFacts, FoldRun, open_run

# as in raw_trees
UPRIGHT = np.diag([0.7, 0.8, 2.5, 1.0])


def write_nifti(path: Path, values: np.ndarray, affine: np.ndarray = UPRIGHT) -> Path:
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path


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
        write_nifti(tmp_path / f"{name}.nii.gz", np.stack(channels, axis=-1))
        image = read_single_input(tmp_path / f"{name}.nii.gz", facts)
        assert image.case.name == name
        stored = np.load(dataset.folder.path / "images" / "brain_001.npy")
        np.testing.assert_array_equal(image.stored, stored)
    assert len(find_inputs([tmp_path], tmp_path / "out", facts)) == 4


def test_a_volume_with_as_many_slices_as_channels_is_read_as_one_channel(two_channels, tmp_path):
    run, _, raw = two_channels
    for number in range(2):
        values = nibabel.load(raw / "imagesTr" / f"brain_001_000{number}.nii.gz").dataobj[:, :, 2:4]
        write_nifti(tmp_path / f"thin_000{number}.nii.gz", values)
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


def test_a_name_of_a_one_channel_image_may_end_in_0000(tmp_path):
    facts = DatasetFacts.model_construct(channels=("CT",))
    for number in range(2):
        write_nifti(tmp_path / f"scan_000{number}.nii.gz", np.random.default_rng(0).uniform(0, 1, (8, 8)))
    names = [case.name for case in find_inputs([tmp_path], tmp_path / "out", facts)]
    assert names == ["scan_0000", "scan_0001"]


def test_a_case_with_a_missing_or_misaligned_or_short_channel_is_named(two_channels, tmp_path):
    run, _, raw = two_channels
    facts = open_run(run).facts
    shutil.copytree(raw / "imagesTr", tmp_path / "in")
    for name in ("brain_001_0001", "brain_002_0000"):
        (tmp_path / "in" / f"{name}.nii.gz").unlink()
    for name, part, affine in (
        ("brain_003_0001", slice(None), UPRIGHT + np.eye(4, k=3) * 9),
        ("brain_004_0001", slice(-2), UPRIGHT),
    ):
        values = np.asarray(nibabel.load(tmp_path / f"in/{name}.nii.gz").dataobj)
        write_nifti(tmp_path / f"in/{name}.nii.gz", values[part], affine)
    found = {case.name: case for case in find_inputs([tmp_path / "in"], tmp_path / "out", facts)}
    for name, *words in (
        ("brain_001", "brain_001_0001.nii.gz", "FLAIR"),
        ("brain_002", "brain_002_0000.nii.gz", "T1"),
        ("brain_003", "brain_003_0001.nii.gz", "not aligned", "copy the header of the first"),
        ("brain_004", "brain_004_0001.nii.gz", "(30, 40, 6)"),
    ):
        text = refused(lambda name=name: read_input(found[name], facts), *words)
        assert "--ignore-placement" not in text
