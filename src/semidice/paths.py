"""File names of everything that semidice writes, names that are safe as file names, and atomic writing.

No other module spells out a file name. (Layouts that others define, such as those of raw scans, belong to
their source in `data.sources`.) A file appears under its name only when it is complete, see `atomic_write`.
"""

import glob
import hashlib
import os
import re
import secrets
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError, writing

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+=,@-][A-Za-z0-9_.+=,@ -]*")


def check_name(name: str) -> str:
    """The name, if it is safe as a file name everywhere; a ValueError otherwise.

    Letters, digits, spaces and _.+=,@- are safe. A name does not start with a dot or contain a separator.
    """
    if not _SAFE_NAME.fullmatch(name) or len(name) > 150 or name.endswith(" "):
        raise UserError(
            f"{name!r} cannot be a file name: use letters, digits, and _ - . + = , @ (no dot in front)"
        )
    return name


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path to write to; it is renamed to `path` at the end, or removed after an error.

    The folder is created if it does not exist.

    durable: force the bytes to the disk before the file is renamed. Then a loss of power leaves the old file
    or the new one. False is many times faster for small files: after a loss of power, but not after a crash
    of the program, the file may be incomplete.
    """
    # processes of several machines may have the same number
    temp_path = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temp_path
            if durable:
                force_to_disk(temp_path)
            temp_path.replace(path)
        finally:
            temp_path.unlink(missing_ok=True)


def check_text(name: str | Path) -> None:
    """A UserError if a name is not UTF-8: it could not be written into tables and records."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name {os.fsencode(name)!r} is not UTF-8 text: rename it") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file with `atomic_write`, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file with `atomic_write`."""
    with atomic_write(path) as temp_path:
        temp_path.write_bytes(content)


def force_to_disk(path: Path) -> None:
    """Return when the file's bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Folder:
    """A folder that semidice writes."""

    path: Path

    @property
    def lock(self) -> Path:
        """Who writes to the folder, see `locks`."""
        return self.path / ".lock"

    @property
    def lock_owner(self) -> Path:
        """The process that has the lock, for messages."""
        return self.path / ".lock.owner"

    def folders(self) -> tuple[Path, ...]:
        """Where the files of this folder are, besides folders with a lock of their own."""
        return (self.path,)

    def temp_files(self) -> list[Path]:
        """Files that `atomic_write` left here because its process was killed."""
        return [path for folder in self.folders() for path in folder.glob(".*.part")]

    def inner_folders(self) -> tuple[Path, ...]:
        """All folders in this one that semidice writes to."""
        return self.folders()

    def other_files(self, own: Container[Path] = ()) -> list[Path]:
        """What is in the folder besides `own`, the lock and temporary files; the path itself if a file."""
        if not self.path.is_dir():
            return [self.path] if os.path.lexists(self.path) else []
        of_lock = (self.lock, self.lock_owner, *self.temp_files())
        return [path for path in self.path.iterdir() if path not in own and path not in of_lock]

    def check_links(self) -> None:
        """A UserError if a folder in this one is a link that leads out of it: files would be written, or
        read, somewhere else."""
        for path in self.inner_folders():
            if leads_outside(self.path, path):
                raise UserError(
                    f"{path} is a link that leads out of {self.path}: replace it with the folder itself"
                )


def leads_outside(folder: Path, path: Path) -> bool:
    """Whether links on the way from `folder` to `path` lead out of it, or form a loop."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    # a loop of links: RuntimeError up to Python 3.12, OSError from 3.13
    except (RuntimeError, OSError):
        return True


class _File:
    """A file or folder with a fixed name: `folder.attribute` is its path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, owner: type) -> Path:
        return folder.path / self.name


