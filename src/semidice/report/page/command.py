"""`semidice report`: finds the runs, builds the page behind a progress bar, and says where everything is."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ...data.dataset import Dataset
from .build import Report, build_page
from .content import ReadPrediction
from .runs import find_runs


def run_report(
    paths: Sequence[Path],
    out: Path,
    console: Console,
    *,
    read_prediction: ReadPrediction,
    dataset: Path | None = None,
    title: str | None = None,
    max_cases: int = 100,
    figures: bool = True,
) -> Report:
    """The report of a run folder, of several, or of a folder of them, written to `out` and beside it.

    dataset: where the runs' dataset is now, if it was moved. Other options as in `build_page`.
    """
    found = find_runs(paths)
    with Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        bar = progress.add_task("opening runs", total=1)
        report = build_page(
            found.runs,
            Dataset(dataset or found.dataset),
            out,
            read_prediction=read_prediction,
            title=title,
            max_cases=max_cases,
            figures=figures,
            notices=found.notices,
            on_step=lambda what, done, total: progress.update(
                bar, description=what, completed=done, total=total
            ),
        )
    for notice in report.notices:
        console.print(notice, style="yellow", highlight=False, markup=False, soft_wrap=True)
    size = report.page.stat().st_size / 1e6
    console.print(f"wrote {report.page} ({size:.1f} MB)", highlight=False, markup=False, soft_wrap=True)
    beside = f"wrote {len(report.beside)} tables and figures to {report.beside[0].parent}"
    console.print(beside, highlight=False, markup=False, soft_wrap=True)
    return report
