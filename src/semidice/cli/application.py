"""The command line application, and how its commands report errors."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..console import printable
from ..extras import missing_message

app = typer.Typer(
    help="Train, distil and evaluate image segmentation with soft labels.\n\n"
    "For a first try: semidice demo. With your own data: prepare, check, train, predict.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Print an error as one message and exit with code 1; with code 130 after an interrupt."""
    try:
        yield
    except ModuleNotFoundError as error:
        _fail(command, missing_message(str(error.name)))
    # a package that is too old
    except ImportError as error:
        _fail(command, str(error))
    except MemoryError as error:
        _fail(
            command, f"there is not enough memory: {error or 'close other programs, or use a smaller size'}"
        )
    except (ValueError, RuntimeError) as error:
        _fail(command, _said(error))
    except OSError as error:
        name = error.filename2 or error.filename
        if name and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            from ..paths import write_error

            _fail(command, str(write_error(Path(name), error)))
        _fail(command, f"{name}: {error.strerror}" if name else str(error))
    except KeyboardInterrupt:
        needs_resume = command in ("train", "nnunet train")
        again = "the same command with --resume" if needs_resume else "the same command"
        typer.echo(f"semidice {command}: interrupted; {again} continues from here", err=True)
        raise typer.Exit(130) from None


def _fail(command: str, message: str) -> None:
    typer.echo(printable(f"semidice {command}: {message}"), err=True)
    raise typer.Exit(1) from None


def _said(error: Exception) -> str:
    """The message of an error; what to do, if memory could not be had."""
    text = str(error)
    # PyTorch has a type of error for a GPU, but not for the CPU
    if "can't allocate memory" in text or type(error).__name__ == "OutOfMemoryError":
        text = "there is not enough memory: lower batch_size, augment.crop or the size of the images"
    return text


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
