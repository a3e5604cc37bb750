"""`semidice export`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console, say
from .application import command
from .options import parsed_size


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
