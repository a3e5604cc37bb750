"""A user's own folder of images and masks, matched by file name.

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

from ...errors import UserError, reading
from ..manifest import MAX_CLASSES, PrepareOptions
from .files import NIFTI_SUFFIXES, SUFFIXES, channel_of, mask_values, read_header, stem_of, suffix_of
from .raw import (
    ALL_CHANNELS,
    CaseFiles,
    RawDataset,
    RawScan,
    check_spellings,
    is_folder,
    match,
    patient_note,
    usual_number,
    visible,
)
from .scan import read_scan

OnFile = Callable[[int, int], object]
# without classes.csv, masks with more values are grey images or have blurred edges
_MAX_SEEN = 32
# images of other formats are reported, because ignoring them would lose a case; other files are ignored
_OTHER_IMAGES = (".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".jp2", ".dcm", ".mha", ".mhd", ".nrrd", ".npy")


def find_folder(raw: Path, on_file: OnFile) -> list[RawDataset]:
    """The dataset in a user's folder; on_file(done, total) is called for each mask that is read."""
    images, raters, masks = raw / "images", raw / "raters", raw / "masks"
    if not is_folder(images) or not (is_folder(raters) or is_folder(masks)):
        content = ", ".join(path.name for path in visible(raw)[:10]) or "nothing"
        raise UserError(f"{raw} must hold {images} and {raters}/NAME (or {masks}); it holds {content}")
    if is_folder(raters) and is_folder(masks):
        raise UserError(f"{raw} holds both raters and masks: masks is for a single rater; remove one of them")
    folders = rater_folders(raters) if is_folder(raters) else {"masks": masks}
    _check_tables(raw)
    cases, file_problems = files_by_case(images, folders)
    with_patients, table_problems = _with_patients(cases, raw / "cases.csv")
    scans, problems, _ = match(with_patients)
    problems = (*file_problems, *problems, *table_problems)
    if not scans and not problems:
        raise UserError(f"{images} holds no image: use files {', '.join(SUFFIXES)}")
    _check_format(scans)
    table = raw / "classes.csv"
    names, class_of = _declared_classes(table) if table.exists() else _seen_classes(scans, on_file)
    num_axes, channels, options = layout_of(scans)
    return [
        RawDataset(
            source="folder",
            root=raw,
            read=read_scan,
            class_names=names,
            raters=tuple(folders),
            channels=channels,
            scans=scans,
            options=options,
            class_of=class_of,
            problems=problems,
            num_axes=num_axes,
            notes=tuple(filter(None, [patient_note(scans)])),
        )
    ]


def rater_folders(raters: Path) -> dict[str, Path]:
    """The folder of each rater below `raters`."""
    folders = {path.name: path for path in visible(raters) if is_folder(path)}
    if not folders:
        raise UserError(f"{raters} holds no folder: put the masks into {raters}/NAME/CASE.png")
    check_spellings(folders, f"the raters in {raters}")
    return folders


def files_by_case(
    images: Path, raters: Mapping[str, Path], suffixes: Sequence[str] = SUFFIXES, *, is_numbered: bool = False
) -> tuple[list[CaseFiles], list[str]]:
    """The files of each case by their names, and problems of other images and folders.

    Each case is a patient of its own. is_numbered: every CASE_0000 is a channel; otherwise it is one only if
    there is a mask CASE and no mask CASE_0000.
    """
    image_of, problems = _files_by_name(images, suffixes)
    masks_of: dict[str, dict[str, list[Path]]] = {}
    for rater, folder in raters.items():
        by_name, rater_problems = _files_by_name(folder, suffixes)
        problems += rater_problems
        if not by_name:
            problems.append(f"rater {rater!r} has no mask in {folder}: add some, or remove the folder")
        for name, paths in by_name.items():
            masks_of.setdefault(name, {})[rater] = paths
    folders = " or ".join(str(folder) for folder in raters.values())
    endings = f" ({', '.join(suffixes)})"
    cases: dict[str, CaseFiles] = {}

    def case_of(name: str) -> CaseFiles:
        image_at = f"{images / name}{'_0000' * is_numbered}{endings}"
        return cases.setdefault(name, CaseFiles(name, name, image_at, f"{name} in {folders}"))

    for name, paths in image_of.items():
        channel = channel_of(name)
        if channel is not None and (is_numbered or (name not in masks_of and channel[0] in masks_of)):
            case_of(channel[0]).channels[channel[1]] = paths
        else:
            case_of(name).channels[ALL_CHANNELS] = paths
    for name, masks in masks_of.items():
        case_of(name).masks = masks
    return list(cases.values()), problems


