"""A user's own folder: formats, raters, classes, patients, channels, and problems of single cases."""

import shutil

import numpy as np
import pytest
from PIL import Image
from raw_trees import (
    DEPTH,
    SIZE,
    ellipsoids,
    find_only_dataset,
    find_problems,
    make_folder,
    read_scan,
    scan_names,
    write_nifti,
    write_picture,
)
from start import refused

from semidice.data.sources import find_datasets


@pytest.mark.parametrize("suffix", [".png", ".tif", ".nii.gz", ".nii"])
@pytest.mark.parametrize("high", [1, 255])
def test_a_folder_of_two_classes_is_read_in_every_format(tmp_path, suffix, high):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=suffix, high=high))
    assert dataset.class_names == ("background", "foreground")
    assert (dataset.num_axes, dataset.options.slices, dataset.channels) == (2, "none", ("intensity",))
    assert dataset.raters == ("a", "b", "c")
    assert dataset.options.keep_bytes == (suffix in (".png", ".tif"))
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


@pytest.mark.parametrize("num_flat", [1, 5])
def test_volumes_of_one_slice_among_others_are_volumes(tmp_path, num_flat):
    make_folder(tmp_path, suffix=".nii.gz", volumes=True)
    for path in sorted(tmp_path.rglob(f"case[1-{num_flat}].nii.gz")):
        write_nifti(path, read_nifti(path)[..., 3:4])
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.num_axes == 3
    assert read_scan(dataset, dataset.scans[0]).masks.shape == (3, *SIZE, 1)


def read_nifti(path):
    import nibabel

    return np.asanyarray(nibabel.load(path).dataobj)


def test_a_masks_folder_is_one_rater_and_cases_csv_lists_patients(tmp_path):
    make_folder(tmp_path / "with", num_raters=1, masks_folder=True, patients=True)
    dataset = find_only_dataset("folder", tmp_path / "with")
    assert dataset.raters == ("masks",)
    assert [scan.patient for scan in dataset.scans] == [f"patient{number}" for number in (1, 1, 2, 2, 3, 3)]
    without = find_only_dataset("folder", make_folder(tmp_path / "without", num_cases=11))
    assert scan_names(without) == [f"case{number}" for number in range(1, 12)]
    assert [scan.patient for scan in without.scans] == scan_names(without)


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
    for scan in dataset.scans[:2]:
        assert np.unique(read_scan(dataset, scan).masks).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "word"),
    [(lambda pixels: pixels // 255 * 128, "0, 128"), (lambda pixels: pixels // 255 * 3, "no mask holds 1")],
)
def test_other_mask_values_require_a_table_of_classes(tmp_path, change, word):
    make_folder(tmp_path)
    rewrite_masks(tmp_path, lambda pixels, _: change(pixels).astype(np.uint8))
    refused(lambda: find_datasets("folder", tmp_path), ".png", "classes.csv", word)


def test_a_table_of_classes_maps_values_to_classes_and_can_merge_them(tmp_path):
    make_folder(tmp_path, num_classes=4)
    (tmp_path / "classes.csv").write_text("value,name\n1,organ\n2,lesion\n3,lesion\n")
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.class_names == ("background", "organ", "lesion")
    _, expected = ellipsoids(3001, SIZE, num_raters=3, num_classes=4)
    np.testing.assert_array_equal(read_scan(dataset, dataset.scans[0]).masks, np.minimum(expected, 2))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("value,name\n-1,organ\n", "'-1'"),
        ("value,name\n1,organ\n1,lesion\n", "'1' twice"),
        ("number,name\n1,organ\n", "columns value and name"),
        ("value,name\n0,background\n", "2 to 256"),
        ("value,name\n1,organ,left\n", "more cells than columns"),
    ],
)
def test_a_wrong_table_of_classes_is_refused(tmp_path, text, word):
    make_folder(tmp_path)
    (tmp_path / "classes.csv").write_text(text)
    refused(lambda: find_datasets("folder", tmp_path), "classes.csv", word)


def test_incomplete_cases_are_reported_and_other_cases_are_kept(tmp_path):
    make_folder(tmp_path)
    for path in tmp_path.glob("raters/*/case1.png"):
        path.unlink()
    (tmp_path / "images" / "case4.png").rename(tmp_path / "images" / "case4.jpg")
    shutil.copy(tmp_path / "raters/a/case2.png", tmp_path / "raters/a/case2.tiff")
    for folder in ("images", "raters/a"):
        shutil.copy(tmp_path / folder / "case3.png", tmp_path / folder / "CASE3.png")
    (tmp_path / "images" / "more").mkdir()
    (tmp_path / "raters" / "d").mkdir()
    (dataset,) = find_datasets("folder", tmp_path)
    assert scan_names(dataset) == ["case5", "case6"]
    text = "\n".join(dataset.problems)
    assert len(dataset.problems) == 7
    for words in (
        f"image {tmp_path}/images/case1.png has no mask",
        f"mask {tmp_path}/raters/a/case4.png has no image",
        "case4.jpg cannot be used: convert it",
        "raters/a/case2.tiff: keep one",
        f"{tmp_path}/images/CASE3.png",
        "more is a folder",
        "rater 'd' has no mask",
    ):
        assert words in text


