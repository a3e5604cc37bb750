"""Arguments and options that several commands share, and options that are the fields of a record."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ..errors import UserError
from ..options import meanings, members

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
        raise UserError(f"--size must be ROWSxCOLUMNS, such as 256x256{others}; got {text!r}")
    return int(lengths[0]), int(lengths[1])


def takes(command: Callable[..., None]) -> Callable[..., None]:
    """A command with one option for each field of the records among its parameters, see `options`.

    The help of an option is the docstring of its field. The command itself is called with the records.
    """
    parameters = inspect.signature(command).parameters
    records: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }

    @wraps(command)
    def with_options(**given: Any) -> None:
        for name, record in records.items():
            chosen = {field.name: given.pop(field.name) for field in fields(record)}
            try:
                given[name] = record(**chosen)
            except ValueError as error:
                # the message begins with the name of the field
                field, _, problem = str(error).partition(" ")
                shown = f"--{field.replace('_', '-')}" if field in chosen else field
                raise UserError(f"{shown} {problem}") from error
        command(**given)

    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in parameters.items()
        for option in (_options(records[name]) if name in records else [each])
    ]
    with_options.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    with_options.__annotations__ = {option.name: option.annotation for option in options}
    return with_options


def _options(record: Any) -> Iterator[inspect.Parameter]:
    """The fields of a record, as typer declares options."""
    hints = get_type_hints(record)
    for field in fields(record):
        kinds = [kind for kind in members(hints[field.name]) if kind is not NoneType]
        # typer knows no Literal before 0.19; the record checks the choice
        choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
        kind: Any = str if choices else kinds[0]
        kind = kind if field.default is not None else kind | None
        said = [meanings(record)[field.name], *([f"One of {', '.join(choices)}."] if choices else [])]
        # a flag that is off needs no --no-flag
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(*names, help=" ".join(said))
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, option],
        )
