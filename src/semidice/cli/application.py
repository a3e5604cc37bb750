"""The application: how its commands end, options that several of them share, and records as options."""

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from .. import __version__
from ..console import printable
from ..errors import UserError, message
from ..extras import missing_message
from ..options import Bounds, meanings, members
from ..paths import check_text

app = typer.Typer(
    help="Train, distil and evaluate image segmentation with soft labels.\n\n"
    "For a first try: semidice demo. With your own data: prepare, check, train, predict.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


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


class Command(TyperCommand):
    """A command that ends with code 1 and one message after an error that the user can mend, see `errors`.

    Any other error is a bug and keeps its traceback; with SEMIDICE_DEBUG=1 all do. An interrupt is code 130.
    """

    def invoke(self, ctx: Any) -> Any:
        # without the name of the program, which may be a path, or `python -m semidice`
        command = ctx.command_path.removeprefix(ctx.find_root().command_path).strip()
        try:
            for value in ctx.params.values():
                for name in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(name, str | Path):
                        check_text(name)
            return super().invoke(ctx)
        except KeyboardInterrupt:
            needs_resume = command in ("train", "nnunet train")
            again = "the same command with --resume" if needs_resume else "the same command"
            typer.echo(f"semidice {command}: interrupted; {again} continues from here", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            text = message(error)
            if text is None and isinstance(error, ModuleNotFoundError) and _is_missing(error.name):
                text = missing_message(str(error.name))
            if text is None or os.environ.get("SEMIDICE_DEBUG"):
                raise
            typer.echo(printable(f"semidice {command}: {text}"), err=True)
            raise typer.Exit(1) from None


def _is_missing(package: str | None) -> bool:
    """Whether a package is not installed; one that is there and does not find a part of its own is broken."""
    return bool(package) and importlib.util.find_spec(str(package).partition(".")[0]) is None


# every command of the application is declared with it
command = partial(app.command, cls=Command)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"semidice {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


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
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        hint = next(kind for kind in members(hints[field.name]) if kind is not NoneType)
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        bounds = next((each for each in metadata if isinstance(each, Bounds)), Bounds())
        # a flag that is off needs no --no-flag
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(
            *names, help=meanings(record)[field.name], min=bounds.at_least, max=bounds.at_most
        )
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind if field.default is not None else kind | None, option],
        )
