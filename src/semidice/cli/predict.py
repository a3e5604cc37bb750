"""`semidice predict`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console
from .application import command


@command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    inputs: Annotated[list[Path], typer.Argument(help="Images, NIfTI volumes, DICOM series, or folders.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for probabilities, masks and volumes.")],
    fold: Annotated[
        int | None, typer.Option(min=0, help="Use the network of one fold. Default: mean of all folds.")
    ] = None,
    flips: Annotated[
        bool | None,
        typer.Option("--flips/--no-flips", help="Mean over mirrored images. Default: as in the recipe."),
    ] = None,
    decide: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Rule that makes masks: argmax, threshold:T, dice, jaccard, nested, mix:W or fitted. "
            "Default: argmax.",
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(metavar="LEVEL", help="Add intervals that cover this share of raters, such as 0.9."),
    ] = None,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Also write a map of uncertainty, from 0 to 1.")
    ] = False,
    window: Annotated[
        int, typer.Option(min=64, help="Larger images are predicted in overlapping windows of this size.")
    ] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of slices predicted at once.")] = 8,
    slice_axis: Annotated[
        int | None,
        typer.Option(min=0, max=2, help="Axis along which volumes are cut. Default: as in the dataset."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Use the calibrator of the run, if it has one.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Predict again where output files exist.")] = False,
) -> None:
    """Predict new images or volumes: probabilities and masks in the grid of the input, and volumes in ml.

    NIfTI input gives NIfTI output with the same affine; PNG input gives PNG output; a DICOM
    series gives DICOM segmentations, fractional probabilities and a binary mask. Several channels are in
    one file, or in files CASE_0000, CASE_0001, ...: name any one of them. volumes.csv also has the expected
    volumes, computed from the probabilities, and with --interval where the volume of a rater would lie.
    Existing output is kept. `semidice evaluate RUN --decide fitted --interval 0.9` fits rule and intervals.

    Example: **semidice predict runs/first new_scans -o predictions**
    """
    from ..prediction.command import PredictOptions, run_predict

    options = PredictOptions(
        fold=fold,
        flips=flips,
        decide=decide,
        interval=interval,
        uncertainty=uncertainty,
        window=window,
        batch_size=batch_size,
        slice_axis=slice_axis,
        calibrate=calibrate,
        device=device,
        overwrite=overwrite,
    )
    run_predict(run, inputs, out, options, console=new_console())
