"""Volumes of the held-out cases of a run, with intervals for what a rater would measure.

    expected         sum of the probabilities
    low, high        quantiles of the volume of nested raters, see `decisions.volumes`
    conformal        the same, corrected by a factor that was fitted to the predictions of the other folds, so
                     that `level` of the raters of a new patient are covered; see `decisions.conformal`

volumes.csv of the run has one row per scan and foreground class, and a column for each rater.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from rich import box
from rich.table import Table

from ..data.dataset import Dataset
from ..data.folds import fold_cases, read_folds
from ..decisions.conformal import ConformalInterval, Intervals, fit_conformal
from ..decisions.volumes import rater_volumes_ml, volume_interval, volume_ml, voxel_ml
from ..locks import locked
from ..paths import atomic_write
from ..statistics.cases import escaped_cell
from .decision_file import ALL_FOLDS, store_interval
from .decisions import check_can_fit
from .run import TrainedRun
from .scoring import ONE_ML, PredictedBatch, in_voxels, predicted_batches


@dataclass(frozen=True)
class ScanVolumes:
    """Volumes of N scans and C foreground classes. raters: NaN for one who did not look at the scan."""

    unit: str
    class_names: Sequence[str]
    rater_names: Sequence[str]
    cases: Sequence[str]
    patients: Sequence[str]
    folds: np.ndarray
    intervals: Intervals
    raters: Float[np.ndarray, "N C R"]


def scan_volumes(
    run: TrainedRun,
    dataset: Dataset,
    level: float,
    *,
    on_cases: Callable[[int], object] = lambda _: None,
) -> ScanVolumes:
    """Volumes and nested intervals of all scans of finished folds: in ml, or in voxels without spacing."""
    fold_of_case = read_folds(run.folder.folds, dataset)
    is_in_voxels = in_voxels(dataset, "volume_error", "scan")
    names: list[str] = []
    patients: list[str] = []
    folds: list[int] = []
    parts: list[tuple[np.ndarray, ...]] = []
    for fold in run.finished_folds:
        cases = fold_cases(fold_of_case, fold)[1]
        for batch in predicted_batches(dataset, cases, run.folder.fold(fold), unit="scan"):
            names += [unit.name for unit in batch.units]
            patients += batch.patients
            folds += [fold] * len(batch.units)
            parts.append(_volumes(batch, level, is_in_voxels=is_in_voxels))
            on_cases(batch.num_cases)
    low, high, expected, voxel, raters = (np.concatenate(part) for part in zip(*parts, strict=True))
    return ScanVolumes(
        unit="voxels" if is_in_voxels else "ml",
        class_names=dataset.manifest.class_names[1:],
        rater_names=dataset.manifest.raters,
        cases=names,
        patients=patients,
        folds=np.array(folds),
        intervals=Intervals(low, high, expected, voxel),
        raters=raters,
    )


def _volumes(batch: PredictedBatch, level: float, *, is_in_voxels: bool) -> tuple[np.ndarray, ...]:
    """Ends of the interval, expected volume, volume of a voxel and raters' volumes of the foreground."""
    prob, valid = batch.prob, batch.valid
    spacing_mm = torch.tensor(ONE_ML).expand(len(prob), 3) if is_in_voxels else batch.spacing_mm
    assert spacing_mm is not None
    expected = volume_ml(prob, spacing_mm=spacing_mm, valid=valid)
    low, high = volume_interval(prob, level, spacing_mm=spacing_mm, valid=valid)
    raters = rater_volumes_ml(
        batch.masks, num_channels=prob.shape[1], spacing_mm=spacing_mm, present=batch.present, valid=valid
    )
    voxel = voxel_ml(spacing_mm, num_cases=len(prob))[:, 0].numpy()
    ends = (part[:, 1:].double().numpy() for part in (low, high, expected))
    return *ends, voxel, raters[:, 1:].double().numpy()


