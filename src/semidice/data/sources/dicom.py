"""DICOM: CT or MR series, and one segmentation (SEG) per rater and series, in any folders.

Files are found by their content. A series is the images of one SeriesInstanceUID. A segmentation belongs to
the series that it refers to, or else to the series of its source images. A rater without a segmentation did
not look at the series. The patient is the PatientID; no name of a patient is read here.

    case      PatientID, and eight digits of the SHA-256 of the SeriesInstanceUID: the same in `predict`
    rater     ContentCreatorName, or else SeriesDescription, or else the folder of the segmentation: the first
              of the three that all segmentations have and that tells those of one series apart
    class     the segment's label, in the order of segment numbers; or by RAW/classes.csv, with columns label
              and name: labels with one name are one class
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...extras import need
from ..manifest import MAX_CLASSES, PrepareOptions
from .dicom_files import (
    IMAGE_CLASSES,
    SEGMENTATION_CLASS,
    is_dicom,
    read_header,
    read_segmentation,
    read_series,
    reading,
    segment_labels,
)
from .folder import OnFile, table_rows
from .raw import (
    RawDataset,
    RawScan,
    ScanArrays,
    check_spellings,
    natural_order,
    safe_name,
    walk,
)
from .scan import scan_arrays

# drawings that would be lost if they were ignored; other objects, such as reports, are ignored
_OTHER_DRAWINGS = {
    "1.2.840.10008.5.1.4.1.1.481.3": "an RT structure set",
    "1.2.840.10008.5.1.4.1.1.66.5": "a surface segmentation",
    "1.2.840.10008.5.1.4.1.1.66.7": "a label map segmentation",
}
_SUFFIXES = (".dcm", ".dicom", ".ima")


@dataclass(frozen=True)
class Series:
    """The files of one series, in natural order. patient: "" if the files do not say."""

    uid: str
    modality: str
    patient: str
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Of its case, and of its results."""
        digits = hashlib.sha256(self.uid.encode()).hexdigest()[:8]
        return safe_name(f"{self.patient[:100] or 'series'}_{digits}")


@dataclass(frozen=True)
class Segmentation:
    """A segmentation, by its header. labels: of its segments by number. series: UIDs that it refers to."""

    path: Path
    creator: str
    description: str
    labels: Mapping[int, str]
    series: frozenset[str]


@dataclass(frozen=True)
class DicomFiles:
    """What a folder holds: series by their UID, and segmentations.

    problems: of files that cannot be read. unsupported: drawings of other kinds. One message each.
    """

    series: Mapping[str, Series]
    segmentations: tuple[Segmentation, ...]
    problems: tuple[str, ...]
    unsupported: tuple[str, ...]


# where the name of a rater is from, in this order
_RATER_NAMES: dict[str, Callable[[Segmentation], str]] = {
    "ContentCreatorName": lambda segmentation: segmentation.creator,
    "SeriesDescription": lambda segmentation: segmentation.description,
    "folder": lambda segmentation: segmentation.path.parent.name,
}


def find_dicom(raw: Path, on_file: OnFile) -> list[RawDataset]:
    """The dataset in a folder of DICOM files; on_file(done, total) is called for each file."""
    need("pydicom", "source dicom")
    found = find_files(raw, on_file=on_file)
    problems = [*found.problems, *found.unsupported]
    drawings: dict[str, list[Segmentation]] = defaultdict(list)
    for segmentation in found.segmentations:
        uids = segmentation.series & found.series.keys()
        series = found.series[next(iter(uids))] if len(uids) == 1 else None
        if series is None:
            problems.append(
                f"{segmentation.path} must refer to one CT or MR series in {raw}, but it refers to "
                f"{len(uids)}: add the images of its series, export it again with a reference, or remove it"
            )
        elif not series.patient:
            problems.append(
                f"the series in {series.files[0].parent} has no PatientID, so scans of one patient could be "
                "in several folds: add it"
            )
        else:
            drawings[series.uid].append(segmentation)
    usable = [found.series[uid] for uid in drawings]
    modalities = {series.modality: series.files[0].parent for series in usable}
    if len(modalities) > 1:
        kinds = [f"{modality} ({folder})" for modality, folder in sorted(modalities.items())]
        raise UserError(
            f"the series with segmentations are {' and '.join(kinds)}: prepare each from a folder of its own"
        )
    check_spellings(sorted(series.patient for series in usable), "the PatientIDs")
    origin, rater_of = _raters(drawings)
    names, class_of_label = _classes(raw, drawings, rater_of)
    scans = [
        RawScan(
            series.name,
            series.patient,
            series.files,
            {rater_of[drawn.path]: drawn.path for drawn in drawings[series.uid]},
        )
        for series in usable
    ]
    raters = tuple(sorted(set(rater_of.values()), key=natural_order))
    return [
        RawDataset(
            source="dicom",
            root=raw,
            read=_read_dicom,
            class_names=names,
            raters=raters,
            channels=tuple(modalities) or ("CT",),
            scans=tuple(sorted(scans, key=lambda scan: natural_order(scan.name))),
            options=PrepareOptions(slices="all"),
            problems=tuple(dict.fromkeys(problems)),
            num_unlabelled=len(found.series.keys() - drawings.keys()),
            num_axes=3,
            class_of=class_of_label,
            notes=(f"raters are named by {origin}: {', '.join(raters)}",),
        )
    ]


