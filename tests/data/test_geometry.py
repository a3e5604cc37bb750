"""Images and masks must be on one grid: which headers are aligned, and what is said of the others."""

import nibabel
import numpy as np
import pytest
from nibabel.affines import apply_affine
from raw_trees import AFFINE, SIZE, ellipsoids, find_only_dataset, make_folder, read_scan, write_nifti
from start import refused

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


CUBE = (20, 20, 20)


@pytest.mark.parametrize(
    ("image", "mask", "space", "words"),
    [
        (OBLIQUE, moved(OBLIQUE, 3, -4, 0), SPACE, "it is moved by (3, -4, 0) mm"),
        (AFFINE, np.diag([0.7, 0.8, 5, 1]), SPACE, "its spacing is 0.7 x 0.8 x 5 mm, not 0.7 x 0.8 x 2.5 mm"),
        # a mask that was saved without an affine
        (moved(AFFINE, 9, 0, 0), np.eye(4), SPACE, "its spacing is 1 x 1 x 1 mm"),
        (AFFINE, reordered(AFFINE, SPACE, (0, 1, 2), (1,)), SPACE, "its axis 1 is flipped"),
        (OBLIQUE, moved(reordered(OBLIQUE, SPACE, (0, 1, 2), (0, 2)), 0, 0, 30), SPACE, "is flipped"),
        (AFFINE, OBLIQUE, SPACE, "its axes are turned by up to 16 degrees"),
        (AFFINE, reordered(AFFINE, CUBE, (1, 0, 2)), CUBE, "its axes are in another order"),
        (OBLIQUE, reordered(OBLIQUE, CUBE, (2, 0, 1), (0,)), CUBE, "its axes are in another order"),
    ],
)
def test_a_misaligned_mask_is_refused_with_the_largest_distance_and_its_cause(
    tmp_path, image, mask, space, words
):
    voxels = np.stack(np.indices(space), axis=-1)
    distance = np.linalg.norm(apply_affine(mask, voxels) - apply_affine(image, voxels), axis=-1).max()
    files = (f"{tmp_path}/masks/case1.nii.gz", f"{tmp_path}/images/case1.nii.gz")
    far = f"{distance:.3g} mm apart"
    refused(lambda: read_pair(tmp_path, image, mask, space), *files, far, words, "--ignore-placement")


@pytest.mark.parametrize("affine", [AFFINE, OBLIQUE])
def test_a_mask_may_be_moved_by_up_to_a_tenth_of_the_smallest_spacing(tmp_path, affine):
    read_pair(tmp_path / "near", affine, moved(affine, 0, 0, 0.069))
    far = moved(affine, 0, 0, 0.0712)
    refused(lambda: read_pair(tmp_path / "far", affine, far), "moved by (0, 0, 0.071")
    # small differences, each of them allowed, add up to too much in a corner
    skewed = moved(affine * [1.0004, 1, 1, 1], 0.05, 0.04, 0.02)
    refused(lambda: read_pair(tmp_path / "corner", affine, skewed), "up to 0.07")


def quaternion_alone(mask):
    mask.set_qform(OBLIQUE, code="scanner")
    mask.set_sform(None, code=0)


def registered(mask):
    mask.set_qform(OBLIQUE, code="scanner")
    mask.set_sform(AFFINE, code="mni")


def damaged_qform(mask):
    mask.header["qform_code"], mask.header["quatern_b"], mask.header["quatern_c"] = 1, 1, 1


def in_micron(mask):
    mask.set_sform(np.diag([1000, 1000, 1000, 1]) @ OBLIQUE, code="aligned")
    mask.header.set_xyzt_units("micron")
    mask.header["pixdim"][1:4] *= 1000


@pytest.mark.parametrize("write", [quaternion_alone, registered, damaged_qform, in_micron])
def test_the_same_position_written_in_another_way_is_aligned(tmp_path, write):
    read_pair(tmp_path, OBLIQUE, OBLIQUE)
    change_header(tmp_path / "masks" / "case1.nii.gz", write)
    assert read_case(tmp_path).masks.any()


def test_an_affine_with_fewer_digits_is_aligned_and_headers_without_one_are_not_compared(tmp_path):
    affine = OBLIQUE @ np.diag([0.703125 / 0.7, 0.703125 / 0.8, 0.5, 1])
    read_pair(tmp_path / "rounded", affine, np.round(affine, 4), (200, 200, 4))
    far = moved(AFFINE, 500, 0, 0)
    for number, pair in enumerate([(None, far), (far, None), (None, None)]):
        assert read_pair(tmp_path / str(number), *pair).masks.any()


def test_if_neither_of_two_affines_agrees_the_message_describes_that_of_nibabel(tmp_path):
    read_pair(tmp_path, OBLIQUE, OBLIQUE)
    path = tmp_path / "images/case1.nii.gz"
    change_header(path, registered)
    assert read_case(tmp_path).masks.any()
    change_header(path, lambda file: file.set_qform(moved(OBLIQUE, 9, 0, 0), code="scanner"))
    refused(lambda: read_case(tmp_path), "turned by up to 16 degrees")


def test_a_slice_may_have_another_thickness_but_not_another_position(tmp_path):
    thick = AFFINE @ np.diag([1, 1, 3, 1])
    image, masks = ellipsoids(0, SIZE)
    for name, shape in (("flat", SIZE), ("volume", (*SIZE, 1))):
        write_nifti(tmp_path / name / "images" / "case1.nii", image[..., None])
        mask = write_nifti(tmp_path / name / "masks" / "case1.nii", masks[0].reshape(shape), thick)
        assert read_case(tmp_path / name).masks.any()
        write_nifti(mask, masks[0].reshape(shape), moved(AFFINE, 0, 0, 2.5))
        refused(lambda name=name: read_case(tmp_path / name), "moved by (0, 0, 2.5) mm")


def test_files_of_single_channels_are_joined_and_must_be_on_one_grid(tmp_path):
    dataset = find_only_dataset("folder", make_folder(tmp_path, suffix=".nii.gz"))
    first, second = dataset.scans[:2]
    joined = type(dataset)(**vars(dataset) | {"channels": ("T1", "T2")})
    both = type(first)(first.name, first.patient, (*first.image, *second.image), first.masks)
    arrays = read_scan(joined, both)
    for channel, scan in zip(arrays.image, (first, second), strict=True):
        np.testing.assert_array_equal(channel, read_scan(dataset, scan).image[0])
    assert len(arrays.inputs) == 5
    write_nifti(second.image[0], ellipsoids(0, SIZE)[0], moved(AFFINE, 5, 0, 0))
    refused(lambda: read_scan(joined, both), "case2", "not aligned", "case1", "(5, 0, 0) mm")
    write_nifti(second.image[0], ellipsoids(0, (20, 30))[0])
    refused(lambda: read_scan(joined, both), "case2", "(20, 30)", "case1", "(40, 36)")
