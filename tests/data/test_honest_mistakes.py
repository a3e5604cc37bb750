"""Files as people hand them over: the right number, or an error that names the file and the way out."""

import struct
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from preparing import prepare
from raw_trees import (
    AFFINE,
    SIZE,
    ellipsoids,
    find_only_dataset,
    make_folder,
    read_scan,
    write_nifti,
    write_picture,
)
from start import refused

from semidice.data.sources import find_datasets
from semidice.data.sources.files import mask_values, read_header, read_image, read_mask
from semidice.errors import UserError

IMAGE, MASKS = ellipsoids(0, SIZE)
MASK = MASKS[0]
KINDS = {"u": 1, "i": 2, "f": 3}


def write_tiff(path: Path, array: np.ndarray, *, photometric: int = 1, description: str = "") -> Path:
    """A TIFF of one strip as tifffile writes it: rows, columns, and samples; bool as one bit."""
    rows, columns, *samples = array.shape
    bits, kind = (1, 1) if array.dtype == bool else (array.dtype.itemsize * 8, KINDS[array.dtype.kind])
    content = (np.packbits(array, axis=-1) if array.dtype == bool else np.ascontiguousarray(array)).tobytes()
    count = samples[0] if samples else 1
    tags = {256: columns, 257: rows, 258: bits, 259: 1, 262: photometric, 273: 8, 277: count, 278: rows}
    tags |= {279: len(content), 339: kind}
    extra = struct.pack(f"<{count}H", *[bits] * count) + struct.pack(f"<{count}H", *[kind] * count)
    start = 8 + len(content)
    entries = []
    for tag, value in sorted(tags.items()):
        if count > 2 and tag in (258, 339):
            place = start if tag == 258 else start + 2 * count
            entries.append(struct.pack("<HHII", tag, 3, count, place))
        elif count == 2 and tag in (258, 339):
            entries.append(struct.pack("<HHIHH", tag, 3, 2, value, value))
        else:
            entries.append(struct.pack("<HHII", tag, 4, 1, value))
    directory = start + len(extra)
    path.write_bytes(
        struct.pack("<2sHI", b"II", 42, directory)
        + content
        + extra
        + struct.pack("<H", len(entries))
        + b"".join(entries)
        + bytes(4)
    )
    return path


@pytest.mark.parametrize("high", [True, 255])
def test_a_mask_in_which_0_is_white_has_its_stored_values(tmp_path, high):
    stored = MASK.astype(bool) if high is True else MASK * np.uint8(high)
    path = write_tiff(tmp_path / "m.tif", stored, photometric=0)
    np.testing.assert_array_equal(read_mask(path, num_axes=2).classes, MASK)
    assert mask_values(path) in ((0, 1), (0, 255))


def test_a_palette_whose_first_colour_is_white_is_read_by_its_greys_and_refused_in_colour(tmp_path):
    Image.fromarray(MASK * np.uint8(255)).convert("RGB").quantize(2).save(tmp_path / "two.png")
    assert Image.open(tmp_path / "two.png").getpalette()[:3] == [255, 255, 255]
    assert mask_values(tmp_path / "two.png") == (0, 255)
    np.testing.assert_array_equal(read_mask(tmp_path / "two.png", num_axes=2).classes, MASK)
    picture = Image.fromarray(MASK)
    picture.putpalette([255, 255, 255, 250, 0, 0])
    picture.save(tmp_path / "red.png")
    refused(lambda: read_mask(tmp_path / "red.png", num_axes=2), "red.png", "palette", "grey value")


def prepared_table(tmp_path, name, text):
    make_folder(tmp_path, num_cases=2)
    (tmp_path / name).write_text(text)
    return find_datasets("folder", tmp_path)


@pytest.mark.parametrize("name", ["Cases.csv", "cases.xlsx", "cases.csv.txt", "Classes.csv", "classes.tsv"])
def test_a_table_with_nearly_the_right_name_is_not_ignored(tmp_path, name):
    refused(lambda: prepared_table(tmp_path, name, "case,patient\n"), name, "would be ignored", ".csv")