def _read_dicom(dataset: RawDataset, scan: RawScan) -> ScanArrays:
    if dataset.options.ignore_placement:
        raise UserError("source dicom puts masks where their positions say: leave out --ignore-placement")
    image = read_series(scan.image)
    class_of_label = dataset.class_of or {}
    masks = {rater: read_segmentation(path, image, class_of_label) for rater, path in scan.masks.items()}
    return scan_arrays(dataset, scan, image, masks)


def find_files(root: Path, *, on_file: OnFile = lambda _, __: None) -> DicomFiles:
    """The DICOM files below a folder, by their headers."""
    # by series: its files with UID, patient and modality
    images: dict[str, list[tuple[Path, str, str, str]]] = defaultdict(list)
    drawings: list[tuple[Path, Any]] = []
    problems: list[str] = []
    unsupported: list[str] = []
    paths = [path for _, files in walk(root) for path in files]
    for done, path in enumerate(paths, start=1):
        try:
            header = _header(path)
            if header is None:
                continue
            # pydicom decodes an element only when it is asked for: a damaged one fails here, or warns
            with reading(path):
                # an index of the files (DICOMDIR) has its class only in the meta information
                kind = str(header.get("SOPClassUID") or header.file_meta.get("MediaStorageSOPClassUID") or "")
                if kind in IMAGE_CLASSES:
                    patient = str(header.get("PatientID") or "").strip()
                    image = (path, str(header.SOPInstanceUID), patient, IMAGE_CLASSES[kind])
                    images[str(header.SeriesInstanceUID)].append(image)
                elif kind == SEGMENTATION_CLASS:
                    drawings.append((path, header))
                elif not kind:
                    raise ValueError("it has no SOPClassUID")
            if kind in _OTHER_DRAWINGS:
                unsupported.append(
                    f"{path} is {_OTHER_DRAWINGS[kind]}, which is not supported: convert it to a DICOM "
                    "segmentation (SEG), BINARY or FRACTIONAL, or remove it"
                )
        except UserError as error:
            problems.append(str(error))
        finally:
            on_file(done, len(paths))
    series_of_instance = {image[1]: uid for uid, files in images.items() for image in files}
    segmentations = []
    for path, header in drawings:
        try:
            with reading(path):
                segmentations.append(_segmentation(path, header, series_of_instance))
        except UserError as error:
            problems.append(str(error))
    series = {}
    for uid, files in images.items():
        kinds = {(modality, patient) for _, _, patient, modality in files}
        if len(kinds) == 1:
            series[uid] = Series(uid, *kinds.pop(), tuple(path for path, *_ in files))
        else:
            problems.append(
                f"the files of one series, such as {files[0][0]}, differ in PatientID or modality: export "
                "it again"
            )
    return DicomFiles(series, tuple(segmentations), tuple(problems), tuple(unsupported))


def _header(path: Path) -> Any | None:
    """The header of a DICOM file; None for another file. A UserError if only its name says it is DICOM."""
    if is_dicom(path):
        return read_header(path)
    if path.suffix.lower() in _SUFFIXES:
        raise UserError(f"{path} is not a DICOM file: it has no DICM at byte 128; copy or export it again")
    return None


