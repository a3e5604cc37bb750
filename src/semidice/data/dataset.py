"""A prepared dataset: cases by number, with their images, raters' masks and, for phantoms, the truth.

Opening a dataset reads no case; a case is read each time it is asked for (`data.stored`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from ..paths import DatasetFolder
from .intensities import INTENSITY_UNITS, MeanStd, pooled_mean_std, stored_mean_std
from .manifest import Kind, Manifest, Scan, read_manifest
from .packing import unpack_case
from .stored import StoredArray

if TYPE_CHECKING:
    from .storage import Storage


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
        scans = self.manifest.scans
        self.cases: tuple[Case, ...] = tuple(
            Case(scan, row) for scan in scans for row in range(scan.num_cases)
        )
        of_scan = [[rater in scan.raters for rater in self.manifest.raters] for scan in scans]
        self.present: Bool[np.ndarray, "N R"] = self.of_cases(of_scan)
        self.loaded: dict[str, Storage] = {}

    def __len__(self) -> int:
        return len(self.cases)

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
    def slice_axis(self) -> int:
        """The axis of a raw volume that counts its slices."""
        axis = self.manifest.options.get("slice_axis")
        return axis if axis in (0, 1, 2) else 2

    def array(self, kind: Kind, scan: Scan) -> StoredArray:
        """The open file of a scan's array; a ValueError names the file."""
        return StoredArray(self.folder.array(kind, scan.name))

    def stored(self, kind: Kind, number: int) -> np.ndarray:
        """A case's row of a stored array; a ValueError names the file."""
        case = self.cases[number]
        with self.array(kind, case.scan) as stored:
            return stored.read(case.row)

    def mean_std(self, cases: Sequence[int]) -> MeanStd:
        """Mean and standard deviation of each channel over the scans of these cases.

        All cases of a scan count, because they are of one patient and hence in the same fold.
        """
        names = {self.cases[number].scan.name for number in cases}
        return pooled_mean_std([scan for scan in self._measured_scans if scan.name in names])

    @cached_property
    def _measured_scans(self) -> tuple[Scan, ...]:
        """The scans with mean and std, which the manifest of an older semidice does not have."""
        scans = []
        for scan in self.manifest.scans:
            if scan.mean is None or scan.std is None:
                with self.array("images", scan) as stored:
                    measured = stored_mean_std(map(stored.read, range(scan.num_cases)))
                scan = scan.model_copy(update=measured._asdict())
            scans.append(scan)
        return tuple(scans)

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
        """Case numbers of case names; a ValueError names cases that do not exist."""
        number_of = {case.name: number for number, case in enumerate(self.cases)}
        missing = [name for name in names if name not in number_of]
        if missing:
            raise ValueError(f"{self.folder.path} has no case {', '.join(missing[:5])}")
        return [number_of[name] for name in names]