class DatasetFolder(Folder):
    """A prepared dataset.

    images/SCAN.npy     (S, channels, *space) uint8 or int16; S is 1, or the number of slices of a volume
    masks/SCAN.npy      class maps of the raters as packed bits, see `data.packing`
    truth/SCAN.npy      (S, C, *space) float32, only if the source knows the true probability
    """

    manifest = _File("manifest.json")  # what was prepared, from which files, with which options
    entries = _File(".scans")  # SCAN.json for each finished scan, until all are finished
    identity = _File(".scans/identity")  # the options of these scans

    def array(self, kind: str, scan: str) -> Path:
        """kind: images, masks or truth."""
        return self.path / kind / f"{scan}.npy"

    def entry(self, scan: str) -> Path:
        return self.entries / f"{scan}.json"

    def folders(self) -> tuple[Path, ...]:
        return self.path, self.entries, *(self.path / kind for kind in ("images", "masks", "truth"))

    @property
    def contact_sheet(self) -> Path:
        """The picture that `semidice check` draws, next to the folder."""
        # "." and ".." have no name of their own
        folder = self.path if self.path.name not in ("", "..") else self.path.resolve()
        return folder.with_name(f"{folder.name}_check.png")


class FoldFolder(Folder):
    """One fold of a run: RUN/fold_K."""

    last = _File("last.safetensors")  # weights, optimiser and progress, from which a run is resumed
    log = _File("log.jsonl")  # one line for each logged step and each validation
    tensorboard = _File("tensorboard")  # the same for TensorBoard
    stamp = _File("stamp.json")  # which predictions the fold has, see `runs.stamp`
    predictions = _File("predictions")  # CASE.npz, see `runs.predictions`
    cases = _File("cases.parquet")  # scores of the fold's cases; written when the fold is finished
    seconds = _File("seconds.json")  # time of each phase, one entry for each time that the fold was worked on

    @property
    def is_finished(self) -> bool:
        """Whether the fold is trained, predicted and scored."""
        return self.cases.exists()

    def folders(self) -> tuple[Path, ...]:
        return self.path, self.predictions, self.tensorboard

    def prediction(self, case: str) -> Path:
        return self.predictions / f"{case}.npz"


class RunFolder(Folder):
    """A run, with folders fold_0, fold_1, ..."""

    recipe = _File("recipe.yaml")  # the resolved recipe
    versions = _File("versions.json")  # of everything that could change a number
    folds = _File("folds.json")  # the validation fold of every case
    dataset = _File("dataset.json")  # the part of the manifest that prediction needs
    cases = _File("cases.parquet")  # scores of every case, by the model that never saw its patient
    fits = _File("fits.json")  # fitted rules and corrections of intervals, per fold and for new scans
    decisions = _File("decisions.parquet")  # scores of masks by several rules, which are the methods
    volumes = _File("volumes.csv")  # volume of every case with its interval, and the raters' volumes
    mlflow = _File("mlruns")  # file store of MLflow, if it is used
    wandb = _File("wandb")  # runs of Weights & Biases, if it is used
    calibrator = _File("calibrator.safetensors")  # what `semidice calibrate` kept for `predict`

    def foreign_files(self) -> list[Path]:
        """What a start of a run did not write into a folder without a recipe; the path itself if a file."""
        # the recipe is written last, so a start that was stopped leaves the others
        return self.other_files((self.versions, self.folds, self.dataset))

    def inner_folders(self) -> tuple[Path, ...]:
        folds = (folder for fold in self.existing_folds() for folder in fold.folders())
        return *folds, self.mlflow, self.wandb

    def fold(self, fold: int) -> FoldFolder:
        return FoldFolder(self.path / f"fold_{fold}")

    def finished_folds(self, folds: Iterable[int]) -> tuple[int, ...]:
        """Those of the folds that are finished, in the order of `folds`."""
        return tuple(fold for fold in folds if self.fold(fold).is_finished)

    def existing_folds(self) -> list[FoldFolder]:
        """The folds that have a folder."""
        return [FoldFolder(path) for path in sorted(self.path.glob("fold_*"))]

    def has_predictions(self) -> bool:
        """Whether the prediction of any case is stored."""
        return any(any(fold.predictions.glob("*.npz")) for fold in self.existing_folds())


