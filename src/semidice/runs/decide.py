"""`semidice evaluate RUN --decide RULE --interval LEVEL`: masks by several rules, volumes with intervals."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from ..console import progress_bar, say
from ..data.dataset import Dataset, Unit
from ..decisions.volumes import check_level
from ..errors import UserError, given
from ..recipes.options import FITTED
from ..statistics.cases import CaseTable, check_suffix, methods_of, write_cases
from .decision_file import ALL_FOLDS
from .decisions import ARGMAX, add_decisions, fitted_rules, mask_metrics, rule_names, score_rules
from .evaluate import locked_run, open_dataset, rules_table
from .intervals import conformal_ends, fitted_intervals, intervals_table, scan_volumes, write_volumes
from .run import TrainedRun, open_run


@locked_run
def run_decide(
    run: Path,
    *,
    rules: Sequence[str] = (),
    interval: float | None = None,
    metrics: Sequence[str] | None = None,
    out: Path | None = None,
    unit: Unit | None = None,
    tolerance: float | None = None,
    dataset_path: Path | None = None,
    device: torch.device | str = "cpu",
    console: Console,
) -> None:
    """Score the rules and estimate volumes of every finished fold; print both, and write them to the run.

    rules: of `rule_names`; argmax is added. interval: level, such as 0.9. metrics: scores of masks; None
    takes those of the recipe. out: another file for the scores of the rules. Nothing is written to a run that
    has unfinished folds.
    """
    check_suffix(out)
    names = rule_names(rules) if rules else []
    if interval is not None:
        with given("--interval"):
            check_level(interval)
    if out is not None and not names:
        raise UserError("-o names the file for scores of --decide; volumes are written to the run")
    trained = open_run(run)
    dataset = open_dataset(trained, dataset_path, console)
    if not trained.finished_folds:
        raise UserError(f"{run} has no finished fold to evaluate: continue with `semidice train --resume`")
    missing = ", ".join(map(str, trained.missing_folds))
    if missing:
        say(console, f"not finished and not in these scores: fold {missing}")
    if names:
        chosen = mask_metrics(
            dataset,
            trained.recipe.validation.metrics if metrics is None else metrics,
            asked=metrics is not None,
        )
        table = scored_rules(
            trained, dataset, names, console, metrics=chosen, unit=unit, tolerance=tolerance, device=device
        )
        console.print(rules_table(table, ARGMAX, title=f"{trained.recipe.name}: masks by {len(names)} rules"))
        _write_rules(trained, table, out, console)
    if interval is not None:
        run_intervals(trained, dataset, interval, console)


def scored_rules(
    run: TrainedRun,
    dataset: Dataset,
    rules: Sequence[str],
    console: Console,
    *,
    metrics: Sequence[str],
    unit: Unit | None = None,
    tolerance: float | None = None,
    device: torch.device | str = "cpu",
) -> CaseTable:
    """`score_rules` behind a progress bar; the fitted rules are printed."""
    if FITTED in rules:
        num_scans = run.num_predicted(dataset, run.recipe.validation.unit)
        with progress_bar(console, "fitting the rule", "scans", total=num_scans) as bar:
            fitted = fitted_rules(run, dataset, on_scan=bar.advance)
        of_folds = [f"fold {fold}: {fit.decision}" for fold, fit in fitted.items() if fold != ALL_FOLDS]
        say(console, f"fitted for {', '.join(of_folds)}; for new scans: {fitted[ALL_FOLDS].decision}")
    total = len(rules) * run.num_predicted(dataset)
    with progress_bar(console, "scoring", "cases", total=total) as bar:
        return score_rules(
            run,
            dataset,
            rules,
            metrics=metrics,
            unit=unit,
            tolerance=tolerance,
            device=device,
            on_cases=bar.advance,
        )


def _write_rules(run: TrainedRun, table: CaseTable, out: Path | None, console: Console) -> None:
    if out is not None:
        write_cases(table, out)
        say(console, f"wrote {out}")
    elif run.missing_folds:
        say(console, f"{run.folder.decisions} is written when all folds are finished; name a file with -o")
    else:
        whole = add_decisions(run, table)
        others = [rule for rule in methods_of(whole) if rule not in methods_of(table)]
        say(
            console,
            f"wrote {run.folder.decisions}" + (f", which also has {', '.join(others)}" if others else ""),
        )


def run_intervals(run: TrainedRun, dataset: Dataset, level: float, console: Console) -> None:
    """Print how many raters the intervals of the volumes cover, and write volumes.csv of the run."""
    total = run.num_predicted(dataset)
    with progress_bar(console, "measuring volumes", "cases", total=total) as bar:
        volumes = scan_volumes(run, dataset, level, on_cases=bar.advance)
    try:
        corrected = conformal_ends(volumes, fitted_intervals(run, dataset, volumes, level))
    # too few folds or patients; the intervals of nested raters need neither
    except ValueError as error:
        corrected = None
        say(console, f"intervals are not corrected: {error}")
    title = f"{run.recipe.name}: {100 * level:g} % intervals of the volume"
    console.print(intervals_table(volumes, corrected, level, title=title))
    if run.missing_folds:
        say(console, f"{run.folder.volumes} is written when all folds are finished")
        return
    write_volumes(run, volumes, corrected, level=level)
    say(console, f"wrote {run.folder.volumes}")
