"""The command line application, and how all its commands end: well, with one message, or with a traceback."""

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .. import __version__
from ..console import printable
from ..errors import message
from ..extras import missing_message
from ..paths import check_text

app = typer.Typer(
    help="Train, distil and evaluate image segmentation with soft labels.\n\n"
    "For a first try: semidice demo. With your own data: prepare, check, train, predict.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


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
