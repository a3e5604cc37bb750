"""`semidice check`: whether a prepared dataset is whole and sound, what is in it, and how far raters agree.

A problem makes the dataset unfit for training: a file that is not the one prepared, a value that cannot be,
one image under two patients. A warning is worth a look: images without contrast, cases where nobody drew
anything. All are collected in one reading, a case in memory at a time. Agreement is that of
`labels.rater_agreement` over the cases that two raters or more looked at. Nothing is written in the dataset.
"""

import hashlib
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..console import counting_bar
from ..data.dataset import Dataset
from ..data.integrity import (
    class_problem,
    enumerated,
    image_problem,
    listed_arrays,
    manifest_problems,
    open_array,
    packing_problem,
    scan_problems,
    truth_problem,
    unlisted_files,
)
from ..data.manifest import Scan
from ..data.packing import unpack_case
from ..metrics.agreement import AgreementBatches, drawn_voxels
from ..paths import DatasetFolder
from .contact_sheet import case_panel, choose_cases, draw_contact_sheet
from .figures import save_figure

# a dataset that lost its folder of images would fill the screen
_MAX_SHOWN = 40


class CheckError(ValueError):
    """A dataset with problems."""


@dataclass(frozen=True)
class CheckReport:
    """What `check_dataset` found; a row a case in the order of `dataset.cases`.

    foreground: share of the case's voxels in each class but the background, mean over the raters who looked
    at it. empty: True where a rater looked and drew nothing. agreement: Dice of each rater against the
    majority; pairwise: Dice of each rater against each other rater; both are NaN for an absent rater and in
    cases that one rater alone looked at. readable: False where image or masks could not be read, and then
    everything else of the case is NaN or False.
    """

    dataset: Dataset
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    foreground: Float[np.ndarray, "N foreground"]
    empty: Bool[np.ndarray, "N R"]
    agreement: Float32[Tensor, "N R"]
    pairwise: Float32[Tensor, "N R R"]
    readable: Bool[np.ndarray, " N"]
    num_bytes: int

    def rater_agreement(self) -> Float32[Tensor, " R"]:
        """Mean of each rater's Dice against the majority over the cases; their mean is the paper's figure."""
        return self.agreement.nanmean(0)

    def agreement_with_others(self) -> Float32[Tensor, "N R"]:
        """Mean Dice of each rater against the other raters of the case."""
        oneself = torch.eye(self.pairwise.shape[1], dtype=torch.bool)
        return self.pairwise.masked_fill(oneself, torch.nan).nanmean(2)

    def case_agreement(self) -> Float32[Tensor, " N"]:
        """Mean Dice against the majority of the raters of each case."""
        return self.agreement.nanmean(1)


def check_dataset(folder: Path, *, on_case: Callable[[int, int], object] = lambda _, __: None) -> CheckReport:
    """Everything there is to say about the dataset prepared in `folder`; on_case(done, total) as it goes.

    A ValueError if there is no manifest that this version can read, as nothing else can be judged then.
    """
    dataset = Dataset(folder)
    reading = _Reading(dataset)
    problems = manifest_problems(dataset)
    owner_of = {digest: path.relative_to(folder).as_posix() for digest, path in listed_arrays(dataset)}
    first = 0
    for scan in dataset.manifest.scans:
        problems += reading.look_at(scan, first, owner_of=owner_of, on_case=on_case)
        first += len(scan.case_names())
    shared, repeated = reading.duplicates()
    unlisted = unlisted_files(dataset)
    warnings = [*reading.warnings(), *repeated]
    if unlisted:
        warnings.append(f"{enumerated(unlisted, 'file')} in the folder that the manifest does not know")
    agreement = reading.batches.finish()
    paths = [dataset.folder.manifest, *(path for _, path in listed_arrays(dataset))]
    return CheckReport(
        dataset,
        problems=(*problems, *shared),
        warnings=tuple(warnings),
        foreground=reading.foreground,
        empty=reading.empty,
        agreement=agreement.majority,
        pairwise=agreement.pairwise,
        readable=reading.readable,
        num_bytes=sum(path.stat().st_size for path in paths if path.is_file()),
    )


