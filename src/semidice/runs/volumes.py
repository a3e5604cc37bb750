"""Volumes of the held-out cases of a run, with intervals for what a rater would measure.

    expected         sum of the probabilities
    low, high        quantiles of the volume of nested raters, see `decisions.volumes`
    conformal        the same, corrected by a factor that was fitted to the predictions of the other folds, so
                     that `level` of the raters of a new patient are covered; see `decisions.conformal`

volumes.csv of the run has one row per scan and foreground class, and a column for each rater.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table

from ..console import progress_bar, say
from ..decisions.conformal import ConformalInterval, Intervals, fit_conformal
from ..decisions.volumes import rater_volumes_ml, volume_interval, volume_ml, voxel_ml
from ..paths import atomic_write
from ..statistics.cases import escaped_cell
from .fits import forget_others, store_fits, stored_fits
from .held_out import HeldOut, cross_fit
from .scoring import ONE_ML, PredictedBatch, in_voxels


def run_intervals(held_out: HeldOut, level: float, console: Console) -> None:
    """Print how many raters the intervals of the volumes cover, and write volumes.csv of the run."""
    run = held_out.run
    if not run.missing_folds:
        forget_others(held_out)
    with progress_bar(console, "measuring volumes", "cases", total=held_out.num_cases()) as bar:
        volumes = scan_volumes(held_out, level, on_cases=bar.advance)
    try:
        corrected = conformal_ends(volumes, fitted_intervals(held_out, volumes, level))
    # too few folds or patients; the intervals of nested raters need neither
    except ValueError as error:
        corrected = None
        say(console, f"intervals are not corrected: {error}")
    title = f"{run.recipe.name}: {100 * level:g} % intervals of the volume"
    console.print(intervals_table(volumes, corrected, level, title=title))
    if run.missing_folds:
        say(console, f"{run.folder.volumes} is written when all folds are finished")
        return
    with atomic_write(run.folder.volumes) as temp_path:
        table = volumes_table(volumes, corrected, level)
        table.to_csv(temp_path, index=False, float_format="%.6g", lineterminator="\n")
    say(console, f"wrote {run.folder.volumes}")


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
    held_out: HeldOut, level: float, *, on_cases: Callable[[int], object] = lambda _: None
) -> ScanVolumes:
    """Volumes and nested intervals of all scans of finished folds: in ml, or in voxels without spacing."""
    dataset = held_out.dataset
    is_in_voxels = in_voxels(dataset, "volume_error", "scan")
    names: list[str] = []
    patients: list[str] = []
    folds: list[int] = []
    parts: list[tuple[np.ndarray, ...]] = []
    for fold in held_out.cases:
        for batch in held_out.batches(fold, "scan"):
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
    held_out: HeldOut, volumes: ScanVolumes, level: float
) -> Mapping[str, ConformalInterval]:
    """The correction for the scans of each fold, fitted to the other folds, and "all" for new scans.

    fits.json is written if all folds are finished.
    """
    held_out.need_two_folds("the correction of intervals")
    rows = {fold: np.flatnonzero(volumes.folds == fold) for fold in held_out.cases}

    def fit(parts: Sequence[np.ndarray]) -> ConformalInterval:
        chosen = np.sort(np.concatenate(parts))
        patients = [volumes.patients[row] for row in chosen]
        return fit_conformal(volumes.intervals.part(chosen), volumes.raters[chosen], patients, level)

    fitted = cross_fit(rows, fit)
    if not held_out.run.missing_folds:
        intervals = {**stored_fits(held_out).intervals, f"{level:g}": fitted}
        store_fits(held_out, intervals=intervals)
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


def volumes_table(
    volumes: ScanVolumes, corrected: tuple[np.ndarray, np.ndarray] | None, level: float
) -> pd.DataFrame:
    """One row per scan and class; without a correction the cells of the conformal interval are empty."""
    nested, num_classes = volumes.intervals, len(volumes.class_names)
    low, high = corrected or (np.full_like(nested.low, np.nan),) * 2
    numbers = {"expected": nested.expected, "low": nested.low, "high": nested.high}
    numbers |= {"conformal_low": low, "conformal_high": high}
    numbers |= {f"rater {name}": volumes.raters[..., r] for r, name in enumerate(volumes.rater_names)}
    names: dict[str, Any] = {
        "case": np.repeat(volumes.cases, num_classes),
        "patient": np.repeat(volumes.patients, num_classes),
        "fold": np.repeat(volumes.folds, num_classes),
        "class": np.tile(volumes.class_names, len(volumes.cases)),
        "unit": volumes.unit,
        "level": f"{level:g}",
    }
    table = pd.DataFrame(names | {name: column.ravel() for name, column in numbers.items()})
    for name in ("case", "patient", "class"):
        table[name] = table[name].map(escaped_cell)
    return table.sort_values("case", kind="stable")


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
