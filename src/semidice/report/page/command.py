"""`semidice report`: finds the runs, builds the page behind a progress bar, and prints the paths."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ...console import counting_bar, say
from ...data.dataset import Dataset
from .build import Report, build_page
from .content import DEFAULT_OPTIONS, PageOptions
from .runs import find_runs


def run_report(
    paths: Sequence[Path],
    out: Path,
    console: Console,
    options: PageOptions = DEFAULT_OPTIONS,
    *,
    dataset: Path | None = None,
) -> Report:
    """Write the report of run folders, or of folders of run folders, to `out` and a folder next to it.

    dataset: where the dataset of the runs is now, if it was moved.
    """
    found = find_runs(paths)
    with counting_bar(console, doing="report:", unit="done") as progress:
        bar = progress.add_task("opening runs", total=1)
        report = build_page(
            found.runs,
            Dataset(dataset or found.dataset),
            out,
            options,
            notices=found.notices,
            on_step=lambda step, done, total: progress.update(
                bar, description=step, completed=done, total=total
            ),
        )
    for notice in report.notices:
        console.print(notice, style="yellow", highlight=False, markup=False, soft_wrap=True)
    say(console, f"wrote {report.page} ({report.page.stat().st_size / 1e6:.1f} MB)")
    say(console, f"wrote {len(report.files)} tables and figures to {report.files[0].parent}")
    return report
