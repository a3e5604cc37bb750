"""Single raw files have the values of nibabel and Pillow; `test_honest_mistakes` has what is misread."""

import gzip
import hashlib
import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from raw_trees import AFFINE, SIZE, ellipsoids, write_nifti, write_picture
from start import refused

from semidice.data.sources.files import mask_values, read_header, read_image, read_mask, stem_of, suffix_of

IMAGE, MASKS = ellipsoids(0, SIZE)
VOLUME, _ = ellipsoids(0, (*SIZE, 6))


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64])
def test_values_spacing_affine_and_digest_of_a_nifti_are_correct(tmp_path, suffix, dtype):
    path = write_nifti(tmp_path / f"case{suffix}", (VOLUME * 200).astype(dtype))
    read, expected = read_image(path, num_axes=3), nibabel.load(path)
    np.testing.assert_array_equal(read.values[0], expected.get_fdata().astype(np.float32))
    assert read.values.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
    assert read.grid.spacing_mm == (0.7, 0.8, 2.5)
    np.testing.assert_array_equal(read.affine, expected.affine)
    assert read.sha256 == (hashlib.sha256(path.read_bytes()).hexdigest(),)


def test_axes_are_not_reoriented_even_if_the_affine_turns_them(tmp_path):
    turned = np.array([[0, -2.0, 0, 5], [3.0, 0, 0, 6], [0, 0, -4.0, 7], [0, 0, 0, 1]])
    read = read_image(write_nifti(tmp_path / "case.nii.gz", VOLUME, turned), num_axes=3)
    np.testing.assert_array_equal(read.values[0], VOLUME)
    assert read.grid.spacing_mm == (3.0, 2.0, 4.0)
    assert read.orientation == "ALI"


def test_slope_and_intercept_nifti_2_and_big_endian_files_are_read(tmp_path):
    scaled = nibabel.Nifti1Image((VOLUME * 100).astype(np.int16), AFFINE)
    scaled.header.set_slope_inter(0.5, -1024)
    big = nibabel.Nifti1Image(VOLUME.astype(">f4"), AFFINE, nibabel.Nifti1Header(endianness=">"))
    images = {"scaled.nii.gz": scaled, "two.nii.gz": nibabel.Nifti2Image(VOLUME, AFFINE), "big.nii": big}
    for name, image in images.items():
        nibabel.save(image, tmp_path / name)
        expected = nibabel.load(tmp_path / name).get_fdata()
        np.testing.assert_allclose(read_image(tmp_path / name, num_axes=3).values[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "num_axes", "spacing"),
    [
        ((1, 40, 36), 2, (0.8, 2.5)),
        ((40, 36, 1, 1), 2, (0.7, 0.8)),
        ((40, 36, 1), 3, (0.7, 0.8, 2.5)),
        ((40, 36, 1, 1), 3, (0.7, 0.8, 2.5)),
    ],
)
def test_axes_of_length_1_are_removed_only_until_the_number_of_axes_fits(tmp_path, shape, num_axes, spacing):
    path = write_nifti(tmp_path / "case.nii.gz", IMAGE.reshape(shape))
    read = read_image(path, num_axes=num_axes)
    assert read.values.shape == (1, *(shape[:3] if num_axes == 3 else SIZE))
    assert read.grid.spacing_mm == spacing
    mask = write_nifti(tmp_path / "mask.nii.gz", MASKS[0].reshape(shape))
    assert read_mask(mask, num_axes=num_axes).classes.shape == read.values.shape[1:]


@pytest.mark.parametrize("shape", [(40, 36, 4), (40, 36, 1, 4), (40, 36, 4, 1)])
def test_channels_on_the_last_axis_of_a_nifti_become_the_first_axis(tmp_path, shape):
    channels = np.stack([IMAGE + number for number in range(4)], axis=-1)
    # one channel of several may be constant
    channels[..., 3] = 0
    path = write_nifti(tmp_path / "case.nii.gz", channels.reshape(shape))
    read = read_image(path, num_axes=2, num_channels=4)
    np.testing.assert_array_equal(read.values, np.moveaxis(channels, -1, 0))
    assert read.grid.spacing_mm == (0.7, 0.8)


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [(".png", np.uint8), (".TIFF", np.uint8), (".png", np.uint16), (".tif", np.int32), (".tif", np.float32)],
)
def test_a_picture_keeps_its_values_and_has_no_spacing(tmp_path, suffix, dtype):
    pixels = (IMAGE * 200).astype(dtype)
    path = write_picture(tmp_path / f"case{suffix}", pixels)
    read = read_image(path, num_axes=2)
    np.testing.assert_array_equal(read.values[0], pixels)
    assert read.values.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
    assert read_header(path).is_byte_picture == (dtype == np.uint8)
    assert (read.grid.spacing_mm, read.affine) == (None, None)


def test_colours_and_palettes_are_channels_of_an_image(tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), dtype=np.uint8)
    read = read_image(write_picture(tmp_path / "rgb.png", colours), num_axes=2, num_channels=3)
    np.testing.assert_array_equal(read.values, colours.transpose(2, 0, 1))
    picture = Image.fromarray(MASKS[0])
    picture.putpalette([0, 0, 0, 250, 10, 0])
    picture.save(tmp_path / "palette.png")
    read = read_image(tmp_path / "palette.png", num_axes=2, num_channels=3)
    np.testing.assert_array_equal(read.values, MASKS[0] * np.array([250, 10, 0]).reshape(3, 1, 1))


