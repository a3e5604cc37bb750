"""Reading of single raw files: the values of nibabel and Pillow, and refusals of what would be misread."""

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
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_values_spacing_affine_and_digest_of_a_nifti_are_correct(tmp_path, suffix, dtype):
    path = write_nifti(tmp_path / f"case{suffix}", (VOLUME * 200).astype(dtype))
    read = read_image(path, num_axes=3)
    expected = nibabel.load(path)
    np.testing.assert_array_equal(read.values[0], expected.get_fdata().astype(np.float32))
    assert read.values.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
    assert read.grid.spacing_mm == (0.7, 0.8, 2.5)
    np.testing.assert_array_equal(read.affine, expected.affine)
    assert read.sha256 == (hashlib.sha256(path.read_bytes()).hexdigest(),)


def test_axes_are_not_reoriented_even_if_the_affine_turns_them(tmp_path):
    turned = np.array([[0, -2.0, 0, 5], [3.0, 0, 0, 6], [0, 0, -4.0, 7], [0, 0, 0, 1]])
    path = write_nifti(tmp_path / "case.nii.gz", VOLUME, turned)
    read = read_image(path, num_axes=3)
    np.testing.assert_array_equal(read.values[0], VOLUME)
    assert read.grid.spacing_mm == (3.0, 2.0, 4.0)
    np.testing.assert_allclose(read.affine, turned)


def test_slope_and_intercept_of_a_nifti_are_applied(tmp_path):
    image = nibabel.Nifti1Image((VOLUME * 100).astype(np.int16), AFFINE)
    image.header.set_slope_inter(0.5, -1024)
    nibabel.save(image, tmp_path / "case.nii.gz")
    read = read_image(tmp_path / "case.nii.gz", num_axes=3)
    np.testing.assert_allclose(read.values[0], nibabel.load(tmp_path / "case.nii.gz").get_fdata(), rtol=1e-6)
    assert read.values.min() < -1000


def test_nifti_2_and_big_endian_files_are_read(tmp_path):
    nibabel.save(nibabel.Nifti2Image(VOLUME, AFFINE), tmp_path / "two.nii.gz")
    big = nibabel.Nifti1Image(VOLUME.astype(">f4"), AFFINE, nibabel.Nifti1Header(endianness=">"))
    nibabel.save(big, tmp_path / "big.nii")
    for name in ("two.nii.gz", "big.nii"):
        np.testing.assert_array_equal(read_image(tmp_path / name, num_axes=3).values[0], VOLUME)


@pytest.mark.parametrize(
    ("unit", "factor"), [("mm", 1.0), ("meter", 1000.0), ("micron", 0.001), ("unknown", 1.0)]
)
def test_spacing_is_converted_to_mm_from_every_unit(tmp_path, unit, factor):
    image = nibabel.Nifti1Image(VOLUME, AFFINE)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / "case.nii.gz")
    assert read_image(tmp_path / "case.nii.gz", num_axes=3).grid.spacing_mm == pytest.approx(
        (0.7 * factor, 0.8 * factor, 2.5 * factor)
    )


