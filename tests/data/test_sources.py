"""Sources find all scans of every layout in order, and all scans are read in the same way."""

import hashlib
import os
import pickle

import nibabel
import numpy as np
import pytest
from nibabel.affines import apply_affine
from raw_trees import (
    AFFINE,
    SIZE,
    ellipsoids,
    find_only_dataset,
    make_folder,
    make_kits,
    make_lits,
    make_nnunet,
    make_qubiq,
    read_scan,
    scan_names,
    write_nifti,
    write_picture,
)
from start import refused

from semidice.data.phantom import PhantomOptions, make_phantom
from semidice.data.sources import SOURCES, find_datasets
from semidice.paths import check_name

MAKERS = {
    "qubiq": make_qubiq,
    "lits": make_lits,
    "kits": make_kits,
    "nnunet": make_nnunet,
    "folder": make_folder,
}


@pytest.mark.parametrize("source", MAKERS)
def test_every_scan_is_read_after_pickling_and_is_brighter_under_its_masks(tmp_path, source):
    datasets = find_datasets(source, MAKERS[source](tmp_path))
    for dataset in datasets:
        assert len(dataset.scans) >= 5
        assert dataset.problems == ()
        for scan in dataset.scans:
            arrays = read_scan(*pickle.loads(pickle.dumps((dataset, scan))))
            assert arrays.image.shape[0] == len(dataset.channels)
            assert arrays.masks.shape == (len(arrays.raters), *arrays.image.shape[1:])
            assert arrays.masks.ndim == dataset.num_axes + 1
            if not scan.image or scan.image[0].suffix == ".png":
                assert arrays.grid.spacing_mm is None
            else:
                assert len(arrays.grid.spacing_mm) == dataset.num_axes
            assert set(arrays.raters) <= set(dataset.raters)
            assert arrays.masks.max() < len(dataset.class_names)
            drawn = arrays.masks[0] > 0
            if drawn.any():
                assert arrays.image[0][drawn].mean() > arrays.image[0][~drawn].mean()
            assert check_name(scan.name) == scan.name


@pytest.mark.parametrize("source", MAKERS)
def test_inputs_are_digests_of_the_files_by_path_relative_to_the_raw_folder(tmp_path, source):
    dataset = find_datasets(source, MAKERS[source](tmp_path))[0]
    scan = dataset.scans[0]
    inputs = read_scan(dataset, scan).inputs
    assert len(inputs) == len(scan.image) + len(scan.masks)
    for name, digest in inputs.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("source", MAKERS)
def test_datasets_do_not_depend_on_the_order_of_directory_entries(tmp_path, source, monkeypatch):
    MAKERS[source](tmp_path)
    first = find_datasets(source, tmp_path)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    assert find_datasets(source, tmp_path) == first


def test_every_source_is_tested_and_an_unknown_source_is_refused(tmp_path):
    # tests/integrations/test_dicom.py has the tests of dicom
    assert set(SOURCES) == {*MAKERS, "dicom"}
    refused(lambda: find_datasets("nifti", tmp_path), "qubiq, lits, kits", "'nifti'")


@pytest.mark.parametrize("source", MAKERS)
def test_a_missing_or_empty_folder_is_refused(tmp_path, source):
    refused(lambda: find_datasets(source, tmp_path / "gone"), str(tmp_path / "gone"), SOURCES[source][1])
    refused(lambda: find_datasets(source, tmp_path), str(tmp_path))


@pytest.mark.parametrize("suffix", [".png", ".nii.gz"])
def test_a_mask_of_another_size_is_refused_with_both_shapes(tmp_path, suffix):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=suffix))
    _, masks = ellipsoids(0, (30, 36))
    write = write_picture if suffix == ".png" else write_nifti
    write(tmp_path / "raters" / "b" / f"case1{suffix}", masks[0])
    words = ("raters/b/case1", "(30, 36)", "images/case1", "(40, 36)", "resample")
    refused(lambda: read_scan(dataset, dataset.scans[0]), *words)


