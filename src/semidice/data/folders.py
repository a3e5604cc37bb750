"""Folders of images and of masks, matched by file name: a user's own, LIDC as PNG slices, the Decathlon's.

    FOLDER/images/CASE.png           or .tif, .tiff (several pages: a volume), .nii, .nii.gz
           raters/NAME/CASE.png      a folder a rater; no file: the rater did not look at the case
           masks/CASE.png            instead of raters/, where there is one rater
           cases.csv                 optional: columns case, patient; else each case is a patient of its own
           classes.csv               optional: columns value, name; values of one name are one class

Without classes.csv all masks are read to see what they hold: 0 and one of 1 and 255 are background and
foreground; 0 to C - 1 are classes class_1, class_2, ...; anything else is an error that asks for classes.csv.
Pictures and NIfTI are not mixed, as one counts rows first and the other columns.
"""

import csv
import json
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .listing import distinct_scans, is_folder, natural_order, visible
from .options import PrepareOptions
from .raw import RawDataset, RawScan
from .readers import NIFTI_SUFFIXES, SUFFIXES, file_shape, mask_values, stem_of, suffix_of

OnFile = Callable[[int, int], object]
# Without classes.csv, more values than this are a grey image or blurred edges rather than classes.
_MAX_CLASSES = 32
# Images that are not read: silence would lose a case. Other files, such as notes, are not looked at.
OTHER_IMAGES = (".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".jp2", ".dcm", ".mha", ".mhd", ".nrrd", ".npy")


def find_folder(raw: Path, *, on_file: OnFile) -> list[RawDataset]:
    """The dataset in a user's folder, see the module; on_file(done, total) as masks are looked through."""
    images, raters = _homes(raw)
    matched, problems = _matched(images, raters)
    named, wrong = _with_patients(matched, raw / "cases.csv")
    scans, same = distinct_scans(named)
    problems += wrong + same
    if not scans and not problems:
        raise ValueError(f"{images} holds no image: looked for {', '.join(SUFFIXES)}")
    is_nifti = _one_format(scans)
    table = raw / "classes.csv"
    names, class_of_value = _declared_classes(table) if table.exists() else _seen_classes(scans, on_file)
    num_axes, channels = space_and_channels(scans)
    slice_axis = 2 if is_nifti else 0
    return [
        RawDataset(
            name="",
            source="folder",
            root=raw,
            class_names=names,
            raters=tuple(raters),
            channels=channels,
            scans=scans,
            options=PrepareOptions(slices="all", slice_axis=slice_axis)
            if num_axes == 3
            else PrepareOptions(),
            class_of_value=class_of_value,
            problems=tuple(problems),
            num_axes=num_axes,
        )
    ]


def find_lidc(raw: Path) -> list[RawDataset]:
    """LIDC as slices: images/CASE.png, raters/1..4/CASE.png, and cases.csv, which says whose nodule it is."""
    images, raters = _homes(raw)
    if not (raw / "cases.csv").exists():
        raise ValueError(
            f"{raw} has no cases.csv with columns case and patient: without it, nodules of one patient would "
            f"come into several folds; use source folder if that is right"
        )
    matched, problems = _matched(images, raters)
    named, wrong = _with_patients(matched, raw / "cases.csv")
    scans, same = distinct_scans(named)
    return [
        RawDataset(
            name="",
            source="lidc",
            root=raw,
            class_names=("background", "nodule"),
            raters=tuple(raters),
            channels=("CT",),
            scans=scans,
            options=PrepareOptions(),
            problems=(*problems, *wrong, *same),
        )
    ]


def find_decathlon(raw: Path) -> list[RawDataset]:
    """A task of the Medical Segmentation Decathlon: dataset.json, imagesTr and labelsTr; channels last."""
    labels, channels = labels_by_value(task_header(raw))
    matched, problems = _matched(raw / "imagesTr", {"reference": raw / "labelsTr"})
    scans, same = distinct_scans(matched)
    return [
        RawDataset(
            name="",
            source="decathlon",
            root=raw,
            class_names=tuple(labels.values()),
            raters=("reference",),
            channels=channels,
            scans=scans,
            options=PrepareOptions(slices="all", slice_axis=2),
            class_of_value={value: index for index, value in enumerate(labels)},
            problems=(*problems, *same),
            num_axes=3,
        )
    ]


def task_header(raw: Path) -> Path:
    """The dataset.json of a folder that also has imagesTr and labelsTr; a ValueError says what is missing."""
    path = raw / "dataset.json"
    if not path.exists():
        inside = [folder.name for folder in visible(raw) if (folder / "dataset.json").exists()]
        hint = f"; one task is prepared at a time, such as {raw / inside[0]}" if inside else ""
        raise ValueError(f"{raw} has no dataset.json, imagesTr and labelsTr{hint}")
    for name in ("imagesTr", "labelsTr"):
        if not is_folder(raw / name):
            raise ValueError(f"{raw} has no folder {name}")
    return path


def labels_by_value(path: Path) -> tuple[dict[int, str], tuple[str, ...]]:
    """Names of the classes by value, and of the channels, from a dataset.json of the Decathlon."""
    header = None
    try:
        header = json.loads(path.read_bytes())
        labels = {int(value): str(name) for value, name in header["labels"].items()}
        channels = {int(number): str(name) for number, name in header["modality"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(header, dict) and "channel_names" in header:
            raise ValueError(f"{path} is a dataset of nnU-Net: use source nnunet") from error
        wanted = 'labels {"0": "background", "1": ...} and modality {"0": "MRI", ...}'
        raise ValueError(f"{path} cannot be read: {error!r}; it needs {wanted}") from error
    if 0 not in labels or len(labels) < 2 or not channels:
        raise ValueError(f"{path} needs label 0 and one more, and a modality; it has {labels} and {channels}")
    return dict(sorted(labels.items())), tuple(channels[number] for number in sorted(channels))


def _homes(raw: Path) -> tuple[Path, dict[str, Path]]:
    """The folder of images, and the folder of each rater."""
    images, raters, masks = raw / "images", raw / "raters", raw / "masks"
    if not is_folder(images) or not (is_folder(raters) or is_folder(masks)):
        there = ", ".join(path.name for path in visible(raw)[:10]) or "nothing"
        raise ValueError(f"looked for {images} and {raters}/NAME (or {masks}); {raw} holds {there}")
    if is_folder(raters) and is_folder(masks):
        raise ValueError(
            f"{raw} holds both raters and masks: masks is for one rater alone, remove one of them"
        )
    if is_folder(masks):
        return images, {"masks": masks}
    folders = {path.name: path for path in visible(raters) if is_folder(path)}
    if not folders:
        raise ValueError(f"{raters} holds no folder: masks are looked for in {raters}/NAME/CASE.png")
    return images, folders


def _matched(images: Path, raters: Mapping[str, Path]) -> tuple[list[RawScan], list[str]]:
    """A scan for each image that has a mask, its patient its own name, and what is wrong with the others."""
    image_of, problems = _by_case(images)
    masks_of: dict[str, dict[str, list[Path]]] = {}
    for rater, folder in raters.items():
        by_case, wrong = _by_case(folder)
        problems += wrong
        if not by_case:
            problems.append(f"rater {rater!r} has no mask in {folder}: add some, or remove the folder")
        for case, paths in by_case.items():
            masks_of.setdefault(case, {})[rater] = paths
    scans = []
    for case in sorted(image_of.keys() | masks_of.keys(), key=natural_order):
        pictures, by_rater = image_of.get(case, []), masks_of.get(case, {})
        twice = [paths for paths in [pictures, *by_rater.values()] if len(paths) > 1]
        if twice:
            files = " and ".join(str(path) for path in twice[0])
            problems.append(f"case {case!r} has two files, {files}: keep one")
        elif not pictures:
            mask = next(iter(by_rater.values()))[0]
            problems.append(
                f"mask {mask} has no image: looked for {images / case} with {', '.join(SUFFIXES)}"
            )
        elif not by_rater:
            looked = ", ".join(str(folder) for folder in raters.values())
            problems.append(f"image {pictures[0]} has no mask in {looked}: add one, or remove the image")
        else:
            masks = {rater: paths[0] for rater, paths in by_rater.items()}
            scans.append(RawScan(case, case, (pictures[0],), masks))
    return scans, problems


def _by_case(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """Files that can be read, by name without suffix, and what is wrong with others."""
    files: dict[str, list[Path]] = {}
    problems = []
    for path in visible(folder):
        if is_folder(path):
            problems.append(f"{path} is a folder: put its files into {folder} itself")
        elif suffix_of(path):
            # macOS writes an accent as a sign of its own
            files.setdefault(unicodedata.normalize("NFC", stem_of(path)), []).append(path)
        elif path.suffix.lower() in OTHER_IMAGES:
            problems.append(f"{path} is not read: convert it to one of {', '.join(SUFFIXES)}")
    return files, problems


def _with_patients(scans: Sequence[RawScan], table: Path) -> tuple[list[RawScan], list[str]]:
    """The scans with the patients of cases.csv, without those it does not name: none if it cannot be read.

    A guess could put one patient into two folds, also where scans with problems are to be left out.
    """
    # a link that leads nowhere is not the same as no table
    if not os.path.lexists(table):
        return list(scans), []
    try:
        rows = _rows(table, ("case", "patient"))
    except ValueError as error:
        return [], [str(error)]
    patients: dict[str, str] = {}
    for row in rows:
        case = unicodedata.normalize("NFC", stem_of(Path(row["case"])))
        if patients.setdefault(case, row["patient"]) != row["patient"]:
            return [], [f"{table} has two patients for case {case!r}: keep one row"]
    named = [
        RawScan(scan.name, patients[scan.name], scan.image, scan.masks)
        for scan in scans
        if scan.name in patients
    ]
    unnamed = [scan for scan in scans if scan.name not in patients]
    return named, [
        f"{table} has no row for case {scan.name!r} ({scan.image[0]}): add one" for scan in unnamed
    ]


def _rows(table: Path, columns: tuple[str, str]) -> list[dict[str, str]]:
    """Rows of a table with these columns, the first of them without repetition; commas or semicolons."""
    try:
        text = table.read_text(encoding="utf-8-sig")
        header = text.partition("\n")[0]
        delimiter = ";" if ";" in header and "," not in header else ","
        lines = [header.lower(), *text.splitlines()[1:]]
        rows = list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {table}: {error}; save it as CSV in UTF-8") from error
    wanted = " and ".join(columns)
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{table} needs columns {wanted}, and a row; its first line is {header.strip()!r}")
    seen: set[str] = set()
    kept = []
    for number, row in enumerate(rows, start=2):
        values = {name: (row[name] or "").strip() for name in columns}
        if not all(values.values()):
            raise ValueError(f"{table} has no {wanted} in line {number}: {row}")
        if values[columns[0]] in seen:
            raise ValueError(f"{table} has {columns[0]} {values[columns[0]]!r} twice: keep one row")
        seen.add(values[columns[0]])
        kept.append(values)
    return kept


def _declared_classes(table: Path) -> tuple[tuple[str, ...], dict[int, int]]:
    """Names, and the class of each value, from classes.csv; 0 is background unless it is named."""
    names_of: dict[int, str] = {}
    for row in _rows(table, ("value", "name")):
        if not row["value"].isdecimal() or int(row["value"]) >= 2**16:
            raise ValueError(
                f"{table} has value {row['value']!r}: whole numbers from 0 to 65535 are expected"
            )
        names_of[int(row["value"])] = row["name"]
    names_of.setdefault(0, "background")
    # a dict keeps the first place of each name
    names = tuple(dict.fromkeys(names_of[value] for value in sorted(names_of)))
    if not 2 <= len(names) <= 256:
        raise ValueError(f"{table} declares {len(names)} classes with background; 2 to 256 are expected")
    return names, {value: names.index(name) for value, name in names_of.items()}


def _seen_classes(scans: Sequence[RawScan], on_file: OnFile) -> tuple[tuple[str, ...], dict[int, int]]:
    """Names, and the class of each value, from the values in all masks; see the module."""
    files = [path for scan in scans for path in scan.masks.values()]
    first_with: dict[int, Path] = {}
    odd: list[tuple[Path, tuple[int, ...]]] = []
    for done, path in enumerate(files, start=1):
        try:
            values = mask_values(path)
        except ValueError:
            # whoever reads the scan says what is wrong with it
            continue
        finally:
            on_file(done, len(files))
        for value in values:
            first_with.setdefault(value, path)
        if not set(values) <= {0, 1} and not set(values) <= {0, 255}:
            odd.append((path, values))
    if not odd:
        return ("background", "foreground"), {0: 0, 1: 1, 255: 1}
    highest = max(first_with)
    way_out = "write classes.csv with columns value and name beside images"
    if highest >= _MAX_CLASSES:
        path, values = odd[0]
        shown = ", ".join(str(value) for value in values[:8]) + (", ..." if len(values) > 8 else "")
        raise ValueError(
            f"mask {path} holds {shown} (highest of all masks: {highest}); without classes.csv, masks hold "
            f"0 and 1, 0 and 255, or classes from 0 to at most {_MAX_CLASSES - 1}: "
            f"threshold them, or {way_out}"
        )
    missing = [value for value in range(1, highest) if value not in first_with]
    if missing:
        raise ValueError(
            f"mask {first_with[highest]} holds {highest}, but no mask holds {missing[0]}: "
            f"if that is right, {way_out}"
        )
    names = ("background", *(f"class_{value}" for value in range(1, highest + 1)))
    return names, {value: value for value in range(highest + 1)}


def _one_format(scans: Sequence[RawScan]) -> bool:
    """Whether the files are NIfTI; an error if some are and some are not."""
    by_format: dict[bool, Path] = {}
    for scan in scans:
        for path in (*scan.image, *scan.masks.values()):
            by_format.setdefault(suffix_of(path) in NIFTI_SUFFIXES, path)
    if len(by_format) == 2:
        raise ValueError(
            f"NIfTI and pictures are mixed, such as {by_format[True]} and {by_format[False]}: "
            f"their axes are in different order; save all in one format"
        )
    return True in by_format


def space_and_channels(scans: Sequence[RawScan]) -> tuple[int, tuple[str, ...]]:
    """Axes of space, and the names of channels, by the headers of the files that can be read."""
    found: set[tuple[int, int]] = set()
    for scan in scans:
        try:
            space, colours = file_shape(scan.image[0])
            drawn, _ = file_shape(next(iter(scan.masks.values())))
        except ValueError:
            # whoever reads the scan says what is wrong with it
            continue
        is_multichannel = len(space) == len(drawn) + 1 and space[:-1] == drawn
        found.add((len(drawn), space[-1] if is_multichannel else colours))
    # one volume of a single slice is still a volume; a scan that differs is named when it is read
    num_axes, num_channels = max(found, default=(2, 1))
    if num_axes > 3:
        raise ValueError(
            f"masks have {num_axes} axes, as in {scans[0].masks}; 2, or 3 for volumes, are expected"
        )
    if num_channels == 1:
        return max(num_axes, 2), ("intensity",)
    if num_channels == 3:
        return max(num_axes, 2), ("red", "green", "blue")
    return max(num_axes, 2), tuple(f"channel_{number}" for number in range(1, num_channels + 1))
