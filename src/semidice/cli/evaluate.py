"""Commands about a trained run: evaluate, calibrate, predict, export."""

import math
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from ..console import new_console, say
from ..errors import UserError
from ..prediction.options import PredictOptions
from .application import Interval, MovedDataset, Rules, command, parsed_size, takes

_Unit = Literal["scan", "slice"]


@command()
def evaluate(
    run: Annotated[Path | None, typer.Argument(help="Run folder; none with --predictions.")] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(help="Folder of masks or probabilities that another tool made; needs --dataset."),
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="Name of a score, see docs/metrics.md. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write to this .parquet or .csv file, not to the run's table."),
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="scan, or slice: each slice on its own. Default: as in the recipe.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Of surface_dice_score, in mm; in voxels without spacing. Default: 1."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset that --predictions are of; of a run, if it was moved."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Method of --predictions in tables. Default: name of the folder.")
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Score --predictions although some scans have none.")
    ] = False,
    ignore_placement: Annotated[
        bool, typer.Option("--ignore-placement", help="Do not check that headers align --predictions.")
    ] = False,
    decide: Rules = None,
    interval: Interval = None,
) -> None:
    """Score the stored predictions of a run again, also with other metrics, or files of another tool.

    The scores are added to the table of the run. The slices of a volume are put together before they are
    scored. Files of --predictions, which need --dataset, have the names and shapes of the raw images:
    CASE.nii.gz or CASE.png with class numbers, or CASE.npz with probabilities (C, *space), as nnU-Net writes
    them.

    With --decide, only scores of masks are computed, by each rule and by argmax, and compared; fitted chooses
    the rule of each fold on the other folds. They are written to decisions.parquet of the run. With
    --interval, volumes.csv of the run gets the volume of every case, an interval, and the raters' volumes.

    Example: **semidice evaluate runs/first --metric dice_score --metric hausdorff_error -o scores.csv**
    """
    from ..runs.evaluate import EvaluateOptions, run_evaluate, run_evaluate_files

    _check_evaluated(run, predictions, dataset, unit, interval)
    if tolerance is not None and not math.isfinite(tolerance):
        raise UserError(f"--tolerance must be a finite number of mm; got {tolerance}")
    options = EvaluateOptions(
        metrics, cast(_Unit | None, unit), tolerance, tuple(decide or ()), interval, out
    )
    console = new_console()
    if predictions is not None and dataset is not None:
        run_evaluate_files(
            predictions,
            dataset,
            options,
            console,
            name=name,
            skip_missing=skip_missing,
            ignore_placement=ignore_placement,
        )
    elif run is not None:
        run_evaluate(run, options, console, dataset=dataset)


def _check_evaluated(
    run: Path | None, predictions: Path | None, dataset: Path | None, unit: str | None, interval: float | None
) -> None:
    """A ValueError if options of `evaluate` exclude each other, or one of them needs another."""
    if unit not in (None, "scan", "slice"):
        raise UserError(f"--unit must be scan or slice; got {unit!r}")
    if (run is None) == (predictions is None):
        raise UserError("name a run folder, or --predictions DIR --dataset DATA, and not both")
    if predictions is not None and dataset is None:
        raise UserError("--predictions needs --dataset DATA, which has the raters' masks")
    if predictions is not None and interval is not None:
        raise UserError("--interval needs a run: its folds tell how far intervals must be corrected")


@command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    by: Annotated[
        list[str] | None,
        typer.Option(help="temperature, vector, isotonic, beta, kde or all. Repeatable. Default: all."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Calibrator to save with the run, for predict. Default: the only one of --by."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the scores of each case to this .parquet or .csv file."),
    ] = None,
    dataset: MovedDataset = None,
) -> None:
    """Correct the probabilities of a trained run, and find out which calibrator does it best.

    Calibrators are fitted to the stored predictions, against the mean of the raters. Each fold is scored with
    the calibrators of the other folds. The one that is kept is fitted to all folds, and `semidice predict`
    uses it. With more than two classes kde takes long, and all leaves it out.

    Example: **semidice calibrate runs/first --keep isotonic**
    """
    from ..runs.calibration import run_calibrate

    run_calibrate(run, by=by or ("all",), keep=keep, out=out, dataset=dataset, console=new_console())


@command()
@takes
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    inputs: Annotated[list[Path], typer.Argument(help="Images, NIfTI volumes, DICOM series, or folders.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for probabilities, masks and volumes.")],
    options: PredictOptions,
) -> None:
    """Predict new images or volumes: probabilities and masks in the grid of the input, and volumes in ml.

    NIfTI input gives NIfTI output with the same affine; PNG input gives PNG output; a DICOM
    series gives DICOM segmentations, fractional probabilities and a binary mask. Several channels are in
    one file, or in files CASE_0000, CASE_0001, ...: name any one of them. volumes.csv also has the expected
    volumes, computed from the probabilities, and with --interval where the volume of a rater would lie.
    Existing output is kept. `semidice evaluate RUN --decide fitted --interval 0.9` fits rule and intervals.

    Example: **semidice predict runs/first new_scans -o predictions**
    """
    from ..prediction.command import run_predict

    run_predict(run, inputs, out, options, console=new_console())


@command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write: .onnx, or .pt2 for torch.export.")],
    fold: Annotated[
        int | None, typer.Option(min=0, help="Export the network of one fold. Default: mean of all folds.")
    ] = None,
    flips: Annotated[
        bool | None,
        typer.Option("--flips/--no-flips", help="Mean over mirrored images. Default: as in the recipe."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="ROWSxCOLUMNS of all images, for networks that need a fixed size.")
    ] = None,
) -> None:
    """Write a trained run to one file that other programs read: ONNX, or a program of torch.export.

    The file takes intensities in [0, 1] and returns probabilities; normalisation and activation are inside.
    It is compared with `semidice predict` on random images, and written only if no probability differs by
    more than 0.0001. See docs/export.md.

    Example: **semidice export runs/first --fold 0 -o model.onnx**
    """
    from ..integrations.onnx import export_run
    from ..prediction.command import chosen_folds
    from ..runs.run import open_run

    console, trained = new_console(), open_run(run)
    folds = chosen_folds(trained, fold, console)
    if trained.folder.calibrator.is_file():
        say(console, f"the calibrator of {run} is not exported: the file has uncalibrated probabilities")
    lengths = None if size is None else parsed_size(size)
    differences = export_run(trained, folds, out, flips=flips, size=lengths)
    for name, difference in differences.items():
        say(console, f"largest difference to `semidice predict` on {name}: {difference:.1e}")
    say(console, f"exported fold {', '.join(map(str, folds))} to {out}")
