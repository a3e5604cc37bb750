"""`semidice check DATASET`: checks a prepared dataset, prints the result, and draws the contact sheet."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..console import progress_bar, say
from ..errors import UserError
from ..paths import DatasetFolder
from ..runs.start import volume_problem
from ..statistics.tables import number_text
from .check import CheckReport, check_dataset
from .contact_sheet import case_panel, choose_cases, draw_contact_sheet
from .figures import save_figure

# a dataset without its images would fill the screen
_MAX_SHOWN = 40


class CheckError(UserError):
    """The dataset has problems."""


def run_check(folder: Path, *, sheet: Path | None = None, console: Console) -> CheckReport:
    """Check the dataset behind a progress bar, print the result, and draw the contact sheet.

    sheet: a PNG file, by default FOLDER_check.png next to the folder. If there are problems, a CheckError is
    raised after the tables are printed and the sheet of the readable cases is drawn.
    """
    sheet = DatasetFolder(folder).contact_sheet if sheet is None else sheet
    if sheet.suffix.lower() != ".png":
        raise UserError(f"the contact sheet is a PNG: give it a name that ends in .png; got {sheet}")
    if sheet.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{sheet} is inside the dataset, which must not change: choose a path outside of it")
    with progress_bar(console, "checking", "cases") as bar:
        report = check_dataset(folder, on_case=bar.to)
    console.print(summary_table(report))
    console.print(rater_table(report))
    _print_all(report.problems, "problem", "red", console)
    _print_all(report.warnings, "warning", "yellow", console)
    dataset, agreement = report.dataset, report.case_agreement.numpy()
    shown_cases = choose_cases(agreement, report.readable)
    if shown_cases:
        with progress_bar(console, "drawing the contact sheet"):
            panels = [case_panel(dataset, number, float(agreement[number])) for number in shown_cases]
            save_figure(draw_contact_sheet(panels, dataset.manifest.raters, num_cases=len(dataset)), sheet)
        say(console, f"wrote {sheet}")
    counts = f"{_counted(report.problems, 'problem')}, {_counted(report.warnings, 'warning')}"
    if report.problems:
        raise CheckError(
            f"{counts} in {folder}: correct the raw files if they are wrong, "
            "and prepare the dataset again in a new folder"
        )
    say(console, f"{counts}; next: {_next_command(report)}")
    return report


def _next_command(report: CheckReport) -> str:
    dataset = report.dataset
    if volume_problem(dataset) is not None:
        return f"semidice prepare {dataset.manifest.source} RAW_DIR NEW_DIR --slices all"
    return f"semidice train auto --set {shlex.quote(f'data.dataset={dataset.folder.path}')} -o runs/first"


def summary_table(report: CheckReport) -> Table:
    """What the dataset contains."""
    dataset, manifest = report.dataset, report.dataset.manifest
    sizes = [case.shape for case in dataset.cases]
    spacings = [
        sides if scan.slices is not None else sides[: len(scan.shape)]
        for scan in manifest.scans
        if (sides := scan.voxel_mm)
    ]
    num_slices = f", slices of {len(manifest.scans)} scans" if dataset.has_slices else ""
    rows = {
        "source": manifest.source,
        "cases": f"{len(dataset)}{num_slices}",
        "patients": str(len({case.patient for case in dataset.cases})),
        "raters": str(len(manifest.raters)),
        "classes": ", ".join(manifest.class_names),
        "channels": ", ".join(manifest.channels),
        "size": _range_text(sizes, "{:d}"),
        "spacing (mm)": _spacing_text(spacings, len(manifest.scans)),
    }
    for name, shares in zip(manifest.class_names[1:], report.foreground.T, strict=True):
        shares = 100 * shares[~np.isnan(shares)]
        if len(shares):
            rows[f"share of {name}"] = (
                f"{shares.mean():.2f} % of the voxels, {shares.min():.2f} to {shares.max():.2f} % in a case"
            )
    rows["on disk"] = f"{report.num_bytes / 1e6:.1f} MB"
    table = Table(title=Text(f"Dataset {report.dataset.folder.path}"), show_header=False)
    for name, text in rows.items():
        table.add_row(Text(name), Text(text))
    return table


def rater_table(report: CheckReport) -> Table:
    """One row per rater: cases, empty masks among them, mean Dice to the majority and to the others."""
    table = Table(title="Raters (Dice in %)")
    table.add_column("rater")
    for title in ("cases", "empty masks", "Dice to majority", "Dice to others"):
        table.add_column(title, justify="right")
    majority, others = report.rater_agreement(), report.agreement_with_others().nanmean(0)
    num_cases, num_empty = report.dataset.present.sum(0), report.empty.sum(0)
    for column, rater in enumerate(report.dataset.manifest.raters):
        scores = (_score_text(float(mean[column])) for mean in (majority, others))
        table.add_row(Text(rater), str(num_cases[column]), str(num_empty[column]), *scores)
    table.add_section()
    means = (_score_text(float(mean.nanmean())) for mean in (majority, others))
    table.add_row("mean over raters", "", "", *means)
    return table


def _range_text(values: Sequence[Sequence[float]], form: str) -> str:
    """Lengths along the axes as `a x b`: all values if they are few, otherwise the range of each axis."""
    texts = [" x ".join(form.format(number) for number in value) for value in values]
    different = list(dict.fromkeys(texts))
    if len(different) <= 3 or len({len(value) for value in values}) > 1:
        return ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")
    low, high = (
        " x ".join(form.format(end(axis)) for axis in zip(*values, strict=True)) for end in (min, max)
    )
    return f"{low} to {high}"


def _spacing_text(spacings: Sequence[Sequence[float]], num_scans: int) -> str:
    if not spacings:
        return "unknown: distances will be in voxels"
    unknown = num_scans - len(spacings)
    return _range_text(spacings, "{:.3g}") + (
        f", unknown in {unknown} of {num_scans} scans" if unknown else ""
    )


def _score_text(score: float) -> str:
    return "-" if math.isnan(score) else number_text(100 * score)


def _counted(messages: Sequence[str], kind: str) -> str:
    return f"{len(messages) or 'no'} {kind}{'' if len(messages) == 1 else 's'}"


def _print_all(messages: Sequence[str], kind: str, colour: str, console: Console) -> None:
    for message in messages[:_MAX_SHOWN]:
        console.print(Text.assemble((f"{kind}: ", f"bold {colour}"), message), soft_wrap=True)
    if len(messages) > _MAX_SHOWN:
        console.print(f"... and {len(messages) - _MAX_SHOWN} more {kind}s", style=colour, highlight=False)
