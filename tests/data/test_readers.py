"""Reading of single raw files: the values of nibabel and Pillow, and a message for every error."""

import gzip
import hashlib
import struct
import tracemalloc
import zlib

import nibabel
import numpy as np
import pytest
from PIL import Image
from raw_trees import AFFINE, SIZE, ellipsoids, without_permissions, write_nifti, write_picture

from semidice.data.sources import readers
from semidice.data.sources.readers import file_shape, mask_values, read_image, read_mask, stem_of, suffix_of

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
    assert read.spacing_mm == (0.7, 0.8, 2.5)
    np.testing.assert_array_equal(read.affine, expected.affine)
    assert read.sha256 == (hashlib.sha256(path.read_bytes()).hexdigest(),)


def test_axes_are_not_reoriented_even_if_the_affine_turns_them(tmp_path):
    turned = np.array([[0, -2.0, 0, 5], [3.0, 0, 0, 6], [0, 0, -4.0, 7], [0, 0, 0, 1]])
    path = write_nifti(tmp_path / "case.nii.gz", VOLUME, turned)
    read = read_image(path, num_axes=3)
    np.testing.assert_array_equal(read.values[0], VOLUME)
    assert read.spacing_mm == (3.0, 2.0, 4.0)
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
    assert read_image(tmp_path / "case.nii.gz", num_axes=3).spacing_mm == pytest.approx(
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
    assert read_image(path, num_axes=3).spacing_mm == spacing
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
    assert read.spacing_mm == spacing
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
    assert read.spacing_mm == (0.7, 0.8)


@pytest.mark.parametrize("suffix", [".png", ".tif", ".tiff", ".PNG"])
def test_a_picture_of_8_bits_stays_uint8_and_has_no_spacing(tmp_path, suffix):
    pixels = (IMAGE * 255).astype(np.uint8)
    read = read_image(write_picture(tmp_path / f"case{suffix}", pixels), num_axes=2)
    np.testing.assert_array_equal(read.values[0], pixels)
    assert read.values.dtype == np.uint8
    assert read.spacing_mm is None
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


def test_colours_are_channels_and_transparency_is_dropped(tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (*SIZE, 4), dtype=np.uint8)
    for name, pixels in (("rgb.png", colours[..., :3].copy()), ("rgba.png", colours)):
        read = read_image(write_picture(tmp_path / name, pixels), num_axes=2, num_channels=3)
        np.testing.assert_array_equal(read.values, colours[..., :3].transpose(2, 0, 1))
    Image.fromarray(colours[..., :2].copy()).save(tmp_path / "la.png")
    np.testing.assert_array_equal(read_image(tmp_path / "la.png", num_axes=2).values[0], colours[..., 0])


def test_a_tiff_of_several_pages_is_a_volume_with_its_pages_first(tmp_path):
    pages = (np.moveaxis(VOLUME, 2, 0) * 255).astype(np.uint8)
    path = write_picture(tmp_path / "case.tif", pages)
    read = read_image(path, num_axes=3)
    np.testing.assert_array_equal(read.values[0], pages)
    assert read.spacing_mm is None
    assert file_shape(path) == (pages.shape, 1)


def test_file_shape_returns_colours_and_the_shape_without_axes_of_length_1(tmp_path):
    assert file_shape(write_nifti(tmp_path / "a.nii.gz", IMAGE[..., None])) == (SIZE, 1)
    assert file_shape(write_picture(tmp_path / "b.png", np.zeros((*SIZE, 3), np.uint8))) == (SIZE, 3)
    assert file_shape(write_picture(tmp_path / "c.png", MASKS[0] > 0)) == (SIZE, 1)


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
    ("value", "message"), [(4, "holds 4"), (7, "holds 7"), (200, "holds 200"), (-1, "from -1 to 1")]
)
def test_an_undeclared_value_is_reported_with_the_file_and_the_declared_values(tmp_path, value, message):
    mask = MASKS[0].astype(np.int16)
    mask[3, 4] = value
    path = write_nifti(tmp_path / "m.nii.gz", mask)
    with pytest.raises(ValueError, match=f"m.nii.gz.*{message}") as caught:
        read_mask(path, num_axes=2, class_of_value={0: 0, 1: 1, 5: 1})
    assert value < 0 or "0, 1, 5" in str(caught.value)