@pytest.mark.parametrize(("sform_code", "spacing"), [(0, None), (2, (0.7, 0.8, 2.5))])
@pytest.mark.parametrize("name", ["case.nii", "case.nii.gz"])
def test_the_spacing_of_a_header_without_one_is_that_of_the_sform_or_not_known(
    tmp_path, capfd, name, sform_code, spacing
):
    path = write_nifti(tmp_path / name, VOLUME)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "rb") as file:
        header = bytearray(file.read())
    header[76:108] = bytes(32)
    # the codes of qform and sform
    header[252:256] = np.array([0, sform_code], np.int16).tobytes()
    with opened(path, "wb") as file:
        file.write(header)
    assert read_image(path, num_axes=3).grid.spacing_mm == spacing
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("shape", "num_axes", "spacing"),
    [
        ((40, 36, 1), 2, (0.7, 0.8)),
        ((1, 40, 36), 2, (0.8, 2.5)),
        ((40, 36, 1, 1), 2, (0.7, 0.8)),
        ((40, 36, 1), 3, (0.7, 0.8, 2.5)),
        ((1, 40, 36), 3, (0.7, 0.8, 2.5)),
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
    read = read_image(
        write_nifti(tmp_path / "case.nii.gz", channels.reshape(shape)), num_axes=2, num_channels=4
    )
    assert read.values.shape == (4, *SIZE)
    for number in range(4):
        np.testing.assert_array_equal(read.values[number], channels[..., number])
    assert read.grid.spacing_mm == (0.7, 0.8)


@pytest.mark.parametrize("suffix", [".png", ".tif", ".tiff", ".PNG"])
def test_a_picture_of_8_bits_stays_uint8_and_has_no_spacing(tmp_path, suffix):
    pixels = (IMAGE * 255).astype(np.uint8)
    read = read_image(write_picture(tmp_path / f"case{suffix}", pixels), num_axes=2)
    np.testing.assert_array_equal(read.values[0], pixels)
    assert read.values.dtype == np.uint8
    assert read.grid.spacing_mm is None
    assert read.affine is None


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [(".png", np.uint16), (".tif", np.uint16), (".tif", np.int32), (".tif", np.float32)],
)
def test_a_picture_of_more_bits_keeps_its_values_as_float32(tmp_path, suffix, dtype):
    pixels = (IMAGE * 40_000).astype(dtype)
    read = read_image(write_picture(tmp_path / f"case{suffix}", pixels), num_axes=2)
    assert read.values.dtype == np.float32
    np.testing.assert_array_equal(read.values[0], pixels.astype(np.float32))


def test_colours_are_channels_and_transparency_is_dropped_only_if_it_is_the_same_everywhere(tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (*SIZE, 4), dtype=np.uint8)
    varying = write_picture(tmp_path / "varying.png", colours)
    refused(lambda: read_image(varying, num_axes=2, num_channels=3), "varying.png", "transparency")
    colours[..., 3] = 255
    for name, pixels in (("rgb.png", colours[..., :3].copy()), ("rgba.png", colours)):
        read = read_image(write_picture(tmp_path / name, pixels), num_axes=2, num_channels=3)
        np.testing.assert_array_equal(read.values, colours[..., :3].transpose(2, 0, 1))
    Image.fromarray(colours[..., 2:].copy()).save(tmp_path / "la.png")
    np.testing.assert_array_equal(read_image(tmp_path / "la.png", num_axes=2).values[0], colours[..., 2])


def test_a_tiff_of_several_pages_is_a_volume_with_its_pages_first(tmp_path):
    pages = (np.moveaxis(VOLUME, 2, 0) * 255).astype(np.uint8)
    path = write_picture(tmp_path / "case.tif", pages)
    read = read_image(path, num_axes=3)
    np.testing.assert_array_equal(read.values[0], pages)
    assert read.grid.spacing_mm is None
    assert (read_header(path).space, read_header(path).colours) == (pages.shape, 1)


def header_of(path):
    header = read_header(path)
    return header.space, header.colours


def test_file_shape_returns_colours_and_the_shape_without_axes_of_length_1(tmp_path):
    assert header_of(write_nifti(tmp_path / "a.nii.gz", IMAGE[..., None])) == (SIZE, 1)
    assert header_of(write_picture(tmp_path / "b.png", np.zeros((*SIZE, 3), np.uint8))) == (SIZE, 3)
    assert header_of(write_picture(tmp_path / "c.png", MASKS[0] > 0)) == (SIZE, 1)


def test_values_already_read_do_not_change_with_the_file(tmp_path):
    path = write_nifti(tmp_path / "case.nii", (VOLUME * 200).astype(np.uint8))
    read = read_image(path, num_axes=3)
    before = read.values.copy()
    with path.open("r+b") as file:
        file.seek(400)
        file.write(b"\xff" * 500)
    np.testing.assert_array_equal(read.values, before)