def test_a_file_removed_or_damaged_after_the_search_is_refused(tmp_path):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=".nii.gz"))
    (tmp_path / "raters" / "a" / "case1.nii.gz").unlink()
    image = tmp_path / "images" / "case2.nii.gz"
    image.write_bytes(image.read_bytes()[:300])
    refused(lambda: read_scan(dataset, dataset.scans[0]), "there is no", "raters/a/case1.nii.gz")
    refused(lambda: read_scan(dataset, dataset.scans[1]), "images/case2.nii.gz")


def test_a_damaged_file_does_not_stop_the_search(tmp_path):
    make_folder(tmp_path, suffix=".nii.gz")
    for path in (tmp_path / "images" / "case1.nii.gz", tmp_path / "raters" / "a" / "case2.nii.gz"):
        path.write_bytes(path.read_bytes()[:300])
    dataset = find_only_dataset("folder", tmp_path)
    assert len(dataset.scans) == 6
    assert dataset.class_names == ("background", "foreground")


def test_files_of_single_channels_are_joined_and_must_have_equal_sizes(tmp_path):
    dataset = find_only_dataset("folder", make_folder(tmp_path))
    first, second = dataset.scans[:2]
    joined = type(dataset)(**vars(dataset) | {"channels": ("T1", "T2")})
    both = type(first)(first.name, first.patient, (*first.image, *second.image), first.masks)
    arrays = read_scan(joined, both)
    for channel, scan in zip(arrays.image, (first, second), strict=True):
        np.testing.assert_array_equal(channel, read_scan(dataset, scan).image[0])
    assert len(arrays.inputs) == 5
    write_picture(second.image[0], np.arange(600, dtype=np.uint16).reshape(20, 30))
    refused(lambda: read_scan(joined, both), "case2.png", "(20, 30)", "case1.png", "(40, 36)")


SPACE = (40, 36, 6)
# an oblique grid, such as the grid of a tilted head
TURN = np.array([[0.96, -0.28, 0], [0.28, 0.96, 0], [0, 0, 1.0]])
OBLIQUE = np.block(
    [[TURN @ AFFINE[:3, :3], np.array([[-112.37], [80.2], [-1043.7]])], [np.zeros(3), np.ones(1)]]
)


def read_pair(folder, image_affine, mask_affine, space=SPACE):
    """Write an image and its mask as a folder of one case and read it; affine None: no spatial header."""
    image, masks = ellipsoids(0, space)
    write_nifti(folder / "images" / "case1.nii.gz", image, image_affine)
    write_nifti(folder / "masks" / "case1.nii.gz", masks[0], mask_affine)
    return read_case(folder)


def read_case(folder):
    dataset = find_only_dataset("folder", folder)
    return read_scan(dataset, dataset.scans[0])


def change_header(path, change):
    """Load the NIfTI, call `change` with it, and save it again."""
    file = nibabel.load(path)
    change(file)
    nibabel.save(nibabel.Nifti1Image(np.asanyarray(file.dataobj), None, file.header), path)


def moved(affine, *by):
    """The affine translated by some mm."""
    result = affine.copy()
    result[:3, 3] += by
    return result


def reordered(affine, space, order, flipped=()):
    """The affine of the same voxels after their axes are permuted and then flipped."""
    turned = affine[:, [*order, 3]]
    for axis in flipped:
        turned[:3, 3] += turned[:3, axis] * (space[axis] - 1)
        turned[:3, axis] *= -1
    return turned


