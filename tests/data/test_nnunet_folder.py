"""Raw datasets of nnU-Net and tasks of the Decathlon: classes, channels, raters, and what is refused."""

import json
import shutil

import nibabel
import numpy as np
import pytest
from PIL import Image
from raw_trees import (
    DEPTH,
    SIZE,
    find_only_dataset,
    find_problems,
    make_decathlon,
    make_nnunet,
    read_scan,
    scan_names,
    write_nifti,
)
from start import refused

from semidice.data.sources import find_datasets


def load(path):
    """The file as nibabel, or Pillow, reads it."""
    return np.asarray(nibabel.load(path).dataobj if ".nii" in path.name else Image.open(path))


def change_json(root, **changes):
    """Change entries of a dataset.json; None removes an entry."""
    path = root / "dataset.json"
    header = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in header.items() if value is not None}))


@pytest.mark.parametrize("num_channels", [1, 4])
def test_decathlon_takes_classes_and_channels_from_its_json(tmp_path, num_channels):
    dataset = find_only_dataset("nnunet", make_decathlon(tmp_path, num_channels=num_channels))
    assert dataset.class_names == ("background", "Anterior", "Posterior")
    assert dataset.channels == (("MRI",) if num_channels == 1 else ("FLAIR", "T1w", "t1gd", "T2w"))
    arrays = read_scan(dataset, dataset.scans[2])
    image = load(tmp_path / "imagesTr" / "brain_003.nii.gz").reshape(*SIZE, DEPTH, -1)
    np.testing.assert_array_equal(arrays.image, np.moveaxis(image, -1, 0))
    assert (dataset.options.slices, dataset.options.slice_axis) == ("all", 2)


@pytest.mark.parametrize(("suffix", "num_axes"), [(".nii.gz", 3), (".png", 2), (".tif", 2)])
def test_nnunet_has_a_file_for_each_channel_and_one_label(tmp_path, suffix, num_axes):
    dataset = find_only_dataset("nnunet", make_nnunet(tmp_path, suffix=suffix))
    assert dataset.class_names == ("background", "oedema", "core")
    assert (dataset.channels, dataset.raters) == (("T1", "FLAIR"), ("reference",))
    assert scan_names(dataset) == [f"brain_00{number}" for number in range(1, 6)]
    assert (dataset.num_axes, dataset.options.slices) == (num_axes, "all" if num_axes == 3 else "none")
    assert dataset.options.keep_bytes == (num_axes == 2)
    arrays = read_scan(dataset, dataset.scans[2])
    for channel in range(2):
        expected = load(tmp_path / "imagesTr" / f"brain_003_000{channel}{suffix}")
        np.testing.assert_array_equal(arrays.image[channel], expected)
    np.testing.assert_array_equal(arrays.masks[0], load(tmp_path / "labelsTr" / f"brain_003{suffix}"))


def test_version_1_is_read_and_volumes_with_a_single_slice_are_images(tmp_path):
    make_nnunet(tmp_path)
    version_1 = {
        "modality": {"0": "T1", "1": "FLAIR"},
        "labels": {"0": "background", "1": "oedema", "2": "core"},
    }
    change_json(tmp_path, channel_names=None, file_ending=None, **version_1)
    for path in tmp_path.glob("*Tr/*"):
        write_nifti(path, load(path)[:, :, 2:3])
    dataset = find_only_dataset("nnunet", tmp_path)
    assert (dataset.channels, dataset.class_names) == (("T1", "FLAIR"), ("background", "oedema", "core"))
    assert (dataset.num_axes, dataset.options.slices) == (2, "none")
    assert read_scan(dataset, dataset.scans[0]).image.shape == (2, *SIZE)


def test_colours_are_in_one_file(tmp_path):
    """Only for colour images does nnU-Net store all channels in the file _0000."""
    make_nnunet(tmp_path, channels=("R", "G", "B"), suffix=".png")
    for path in tmp_path.glob("imagesTr/*_0000.png"):
        channels = [path.with_name(path.name.replace("_0000", f"_000{number}")) for number in range(3)]
        pixels = np.stack([load(channel) for channel in channels], axis=-1)
        for channel in channels:
            channel.unlink()
        Image.fromarray(pixels).save(path)
    dataset = find_only_dataset("nnunet", tmp_path)
    expected = np.moveaxis(load(tmp_path / "imagesTr/brain_001_0000.png"), -1, 0)
    np.testing.assert_array_equal(read_scan(dataset, dataset.scans[0]).image, expected)


def test_every_incomplete_case_is_reported(tmp_path):
    images, labels = make_nnunet(tmp_path, num_cases=6) / "imagesTr", tmp_path / "labelsTr"
    (images / "brain_001_0001.nii.gz").unlink()
    (labels / "brain_002.nii.gz").unlink()
    for channel in range(2):
        (images / f"brain_003_000{channel}.nii.gz").unlink()
    shutil.copy(images / "brain_004_0000.nii.gz", images / "brain_004_0002.nii.gz")
    shutil.copy(images / "brain_005_0000.nii.gz", images / "scout.nii.gz")
    shutil.copy(images / "brain_005_0000.nii.gz", images / "brain_007_0000.mha")
    reported = find_problems("nnunet", tmp_path)
    for words in (
        ["case 'brain_001'", "brain_001_0000.nii.gz", "0001 is missing"],
        ["brain_002_0000.nii.gz has no mask brain_002", "labelsTr"],
        ["brain_003.nii.gz has no image", "brain_003_0000"],
        ["brain_004_0002.nii.gz", "2 channel files are expected"],
        ["scout.nii.gz has no mask"],
        ["brain_007_0000.mha", ".nii.gz"],
    ):
        assert sum(all(word in problem for word in words) for problem in reported) == 1, words
    assert len(reported) == 6
    (dataset,) = find_datasets("nnunet", tmp_path)
    assert scan_names(dataset) == ["brain_005", "brain_006"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": {"background": 0, "whole": [1, 2], "core": 2}}, ["'whole' is a region", "of its own"]),
        ({"labels": {"oedema": 1, "core": 2}}, ["label 0"]),
        ({"labels": {"background": 0, "a": 1, "b": 1}}, ["value 1 twice"]),
        ({"labels": {"background": 0, "a": -1}}, ["'a'", "-1"]),
        ({"labels": None}, ["labels"]),
        ({"channel_names": {"1": "T1", "2": "T2"}}, ["channels must count from 0"]),
        ({"channel_names": None}, ["channel_names"]),
        ({"file_ending": ".mha"}, [".mha", "convert", ".nii.gz"]),
        ({"dataset": {"brain_001": {}}}, ["lists its files", "imagesTr"]),
    ],
)
def test_a_json_that_cannot_be_used_is_refused(tmp_path, changes, words):
    change_json(make_nnunet(tmp_path), **changes)
    refused(lambda: find_datasets("nnunet", tmp_path), "dataset.json", *words)


def test_a_folder_of_tasks_is_refused_with_advice(tmp_path):
    make_decathlon(tmp_path / "Task01_Brain")
    refused(lambda: find_datasets("nnunet", tmp_path), "one task at a time", "Task01_Brain")
