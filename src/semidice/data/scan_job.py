"""One scan of a preparation: read, converted and written, or taken over from a run that was interrupted.

A scan is finished when its record is there, which is written after its arrays. It is taken over if the files
it was made from and the arrays have the SHA-256 in the record, and prepared again otherwise. So it does not
matter if a loss of power takes an array: that the bytes are on the disk is seen to when all are finished.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from ..paths import DatasetFolder, UnfinishedDataset, atomic_write, check_name
from .convert import StoredScan, convert_scan
from .manifest import Scan
from .options import PrepareOptions
from .raw import RawDataset, RawScan, ScanArrays

Reader = Callable[[RawDataset, RawScan], ScanArrays]
Kind = Literal["images", "masks", "truth"]


class CannotWriteError(Exception):
    """A file could not be written: no fault of the scan, and the next one would fare no better."""


@dataclass(frozen=True)
class ScanJob:
    """What is the same for all scans of a dataset; `raw` comes without them, as it goes to processes."""

    raw: RawDataset
    options: PrepareOptions
    folder: UnfinishedDataset
    reader: Reader


class FinishedScan(BaseModel):
    """The record of a finished scan.

    scan: its entry in the manifest; None if no slice of it became a case.
    count, total, squares: stored intensities of each channel, summed as whole numbers; `levels` means 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    raw: str
    inputs: dict[str, str]
    scan: Scan | None
    levels: int = 1
    count: int = 0
    total: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScanOutcome:
    """What became of a scan: finished, or a problem; `taken_over` if an earlier run had finished it.

    cannot_write: the problem is not the scan's.
    """

    finished: FinishedScan | None = None
    problem: str = ""
    taken_over: bool = False
    cannot_write: bool = False


def prepare_scan(job: ScanJob, scan: RawScan) -> ScanOutcome:
    """Prepare one scan into the job's folder; whatever goes wrong comes back as the outcome's problem."""
    try:
        check_name(scan.name)
        kept = _kept(job, scan)
        if kept is not None:
            return ScanOutcome(kept, taken_over=True)
        return ScanOutcome(_finish(job, scan))
    except CannotWriteError as error:
        return ScanOutcome(problem=str(error), cannot_write=True)
    # one odd file must not keep the others from being looked at
    except Exception as error:
        return ScanOutcome(problem=f"{scan.name}: {_reason(error)}")


def verify_scan(job: ScanJob, dataset: DatasetFolder, pair: tuple[RawScan, Scan | None]) -> str:
    """In what a finished dataset's scan differs from what would be prepared now; "" if in nothing."""
    raw_scan, scan = pair
    try:
        if scan is None:
            return _still_left_out(job, raw_scan)
        if scan.patient != raw_scan.patient:
            return f"{scan.name}: the patient was {scan.patient} and is now {raw_scan.patient}"
        inputs = input_hashes(job.raw.root, raw_scan)
        for name in sorted(inputs.keys() | scan.inputs.keys()):
            if inputs.get(name) != scan.inputs.get(name):
                return f"{scan.name}: {name} has changed since, or came or went"
        for kind, digest in scan.arrays.items():
            if file_hash(dataset.array(kind, scan.name)) != digest:
                return f"{scan.name}: {kind}/{scan.name}.npy is not the file that was prepared"
    except Exception as error:
        return f"{raw_scan.name}: {_reason(error)}"
    return ""


def _still_left_out(job: ScanJob, scan: RawScan) -> str:
    try:
        if _converted(job, scan)[1] is None:
            return ""
    except Exception:
        return ""
    return f"{scan.name}: it is not in the dataset, but can be prepared now"