def _segmentation(path: Path, header: Any, series_of_instance: Mapping[str, str]) -> Segmentation:
    declared = {str(item.SeriesInstanceUID) for item in header.get("ReferencedSeriesSequence") or ()}
    if not declared:
        declared = {series_of_instance[uid] for uid in _sources(header) if uid in series_of_instance}
    return Segmentation(
        path=path,
        # the parts of a person's name are separated by ^
        creator=" ".join(str(header.get("ContentCreatorName") or "").replace("^", " ").split()),
        description=str(header.get("SeriesDescription") or "").strip(),
        labels=segment_labels(header),
        series=frozenset(declared),
    )


def _sources(header: Any) -> Iterator[str]:
    """UIDs of the images that the frames of a segmentation were drawn on."""
    frames = header.get("PerFrameFunctionalGroupsSequence") or ()
    for groups in (*frames, *(header.get("SharedFunctionalGroupsSequence") or ())):
        for derivation in groups.get("DerivationImageSequence") or ():
            for source in derivation.get("SourceImageSequence") or ():
                yield str(source.ReferencedSOPInstanceUID)


def _raters(drawings: Mapping[str, Sequence[Segmentation]]) -> tuple[str, dict[Path, str]]:
    """Where the raters' names are from, and the rater of each segmentation; a UserError if none fits."""
    repeated: list[str] = []
    for origin, name_of in _RATER_NAMES.items():
        pairs = [(uid, drawn) for uid, group in drawings.items() for drawn in group]
        counts = Counter((uid, name_of(drawn).casefold()) for uid, drawn in pairs)
        if all(name_of(drawn) for _, drawn in pairs) and max(counts.values(), default=1) == 1:
            names = {drawn.path: name_of(drawn) for _, drawn in pairs}
            check_spellings(sorted(names.values()), f"the raters named by {origin}")
            return origin, names
        repeated = [str(drawn.path) for uid, drawn in pairs if counts[uid, name_of(drawn).casefold()] > 1]
    raise UserError(
        f"{' and '.join(repeated[:2])} are segmentations of one series, and neither ContentCreatorName nor "
        "SeriesDescription nor their folders name different raters: put the files of each rater into a "
        "folder with the rater's name, and all segments of a rater into one file"
    )


def _classes(
    raw: Path, drawings: Mapping[str, Sequence[Segmentation]], rater_of: Mapping[Path, str]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Names of the classes, and the class of each segment label; a UserError names a conflict."""
    numbers: dict[str, int] = {}
    labels_of: dict[str, set[str]] = defaultdict(set)
    for drawn in (drawn for group in drawings.values() for drawn in group):
        for number, label in drawn.labels.items():
            numbers[label] = min(number, numbers.get(label, number))
        labels_of[rater_of[drawn.path]] |= set(drawn.labels.values())
    table = raw / "classes.csv"
    if table.exists():
        name_of = {row["label"]: row["name"] for row in table_rows(table, ("label", "name"))}
        unknown = sorted(numbers.keys() - name_of.keys())
        if unknown:
            raise UserError(f"{table} has no row for label {unknown[0]!r} of a segment: add one")
    else:
        name_of = {label: label for label in sorted(numbers, key=lambda each: (numbers[each], each))}
        check_spellings(name_of, f"the segment labels in {raw}")
        _check_labels(labels_of, table)
    names = ("background", *dict.fromkeys(name for name in name_of.values() if not _is_background(name)))
    if drawings and not 2 <= len(names) <= MAX_CLASSES:
        raise UserError(f"the segments have {len(names)} classes with background: 2 to {MAX_CLASSES} can be")
    return names, {label: 0 if _is_background(name) else names.index(name) for label, name in name_of.items()}


def _is_background(name: str) -> bool:
    return name.casefold() == "background"


def _check_labels(labels_of: Mapping[str, set[str]], table: Path) -> None:
    """A UserError if raters seem to call one structure by different labels."""
    for rater, other in combinations(sorted(labels_of, key=natural_order), 2):
        only = [sorted(labels_of[a] - labels_of[b]) for a, b in ((rater, other), (other, rater))]
        if all(only):
            raise UserError(
                f"rater {rater!r} never draws {only[1][0]!r} of rater {other!r}, who never draws "
                f"{only[0][0]!r}: the raters seem to use different labels; correct the labels, or write "
                f"{table} with columns label and name: labels of one name are one class"
            )
