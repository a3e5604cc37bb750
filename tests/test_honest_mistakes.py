"""What honest users hand over by mistake, and what they get: the right number, a refusal with the way out, or
a warning that names it. One row per mistake; files are made by the programs that people use.

A row is what the user does, as a function of an empty folder, and what comes of it: words of the refusal
(`Refused`), words of what is printed (`Says`), or the right value.
"""

import gzip
import io
import os
import shutil
from contextlib import suppress
from typing import NamedTuple

import nibabel
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from prepared import make_prepared
from raw_trees import (
    AFFINE,
    DEPTH,
    SIZE,
    ellipsoids,
    make_folder,
    make_nnunet,
    write_nifti,
    write_picture,
)
from rich.console import Console
from start import refused, semidice
from trained import make_run

from semidice.data.dataset import open_dataset
from semidice.data.prepare import run_prepare
from semidice.data.sources import find_datasets
from semidice.data.sources.files import read_image, read_mask
from semidice.prediction.command import run_predict
from semidice.prediction.options import PredictOptions
from semidice.report.check_command import CheckError, run_check
from semidice.runs.run import open_run

IMAGE, MASKS = ellipsoids(0, SIZE)
MASK = MASKS[0]
GREY = (IMAGE.clip(0, 1) * 250).astype(np.uint8)
VOLUME, VOLUME_MASKS = ellipsoids(0, (*SIZE, DEPTH))
CLASSES = ellipsoids(0, SIZE, num_classes=3)[1][0]


class Refused(tuple):
    """Words of the message."""


class Says(tuple):
    """Words of what is printed."""


class Row(NamedTuple):
    """What a user does in a folder, and what comes of it."""

    does: object
    gets: object


def image(path, num_channels=1, num_axes=2):
    return read_image(path, num_axes=num_axes, num_channels=num_channels).values


def mask(path, class_of_value=None):
    return read_mask(path, num_axes=2, class_of_value=class_of_value).classes


def saved(folder, picture, name="file.png", **options):
    """The path of a picture that Pillow saves."""
    picture.save(folder / name, **options)
    return folder / name


def tiff(folder, array, name="file.tif", **options):
    """The path of a TIFF of tifffile."""
    tifffile = pytest.importorskip("tifffile", reason="needs tifffile: an extra of dev")
    tifffile.imwrite(folder / name, array, **options)
    return folder / name


def nifti(folder, array, change=lambda image: None, affine=AFFINE, name="file.nii.gz"):
    """The path of a NIfTI of nibabel, whose header `change` may change."""
    made = nibabel.Nifti1Image(array, affine)
    change(made)
    nibabel.save(made, folder / name)
    return folder / name


def raw_header(folder, at, values, sform_code=1):
    """The path of a NIfTI with other bytes in its header, which nibabel itself would not write."""
    path = nifti(folder, VOLUME, lambda made: (made.set_qform(None, 0), made.set_sform(AFFINE, sform_code)))
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[at : at + len(values)] = values
    path.write_bytes(gzip.compress(bytes(content)))
    return path


def table(folder, text, name="cases.csv", **options):
    """A user's folder with a table in it: text, or a frame of pandas."""
    make_folder(folder, num_cases=2, **options)
    if isinstance(text, pd.DataFrame):
        text.to_csv(folder / name, index=False)
    else:
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def patients(folder):
    """The patients of all cases; the first problem is raised."""
    (dataset,) = find_datasets("folder", folder)
    if dataset.problems:
        raise ValueError(dataset.problems[0])
    return [scan.patient for scan in dataset.scans]


def changed(folder, change, **options):
    """A user's folder after something was done to it."""
    make_folder(folder, **({"num_cases": 4, "num_raters": 2} | options))
    change(folder)
    return folder


def prepared(folder, source="folder", **overrides):
    """What `semidice prepare` prints of a folder."""
    console = Console(file=io.StringIO(), width=1000)
    run_prepare(source, folder, folder.with_name("out"), console=console, workers=1, overrides=overrides)
    return console.file.getvalue()


def checked(folder):
    """What `semidice check` prints after `semidice prepare`."""
    prepared(folder)
    return check(folder.with_name("out"))


def check(dataset):
    console = Console(file=io.StringIO(), width=1000)
    with suppress(CheckError):
        run_check(dataset, console=console)
    return console.file.getvalue()


def predicted(folder, *inputs, out="predictions", **options):
    """What `semidice predict` prints of files, with an untrained run on the pictures, or volumes, in raw/."""
    if not (folder / "run").exists():
        if not (folder / "raw").exists():
            make_folder(folder / "raw", num_cases=4, num_raters=2)
        prepared(folder / "raw")
        make_run(folder / "run", open_dataset(folder / "out"), scored=False)
    console = Console(file=io.StringIO(), width=1000)
    chosen = PredictOptions(device="cpu", **options)
    run_predict(folder / "run", inputs, folder / out, chosen, console=console)
    return console.file.getvalue()


