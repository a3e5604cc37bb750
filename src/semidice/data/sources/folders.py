"""Folders of images and masks, matched by file name: a user's own folder, and LIDC as PNG slices.

    FOLDER/images/CASE.png           or .tif, .tiff (several pages: a volume), .nii, .nii.gz
                  CASE_0000.png      instead, with CASE_0001.png, ...: one file per channel
           raters/NAME/CASE.png      one folder per rater; no file: the rater did not look at the case
           masks/CASE.png            instead of raters/, if there is one rater
           cases.csv                 optional: columns case, patient; without it each case is one patient
           classes.csv               optional: columns value, name; values with one name are one class

Without classes.csv all masks are read to see which values they hold. 0 together with 1 or 255 is background
and foreground. 0 to C - 1 are background, class_1, class_2, ... Other values are an error that asks for
classes.csv. Pictures and NIfTI cannot be mixed: one counts rows first, the other columns. An image CASE_0000
is a channel of CASE if there is a mask CASE and no mask CASE_0000.
"""

import csv
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...limits import MAX_CSV_BYTES, read_text
from ..manifest import PrepareOptions
from .raw import RawDataset, RawScan, distinct_scans, is_folder, natural_order, two_spellings, visible
from .readers import (
    NIFTI_SUFFIXES,
    SUFFIXES,
    can_be_volume,
    channel_file,
    channel_of,
    file_shape,
    mask_values,
    stem_of,
    suffix_of,
)