def input_hashes(root: Path, scan: RawScan) -> dict[str, str]:
    """SHA-256 of a scan's files by their path in the raw folder."""
    return {
        path.relative_to(root).as_posix(): file_hash(path) for path in (*scan.image, *scan.masks.values())
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a CannotWriteError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        # not error.filename, which for a renamed or half-written file is one the user has never seen
        reason = error.strerror or str(error)
        raise CannotWriteError(f"cannot write {path}: {reason}; {_way_out(error.errno)}") from error


def _way_out(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room and run the same command again: it continues with the scans that are finished"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder you may write to"
    if number in (errno.EBUSY, errno.EXDEV):
        return "it may be a place where a disk is mounted: choose a folder in it"
    return "choose another folder, or run the same command again: it continues"


def _kept(job: ScanJob, scan: RawScan) -> FinishedScan | None:
    """The record of a scan that an earlier run finished, if nothing has changed since."""
    try:
        record = FinishedScan.model_validate_json(job.folder.record(scan.name).read_bytes())
        if record.raw != _description(job.raw.root, scan) or record.inputs != input_hashes(
            job.raw.root, scan
        ):
            return None
        arrays: Mapping[Kind, str] = record.scan.arrays if record.scan is not None else {}
        for kind, digest in arrays.items():
            if file_hash(job.folder.dataset.array(kind, scan.name)) != digest:
                return None
    # unreadable or half gone is as good as not there
    except (OSError, ValueError):
        return None
    return record


def _finish(job: ScanJob, scan: RawScan) -> FinishedScan:
    arrays, stored = _converted(job, scan)
    inputs = dict(sorted((arrays.inputs or input_hashes(job.raw.root, scan)).items()))
    raw = _description(job.raw.root, scan)
    if stored is None:
        finished = FinishedScan(raw=raw, inputs=inputs, scan=None)
    else:
        affine = None if arrays.affine is None else tuple(tuple(map(float, row)) for row in arrays.affine)
        entry = Scan(
            name=scan.name,
            patient=scan.patient,
            slices=stored.slices,
            shape=stored.shape,
            spacing_mm=stored.spacing_mm,
            affine=affine,
            raw_shape=arrays.image.shape[1:],
            raters=arrays.raters,
            inputs=inputs,
            arrays=_write_arrays(job.folder.dataset, scan.name, stored),
        )
        count, total, squares = _sums(stored.images)
        finished = FinishedScan(
            raw=raw,
            inputs=inputs,
            scan=entry,
            levels=stored.levels,
            count=count,
            total=total,
            squares=squares,
        )
    path = job.folder.record(scan.name)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path, durable=False) as temp_path:
            temp_path.write_text(finished.model_dump_json(), encoding="utf-8")
    return finished


def _converted(job: ScanJob, scan: RawScan) -> tuple[ScanArrays, StoredScan | None]:
    arrays = job.reader(job.raw, scan)
    try:
        stored = convert_scan(
            arrays, options=job.options, raters=job.raw.raters, num_classes=len(job.raw.class_names)
        )
    except ValueError as error:
        # read without complaint, so nobody has named the file yet
        files = ", ".join(map(str, scan.image)) or "its image"
        raise ValueError(f"{files}: {error}") from error
    return arrays, stored


def _write_arrays(folder: DatasetFolder, name: str, stored: StoredScan) -> dict[Kind, str]:
    arrays: dict[Kind, np.ndarray] = {"images": stored.images, "masks": stored.masks}
    if stored.truth is not None:
        arrays["truth"] = stored.truth
    digests: dict[Kind, str] = {}
    for kind, array in arrays.items():
        path = folder.array(kind, name)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path, durable=False) as temp_path, temp_path.open("wb") as file:
                hashed = _HashedFile(file)
                np.save(hashed, np.ascontiguousarray(array), allow_pickle=False)
        digests[kind] = hashed.digest.hexdigest()
    return digests


class _HashedFile:
    """A file for `np.save` that keeps the SHA-256 of what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _sums(images: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Values a channel, and the sum and the sum of squares of each, exact."""
    num_channels = images.shape[1]
    total, squares = [0] * num_channels, [0] * num_channels
    # case by case: the int64 copy of a whole scan may not fit, nor the squares of a thousand large slices
    for image in images:
        for number, channel in enumerate(image):
            values = channel.astype(np.int64)
            total[number] += int(values.sum())
            squares[number] += int(np.square(values).sum())
    return images.size // num_channels, tuple(total), tuple(squares)


def _description(root: Path, scan: RawScan) -> str:
    """All that a source says of a scan, apart from what is in its files."""
    files = {rater: path.relative_to(root).as_posix() for rater, path in scan.masks.items()}
    image = [path.relative_to(root).as_posix() for path in scan.image]
    return json.dumps([scan.name, scan.patient, image, files, scan.number])


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory for it: use fewer --workers"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    if isinstance(error, ValueError):
        return str(error)
    # not foreseen, so its kind may be all that helps
    return f"{type(error).__name__}: {error}"
