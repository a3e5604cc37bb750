"""`semidice evaluate`: the scores of the stored predictions of a run, or of files that another tool made.

Folds are scored as at the end of training, so the same metrics give the same bits. The scores are added to
the tables of the folds and of the run, where they replace the rows of the same score, but only if all folds
are finished. Otherwise another file must be named, which holds these scores alone. If the recipe has
`decision: fitted`, scores of masks are by argmax in the tables of folds, and by the fitted rule in the run's.
The scores of files are written to the file that is named. Their fold is -1: which cases a network was trained
on is not known here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ..console import progress_bar, say
from ..data.dataset import Dataset, Unit
from ..data.folds import fold_cases, read_folds
from ..decisions.decision import Decision
from ..errors import UserError, listing
from ..locks import locked
from ..metrics.registry import SCORES, ScoreKey
from ..paths import FoldFolder, RunFolder
from ..recipes.options import FITTED, ValidationOptions
from ..statistics.cases import (
    CaseTable,
    check_suffix,
    concatenate,
    in_order,
    keys_of,
    methods_of,
    read_cases,
    rows_of,
    with_scores,
    write_cases,
)
from ..statistics.compare import compare_cases, compare_scores
from ..statistics.pairing import paired
from ..statistics.tables import baseline_table
from .decisions import mask_metrics, mask_scores, rule_names
from .prediction_files import PredictionFiles
from .run import TrainedRun, manifest_digest, open_run
from .scoring import inapplicable_metrics, score_fold, score_key

P = ParamSpec("P")
Result = TypeVar("Result")


def locked_run(evaluate: Callable[P, Result]) -> Callable[P, Result]:
    """The function with its run locked, so that what two processes write is kept.

    With `out` nothing is written to the run, which may then be read-only.
    """

    @wraps(evaluate)
    def with_lock(*arguments: P.args, **options: P.kwargs) -> Result:
        run = arguments[0] if arguments else options["run"]
        folder = RunFolder(Path(str(run)))
        with ExitStack() as stack:
            # no file is created in a folder that is not a run
            if options.get("out") is None and folder.recipe.is_file():
                stack.enter_context(locked(folder, "semidice evaluate"))
            return evaluate(*arguments, **options)

    return with_lock


@locked_run
def run_evaluate(
    run: Path,
    *,
    metrics: Sequence[str] | None = None,
    out: Path | None = None,
    unit: Unit | None = None,
    tolerance: float | None = None,
    dataset_path: Path | None = None,
    device: torch.device | str = "cpu",
    console: Console,
) -> CaseTable:
    """Score every finished fold, print the means, and write the scores to `out`, or add them to the run.

    metrics, unit, tolerance: None takes those of the recipe. dataset_path: the new folder of the dataset, if
    it was moved. Returns the new scores.
    """
    check_suffix(out)
    trained = open_run(run)
    dataset = open_dataset(trained, dataset_path, console)
    validation = trained.recipe.validation
    metrics = validation.metrics if metrics is None else tuple(metrics)
    unit = unit or validation.unit
    tolerance = validation.tolerance if tolerance is None else tolerance
    fold_of_case = read_folds(trained.folder.folds, dataset)
    finished = trained.finished_folds
    if not finished:
        raise UserError(f"{run} has no finished fold to evaluate: continue with `semidice train --resume`")
    missing = list(map(str, trained.missing_folds))
    metrics = _applicable(dataset, metrics, inapplicable_metrics(dataset, metrics), unit, console)
    parts = [
        _Part(fold_cases(fold_of_case, fold)[1], trained.folder.fold(fold), trained.recipe.name, fold, None)
        for fold in finished
    ]
    scored = _scored(dataset, parts, console, metrics=metrics, unit=unit, tolerance=tolerance, device=device)
    tables = dict(zip(finished, scored, strict=True))
    table = in_order(concatenate(tables.values()))
    console.print(scores_table(table, title=f"{trained.recipe.name}: {len(finished)} folds"))
    if missing:
        say(console, f"not finished and not in these scores: fold {', '.join(missing)}")
    if out is not None:
        _write(table, out, console)
    elif missing:
        say(console, f"{trained.folder.cases} is written when all folds are finished; name a file with -o")
    else:
        _add_to_run(trained, tables, console)
    return table


class _Part(NamedTuple):
    """Cases that are scored together, and their predictions; see `score_fold`."""

    cases: Sequence[int]
    predictions: FoldFolder | Callable[[int], np.ndarray]
    method: str
    fold: int
    decision: Decision | None


def _scored(dataset: Dataset, parts: Sequence[_Part], console: Console, **options: Any) -> list[CaseTable]:
    """The scores of each part, with one progress bar for all. options: of `score_fold`."""
    with progress_bar(console, "scoring", "cases", total=sum(len(part.cases) for part in parts)) as bar:
        return [
            score_fold(
                dataset,
                part.cases,
                part.predictions,
                method=part.method,
                fold=part.fold,
                decision=part.decision,
                on_cases=bar.advance,
                **options,
            )
            for part in parts
        ]


def _add_to_run(trained: TrainedRun, tables: Mapping[int, CaseTable], console: Console) -> None:
    """Add the scores of every fold to the table of the fold, and join these to the table of the run."""
    # the folds first: the table of the run is made from theirs when a training is resumed
    for fold, scores in tables.items():
        folder = trained.folder.fold(fold)
        with locked(folder, "semidice evaluate"):
            write_cases(with_scores(read_cases(folder.cases), scores), folder.cases)
    whole = in_order(concatenate(read_cases(trained.folder.fold(fold).cases) for fold in tables))
    write_cases(whole, trained.folder.cases)
    added = {key for scores in tables.values() for key in keys_of(scores)}
    kept = [str(key) for key in keys_of(whole) if key not in added]
    say(console, f"wrote {trained.folder.cases}" + (f", which also has {', '.join(kept)}" if kept else ""))


def run_evaluate_files(
    folder: Path,
    dataset_path: Path,
    *,
    name: str | None = None,
    metrics: Sequence[str] | None = None,
    out: Path | None = None,
    unit: Unit | None = None,
    tolerance: float | None = None,
    skip_missing: bool = False,
    ignore_placement: bool = False,
    rules: Sequence[str] = (),
    device: torch.device | str = "cpu",
    console: Console,
) -> CaseTable:
    """Score the predictions in a folder, see `prediction_files`; print the means and write them to `out`.

    name: the method in the table; None takes the name of the folder. metrics, unit, tolerance: None takes the
    defaults of a recipe. skip_missing: score the scans that have a prediction, although others have none.
    rules: score masks alone, by these rules and argmax; the methods are then NAME, RULE.
    """
    check_suffix(out)
    names = rule_names(rules) if rules else []
    if FITTED in names:
        raise UserError("the rule fitted needs a run, whose folds it is fitted to: name another one")
    defaults = ValidationOptions()
    unit, tolerance = unit or defaults.unit, defaults.tolerance if tolerance is None else tolerance
    metrics = defaults.metrics if metrics is None else tuple(metrics)
    method = name or folder.resolve().name
    dataset = Dataset(dataset_path)
    dataset.check_files()
    files = PredictionFiles(folder, dataset, ignore_placement=ignore_placement)
    _check_files(files, folder, dataset, skip_missing=skip_missing, console=console)
    if names and files.are_masks:
        raise UserError(f"--decide makes masks from probabilities, but the files in {folder} are masks")
    left_out = _left_out(dataset, metrics, are_masks=files.are_masks)
    metrics = mask_metrics(dataset, metrics) if names else metrics
    metrics = _applicable(dataset, metrics, left_out, unit, console)
    methods: dict[str, Decision | None] = {f"{method}, {rule}": Decision.parse(rule) for rule in names}
    methods = methods or {method: None}
    parts = [_Part(files.cases, files.read, of_rule, -1, decision) for of_rule, decision in methods.items()]
    tables = _scored(dataset, parts, console, metrics=metrics, unit=unit, tolerance=tolerance, device=device)
    table = in_order(concatenate(tables))
    if names:
        table = mask_scores(table)
    title = f"{method}: {'masks' if files.are_masks else 'probabilities'} of {folder}"
    first = next(iter(methods))
    console.print(rules_table(table, first, title=title) if names else scores_table(table, title=title))
    if out is not None:
        _write(table, out, console)
    else:
        say(console, "nothing was written: name a .parquet or .csv file with -o")
    return table


def _left_out(dataset: Dataset, metrics: Sequence[str], *, are_masks: bool) -> dict[str, str]:
    """The metrics that do not apply to files of another tool, and the reason."""
    left_out = inapplicable_metrics(dataset, metrics)
    if are_masks:
        need_prob = [metric for metric in metrics if SCORES[metric].judges == "confidence"]
        left_out |= dict.fromkeys(need_prob, "the files are masks, and it needs probabilities")
    return left_out


def _check_files(
    files: PredictionFiles, folder: Path, dataset: Dataset, *, skip_missing: bool, console: Console
) -> None:
    """Name files that are not used and scans without a prediction; a ValueError if these must not be."""
    if files.unused:
        say(console, f"not used, because no case has the name: {listing(files.unused, 'file')}")
    if not files.missing:
        return
    without = f"{listing(files.missing, 'scan')} of {len(dataset.manifest.scans)}"
    if not skip_missing or not files.cases:
        raise UserError(
            f"{folder} has no prediction of {without}: name each file as its scan, such as "
            f"{files.missing[0]}.nii.gz, .png or .npz"
            + ("; or score only the others with --skip-missing" if files.cases else "")
        )
    say(console, f"without a prediction, and not in these scores: {without}")


def _applicable(
    dataset: Dataset, metrics: Sequence[str], left_out: Mapping[str, str], unit: Unit, console: Console
) -> list[str]:
    """The metrics that are not left out, after a line for each that is; a ValueError if none remains."""
    for name, reason in left_out.items():
        say(console, f"left out {name}: {reason}")
    wanted = [name for name in metrics if name not in left_out]
    if not wanted:
        raise UserError(
            f"no score of {', '.join(metrics)} applies to {dataset.folder.path}: nothing was written"
        )
    _say_units(dataset, wanted, unit, console)
    return wanted


def _write(table: CaseTable, out: Path, console: Console) -> None:
    write_cases(table, out)
    say(console, f"wrote {out}")


def _say_units(dataset: Dataset, metrics: Sequence[str], unit: Unit, console: Console) -> None:
    if dataset.has_slices:
        num_slices, num_scans = len(dataset), len(dataset.manifest.scans)
        say(
            console,
            f"{num_slices} slices are put together to {num_scans} scans, which are scored as they came"
            if unit == "scan"
            else f"each of {num_slices} slices of {num_scans} scans is scored on its own",
        )
    keys = [score_key(dataset, name, unit=unit) for name in metrics]
    in_voxels = [key.metric for key in keys if "voxels" in key.unit]
    if in_voxels:
        say(console, f"in voxels, because the spacing is not known of every scan: {', '.join(in_voxels)}")


def scores_table(table: CaseTable, *, title: str) -> Table:
    """Means of one method, one row per metric; with more than two classes, also one row per class."""
    rows = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("metric", "class"):
        rows.add_column(name, overflow="fold")
    for name in ("mean", "95 % interval", "cases"):
        rows.add_column(name, justify="right", no_wrap=True)
    for key in keys_of(table):
        classes = sorted(rows_of(table, key)["class"].unique(), key=lambda name: (name == "mean", name))
        # with two classes, the mean over the foreground is the score of the only foreground class
        for class_name in classes[-1:] if len(classes) == 3 else classes:
            rows.add_row(*_score_cells(table, key, class_name))
    return rows


def rules_table(table: CaseTable, baseline: str, *, title: str) -> RenderableType:
    """One row per method: the mean of each score, its difference to the baseline, and the p-value."""
    methods = [baseline, *(method for method in methods_of(table) if method != baseline)]
    comparisons = [
        compare_cases(table, key, methods=methods, baseline=baseline, drop=True) for key in keys_of(table)
    ]
    return baseline_table(comparisons, baseline, title=title)


def _score_cells(table: CaseTable, key: ScoreKey, class_name: str) -> tuple[str, ...]:
    scores = paired(table, key, class_name, drop=True)
    name, count = key.heading(), str(scores.num_cases)
    if scores.num_cases < 2:
        only = f"{scores.values[0, 0] * key.scale:.3f}" if scores.num_cases else "-"
        return name, class_name, only, "-", count
    mean, low, high = compare_scores(scores).means.iloc[0][["mean", "low", "high"]] * key.scale
    # if almost all cases have the same score, resamples without spread give no finite interval
    interval = f"{low:.3f} to {high:.3f}" if np.isfinite([low, high]).all() else "-"
    return name, class_name, f"{mean:.3f}", interval, count


def open_dataset(run: TrainedRun, path: Path | None, console: Console) -> Dataset:
    """The dataset of a run, or the one at `path`; a ValueError if its classes are not those of the run."""
    dataset = Dataset(path or run.recipe.data.dataset)
    dataset.check_files()
    if dataset.manifest.class_names != run.facts.class_names:
        raise UserError(
            f"{dataset.folder.path} has classes {', '.join(dataset.manifest.class_names)}, but "
            f"{run.folder.path} was trained for {', '.join(run.facts.class_names)}: name its own dataset"
        )
    if manifest_digest(dataset.manifest) != run.facts.manifest_sha256:
        say(console, f"{dataset.folder.path} was prepared again after the run was trained on it")
    return dataset