def test_tables_may_have_the_line_of_excel_and_empty_rows(tmp_path):
    text = "sep=;\ncase;patient\ncase1;p\n;\n\ncase2;q\n"
    (dataset,) = prepared_table(tmp_path, "cases.csv", text)
    assert [scan.patient for scan in dataset.scans] == ["p", "q"]


@pytest.mark.parametrize(("first", "second"), [("1", "01"), ("1", "1.0"), ("Anna", "anna")])
def test_two_spellings_of_a_patient_are_refused(tmp_path, first, second):
    (dataset,) = prepared_table(tmp_path, "cases.csv", f"case,patient\ncase1,{first}\ncase2,{second}\n")
    (problem,) = dataset.problems
    assert "spelling" in problem
    assert repr(second) in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("value,name\n0,lesion\n255,background\n", ["value 255", "value 0 counts as the background"]),
        ("value,name\n1,Tumor\n255,tumor\n", ["'Tumor'", "'tumor'", "spelling"]),
    ],
)
def test_classes_that_are_inverted_or_have_two_spellings_are_refused(tmp_path, text, words):
    refused(lambda: prepared_table(tmp_path, "classes.csv", text), "classes.csv", *words)


def test_two_spellings_of_a_rater_are_refused(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "raters/A").mkdir()
    refused(lambda: find_datasets("folder", tmp_path), "'A'", "'a'", "spelling")


def test_names_of_slices_without_a_table_of_patients_give_a_hint(tmp_path):
    make_folder(tmp_path, num_cases=4, num_raters=1)
    assert find_only_dataset("folder", tmp_path).notes == ()
    for path in sorted(tmp_path.rglob("case*.png")):
        number = int(path.stem[-1]) - 1
        path.rename(path.with_name(f"patient{number // 2}_slice{number % 2}.png"))
    (note,) = find_only_dataset("folder", tmp_path).notes
    assert "cases.csv" in note


def test_one_image_under_two_patients_is_a_problem_and_under_one_patient_it_is_not(tmp_path):
    make_folder(tmp_path / "raw")
    copy = (tmp_path / "raw/images/case1.png").read_bytes()
    (tmp_path / "raw/images/case2.png").write_bytes(copy)
    raw = find_only_dataset("folder", tmp_path / "raw")
    with pytest.raises(UserError) as error:
        prepare(raw, tmp_path / "out")
    problem, _ = str(error.value).splitlines()
    assert "case1.png" in problem
    assert "case2.png" in problem
    assert "leak" in problem
    assert len(prepare(raw, tmp_path / "out", skip_bad=True).scans) == 5
    prepare(raw, tmp_path / "out")
    of_one = replace(raw, scans=tuple(replace(scan, patient="p") for scan in raw.scans))
    assert len(prepare(of_one, tmp_path / "one").scans) == 6


@pytest.mark.parametrize(("code", "is_refused"), [("scanner", True), ("mni", False)])
def test_a_voxel_size_that_contradicts_the_affine_is_refused_but_not_after_a_registration(
    tmp_path, code, is_refused
):
    image = nibabel.Nifti1Image(ellipsoids(0, (20, 20, 6))[0], None)
    image.set_sform(AFFINE @ np.diag([1, 1, 5, 1]), code=code)
    image.header["pixdim"][1:4] = 0.7, 0.8, 2.5
    nibabel.save(image, tmp_path / "scan.nii")
    if is_refused:
        refused(lambda: read_image(tmp_path / "scan.nii", num_axes=3), "scan.nii", "2.5", "12.5", "axis 2")
    else:
        assert read_image(tmp_path / "scan.nii", num_axes=3).grid.spacing_mm == (0.7, 0.8, 2.5)


