"""Whether a prepared dataset is complete and correct, what it contains, and how well its raters agree.

A problem makes the dataset unfit for training: a file that has changed, an impossible value, one image under
two patients. A warning is worth a look: images without contrast or with intensities of another kind, cases in
which nobody drew anything. All are collected in one pass, with one case in memory at a time. Agreement is
`labels.rater_agreement` over the cases with two raters or more. Nothing is written into the dataset.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from ..data.dataset import Dataset
from ..data.integrity import (
    enumerated,
    image_problem,
    kind_warnings,
    listed_arrays,
    manifest_problems,
    mask_problems,
    open_array,
    scan_problems,
    truth_problem,
    unlisted_files,
)
from ..data.manifest import Scan
from ..data.packing import unpack_case
from ..metrics.agreement import AgreementBatches, drawn_voxels
from ..runs.run import volume_problem

OnCase = Callable[[int, int], object]


@dataclass(frozen=True)
class CheckReport:
    """What `check_dataset` found; one row per case in the order of `dataset.cases`.

    foreground: share of the case's voxels in each foreground class, averaged over the raters of the case.
    empty: True if a rater looked at the case and drew nothing. agreement: Dice of each rater against the
    majority. pairwise: Dice of each rater against each other rater. Both have one row per scan, over all its
    slices, and are NaN for an absent rater, and for scans with a single rater. case_agreement: Dice against
    the majority, averaged over the raters of each case. readable: False if the image or the masks could not
    be read; then all other values of the case are NaN or False.
    """

    dataset: Dataset
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    foreground: Float[np.ndarray, "N foreground"]
    empty: Bool[np.ndarray, "N R"]
    agreement: Float32[Tensor, "scans R"]
    pairwise: Float32[Tensor, "scans R R"]
    case_agreement: Float32[Tensor, " N"]
    readable: Bool[np.ndarray, " N"]
    num_bytes: int

    def rater_agreement(self) -> Float32[Tensor, " R"]:
        """Mean Dice of each rater against the majority, over the scans; the paper reports their mean."""
        return self.agreement.nanmean(0)

    def agreement_with_others(self) -> Float32[Tensor, "scans R"]:
        """Mean Dice of each rater against the other raters of the scan."""
        diagonal = torch.eye(self.pairwise.shape[1], dtype=torch.bool)
        return self.pairwise.masked_fill(diagonal, torch.nan).nanmean(2)


def check_dataset(folder: Path, *, on_case: OnCase = lambda _, __: None) -> CheckReport:
    """The report on the dataset prepared in `folder`; on_case(done, total) is called after each case.

    A ValueError if the folder has no manifest that this version can read: then nothing can be checked.
    """
    dataset = Dataset(folder)
    checker = _Checker(dataset)
    problems = manifest_problems(dataset)
    owner_of = {digest: path.relative_to(folder).as_posix() for digest, path in listed_arrays(dataset)}
    first = 0
    for scan in dataset.manifest.scans:
        problems += checker.check_scan(scan, first, owner_of=owner_of, on_case=on_case)
        first += len(scan.case_names())
    shared, repeated = checker.duplicates()
    unlisted = unlisted_files(dataset)
    warnings = [*checker.warnings(), *repeated]
    unfit = volume_problem(dataset)
    if unfit is not None:
        warnings.append(unfit)
    if unlisted:
        warnings.append(f"{enumerated(unlisted, 'file')} in the folder that the manifest does not list")
    of_cases = checker.batches.finish()
    agreement = checker.scan_batches.finish() if dataset.has_slices else of_cases
    paths = [dataset.folder.manifest, *(path for _, path in listed_arrays(dataset))]
    return CheckReport(
        dataset,
        problems=(*problems, *shared),
        warnings=tuple(warnings),
        foreground=checker.foreground,
        empty=checker.empty,
        agreement=agreement.majority,
        pairwise=agreement.pairwise,
        case_agreement=of_cases.majority.nanmean(1),
        readable=checker.readable,
        num_bytes=sum(path.stat().st_size for path in paths if path.is_file()),
    )


class _Checker:
    """Checks the scans of a dataset one after the other and collects their statistics."""

    def __init__(self, dataset: Dataset) -> None:
        num_cases, num_raters = dataset.present.shape
        num_classes = dataset.num_classes
        self.dataset = dataset
        self.foreground = np.full((num_cases, num_classes - 1), np.nan)
        self.empty = np.zeros((num_cases, num_raters), dtype=bool)
        self.readable = np.zeros(num_cases, dtype=bool)
        self.batches = AgreementBatches(num_cases, num_raters, num_classes=num_classes)
        self.scan_batches = AgreementBatches(len(dataset.manifest.scans), num_raters, num_classes=num_classes)
        # what the raters drew in the slices of the scan that is being read
        self._drawn: list[np.ndarray] = []
        self._constant: list[str] = []
        self._dtype_of: dict[str, str] = {}
        self._cases_of_image: dict[bytes, list[int]] = defaultdict(list)

    def check_scan(
        self, scan: Scan, first: int, *, owner_of: Mapping[str, str], on_case: OnCase
    ) -> list[str]:
        """The problems of a scan whose first case has the number `first`."""
        manifest, folder = self.dataset.manifest, self.dataset.folder
        problems = scan_problems(manifest, scan)
        if problems:
            on_case(first + len(scan.case_names()), len(self.dataset))
            return problems
        arrays: dict[str, np.ndarray] = {}
        for kind in scan.arrays:
            array, array_problems = open_array(folder, manifest, scan, kind, owner_of=owner_of)
            problems += array_problems
            if array is not None:
                arrays[kind] = array
        if "images" in arrays:
            self._dtype_of[scan.name] = arrays["images"].dtype.name
        self._drawn.clear()
        for number, name in enumerate(scan.case_names(), start=first):
            rows = {kind: np.array(array[number - first]) for kind, array in arrays.items()}
            problems += [f"case {name}: {problem}" for problem in self._check_case(number, rows)]
            on_case(number + 1, len(self.dataset))
        if scan.slices is not None and len(self._drawn) == len(scan.slices):
            drawn = np.concatenate(self._drawn, axis=1)
            self.scan_batches.add(manifest.scans.index(scan), drawn, present=self.dataset.present[first])
        return problems

    def _check_case(self, number: int, rows: Mapping[str, np.ndarray]) -> list[str]:
        problems = []
        if "images" in rows:
            problems.append(self._check_image(number, rows["images"]))
        if "masks" in rows:
            mask_problems = self._check_masks(number, rows["masks"])
            problems += mask_problems
            self.readable[number] = "images" in rows and not mask_problems
        if "truth" in rows:
            problems.append(truth_problem(rows["truth"]))
        return [problem for problem in problems if problem is not None]

    def _check_image(self, number: int, stored: np.ndarray) -> str | None:
        name, channels = self.dataset.cases[number].name, self.dataset.manifest.channels
        constant = [label for label, plane in zip(channels, stored, strict=True) if np.ptp(plane) == 0]
        if constant:
            self._constant.append(name if len(channels) == 1 else f"{name} {' '.join(constant)}")
        # two black images are not a leak, and have a warning of their own
        if len(constant) < len(channels):
            digest = hashlib.sha256(f"{stored.dtype}{stored.shape}".encode())
            digest.update(np.ascontiguousarray(stored).data)
            self._cases_of_image[digest.digest()].append(number)
        return image_problem(stored)

    def _check_masks(self, number: int, packed: np.ndarray) -> list[str]:
        manifest, space = self.dataset.manifest, self.dataset.cases[number].shape
        present = self.dataset.present[number]
        classes = unpack_case(packed, width=space[-1])
        problems = mask_problems(packed, classes, manifest.class_names)
        drawn = drawn_voxels(classes)
        absent = [
            rater
            for rater, is_present, voxels in zip(manifest.raters, present, drawn, strict=True)
            if not is_present and voxels.any()
        ]
        if absent:
            problems.append(
                f"{', '.join(absent)} did not look at it according to the manifest, but the mask is not empty"
            )
        if problems:
            return problems
        # one rater at a time: bincount needs eight bytes per voxel
        counts = [np.bincount(voxels, minlength=self.dataset.num_classes) for voxels in drawn[present]]
        self.foreground[number] = np.mean(counts, axis=0)[1:] / math.prod(space)
        self.empty[number] = present & ~drawn.any(axis=1)
        if present.sum() > 1:
            self.batches.add(number, drawn, present=present)
            self._drawn.append(drawn)
        return []

    def warnings(self) -> list[str]:
        """Warnings about all cases that were checked."""
        dataset = self.dataset
        warnings = []
        if self._constant:
            warnings.append(f"{enumerated(self._constant, 'image')} with a single grey value")
        warnings += kind_warnings(dataset.manifest.scans, self._dtype_of)
        present = dataset.present & self.readable[:, None]
        blank = [
            case.name
            for case, is_present, empty in zip(dataset.cases, present, self.empty, strict=True)
            if is_present.any() and (empty == is_present).all()
        ]
        if blank:
            warnings.append(f"{enumerated(blank, 'case')} in which no rater drew anything")
        for rater, is_present, empty in zip(dataset.manifest.raters, present.T, self.empty.T, strict=True):
            if is_present.any() and (empty == is_present).all():
                warnings.append(f"rater {rater} drew nothing in any of {is_present.sum()} cases")
        return warnings

    def duplicates(self) -> tuple[list[str], list[str]]:
        """Problems: the same image under several patients. Warnings: several times under one patient."""
        shared, repeated = [], []
        for numbers in self._cases_of_image.values():
            if len(numbers) < 2:
                continue
            cases = [self.dataset.cases[number] for number in numbers]
            if len({case.patient for case in cases}) > 1:
                names = ", ".join(f"{case.name} (patient {case.patient})" for case in cases[:5])
                more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
                shared.append(f"the same image under two patients would leak between folds: {names}{more}")
            else:
                repeated.append(
                    f"{enumerated([case.name for case in cases], 'case')} of patient {cases[0].patient} "
                    "have the same image"
                )
        return shared, repeated
