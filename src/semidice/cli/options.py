"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE: change an option of the recipe. Repeatable.")
]
Accelerator = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Train folds at the same time: local:N processes, local:auto, ray, or ray:ADDRESS.",
    ),
]
PreparedDataset = Annotated[Path, typer.Argument(help="Folder written by `semidice prepare`.")]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--decide",
        metavar="RULE",
        help="Rule that makes masks: argmax, threshold:T, dice, jaccard, nested, mix:W, fitted. Repeatable.",
    ),
]
Interval = Annotated[
    float | None,
    typer.Option(
        metavar="LEVEL", help="Volumes with intervals that cover this share of raters, such as 0.9."
    ),
]
MovedDataset = Annotated[Path | None, typer.Option(help="Folder of the dataset, if it was moved.")]


def parsed_size(text: str, *, others: str = "") -> tuple[int, int]:
    """Rows and columns of a --size; others: what it may be else, for the message.

    >>> parsed_size("256x128")
    (256, 128)
    """
    lengths = text.lower().split("x")
    if len(lengths) != 2 or not all(length.isdecimal() and int(length) > 0 for length in lengths):
        raise ValueError(f"--size must be ROWSxCOLUMNS, such as 256x256{others}; got {text!r}")
    return int(lengths[0]), int(lengths[1])