def on_volumes(folder):
    """The folder, where `predicted` finds volumes."""
    make_folder(folder / "raw", num_cases=4, num_raters=2, suffix=".nii.gz", volumes=True)
    return folder


def new_picture(folder, seed=0, name="new.png", dtype=np.uint8):
    pixels = np.random.default_rng(seed).integers(0, 200, SIZE).astype(dtype)
    folder.mkdir(exist_ok=True)
    return saved(folder, Image.fromarray(pixels), name)


def palette(indices, *colours):
    picture = Image.fromarray(indices)
    picture.putpalette([value for colour in colours for value in colour])
    return picture


def with_alpha(mode, **channels):
    """A picture of one grey value or of noise, with a transparency."""
    bands = [channels.get(name, np.full(SIZE, 200, np.uint8)) for name in mode]
    return Image.merge(mode, [Image.fromarray(band) for band in bands])


def exif(number):
    made = Image.Exif()
    made[274] = number
    return made


def rename(root, old, new):
    for path in sorted(root.rglob(old)):
        path.rename(path.with_name(new))


def redraw(root, rater, change):
    """Change the masks of a rater."""
    for path in (root / "raters" / rater).iterdir():
        with Image.open(path) as picture:
            pixels = np.array(picture)
        write_picture(path, change(pixels))


def copy(root, old, new):
    shutil.copy(root / old, root / new)


def turn(root, case):
    for path in root.rglob(f"{case}.nii.gz"):
        write_nifti(path, np.asanyarray(nibabel.load(path).dataobj), AFFINE[[0, 2, 1, 3]])


def slices_of_patients(root):
    for path in sorted(root.rglob("case*.png")):
        number = int(path.stem[-1]) - 1
        path.rename(path.with_name(f"patient{number // 2:02d}_slice{number % 2:02d}.png"))


def half_copied(folder):
    prepared(make_folder(folder, num_cases=2))
    path = folder.with_name("out") / "images/case1.npy"
    path.write_bytes(path.read_bytes()[:-1])
    return folder.with_name("out")


def swapped(folder):
    prepared(make_folder(folder, num_cases=2))
    out = folder.with_name("out")
    copy(out, "masks/case1.npy", "masks/case2.npy")
    return out


