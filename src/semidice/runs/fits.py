"""fits.json of a run: what was fitted to its held-out predictions, and to which ones.

Rules and corrections of intervals are in the file, a calibrator in a file of its own, whose SHA-256 is here.
`digest` is that of the stamps of the predictions (see `stamp`): what was fitted to others is not used.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..decisions.conformal import ConformalInterval
from ..errors import UserError, read_record
from ..paths import RunFolder, write_text
from .held_out import HeldOut
from .run import TrainedRun
from .stamp import digest_of


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FittedRule(_Record):
    """The chosen rule, and the mean score of every rule that it was chosen from."""

    decision: str
    scores: dict[str, float]
    num_cases: int


class Fits(_Record):
    """The content of fits.json.

    rules: by fold, or "all". intervals: by level, such as "0.9", then by fold, or "all"; of the foreground
    classes. calibrator: SHA-256 of the file of the calibrator that was kept.
    """

    version: Literal[1] = 1
    digest: str
    rules: Mapping[str, FittedRule] = {}
    intervals: Mapping[str, Mapping[str, ConformalInterval]] = {}
    calibrator: str | None = None


def read_fits(folder: RunFolder) -> Fits:
    """The content of fits.json; a UserError if it is missing or damaged."""
    return read_record(folder.fits, Fits, "remove it, and run `semidice evaluate` again")


def current_fits(run: TrainedRun) -> Fits | None:
    """What was fitted to the predictions that the run has now; None if nothing was, or to others.

    A run without stored predictions, as it may be moved to another machine, is taken at its word.
    """
    if not run.folder.fits.is_file():
        return None
    stored = read_fits(run.folder)
    if not run.folder.has_predictions():
        return stored
    try:
        return stored if stored.digest == digest_of(run.stamps(whole=True)) else None
    # a prediction of another run, or one that was changed
    except UserError:
        return None


def stored_fits(held_out: HeldOut) -> Fits:
    """What was fitted to these predictions; empty if nothing was."""
    path = held_out.run.folder.fits
    stored = read_fits(held_out.run.folder) if path.is_file() else None
    return stored if stored is not None and stored.digest == held_out.digest else Fits(digest=held_out.digest)


def forget_others(held_out: HeldOut) -> None:
    """Remove what was fitted to other predictions of the run, and tables that were made from them."""
    folder = held_out.run.folder
    if not folder.fits.is_file() or read_fits(folder).digest != held_out.digest:
        for path in (folder.decisions, folder.volumes):
            path.unlink(missing_ok=True)
        store_fits(held_out)


def store_fits(held_out: HeldOut, **changes: Any) -> None:
    """Change fields of fits.json; the others are kept, if they are of these predictions."""
    fits = stored_fits(held_out).model_copy(update=changes)
    write_text(held_out.run.folder.fits, fits.model_dump_json(indent=1) + "\n")