def test_scans_of_several_orientations_and_classes_that_nobody_drew_are_named(tmp_path):
    raw = tmp_path / "raw"
    make_folder(raw, suffix=".nii.gz", volumes=True, num_cases=3, num_classes=3)
    (raw / "classes.csv").write_text("value,name\n1,organ\n2,lesion\n3,cyst\n")
    assert find_only_dataset("folder", raw)
    turned = AFFINE[[0, 2, 1, 3]]
    for path in raw.rglob("case2.nii.gz"):
        write_nifti(path, np.asanyarray(nibabel.load(path).dataobj), turned)
    manifest = prepare(find_only_dataset("folder", raw), tmp_path / "out")
    assert [scan.orientation for scan in manifest.scans] == ["RAS", "RSA", "RAS"]
    never, orientations = manifest.warnings
    assert "nobody drew cyst" in never
    assert "RSA (case2)" in orientations


def test_a_picture_that_exif_turns_is_refused(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray((IMAGE * 255).astype(np.uint8)).save(tmp_path / "p.png", exif=exif)
    refused(lambda: read_image(tmp_path / "p.png", num_axes=2), "p.png", "EXIF", "upright")


def hyperstack(path):
    return write_tiff_pages(path, "ImageJ=1.54\nimages=6\nchannels=2\nslices=3\n")


def write_tiff_pages(path, description):
    pages = [Image.fromarray((IMAGE * value).astype(np.uint8)) for value in range(40, 46)]
    pages[0].save(path, save_all=True, append_images=pages[1:], tiffinfo={270: description})
    return path


LOST = {
    "int8.tif": (lambda path: write_tiff(path, (IMAGE * 100).astype(np.int8)), 2, ["int8", "int16"]),
    "large.tif": (
        lambda path: write_tiff(path, (IMAGE * 200).astype(np.int32) + 1_000_000_000),
        2,
        ["float32", "subtract"],
    ),
    "hyper.tif": (hyperstack, 3, ["channels and slices", "one stack"]),
    "deep.tif": (
        lambda path: write_tiff(path, np.dstack([IMAGE * 4000] * 3).astype(np.uint16), photometric=2),
        2,
        ["16 bits", "one file per channel"],
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_values_that_would_be_lost_are_refused(tmp_path, name):
    write, num_axes, words = LOST[name]
    path = write(tmp_path / name)
    refused(lambda: read_image(path, num_axes=num_axes), name, *words)


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint32", "int64"])
def test_tiffs_of_every_number_are_read(tmp_path, dtype):
    values = (IMAGE * 100).astype(dtype)
    read = read_image(write_tiff(tmp_path / "case.tif", values), num_axes=2)
    np.testing.assert_array_equal(read.values[0], values.astype(np.float32))


def test_unsigned_numbers_above_those_with_a_sign_are_kept(tmp_path):
    values = (IMAGE * 1000).astype(np.uint32) * 4_000_000
    read = read_image(write_tiff(tmp_path / "case.tif", values), num_axes=2)
    np.testing.assert_array_equal(read.values[0], values.astype(np.float32))


@pytest.mark.parametrize("samples", [2, 5])
def test_all_channels_of_a_tiff_are_read(tmp_path, samples):
    values = np.random.default_rng(0).integers(0, 255, (*SIZE, samples), dtype=np.uint8)
    path = write_tiff(tmp_path / "case.tif", values)
    read = read_image(path, num_axes=2, num_channels=samples)
    np.testing.assert_array_equal(read.values, np.moveaxis(values, -1, 0))
    assert read_header(path).colours > 1


def test_a_mask_of_255_with_a_slope_of_a_255th_is_read(tmp_path):
    image = nibabel.Nifti1Image(MASK * np.uint8(255), AFFINE)
    image.header.set_slope_inter(1 / 255, 0)
    nibabel.save(image, tmp_path / "m.nii")
    np.testing.assert_array_equal(read_mask(tmp_path / "m.nii", num_axes=2).classes, MASK)
    assert mask_values(tmp_path / "m.nii") == (0, 1)


def test_a_picture_of_one_page_among_others_is_read_as_before(tmp_path):
    make_folder(tmp_path, suffix=".tif", num_cases=2)
    dataset = find_only_dataset("folder", tmp_path)
    assert read_scan(dataset, dataset.scans[0]).image.dtype == np.uint8
    write_picture(tmp_path / "one.png", MASK)
    assert mask_values(tmp_path / "one.png") == (0, 1)
