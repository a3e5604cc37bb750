"""Folders matched by file name: LIDC, the Decathlon, nnU-Net, and folders of users."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from raw_trees import (
    DEPTH,
    SHARED,
    SIZE,
    ellipsoids,
    find_only_dataset,
    find_problems,
    make_decathlon,
    make_folder,
    make_nnunet,
    read_scan,
    scan_names,
    write_nifti,
    write_picture,
)
from start import refused

from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets


@pytest.mark.parametrize("num_channels", [1, 4])
def test_decathlon_takes_classes_and_channels_from_its_json(tmp_path, num_channels):
    dataset = find_only_dataset("nnunet", make_decathlon(tmp_path, num_channels=num_channels))
    assert dataset.class_names == ("background", "Anterior", "Posterior")
    assert dataset.channels == (("MRI",) if num_channels == 1 else ("FLAIR", "T1w", "t1gd", "T2w"))
    assert scan_names(dataset) == [f"brain_00{number}" for number in range(1, 6)]
    arrays = read_scan(dataset, dataset.scans[2])
    image = nibabel.load(tmp_path / "imagesTr" / "brain_003.nii.gz").get_fdata().reshape(*SIZE, DEPTH, -1)
    np.testing.assert_array_equal(arrays.image, np.moveaxis(image, -1, 0).astype(np.float32))
    assert (dataset.options.slices, dataset.options.slice_axis) == ("all", 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": {"1": "tumour"}}, ["label 0"]),
        ({"labels": {"background": 0, "tumour": 1}}, ["labels"]),
        ({"modality": {}}, ["channels"]),
    ],
)
def test_an_incomplete_decathlon_json_is_refused(tmp_path, change, words):
    change_json(make_decathlon(tmp_path), **change)
    refused(lambda: find_datasets("nnunet", tmp_path), "dataset.json", *words)


@pytest.mark.parametrize("make", [make_decathlon, make_nnunet])
def test_a_folder_of_tasks_is_refused_with_advice(tmp_path, make):
    make(tmp_path / "Task01_Brain")
    refused(lambda: find_datasets("nnunet", tmp_path), "one task at a time", "Task01_Brain")


def change_json(root, **changes):
    """Change entries of a dataset.json; None removes an entry."""
    path = root / "dataset.json"
    header = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in header.items() if value is not None}))


@pytest.mark.parametrize(
    ("suffix", "num_axes", "slice_axis"),
    [(".nii.gz", 3, 2), (".nii", 3, 2), (".png", 2, None), (".tif", 2, None)],
)
def test_nnunet_has_a_file_for_each_channel_and_one_label(tmp_path, suffix, num_axes, slice_axis):
    dataset = find_only_dataset("nnunet", make_nnunet(tmp_path, suffix=suffix))
    assert dataset.class_names == ("background", "oedema", "core")
    assert (dataset.channels, dataset.raters) == (("T1", "FLAIR"), ("reference",))
    assert scan_names(dataset) == [f"brain_00{number}" for number in range(1, 6)]
    assert dataset.num_axes == num_axes
    if slice_axis is not None:
        assert (dataset.options.slices, dataset.options.slice_axis) == ("all", slice_axis)
    arrays = read_scan(dataset, dataset.scans[2])
    for channel in range(2):
        expected = load(tmp_path / "imagesTr" / f"brain_003_000{channel}{suffix}")
        np.testing.assert_array_equal(arrays.image[channel], expected)
    np.testing.assert_array_equal(arrays.masks[0], load(tmp_path / "labelsTr" / f"brain_003{suffix}"))


def test_masks_of_several_raters_of_nnunet_replace_its_label(tmp_path):
    make_nnunet(tmp_path)
    for rater, number in (("Ada", 1), ("Ada", 2), ("Bob", 2), *(("Bob", number) for number in range(3, 6))):
        path = tmp_path / "ratersTr" / rater / f"brain_00{number}.nii.gz"
        # not the label: each rater draws the other class
        write_nifti(path, (3 - load(tmp_path / "labelsTr" / path.name)) % 3)
    dataset = find_only_dataset("nnunet", tmp_path)
    assert dataset.raters == ("Ada", "Bob")
    assert "labelsTr is not read" in dataset.notes[0]
    assert [sorted(scan.masks) for scan in dataset.scans] == [["Ada"], ["Ada", "Bob"], *[["Bob"]] * 3]
    expected = (3 - load(tmp_path / "labelsTr" / "brain_001.nii.gz")) % 3
    np.testing.assert_array_equal(read_scan(dataset, dataset.scans[0]).masks[0], expected)
    (tmp_path / "ratersTr" / "Bob" / "brain_005.nii.gz").unlink()
    assert "brain_005" in " ".join(find_problems("nnunet", tmp_path))
    shutil.rmtree(tmp_path / "ratersTr")
    (tmp_path / "ratersTr").mkdir()
    refused(lambda: find_datasets("nnunet", tmp_path), "ratersTr holds no folder")


def load(path: Path) -> np.ndarray:
    """The file as nibabel, or Pillow, reads it."""
    if ".nii" in path.name:
        return np.asarray(nibabel.load(path).dataobj)
    with Image.open(path) as picture:
        return np.array(picture)


def test_each_channel_of_nnunet_is_scaled_by_its_own_intensities(tmp_path):
    raw = find_only_dataset("nnunet", make_nnunet(tmp_path / "raw", num_cases=2))
    manifest = prepare_dataset(raw, tmp_path / "data", workers=1)
    assert manifest.channels == ("T1", "FLAIR")
    for number, scan in enumerate(manifest.scans, 1):
        stored = np.load(tmp_path / "data" / "images" / f"{scan.name}.npy") / 32767
        assert stored.shape == (DEPTH, 2, *SIZE)
        assert set(scan.inputs) == {
            f"imagesTr/brain_00{number}_0000.nii.gz",
            f"imagesTr/brain_00{number}_0001.nii.gz",
            f"labelsTr/brain_00{number}.nii.gz",
        }
        for channel in range(2):
            image = load(tmp_path / "raw" / "imagesTr" / f"brain_00{number}_000{channel}.nii.gz")
            low, high = np.percentile(image, (0.5, 99.5))
            scaled = np.clip((image - low) / (high - low), 0, 1)
            np.testing.assert_allclose(stored[:, channel], np.moveaxis(scaled, 2, 0), atol=2e-5)


def test_nnunet_volumes_with_a_single_slice_are_images(tmp_path):
    make_nnunet(tmp_path)
    for path in (*tmp_path.glob("*Tr/*"),):
        write_nifti(path, load(path)[:, :, 2:3])
    dataset = find_only_dataset("nnunet", tmp_path)
    assert (dataset.num_axes, dataset.options.slices) == (2, "none")
    assert read_scan(dataset, dataset.scans[0]).image.shape == (2, *SIZE)


def test_colours_of_nnunet_are_in_one_file(tmp_path):
    """Only for colour images does nnU-Net store all channels in the file _0000."""
    make_nnunet(tmp_path, channels=("R", "G", "B"), suffix=".png")
    for path in tmp_path.glob("imagesTr/*_0000.png"):
        channels = [path.with_name(path.name.replace("_0000", f"_000{number}")) for number in range(3)]
        pixels = np.stack([load(channel) for channel in channels], axis=-1)
        for channel in channels:
            channel.unlink()
        Image.fromarray(pixels).save(path)
    dataset = find_only_dataset("nnunet", tmp_path)
    arrays = read_scan(dataset, dataset.scans[0])
    np.testing.assert_array_equal(
        arrays.image, np.moveaxis(load(tmp_path / "imagesTr" / "brain_001_0000.png"), -1, 0)
    )


def test_every_incomplete_case_of_nnunet_is_reported(tmp_path):
    images, labels = make_nnunet(tmp_path, num_cases=6) / "imagesTr", tmp_path / "labelsTr"
    (images / "brain_001_0001.nii.gz").unlink()
    (labels / "brain_002.nii.gz").unlink()
    for channel in range(2):
        (images / f"brain_003_000{channel}.nii.gz").unlink()
    shutil.copy(images / "brain_004_0000.nii.gz", images / "brain_004_0002.nii.gz")
    shutil.copy(images / "brain_005_0000.nii.gz", images / "scout.nii.gz")
    shutil.copy(images / "brain_005_0000.nii.gz", images / "brain_007_0000.mha")
    (images / "notes.txt").write_text("scanned on a Monday")
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
        ({"labels": {"background": 0, "core": 1, "ignore": 2}}, ["'ignore'", "--skip-bad"]),
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
def test_an_nnunet_json_that_cannot_be_used_is_refused(tmp_path, changes, words):
    change_json(make_nnunet(tmp_path), **changes)
    refused(lambda: find_datasets("nnunet", tmp_path), "dataset.json", *words)


def test_nnunet_cases_that_contain_a_removed_ignore_label_are_left_out(tmp_path):
    make_nnunet(tmp_path / "raw")
    change_json(tmp_path / "raw", labels={"background": 0, "oedema": 1})
    path = tmp_path / "raw" / "labelsTr" / "brain_002.nii.gz"
    for label in path.parent.iterdir():
        if label != path:
            write_nifti(label, np.minimum(load(label), 1))
    raw = find_only_dataset("nnunet", tmp_path / "raw")
    manifest = prepare_dataset(raw, tmp_path / "data", workers=1, skip_bad=True)
    (problem,) = manifest.left_out
    assert "brain_002.nii.gz" in problem
    assert "0, 1" in problem


def test_version_1_of_nnunet_is_read(tmp_path):
    v1 = make_nnunet(tmp_path / "v1")
    version_1_entries = {
        "modality": {"0": "T1", "1": "FLAIR"},
        "labels": {"0": "background", "1": "oedema", "2": "core"},
    }
    change_json(v1, channel_names=None, file_ending=None, **version_1_entries)
    dataset = find_only_dataset("nnunet", v1)
    assert (dataset.channels, dataset.class_names) == (("T1", "FLAIR"), ("background", "oedema", "core"))
    assert len(dataset.scans) == 5


def test_channels_of_nnunet_with_different_affines_are_reported(tmp_path):
    dataset = find_only_dataset("nnunet", make_nnunet(tmp_path))
    path = tmp_path / "imagesTr" / "brain_001_0001.nii.gz"
    write_nifti(path, load(path), np.diag([0.7, 0.8, 5, 1]))
    refused(lambda: read_scan(dataset, dataset.scans[0]), "brain_001_0001", "not aligned", "brain_001_0000")


def test_the_real_lidc_has_the_pixels_read_by_pillow():
    raw = SHARED / "data" / "lidc"
    if not raw.exists():
        pytest.skip(f"LIDC is not at {raw}")
    dataset = find_only_dataset("folder", raw)
    assert len(dataset.scans) == 573
    assert len({scan.patient for scan in dataset.scans}) == 378
    assert dataset.raters == ("1", "2", "3", "4")
    for scan in dataset.scans[::40]:
        arrays = read_scan(dataset, scan)
        assert arrays.raters == dataset.raters
        np.testing.assert_array_equal(
            arrays.image[0], np.asarray(Image.open(raw / "images" / f"{scan.name}.png"))
        )
        for rater, mask in zip(arrays.raters, arrays.masks, strict=True):
            with Image.open(raw / "raters" / rater / f"{scan.name}.png") as picture:
                np.testing.assert_array_equal(mask, np.asarray(picture) > 0)


def test_the_real_hippocampus_has_the_voxels_read_by_nibabel():
    raw = SHARED / "data" / "hippocampus"
    if not raw.exists():
        pytest.skip(f"the Decathlon's hippocampus is not at {raw}")
    dataset = find_only_dataset("nnunet", raw)
    assert len(dataset.scans) == 260
    assert dataset.class_names == ("background", "Anterior", "Posterior")
    for scan in dataset.scans[::20]:
        arrays = read_scan(dataset, scan)
        for array, folder in ((arrays.image[0], "imagesTr"), (arrays.masks[0], "labelsTr")):
            expected = nibabel.load(raw / folder / f"{scan.name}.nii.gz").get_fdata()
            np.testing.assert_array_equal(array, expected.astype(np.float32))


@pytest.mark.parametrize("suffix", [".png", ".tif", ".nii.gz", ".nii"])
@pytest.mark.parametrize("high", [1, 255])
def test_a_folder_of_two_classes_is_read_in_every_format(tmp_path, suffix, high):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=suffix, high=high))
    assert dataset.class_names == ("background", "foreground")
    assert (dataset.num_axes, dataset.options.slices, dataset.channels) == (2, "none", ("intensity",))
    assert dataset.raters == ("a", "b", "c")
    _, expected = ellipsoids(3001, SIZE, num_raters=3)
    np.testing.assert_array_equal(read_scan(dataset, dataset.scans[0]).masks, expected)


def test_a_rater_without_a_file_is_absent_and_a_rater_with_an_empty_mask_is_present(tmp_path):
    dataset = find_only_dataset("folder", make_folder(tmp_path))
    assert read_scan(dataset, dataset.scans[1]).raters == ("a", "b")
    third = read_scan(dataset, dataset.scans[2])
    assert third.raters == ("a", "b", "c")
    assert third.masks.any(axis=(1, 2)).tolist() == [True, True, False]


@pytest.mark.parametrize(("suffix", "slice_axis"), [(".nii.gz", 2), (".tif", 0)])
def test_the_slice_axis_of_volumes_depends_on_the_file_format(tmp_path, suffix, slice_axis):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=suffix, volumes=True, num_classes=3))
    assert (dataset.num_axes, dataset.options.slices, dataset.options.slice_axis) == (3, "all", slice_axis)
    assert dataset.class_names == ("background", "class_1", "class_2")
    assert read_scan(dataset, dataset.scans[0]).masks.shape[1 + slice_axis] == DEPTH


def test_a_single_slice_among_volumes_stays_a_volume(tmp_path):
    make_folder(tmp_path, suffix=".nii.gz", volumes=True)
    for path in [tmp_path / "images", *(tmp_path / "raters").iterdir()]:
        file = path / "case1.nii.gz"
        write_nifti(file, np.asanyarray(nibabel.load(file).dataobj)[..., 3:4])
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.num_axes == 3
    assert read_scan(dataset, dataset.scans[0]).masks.shape == (3, *SIZE, 1)


def test_a_masks_folder_is_one_rater_and_cases_csv_lists_patients(tmp_path):
    dataset = find_only_dataset(
        "folder", make_folder(tmp_path, num_raters=1, masks_folder=True, patients=True)
    )
    assert dataset.raters == ("masks",)
    assert [scan.patient for scan in dataset.scans] == [f"patient{number}" for number in (1, 1, 2, 2, 3, 3)]


def test_without_cases_csv_each_case_is_a_patient_and_the_order_is_natural(tmp_path):
    dataset = find_only_dataset("folder", make_folder(tmp_path, num_cases=11))
    assert scan_names(dataset) == [f"case{number}" for number in range(1, 12)]
    assert [scan.patient for scan in dataset.scans] == scan_names(dataset)


def test_progress_is_reported_for_each_mask(tmp_path):
    calls = []
    find_datasets("folder", make_folder(tmp_path), on_file=lambda *call: calls.append(call))
    assert calls == [(number, 17) for number in range(1, 18)]


def rewrite_masks(root, change):
    for path in sorted(root.glob("raters/*/*.png")):
        with Image.open(path) as picture:
            pixels = np.array(picture)
        write_picture(path, change(pixels, path))


def test_masks_of_1_and_masks_of_255_together_are_two_classes(tmp_path):
    make_folder(tmp_path)
    rewrite_masks(tmp_path, lambda pixels, path: pixels // 255 if "case1" in path.name else pixels)
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.class_names == ("background", "foreground")
    for scan in dataset.scans[:2]:
        assert np.unique(read_scan(dataset, scan).masks).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # next to 1, the value 255 often marks voxels to ignore: semidice does not guess
        (lambda pixels: np.where(np.arange(36) == 0, 255, pixels // 255), ["0, 1, 255"]),
        (lambda pixels: pixels // 255 * 128, ["0, 128"]),
        (lambda pixels: pixels // 255 * 3, ["3", "no mask holds 1"]),
        (lambda pixels: np.arange(40)[:, None] * 6 + pixels // 255, ["threshold them"]),
    ],
)
def test_ambiguous_mask_values_require_a_table_of_classes(tmp_path, change, words):
    make_folder(tmp_path)
    rewrite_masks(tmp_path, lambda pixels, _: change(pixels).astype(np.uint8))
    refused(lambda: find_datasets("folder", tmp_path), ".png", "classes.csv", *words)


def test_a_table_of_classes_maps_values_to_classes_and_can_merge_them(tmp_path):
    make_folder(tmp_path, num_classes=4)
    (tmp_path / "classes.csv").write_text("value,name\n1,organ\n2,lesion\n3,lesion\n")
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.class_names == ("background", "organ", "lesion")
    _, expected = ellipsoids(3001, SIZE, num_raters=3, num_classes=4)
    np.testing.assert_array_equal(read_scan(dataset, dataset.scans[0]).masks, np.minimum(expected, 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("value,name\n-1,organ\n", ["'-1'", "0 to 65535"]),
        ("value,name\n1,organ\n1,lesion\n", ["'1' twice", "keep one row"]),
        ("number,name\n1,organ\n", ["columns value and name"]),
        ("value,name\n0,background\n", ["1 classes", "2 to 256"]),
    ],
)
def test_a_wrong_table_of_classes_is_refused(tmp_path, text, words):
    make_folder(tmp_path)
    (tmp_path / "classes.csv").write_text(text)
    refused(lambda: find_datasets("folder", tmp_path), "classes.csv", *words)


@pytest.mark.parametrize(
    "text",
    [
        "case,patient\ncase1,p\ncase2,q\n",
        "\ufeffCase;Patient;age\ncase1;p;40\ncase2;q;50\n",
        "patient, case\r\np, case1.png\r\nq, case2.png\r\n",
    ],
)
def test_tables_written_by_spreadsheets_are_read(tmp_path, text):
    make_folder(tmp_path, num_cases=2)
    (tmp_path / "cases.csv").write_text(text, encoding="utf-8", newline="")
    assert [scan.patient for scan in find_only_dataset("folder", tmp_path).scans] == ["p", "q"]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("case,patient\ncase1,p\ncase1,q\n", "'case1' twice"),
        ("case,patient\ncase1,p\ncase1.png,q\n", "two patients for case 'case1'"),
        ("case,patient\ncase1,\n", "line 2"),
        ("name,patient\ncase1,p\n", "columns case and patient"),
        ("case,patient\ncase1,p\n", "no row for case 'case2'"),
    ],
)
def test_patients_are_not_guessed_if_the_table_of_cases_is_wrong(tmp_path, content, word):
    make_folder(tmp_path, num_cases=2)
    (tmp_path / "cases.csv").write_text(content)
    (dataset,) = find_datasets("folder", tmp_path)
    (problem,) = dataset.problems
    assert str(tmp_path / "cases.csv") in problem
    assert word in problem
    # cases without a valid row are left out
    assert scan_names(dataset) == (["case1"] if "no row" in word else [])


def test_a_broken_link_to_a_table_of_cases_is_reported(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "cases.csv").symlink_to(tmp_path / "gone.csv")
    (problem,) = find_problems("folder", tmp_path)
    assert "cases.csv" in problem


def test_images_without_mask_and_masks_without_image_are_reported_and_other_cases_are_kept(tmp_path):
    make_folder(tmp_path)
    for path in tmp_path.glob("raters/*/case1.png"):
        path.unlink()
    (tmp_path / "images" / "case4.png").rename(tmp_path / "images" / "case4.jpg")
    (tmp_path / "images" / "more").mkdir()
    (tmp_path / "raters" / "d").mkdir()
    (dataset,) = find_datasets("folder", tmp_path)
    assert scan_names(dataset) == ["case2", "case3", "case5", "case6"]
    text = "\n".join(dataset.problems)
    assert len(dataset.problems) == 5
    assert f"image {tmp_path / 'images' / 'case1.png'} has no mask" in text
    assert f"mask {tmp_path / 'raters' / 'a' / 'case4.png'} has no image" in text
    assert "case4.jpg cannot be used: convert it" in text
    assert "more is a folder" in text
    assert "rater 'd' has no mask" in text


def test_a_case_in_two_formats_or_in_two_spellings_is_reported(tmp_path):
    make_folder(tmp_path)
    shutil.copy(tmp_path / "images" / "case1.png", tmp_path / "images" / "case1.tif")
    shutil.copy(tmp_path / "raters" / "a" / "case2.png", tmp_path / "raters" / "a" / "case2.tiff")
    for folder in ("images", "raters/a"):
        shutil.copy(tmp_path / folder / "case3.png", tmp_path / folder / "CASE3.png")
    (dataset,) = find_datasets("folder", tmp_path)
    assert scan_names(dataset) == ["case4", "case5", "case6"]
    first, second, third = sorted(dataset.problems, key=lambda problem: problem.lower().index("case"))
    text = "\n".join((first, second, third))
    assert "images/case1.tif" in text
    assert "raters/a/case2.tiff" in text
    assert "images/CASE3.png" in text


def test_case_names_become_valid_file_names_and_collisions_are_reported(tmp_path):
    make_folder(tmp_path, num_cases=3)
    for folder in [tmp_path / "images", *(tmp_path / "raters").iterdir()]:
        for old, new in (("case1", "Müller: 1"), ("case3", "a?b")):
            (folder / f"{old}.png").rename(folder / f"{new}.png")
    dataset = find_only_dataset("folder", tmp_path)
    assert scan_names(dataset) == ["Muller_ 1", "a_b", "case2"]
    assert dataset.scans[0].patient == "Müller: 1"
    for folder in [tmp_path / "images", *(tmp_path / "raters").iterdir()]:
        if (folder / "case2.png").exists():
            (folder / "case2.png").rename(folder / "a*b.png")
    (problem,) = find_problems("folder", tmp_path)
    assert "2 images would be case 'a_b'" in problem


def test_colours_are_three_channels_and_a_grey_image_among_colour_images_is_reported(tmp_path):
    make_folder(tmp_path)
    for path in sorted((tmp_path / "images").iterdir())[1:]:
        with Image.open(path) as picture:
            picture.convert("RGB").save(path)
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.channels == ("red", "green", "blue")
    assert read_scan(dataset, dataset.scans[1]).image.shape == (3, *SIZE)
    refused(lambda: read_scan(dataset, dataset.scans[0]), "case1.png", "(40, 36)", "3 channels")


def test_the_additional_axis_of_a_nifti_image_holds_channels(tmp_path):
    make_folder(tmp_path, suffix=".nii.gz")
    for path in (tmp_path / "images").iterdir():
        image = nibabel.load(path).get_fdata().astype(np.float32)
        write_nifti(path, np.stack([image, image * 2], axis=-1))
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.channels == ("channel_1", "channel_2")
    arrays = read_scan(dataset, dataset.scans[0])
    np.testing.assert_array_equal(arrays.image[1], 2 * arrays.image[0])


def write_channels(root, case, *, suffix, num_channels=2, raters=("a", "b")):
    """Write images/CASE_0000, ... with different values, raters/NAME/CASE, and return the channels."""
    is_nifti = suffix.startswith(".nii")
    image, masks = ellipsoids(int(case[-1]), (20, 22, 5) if is_nifti else (20, 22), num_raters=len(raters))
    write = write_nifti if is_nifti else write_picture
    levels = np.clip(image * 100, 0, 100).astype(np.float32 if is_nifti else np.uint8)
    channels = [levels + levels.dtype.type(10 * number) for number in range(num_channels)]
    for number, channel in enumerate(channels):
        write(root / "images" / f"{case}_{number:04d}{suffix}", channel)
    for rater, mask in zip(raters, masks, strict=True):
        write(root / "raters" / rater / f"{case}{suffix}", mask)
    return channels


@pytest.mark.parametrize(("suffix", "num_axes"), [(".png", 2), (".nii.gz", 3)])
@pytest.mark.parametrize("num_channels", [1, 2, 3])
def test_channels_of_a_folder_may_be_separate_files_beside_several_raters(
    tmp_path, suffix, num_axes, num_channels
):
    written = {
        case: write_channels(tmp_path, case, suffix=suffix, num_channels=num_channels)
        for case in ("case1", "case_0002", "case3")
    }
    dataset = find_only_dataset("folder", tmp_path)
    assert scan_names(dataset) == ["case1", "case3", "case_0002"]
    assert dataset.raters == ("a", "b")
    assert dataset.num_axes == num_axes
    numbered = tuple(f"channel_{number}" for number in range(1, num_channels + 1))
    assert dataset.channels == (numbered if num_channels > 1 else ("intensity",))
    for scan in dataset.scans:
        arrays = read_scan(dataset, scan)
        np.testing.assert_array_equal(arrays.image, written[scan.name])
        assert arrays.raters == ("a", "b")
        files = {f"images/{scan.name}_{number:04d}{suffix}" for number in range(num_channels)}
        assert arrays.inputs.keys() == files | {f"raters/{rater}/{scan.name}{suffix}" for rater in "ab"}


@pytest.mark.parametrize("suffix", [".png", ".nii.gz"])
def test_a_case_with_another_number_of_channels_is_named(tmp_path, suffix):
    for case in ("case1", "case2", "case3", "case4"):
        write_channels(tmp_path, case, suffix=suffix)
    (tmp_path / f"images/case2_0000{suffix}").unlink()
    (tmp_path / f"images/case4_0001{suffix}").rename(tmp_path / f"images/case4_0002{suffix}")
    write_channels(tmp_path, "case5", suffix=suffix, num_channels=3)
    (dataset,) = find_datasets("folder", tmp_path)
    assert scan_names(dataset) == ["case1", "case3"]
    for problem, case, files in zip(
        dataset.problems,
        ("case2", "case4", "case5"),
        ((1,), (0, 2), (0, 1, 2)),
        strict=True,
    ):
        words = [f"{case}_{number:04d}{suffix}" for number in files]
        for word in (repr(case), str(tmp_path / "images"), "2 channel files", "add or remove", *words):
            assert word in problem


def test_a_case_in_one_file_among_cases_with_several_channels_is_named(tmp_path):
    for case in ("case1", "case2"):
        write_channels(tmp_path / "raw", case, suffix=".png")
    write_channels(tmp_path / "raw", "case3", suffix=".png", num_channels=1)
    (tmp_path / "raw/images/case3_0000.png").rename(tmp_path / "raw/images/case3.png")
    dataset = find_only_dataset("folder", tmp_path / "raw")
    words = ("case3.png", "(20, 22)", "2 channels")
    refused(lambda: prepare_dataset(dataset, tmp_path / "out", workers=1), *words)


def test_images_whose_names_end_like_a_channel_are_cases_if_they_have_masks(tmp_path):
    make_folder(tmp_path, num_cases=3, num_raters=2)
    for path in sorted(tmp_path.rglob("case*.png")):
        path.rename(path.with_name(f"scan_000{path.stem[-1]}.png"))
    dataset = find_only_dataset("folder", tmp_path)
    assert scan_names(dataset) == ["scan_0001", "scan_0002", "scan_0003"]
    assert dataset.channels == ("intensity",)


def test_a_mix_of_niftis_and_pictures_is_refused(tmp_path):
    make_folder(tmp_path)
    image, _ = ellipsoids(0, SIZE)
    (tmp_path / "images" / "case1.png").unlink()
    write_nifti(tmp_path / "images" / "case1.nii.gz", image)
    refused(lambda: find_datasets("folder", tmp_path), "case1.nii.gz", "case1.png", "one format")


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["images"], ["raters/NAME"]),
        (["raters/a"], ["holds raters"]),
        (["images", "raters"], ["raters holds no folder"]),
        (["images", "raters/a", "masks"], ["both raters and masks", "remove one"]),
    ],
)
def test_missing_or_conflicting_folders_are_refused(tmp_path, folders, words):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    refused(lambda: find_datasets("folder", tmp_path), str(tmp_path), *words)