@pytest.mark.parametrize("fraction", [0.9999, 0.5, np.nan])
def test_a_resampled_mask_is_refused_and_not_rounded(tmp_path, fraction):
    mask = MASKS[0].astype(np.float32)
    mask[3, 4] = fraction
    path = write_nifti(tmp_path / "m.nii.gz", mask)
    for read in (lambda: read_mask(path, num_axes=2), lambda: mask_values(path)):
        with pytest.raises(ValueError, match=r"m\.nii\.gz holds fractions such as .*threshold"):
            read()


def test_an_infinite_mask_is_refused(tmp_path):
    mask = MASKS[0].astype(np.float32)
    mask[3, 4] = np.inf
    with pytest.raises(ValueError, match="from 0 to inf"):
        read_mask(write_nifti(tmp_path / "m.nii.gz", mask), num_axes=2)


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
    with pytest.raises(ValueError, match=r"red\.png is in colour: save it with one grey value"):
        read_mask(write_picture(tmp_path / "red.png", red), num_axes=2)


def test_a_mask_of_one_bit_is_read(tmp_path):
    path = write_picture(tmp_path / "m.png", MASKS[0] > 0)
    np.testing.assert_array_equal(read_mask(path, num_axes=2, class_of_value={0: 0, 1: 1}).classes, MASKS[0])
    assert mask_values(path) == (0, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_counted_and_reported(tmp_path, bad):
    image = IMAGE.astype(np.float64)
    image[2, 3:5] = bad
    with pytest.raises(ValueError, match=r"case\.nii\.gz holds NaN or infinite values in 2 of 1440 voxels"):
        read_image(write_nifti(tmp_path / "case.nii.gz", image), num_axes=2)


@pytest.mark.parametrize("suffix", [".nii.gz", ".png"])
def test_a_constant_image_is_reported_with_its_value(tmp_path, suffix):
    write = write_nifti if suffix == ".nii.gz" else write_picture
    path = write(tmp_path / f"case{suffix}", np.full(SIZE, 7, dtype=np.uint8))
    with pytest.raises(ValueError, match=r"case.* is 7 everywhere"):
        read_image(path, num_axes=2)


def test_one_constant_channel_among_others_is_accepted(tmp_path):
    channels = np.stack([IMAGE, np.zeros_like(IMAGE)], axis=-1)
    path = write_nifti(tmp_path / "case.nii.gz", channels)
    assert read_image(path, num_axes=2, num_channels=2).values.shape == (2, *SIZE)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (np.complex64, "voxels are complex64"),
        (np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]), "one real number per voxel is expected"),
    ],
)
def test_complex_and_coloured_niftis_are_refused(tmp_path, dtype, message):
    path = write_nifti(tmp_path / "case.nii.gz", np.zeros(SIZE, dtype))
    with pytest.raises(ValueError, match=rf"case\.nii\.gz.*{message}"):
        read_image(path, num_axes=2)