class _Reading:
    """What is collected while the scans of a dataset are read one after the other."""

    def __init__(self, dataset: Dataset) -> None:
        num_cases, num_raters = dataset.present.shape
        num_classes = dataset.num_classes
        self.dataset = dataset
        self.foreground = np.full((num_cases, num_classes - 1), np.nan)
        self.empty = np.zeros((num_cases, num_raters), dtype=bool)
        self.readable = np.zeros(num_cases, dtype=bool)
        self.batches = AgreementBatches(num_cases, num_raters, num_classes=num_classes)
        self._constant: list[str] = []
        self._cases_of_image: dict[bytes, list[int]] = defaultdict(list)

    def look_at(
        self,
        scan: Scan,
        first: int,
        *,
        owner_of: Mapping[str, str],
        on_case: Callable[[int, int], object],
    ) -> list[str]:
        """Problems of a scan whose first case has the number `first`."""
        manifest, folder = self.dataset.manifest, self.dataset.folder
        problems = scan_problems(manifest, scan)
        if problems:
            on_case(first + len(scan.case_names()), len(self.dataset))
            return problems
        arrays: dict[str, np.ndarray] = {}
        for kind in scan.arrays:
            array, found = open_array(folder, manifest, scan, kind, owner_of=owner_of)
            problems += found
            if array is not None:
                arrays[kind] = array
        for number, name in enumerate(scan.case_names(), start=first):
            rows = {kind: np.array(array[number - first]) for kind, array in arrays.items()}
            problems += [f"case {name}: {problem}" for problem in self._case_problems(number, rows)]
            on_case(number + 1, len(self.dataset))
        return problems

    def _case_problems(self, number: int, rows: Mapping[str, np.ndarray]) -> list[str]:
        found = []
        if "images" in rows:
            found.append(self._look_at_image(number, rows["images"]))
        sound = False
        if "masks" in rows:
            masks_found = self._look_at_masks(number, rows["masks"])
            sound = not masks_found
            found += masks_found
        if "truth" in rows:
            found.append(truth_problem(rows["truth"]))
        self.readable[number] = "images" in rows and sound
        return [problem for problem in found if problem is not None]

    def _look_at_image(self, number: int, stored: np.ndarray) -> str | None:
        name, channels = self.dataset.cases[number].name, self.dataset.manifest.channels
        constant = [label for label, plane in zip(channels, stored, strict=True) if np.ptp(plane) == 0]
        if constant:
            self._constant.append(name if len(channels) == 1 else f"{name} {' '.join(constant)}")
        # two black images are no leak, and are told of already
        if len(constant) < len(channels):
            digest = hashlib.sha256(f"{stored.dtype}{stored.shape}".encode())
            digest.update(np.ascontiguousarray(stored).data)
            self._cases_of_image[digest.digest()].append(number)
        return image_problem(stored)

    def _look_at_masks(self, number: int, packed: np.ndarray) -> list[str]:
        manifest, space = self.dataset.manifest, self.dataset.cases[number].shape
        present = self.dataset.present[number]
        classes = unpack_case(packed, width=space[-1])
        found = [packing_problem(packed, width=space[-1]), class_problem(classes, manifest.class_names)]
        drawn = drawn_voxels(classes)
        absent = [
            rater
            for rater, there, voxels in zip(manifest.raters, present, drawn, strict=True)
            if not there and voxels.any()
        ]
        if absent:
            found.append(
                f"{', '.join(absent)} did not look at it by the manifest, but the masks are not empty"
            )
        problems = [problem for problem in found if problem is not None]
        if not problems:
            self._count(number, drawn, num_voxels=math.prod(space))
        return problems

    def _count(self, number: int, drawn: np.ndarray, *, num_voxels: int) -> None:
        present = self.dataset.present[number]
        # a rater at a time, as bincount makes eight bytes of each voxel
        counts = [np.bincount(voxels, minlength=self.dataset.num_classes) for voxels in drawn[present]]
        self.foreground[number] = np.mean(counts, axis=0)[1:] / num_voxels
        self.empty[number] = present & ~drawn.any(axis=1)
        if present.sum() > 1:
            self.batches.add(number, drawn, present=present)

    def warnings(self) -> list[str]:
        """What is worth a look in the cases read so far."""
        dataset = self.dataset
        found = []
        if self._constant:
            found.append(f"{enumerated(self._constant, 'image')} of one grey value throughout")
        present = dataset.present & self.readable[:, None]
        blank = [
            case.name
            for case, there, empty in zip(dataset.cases, present, self.empty, strict=True)
            if there.any() and (empty == there).all()
        ]
        if blank:
            found.append(f"{enumerated(blank, 'case')} where no rater drew anything")
        for rater, there, empty in zip(dataset.manifest.raters, present.T, self.empty.T, strict=True):
            if there.any() and (empty == there).all():
                found.append(f"rater {rater} drew nothing in any of {there.sum()} cases")
        return found

    def duplicates(self) -> tuple[list[str], list[str]]:
        """Problems: one image under several patients. Warnings: several times under one."""
        shared, repeated = [], []
        for numbers in self._cases_of_image.values():
            if len(numbers) < 2:
                continue
            cases = [self.dataset.cases[number] for number in numbers]
            if len({case.patient for case in cases}) > 1:
                named = ", ".join(f"{case.name} (patient {case.patient})" for case in cases[:5])
                more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
                shared.append(f"the same image under two patients would leak between folds: {named}{more}")
            else:
                repeated.append(
                    f"{enumerated([case.name for case in cases], 'case')} of patient {cases[0].patient} "
                    "have the same image"
                )
        return shared, repeated


