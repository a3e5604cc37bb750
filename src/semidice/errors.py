"""Errors that a user can mend, and the words that their messages share.

A UserError is a mistake or an obstacle outside of semidice: a wrong option, a damaged file, a missing scan.
Its message says what is wrong, with name and value, and the way out. The command line prints it alone.
Every other error is a bug, of ours or of a library, and keeps its traceback. The mathematics raises plain
ValueErrors; where users' options and files come in, `given` and `reading` turn them into UserErrors.
"""

import errno
import json
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Record = TypeVar("Record")


class UserError(ValueError):
    """What a user can mend: the message names the thing and the way out."""


class CannotWriteError(UserError):
    """A file or folder cannot be written: the disk is full, or may not be written to."""


@contextmanager
def reading(path: Path, advice: str = "") -> Iterator[None]:
    """Turn an error about the content of a file into a UserError that names the file. advice: the way out.

    The block does nothing but read: an error of our own in it would look like a damaged file.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no {path}{advice and f'; {advice}'}") from None
    # bugs of ours, and what says nothing about the file
    except (NameError, AssertionError, MemoryError):
        raise
    # libraries have no common error for a damaged file: nibabel alone raises nine kinds
    except Exception as error:
        raise UserError(f"cannot read {path}: {reason(error)}{advice and f'; {advice}'}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the system into a CannotWriteError with path, reason and way out.

    Not the name in the error: it may be that of a temporary file, which the user does not know.
    """
    try:
        yield
    except OSError as error:
        # an error of a library that is not one of the system has a text of its own
        if error.errno is None:
            raise
        raise CannotWriteError(f"cannot write {path}: {error.strerror}; {_way_out(error.errno)}") from error


def _way_out(number: int) -> str:
    if number in _DISK_FULL:
        return "free some space and run the same command again (`train` with --resume): it continues"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to"
    return "choose another folder, or run the same command again (`train` with --resume): it continues"


@contextmanager
def given(name: str) -> Iterator[None]:
    """Turn a ValueError about a value that a user gave into a UserError that begins with its name."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{name}: {reason(error)}") from error


def message(error: BaseException) -> str | None:
    """What a user reads of an error; None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error)
    # PyTorch has a type of error for the memory of a GPU, but not for that of the CPU; numpy says how much
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return "there is not enough memory: lower batch_size, augment.crop or the size of the images"
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {error or 'close other programs, or use a smaller size'}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"cannot write {error.filename or 'a file'}: {error.strerror}; {_way_out(error.errno)}"
    return None


def described(error: BaseException) -> str:
    """The text of an error for who was not there: what a user reads, or the traceback of a bug."""
    return message(error) or "".join(traceback.format_exception(error)).rstrip()


def read_json(path: Path, advice: str = "") -> Any:
    """The content of a JSON file; a UserError names the file if it is missing or none."""
    with reading(path, advice):
        return json.loads(path.read_bytes())


def read_record(path: Path, model: type[Record], advice: str = "") -> Record:
    """The record of pydantic in a JSON file; a UserError names the file and the first wrong field."""
    with reading(path, advice):
        record: Record = model.model_validate_json(path.read_bytes())  # type: ignore[attr-defined]
        return record


def first_problem(error: Any) -> str:
    """The first problem of a pydantic ValidationError: the key and what is wrong."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def nearest(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """The end of a message about an unknown name: those it is close to, or all that there are.

    >>> nearest("mni", ["min", "product"]), nearest("x", ["min", "product"])
    ('; did you mean min?', '; there are min, product')
    """
    known = list(dict.fromkeys(known))
    close = get_close_matches(name.lower(), known, n=most, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(known[:30])}{', ...' if len(known) > 30 else ''}"


def listing(names: Sequence[object], what: str, *, most: int = 5) -> str:
    """The number of things, and the first of their names.

    >>> listing(["a", "b", "c"], "case", most=2)
    '3 cases (a, b, ...)'
    """
    shown = ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'} ({shown})"


def reason(error: Exception) -> str:
    """The text of an error on one line; that of pydantic shortened to its first problem."""
    if hasattr(error, "errors"):
        return first_problem(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, KeyError) and error.args:
        # numpy's text is a sentence, others name the key alone
        text = key if " " in (key := str(error.args[0])) else f"it has no {key}"
    return " ".join(text.split()) or type(error).__name__
