"""The command line. Each command reads a folder, writes a folder and can be rerun alone."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import __version__
from .agreement import run_agreement
from .demo import run_demo

app = typer.Typer(
    help="Train, distil and judge image segmentation with soft labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"semidice {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the figures.")] = Path("demo_out"),
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps for each loss.")] = 1500,
) -> None:
    """Fit free predictions to soft labels with four losses: where does each one land?

    The soft Dice loss drives them to 0 or 1; the Dice semimetric losses and the compatible focal Tversky
    loss land on the label. Prints a table and writes two figures.
    """
    try:
        run_demo(out, steps, Console())
    except OSError as error:
        typer.echo(
            f"semidice demo: cannot write to {out}: {error.strerror}; choose another folder with --out"
        )
        raise typer.Exit(1) from None


@app.command()
def agreement(
    folder: Annotated[Path, typer.Argument(help="Folder that holds raters/NAME/CASE.png.")],
    csv: Annotated[Path | None, typer.Option(help="Also write every case and rater to this file.")] = None,
) -> None:
    """How far do raters agree? Mean Dice of each against the majority and against the others.

    Masks are PNG files, any pixel above 0 is lesion. Cases are matched by file name; a rater without a file
    did not look at that case.
    """
    try:
        run_agreement(folder, csv, Console())
    except ValueError as error:
        typer.echo(f"semidice agreement: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        name = error.filename2 or error.filename
        typer.echo(f"semidice agreement: {name}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
