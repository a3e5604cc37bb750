"""`semidice compare`: variants are trained over the same folds, then all finished ones are compared.

    OUT/NAME/           the run of a variant
        cases.parquet   scores of every case by every method
        means.*, pairs_METRIC.*   tables as Markdown, LaTeX and CSV

A variant that fails does not stop the others; its error is reported at the end. A second call skips the
finished folds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_fabric import Fabric
from rich.console import Console

from .console import say, training_bars
from .metrics.cases import CaseTable, concatenate, write_cases
from .metrics.statistics import Comparison, compare_cases
from .metrics.tables import means_table, pairs_table
from .paths import ComparisonFolder
from .recipes.grid import Variant
from .runs.run import TrainedRun
from .training.command import RunBar, start_fabric
from .training.crossvalidation import cross_validate, start_run


class CompareError(ValueError):
    """Some variants failed; the message names them and their errors."""


@dataclass
class Outcome:
    """The result of all variants: case tables and runs of the finished ones, errors of the failed ones."""

    tables: dict[str, CaseTable] = field(default_factory=dict)
    runs: dict[str, TrainedRun] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def table(self) -> CaseTable:
        """All scores; the methods are the names of the variants."""
        return concatenate(self.tables.values()).sorted()

    def raise_if_failed(self) -> None:
        """A CompareError that names the failed variants, if there are any."""
        if self.failed:
            total = len(self.failed) + len(self.runs)
            raise CompareError(
                f"{len(self.failed)} of {total} variants failed; the others are finished:\n"
                + "\n".join(f"  {name}: {error}" for name, error in self.failed.items())
            )


def run_variants(variants: Sequence[Variant], fabric: Fabric, console: Console) -> Outcome:
    """Train every variant that is not finished, with one progress bar for each."""
    outcome = Outcome()
    with training_bars(console, names=[variant.name for variant in variants]) as progress:
        bars = {variant.name: RunBar(progress, variant.recipe) for variant in variants}
        for variant in variants:
            bar = bars[variant.name]
            try:
                if variant.teacher in outcome.failed:
                    raise ValueError(f"its teacher {variant.teacher} failed")
                run = start_run(variant.recipe, variant.folder, resume=True)
                table = cross_validate(run, fabric, on_step=bar.show_step, on_phase=bar.show_phase)
                assert table is not None
            # a wrong recipe must not stop the others
            except Exception as error:
                outcome.failed[variant.name] = str(error) or type(error).__name__
                bar.show_failed()
            else:
                outcome.tables[variant.name], outcome.runs[variant.name] = table, run
                bar.show_finished()
    return outcome


def comparisons_of(table: CaseTable, metrics: Sequence[str] | None = None) -> dict[str, Comparison]:
    """The comparison of all methods by each metric; None takes all metrics of the table."""
    metrics = table.metrics if metrics is None else metrics
    return {metric: compare_cases(table, metric, missing="drop") for metric in metrics}


def run_compare(
    variants: Sequence[Variant],
    out: Path,
    console: Console,
    *,
    metrics: Sequence[str] | None = None,
    accelerator: str = "auto",
) -> Mapping[str, Comparison]:
    """Train, compare, print and write; a CompareError at the end if a variant failed."""
    fabric = start_fabric(accelerator=accelerator)
    outcome = run_variants(variants, fabric, console)
    comparisons: dict[str, Comparison] = {}
    if outcome.tables:
        out.mkdir(parents=True, exist_ok=True)
        table = outcome.table()
        folder = ComparisonFolder(out)
        write_cases(table, folder.cases)
        comparisons = comparisons_of(table, metrics)
        tables = {folder.means: means_table(list(comparisons.values()), intervals=False)}
        for metric, comparison in comparisons.items():
            if len(comparison.methods) > 1:
                tables[folder.pairs(metric)] = pairs_table(comparison)
        for path, shown in tables.items():
            console.print(shown.rich())
            shown.write(path)
        say(console, f"tables and every score: {out}; next: semidice report {out} -o report.html")
    outcome.raise_if_failed()
    return comparisons
