"""`semidice calibrate RUN`: calibrators fitted to the stored predictions of a run, scored, and one kept.

    stored predictions, mean of the raters --fit, fold by fold--> calibrators --scores--> table
                                                    '--all folds--> RUN/calibrator.safetensors, for `predict`

Each case is predicted by the network that never saw its patient, and scored with the calibrator that was
fitted to the other folds, which has not seen the patient either. The one that is kept is fitted to all folds.
A stored 0 can be a probability of up to half a unit, and is calibrated as half a unit (`predictions`).

With two classes a calibrated probability is a function of one number. It is computed once at the 65536 stored
probabilities, and is linear between them. So the time for a voxel is the same for every calibrator.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..calibration.calibrator import Calibrator
from ..calibration.calibrators import CALIBRATORS, calibrator_name, load_calibrator
from ..calibration.curves import MIN_STORED_PROB, interpolated
from ..calibration.streams import UNITS
from ..console import progress_bar, say
from ..data.dataset import Dataset
from ..data.folds import fold_cases, read_folds
from ..errors import UserError, nearest, reading
from ..labels.raters import read_raters
from ..locks import locked
from ..paths import FoldFolder, file_hash
from ..statistics.cases import CaseTable, check_suffix, concatenate, keys_of, write_cases
from ..statistics.compare import Comparison, compare_cases
from ..statistics.tables import p_text
from .evaluate import open_dataset
from .predictions import read_case
from .run import TrainedRun, open_run
from .scoring import inapplicable_metrics, score_fold

ALL, UNCALIBRATED = "all", "uncalibrated"
METRICS = (
    "rater_negative_log_likelihood",
    "rater_brier_error",
    "rater_calibration_error",
    "negative_log_likelihood",
    "brier_error",
    "calibration_error",
    "classwise_calibration_error",
    "dice_score",
)
_NOTE = (
    "★ significantly better than uncalibrated, ✗ significantly worse (p < 0.05, paired bootstrap and "
    "permutation, Holm-corrected over pairs). Scores that begin with rater_ are against the mean of the "
    "raters, which calibrators are fitted to; the others are against their majority or the truth."
)
# from probabilities (N, C, *space) to calibrated ones
ProbabilityMap = Callable[[Tensor], Tensor]


def run_calibrate(
    run: Path,
    *,
    by: Sequence[str] = (ALL,),
    keep: str | None = None,
    out: Path | None = None,
    dataset_path: Path | None = None,
    console: Console,
) -> CaseTable:
    """Score calibrators on held-out folds, print the scores, and save one for `predict`; the scores.

    by: names of `CALIBRATORS`, or "all". keep: the one to save; None saves the only one of `by`, and none if
    there are several. out: a .parquet or .csv file for the scores of each case. dataset_path: the new folder
    of the dataset, if it was moved.
    """
    check_suffix(out)
    trained = open_run(run)
    num_classes = len(trained.facts.class_names)
    names = chosen_calibrators(by, keep, num_classes=num_classes, console=console)
    keep = keep or (names[0] if len(names) == 1 else None)
    dataset = open_dataset(trained, dataset_path, console)
    cases = _held_out_cases(trained, dataset, console)
    parts = _fit_folds(trained, dataset, cases, names, console)
    table = _score(trained, dataset, cases, parts, console)
    title = f"{trained.recipe.name}: {len(cases)} folds, each calibrated by the others"
    console.print(_scores_table(table, title=title))
    if out is not None:
        write_cases(table, out)
        say(console, f"wrote {out}")
    if keep is None:
        say(
            console, "no calibrator was kept: choose one with --keep NAME, and `semidice predict` will use it"
        )
        return table
    path = trained.folder.calibrator
    with locked(trained.folder, "semidice calibrate"):
        _merged(part[keep] for part in parts.values()).save(path)
    say(console, f"kept {keep}, fitted to all {len(cases)} folds: {path}")
    say(console, f"next: semidice predict {shlex.quote(str(run))} INPUT -o OUT, which will use it")
    return table


def chosen_calibrators(
    by: Sequence[str], keep: str | None, *, num_classes: int, console: Console
) -> tuple[str, ...]:
    """The calibrators to fit, in the order of `CALIBRATORS`; an unknown name is a ValueError."""
    for option, name in [*(("--by", name) for name in by), *([("--keep", keep)] if keep else [])]:
        known = [*CALIBRATORS, *([ALL] if option == "--by" else [])]
        if name not in known:
            raise UserError(f"{option}: there is no calibrator {name!r}{nearest(name, known)}")
    wanted = {*by, *([keep] if keep else [])}
    if ALL in wanted:
        # the kernel density of several classes is not a table: voxels times 4096 keys
        left_out = {"kde"} if num_classes > 2 and "kde" not in wanted else set()
        if left_out:
            say(console, "left out kde, which is slow with more than two classes: name it with --by kde")
        wanted = {*CALIBRATORS} - left_out
    return tuple(name for name in CALIBRATORS if name in wanted)


def _held_out_cases(trained: TrainedRun, dataset: Dataset, console: Console) -> dict[int, list[int]]:
    """The cases of each finished fold; a ValueError if there are fewer than two folds."""
    run, finished = trained.folder.path, trained.finished_folds
    if not finished:
        raise UserError(f"{run} has no finished fold to calibrate: continue with `semidice train --resume`")
    if len(finished) == 1:
        raise UserError(
            f"{run} has one finished fold, and a calibrator is scored on a fold that it was not fitted to: "
            "finish a second fold with `semidice train --resume`"
        )
    if trained.missing_folds:
        missing = ", ".join(map(str, trained.missing_folds))
        say(console, f"not finished, and not used to calibrate: fold {missing}")
    fold_of_case = read_folds(trained.folder.folds, dataset)
    return {fold: fold_cases(fold_of_case, fold)[1] for fold in finished}


def _fit_folds(
    trained: TrainedRun,
    dataset: Dataset,
    cases: Mapping[int, Sequence[int]],
    names: Sequence[str],
    console: Console,
) -> dict[int, dict[str, Calibrator]]:
    """For each fold, calibrators that have seen its cases alone, against the mean of the raters."""
    parts = {fold: {name: CALIBRATORS[name]() for name in names} for fold in cases}
    with progress_bar(console, "fitting", "cases", total=sum(map(len, cases.values()))) as bar:
        for fold, numbers in cases.items():
            for number in numbers:
                prob = torch.from_numpy(read_case(trained.folder.fold(fold), dataset, number)).unsqueeze(0)
                masks = torch.from_numpy(dataset.masks(number)).unsqueeze(0)
                present = torch.from_numpy(dataset.present[[number]])
                label = read_raters(masks, dataset.num_classes, present, batched=True).mean()
                for calibrator in parts[fold].values():
                    calibrator.partial_fit(_above_zero(prob), label)
                bar.advance()
    return parts


def _merged(parts: Iterable[Calibrator]) -> Calibrator:
    first, *others = parts
    merged = type(first)().merge(first)
    for other in others:
        merged.merge(other)
    return merged


def _score(
    trained: TrainedRun,
    dataset: Dataset,
    cases: Mapping[int, Sequence[int]],
    parts: Mapping[int, Mapping[str, Calibrator]],
    console: Console,
) -> CaseTable:
    """Scores of each fold with the calibrators of the other folds; the method is the calibrator's name."""
    left_out = inapplicable_metrics(dataset, METRICS)
    metrics = [name for name in METRICS if name not in left_out]
    names = [UNCALIBRATED, *next(iter(parts.values()))]
    tables = []
    total = len(names) * sum(map(len, cases.values()))
    with progress_bar(console, "scoring", "cases", total=total) as bar:
        for fold, numbers in cases.items():
            for name in names:
                bar.name = f"scoring {name}"
                folder = trained.folder.fold(fold)
                predictions: FoldFolder | Callable[[int], np.ndarray] = folder
                if name != UNCALIBRATED:
                    others = _merged(part[name] for other, part in parts.items() if other != fold)
                    calibrate = probability_map(others, dataset.num_classes)
                    predictions = _calibrated_reader(folder, dataset, calibrate)
                table = score_fold(
                    dataset,
                    numbers,
                    predictions,
                    metrics=metrics,
                    method=name,
                    fold=fold,
                    unit=trained.recipe.validation.unit,
                    on_cases=bar.advance,
                )
                tables.append(table)
    return concatenate(tables)


