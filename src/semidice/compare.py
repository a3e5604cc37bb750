"""`semidice compare`: variants are trained over the same folds, then all finished ones are compared.

    OUT/NAME/           the run of a variant; with several seeds, its runs are OUT/NAME/seed_K
        cases.parquet   scores of every case by every method
        means.*, pairs_METRIC.*   tables as Markdown, LaTeX and CSV
        jobs.csv        seconds of each phase of each fold

Prints a verdict of one or two sentences, then the means; pairs on request. A variant that fails does not stop
the others; its error is reported at the end. A second call skips the finished folds. Methods of other tools
are compared by the case tables that `semidice evaluate --predictions` writes.

With rules of --decide, methods are NAME, RULE: every run is scored by every rule, without another training,
and only scores of masks are compared, because no other score depends on the rule.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from lightning_fabric import Fabric
from rich.console import Console

from .console import say, training_bars
from .data.dataset import Dataset
from .data.shared import SharedDataset
from .decisions.volumes import check_level
from .locks import FolderLock
from .metrics.cases import CaseTable, concatenate, with_seed, write_cases
from .metrics.registry import SCORES, score_name
from .metrics.statistics import Comparison, compare_cases
from .metrics.tables import means_table, pairs_table
from .paths import ComparisonFolder, RunFolder
from .recipes.grid import Variant
from .recipes.options import nearest_hint
from .report.other_methods import read_other_methods
from .report.verdict import raters_of, raters_warning, seeds_sentences, verdict
from .runs.decide import run_intervals, scored_rules
from .runs.decisions import add_decisions, mask_metrics, rule_names
from .runs.run import TrainedRun
from .training.command import RunBar, start_fabric
from .training.crossvalidation import cross_validate, start_run
from .training.grid import check_engine, finish_folds
from .training.phases import write_jobs_table


class CompareError(ValueError):
    """Some variants failed; the message names them and their errors."""


@dataclass
class Outcome:
    """The result of all variants: case tables and runs of the finished ones, errors of the failed ones."""

    tables: dict[str, CaseTable] = field(default_factory=dict)
    runs: dict[str, TrainedRun] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def table(self) -> CaseTable:
        """All scores; the methods are those of the variants."""
        return concatenate(self.tables.values()).sorted()

    def raise_if_failed(self) -> None:
        """A CompareError that names the failed variants, if there are any."""
        if self.failed:
            total = len(self.failed) + len(self.runs)
            raise CompareError(
                f"{len(self.failed)} of {total} variants failed; the others are finished:\n"
                + "\n".join(f"  {name}: {error}" for name, error in self.failed.items())
            )


def run_variants(
    variants: Sequence[Variant],
    fabric: Fabric,
    console: Console,
    *,
    seen: Path | None = None,
    failed: Mapping[str, str] | None = None,
) -> Outcome:
    """Train every variant that is not finished, with one progress bar for each.

    seen: file with the arrays of the dataset whose hashes were compared, for all runs. failed: errors of
    variants that are not to be trained, by their absolute folder.
    """
    outcome, data = Outcome(), SharedDataset()
    with training_bars(console, names=[variant.name for variant in variants]) as progress:
        bars = {variant.name: RunBar(progress, variant.recipe, name=variant.name) for variant in variants}
        for variant in variants:
            bar = bars[variant.name]
            try:
                if variant.teacher in outcome.failed:
                    raise ValueError(f"its teacher {variant.teacher} failed")
                folder = str(variant.folder.absolute())
                if failed and folder in failed:
                    raise ValueError(failed[folder])
                with FolderLock(RunFolder(variant.folder), "semidice compare") as bar.lock:
                    run = start_run(variant.recipe, variant.folder, resume=True, data=data)
                    table = cross_validate(
                        run,
                        fabric,
                        on_step=bar.show_step,
                        on_phase=bar.show_phase,
                        data=data,
                        seen=() if seen is None else (seen,),
                    )
                assert table is not None
            # a wrong recipe must not stop the others
            except Exception as error:
                outcome.failed[variant.name] = str(error) or type(error).__name__
                bar.show_failed()
            else:
                outcome.tables[variant.name], outcome.runs[variant.name] = table, run
                bar.show_finished()
    return outcome


def seeded_tables(tables: Mapping[str, CaseTable], variants: Sequence[Variant]) -> dict[str, CaseTable]:
    """The tables with the column `seed` where a method has several."""
    seeds = {variant.name: variant.seed for variant in variants}
    return {
        name: table if (seed := seeds[name]) is None else with_seed(table, seed)
        for name, table in tables.items()
    }


def decided_tables(
    runs: Mapping[str, TrainedRun], dataset: Dataset, rules: Sequence[str], console: Console
) -> dict[str, CaseTable]:
    """The scores of masks of each run by all rules, as methods NAME, RULE; also added to the run's table."""
    tables = {}
    for name, run in runs.items():
        metrics = mask_metrics(dataset, run.recipe.validation.metrics)
        scores = scored_rules(run, dataset, rules, console, metrics=metrics)
        if not run.missing_folds:
            add_decisions(run, scores)
        methods = np.array([f"{run.recipe.name}, {rule}" for rule in scores.columns["method"].tolist()])
        tables[name] = CaseTable({**scores.columns, "method": methods})
    return tables


