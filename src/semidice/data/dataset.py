"""A prepared dataset: cases by number, with their images, raters' masks and, for phantoms, the truth.

Opening a dataset reads no case; a case is read from its file each time it is asked for. Files are not
memory-mapped: pages of a map count as memory of the process while the map is open.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from ..errors import UserError, listing, reading
from ..paths import DatasetFolder, file_hash
from .intensities import INTENSITY_UNITS, MeanStd, pooled_mean_std
from .manifest import Kind, Manifest, Scan, manifest_digest, read_manifest
from .packing import num_planes, unpack_case

if TYPE_CHECKING:
    from .batches.storage import Storage


@dataclass(frozen=True, slots=True)
class Case:
    """One image to segment: row `row` of the arrays of its scan."""

    scan: Scan
    row: int

    @property
    def name(self) -> str:
        return self.scan.case_name(self.row)

    @property
    def patient(self) -> str:
        return self.scan.patient

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scan.shape


Unit = Literal["scan", "slice"]


class ScoredUnit(NamedTuple):
    """What is scored as one: the name of a scan or of one slice, and the numbers of its cases."""

    name: str
    cases: tuple[int, ...]


class Dataset:
    """The dataset prepared in `path`.

    cases: in the order of the manifest; a case number is an index into this tuple.
    present: bool (cases, R), which raters looked at each case.
    loaded: by device, the cases that `storage.shared_storage` has loaded.
    """

    def __init__(self, path: Path) -> None:
        self.folder = DatasetFolder(Path(path))
        self.manifest: Manifest = read_manifest(self.folder.path)
        self.folder.check_links()
        scans = self.manifest.scans
        self.cases: tuple[Case, ...] = tuple(
            Case(scan, row) for scan in scans for row in range(scan.num_cases)
        )
        of_scan = [[rater in scan.raters for rater in self.manifest.raters] for scan in scans]
        self.present: Bool[np.ndarray, "N R"] = self.of_cases(of_scan)
        self.loaded: dict[str, Storage] = {}

    def __len__(self) -> int:
        return len(self.cases)

    @cached_property
    def manifest_sha256(self) -> str:
        return manifest_digest(self.manifest)

    @cached_property
    def changed_masks(self) -> list[str]:
        """The scans whose file of masks is not the one that was prepared."""
        files = {scan.name: self.folder.array("masks", scan.name) for scan in self.manifest.scans}
        stored = {scan.name: scan.arrays["masks"] for scan in self.manifest.scans}
        return [name for name, path in files.items() if file_hash(path) != stored[name]]

    def files(self) -> list[Path]:
        """The file of every array."""
        return [self.folder.array(kind, scan.name) for scan in self.manifest.scans for kind in scan.arrays]

    def check_files(self) -> None:
        """A UserError if an array is missing, or not as long as it was prepared: a half-copied folder.

        `semidice check` also compares the hashes.
        """
        wrong = [
            str(path.relative_to(self.folder.path))
            for scan in self.manifest.scans
            for kind, num_bytes in scan.num_bytes.items()
            if not (path := self.folder.array(kind, scan.name)).is_file() or path.stat().st_size != num_bytes
        ]
        if wrong:
            raise UserError(
                f"{self.folder.path} has {listing(wrong, 'array')} that are missing or not complete: copy "
                "the folder again, or look at it with `semidice check` and prepare it again"
            )

    def of_cases(self, of_scans: Sequence[Any] | np.ndarray) -> np.ndarray:
        """One row for each case, from one for each scan."""
        counts = [scan.num_cases for scan in self.manifest.scans]
        repeated: np.ndarray = np.repeat(np.array(of_scans), counts, axis=0)
        return repeated

    @property
    def num_classes(self) -> int:
        return len(self.manifest.class_names)

    @property
    def num_channels(self) -> int:
        return len(self.manifest.channels)

    @property
    def has_slices(self) -> bool:
        """Whether volumes were cut into slices."""
        return any(scan.slices is not None for scan in self.manifest.scans)

    @cached_property
    def drawn_classes(self) -> tuple[bool, ...]:
        """Whether any rater drew each class in any case."""
        drawn = {0}.union(*(scan.drawn for scan in self.manifest.scans))
        return tuple(number in drawn for number in range(self.num_classes))

    def units(self, cases: Sequence[int], unit: Unit) -> list[ScoredUnit]:
        """The cases, or the scans that they are slices of, sorted by number."""
        numbers = sorted(set(cases))
        if unit == "slice":
            return [ScoredUnit(self.cases[number].name, (number,)) for number in numbers]
        of_scan: dict[str, list[int]] = {}
        for number in numbers:
            of_scan.setdefault(self.cases[number].scan.name, []).append(number)
        return [ScoredUnit(name, tuple(numbers)) for name, numbers in of_scan.items()]

    @property
    def num_axes(self) -> int:
        """Of space, of each case."""
        return len(self.cases[0].shape)

    @property
    def slice_axis(self) -> int:
        """The axis of a raw volume that counts its slices."""
        return self.manifest.options.slice_axis

    @property
    def image_dtype(self) -> str:
        """The type of the stored images, see `data.intensities`."""
        return "uint8" if self.manifest.options.keep_bytes else "int16"

    def row_of(self, kind: Kind, scan: Scan) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The type and shape of one case in a stored array, see `paths.DatasetFolder` and `data.packing`."""
        *rows, width = scan.shape
        if kind == "images":
            return np.dtype(self.image_dtype), (self.num_channels, *scan.shape)
        if kind == "truth":
            return np.dtype(np.float32), (self.num_classes, *scan.shape)
        planes = num_planes(self.num_classes)
        return np.dtype(np.uint8), (len(self.manifest.raters), planes, *rows, -(-width // 8))

    def stored(self, kind: Kind, number: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """A case's row of a stored array. out: contiguous, of the same type and shape; it is filled."""
        case = self.cases[number]
        dtype, shape = self.row_of(kind, case.scan)
        out = np.empty(shape, dtype) if out is None else out
        path = self.folder.array(kind, case.scan.name)
        advice = "run `semidice check`, then prepare the dataset again"
        with reading(path, advice), path.open("rb", buffering=0) as file:
            expected, num_bytes = case.scan.num_bytes.get(kind), file.seek(0, os.SEEK_END)
            if expected not in (None, num_bytes):
                raise ValueError(f"it has {num_bytes} bytes instead of {expected}")
            # the header before the rows has any length
            start = num_bytes - out.nbytes * (case.scan.num_cases - case.row)
            if start < 0:
                raise ValueError(
                    f"its {num_bytes} bytes are too few for {case.scan.num_cases} x {shape} of {dtype}"
                )
            file.seek(start)
            left = out.reshape(-1).view(np.uint8).data
            while left:
                # Linux reads at most 2 GB at once
                num_read = file.readinto(left)
                if not num_read:
                    raise ValueError(f"it ends {len(left)} bytes too early")
                left = left[num_read:]
        return out

    def mean_std(self, cases: Sequence[int]) -> MeanStd:
        """Mean and standard deviation of each channel over the scans of these cases.

        All cases of a scan count, because they are of one patient and hence in the same fold.
        """
        names = {self.cases[number].scan.name for number in cases}
        return pooled_mean_std([scan for scan in self.manifest.scans if scan.name in names])

    def image(self, number: int) -> Float32[np.ndarray, "channels *space"]:
        """Intensities of a case, in [0, 1]."""
        stored = self.stored("images", number)
        return stored.astype(np.float32) * np.float32(INTENSITY_UNITS[stored.dtype.name])

    def masks(self, number: int) -> UInt8[np.ndarray, "R *space"]:
        """Class maps of all raters of the dataset; zeros for a rater who did not look at the case."""
        return unpack_case(self.stored("masks", number), width=self.cases[number].shape[-1])

    def truth(self, number: int) -> Float32[np.ndarray, "C *space"] | None:
        """The true class probabilities of a case, if the source knows them."""
        if "truth" not in self.cases[number].scan.arrays:
            return None
        return np.array(self.stored("truth", number))

    def numbers_of(self, names: Sequence[str]) -> list[int]:
        """Case numbers of case names; a UserError names cases that do not exist."""
        number_of = {case.name: number for number, case in enumerate(self.cases)}
        missing = [name for name in names if name not in number_of]
        if missing:
            raise UserError(f"{self.folder.path} has no case {', '.join(missing[:5])}")
        return [number_of[name] for name in names]


_opened: list[tuple[str, Dataset]] = []


def open_dataset(path: Path) -> Dataset:
    """The complete dataset; the same object as the last time if its manifest is the same.

    So several trainings load its cases once, see `storage.shared_storage`.
    """
    folder = DatasetFolder(Path(path))
    # the text and not what it says: a manifest of 100 000 scans takes seconds to read
    text = folder.manifest.read_bytes() if folder.manifest.is_file() else b""
    key = f"{folder.path} {hashlib.sha256(text).hexdigest()}"
    if not _opened or _opened[0][0] != key:
        dataset = Dataset(path)
        dataset.check_files()
        _opened[:] = [(key, dataset)]
    return _opened[0][1]