@pytest.mark.parametrize("high", [1, 255])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64])
def test_a_mask_without_declared_values_is_1_where_it_is_above_0(tmp_path, high, dtype):
    read = read_mask(write_nifti(tmp_path / "m.nii.gz", (MASKS[0] * high).astype(dtype)), num_axes=2)
    np.testing.assert_array_equal(read.classes, MASKS[0])
    assert read.classes.dtype == np.uint8
    assert mask_values(tmp_path / "m.nii.gz") == (0, high)


def test_declared_values_become_classes(tmp_path):
    _, maps = ellipsoids(1, SIZE, num_classes=4)
    values = np.array([0, 3, 7, 300], dtype=np.uint16)[maps[0]]
    path = write_picture(tmp_path / "m.png", values)
    read = read_mask(path, num_axes=2, class_of_value={0: 0, 3: 0, 7: 2, 300: 1})
    np.testing.assert_array_equal(read.classes, np.array([0, 0, 2, 1])[maps[0]])
    assert mask_values(path) == (0, 3, 7, 300)


@pytest.mark.parametrize(
    ("value", "words"), [(4, ["4", "0, 1, 5"]), (200, ["200", "0, 1, 5"]), (-1, ["-1", "0 or more"])]
)
def test_an_undeclared_value_is_refused(tmp_path, value, words):
    mask = MASKS[0].astype(np.int16)
    mask[3, 4] = value
    path = write_nifti(tmp_path / "m.nii.gz", mask)
    refused(lambda: read_mask(path, num_axes=2, class_of_value={0: 0, 1: 1, 5: 1}), str(path), *words)


@pytest.mark.parametrize(
    ("value", "word"), [(0.9999, "threshold"), (0.5, "threshold"), (np.nan, "threshold"), (np.inf, "inf")]
)
def test_a_resampled_mask_is_refused_and_not_rounded(tmp_path, value, word):
    mask = MASKS[0].astype(np.float32)
    mask[3, 4] = value
    path = write_nifti(tmp_path / "m.nii.gz", mask)
    refused(lambda: read_mask(path, num_axes=2), str(path), word)
    refused(lambda: mask_values(path), str(path), word)


def test_a_palette_gives_class_numbers_in_a_mask_and_colours_in_an_image(tmp_path):
    _, maps = ellipsoids(1, SIZE, num_classes=3)
    picture = Image.fromarray(maps[0])
    picture.putpalette([0, 0, 0, 250, 0, 0, 0, 240, 10])
    picture.save(tmp_path / "m.png")
    read = read_mask(tmp_path / "m.png", num_axes=2, class_of_value={0: 0, 1: 1, 2: 2})
    np.testing.assert_array_equal(read.classes, maps[0])
    colours = read_image(tmp_path / "m.png", num_axes=2, num_channels=3).values
    np.testing.assert_array_equal(colours[:, maps[0] == 2].T, [[0, 240, 10]] * int((maps[0] == 2).sum()))


def test_a_grey_mask_saved_in_colour_is_read_and_a_red_mask_is_refused(tmp_path):
    grey = np.repeat(MASKS[0][..., None] * np.uint8(255), 3, axis=2)
    path = write_picture(tmp_path / "grey.png", grey)
    np.testing.assert_array_equal(read_mask(path, num_axes=2).classes, MASKS[0])
    assert mask_values(path) == (0, 255)
    red = grey * np.array([1, 0, 0], dtype=np.uint8)
    write_picture(tmp_path / "red.png", red)
    refused(lambda: read_mask(tmp_path / "red.png", num_axes=2), "red.png", "grey value")


