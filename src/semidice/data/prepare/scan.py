"""Prepares one scan: reads, converts and writes it, or takes it over from an interrupted run.

A scan is finished when its record exists, which is written after its arrays. An interrupted run is continued
by taking over each finished scan whose raw files and arrays still have the SHA-256 of the record. Other scans
are prepared again, so an array that was lost with the power does no harm.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...limits import read_bytes
from ...paths import DatasetFolder, UnfinishedDataset, atomic_write, check_name, file_hash, write_error
from ..intensities import stored_mean_std
from ..manifest import Kind, Record, Scan
from ..sources.raw import RawDataset, RawScan
from ..sources.scan import ScanArrays, read_scan
from .convert import StoredScan, convert_scan


class CannotWriteError(Exception):
    """A file cannot be written; then other scans would fail as well."""


@dataclass(frozen=True)
class Job:
    """The dataset to prepare, with the options to use and without its scans, and the folder to work in."""

    raw: RawDataset
    folder: UnfinishedDataset


class FinishedScan(Record):
    """The record of a finished scan.

    raw, inputs: name, patient and files of the scan, and the SHA-256 of each file.
    scan: its entry in the manifest; None if no slice became a case.
    """

    raw: str
    inputs: dict[str, str]
    scan: Scan | None


@dataclass(frozen=True)
class ScanOutcome:
    """The record of a finished scan, or its problem.

    taken_over: an earlier run finished it. cannot_write: the problem is not the scan but the disk.
    """

    finished: FinishedScan | None = None
    problem: str = ""
    taken_over: bool = False
    cannot_write: bool = False


def prepare_scan(job: Job, scan: RawScan) -> ScanOutcome:
    """Prepare one scan in the job's folder; every error becomes the problem of the outcome."""
    try:
        check_name(scan.name)
        record = _earlier_record(job, scan)
        if record is not None:
            return ScanOutcome(record, taken_over=True)
        arrays, stored = _read_and_convert(job.raw, scan)
        return ScanOutcome(_write(job, scan, arrays, stored))
    except CannotWriteError as error:
        return ScanOutcome(problem=str(error), cannot_write=True)
    # any error: one bad file must not stop the other scans
    except Exception as error:
        return ScanOutcome(problem=f"{scan.name}: {_reason(error)}")


def verify_scan(job: Job, dataset: DatasetFolder, pair: tuple[RawScan, Scan | None]) -> str:
    """How a scan of a finished dataset differs from what would be prepared now; "" if it does not.

    pair: the scan, and its entry in the manifest; None if it was left out.
    """
    raw_scan, scan = pair
    try:
        if scan is None:
            with suppress(Exception):
                if _read_and_convert(job.raw, raw_scan)[1] is not None:
                    return f"{raw_scan.name}: it is not in the dataset, but can be prepared now"
            return ""
        if scan.patient != raw_scan.patient:
            return f"{scan.name}: the patient was {scan.patient} and is now {raw_scan.patient}"
        inputs = _input_hashes(job.raw.root, raw_scan)
        for name in sorted(inputs.keys() | scan.inputs.keys()):
            if inputs.get(name) != scan.inputs.get(name):
                return f"{scan.name}: {name} was changed, added or removed since"
        for kind, digest in scan.arrays.items():
            path = dataset.array(kind, scan.name)
            if file_hash(path) != digest:
                return f"{scan.name}: {path.relative_to(dataset.path)} is not the file that was prepared"
        dtype = np.load(dataset.array("images", scan.name), mmap_mode="r", allow_pickle=False).dtype
        if (dtype == np.uint8) != job.raw.options.keep_bytes:
            return (
                f"{scan.name}: its intensities were stored as {dtype}, and would now be scaled in another way"
            )
    except Exception as error:
        return f"{raw_scan.name}: {_reason(error)}"
    return ""


def _input_hashes(root: Path, scan: RawScan) -> dict[str, str]:
    """SHA-256 of a scan's files by their path in the raw folder."""
    return {
        path.relative_to(root).as_posix(): file_hash(path) for path in (*scan.image, *scan.masks.values())
    }


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a CannotWriteError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        # not error.filename: it may be a temporary file, which the user does not know
        raise CannotWriteError(str(write_error(path, error))) from error


def _earlier_record(job: Job, scan: RawScan) -> FinishedScan | None:
    """The record of a scan that an earlier run finished, if nothing has changed since."""
    try:
        record = FinishedScan.model_validate_json(read_bytes(job.folder.record(scan.name)))
        root = job.raw.root
        if record.raw != _description(root, scan) or record.inputs != _input_hashes(root, scan):
            return None
        for kind, digest in record.scan.arrays.items() if record.scan is not None else ():
            if file_hash(job.folder.dataset.array(kind, scan.name)) != digest:
                return None
    # a record or an array that is missing or damaged
    except (OSError, ValueError):
        return None
    return record


def _read_and_convert(raw: RawDataset, scan: RawScan) -> tuple[ScanArrays, StoredScan | None]:
    arrays = read_scan(raw, scan)
    try:
        stored = convert_scan(
            arrays, options=raw.options, raters=raw.raters, num_classes=len(raw.class_names)
        )
    except ValueError as error:
        # the conversion does not know the name of the file
        files = ", ".join(map(str, scan.image)) or "its image"
        if raw.class_of_label is not None:
            files = f"series in {scan.image[0].parent}"
        raise ValueError(f"{files}: {error}") from error
    return arrays, stored


def _write(job: Job, scan: RawScan, arrays: ScanArrays, stored: StoredScan | None) -> FinishedScan:
    """Write the arrays of a scan, then its record."""
    inputs = dict(sorted(arrays.inputs.items()))
    entry = None
    if stored is not None:
        affine = None if arrays.affine is None else tuple(tuple(map(float, row)) for row in arrays.affine)
        entry = Scan(
            name=scan.name,
            patient=scan.patient,
            slices=stored.slices,
            shape=stored.images.shape[2:],
            spacing_mm=stored.spacing_mm,
            affine=affine,
            raw_shape=arrays.image.shape[1:],
            raters=arrays.raters,
            inputs=inputs,
            arrays=_write_arrays(job.folder.dataset, scan.name, stored),
            **stored_mean_std(stored.images)._asdict(),
        )
    finished = FinishedScan(raw=_description(job.raw.root, scan), inputs=inputs, scan=entry)
    path = job.folder.record(scan.name)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path, durable=False) as temp_path:
            temp_path.write_text(finished.model_dump_json(), encoding="utf-8")
    return finished


def _write_arrays(folder: DatasetFolder, name: str, stored: StoredScan) -> dict[Kind, str]:
    arrays: dict[Kind, np.ndarray] = {"images": stored.images, "masks": stored.masks}
    if stored.truth is not None:
        arrays["truth"] = stored.truth
    digests: dict[Kind, str] = {}
    for kind, array in arrays.items():
        path = folder.array(kind, name)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path, durable=False) as temp_path:
                with temp_path.open("wb") as file:
                    np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                digests[kind] = file_hash(temp_path)
    return digests


def _description(root: Path, scan: RawScan) -> str:
    """Everything the source says about a scan, without the content of its files."""
    files = {rater: path.relative_to(root).as_posix() for rater, path in scan.masks.items()}
    image = [path.relative_to(root).as_posix() for path in scan.image]
    return json.dumps([scan.name, scan.patient, image, files, scan.number])


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory: use fewer --workers"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    if isinstance(error, ValueError):
        return str(error)
    # unexpected, so its type may be the best hint
    return f"{type(error).__name__}: {error}"
