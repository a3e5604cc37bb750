"""`semidice predict`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console
from ..prediction.options import PredictOptions
from .application import command
from .options import takes


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