@pytest.mark.parametrize(
    ("image", "mask", "words"),
    [
        (AFFINE, moved(AFFINE, 0, 0, 2.5), "it is moved by (0, 0, 2.5) mm"),
        (OBLIQUE, moved(OBLIQUE, 3, -4, 0), "it is moved by (3, -4, 0) mm"),
        (AFFINE, np.diag([0.7, 0.8, 5, 1]), "its spacing is 0.7 x 0.8 x 5 mm, not 0.7 x 0.8 x 2.5 mm"),
        # a mask that was saved without an affine
        (
            moved(AFFINE, 9, 0, 0),
            np.eye(4),
            "its spacing is 1 x 1 x 1 mm, not 0.7 x 0.8 x 2.5 mm",
        ),
        (AFFINE, reordered(AFFINE, SPACE, (0, 1, 2), (1,)), "its axis 1 is flipped"),
        (
            OBLIQUE,
            moved(reordered(OBLIQUE, SPACE, (0, 1, 2), (0, 2)), 0, 0, 30),
            "is flipped",
        ),
        (
            AFFINE,
            OBLIQUE,
            "its axes are turned by up to 16 degrees",
        ),
    ],
)
def test_a_misaligned_mask_is_refused_with_both_files_the_difference_and_advice(tmp_path, image, mask, words):
    space = np.stack(np.indices(SPACE), axis=-1)
    distance = np.linalg.norm(apply_affine(mask, space) - apply_affine(image, space), axis=-1).max()
    refused(
        lambda: read_pair(tmp_path, image, mask),
        f"{tmp_path}/masks/case1.nii.gz",
        f"{tmp_path}/images/case1.nii.gz",
        f"{distance:.3g} mm apart",
        words,
        "--ignore-placement",
    )


@pytest.mark.parametrize(
    ("order", "flipped"),
    [
        ((1, 0, 2), ()),
        ((2, 0, 1), (0,)),
    ],
)
@pytest.mark.parametrize("affine", [AFFINE, OBLIQUE])
def test_axes_in_another_order_are_refused_and_not_reordered(tmp_path, order, flipped, affine):
    space = (20, 20, 20)
    mask = reordered(affine, space, order, flipped)
    refused(lambda: read_pair(tmp_path, affine, mask, space), "not aligned", "its axes are in another order")


@pytest.mark.parametrize("affine", [AFFINE, OBLIQUE])
def test_a_mask_may_be_moved_by_up_to_a_tenth_of_the_smallest_spacing(tmp_path, affine):
    read_pair(tmp_path / "near", affine, moved(affine, 0, 0, 0.069))
    far = moved(affine, 0, 0, 0.0712)
    refused(lambda: read_pair(tmp_path / "far", affine, far), "moved by (0, 0, 0.071")
    # small differences, each of them allowed, add up to too much in a corner
    skewed = moved(affine * [1.0004, 1, 1, 1], 0.05, 0.04, 0.02)
    refused(lambda: read_pair(tmp_path / "corner", affine, skewed), "up to 0.07")


def test_an_affine_written_by_another_tool_or_with_fewer_digits_is_accepted(tmp_path):
    affine = OBLIQUE @ np.diag([0.703125 / 0.7, 0.703125 / 0.8, 0.5, 1])
    read_pair(tmp_path / "rounded", affine, np.round(affine, 4), (200, 200, 4))
    read_pair(tmp_path / "quaternion", affine, affine)

    def as_itk_writes_it(mask):
        mask.set_qform(affine, code="scanner")
        mask.set_sform(None, code=0)

    path = tmp_path / "quaternion" / "masks" / "case1.nii.gz"
    before = nibabel.load(path).affine
    change_header(path, as_itk_writes_it)
    assert not np.array_equal(nibabel.load(path).affine, before)
    assert read_case(tmp_path / "quaternion").masks.any()


def test_headers_without_an_affine_are_not_compared(tmp_path):
    far = moved(AFFINE, 500, 0, 0)
    for number, pair in enumerate([(None, far), (far, None), (None, None)]):
        assert read_pair(tmp_path / str(number), *pair).masks.any()


