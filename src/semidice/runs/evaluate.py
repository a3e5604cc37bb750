"""`semidice evaluate`: the scores of the stored predictions of a run, or of files that another tool made.

Folds are scored as at the end of training, so the same metrics give the same bits. The scores are added to
the tables of the folds and of the run, where they replace the rows of the same score, but only if all folds
are finished. Otherwise another file must be named, which holds these scores alone. Rules of --decide are
scored in `rules`, volumes with --interval in `volumes`. The scores of files are written to the file that is
named. Their fold is -1: which cases a network was trained on is not known here.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..console import progress_bar, say
from ..data.dataset import Dataset, Unit
from ..decisions.decision import Decision
from ..decisions.volumes import check_level
from ..errors import UserError, given, listing
from ..locks import locked
from ..metrics.registry import SCORES, ScoreKey
from ..paths import PredictionFolder, RunFolder
from ..recipes.options import FITTED, ValidationOptions
from ..statistics.cases import (
    CaseTable,
    check_suffix,
    concatenate,
    in_order,
    keys_of,
    read_cases,
    rows_of,
    with_scores,
    write_cases,
)
from ..statistics.compare import compare_scores
from ..statistics.pairing import paired
from .held_out import HeldOut
from .prediction_files import PredictionFiles
from .rules import mask_metrics, mask_scores, rule_names, rules_table, run_rules
from .scoring import Read, ScoreOptions, inapplicable_metrics, score_cases, score_key
from .volumes import run_intervals


@dataclass(frozen=True)
class EvaluateOptions:
    """What is scored, and where the scores go.

    metrics, unit, tolerance: None takes those of the recipe, or its defaults. rules: of `rules.rule_names`;
    argmax is added, and only scores of masks are computed. interval: level of volumes' intervals, such as
    0.9. out: a .parquet or .csv file; None adds the scores to the run.
    """

    metrics: Sequence[str] | None = None
    unit: Unit | None = None
    tolerance: float | None = None
    rules: Sequence[str] = ()
    interval: float | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        check_suffix(self.out)
        object.__setattr__(self, "rules", rule_names(self.rules) if self.rules else ())
        if self.interval is not None:
            with given("--interval"):
                check_level(self.interval)
            if self.out is not None and not self.rules:
                raise UserError("-o names the file for scores of --decide; volumes are written to the run")

    def scored(self, validation: ValidationOptions) -> ScoreOptions:
        """With the options of a recipe where none was given."""
        metrics = validation.metrics if self.metrics is None else tuple(self.metrics)
        tolerance = validation.tolerance if self.tolerance is None else self.tolerance
        return ScoreOptions(metrics, self.unit or validation.unit, tolerance)


def run_evaluate(
    run: Path, options: EvaluateOptions, console: Console, *, dataset: Path | None = None
) -> CaseTable | None:
    """Score every finished fold, print the means, and write the scores; the new ones. None for volumes alone.

    dataset: the new folder of the dataset, if it was moved.
    """
    folder = RunFolder(run)
    with ExitStack() as stack:
        # what two processes write is kept. With `out` nothing is written to the run, which may be read-only
        if options.out is None and folder.recipe.is_file():
            stack.enter_context(locked(folder, "semidice evaluate"))
        held_out = HeldOut.open(run, dataset)
        missing = held_out.run.missing_folds
        if missing:
            say(console, f"not finished and not in these scores: fold {', '.join(map(str, missing))}")
        table = None
        if options.rules:
            chosen = _of_masks(held_out, options)
            table = run_rules(held_out, options.rules, chosen, console, store=options.out is None)
            if options.out is not None:
                _write(table, options.out, console)
        elif options.interval is None:
            table = _scores_of_run(held_out, options, console)
        if options.interval is not None:
            run_intervals(held_out, options.interval, console)
        return table


def _of_masks(held_out: HeldOut, options: EvaluateOptions) -> ScoreOptions:
    chosen = options.scored(held_out.run.recipe.validation)
    asked = options.metrics is not None
    return replace(chosen, metrics=mask_metrics(held_out.dataset, chosen.metrics, asked=asked))


def _scores_of_run(held_out: HeldOut, options: EvaluateOptions, console: Console) -> CaseTable:
    run, dataset = held_out.run, held_out.dataset
    chosen = options.scored(run.recipe.validation)
    chosen = _applicable(dataset, chosen, inapplicable_metrics(dataset, chosen.metrics), console)
    parts = [
        _Part(cases, held_out.read(fold), run.recipe.name, fold) for fold, cases in held_out.cases.items()
    ]
    tables = dict(zip(held_out.cases, _scored(dataset, parts, chosen, console), strict=True))
    table = in_order(concatenate(tables.values()))
    console.print(scores_table(table, title=f"{run.recipe.name}: {len(tables)} folds"))
    if options.out is not None:
        _write(table, options.out, console)
    elif run.missing_folds:
        say(console, f"{run.folder.cases} is written when all folds are finished; name a file with -o")
    else:
        _add_to_run(held_out, tables, console)
    return table


def _add_to_run(held_out: HeldOut, tables: Mapping[int, CaseTable], console: Console) -> None:
    """Add the scores of every fold to the table of the fold, and join these to the table of the run."""
    run = held_out.run
    # the folds first: the table of the run is made from theirs when a training is resumed
    for fold, scores in tables.items():
        folder = run.folder.fold(fold)
        with locked(folder, "semidice evaluate"):
            write_cases(with_scores(read_cases(folder.cases), scores), folder.cases)
    whole = run.gather()
    added = {key for scores in tables.values() for key in keys_of(scores)}
    kept = [str(key) for key in keys_of(whole) if key not in added]
    say(console, f"wrote {run.folder.cases}" + (f", which also has {', '.join(kept)}" if kept else ""))


class _Part(NamedTuple):
    """Cases that are scored together, and their predictions; see `score_cases`."""

    cases: Sequence[int]
    read: Read
    method: str
    fold: int = -1
    decision: Decision | None = None


def _scored(
    dataset: Dataset, parts: Sequence[_Part], options: ScoreOptions, console: Console
) -> list[CaseTable]:
    """The scores of each part, with one progress bar for all."""
    with progress_bar(console, "scoring", "cases", total=sum(len(part.cases) for part in parts)) as bar:
        return [
            score_cases(
                dataset,
                part.cases,
                part.read,
                options,
                method=part.method,
                fold=part.fold,
                decision=part.decision,
                on_cases=bar.advance,
            )
            for part in parts
        ]


def run_evaluate_files(
    folder: Path,
    dataset: Path,
    options: EvaluateOptions,
    console: Console,
    *,
    name: str | None = None,
    skip_missing: bool = False,
    ignore_placement: bool = False,
) -> CaseTable:
    """Score the predictions in a folder, see `prediction_files`; print the means and write them to `out`.

    name: the method in the table; None takes the name of the folder. skip_missing: score the scans that have
    a prediction, although others have none. With rules, the methods are NAME, RULE.
    """
    if FITTED in options.rules:
        raise UserError("the rule fitted needs a run, whose folds it is fitted to: name another one")
    method = name or folder.resolve().name
    opened = Dataset(dataset)
    opened.check_files()
    files = PredictionFiles(folder, opened, ignore_placement=ignore_placement)
    _check_not_trained_on(folder, opened)
    _check_files(files, folder, opened, skip_missing=skip_missing, console=console)
    if options.rules and files.are_masks:
        raise UserError(f"--decide makes masks from probabilities, but the files in {folder} are masks")
    chosen = options.scored(ValidationOptions())
    left_out = _left_out(opened, chosen.metrics, are_masks=files.are_masks)
    if options.rules:
        chosen = replace(chosen, metrics=mask_metrics(opened, chosen.metrics))
    chosen = _applicable(opened, chosen, left_out, console)
    methods: dict[str, Decision | None] = {
        f"{method}, {rule}": Decision.parse(rule) for rule in options.rules
    } or {method: None}
    parts = [_Part(files.cases, files.read_cases, each, -1, rule) for each, rule in methods.items()]
    table = in_order(concatenate(_scored(opened, parts, chosen, console)))
    title = f"{method}: {'masks' if files.are_masks else 'probabilities'} of {folder}"
    if options.rules:
        table = mask_scores(table)
        console.print(rules_table(table, next(iter(methods)), title=title))
    else:
        console.print(scores_table(table, title=title))
    if options.out is not None:
        _write(table, options.out, console)
    else:
        say(console, "nothing was written: name a .parquet or .csv file with -o")
    return table


def _check_not_trained_on(folder: Path, dataset: Dataset) -> None:
    """A UserError if `semidice predict` wrote the files with a run that was trained on this dataset."""
    settings = PredictionFolder(folder).settings
    if settings.is_file() and f'"{dataset.manifest_sha256}"' in settings.read_text(encoding="utf-8"):
        raise UserError(
            f"{folder} was predicted by networks that were trained on {dataset.folder.path}: their scores on "
            "its cases would be too good; `semidice evaluate RUN` scores each case by a network that never "
            "saw it"
        )


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
    dataset: Dataset, options: ScoreOptions, left_out: Mapping[str, str], console: Console
) -> ScoreOptions:
    """Without the metrics that are left out, after a line for each; a UserError if none remains."""
    for name, reason in left_out.items():
        say(console, f"left out {name}: {reason}")
    wanted = [name for name in options.metrics if name not in left_out]
    if not wanted:
        raise UserError(
            f"no score of {', '.join(options.metrics)} applies to {dataset.folder.path}: nothing was written"
        )
    if dataset.has_slices:
        num_slices, num_scans = len(dataset), len(dataset.manifest.scans)
        together = f"{num_slices} slices are put together to {num_scans} scans, which are scored as they came"
        alone = f"each of {num_slices} slices of {num_scans} scans is scored on its own"
        say(console, together if options.unit == "scan" else alone)
    keys = [score_key(dataset, name, unit=options.unit) for name in wanted]
    in_voxels = [key.metric for key in keys if "voxels" in key.unit]
    if in_voxels:
        say(console, f"in voxels, because the spacing is not known of every scan: {', '.join(in_voxels)}")
    return replace(options, metrics=wanted)


def _write(table: CaseTable, out: Path, console: Console) -> None:
    write_cases(table, out)
    say(console, f"wrote {out}")


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