def run_check(folder: Path, *, sheet: Path | None = None, console: Console) -> CheckReport:
    """Check the dataset behind a progress bar, print what was found, and draw the contact sheet.

    sheet: a PNG, by default FOLDER_check.png beside the folder. A CheckError if there are problems; the
    tables and the sheet, of the cases that can be read, are there all the same.
    """
    sheet = DatasetFolder(folder).contact_sheet if sheet is None else sheet
    if sheet.suffix.lower() != ".png":
        raise ValueError(f"the contact sheet is a PNG: give it a name that ends in .png; got {sheet}")
    if sheet.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{sheet} lies in the dataset, which stays as it was prepared: choose another place")
    with counting_bar(console, doing="checking", unit="cases") as progress:
        bar = progress.add_task("", total=None)
        report = check_dataset(
            folder, on_case=lambda done, total: progress.update(bar, completed=done, total=total)
        )
    console.print(summary_table(report))
    console.print(rater_table(report))
    _print_findings(report.problems, "problem", "red", console)
    _print_findings(report.warnings, "warning", "yellow", console)
    with console.status("drawing the contact sheet"):
        drawn = _draw_sheet(report, sheet)
    if drawn:
        console.print(f"wrote {sheet}", highlight=False, markup=False, soft_wrap=True)
    counts = f"{_counted(report.problems, 'problem')}, {_counted(report.warnings, 'warning')}"
    if report.problems:
        raise CheckError(
            f"{counts} in {folder}: mend the raw files if they are at fault, "
            "and prepare the dataset again in a new folder"
        )
    words = f"{counts}; next: semidice train quick --set {shlex.quote(f'data.dataset={folder}')}"
    console.print(words, highlight=False, markup=False, soft_wrap=True)
    return report


def summary_table(report: CheckReport) -> Table:
    """What is in the dataset."""
    dataset, manifest = report.dataset, report.dataset.manifest
    sizes = [case.shape for case in dataset.cases]
    sides = [case.scan.spacing_mm[: len(case.shape)] for case in dataset.cases]
    rows = {
        "source": manifest.source,
        "cases": str(len(dataset)),
        "patients": str(len({case.patient for case in dataset.cases})),
        "raters": str(len(manifest.raters)),
        "classes": ", ".join(manifest.class_names),
        "channels": ", ".join(manifest.channels),
        "size": _spread(sizes, "{:d}"),
        "spacing (mm)": _spread(sides, "{:.3g}"),
    }
    for name, shares in zip(manifest.class_names[1:], report.foreground.T, strict=True):
        shares = 100 * shares[~np.isnan(shares)]
        if len(shares):
            words = (
                f"{shares.mean():.2f} % of the voxels, {shares.min():.2f} to {shares.max():.2f} % in a case"
            )
            rows[f"share of {name}"] = words
    rows["on disk"] = f"{report.num_bytes / 1e6:.1f} MB"
    table = Table(title=Text(f"Dataset {report.dataset.folder.path}"), show_header=False)
    for name, words in rows.items():
        table.add_row(Text(name), Text(words))
    return table


def rater_table(report: CheckReport) -> Table:
    """One row per rater: cases, empty masks among them, mean Dice to the majority and to the other raters."""
    table = Table(title="Raters")
    table.add_column("rater")
    for title in ("cases", "empty masks", "Dice to majority", "Dice to others"):
        table.add_column(title, justify="right")
    majority, others = report.rater_agreement(), report.agreement_with_others().nanmean(0)
    seen, empty = report.dataset.present.sum(0), report.empty.sum(0)
    for column, rater in enumerate(report.dataset.manifest.raters):
        scores = (_shown(float(mean[column])) for mean in (majority, others))
        table.add_row(Text(rater), str(seen[column]), str(empty[column]), *scores)
    table.add_section()
    table.add_row("mean over raters", "", "", *(_shown(float(mean.nanmean())) for mean in (majority, others)))
    return table


def _spread(values: Sequence[Sequence[float]], form: str) -> str:
    """Lengths along the axes as `a x b`: all if they are few, otherwise the range along each axis."""
    written = [" x ".join(form.format(number) for number in value) for value in values]
    different = list(dict.fromkeys(written))
    if len(different) <= 3 or len({len(value) for value in values}) > 1:
        return ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")
    low, high = (
        " x ".join(form.format(end(axis)) for axis in zip(*values, strict=True)) for end in (min, max)
    )
    return f"{low} to {high}"


def _shown(score: float) -> str:
    return "-" if math.isnan(score) else f"{score:.3f}"


def _counted(found: Sequence[str], what: str) -> str:
    return f"{len(found) or 'no'} {what}{'' if len(found) == 1 else 's'}"


def _print_findings(found: Sequence[str], what: str, colour: str, console: Console) -> None:
    for words in found[:_MAX_SHOWN]:
        console.print(Text.assemble((f"{what}: ", f"bold {colour}"), words), soft_wrap=True)
    if len(found) > _MAX_SHOWN:
        console.print(f"... and {len(found) - _MAX_SHOWN} more {what}s", style=colour, highlight=False)


def _draw_sheet(report: CheckReport, path: Path) -> bool:
    agreement = report.case_agreement().numpy()
    numbers = choose_cases(agreement, report.readable)
    if not numbers:
        return False
    dataset = report.dataset
    panels = [case_panel(dataset, number, float(agreement[number])) for number in numbers]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = draw_contact_sheet(panels, dataset.manifest.raters, num_cases=len(dataset))
    save_figure(figure, path)
    return True