def damaged_niftis():
    """Names and bytes of damaged files, and the expected part of the message."""
    valid = nibabel.Nifti1Image(VOLUME, AFFINE).to_bytes()
    packed = gzip.compress(valid)
    changed = {
        "huge": bytearray(valid),
        "negative": bytearray(valid),
        "dtype": bytearray(valid),
        "affine": bytearray(valid),
    }
    changed["huge"][40:56] = struct.pack("<8h", 3, 32767, 32767, 32767, 1, 1, 1, 1)
    changed["negative"][40:56] = struct.pack("<8h", 3, -5, 36, 6, 1, 1, 1, 1)
    changed["dtype"][70:72] = struct.pack("<h", 9999)
    changed["affine"][280:284] = struct.pack("<f", np.nan)
    middle = len(packed) // 2
    yield "truncated.nii.gz", packed[:middle], "end-of-stream"
    yield "truncated_header.nii.gz", packed[:60], "end-of-stream"
    yield "truncated_checksum.nii.gz", packed[:-4], "end-of-stream"
    # nibabel reads this file without an error, because it stops before the checksum
    yield "flipped.nii.gz", packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:], "CRC check failed"
    yield "plain.nii.gz", valid, "not a gzip file"
    yield "packed.nii", packed, r"name it \.nii\.gz"
    yield "text.nii.gz", gzip.compress(b"no image at all, but long enough" * 20), "not a NIfTI"
    yield "text.nii", b"no image at all, but long enough" * 20, "not a NIfTI"
    yield "short.nii", b"abc", "not a NIfTI"
    yield "truncated.nii", valid[:2000], ""
    yield "header_alone.nii", valid[:352], ""
    yield "huge.nii", bytes(changed["huge"]), ""
    yield "negative.nii", bytes(changed["negative"]), ""
    yield "dtype.nii", bytes(changed["dtype"]), "9999"
    yield "affine.nii", bytes(changed["affine"]), "affine is not finite"
    yield "empty.nii.gz", b"", "is empty"


