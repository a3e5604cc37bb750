"""Whether a prepared dataset is complete and correct, what it contains, and how well its raters agree.

A problem makes the dataset unfit for training: a file that has changed, one image under two patients. A
warning is worth a look: images without contrast or with intensities of another kind, cases in which nobody
drew anything, a rater whose masks are inverted or those of another rater. All are collected in one pass, with
one case in memory at a time. Agreement is
`labels.rater_agreement` over the cases with two raters or more. Nothing is written into the dataset.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from ..data.dataset import Dataset
from ..data.manifest import Kind, Scan
from ..errors import UserError, listing
from ..labels.makers import RaterAgreement, rater_agreement
from ..paths import file_hash, leads_outside
from ..runs.start import volume_problem
from ..statistics.agreement import drawn_voxels

OnCase = Callable[[int, int], object]
# organs fill less of an image
_MAX_FOREGROUND = 0.9
# a scan is unusual if its mean is further from the median scan's, in units of the median standard deviation,
# or if its standard deviation is a smaller share of the median one
_MAX_MEAN_DISTANCE = 3.0
_MIN_CONTRAST = 0.1


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
    problems: list[str] = []
    first = 0
    for scan in dataset.manifest.scans:
        problems += checker.check_scan(scan, first, on_case=on_case)
        first += scan.num_cases
    shared, repeated = checker.duplicates()
    known = {dataset.folder.manifest, *dataset.files()}
    files = (path for path in folder.rglob("*") if not path.is_dir() and path.name[:5] != ".lock")
    unlisted = sorted(path.relative_to(folder).as_posix() for path in files if path not in known)
    warnings = [*checker.warnings(), *repeated]
    unfit = volume_problem(dataset)
    if unfit is not None:
        warnings.append(unfit)
    if unlisted:
        warnings.append(f"{listing(unlisted, 'file')} in the folder that the manifest does not list")
    agreement = checker.of_scans if dataset.has_slices else checker.of_cases
    return CheckReport(
        dataset,
        problems=(*problems, *shared),
        warnings=tuple(warnings),
        foreground=checker.foreground,
        empty=checker.empty,
        agreement=agreement.majority,
        pairwise=agreement.pairwise,
        case_agreement=checker.of_cases.majority.nanmean(1),
        readable=checker.readable,
        num_bytes=sum(path.stat().st_size for path in known if path.is_file()),
    )


def array_problem(dataset: Dataset, scan: Scan, kind: Kind) -> str:
    """Why an array is not the file that was prepared; "" if it is, and then its values need no check."""
    path = dataset.folder.array(kind, scan.name)
    name = path.relative_to(dataset.folder.path)
    if leads_outside(dataset.folder.path, path):
        return f"{name} is a link that leads out of the dataset, and was not read: copy the file"
    try:
        digest = file_hash(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if digest == scan.arrays[kind]:
        return ""
    return f"{name} is not the file that was prepared (SHA-256 {digest[:12]}...): it was changed or swapped"


def kind_warnings(scans: Sequence[Scan]) -> list[str]:
    """Warnings about scans whose intensities are of another kind than those of the other scans."""
    means, stds = np.array([scan.mean for scan in scans]), np.array([scan.std for scan in scans])
    usual_mean, usual_std = np.median(means, axis=0), np.median(stds, axis=0)
    is_other = np.abs(means - usual_mean) > _MAX_MEAN_DISTANCE * usual_std
    is_other |= stds < _MIN_CONTRAST * usual_std
    others = [scan.name for scan, flags in zip(scans, is_other, strict=True) if flags.any()]
    return others and [
        f"intensities of {listing(others, 'scan')} are far from those of the other scans: "
        "look whether the raw files have the same unit and range"
    ]


class _Checker:
    """Checks the scans of a dataset one after the other and collects their statistics."""

    def __init__(self, dataset: Dataset) -> None:
        num_cases, num_raters = dataset.present.shape
        num_classes = dataset.num_classes
        self.dataset = dataset
        self.foreground = np.full((num_cases, num_classes - 1), np.nan)
        self.empty = np.zeros((num_cases, num_raters), dtype=bool)
        self.readable = np.zeros(num_cases, dtype=bool)
        self.of_cases, self.of_scans = (
            RaterAgreement(torch.full((each, num_raters), torch.nan), torch.full((each, *both), torch.nan))
            for both in [(num_raters, num_raters)]
            for each in (num_cases, len(dataset.manifest.scans))
        )
        # what the raters drew in the slices of the scan that is being read
        self._drawn: list[np.ndarray] = []
        self._constant: list[str] = []
        # of the voxels that each rater drew; and whether two raters drew the same
        self._share = np.full((num_cases, num_raters), np.nan)
        self._same = np.zeros((num_cases, num_raters, num_raters), dtype=bool)
        self._cases_of_image: dict[bytes, list[int]] = defaultdict(list)

    def check_scan(self, scan: Scan, first: int, *, on_case: OnCase) -> list[str]:
        """The problems of a scan whose first case has the number `first`."""
        dataset = self.dataset
        problems = [problem for kind in scan.arrays if (problem := array_problem(dataset, scan, kind))]
        self._drawn.clear()
        for number in range(first, first + scan.num_cases):
            # the values of a file that is not what was prepared mean nothing
            if not problems:
                try:
                    self._check_image(number, dataset.stored("images", number))
                    self._check_masks(number, dataset.masks(number))
                except UserError as error:
                    problems.append(str(error))
            on_case(number + 1, len(dataset))
        if self._drawn and scan.slices is not None and len(self._drawn) == len(scan.slices):
            drawn = np.concatenate(self._drawn, axis=1)
            self._compare(self.of_scans, dataset.manifest.scans.index(scan), drawn, dataset.present[first])
        return problems

    def _check_image(self, number: int, stored: np.ndarray) -> None:
        name, channels = self.dataset.cases[number].name, self.dataset.manifest.channels
        constant = [label for label, plane in zip(channels, stored, strict=True) if np.ptp(plane) == 0]
        if constant:
            self._constant.append(name if len(channels) == 1 else f"{name} {' '.join(constant)}")
        # two black images are not a leak, and have a warning of their own
        if len(constant) < len(channels):
            digest = hashlib.sha256(f"{stored.dtype}{stored.shape}".encode())
            digest.update(np.ascontiguousarray(stored).data)
            self._cases_of_image[digest.digest()].append(number)

    def _check_masks(self, number: int, classes: np.ndarray) -> None:
        present = self.dataset.present[number]
        drawn = drawn_voxels(classes)
        # one rater at a time: bincount needs eight bytes per voxel
        counts = [np.bincount(voxels, minlength=self.dataset.num_classes) for voxels in drawn[present]]
        shares = np.array(counts)[:, 1:] / classes[0].size
        self.foreground[number] = shares.mean(axis=0)
        self.empty[number] = present & ~drawn.any(axis=1)
        self._share[number, present] = shares.sum(axis=1)
        self._same[number] = [[(one == two).all() for two in drawn] for one in drawn]
        self.readable[number] = True
        if present.sum() > 1:
            self._compare(self.of_cases, number, drawn, present)
            self._drawn.append(drawn)

    def _rater_warnings(self) -> list[str]:
        """Raters whose masks look inverted, or copied from another rater."""
        raters, warnings = self.dataset.manifest.raters, []
        drew = self.dataset.present & self.readable[:, None] & ~self.empty
        for number, rater in enumerate(raters):
            own, others = self._share[drew[:, number]][:, number], np.delete(self._share, number, axis=1)
            is_most = own > _MAX_FOREGROUND
            # an absent rater is NaN, which is not below one half
            others = others[drew[:, number]]
            is_alone = (own > 0.5) & (others < 0.5).any(axis=1)
            has_others = ~np.isnan(others).all(axis=1)
            looks_inverted = (is_most | is_alone)[has_others] if has_others.any() else is_most
            if len(own) and looks_inverted.all():
                warnings.append(f"rater {rater} drew most of the voxels in every case: are they inverted?")
            elif is_most.any():
                names = [self.dataset.cases[case].name for case in np.flatnonzero(drew[:, number])[is_most]]
                warnings.append(
                    f"rater {rater} drew more than {_MAX_FOREGROUND:.0%} of the voxels of "
                    f"{listing(names, 'case')}"
                )
            for other in range(number):
                both = drew[:, number] & drew[:, other]
                if both.sum() > 3 and self._same[both, number, other].all():
                    warnings.append(
                        f"raters {raters[other]} and {rater} drew the same in all of {both.sum()} cases: is "
                        "one a copy of the other?"
                    )
        return warnings

    def _compare(self, scores: RaterAgreement, number: int, drawn: np.ndarray, present: np.ndarray) -> None:
        """Store the agreement of the raters of a case or scan."""
        # comparing two empty masks needs a voxel
        masks = torch.from_numpy(drawn if drawn.size else np.zeros((len(drawn), 1), drawn.dtype))
        found = rater_agreement(
            masks, num_classes=self.dataset.num_classes, present=torch.from_numpy(present)
        )
        scores.majority[number], scores.pairwise[number] = found.majority, found.pairwise

    def warnings(self) -> list[str]:
        """Warnings about all cases that were checked."""
        dataset = self.dataset
        warnings = []
        if self._constant:
            warnings.append(f"{listing(self._constant, 'image')} with a single grey value")
        warnings += [*kind_warnings(dataset.manifest.scans), *dataset.manifest.warnings]
        warnings += self._rater_warnings()
        present = dataset.present & self.readable[:, None]
        blank = [
            case.name
            for case, is_present, empty in zip(dataset.cases, present, self.empty, strict=True)
            if is_present.any() and (empty == is_present).all()
        ]
        if blank:
            warnings.append(f"{listing(blank, 'case')} in which no rater drew anything")
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
                    f"{listing([case.name for case in cases], 'case')} of patient {cases[0].patient} "
                    "have the same image"
                )
        return shared, repeated
