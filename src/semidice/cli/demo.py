"""`semidice demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console
from .application import command


@command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for data, runs and figures.")] = Path(
        "demo_out"
    ),
    cases: Annotated[int, typer.Option(min=10, help="Number of phantom images.")] = 80,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 120,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 2,
) -> None:
    """Compare four methods on simulated images in a few minutes.

    The methods differ in label and loss. They are cross-validated on phantoms, for which the true probability
    of each voxel is known. Prints tables of scores with significance marks, of the rules that make masks, and
    of intervals of volumes; writes a report page. After an interrupt, the
    same command continues.

    Example: **semidice demo -o demo_out**
    """
    from ..demo import run_demo

    run_demo(out, new_console(), num_cases=cases, epochs=epochs, num_folds=folds)
