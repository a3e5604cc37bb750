"""`semidice compare`: variants are trained over the same folds, then all finished ones are compared.

    OUT/NAME/seed_K/    the run of a variant; K is its option `seed`
        cases.parquet   scores of every case by every method
        means.*, pairs_METRIC.*   tables as Markdown, LaTeX and CSV

Prints a verdict of one or two sentences, then the means; pairs on request. A variant that fails does not stop
the others; its error is reported at the end. A second call skips the finished folds. Methods of other tools
are compared by the case tables that `semidice evaluate --predictions` writes.

With rules of --decide, methods are NAME, RULE: every run is scored by every rule, without another training,
and only scores of masks are compared, because no other score depends on the rule.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from .console import say
from .data.dataset import Dataset
from .decisions.volumes import check_level
from .errors import UserError, given, nearest
from .locks import locked
from .metrics.registry import SCORES, ScoreKey
from .paths import ComparisonFolder
from .recipes.grid import Variant
from .recipes.options import FITTED
from .report.answer import raters_of, raters_warning, seeds_sentences, verdict
from .report.runs import read_other_methods
from .runs.evaluate import EvaluateOptions, run_evaluate
from .runs.fits import read_fits
from .runs.rules import fitted_text, mask_metrics, rule_names
from .runs.scoring import score_key
from .statistics.cases import (
    CaseTable,
    concatenate,
    find_keys,
    in_order,
    keys_of,
    methods_of,
    read_cases,
    rows_of,
    write_cases,
)
from .statistics.compare import Comparison, compare_cases
from .statistics.tables import means_table, pairs_table
from .training.grid import Outcome, check_engine, train_grid


def decided_tables(
    outcome: Outcome, dataset: Dataset, rules: Sequence[str], console: Console
) -> dict[str, CaseTable]:
    """The stored scores of masks of each run by all rules, as methods NAME, RULE."""
    tables = {}
    for name, run in outcome.runs.items():
        if FITTED in rules:
            say(console, f"{name}: {fitted_text(read_fits(run.folder).rules)}")
        scored, of_recipe = read_cases(run.folder.decisions), run.recipe.validation
        options = {"unit": of_recipe.unit, "tolerance": of_recipe.tolerance}
        metrics = mask_metrics(dataset, of_recipe.metrics)
        keys = [score_key(dataset, metric, **options) for metric in metrics]  # type: ignore[arg-type]
        table = concatenate(rows_of(scored, key) for key in keys)
        table = table[table["method"].isin(rules)].assign(seed=outcome.tables[name]["seed"].iloc[0])
        tables[name] = table.assign(method=f"{run.recipe.name}, " + table["method"])
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
    """Train, compare, print and write; a GridError at the end if a variant failed.

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
    names = rule_names(rules) if rules else ()
    if interval is not None:
        with given("--interval"):
            check_level(interval)
    others = read_other_methods(case_tables, prepared, [variant.method for variant in variants])
    _check_metrics(metrics or (), others)
    folder = ComparisonFolder(out)
    with locked(folder, "semidice compare"):
        outcome = train_grid(variants, console, on=on, accelerator=accelerator, rules=names)
        tables = outcome.tables
        if names:
            tables = decided_tables(outcome, prepared, names, console)
        if interval is not None:
            for run in outcome.runs.values():
                volumes = EvaluateOptions(interval=interval)
                run_evaluate(run.folder.path, volumes, console, dataset=prepared.folder.path)
        tables = tables | others
        of_runs = bool(outcome.runs)
        comparisons = _compared(tables, of_runs, prepared, out, metrics, show_pairs, console)
    outcome.raise_if_failed()
    return comparisons


def _compared(
    tables: Mapping[str, CaseTable],
    of_runs: bool,
    prepared: Dataset,
    out: Path,
    metrics: Sequence[str] | None,
    show_pairs: bool,
    console: Console,
) -> dict[ScoreKey, Comparison]:
    """Compare all methods, print and write; empty if no variant is finished."""
    comparisons: dict[ScoreKey, Comparison] = {}
    if tables:
        table = in_order(concatenate(tables.values()))
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
        of_dataset = "" if of_runs else f" --dataset {shlex.quote(str(prepared.folder.path))}"
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