def test_a_mask_of_one_bit_is_read(tmp_path):
    path = write_picture(tmp_path / "m.png", MASKS[0] > 0)
    np.testing.assert_array_equal(read_mask(path, num_axes=2, class_of_value={0: 0, 1: 1}).classes, MASKS[0])
    assert mask_values(path) == (0, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_counted_and_refused(tmp_path, bad):
    image = IMAGE.astype(np.float64)
    image[2, 3:5] = bad
    path = write_nifti(tmp_path / "case.nii.gz", image)
    refused(lambda: read_image(path, num_axes=2), str(path), "2 of 1440", "repair")


@pytest.mark.parametrize("suffix", [".nii.gz", ".png"])
def test_a_constant_image_is_refused(tmp_path, suffix):
    write = write_nifti if suffix == ".nii.gz" else write_picture
    path = write(tmp_path / f"case{suffix}", np.full(SIZE, 7, dtype=np.uint8))
    refused(lambda: read_image(path, num_axes=2), str(path), "7 everywhere")


def test_one_constant_channel_among_others_is_accepted(tmp_path):
    channels = np.stack([IMAGE, np.zeros_like(IMAGE)], axis=-1)
    path = write_nifti(tmp_path / "case.nii.gz", channels)
    assert read_image(path, num_axes=2, num_channels=2).values.shape == (2, *SIZE)


@pytest.mark.parametrize("dtype", [np.complex64, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])])
def test_complex_and_coloured_niftis_are_refused(tmp_path, dtype):
    path = write_nifti(tmp_path / "case.nii.gz", np.zeros(SIZE, dtype))
    refused(lambda: read_image(path, num_axes=2), str(path), "one real number per voxel")


def changed(content, at, layout, *values):
    """The bytes with some values packed into them."""
    return content[:at] + struct.pack(layout, *values) + content[at + struct.calcsize(layout) :]


def test_a_nifti_with_a_wrong_checksum_is_refused_although_nibabel_reads_it(tmp_path):
    packed = gzip.compress(nibabel.Nifti1Image(VOLUME, AFFINE).to_bytes())
    path = tmp_path / "case.nii.gz"
    path.write_bytes(changed(packed, len(packed) - 8, "B", packed[-8] ^ 1))
    np.testing.assert_array_equal(nibabel.load(path).get_fdata(), VOLUME)
    for read in (read_image, read_mask):
        refused(lambda read=read: read(path, num_axes=3), str(path), "copy or export it again")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("named.nii.gz", lambda valid: valid, ["ot a gzip"]),
        ("named.nii", gzip.compress, ["not a NIfTI"]),
        ("size.nii", lambda valid: changed(valid, 40, "<4h", 3, 32767, 32767, 32767), ["32767", "at most"]),
        ("affine.nii", lambda valid: changed(valid, 280, "<f", np.nan), ["affine", "not finite"]),
        ("empty.nii", lambda _: b"", ["empty"]),
    ],
)
def test_a_wrong_nifti_is_refused_with_the_reason(tmp_path, name, change, words):
    (tmp_path / name).write_bytes(change(nibabel.Nifti1Image(VOLUME, AFFINE).to_bytes()))
    refused(lambda: read_image(tmp_path / name, num_axes=3), name, *words)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_a_truncated_picture_is_refused_and_not_filled_in(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
    path = write_picture(tmp_path / f"case{suffix}", noise)
    content = path.read_bytes()
    for kept in (0.05, 0.5, 0.95):
        path.write_bytes(content[: int(len(content) * kept)])
        refused(lambda: read_image(path, num_axes=2), str(path), "copy or export it again")


def test_an_animation_and_pages_of_different_size_are_refused(tmp_path):
    first, second = (Image.fromarray((IMAGE * size).astype(np.uint8)) for size in (200, 100))
    first.save(tmp_path / "moving.png", save_all=True, append_images=[second], default_image=False)
    refused(lambda: read_image(tmp_path / "moving.png", num_axes=3), "moving.png", "animation")
    first.save(tmp_path / "pages.tif", save_all=True, append_images=[second.resize((20, 20))])
    refused(lambda: read_image(tmp_path / "pages.tif", num_axes=3), "pages.tif", "differ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.nii.gz", ["there is no"]),
        ("broken.png", ["there is no"]),
        ("folder.png", []),
        ("loop.png", []),
        ("case.jpg", [".nii.gz, .nii, .png"]),
    ],
)
def test_a_missing_file_a_folder_and_a_link_to_itself_are_refused(tmp_path, name, words):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "broken.png").symlink_to(tmp_path / "gone.png")
    refused(lambda: read_image(tmp_path / name, num_axes=2), name, *words)


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
        ((40, 36, 3), 2, 4, ["3 channels", "expected 4"]),
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