def _calibrated_reader(
    folder: FoldFolder, dataset: Dataset, calibrate: ProbabilityMap
) -> Callable[[int], np.ndarray]:
    """A function from a case number to its calibrated probabilities (C, *space)."""

    def read(number: int) -> np.ndarray:
        stored = torch.from_numpy(read_case(folder, dataset, number)).unsqueeze(0)
        calibrated: np.ndarray = calibrate(stored)[0].numpy()
        return calibrated

    return read


def probability_map(calibrator: Calibrator, num_classes: int) -> ProbabilityMap:
    """A function from probabilities (N, C, *space) to calibrated ones; see the module docstring."""
    if num_classes > 2:
        return lambda prob: calibrator.calibrate(_above_zero(prob))
    foreground = torch.arange(UNITS + 1, dtype=torch.float64) / UNITS
    both = torch.stack([1 - foreground, foreground], 1).float()
    curve = calibrator.calibrate(_above_zero(both))[:, 1].contiguous()

    def calibrate(prob: Tensor) -> Tensor:
        lesion = interpolated(prob[:, 1:], curve.to(prob))
        return torch.cat([1 - lesion, lesion], 1)

    return calibrate


def _above_zero(prob: Float[Tensor, "N C *space"]) -> Float[Tensor, "N C *space"]:
    """The probabilities, where one below half a unit is half a unit."""
    prob = prob.clamp(min=MIN_STORED_PROB)
    return prob / prob.sum(1, keepdim=True)