def test_a_tiff_of_several_pages_is_a_volume_with_its_pages_first(tmp_path):
    pages = (np.moveaxis(VOLUME, 2, 0) * 255).astype(np.uint8)
    path = write_picture(tmp_path / "case.tif", pages)
    np.testing.assert_array_equal(read_image(path, num_axes=3).values[0], pages)
    assert (read_header(path).space, read_header(path).colours) == (pages.shape, 1)
    first, second = Image.fromarray(pages[0]), Image.fromarray(pages[1][:20])
    first.save(tmp_path / "odd.tif", save_all=True, append_images=[second])
    refused(lambda: read_image(tmp_path / "odd.tif", num_axes=3), "odd.tif", "differ")


@pytest.mark.parametrize("high", [1, 255])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64])
def test_a_mask_without_declared_values_is_1_where_it_is_above_0(tmp_path, high, dtype):
    path = write_nifti(tmp_path / "m.nii.gz", (MASKS[0] * high).astype(dtype))
    np.testing.assert_array_equal(read_mask(path, num_axes=2).classes, MASKS[0])
    assert mask_values(path) == (0, high)


def test_declared_values_become_classes_and_others_are_refused(tmp_path):
    _, maps = ellipsoids(1, SIZE, num_classes=4)
    path = write_picture(tmp_path / "m.png", np.array([0, 3, 7, 300], dtype=np.uint16)[maps[0]])
    read = read_mask(path, num_axes=2, class_of_value={0: 0, 3: 0, 7: 2, 300: 1})
    np.testing.assert_array_equal(read.classes, np.array([0, 0, 2, 1])[maps[0]])
    assert mask_values(path) == (0, 3, 7, 300)
    refused(lambda: read_mask(path, num_axes=2, class_of_value={0: 0, 3: 1, 300: 2}), str(path), "7", "300")


def changed(content, at, layout, *values):
    """The bytes with some values packed into them."""
    return content[:at] + struct.pack(layout, *values) + content[at + struct.calcsize(layout) :]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("named.nii", gzip.compress, ["not a NIfTI"]),
        ("size.nii", lambda valid: changed(valid, 40, "<4h", 3, 32767, 32767, 32767), ["32767", "at most"]),
        ("affine.nii", lambda valid: changed(valid, 280, "<f", np.nan), ["affine", "not finite"]),
        ("empty.nii", lambda _: b"", ["empty"]),
    ],
)
def test_a_wrong_nifti_is_refused_with_the_reason(tmp_path, name, change, words):
    (tmp_path / name).write_bytes(change(nibabel.Nifti1Image(VOLUME, AFFINE).to_bytes()))
    refused(lambda: read_image(tmp_path / name, num_axes=3), name, *words)


@pytest.mark.parametrize("dtype", [np.complex64, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])])
def test_complex_and_coloured_niftis_are_refused(tmp_path, dtype):
    path = write_nifti(tmp_path / "case.nii.gz", np.zeros(SIZE, dtype))
    refused(lambda: read_image(path, num_axes=2), str(path), "one real number per voxel")


@pytest.mark.parametrize("suffix", [".png", ".tif", ".nii.gz"])
def test_a_truncated_file_is_refused_and_not_filled_in(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
    path = (write_nifti if suffix == ".nii.gz" else write_picture)(tmp_path / f"case{suffix}", noise)
    content = path.read_bytes()
    for kept in (0.05, 0.5, 0.95):
        path.write_bytes(content[: int(len(content) * kept)])
        refused(lambda: read_image(path, num_axes=2), str(path), "copy or export it again")


@pytest.mark.parametrize("name", ["missing.nii.gz", "broken.png", "folder.png", "loop.png", "case.jpg"])
def test_a_missing_file_a_folder_and_a_link_to_itself_are_refused(tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "broken.png").symlink_to(tmp_path / "gone.png")
    refused(lambda: read_image(tmp_path / name, num_axes=2), name)


def test_a_file_without_read_permission_is_refused(tmp_path, monkeypatch):
    # simulated, because the superuser ignores permissions
    def deny(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    path = write_nifti(tmp_path / "case.nii.gz", IMAGE)
    monkeypatch.setattr(Path, "read_bytes", deny)
    refused(lambda: read_image(path, num_axes=2), str(path), "Permission denied")


@pytest.mark.parametrize(
    ("shape", "num_axes", "num_channels", "words"),
    [
        ((40, 36, 6), 2, 1, ["(40, 36, 6)", "2 spatial axes"]),
        ((40, 36), 3, 1, ["(40, 36)", "3 spatial axes"]),
        ((40, 36), 2, 4, ["2 spatial axes and 4 channels last"]),
        ((4, 40, 36), 2, 4, ["36 channels", "expected 4"]),
    ],
)
def test_axes_that_do_not_fit_the_dataset_are_refused(tmp_path, shape, num_axes, num_channels, words):
    path = write_nifti(tmp_path / "case.nii.gz", np.random.default_rng(0).random(shape))
    refused(lambda: read_image(path, num_axes=num_axes, num_channels=num_channels), str(path), *words)


def test_stems_and_suffixes_of_names_with_dots(tmp_path):
    names = ["a.nii.gz", "a.b.NII", "x.1.png", "y.TIFF", "notes.txt", "nii"]
    assert [suffix_of(tmp_path / name) for name in names] == [".nii.gz", ".nii", ".png", ".tiff", "", ""]
    assert [stem_of(tmp_path / name) for name in names] == ["a", "a.b", "x.1", "y", "notes.txt", "nii"]