def _files_by_name(folder: Path, suffixes: Sequence[str]) -> tuple[dict[str, list[Path]], list[str]]:
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


def layout_of(
    scans: Sequence[RawScan], *, num_axes: int | None = None
) -> tuple[int, tuple[str, ...], PrepareOptions]:
    """Number of spatial axes, names of the channels, and options, by the headers that can be read.

    Volumes become slices along the axis that counts slices in their format: the last in NIfTI. 8-bit pictures
    keep their bits if all images are such. num_axes: if it is known.
    """
    axes_of: list[int] = []
    channels_of: list[int] = []
    num_volumes, keep_bytes = 0, bool(scans)
    for scan in scans:
        try:
            image, *others = map(read_header, scan.image)
            mask = read_header(next(iter(scan.masks.values())))
        except UserError:
            # reported when the scan is read
            continue
        keep_bytes &= all(header.is_byte_picture for header in (image, *others))
        is_multichannel = len(image.space) == len(mask.space) + 1 and image.space[:-1] == mask.space
        axes_of.append(len(mask.space))
        num_volumes += len(mask.shape) > 2
        in_file = image.space[-1] if is_multichannel else image.colours
        channels_of.append(len(scan.image) if others else in_file)
    # what most scans have; a scan that differs is reported when it is read
    num_axes = num_axes or max(usual_number(axes_of), 2)
    if num_axes == 2 and any(axes > 2 for axes in axes_of) and num_volumes == len(axes_of):
        # volumes of one slice, which look like images, among others
        num_axes = 3
    if num_axes > 3:
        raise UserError(f"masks must have 2 axes, or 3 for volumes; got {num_axes} in {scans[0].masks}")
    num_channels = usual_number(channels_of) or 1
    names = tuple(f"channel_{number}" for number in range(1, num_channels + 1))
    if num_channels == 1:
        names = ("intensity",)
    elif num_channels == 3 and all(len(scan.image) == 1 for scan in scans):
        names = ("red", "green", "blue")
    options = PrepareOptions(keep_bytes=keep_bytes)
    if num_axes == 3:
        is_nifti = any(suffix_of(scan.image[0]) in NIFTI_SUFFIXES for scan in scans)
        options = PrepareOptions(keep_bytes=keep_bytes, slices="all", slice_axis=2 if is_nifti else 0)
    return num_axes, names, options


def _check_tables(raw: Path) -> None:
    """A UserError for a file that was meant as cases.csv or classes.csv and would be ignored."""
    paths = visible(raw)
    for table in ("cases", "classes"):
        near = [path for path in paths if path.name.casefold().split(".")[0] == table and path.is_file()]
        if near and f"{table}.csv" not in [path.name for path in near]:
            raise UserError(f"{near[0]} would be ignored: save it as {raw / table}.csv, or rename it")


def _with_patients(cases: Sequence[CaseFiles], table: Path) -> tuple[list[CaseFiles], list[str]]:
    """Cases with the patients of cases.csv, and problems; cases without a row are left out.

    No case is returned if the table cannot be read: a guess could put one patient into two folds.
    """
    # a broken link is a problem, no table is not
    if not os.path.lexists(table):
        return list(cases), []
    patients: dict[str, str] = {}
    try:
        for row in table_rows(table, ("case", "patient")):
            case = unicodedata.normalize("NFC", stem_of(Path(row["case"])))
            if patients.setdefault(case, row["patient"]) != row["patient"]:
                raise UserError(f"{table} has two patients for case {case!r}: keep one row")
        check_spellings(patients.values(), f"{table} has patients")
    except UserError as error:
        return [], [str(error)]
    missing = [
        f"{table} has no row for case {case.name!r}: add one" for case in cases if case.name not in patients
    ]
    return [replace(case, patient=patients[case.name]) for case in cases if case.name in patients], missing