# ids are file names only: packed bytes contain the time, which differs between test workers
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [pytest.param(*damaged, id=damaged[0]) for damaged in damaged_niftis()],
)
def test_a_damaged_nifti_is_reported(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    for read in (lambda: read_image(path, num_axes=3), lambda: read_mask(path, num_axes=3)):
        with pytest.raises(ValueError, match=rf"{name}.*{message}"):
            read()


def test_nibabel_does_not_notice_the_flipped_checksum(tmp_path):
    content = {name: content for name, content, _ in damaged_niftis()}
    path = tmp_path / "flipped.nii.gz"
    path.write_bytes(content["flipped.nii.gz"])
    np.testing.assert_array_equal(nibabel.load(path).get_fdata(), VOLUME)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("kept", [0.5, 0.05])
def test_a_truncated_picture_is_reported(tmp_path, suffix, kept):
    noise = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
    path = write_picture(tmp_path / f"case{suffix}", noise)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ValueError, match=rf"cannot read .*case\{suffix}"):
        read_image(path, num_axes=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("text.png", b"no picture", "neither PNG nor TIFF"), ("empty.png", b"", "is empty")],
)
def test_a_file_that_is_not_a_picture_is_reported(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        read_image(tmp_path / name, num_axes=2)


def test_an_animation_and_pages_of_different_size_are_refused(tmp_path):
    first, second = (Image.fromarray((IMAGE * size).astype(np.uint8)) for size in (200, 100))
    first.save(tmp_path / "moving.png", save_all=True, append_images=[second], default_image=False)
    with pytest.raises(ValueError, match=r"moving\.png: it is an animation"):
        read_image(tmp_path / "moving.png", num_axes=3)
    first.save(tmp_path / "pages.tif", save_all=True, append_images=[second.resize((20, 20))])
    with pytest.raises(ValueError, match=r"pages\.tif: its pages differ"):
        read_image(tmp_path / "pages.tif", num_axes=3)


def test_a_missing_file_a_folder_and_a_link_to_itself_are_reported(tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "broken.png").symlink_to(tmp_path / "gone.png")
    for name, message in {
        "missing.nii.gz": "there is no file",
        "broken.png": "there is no file",
        "folder.png": "Is a directory",
        "loop.png": "symbolic links",
        "case.jpg": "cannot be read: images and masks must be",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            read_image(tmp_path / name, num_axes=2)
        assert name in str(caught.value)


def test_a_file_without_read_permission_is_reported(tmp_path):
    path = write_nifti(tmp_path / "case.nii.gz", IMAGE)
    path.chmod(0)
    with (
        without_permissions(),
        pytest.raises(ValueError, match=r"no permission to read .*case\.nii\.gz: change its perm"),
    ):
        read_image(path, num_axes=2)


@pytest.mark.parametrize(
    ("shape", "num_axes", "num_channels", "message"),
    [
        ((40, 36, 6), 2, 1, r"shape \(40, 36, 6\); expected 2 spatial axes"),
        ((40, 36), 3, 1, r"shape \(40, 36\); expected 3 spatial axes"),
        ((40, 36), 2, 4, r"expected 2 spatial axes and 4 channels last"),
        ((40, 36, 3), 2, 4, "has 3 channels; expected 4"),
        ((4, 40, 36), 2, 4, "has 36 channels; expected 4"),
    ],
)
def test_axes_that_do_not_fit_the_dataset_are_reported(tmp_path, shape, num_axes, num_channels, message):
    array = np.random.default_rng(0).random(shape)
    with pytest.raises(ValueError, match=rf"case\.nii\.gz.*{message}"):
        read_image(write_nifti(tmp_path / "case.nii.gz", array), num_axes=num_axes, num_channels=num_channels)


def test_stems_and_suffixes_of_names_with_dots(tmp_path):
    names = ["a.nii.gz", "a.b.NII", "x.1.png", "y.TIFF", "notes.txt", "nii"]
    assert [suffix_of(tmp_path / name) for name in names] == [".nii.gz", ".nii", ".png", ".tiff", "", ""]
    assert [stem_of(tmp_path / name) for name in names] == ["a", "a.b", "x.1", "y", "notes.txt", "nii"]


def test_a_compressed_volume_takes_little_more_memory_than_its_arrays(tmp_path):
    volume = np.random.default_rng(0).integers(0, 100, (128, 128, 64)).astype(np.int16)
    path = write_nifti(tmp_path / "case.nii.gz", volume)
    tracemalloc.start()
    try:
        read_image(path, num_axes=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the stored int16, the float32 and the flags of finite values, but no second copy of the file
    assert peak < 4.5 * volume.nbytes


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (17, 9), (64, 33)])
def test_a_png_of_every_kind_is_verified_and_read(tmp_path, mode, size, interlaced):
    rng = np.random.default_rng(0)
    bits, colours, channels = {
        "1": (1, 0, 1), "L": (8, 0, 1), "P": (8, 3, 1), "RGB": (8, 2, 3), "RGBA": (8, 6, 4), "LA": (8, 4, 2),
        "I;16": (16, 0, 1),
    }[mode]  # fmt: skip
    width, height = size
    steps = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    parts = [(len(range(x, width, dx)), len(range(y, height, dy))) for x, y, dx, dy in steps]
    rows = b""
    for columns, lines in parts if interlaced else [(width, height)]:
        for _ in range(lines if columns else 0):
            rows += b"\0" + rng.bytes(-(-columns * bits * channels // 8))

    def part(kind, content):
        return (
            len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
        )

    def png(data):
        head = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, int(interlaced))
        palette = part(b"PLTE", bytes(768)) if mode == "P" else b""
        return (
            b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + palette
            + part(b"IDAT", zlib.compress(data)) + part(b"IEND", b"")
        )  # fmt: skip

    path = tmp_path / "a.png"
    path.write_bytes(png(rows))
    with path.open("rb") as file:
        readers._verify_png(file)
        assert file.tell() == 0
    with Image.open(path) as image:
        assert np.array(image).shape[:2] == (height, width)
    path.write_bytes(png(rows[:-1]))
    with (
        path.open("rb") as file,
        pytest.raises(ValueError, match=f"after {len(rows) - 1} of {len(rows)} bytes"),
    ):
        readers._verify_png(file)