OnFile = Callable[[int, int], object]
# without classes.csv, masks with more values are grey images or have blurred edges
_MAX_CLASSES = 32
# images of other formats are reported, because ignoring them would lose a case; other files are ignored
_OTHER_IMAGES = (".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".jp2", ".dcm", ".mha", ".mhd", ".nrrd", ".npy")


def find_folder(raw: Path, *, on_file: OnFile) -> list[RawDataset]:
    """The dataset in a user's folder; on_file(done, total) is called for each mask that is read."""
    scans, raters, problems = _scans_in(raw)
    if not scans and not problems:
        raise ValueError(f"{raw / 'images'} holds no image: use files {', '.join(SUFFIXES)}")
    is_nifti = _is_nifti(scans)
    table = raw / "classes.csv"
    names, class_of_value = _declared_classes(table) if table.exists() else _seen_classes(scans, on_file)
    num_axes, channels = space_and_channels(scans)
    return [
        RawDataset(
            source="folder",
            root=raw,
            class_names=names,
            raters=raters,
            channels=channels,
            scans=scans,
            options=slicing_options(num_axes, is_nifti=is_nifti),
            class_of_value=class_of_value,
            problems=problems,
            num_axes=num_axes,
        )
    ]


def find_lidc(raw: Path) -> list[RawDataset]:
    """LIDC as slices: images/CASE.png, raters/1..4/CASE.png, and cases.csv with the patient of each case."""
    scans, raters, problems = _scans_in(raw)
    if not (raw / "cases.csv").exists():
        raise ValueError(
            f"{raw} has no cases.csv with columns case and patient: without it, nodules of one patient would "
            "be in several folds; use source folder if each case is a patient"
        )
    return [
        RawDataset(
            source="lidc",
            root=raw,
            class_names=("background", "nodule"),
            raters=raters,
            channels=("CT",),
            scans=scans,
            problems=problems,
        )
    ]


def slicing_options(num_axes: int, *, is_nifti: bool) -> PrepareOptions:
    """Volumes become slices along the axis that counts slices in their format: the last in NIfTI."""
    if num_axes == 2:
        return PrepareOptions()
    return PrepareOptions(slices="all", slice_axis=2 if is_nifti else 0)


def matched_scans(images: Path, raters: Mapping[str, Path]) -> tuple[list[RawScan], list[str]]:
    """One scan for each image that has a mask, and the problems of the other files.

    Each case is a patient of its own.
    """
    image_of, problems = files_by_name(images)
    masks_of: dict[str, dict[str, list[Path]]] = {}
    for rater, folder in raters.items():
        by_case, rater_problems = files_by_name(folder)
        problems += rater_problems
        if not by_case:
            problems.append(f"rater {rater!r} has no mask in {folder}: add some, or remove the folder")
        for case, paths in by_case.items():
            masks_of.setdefault(case, {})[rater] = paths
    channels_of = _take_channels(image_of, masks_of)
    num_channels = _usual_number([len(files) for files in channels_of.values()])
    scans = []
    for case in sorted(image_of.keys() | channels_of.keys() | masks_of.keys(), key=natural_order):
        pictures, by_rater = image_of.get(case, []), masks_of.get(case, {})
        channels = channels_of.get(case, {})
        repeated = [paths for paths in [pictures, *channels.values(), *by_rater.values()] if len(paths) > 1]
        if not repeated and pictures and channels:
            repeated = [[*pictures, *channels[min(channels)]]]
        if repeated:
            files = " and ".join(str(path) for path in repeated[0])
            problems.append(f"case {case!r} has two files, {files}: keep one")
        elif channels and list(channels) != list(range(num_channels)):
            problems.append(_channel_problem(case, channels, num_channels))
        elif not pictures and not channels:
            mask = next(iter(by_rater.values()))[0]
            problems.append(f"mask {mask} has no image {images / case} ({', '.join(SUFFIXES)}): add it")
        elif not by_rater:
            folders = ", ".join(str(folder) for folder in raters.values())
            problems.append(f"image {pictures[0]} has no mask in {folders}: add one, or remove the image")
        else:
            masks = {rater: paths[0] for rater, paths in by_rater.items()}
            image = tuple(paths[0] for paths in channels.values()) if channels else (pictures[0],)
            scans.append(RawScan(case, case, image, masks))
    return scans, problems


def _take_channels(
    image_of: dict[str, list[Path]], masks_of: Mapping[str, object]
) -> dict[str, dict[int, list[Path]]]:
    """The files of each channel by case, in the order of the channels; they are removed from `image_of`.

    A name such as scan_0001 may also be that of a case: then it has a mask of its own.
    """
    channels_of: dict[str, dict[int, list[Path]]] = {}
    for name in sorted(image_of):
        channel = channel_of(name)
        if channel is not None and name not in masks_of and channel[0] in masks_of:
            channels_of.setdefault(channel[0], {})[channel[1]] = image_of.pop(name)
    return channels_of


def _usual_number(numbers: Sequence[int]) -> int:
    """The most frequent number; the largest of several; 0 if there is none."""
    return max(numbers, key=lambda number: (numbers.count(number), number), default=0)


def _channel_problem(case: str, channels: Mapping[int, Sequence[Path]], num_channels: int) -> str:
    """What is wrong with a case whose channels are not 0 to num_channels - 1."""
    first = next(iter(channels.values()))[0]
    files = ", ".join(paths[0].name for paths in channels.values())
    expected = ", ".join(channel_file(case, number, suffix_of(first)) for number in range(num_channels))
    return (
        f"case {case!r} has {files} in {first.parent}, but most cases have {num_channels} channel files; "
        f"expected {expected}: add or remove files"
    )


def files_by_name(
    folder: Path, suffixes: Sequence[str] = SUFFIXES
) -> tuple[dict[str, list[Path]], list[str]]:
    """Files with these suffixes by their name without suffix, and problems of other images and folders."""
    files: dict[str, list[Path]] = {}
    problems = []
    for path in visible(folder):
        if is_folder(path):
            problems.append(f"{path} is a folder: put its files into {folder} itself")
        elif suffix_of(path) in suffixes:
            # macOS stores an accent as a separate character
            files.setdefault(unicodedata.normalize("NFC", stem_of(path)), []).append(path)
        elif suffix_of(path) or path.suffix.lower() in _OTHER_IMAGES:
            problems.append(f"{path} cannot be used: convert it to {' or '.join(suffixes)}, or remove it")
    return files, problems


def space_and_channels(scans: Sequence[RawScan]) -> tuple[int, tuple[str, ...]]:
    """Number of spatial axes, and names of the channels, by the headers of the files that can be read."""
    axes_of: list[int] = []
    channels_of: list[int] = []
    num_volumes = 0
    has_channel_files = any(len(scan.image) > 1 for scan in scans)
    for scan in scans:
        try:
            image, colours = file_shape(scan.image[0])
            mask, _ = file_shape(next(iter(scan.masks.values())))
            num_volumes += can_be_volume(next(iter(scan.masks.values())))
        except ValueError:
            # reported when the scan is read
            continue
        is_multichannel = len(image) == len(mask) + 1 and image[:-1] == mask
        num_files = len(scan.image)
        axes_of.append(len(mask))
        channels_of.append(num_files if num_files > 1 else image[-1] if is_multichannel else colours)
    # what most scans have; a scan that differs is reported when it is read
    num_axes, num_channels = _usual_number(axes_of) or 2, _usual_number(channels_of) or 1
    if num_axes < 3 and any(axes > 2 for axes in axes_of) and num_volumes == len(axes_of):
        # volumes of one slice, which look like images, among others
        num_axes = 3
    if num_axes > 3:
        raise ValueError(f"masks must have 2 axes, or 3 for volumes; got {num_axes} in {scans[0].masks}")
    names = {1: ("intensity",)} | ({} if has_channel_files else {3: ("red", "green", "blue")})
    numbered = tuple(f"channel_{number}" for number in range(1, num_channels + 1))
    return max(num_axes, 2), names.get(num_channels, numbered)


def _scans_in(raw: Path) -> tuple[tuple[RawScan, ...], tuple[str, ...], tuple[str, ...]]:
    """Scans of a user's folder, names of its raters, and problems."""
    images, raters, masks = raw / "images", raw / "raters", raw / "masks"
    if not is_folder(images) or not (is_folder(raters) or is_folder(masks)):
        content = ", ".join(path.name for path in visible(raw)[:10]) or "nothing"
        raise ValueError(f"{raw} must hold {images} and {raters}/NAME (or {masks}); it holds {content}")
    if is_folder(raters) and is_folder(masks):
        raise ValueError(
            f"{raw} holds both raters and masks: masks is for a single rater; remove one of them"
        )
    folders = {"masks": masks}
    if is_folder(raters):
        folders = {path.name: path for path in visible(raters) if is_folder(path)}
        if not folders:
            raise ValueError(f"{raters} holds no folder: put the masks into {raters}/NAME/CASE.png")
    matched, problems = matched_scans(images, folders)
    with_patients, table_problems = _with_patients(matched, raw / "cases.csv")
    scans, all_problems = distinct_scans(with_patients, problems + table_problems)
    return scans, tuple(folders), all_problems


def _with_patients(scans: Sequence[RawScan], table: Path) -> tuple[list[RawScan], list[str]]:
    """Scans with the patients of cases.csv, and problems; cases without a row are left out.

    No scan is returned if the table cannot be read: a guess could put one patient into two folds.
    """
    # a broken link is a problem, no table is not
    if not os.path.lexists(table):
        return list(scans), []
    try:
        rows = table_rows(table, ("case", "patient"))
    except ValueError as error:
        return [], [str(error)]
    patients: dict[str, str] = {}
    for row in rows:
        case = unicodedata.normalize("NFC", stem_of(Path(row["case"])))
        if patients.setdefault(case, row["patient"]) != row["patient"]:
            return [], [f"{table} has two patients for case {case!r}: keep one row"]
    spellings = two_spellings(patients.values())
    if spellings:
        return [], [
            f"{table} has patients {spellings[0]!r} and {spellings[1]!r}, which differ only in their "
            "spelling: write one of them, or rename one if they are two persons"
        ]
    return [replace(scan, patient=patients[scan.name]) for scan in scans if scan.name in patients], [
        f"{table} has no row for case {scan.name!r} ({scan.image[0]}): add one"
        for scan in scans
        if scan.name not in patients
    ]


def table_rows(table: Path, columns: tuple[str, str]) -> list[dict[str, str]]:
    """Rows of a CSV table with these columns, separated by commas or semicolons.

    A value may occur only once in the first column.
    """
    try:
        text = read_text(table, max_bytes=MAX_CSV_BYTES, encoding="utf-8-sig")
        header = text.partition("\n")[0]
        delimiter = ";" if ";" in header and "," not in header else ","
        lines = [header.lower(), *text.splitlines()[1:]]
        reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
        records = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {table}: {error}; save it as CSV in UTF-8") from error
    expected = " and ".join(columns)
    if not records or not set(columns) <= records[0].keys():
        raise ValueError(f"{table} needs columns {expected}, and a row; its first line is {header.strip()!r}")
    names = [name.strip() for name in reader.fieldnames or ()]
    for name in columns:
        if names.count(name) > 1:
            raise ValueError(
                f"{table} has {names.count(name)} columns {name}: keep one, or rename the others"
            )
    rows: dict[str, dict[str, str]] = {}
    for number, record in enumerate(records, start=2):
        if None in record:
            raise ValueError(
                f"{table} has more cells than columns in line {number}, {lines[number - 1]!r}: put a text "
                f'with a {delimiter} in quotes, such as "Doe{delimiter} John"'
            )
        row = {name: (record[name] or "").strip() for name in columns}
        if not all(row.values()):
            raise ValueError(f"{table} has no {expected} in line {number}: {record}")
        key = row[columns[0]]
        if key in rows:
            raise ValueError(f"{table} has {columns[0]} {key!r} twice: keep one row")
        rows[key] = row
    return list(rows.values())


def _declared_classes(table: Path) -> tuple[tuple[str, ...], dict[int, int]]:
    """Class names, and the class of each value, from classes.csv; 0 is background if it has no row."""
    names_of: dict[int, str] = {}
    for row in table_rows(table, ("value", "name")):
        if not row["value"].isdecimal() or int(row["value"]) >= 2**16:
            raise ValueError(f"{table} has value {row['value']!r}; use whole numbers from 0 to 65535")
        names_of[int(row["value"])] = row["name"]
    names_of.setdefault(0, "background")
    # without repetition, in the order of the values
    names = tuple(dict.fromkeys(names_of[value] for value in sorted(names_of)))
    if not 2 <= len(names) <= 256:
        raise ValueError(f"{table} declares {len(names)} classes with background; 2 to 256 are possible")
    return names, {value: names.index(name) for value, name in names_of.items()}


def _seen_classes(scans: Sequence[RawScan], on_file: OnFile) -> tuple[tuple[str, ...], dict[int, int]]:
    """Class names, and the class of each value, from the values in all masks; see the module."""
    files = [path for scan in scans for path in scan.masks.values()]
    first_with: dict[int, Path] = {}
    not_binary: list[tuple[Path, tuple[int, ...]]] = []
    for done, path in enumerate(files, start=1):
        try:
            values = mask_values(path)
        except ValueError:
            # reported when the scan is read
            continue
        finally:
            on_file(done, len(files))
        for value in values:
            first_with.setdefault(value, path)
        if not set(values) <= {0, 1} and not set(values) <= {0, 255}:
            not_binary.append((path, values))
    if not not_binary:
        return ("background", "foreground"), {0: 0, 1: 1, 255: 1}
    highest = max(first_with)
    remedy = "write classes.csv with columns value and name next to images"
    if highest >= _MAX_CLASSES:
        path, values = not_binary[0]
        shown = ", ".join(str(value) for value in values[:8]) + (", ..." if len(values) > 8 else "")
        raise ValueError(
            f"mask {path} holds {shown} (highest value of all masks: {highest}); without classes.csv, masks "
            f"must hold 0 and 1, 0 and 255, or classes from 0 to at most {_MAX_CLASSES - 1}: "
            f"threshold them, or {remedy}"
        )
    missing = [value for value in range(1, highest) if value not in first_with]
    if missing:
        raise ValueError(
            f"mask {first_with[highest]} holds {highest}, but no mask holds {missing[0]}: "
            f"if that is right, {remedy}"
        )
    names = ("background", *(f"class_{value}" for value in range(1, highest + 1)))
    return names, {value: value for value in range(highest + 1)}


def _is_nifti(scans: Sequence[RawScan]) -> bool:
    """Whether the files are NIfTI; a ValueError if only some are."""
    by_format: dict[bool, Path] = {}
    for scan in scans:
        for path in (*scan.image, *scan.masks.values()):
            by_format.setdefault(suffix_of(path) in NIFTI_SUFFIXES, path)
    if len(by_format) == 2:
        raise ValueError(
            f"NIfTI and pictures are mixed, such as {by_format[True]} and {by_format[False]}: "
            "the order of their axes differs; save all files in one format"
        )
    return True in by_format