def table_rows(table: Path, columns: tuple[str, str]) -> list[dict[str, str]]:
    """Rows of a CSV table with these columns, separated by commas or semicolons; empty rows are left out.

    A value may occur only once in the first column.
    """
    with reading(table, "save it as CSV in UTF-8"):
        lines = table.read_text(encoding="utf-8-sig").splitlines()
        # Excel may write the separator into a line of its own
        declared = lines.pop(0)[4:5] if lines and lines[0].lower().startswith("sep=") else ""
        header = lines[0].lower() if lines else ""
        delimiter = declared or (";" if ";" in header and "," not in header else ",")
        rows = csv.reader([header, *lines[1:]], delimiter=delimiter, skipinitialspace=True, strict=True)
        names, *records = [[cell.strip() for cell in row] for row in rows] or [[]]
    expected = " and ".join(columns)
    if not any(map(any, records)) or not set(columns) <= set(names):
        raise UserError(f"{table} needs columns {expected}, and a row; its first line is {header.strip()!r}")
    for name in columns:
        if names.count(name) > 1:
            raise UserError(f"{table} has {names.count(name)} columns {name}: keep one, or rename the others")
    found: dict[str, dict[str, str]] = {}
    for number, record in enumerate(records, start=2):
        if not any(record):
            continue
        if len(record) > len(names):
            raise UserError(
                f"{table} has more cells than columns in line {number}, {record}: put a text with a "
                f'{delimiter} in quotes, such as "Doe{delimiter} John"'
            )
        row = {name: dict(zip(names, record, strict=False)).get(name, "") for name in columns}
        if not all(row.values()):
            raise UserError(f"{table} has no {expected} in line {number}: {record}")
        key = row[columns[0]]
        if key in found:
            raise UserError(f"{table} has {columns[0]} {key!r} twice: keep one row")
        found[key] = row
    return list(found.values())


def _declared_classes(table: Path) -> tuple[tuple[str, ...], dict[int, int]]:
    """Class names, and the class of each value, from classes.csv; 0 is background if it has no row."""
    names_of: dict[int, str] = {}
    for row in table_rows(table, ("value", "name")):
        if not row["value"].isdecimal() or int(row["value"]) >= 2**16:
            raise UserError(f"{table} has value {row['value']!r}; use whole numbers from 0 to 65535")
        names_of[int(row["value"])] = row["name"]
    names_of.setdefault(0, "background")
    other = [value for value, name in names_of.items() if name.casefold() == "background"]
    if other and names_of[0].casefold() != "background":
        raise UserError(
            f"{table} names value {other[0]} background, but value 0 counts as the background: "
            "invert the masks"
        )
    # without repetition, in the order of the values
    names = tuple(dict.fromkeys(names_of[value] for value in sorted(names_of)))
    check_spellings(names, f"{table} has classes")
    if not 2 <= len(names) <= MAX_CLASSES:
        raise UserError(f"{table} declares {len(names)} classes with background; 2 to 256 are possible")
    return names, {value: names.index(name) for value, name in names_of.items()}


def _seen_classes(scans: Sequence[RawScan], on_file: OnFile) -> tuple[tuple[str, ...], dict[int, int]]:
    """Class names, and the class of each value, from the values in all masks; see the module."""
    files = [path for scan in scans for path in scan.masks.values()]
    first_with: dict[int, Path] = {}
    not_binary: list[tuple[Path, tuple[int, ...]]] = []
    for done, path in enumerate(files, start=1):
        try:
            values = mask_values(path)
        except UserError:
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
    if highest >= _MAX_SEEN:
        path, values = not_binary[0]
        shown = ", ".join(str(value) for value in values[:8]) + (", ..." if len(values) > 8 else "")
        raise UserError(
            f"mask {path} holds {shown} (highest value of all masks: {highest}); without classes.csv, masks "
            f"must hold 0 and 1, 0 and 255, or classes from 0 to at most {_MAX_SEEN - 1}: "
            f"threshold them, or {remedy}"
        )
    missing = [value for value in range(1, highest) if value not in first_with]
    if missing:
        raise UserError(
            f"mask {first_with[highest]} holds {highest}, but no mask holds {missing[0]}: "
            f"if that is right, {remedy}"
        )
    names = ("background", *(f"class_{value}" for value in range(1, highest + 1)))
    return names, {value: value for value in range(highest + 1)}


def _check_format(scans: Sequence[RawScan]) -> None:
    """A UserError if some files are NIfTI, and some are not."""
    files = [path for scan in scans for path in scan.files]
    # the first of each
    by_format = {suffix_of(path) in NIFTI_SUFFIXES: path for path in reversed(files)}
    if len(by_format) == 2:
        raise UserError(
            f"NIfTI and pictures are mixed, such as {by_format[True]} and {by_format[False]}: "
            "the order of their axes differs; save all files in one format"
        )