@dataclass(frozen=True)
class KeptCalibrator:
    """The calibrator of a run that `semidice calibrate` kept: its name, its file's SHA-256, its function."""

    name: str
    sha256: str
    calibrate: ProbabilityMap


def kept_calibrator(trained: TrainedRun, console: Console) -> KeptCalibrator | None:
    """The calibrator that was kept with the run, or None; a ValueError if its file is wrong."""
    path = trained.folder.calibrator
    if not path.is_file():
        return None
    calibrator = load_calibrator(path)
    with (
        progress_bar(console, "reading the calibrator"),
        reading(path, "fit it again with `semidice calibrate`"),
    ):
        calibrate = probability_map(calibrator, len(trained.facts.class_names))
    return KeptCalibrator(calibrator_name(calibrator), file_hash(path), calibrate)


def _scores_table(table: CaseTable, *, title: str) -> Table:
    """Mean of each score before and after each calibration, with difference, interval and p-value."""
    rows = Table(title=title, box=box.SIMPLE_HEAD, caption=_NOTE)
    for name in ("score", "calibrator"):
        rows.add_column(name, overflow="fold")
    for name in ("before", "after", "difference", "95 % interval", "p"):
        rows.add_column(name, justify="right", no_wrap=True)
    order = {metric: number for number, metric in enumerate(METRICS)}
    for key in sorted(keys_of(table), key=lambda each: order.get(each.metric, len(order))):
        comparison = compare_cases(table, key, drop=True)
        calibrators = [name for name in comparison.methods if name != UNCALIBRATED]
        for name in calibrators:
            heading = comparison.heading if name == calibrators[0] else ""
            rows.add_row(heading, name, *_cells(comparison, name))
        rows.add_section()
    return rows


def _cells(comparison: Comparison, name: str) -> tuple[str, ...]:
    """Means before and after, difference, interval and p of one calibrator."""
    scale = comparison.key.scale
    digits = 2 if scale == 100 else 4

    def text(value: float, sign: str = "") -> str:
        # 0 is added because a rounded small negative number is -0
        return f"{round(float(value) * scale, digits) + 0:{sign}.{digits}f}".replace("-", "−")

    pair = comparison.pairs.loc[(name, UNCALIBRATED)]
    is_worse = comparison.pairs.loc[(UNCALIBRATED, name)].better
    mark = " ★" if pair.better else " ✗" if is_worse else ""
    mean = comparison.means["mean"]
    return (
        text(mean[UNCALIBRATED]),
        text(mean[name]),
        text(pair.difference, "+") + mark,
        f"{text(pair.low, '+')} to {text(pair.high, '+')}",
        p_text(pair.p),
    )
