"""decision.json of a run: the rules and corrections that were fitted to its out-of-fold predictions.

Everything is fitted once for each fold, to the predictions of all other folds, and once to all folds, for new
scans ("all"). The file also says which predictions and masks these were. Results that were fitted to others
are not used.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ..data.dataset import Dataset
from ..decisions.conformal import ConformalInterval
from ..errors import read_record, reading
from ..locks import locked
from ..paths import RunFolder, write_text
from .run import TrainedRun, manifest_digest

ALL_FOLDS = "all"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FittedRule(_Record):
    """The chosen rule, and the mean score of every rule that it was chosen from."""

    decision: str
    scores: dict[str, float]
    num_cases: int


class DecisionFile(_Record):
    """The content of decision.json.

    rules: by fold, or "all". intervals: by level, such as "0.9", then by fold, or "all"; of the foreground
    classes.
    """

    version: Literal[1] = 1
    predictions: str
    manifest_sha256: str
    unit: Literal["scan", "slice"]
    rules: dict[str, FittedRule] = {}
    intervals: dict[str, dict[str, ConformalInterval]] = {}


def stored_fits(run: TrainedRun, dataset: Dataset) -> DecisionFile:
    """The fits of the run's present predictions and masks; empty if none were stored, or for others."""
    new = DecisionFile(
        predictions=predictions_digest(run),
        manifest_sha256=manifest_digest(dataset.manifest),
        unit=run.recipe.validation.unit,
    )
    if not run.folder.decision.is_file():
        return new
    stored = read_fits(run.folder)
    same = all(
        getattr(stored, name) == getattr(new, name) for name in ("predictions", "manifest_sha256", "unit")
    )
    return stored if same else new


def current_fits(run: TrainedRun) -> DecisionFile | None:
    """What predictions of new scans may use: None if nothing was stored, or for other predictions.

    A run without stored predictions, as it may be moved to another machine, is taken at its word.
    """
    if not run.folder.decision.is_file():
        return None
    stored = read_fits(run.folder)
    has_predictions = run.folder.has_predictions()
    return stored if not has_predictions or stored.predictions == predictions_digest(run) else None


def read_fits(folder: RunFolder) -> DecisionFile:
    """The content of decision.json; a UserError if it is missing or damaged."""
    return read_record(folder.decision, DecisionFile, "remove it, and run `semidice evaluate` again")


def store_rules(run: TrainedRun, dataset: Dataset, rules: Mapping[str, FittedRule]) -> None:
    """Write fitted rules into decision.json; intervals that it has are kept."""
    with locked(run.folder, "semidice evaluate"):
        _write(run, stored_fits(run, dataset).model_copy(update={"rules": dict(rules)}))


def store_interval(
    run: TrainedRun, dataset: Dataset, level: str, corrections: Mapping[str, ConformalInterval]
) -> None:
    """Write the corrections of a level into decision.json; rules and other levels that it has are kept."""
    with locked(run.folder, "semidice evaluate"):
        fits = stored_fits(run, dataset)
        intervals = {**fits.intervals, level: dict(corrections)}
        _write(run, fits.model_copy(update={"intervals": intervals}))


def _write(run: TrainedRun, fits: DecisionFile) -> None:
    write_text(run.folder.decision, fits.model_dump_json(indent=1) + "\n")


def predictions_digest(run: TrainedRun) -> str:
    """SHA-256 of fold, case and checksum of every stored prediction of the finished folds.

    The checksum is the CRC-32 in the file, so that no prediction has to be read as a whole.
    """
    digest = hashlib.sha256()
    for fold in run.finished_folds:
        for path in sorted(run.folder.fold(fold).predictions.glob("*.npz")):
            with reading(path, "predict again"), zipfile.ZipFile(path) as archive:
                checksums = [(info.filename, info.CRC, info.file_size) for info in archive.infolist()]
            digest.update(f"{fold} {path.stem} {checksums}\n".encode())
    return digest.hexdigest()
