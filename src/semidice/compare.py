"""`semidice compare`: variants run over the same folds, then one comparison of all that finished.

    OUT/NAME/           the run of a variant
        cases.parquet   scores of every case by every method
        means.*, pairs_METRIC.*   tables as Markdown, LaTeX and CSV

A variant that fails is told at the end and does not stop the others. Run again, finished folds are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_fabric import Fabric
from rich.console import Console

from .console import say, training_bars
from .metrics.cases import CaseTable, concatenate, write_cases
from .metrics.statistics import Comparison, compare_cases, resampling_unit
from .metrics.tables import Table, means_table, pairs_table
from .paths import ComparisonFolder, atomic_write
from .recipes.grid import Variant
from .runs.run import TrainedRun
from .training.command import RunBar, start_fabric
from .training.crossvalidation import cross_validate, start_run


class CompareError(ValueError):
    """Some variants failed: which ones, and why."""


@dataclass
class Outcome:
    """What became of the variants: tables of those that finished, errors of those that did not."""

    tables: dict[str, CaseTable] = field(default_factory=dict)
    runs: dict[str, TrainedRun] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def table(self) -> CaseTable:
        """All scores, with the variants' names as methods."""
        return concatenate(self.tables.values()).sorted()


def run_variants(
    variants: Sequence[Variant],
    fabric: Fabric,
    console: Console,
    *,
    on_finished: Callable[[Variant], object] = lambda _: None,
) -> Outcome:
    """Train every variant that is not finished, behind a bar for each."""
    outcome = Outcome()
    width = max(len(variant.name) for variant in variants)
    with training_bars(console, width=width) as progress:
        bars = {variant.name: RunBar(progress, variant.recipe) for variant in variants}
        for variant in variants:
            bar = bars[variant.name]
            try:
                _run_variant(variant, outcome, fabric, bar)
            # one bad recipe must not cost the others their night
            except Exception as error:
                outcome.failed[variant.name] = str(error) or type(error).__name__
                bar.show_failed()
            else:
                bar.show_finished()
                on_finished(variant)
    return outcome


def _run_variant(variant: Variant, outcome: Outcome, fabric: Fabric, bar: RunBar) -> None:
    if variant.teacher in outcome.failed:
        raise ValueError(f"its teacher {variant.teacher} failed")
    run = start_run(variant.recipe, variant.folder, resume=True)
    table = cross_validate(run, fabric, on_step=bar.show_step, on_phase=bar.show_phase)
    assert table is not None
    outcome.tables[variant.name], outcome.runs[variant.name] = table, run


def comparisons_of(table: CaseTable, metrics: Sequence[str] | None = None) -> dict[str, Comparison]:
    """Every metric of the table compared over its cases, by patient where a patient has several."""
    chosen = metrics if metrics is not None else table.metrics
    unit = resampling_unit(table.columns["patient"], table.columns["case"])
    return {metric: compare_cases(table, metric, unit=unit, missing="drop") for metric in chosen}


def run_compare(
    variants: Sequence[Variant],
    out: Path,
    console: Console,
    *,
    metrics: Sequence[str] | None = None,
    accelerator: str = "auto",
) -> Mapping[str, Comparison]:
    """Run, compare, print and write; a CompareError at the end if a variant failed."""
    fabric = start_fabric(accelerator=accelerator)
    outcome = run_variants(variants, fabric, console)
    comparisons: dict[str, Comparison] = {}
    if outcome.tables:
        out.mkdir(parents=True, exist_ok=True)
        table = outcome.table()
        folder = ComparisonFolder(out)
        write_cases(table, folder.cases)
        comparisons = comparisons_of(table, metrics)
        tables = tables_of(comparisons, folder)
        for each in tables.values():
            console.print(each.rich())
        for path, each in tables.items():
            write_table(each, path)
        say(console, f"tables and every score: {out}; next: semidice report {out} -o report.html")
    if outcome.failed:
        raise CompareError(
            f"{len(outcome.failed)} of {len(variants)} variants failed; the others are finished:\n"
            + "\n".join(f"  {name}: {why}" for name, why in outcome.failed.items())
        )
    return comparisons


def tables_of(comparisons: Mapping[str, Comparison], folder: ComparisonFolder) -> dict[Path, Table]:
    """The table of means, and one of pairs for each metric, by their paths without a suffix."""
    means = means_table(list(comparisons.values()), intervals=False)
    pairs = {
        folder.pairs(metric): pairs_table(one) for metric, one in comparisons.items() if len(one.methods) > 1
    }
    return {folder.means: means, **pairs}


def write_table(table: Table, path: Path) -> None:
    """The table as Markdown, LaTeX and CSV beside each other."""
    for suffix, text in {".md": table.markdown(), ".tex": table.latex(), ".csv": table.csv()}.items():
        with atomic_write(path.with_suffix(suffix)) as temp_path:
            temp_path.write_text(text, encoding="utf-8")