@pytest.mark.parametrize("registered", ["images", "masks"])
def test_one_of_two_affines_in_a_header_is_enough_for_alignment(tmp_path, registered):
    read_pair(tmp_path, OBLIQUE, OBLIQUE)

    def in_two_spaces(file):
        file.set_qform(OBLIQUE, code="scanner")
        file.set_sform(AFFINE, code="mni")

    path = tmp_path / registered / "case1.nii.gz"
    change_header(path, in_two_spaces)
    assert read_case(tmp_path).masks.any()
    # if neither agrees, the message describes the affine that nibabel uses
    change_header(path, lambda file: file.set_qform(moved(OBLIQUE, 9, 0, 0), code="scanner"))
    refused(lambda: read_case(tmp_path), "turned by up to 16 degrees")


def test_an_invalid_qform_is_ignored_if_there_is_an_sform(tmp_path):
    read_pair(tmp_path, OBLIQUE, OBLIQUE)

    def damage(mask):
        mask.header["qform_code"], mask.header["quatern_b"], mask.header["quatern_c"] = 1, 1, 1

    change_header(tmp_path / "masks" / "case1.nii.gz", damage)
    assert read_case(tmp_path).masks.any()


def test_positions_are_compared_in_mm_even_if_units_differ(tmp_path):
    read_pair(tmp_path, OBLIQUE, OBLIQUE)

    def in_micron(mask):
        mask.set_sform(np.diag([1000, 1000, 1000, 1]) @ OBLIQUE, code="aligned")
        mask.header.set_xyzt_units("micron")
        mask.header["pixdim"][1:4] *= 1000

    change_header(tmp_path / "masks" / "case1.nii.gz", in_micron)
    assert read_case(tmp_path).masks.any()


def test_a_slice_may_have_another_thickness_but_not_another_position(tmp_path):
    thick = AFFINE @ np.diag([1, 1, 3, 1])
    image, masks = ellipsoids(0, SIZE)
    for name, shape in (("flat", SIZE), ("volume", (*SIZE, 1))):
        write_nifti(tmp_path / name / "images" / "case1.nii", image[..., None])
        mask = write_nifti(tmp_path / name / "masks" / "case1.nii", masks[0].reshape(shape), thick)
        assert read_case(tmp_path / name).masks.any()
        write_nifti(mask, masks[0].reshape(shape), moved(AFFINE, 0, 0, 2.5))
        refused(lambda name=name: read_case(tmp_path / name), "moved by (0, 0, 2.5) mm")


def test_files_of_single_channels_must_be_aligned(tmp_path):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=".nii.gz"))
    first, second = dataset.scans[:2]
    joined = type(dataset)(**vars(dataset) | {"channels": ("T1", "T2")})
    both = type(first)(first.name, first.patient, (*first.image, *second.image), first.masks)
    assert read_scan(joined, both).image.shape[0] == 2
    write_nifti(second.image[0], ellipsoids(0, SIZE)[0], moved(AFFINE, 5, 0, 0))
    refused(lambda: read_scan(joined, both), "case2", "not aligned", "case1", "(5, 0, 0) mm")


@pytest.mark.parametrize("num_classes", [2, 4])
def test_the_scans_of_a_phantom_equal_its_cases_bit_for_bit(num_classes):
    options = PhantomOptions(num_cases=4, size=(24, 32), num_raters=3, num_classes=num_classes, seed=7)
    dataset = find_only_dataset("phantom", options)
    expected = make_phantom(4, size=(24, 32), num_raters=3, num_classes=num_classes, seed=7)
    assert len(dataset.class_names) == num_classes
    for number, scan in enumerate(dataset.scans):
        arrays = read_scan(dataset, scan)
        np.testing.assert_array_equal(arrays.image, expected.image[number].numpy())
        np.testing.assert_array_equal(arrays.truth, expected.prob[number].numpy())
        np.testing.assert_array_equal(arrays.masks, expected.masks[number].numpy())
        assert arrays.raters == dataset.raters == ("rater_1", "rater_2", "rater_3")
        low, high = dataset.options.window
        assert arrays.image.min() > low
        assert arrays.image.max() < high


def test_a_phantom_has_defaults():
    dataset = find_only_dataset("phantom", PhantomOptions())
    assert len(dataset.scans) == 60
    assert scan_names(dataset)[:2] == ["case0000", "case0001"]