def fitted_intervals(
    run: TrainedRun, dataset: Dataset, volumes: ScanVolumes, level: float
) -> Mapping[str, ConformalInterval]:
    """The correction for the scans of each fold, fitted to the other folds, and "all" for new scans.

    decision.json is written if all folds are finished.
    """
    check_can_fit(run, "the correction of intervals")
    fitted = {}
    for name in (*map(str, run.finished_folds), ALL_FOLDS):
        others = np.array([str(fold) != name for fold in volumes.folds])
        fitted[name] = fit_conformal(
            volumes.intervals.part(others),
            volumes.raters[others],
            [patient for patient, is_other in zip(volumes.patients, others, strict=True) if is_other],
            level,
        )
    if not run.missing_folds:
        store_interval(run, dataset, f"{level:g}", fitted)
    return fitted


def conformal_ends(
    volumes: ScanVolumes, fitted: Mapping[str, ConformalInterval]
) -> tuple[Float[np.ndarray, "N C"], Float[np.ndarray, "N C"]]:
    """The corrected ends, each scan by the correction of its fold."""
    low, high = np.empty_like(volumes.intervals.low), np.empty_like(volumes.intervals.high)
    for fold in np.unique(volumes.folds):
        own = volumes.folds == fold
        low[own], high[own] = fitted[str(fold)].apply(volumes.intervals.part(own))
    return low, high


def write_volumes(
    run: TrainedRun,
    volumes: ScanVolumes,
    corrected: tuple[np.ndarray, np.ndarray] | None,
    *,
    level: float,
) -> None:
    """Write volumes.csv of the run; without a correction the cells of the conformal interval are empty."""
    ends = ("expected", "low", "high", "conformal_low", "conformal_high")
    header = (
        "case",
        "patient",
        "fold",
        "class",
        "unit",
        "level",
        *ends,
        *(f"rater {r}" for r in volumes.rater_names),
    )
    nested = volumes.intervals
    empty = np.full_like(nested.low, np.nan)
    columns = (nested.expected, nested.low, nested.high, *(corrected or (empty, empty)))
    with (
        locked(run.folder, "semidice evaluate"),
        atomic_write(run.folder.volumes) as temp_path,
        temp_path.open("w", newline="", encoding="utf-8") as file,
    ):
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(header)
        for case in sorted(range(len(volumes.cases)), key=lambda number: volumes.cases[number]):
            for number, class_name in enumerate(volumes.class_names):
                numbers = [column[case, number] for column in columns] + volumes.raters[case, number].tolist()
                names = volumes.cases[case], volumes.patients[case], volumes.folds[case], class_name
                shown = ("" if np.isnan(n) else f"{n:.6g}" for n in numbers)
                rows.writerow((*map(escaped_cell, names), volumes.unit, f"{level:g}", *shown))


def intervals_table(
    volumes: ScanVolumes, corrected: tuple[np.ndarray, np.ndarray] | None, level: float, *, title: str
) -> Table:
    """Share of the raters whose volume lies in the interval, and mean width, before and after correction."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("class", overflow="fold")
    table.add_column("interval")
    for name in ("raters covered (%)", f"mean width ({volumes.unit})", "scans"):
        table.add_column(name, justify="right")
    intervals = {f"nested {level:g}": (volumes.intervals.low, volumes.intervals.high)}
    if corrected is not None:
        intervals[f"conformal {level:g}"] = corrected
    for number, class_name in enumerate(volumes.class_names):
        for name, (low, high) in intervals.items():
            covered = coverage(low[:, number], high[:, number], volumes.raters[:, number])
            width = float(np.nanmean(high[:, number] - low[:, number]))
            share = f"{100 * float(np.nanmean(covered)):.1f}"
            shown = f"{width:.0f}" if width >= 100 else f"{width:.3g}"
            table.add_row(class_name, name, share, shown, str(int((~np.isnan(covered)).sum())))
    return table


def coverage(
    low: Float[np.ndarray, " N"], high: Float[np.ndarray, " N"], raters: Float[np.ndarray, "N R"]
) -> Float[np.ndarray, " N"]:
    """The share of the raters of each scan whose volume lies in its interval; NaN without a rater."""
    inside = (raters >= low[:, None]) & (raters <= high[:, None])
    num_raters = (~np.isnan(raters)).sum(1)
    return np.where(num_raters > 0, inside.sum(1) / np.maximum(num_raters, 1), np.nan)