STACK = np.stack([GREY, GREY // 2])
HYPERSTACK = {"imagej": True, "metadata": {"axes": "ZCYX"}}
NIFTI = {"suffix": ".nii.gz", "volumes": True}
WHITE, BLACK, RED, GREEN = (255, 255, 255), (0, 0, 0), (250, 0, 0), (0, 240, 10)
NOISE = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
MANY = np.random.default_rng(0).integers(0, 255, (*SIZE, 5), dtype=np.uint8)
FLOATS = pd.DataFrame({"case": ["case1", "case2", "case3"], "patient": [1, 1, np.nan]})
SPELLINGS = pd.DataFrame({"case": ["case1", "case2"], "patient": ["1", "1.0"]})

MISTAKES = {
    # masks that are read inverted, or whose background is not certain
    "mask: tifffile's default for bool, 0 is white": Row(
        lambda f: mask(tiff(f, MASK > 0, photometric="miniswhite")), MASK
    ),
    "mask: Fiji's 0 and 255, 0 is white": Row(
        lambda f: mask(tiff(f, MASK * np.uint8(255), photometric="miniswhite")), MASK
    ),
    "mask: 0 and 255, 0 is black": Row(lambda f: mask(tiff(f, MASK * np.uint8(255))), MASK),
    "mask: one bit": Row(lambda f: mask(saved(f, Image.fromarray(MASK > 0))), MASK),
    "mask: Pillow's quantize, index 0 is white": Row(
        lambda f: mask(saved(f, Image.fromarray(MASK * np.uint8(255)).convert("RGB").quantize(2))), MASK
    ),
    "mask: Pillow's adaptive palette": Row(
        lambda f: mask(
            saved(
                f,
                Image.fromarray(MASK * np.uint8(255))
                .convert("RGB")
                .convert("P", palette=Image.Palette.ADAPTIVE, colors=2),
            )
        ),
        MASK,
    ),
    "mask: a palette of colours on black": Row(
        lambda f: mask(saved(f, palette(CLASSES, BLACK, RED, GREEN)), {0: 0, 1: 1, 2: 2}), CLASSES
    ),
    "mask: a palette of colours on white": Row(
        lambda f: mask(saved(f, palette(MASK, WHITE, RED))), Refused(["palette", "grey value"])
    ),
    "mask: red on black": Row(
        lambda f: mask(saved(f, Image.fromarray(np.dstack([GREY, GREY * 0, GREY * 0])))),
        Refused(["in colour", "grey value"]),
    ),
    "mask: grey, saved with three colours": Row(
        lambda f: mask(saved(f, Image.fromarray(MASK * np.uint8(255)).convert("RGB"))), MASK
    ),
    "mask: drawn in the transparency": Row(
        lambda f: mask(saved(f, with_alpha("RGBA", A=MASK * np.uint8(255)))), Refused(["transparency"])
    ),
    "mask: a JPEG": Row(
        lambda f: patients(changed(f, lambda root: rename(root, "case1.png", "case1.jpg"))),
        Refused([".jpg", "convert it"]),
    ),
    "mask: 0, 1 and 255": Row(
        lambda f: patients(
            changed(f, lambda root: redraw(root, "a", lambda m: np.where(np.arange(36) == 18, m, m // 255)))
        ),
        Refused(["0, 1, 255", "classes.csv"]),
    ),
    "mask: blurred edges": Row(
        lambda f: patients(changed(f, lambda root: redraw(root, "a", lambda m: m // 2 + NOISE // 2))),
        Refused(["threshold"]),
    ),
    "mask: resampled, so it has fractions": Row(
        lambda f: mask(nifti(f, MASK * np.float32(0.7))), Refused(["fractions", "threshold"])
    ),
    "mask: -1 for voxels to ignore": Row(
        lambda f: mask(nifti(f, MASK.astype(np.int16) - 1)), Refused(["-1", "0 or more"])
    ),
    "mask: 0 and 255 with a slope of 1/255": Row(
        lambda f: mask(nifti(f, MASK * np.uint8(255), lambda made: made.header.set_slope_inter(1 / 255, 0))),
        MASK,
    ),
    "mask: a class that classes.csv does not have": Row(
        lambda f: mask(nifti(f, CLASSES), {0: 0, 1: 1}), Refused(["2", "must be 0, 1"])
    ),
    "classes.csv: the background is 255": Row(
        lambda f: patients(table(f, "value,name\n0,lesion\n255,background\n", "classes.csv")),
        Refused(["value 255", "value 0 counts as the background", "invert"]),
    ),
    "classes.csv: Tumor and tumor": Row(
        lambda f: patients(table(f, "value,name\n1,Tumor\n255,tumor\n", "classes.csv")),
        Refused(["'Tumor'", "'tumor'", "spelling"]),
    ),
    # patients that leak between folds
    "cases.csv: Cases.csv": Row(
        lambda f: patients(table(f, "case,patient\n", "Cases.csv")),
        Refused(["Cases.csv", "would be ignored"]),
    ),
    "cases.csv: cases.xlsx": Row(
        lambda f: patients(table(f, "", "cases.xlsx")), Refused(["cases.xlsx", "would be ignored", ".csv"])
    ),
    "cases.csv: cases.csv.txt": Row(
        lambda f: patients(table(f, "", "cases.csv.txt")), Refused(["cases.csv.txt", "would be ignored"])
    ),
    "classes.csv: Classes.csv": Row(
        lambda f: patients(table(f, "", "Classes.csv")), Refused(["Classes.csv", "would be ignored"])
    ),
    "cases.csv: 1 and 01": Row(
        lambda f: patients(table(f, "case,patient\ncase1,1\ncase2,01\n")), Refused(["'01'", "spelling"])
    ),
    "cases.csv: 1 and 1.0 of pandas": Row(
        lambda f: patients(table(f, SPELLINGS)), Refused(["'1.0'", "spelling"])
    ),
    "cases.csv: numbers that pandas made floats, and a gap": Row(
        lambda f: patients(table(f, FLOATS)), Refused(["line 4"])
    ),
    "cases.csv: Anna and anna": Row(
        lambda f: patients(table(f, "case,patient\ncase1,Anna\ncase2,anna\n")),
        Refused(["'anna'", "spelling"]),
    ),
    "cases.csv: a case with two patients": Row(
        lambda f: patients(table(f, "case,patient\ncase1,p\ncase1.png,q\n")),
        Refused(["two patients", "'case1'"]),
    ),
    "cases.csv: a case without a row": Row(
        lambda f: patients(table(f, "case,patient\ncase1,p\n")), Refused(["no row", "'case2'"])
    ),
    "cases.csv: a dangling link": Row(
        lambda f: patients(changed(f, lambda root: (root / "cases.csv").symlink_to("gone"))),
        Refused(["cases.csv"]),
    ),
    "cases.csv: Excel's sep=; and empty rows": Row(
        lambda f: patients(table(f, "sep=;\r\ncase;patient\r\ncase1;p\r\n;\r\n\r\ncase2;q\r\n")), ["p", "q"]
    ),
    "cases.csv: Excel's UTF-8, capitals and semicolons": Row(
        lambda f: patients(table(f, "\ufeffCase;Patient;age\r\ncase1;p;40\r\ncase2;q;50\r\n")), ["p", "q"]
    ),
    "cases.csv: names of files, and a name with a comma": Row(
        lambda f: patients(table(f, 'patient, case\n"Doe, Jo", case1.png\nq, case2.png\n')), ["Doe, Jo", "q"]
    ),
    "patients: several slices of each, no table": Row(
        lambda f: prepared(changed(f / "raw", slices_of_patients)),
        Says(["several of one patient", "cases.csv"]),
    ),
    "patients: one image under two": Row(
        lambda f: prepared(
            changed(f / "raw", lambda root: copy(root, "images/case1.png", "images/case2.png"))
        ),
        Refused(["case1.png", "case2.png", "same image", "leak", "one patient"]),
    ),
    "raters: r1 and R1": Row(
        lambda f: patients(changed(f, lambda root: (root / "raters/A").mkdir())),
        Refused(["'A'", "'a'", "spelling"]),
    ),
    # voxel sizes and positions
    "spacing: pixdim and sform disagree": Row(
        lambda f: image(raw_header(f, 76, np.array([1, 0.7, 0.8, 12.5], "f4").tobytes()), num_axes=3),
        Refused(["12.5", "2.5", "axis 2"]),
    ),
    "spacing: registered to an atlas": Row(
        lambda f: (
            read_image(
                raw_header(f, 76, np.array([1, 0.7, 0.8, 12.5], "f4").tobytes(), sform_code=4), num_axes=3
            ).grid.spacing_mm
        ),
        (0.7, 0.8, 12.5),
    ),
    "spacing: 0 in the header, known by the sform": Row(
        lambda f: read_image(raw_header(f, 80, bytes(12)), num_axes=3).grid.spacing_mm, (0.7, 0.8, 2.5)
    ),
    "spacing: not known": Row(
        lambda f: [
            make_folder(f / "raw", num_cases=2, num_raters=1, **NIFTI),
            raw_header(f, 80, bytes(12), sform_code=0).replace(f / "raw/images/case1.nii.gz"),
            prepared(f / "raw", ignore_placement=True),
        ][-1],
        Says(["case1", "no voxel size", "in voxels"]),
    ),
    "spacing: in micron": Row(
        lambda f: (
            read_image(
                nifti(
                    f, VOLUME, lambda made: made.header.set_xyzt_units("micron"), np.diag([700, 800, 2500, 1])
                ),
                num_axes=3,
            ).grid.spacing_mm
        ),
        np.array([0.7, 0.8, 2.5]),
    ),
    "spacing: NaN": Row(
        lambda f: image(raw_header(f, 80, np.array([np.nan], "f4").tobytes()), num_axes=3),
        Refused(["voxel size", "nan", "into its header"]),
    ),
    "orientation: volumes lead to different sides": Row(
        lambda f: prepared(changed(f / "raw", lambda root: turn(root, "case2"), **NIFTI)),
        Says(["RAS (case", "RSA (case2)", "one orientation"]),
    ),
    "orientation: check says it, too": Row(
        lambda f: checked(changed(f / "raw", lambda root: turn(root, "case2"), **NIFTI)),
        Says(["RSA (case2)", "one orientation"]),
    ),
    "orientation: EXIF turns a PNG": Row(
        lambda f: image(saved(f, Image.fromarray(GREY), exif=exif(6))), Refused(["EXIF", "upright"])
    ),
    "position: a mask on another grid": Row(
        lambda f: prepared(
            changed(
                f / "raw",
                lambda root: nifti(
                    root / "raters/a",
                    VOLUME_MASKS[0],
                    affine=AFFINE + np.eye(4)[:, 3:] * 0 + 9 * np.eye(4, k=3),
                    name="case1.nii.gz",
                ),
                **NIFTI,
            )
        ),
        Refused(["raters/a/case1.nii.gz", "not aligned", "resample"]),
    ),
    "position: a mask of another size": Row(
        lambda f: prepared(
            changed(
                f / "raw", lambda root: write_picture(root / "raters/a/case1.png", MASK[:30] * np.uint8(255))
            )
        ),
        Refused(["raters/a/case1.png", "(30, 36)", "(40, 36)"]),
    ),
    "formats: NIfTI and PNG together": Row(
        lambda f: patients(
            changed(
                f,
                lambda root: [
                    (root / "images/case1.png").unlink(),
                    nifti(root / "images", IMAGE, name="case1.nii.gz"),
                ],
            )
        ),
        Refused(["case1.nii.gz", ".png", "one format"]),
    ),
    # values that would be lost
    "values: 16-bit colours": Row(
        lambda f: image(tiff(f, np.dstack([GREY * np.uint16(16)] * 3), photometric="rgb"), 3),
        Refused(["16 bits", "one file per channel"]),
    ),
    "values: grey with transparency": Row(
        lambda f: image(saved(f, with_alpha("LA", L=GREY, A=NOISE))), Refused(["transparency", "channel"])
    ),
    "values: colours with transparency": Row(
        lambda f: image(saved(f, with_alpha("RGBA", R=GREY, A=NOISE)), 3),
        Refused(["transparency", "channel"]),
    ),
    "values: grey, and the same transparency everywhere": Row(
        lambda f: image(saved(f, with_alpha("LA", L=GREY)))[0], GREY
    ),
    "values: int8": Row(lambda f: image(tiff(f, (GREY // 2).astype(np.int8))), Refused(["int8", "int16"])),
    "values: uint32 above those of int32": Row(
        lambda f: image(tiff(f, GREY * np.uint32(16_000_000)))[0], (GREY * np.uint32(16_000_000)).astype("f4")
    ),
    "values: int32 around 1e9": Row(
        lambda f: image(tiff(f, GREY + np.int32(1_000_000_000))), Refused(["float32", "subtract"])
    ),
    "values: float64": Row(lambda f: image(tiff(f, IMAGE.astype(np.float64)))[0], IMAGE),
    "values: float16": Row(lambda f: image(tiff(f, GREY.astype(np.float16)))[0], GREY.astype("f4")),
    "values: int64": Row(lambda f: image(tiff(f, GREY.astype(np.int64)))[0], GREY.astype("f4")),
    "values: five channels": Row(
        lambda f: image(tiff(f, MANY, photometric="minisblack", planarconfig="contig"), 5),
        np.moveaxis(MANY, -1, 0),
    ),
    "values: compressed with Deflate": Row(
        lambda f: image(tiff(f, IMAGE.astype(np.float64), compression="zlib"))[0], IMAGE
    ),
    "values: a hyperstack of ImageJ": Row(
        lambda f: image(tiff(f, np.stack([np.stack([GREY, GREY])] * 3), **HYPERSTACK), num_axes=3),
        Refused(["channels", "ImageJ", "one stack"]),
    ),
    "values: a stack of ImageJ": Row(
        lambda f: image(tiff(f, STACK, imagej=True, metadata={"axes": "ZYX"}), num_axes=3)[0], STACK
    ),
    "values: a stack that tifffile calls channels": Row(
        lambda f: image(tiff(f, STACK, imagej=True), num_axes=3), Refused(["channels of ImageJ", "stack"])
    ),
    "values: thousands of pages": Row(
        lambda f: image(tiff(f, np.zeros((4200, 4, 4), np.uint8), photometric="minisblack"), num_axes=3),
        Refused(["pages", "fewer"]),
    ),
    "values: a film": Row(
        lambda f: image(
            saved(f, Image.fromarray(GREY), save_all=True, append_images=[Image.fromarray(NOISE)])
        ),
        Refused(["animation"]),
    ),
    "values: NaN": Row(
        lambda f: image(nifti(f, np.where(MASK, np.nan, IMAGE))), Refused(["NaN or infinite", "repair"])
    ),
    "values: an empty image": Row(
        lambda f: image(saved(f, Image.fromarray(GREY * 0))), Refused(["no contrast"])
    ),
    "values: a series of times": Row(
        lambda f: image(nifti(f, np.stack([VOLUME] * 4, -1)), num_axes=3),
        Refused(["(40, 36, 6, 4)", "3 spatial axes"]),
    ),
    "values: a window in another unit": Row(
        lambda f: prepared(make_folder(f / "raw", **NIFTI), window=(-1e6, -9e5)),
        Refused(["window", "--window"]),
    ),
    # what was drawn
    "drawn: a class that nobody drew": Row(
        lambda f: prepared(
            table(f / "raw", "value,name\n1,organ\n2,lesion\n3,cyst\n", "classes.csv", num_classes=3)
        ),
        Says(["nobody drew cyst", "leave it out"]),
    ),
    "drawn: a rater inverted in every case": Row(
        lambda f: checked(changed(f / "raw", lambda root: redraw(root, "a", lambda m: 255 - m))),
        Says(["rater a", "most of the voxels", "inverted"]),
    ),
    "drawn: a rater who is a copy of another": Row(
        lambda f: checked(
            changed(
                f / "raw",
                lambda root: [
                    shutil.rmtree(root / "raters/b"),
                    shutil.copytree(root / "raters/a", root / "raters/b"),
                ],
            )
        ),
        Says(["raters a and b", "the same", "copy"]),
    ),
    "drawn: everything": Row(
        lambda f: checked(changed(f / "raw", lambda root: redraw(root, "b", lambda m: m * 0 + 255))),
        Says(["rater b", "most of the voxels"]),
    ),
    "drawn: nothing": Row(
        lambda f: checked(changed(f / "raw", lambda root: redraw(root, "b", lambda m: m * 0))),
        Says(["rater b drew nothing"]),
    ),
    "drawn: another window in one image": Row(
        lambda f: checked(
            changed(
                f / "raw",
                lambda root: write_picture(root / "images/case1.png", 250 + GREY // 60),
                num_cases=6,
            )
        ),
        Says(["case1", "same unit"]),
    ),
    # files that are not where, or not what, they should be
    "files: a name that is not UTF-8": Row(
        lambda f: patients(
            changed(
                f,
                lambda root: os.rename(
                    root / "images/case1.png", os.fsencode(root / "images") + b"/caf\xe9.png"
                ),
            )
        ),
        Refused(["UTF-8", "rename"]),
    ),
    "files: no mask": Row(
        lambda f: patients(
            changed(f, lambda root: [path.unlink() for path in root.glob("raters/*/case1.png")])
        ),
        Refused(["images/case1.png", "no mask", "add it"]),
    ),
    "files: left by macOS": Row(
        lambda f: patients(changed(f, lambda root: (root / "images/._case1.png").write_bytes(b"Mac OS X"))),
        ["case1", "case2", "case3", "case4"],
    ),
    "files: an accent in two forms": Row(
        lambda f: patients(
            changed(
                f,
                lambda root: [
                    rename(root / "images", "case1.png", "caf\u00e9.png"),
                    rename(root / "raters", "case1.png", "cafe\u0301.png"),
                ],
            )
        ),
        ["caf\u00e9", "case2", "case3", "case4"],
    ),
    "files: one case in two formats": Row(
        lambda f: patients(changed(f, lambda root: copy(root, "images/case1.png", "images/case1.tif"))),
        Refused(["'case1'", "two files", "keep one"]),
    ),
    "files: a folder among the images": Row(
        lambda f: patients(changed(f, lambda root: (root / "images/more").mkdir())),
        Refused(["more is a folder"]),
    ),
    "files: half a download": Row(
        lambda f: image((path := nifti(f, IMAGE)).write_bytes(path.read_bytes()[:-99]) and path),
        Refused(["file.nii.gz", "copy or export it again"]),
    ),
    "files: a flipped bit": Row(
        lambda f: image(
            (path := nifti(f, IMAGE)).write_bytes((c := path.read_bytes())[:-8] + bytes([c[-8] ^ 1]) + c[-7:])
            and path
        ),
        Refused(["file.nii.gz", "copy or export it again"]),
    ),
    "files: named .nii.gz, and not compressed": Row(
        lambda f: image(nifti(f, IMAGE, name="file.nii").rename(f / "file.nii.gz")), Refused(["ot a gzip"])
    ),
    "files: nnU-Net's label to ignore": Row(
        lambda f: prepared(
            [
                make_nnunet(f / "raw"),
                (path := f / "raw/dataset.json").write_text(path.read_text().replace('"core"', '"ignore"')),
                f / "raw",
            ][-1],
            "nnunet",
        ),
        Refused(["'ignore'", "--skip-bad"]),
    ),
    "dataset: half copied": Row(
        lambda f: open_dataset(half_copied(f / "raw")), Refused(["images/case1.npy", "not complete", "copy"])
    ),
    "dataset: an array of another case": Row(
        lambda f: check(swapped(f / "raw")), Says(["masks/case2.npy", "changed or swapped"])
    ),
    "dataset: prepared from other files than now": Row(
        lambda f: [
            prepared(make_folder(f / "raw")),
            copy(f / "raw", "raters/a/case1.png", "raters/b/case1.png"),
            prepared(f / "raw"),
        ],
        Refused(["raters/b/case1.png was changed", "another folder"]),
    ),
    "predict: another image with the name of a finished one": Row(
        lambda f: [predicted(f, new_picture(f)), predicted(f, new_picture(f / "other", seed=1))],
        Refused(["other/new.png", "results of other files", "--overwrite"]),
    ),
    "predict: an image that changed since": Row(
        lambda f: [predicted(f, new_picture(f)), predicted(f, new_picture(f, seed=1))],
        Refused(["new.png", "changed since", "--overwrite"]),
    ),
    "predict: the same image again": Row(
        lambda f: [predicted(f, new_picture(f)), predicted(f, new_picture(f))][-1],
        Says(["1 of 1 inputs are predicted already"]),
    ),
    "predict: two inputs of one name": Row(
        lambda f: predicted(f, new_picture(f), new_picture(f / "other", name="NEW.tif")),
        Refused(["new.png", "NEW.tif", "same name", "different folders"]),
    ),
    "predict: a folder that is also the output": Row(
        lambda f: predicted(f, new_picture(f / "predictions").parent),
        Refused(["both input and output", "-o"]),
    ),
    "predict: a volume of another orientation": Row(
        lambda f: predicted(on_volumes(f), nifti(f, VOLUME, affine=AFFINE[[0, 2, 1, 3]])),
        Refused(["file.nii.gz", "RSA", "RAS", "--slice-axis"]),
    ),
    "predict: a volume of another orientation, whose rows and columns are alike": Row(
        lambda f: predicted(on_volumes(f), nifti(f, VOLUME, affine=AFFINE[[0, 2, 1, 3]]), slice_axis=2),
        Says(["predicted 1 of 1 inputs"]),
    ),
    "predict: a NIfTI by a run on pictures": Row(
        lambda f: predicted(f, nifti(f, GREY)), Refused(["file.nii.gz", "pictures", "--slice-axis"])
    ),
    "predict: a picture by a run on NIfTI": Row(
        lambda f: predicted(on_volumes(f), new_picture(f)), Refused(["new.png", "picture", "RAS"])
    ),
    "predict: 16 bits by a run on 8 bits": Row(
        lambda f: predicted(f, saved(f, Image.fromarray(GREY.astype(np.uint16) * 257))),
        Refused(["file.png", "8-bit pictures", "save the image with 8 bits"]),
    ),
    "predict: colours by a run on grey": Row(
        lambda f: predicted(f, saved(f, Image.fromarray(np.stack([GREY, GREY // 2, GREY // 3], -1)))),
        Refused(["file.png", "channel"]),
    ),
    "predict: images of the training": Row(
        lambda f: predicted(f, make_folder(f / "raw", num_cases=4, num_raters=2) / "images/case1.png"),
        Says(["warning: the networks were trained on 1 input (case1)", "semidice evaluate"]),
    ),
    "predict: a name that is not UTF-8": Row(
        lambda f: predicted(f, new_picture(f).rename(f / os.fsdecode(b"\xff.png"))),
        Refused(["UTF-8", "rename"]),
    ),
    "predict: the mask among the images, cut off": Row(
        lambda f: predicted(
            f, new_picture(f / "in"), (f / "in/cut.png").write_text("x") and f / "in/cut.png"
        ),
        Refused(["1 of 2 inputs", "cut.png"]),
    ),
}


class Runs(NamedTuple):
    """A dataset, a run on it, and another run of the same recipe with another seed of its networks."""

    data: object
    run: object
    other: object

    @property
    def first(self):
        """The stored prediction of the first case of fold 0."""
        return sorted(self.run.fold(0).predictions.iterdir())[0]

    def in_other(self, path):
        return self.other.path / path.relative_to(self.run.path)


def command(*arguments):
    """What a command prints; its refusal is raised."""
    done = semidice(*arguments)
    assert "Traceback" not in done.err, done.err
    if done.code:
        raise ValueError(done.err)
    return done.out


def runs(folder):
    data = make_prepared(folder / "data", num_cases=6, size=(32, 32), cases_per_patient=1)
    options = {"options": {"window": [0.0, 255.0]}}
    run = make_run(folder / "run", data, **options)
    changed = {"change": lambda network: network.segmentation_head[0].weight.data.mul_(2)}
    other = make_run(folder / "other", data, metrics=["dice_score"], **changed, **options)
    return Runs(data.folder.path, run, other)


def replaced(path, source):
    """A file or folder, copied over another one, as `rsync` does."""
    if source.is_dir():
        shutil.rmtree(path)
        shutil.copytree(source, path)
    else:
        shutil.copy(source, path)


def of_other(folder, name):
    """The run with a part of the other one."""
    made = runs(folder)
    path = made.first if name == "prediction" else made.run.path / name
    replaced(path, made.in_other(path))
    return made


def prepared_again(folder):
    made = runs(folder)
    shutil.rmtree(made.data)
    make_prepared(made.data, num_cases=6, size=(32, 32), cases_per_patient=1, seed=1)
    return made


def redrawn(folder):
    made = runs(folder)
    path = made.data / "masks" / "scan002.npy"
    np.save(path, ~np.load(path))
    return made


def fitted(folder, *arguments):
    """A run to whose predictions something is fitted, and one of which is made again since."""
    made = runs(folder)
    command(*arguments, made.run.path)
    replaced(made.first, sorted(made.run.fold(1).predictions.iterdir())[0])
    return made


def predicted_by(folder, made, *options):
    saved(folder, Image.fromarray(GREY), "scan.png")
    return command("predict", made.run.path, folder / "scan.png", "-o", folder / "out", *options)


def calibrated_twice(folder):
    """Whether the second calibrator of a run has the bytes of the first one."""
    made = runs(folder)
    command("calibrate", made.run.path, "--by", "vector")
    first = made.run.calibrator.read_bytes()
    command("calibrate", made.run.path, "--by", "vector")
    return made.run.calibrator.read_bytes() == first


def linked(folder, name):
    """A run with a folder that is a link out of it."""
    made = runs(folder)
    path, outside = made.run.path / name, folder / "outside"
    if path.is_dir():
        path.rename(outside)
    outside.mkdir(exist_ok=True)
    path.symlink_to(outside)
    return made


MISTAKES |= {
    "runs: the checkpoint of another run": Row(
        lambda f: open_run(of_other(f, "fold_0/last.safetensors").run).network(0, device="cpu"),
        Refused(["last.safetensors", "of another run"]),
    ),
    "runs: the fold of another run": Row(
        lambda f: command("evaluate", of_other(f, "fold_0").run.path),
        Refused(["fold_0 is fold 0 of another run", "remove the folder"]),
    ),
    "runs: the fold of another run, gathered by train": Row(
        lambda f: open_run(of_other(f, "fold_0").run).gather(), Refused(["fold_0", "of another run"])
    ),
    "runs: the prediction of another run": Row(
        lambda f: command("evaluate", of_other(f, "fold_0/predictions").run.path),
        Refused(["fold_0/predictions", "changed since"]),
    ),
    "runs: the prediction of another case": Row(
        lambda f: [
            made := runs(f),
            replaced(made.first, sorted(made.run.fold(0).predictions.iterdir())[1]),
            command("calibrate", made.run.path, "--by", "beta"),
        ][-1],
        Refused(["fold_0/predictions", "changed since"]),
    ),
    "runs: a rule that was fitted to other predictions": Row(
        lambda f: predicted_by(f, fitted(f, "evaluate", "--decide", "fitted"), "--decide", "fitted"),
        Refused(["not fitted to its predictions", "semidice evaluate"]),
    ),
    "runs: a calibrator that was fitted to other predictions": Row(
        lambda f: predicted_by(f, fitted(f, "calibrate", "--by", "beta")),
        Refused(["calibrator.safetensors was not fitted to the predictions", "--no-calibrate"]),
    ),
    "runs: calibrated twice": Row(calibrated_twice, True),
    "runs: predicted twice, calibrated again in between": Row(
        lambda f: [
            made := runs(f),
            command("calibrate", made.run.path, "--by", "beta"),
            predicted_by(f, made),
            command("calibrate", made.run.path, "--by", "beta"),
            predicted_by(f, made),
        ][-1],
        Says(["1 of 1 inputs are predicted already"]),
    ),
    "runs: a learning rate at which the training diverges": Row(
        lambda f: command(
            *(
                "train",
                "quick",
                "-o",
                f / "diverged",
                "--accelerator",
                "cpu",
                "--set",
                f"data.dataset={runs(f).data}",
            ),
            *("--set", "optimiser.lr=1e30", "--set", "data.folds=[0]", "--set", "schedule.epochs=2"),
            *("--set", "data.num_folds=2", "--set", "batch_size=2", "--set", "workers=0"),
            *("--set", "model.options.channels=[8,16]"),
        ),
        Refused(["the training diverged", "Lower optimiser.lr"]),
    ),
    "runs: evaluated on a dataset that was prepared again": Row(
        lambda f: command("evaluate", prepared_again(f).run.path),
        Refused(["data is not the dataset", "prepared again", "--dataset"]),
    ),
    "runs: calibrated on a dataset that was prepared again": Row(
        lambda f: command("calibrate", prepared_again(f).run.path), Refused(["data is not the dataset"])
    ),
    "runs: reported on a dataset that was prepared again": Row(
        lambda f: [
            made := prepared_again(f),
            shutil.copy(made.run.fold(0).cases, made.run.cases),
            command("report", made.run.path, "-o", f / "report.html"),
        ][-1],
        Refused(["data is not the dataset"]),
    ),
    "runs: evaluated with masks that were drawn again": Row(
        lambda f: command("evaluate", redrawn(f).run.path), Refused(["scan002", "have changed"])
    ),
    "runs: predictions of cases that the networks were trained on": Row(
        lambda f: [
            made := runs(f),
            predicted_by(f, made),
            command("evaluate", "--predictions", f / "out", "--dataset", made.data),
        ][-1],
        Refused(["trained on", "semidice evaluate RUN"]),
    ),
    **{
        f"runs: {name} is a link out of the run": Row(
            lambda f, name=name: command("evaluate", linked(f, name).run.path), Refused([name, "link"])
        )
        for name in ("fold_0", "fold_0/predictions", "fold_0/tensorboard")
    },
    "runs: the lock is a link to nothing": Row(
        lambda f: [
            made := runs(f),
            made.run.lock.unlink(missing_ok=True),
            made.run.lock.symlink_to(f / "nothing"),
            command("evaluate", made.run.path),
        ][-1],
        Refused([".lock is a link", "remove the link"]),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_honest_mistake_gives_the_right_number_a_refusal_or_a_warning(tmp_path, name):
    does, gets = MISTAKES[name]
    if isinstance(gets, Refused):
        refused(lambda: does(tmp_path), *gets)
    elif isinstance(gets, Says):
        said = " ".join(does(tmp_path).split())
        assert all(word in said for word in gets), said
    else:
        found = does(tmp_path)
        if isinstance(gets, np.ndarray):
            np.testing.assert_allclose(found, gets, rtol=1e-6)
        else:
            assert found == gets