class MethodFolder(Folder):
    """The runs of one method of a grid, one for each seed: METHOD/seed_K."""

    def seed(self, seed: int) -> RunFolder:
        return RunFolder(self.path / f"seed_{seed}")

    def seeds(self) -> dict[int, RunFolder]:
        """The runs that were started, in the order of their seeds."""
        found = {int(path.name[5:]): RunFolder(path) for path in self.path.glob("seed_*") if _is_seed(path)}
        return {seed: found[seed] for seed in sorted(found) if found[seed].recipe.is_file()}


def find_run(path: Path) -> RunFolder:
    """The run in a folder; that of the folder of a method is its only one, and a UserError names several."""
    runs = {} if RunFolder(path).recipe.is_file() else MethodFolder(path).seeds()
    if len(runs) > 1:
        names = ", ".join(str(run.path) for run in runs.values())
        raise UserError(f"{path} has the runs of several seeds: name one of {names}")
    return next(iter(runs.values()), RunFolder(path))


def _is_seed(path: Path) -> bool:
    return re.fullmatch(r"seed_(0|[1-9]\d{0,18})", path.name) is not None


def run_name(path: Path) -> str:
    """The name of a run folder, with that of its method if it is the run of a seed.

    >>> run_name(Path("runs/uniform")), run_name(Path("runs/uniform/seed_0"))
    ('uniform', 'uniform/seed_0')
    """
    return f"{path.parent.name}/{path.name}" if _is_seed(path) else path.name


def method_path(path: Path) -> Path:
    """The folder of the method that a run folder belongs to: its parent if it is the run of a seed."""
    return path.parent if _is_seed(path) else path


class PredictionFolder(Folder):
    """What `semidice predict` writes, besides the probabilities and masks of each input."""

    settings = _File("prediction.json")  # run and options that made the predictions
    volumes = _File("volumes.csv")  # one row per input and foreground class


class ComparisonFolder(Folder):
    """What `semidice compare` writes; tables are Markdown, LaTeX and CSV files."""

    cases = _File("cases.parquet")  # every score of every case and method
    means = _File("means")  # the table of means, without its suffix

    def pairs(self, metric: str) -> Path:
        """The table of pairs of methods in one metric, without its suffix."""
        return self.path / f"pairs_{metric}"


class ReproductionFolder(Folder):
    """What `semidice reproduce` writes; runs are in DATASET/METHOD/seed_0."""

    rater_cases = _File("rater_agreement_cases.parquet")  # Dice of each rater on each case

    @classmethod
    def of(cls, out: Path, protocol: str) -> "ReproductionFolder":
        """`out` for the protocol `text`, and a folder in it for another one."""
        return cls(out if protocol == "text" else out / protocol)

    def table(self, name: str) -> Path:
        """One of the paper's tables, without its suffix."""
        return self.path / name

    def conclusions(self, name: str) -> Path:
        """The conclusions drawn from a table, without the suffix."""
        return self.path / f"{name}_conclusions"

    def runs(self, dataset: str) -> Path:
        """The runs on one dataset, each in a folder METHOD/seed_0."""
        return self.path / dataset


class DemoFolder(Folder):
    """What `semidice demo` writes."""

    report = _File("report.html")
    cases = _File("cases.parquet")
    runs = _File("runs")
    dataset = _File("phantom")


class ReportFolder(Folder):
    """Tables and figures of a report: the folder PAGE_files next to PAGE.html."""

    cases = _File("cases.csv")  # every score of every case

    @classmethod
    def of(cls, page: Path) -> "ReportFolder":
        return cls(page.with_name(f"{page.stem}_files"))

    def temp_files(self) -> list[Path]:
        """Those of the folder, and of the page next to it."""
        page = glob.escape(self.path.name.removesuffix("_files"))
        return [*super().temp_files(), *self.path.parent.glob(f".{page}.htm*.part")]