def test_case_names_become_valid_file_names_and_collisions_are_reported(tmp_path):
    make_folder(tmp_path, num_cases=3)
    for path in sorted(tmp_path.rglob("case[13].png")):
        path.rename(path.with_stem({"case1": "Müller: 1", "case3": "a?b"}[path.stem]))
    dataset = find_only_dataset("folder", tmp_path)
    assert scan_names(dataset) == ["Muller_ 1", "a_b", "case2"]
    assert dataset.scans[0].patient == "Müller: 1"
    for path in sorted(tmp_path.rglob("case2.png")):
        path.rename(path.with_stem("a*b"))
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
        image = read_nifti(path)
        write_nifti(path, np.stack([image, image * 2], axis=-1))
    dataset = find_only_dataset("folder", tmp_path)
    assert dataset.channels == ("channel_1", "channel_2")
    arrays = read_scan(dataset, dataset.scans[0])
    np.testing.assert_array_equal(arrays.image[1], 2 * arrays.image[0])


def write_channels(root, case, *, suffix, num_channels=2):
    """Write images/CASE_0000, ... with different values, raters/NAME/CASE, and return the channels."""
    is_nifti = suffix.startswith(".nii")
    image, masks = ellipsoids(int(case[-1]), (20, 22, 5) if is_nifti else (20, 22), num_raters=2)
    write = write_nifti if is_nifti else write_picture
    levels = np.clip(image * 100, 0, 100).astype(np.float32 if is_nifti else np.uint8)
    channels = [levels + levels.dtype.type(10 * number) for number in range(num_channels)]
    for number, channel in enumerate(channels):
        write(root / "images" / f"{case}_{number:04d}{suffix}", channel)
    for rater, mask in zip("ab", masks, strict=True):
        write(root / "raters" / rater / f"{case}{suffix}", mask)
    return channels


@pytest.mark.parametrize(("suffix", "num_channels"), [(".png", 1), (".png", 3), (".nii.gz", 2)])
def test_channels_may_be_separate_files_beside_several_raters(tmp_path, suffix, num_channels):
    cases = ("case1", "case_0002", "case3")
    written = {
        case: write_channels(tmp_path, case, suffix=suffix, num_channels=num_channels) for case in cases
    }
    dataset = find_only_dataset("folder", tmp_path)
    assert scan_names(dataset) == ["case1", "case3", "case_0002"]
    numbered = tuple(f"channel_{number}" for number in range(1, num_channels + 1))
    assert dataset.channels == (numbered if num_channels > 1 else ("intensity",))
    for scan in dataset.scans:
        arrays = read_scan(dataset, scan)
        np.testing.assert_array_equal(arrays.image, written[scan.name])
        assert arrays.raters == ("a", "b")


def test_a_case_with_another_number_of_channels_is_named(tmp_path):
    for case in ("case1", "case2", "case3", "case4"):
        write_channels(tmp_path, case, suffix=".png")
    (tmp_path / "images/case2_0000.png").unlink()
    (tmp_path / "images/case4_0001.png").rename(tmp_path / "images/case4_0002.png")
    write_channels(tmp_path, "case5", suffix=".png", num_channels=3)
    (dataset,) = find_datasets("folder", tmp_path)
    assert scan_names(dataset) == ["case1", "case3"]
    expected = {"case2": (1,), "case4": (0, 2), "case5": (0, 1, 2)}
    for problem, (case, files) in zip(dataset.problems, expected.items(), strict=True):
        words = [f"{case}_{number:04d}.png" for number in files]
        assert all(word in problem for word in (repr(case), "2 channel files", "add or remove", *words))


def test_images_whose_names_end_like_a_channel_are_cases_if_they_have_masks(tmp_path):
    make_folder(tmp_path, num_cases=3, num_raters=2)
    for path in sorted(tmp_path.rglob("case*.png")):
        path.rename(path.with_name(f"scan_000{path.stem[-1]}.png"))
    dataset = find_only_dataset("folder", tmp_path)
    assert scan_names(dataset) == ["scan_0001", "scan_0002", "scan_0003"]


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