def comparisons_of(table: CaseTable, metrics: Sequence[str] | None = None) -> dict[str, Comparison]:
    """The comparison of all methods by each metric; None takes all metrics that all methods have.

    A metric also stands for its names in the table, such as `dice_score_per_slice`.
    """
    names = shared_metrics(table)
    if metrics is not None:
        of_metric = [[name for name in names if metric in (name, score_name(name))] for metric in metrics]
        # a metric without a name in the table is an error that names those there are
        pairs = zip(metrics, of_metric, strict=True)
        names = [name for metric, found in pairs for name in (found or [metric])]
    return {name: compare_cases(table, name, missing="drop") for name in names}


def shared_metrics(table: CaseTable) -> list[str]:
    """The metrics by which every method of the table was scored; a ValueError if there is none."""
    methods = set(table.methods)
    shared = [name for name in table.metrics if set(table.select(metric=name).methods) == methods]
    if not shared:
        raise ValueError(
            f"no score is common to {', '.join(table.methods)}: they have {', '.join(table.metrics)}; score "
            "them alike with `semidice evaluate`"
        )
    return shared


def run_compare(
    variants: Sequence[Variant],
    out: Path,
    console: Console,
    *,
    dataset: Path | None = None,
    case_tables: Sequence[Path] = (),
    metrics: Sequence[str] | None = None,
    rules: Sequence[str] = (),
    interval: float | None = None,
    show_pairs: bool = False,
    accelerator: str = "auto",
    on: str | None = None,
) -> Mapping[str, Comparison]:
    """Train, compare, print and write; a CompareError at the end if a variant failed.

    dataset: None takes that of the first variant.
    case_tables: files of `semidice evaluate` with scores of other methods, which are compared, too.
    rules: that make masks, such as dice or fitted; argmax is added. interval: level of the intervals of
    volumes that are written for each run, such as 0.9.
    show_pairs: also print the difference of every pair of methods, which is always written.
    on: where the folds are trained, see `training.grid`; None trains one after the other in this process.
    """
    if on is not None:
        check_engine(on)
    prepared = Dataset(dataset or variants[0].recipe.data.dataset)
    # before the training, which takes long
    names = rule_names(rules) if rules else []
    if interval is not None:
        check_level(interval)
    others = read_other_methods(case_tables, prepared, [variant.method for variant in variants])
    _check_metrics(metrics or (), others)
    folder = ComparisonFolder(out)
    with FolderLock(folder, "semidice compare"):
        outcome = Outcome()
        if variants:
            failed: Mapping[str, str] = {}
            if on is not None:
                failed = finish_folds({folder.arrays: variants}, on, console, accelerator=accelerator)
            fabric = start_fabric(accelerator=accelerator)
            outcome = run_variants(variants, fabric, console, seen=folder.arrays, failed=failed)
            write_jobs_table(variants, folder.jobs)
        if names:
            outcome.tables = decided_tables(outcome.runs, prepared, names, console)
        if interval is not None:
            for run in outcome.runs.values():
                run_intervals(run, prepared, interval, console)
        outcome.tables = seeded_tables(outcome.tables, variants) | others
        comparisons = _compared(outcome, prepared, out, metrics, show_pairs, console)
    outcome.raise_if_failed()
    return comparisons


def _compared(
    outcome: Outcome,
    prepared: Dataset,
    out: Path,
    metrics: Sequence[str] | None,
    show_pairs: bool,
    console: Console,
) -> dict[str, Comparison]:
    """Compare all methods, print and write; empty if no variant is finished."""
    comparisons: dict[str, Comparison] = {}
    if outcome.tables:
        table = outcome.table()
        folder = ComparisonFolder(out)
        write_cases(table, folder.cases)
        for sentence in seeds_sentences(table):
            console.print(sentence, style="yellow", highlight=False, markup=False, soft_wrap=True)
        comparisons = comparisons_of(table, metrics)
        partial = [name for name in table.metrics if metrics is None and name not in comparisons]
        if partial:
            say(console, f"not compared, because not every method has it: {', '.join(partial)}")
        _show_and_write(comparisons, table, prepared, folder, console, show_pairs)
        # a run knows its dataset
        of_dataset = "" if outcome.runs else f" --dataset {shlex.quote(str(prepared.folder.path))}"
        command = f"semidice report {shlex.quote(str(out))}{of_dataset} -o report.html"
        say(console, f"tables and every score: {out}; next: {command}")
    return comparisons


def _check_metrics(metrics: Sequence[str], others: Mapping[str, CaseTable]) -> None:
    """Raise if there is no such score; before the training, which takes long."""
    known = {*SCORES, *(metric for table in others.values() for metric in table.metrics)}
    for metric in metrics:
        if metric not in known and score_name(metric) not in known:
            close = get_close_matches(metric, known, n=1, cutoff=0.5)
            raise ValueError(f"there is no score {metric!r}{nearest_hint(close, sorted(known))}")


def _show_and_write(
    comparisons: Mapping[str, Comparison],
    table: CaseTable,
    dataset: Dataset,
    folder: ComparisonFolder,
    console: Console,
    show_pairs: bool,
) -> None:
    raters = raters_of(dataset, set(table.columns["case"].tolist()), list(comparisons))
    means = means_table(list(comparisons.values()), intervals=False, raters=raters)
    means.write(folder.means)
    pairs = {
        metric: pairs_table(comparison)
        for metric, comparison in comparisons.items()
        if len(comparison.methods) > 1
    }
    for metric, of_metric in pairs.items():
        of_metric.write(folder.pairs(metric))
    warning = raters_warning(list(comparisons.values()), raters)
    if warning:
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
    say(console, verdict(comparisons))
    console.print(means.rich())
    if show_pairs:
        for of_metric in pairs.values():
            console.print(of_metric.rich())
    elif pairs:
        say(
            console, "differences of all pairs, with intervals and p-values: --pairs, or the files pairs_*.md"
        )
