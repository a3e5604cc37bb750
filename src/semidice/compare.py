"""`semidice compare`: variants are trained over the same folds, then all finished ones are compared.

    OUT/NAME/seed_K/    the run of a variant; K is its option `seed`
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
from pathlib import Path

from lightning_fabric import Fabric
from rich.console import Console

from .console import Progress, say
from .data.dataset import Dataset
from .decisions.volumes import check_level
from .errors import UserError, described, given, nearest
from .locks import locked
from .metrics.registry import SCORES, ScoreKey
from .paths import ComparisonFolder, RunFolder
from .recipes.grid import Variant
from .report.answer import raters_of, raters_warning, seeds_sentences, verdict
from .report.runs import read_other_methods
from .runs.decide import run_intervals, scored_rules
from .runs.decisions import add_decisions, mask_metrics, rule_names
from .runs.run import TrainedRun
from .statistics.cases import (
    CaseTable,
    concatenate,
    find_keys,
    in_order,
    keys_of,
    methods_of,
    rows_of,
    write_cases,
)
from .statistics.compare import Comparison, compare_cases
from .statistics.tables import means_table, pairs_table
from .training.command import RunBar, start_fabric
from .training.crossvalidation import cross_validate, start_run
from .training.grid import check_engine, finish_folds
from .training.phases import write_jobs_table


class CompareError(UserError):
    """Some variants failed; the message names them and their errors."""


@dataclass
class Outcome:
    """The result of all variants: case tables and runs of the finished ones, errors of the failed ones."""

    tables: dict[str, CaseTable] = field(default_factory=dict)
    runs: dict[str, TrainedRun] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def table(self) -> CaseTable:
        """All scores; the methods are those of the variants."""
        return in_order(concatenate(self.tables.values()))

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
    failed: Mapping[str, str] | None = None,
) -> Outcome:
    """Train every variant that is not finished, with one progress bar for each.

    failed: errors of variants that are not to be trained, by their absolute folder.
    """
    outcome = Outcome()
    with Progress(console) as progress:
        bars = {variant.name: RunBar(progress, variant.recipe, name=variant.name) for variant in variants}
        for variant in variants:
            bar = bars[variant.name]
            try:
                if variant.teacher in outcome.failed:
                    raise UserError(f"its teacher {variant.teacher} failed")
                folder = str(variant.folder.absolute())
                if failed and folder in failed:
                    raise UserError(failed[folder])
                with locked(RunFolder(variant.folder), "semidice compare"):
                    run = start_run(variant.recipe, variant.folder, resume=True)
                    table = cross_validate(
                        run,
                        fabric,
                        on_step=bar.show_step,
                        on_phase=bar.show_phase,
                    )
                assert table is not None
            # a wrong recipe must not stop the others
            except Exception as error:
                outcome.failed[variant.name] = described(error)
                bar.show_failed()
            else:
                outcome.tables[variant.name], outcome.runs[variant.name] = table, run
                bar.show_finished()
    return outcome


def seeded_tables(tables: Mapping[str, CaseTable], variants: Sequence[Variant]) -> dict[str, CaseTable]:
    """The tables with the column `seed` where a method has several."""
    seeds = {variant.name: variant.seed for variant in variants}
    return {
        name: table if (seed := seeds[name]) is None else table.assign(seed=seed)
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
        tables[name] = scores.assign(method=f"{run.recipe.name}, " + scores["method"])
    return tables


def comparisons_of(table: CaseTable, metrics: Sequence[str] | None = None) -> dict[ScoreKey, Comparison]:
    """The comparison of all methods by each score; None takes all scores that all methods have.

    A metric stands for its scores in the table, such as that of scans and that of slices.
    """
    keys = shared_scores(table)
    if metrics is not None:
        found = {metric: [key for key in find_keys(table, metric) if key in keys] for metric in metrics}
        missing = [metric for metric, of_metric in found.items() if not of_metric]
        if missing:
            raise UserError(
                f"the case table has no {', '.join(missing)} of every method; it has "
                + ", ".join(map(str, keys))
            )
        keys = list(dict.fromkeys(key for of_metric in found.values() for key in of_metric))
    return {key: compare_cases(table, key, drop=True) for key in keys}


def shared_scores(table: CaseTable) -> list[ScoreKey]:
    """The scores by which every method of the table was scored; a ValueError if there is none."""
    methods = set(methods_of(table))
    shared = [key for key in keys_of(table) if set(rows_of(table, key)["method"]) == methods]
    if not shared:
        raise UserError(
            f"no score is common to {', '.join(methods_of(table))}: they have "
            f"{', '.join(map(str, keys_of(table)))}; score them alike with `semidice evaluate`"
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
) -> Mapping[ScoreKey, Comparison]:
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
        with given("--interval"):
            check_level(interval)
    others = read_other_methods(case_tables, prepared, [variant.method for variant in variants])
    _check_metrics(metrics or (), others)
    folder = ComparisonFolder(out)
    with locked(folder, "semidice compare"):
        outcome = Outcome()
        if variants:
            failed: Mapping[str, str] = {}
            if on is not None:
                failed = finish_folds(variants, on, console, accelerator=accelerator)
            fabric = start_fabric(accelerator=accelerator)
            outcome = run_variants(variants, fabric, console, failed=failed)
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
) -> dict[ScoreKey, Comparison]:
    """Compare all methods, print and write; empty if no variant is finished."""
    comparisons: dict[ScoreKey, Comparison] = {}
    if outcome.tables:
        table = outcome.table()
        folder = ComparisonFolder(out)
        write_cases(table, folder.cases)
        for sentence in seeds_sentences(table):
            console.print(sentence, style="yellow", highlight=False, markup=False, soft_wrap=True)
        with given("these scores cannot be compared"):
            comparisons = comparisons_of(table, metrics)
        partial = [str(key) for key in keys_of(table) if metrics is None and key not in comparisons]
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
    known = {*SCORES, *(str(key) for table in others.values() for key in keys_of(table))}
    for metric in metrics:
        if metric not in known and not any(find_keys(table, metric) for table in others.values()):
            raise UserError(f"there is no score {metric!r}{nearest(metric, sorted(known))}")


def _show_and_write(
    comparisons: Mapping[ScoreKey, Comparison],
    table: CaseTable,
    dataset: Dataset,
    folder: ComparisonFolder,
    console: Console,
    show_pairs: bool,
) -> None:
    raters = raters_of(dataset, set(table["case"]), list(comparisons))
    means = means_table(list(comparisons.values()), intervals=False, raters=raters)
    means.write(folder.means)
    pairs = {
        key.file_name: pairs_table(comparison)
        for key, comparison in comparisons.items()
        if len(comparison.methods) > 1
    }
    for name, of_metric in pairs.items():
        of_metric.write(folder.pairs(name))
    warning = raters_warning(list(comparisons.values()), raters)
    if warning:
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
    else:
        say(console, verdict(list(comparisons.values())))
    console.print(means)
    if show_pairs:
        for of_metric in pairs.values():
            console.print(of_metric)
    elif pairs:
        say(
            console, "differences of all pairs, with intervals and p-values: --pairs, or the files pairs_*.md"
        )
