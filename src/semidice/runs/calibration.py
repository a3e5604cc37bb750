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

import torch
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..calibration.calibrator import Calibrator
from ..calibration.calibrators import CALIBRATORS, load_calibrator
from ..calibration.curves import MIN_STORED_PROB, interpolated
from ..calibration.streams import UNITS
from ..console import progress_bar, say
from ..errors import UserError, nearest, reading
from ..labels.raters import read_raters
from ..locks import locked
from ..paths import file_hash
from ..statistics.cases import CaseTable, check_suffix, concatenate, keys_of, write_cases
from ..statistics.compare import Comparison, compare_cases
from ..statistics.tables import p_text
from .fits import current_fits, forget_others, store_fits
from .held_out import ALL_FOLDS, HeldOut, cross_fit
from .run import TrainedRun
from .scoring import Read, ScoreOptions, inapplicable_metrics, score_cases

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
    dataset: Path | None = None,
    console: Console,
) -> CaseTable:
    """Score calibrators on held-out folds, print the scores, and save one for `predict`; the scores.

    by: names of `CALIBRATORS`, or "all". keep: the one to save; None saves the only one of `by`, and none if
    there are several. out: a .parquet or .csv file for the scores of each case. dataset: the new folder of
    the dataset, if it was moved.
    """
    check_suffix(out)
    held_out = HeldOut.open(run, dataset)
    trained = held_out.run
    held_out.need_two_folds("the calibrator")
    names = chosen_calibrators(by, keep, num_classes=held_out.dataset.num_classes, console=console)
    keep = keep or (names[0] if len(names) == 1 else None)
    if trained.missing_folds:
        missing = ", ".join(map(str, trained.missing_folds))
        say(console, f"not finished, and not used to calibrate: fold {missing}")
    parts = _fit_folds(held_out, names, console)
    fitted = {name: cross_fit(of_folds, _merged) for name, of_folds in parts.items()}
    table = _score(held_out, fitted, console)
    title = f"{trained.recipe.name}: {len(held_out.cases)} folds, each calibrated by the others"
    console.print(_scores_table(table, title=title))
    if out is not None:
        write_cases(table, out)
        say(console, f"wrote {out}")
    if keep is None:
        say(
            console, "no calibrator was kept: choose one with --keep NAME, and `semidice predict` will use it"
        )
        return table
    with locked(trained.folder, "semidice calibrate"):
        forget_others(held_out)
        fitted[keep][ALL_FOLDS].save(trained.folder.calibrator)
        store_fits(held_out, calibrator=file_hash(trained.folder.calibrator))
    say(console, f"kept {keep}, fitted to all {len(held_out.cases)} folds: {trained.folder.calibrator}")
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


def _fit_folds(held_out: HeldOut, names: Sequence[str], console: Console) -> dict[str, dict[int, Calibrator]]:
    """For each calibrator and fold, what has seen its cases alone, against the mean of the raters."""
    parts = {name: {fold: CALIBRATORS[name]() for fold in held_out.cases} for name in names}
    num_classes = held_out.dataset.num_classes
    with progress_bar(console, "fitting", "cases", total=held_out.num_cases()) as bar:
        for fold in held_out.cases:
            for batch in held_out.batches(fold, "slice"):
                label = read_raters(batch.masks, num_classes, batch.present, batched=True).mean()
                # one after the other, so that batches do not change what a stream keeps
                for case in range(len(label)):
                    for of_folds in parts.values():
                        prob = _above_zero(batch.prob[case : case + 1])
                        of_folds[fold].partial_fit(prob, label[case : case + 1])
                bar.advance(batch.num_cases)
    return parts


def _merged(parts: Iterable[Calibrator]) -> Calibrator:
    first, *others = parts
    merged = type(first)().merge(first)
    for other in others:
        merged.merge(other)
    return merged


def _score(held_out: HeldOut, fitted: Mapping[str, Mapping[str, Calibrator]], console: Console) -> CaseTable:
    """Scores of each fold with the calibrators of the other folds; the method is the calibrator's name."""
    dataset = held_out.dataset
    left_out = inapplicable_metrics(dataset, METRICS)
    metrics = [name for name in METRICS if name not in left_out]
    options = ScoreOptions(metrics, held_out.run.recipe.validation.unit)
    names = [UNCALIBRATED, *fitted]
    tables = []
    with progress_bar(console, "scoring", "cases", total=len(names) * held_out.num_cases()) as bar:
        for fold, cases in held_out.cases.items():
            for name in names:
                bar.name = f"scoring {name}"
                read = held_out.read(fold)
                if name != UNCALIBRATED:
                    calibrate = probability_map(fitted[name][str(fold)], dataset.num_classes)
                    read = _calibrated(read, calibrate)
                table = score_cases(
                    dataset,
                    cases,
                    read,
                    options,
                    method=name,
                    fold=fold,
                    on_cases=bar.advance,
                )
                tables.append(table)
    return concatenate(tables)


def _calibrated(read: Read, calibrate: ProbabilityMap) -> Read:
    return lambda numbers: (calibrate(prob.unsqueeze(0))[0] for prob in read(numbers))


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
    """The calibrator that was kept with the run, or None; a UserError if it is of other predictions."""
    path = trained.folder.calibrator
    if not path.is_file():
        return None
    fits, sha256 = current_fits(trained), file_hash(path)
    if fits is None or fits.calibrator != sha256:
        raise UserError(
            f"{path} was not fitted to the predictions that {trained.folder.path} has now: fit it again with "
            "`semidice calibrate`, or use --no-calibrate"
        )
    calibrator = load_calibrator(path)
    with (
        progress_bar(console, "reading the calibrator"),
        reading(path, "fit it again with `semidice calibrate`"),
    ):
        calibrate = probability_map(calibrator, len(trained.facts.class_names))
    name = next(name for name, kind in CALIBRATORS.items() if kind is type(calibrator))
    return KeptCalibrator(name, sha256, calibrate)


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
