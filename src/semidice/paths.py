"""File names of everything that semidice writes, names that are safe as file names, and atomic writing.

No other module spells out a file name. (Layouts that others define, such as those of raw scans, belong to
their source in `data.sources`.) A file appears under its name only when it is complete, see `atomic_write`.
"""

import errno
import glob
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+=,@-][A-Za-z0-9_.+=,@ -]*")


def check_name(name: str) -> str:
    """The name, if it is safe as a file name everywhere; a ValueError otherwise.

    Letters, digits, spaces and _.+=,@- are safe. A name does not start with a dot or contain a separator.
    """
    if not _SAFE_NAME.fullmatch(name) or len(name) > 150 or name.endswith(" "):
        raise ValueError(
            f"{name!r} cannot be a file name: use letters, digits, and _ - . + = , @ (no dot in front)"
        )
    return name


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path to write to; it is renamed to `path` at the end, or removed after an error.

    durable: force the bytes to the disk before the file is renamed. Then a loss of power leaves the old file
    or the new one. False is many times faster for small files: after a loss of power, but not after a crash
    of the program, the file may be incomplete.
    """
    # processes of several machines may have the same number
    temp_path = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    with named_errors(path):
        try:
            yield temp_path
            if durable:
                force_to_disk(temp_path)
            temp_path.replace(path)
        finally:
            temp_path.unlink(missing_ok=True)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Give an OSError the name of the file that was to be written.

    Without it, the error has no name, or that of a temporary file, which the user does not know.
    """
    try:
        yield
    except OSError as error:
        # an error of a library that is not one of the system has a text of its own
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file with `atomic_write`, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file with `atomic_write`."""
    with atomic_write(path) as temp_path:
        temp_path.write_bytes(content)


def write_error(path: Path, error: OSError) -> ValueError:
    """The error that a file or folder cannot be written, with the reason and what to do."""
    remedy = "choose another folder, or run the same command again: it continues"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space and run the same command again: it continues"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "choose a folder that you may write to"
    elif error.errno in (errno.EBUSY, errno.EXDEV):
        remedy = "it may be the mount point of a disk: choose a folder below it"
    return ValueError(f"cannot write {path}: {error.strerror or error}; {remedy}")


def force_to_disk(path: Path) -> None:
    """Return when the file's bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def file_hash(path: Path) -> str:
    """SHA-256 of a file; an OSError for a pipe or a device, which has no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
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

    def parts(self) -> Sequence["Folder"]:
        """The folders in it that have locks of their own."""
        return ()

    def own_temp_files(self) -> list[Path]:
        """Files that `atomic_write` left in the folder because its process was killed."""
        lock = f"{self.lock.name}."
        return [path for path in self.path.glob(".*.part") if not path.name.startswith(lock)]

    def temp_files(self) -> list[Path]:
        """Also those of its parts."""
        return [*self.own_temp_files(), *(path for part in self.parts() for path in part.temp_files())]


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
    checked = _File(".checked.json")  # the arrays whose SHA-256 was compared, see `data.integrity`

    def array(self, kind: str, scan: str) -> Path:
        """kind: images, masks or truth."""
        return self.path / kind / f"{scan}.npy"

    @property
    def contact_sheet(self) -> Path:
        """The picture that `semidice check` draws, next to the folder."""
        # "." and ".." have no name of their own
        folder = self.path if self.path.name not in ("", "..") else self.path.resolve()
        return folder.with_name(f"{folder.name}_check.png")


class UnfinishedDataset(Folder):
    """The folder in which a dataset is prepared: .DATASET.part, next to the later DATASET."""

    job = _File("job.json")  # what is being prepared, with which options
    records = _File("records")  # SCAN.json for each finished scan

    @classmethod
    def of(cls, dataset: Path) -> "UnfinishedDataset":
        return cls(dataset.with_name(f".{dataset.name}.part"))

    def record(self, scan: str) -> Path:
        return self.records / f"{scan}.json"

    @property
    def dataset(self) -> DatasetFolder:
        """The dataset; it is moved to its final path when all scans are finished."""
        return DatasetFolder(self.path / "dataset")

    def foreign_files(self) -> list[Path]:
        """Files in this folder that `prepare` did not write; the path itself if it is not a folder."""
        if self.path.is_symlink() or not self.path.is_dir():
            return [self.path] if os.path.lexists(self.path) else []
        own = {self.job, self.records, self.dataset.path}
        temporary = (self.lock.name, f".{self.job.name}.")
        return [
            path for path in self.path.iterdir() if path not in own and not path.name.startswith(temporary)
        ]


class FoldFolder(Folder):
    """One fold of a run: RUN/fold_K."""

    last = _File("last.safetensors")  # weights, optimiser and progress, from which a run is resumed
    best = _File("best.safetensors")  # the weights with the best validation score
    log = _File("log.jsonl")  # one line for each logged step and each validation
    tensorboard = _File("tensorboard")  # the same for TensorBoard
    teacher = _File("teacher.json")  # the fitted temperature of the teacher, if the fold has one
    predictions = _File("predictions")  # CASE.npz, see `runs.predictions`
    cases = _File("cases.parquet")  # scores of the fold's cases; written when the fold is finished
    seconds = _File("seconds.json")  # time of each phase, one entry for each time that the fold was worked on

    @property
    def is_finished(self) -> bool:
        """Whether the fold is trained, predicted and scored."""
        return self.cases.exists()

    def temp_files(self) -> list[Path]:
        """Those of the fold and its predictions."""
        return [*super().temp_files(), *Folder(self.predictions).temp_files()]

    def prediction(self, case: str) -> Path:
        return self.predictions / f"{case}.npz"

    def diverged(self, step: int) -> Path:
        """The weights before a step whose loss was not finite."""
        return self.path / f"diverged_step_{step}.safetensors"


class RunFolder(Folder):
    """A run, with folders fold_0, fold_1, ..."""

    recipe = _File("recipe.yaml")  # the resolved recipe
    versions = _File("versions.json")  # of everything that could change a number
    folds = _File("folds.json")  # the validation fold of every case
    dataset = _File("dataset.json")  # the part of the manifest that prediction needs
    arrays = _File("arrays.json")  # size and time of the dataset's arrays when their hashes were compared
    cases = _File("cases.parquet")  # scores of every case, by the model that never saw its patient
    decision = _File("decision.json")  # fitted rules and corrections of intervals, per fold and for new scans
    decisions = _File("decisions.parquet")  # scores of masks by several rules, which are the methods
    volumes = _File("volumes.csv")  # volume of every case with its interval, and the raters' volumes
    mlflow = _File("mlruns")  # file store of MLflow, if it is used
    wandb = _File("wandb")  # runs of Weights & Biases, if it is used
    calibrator = _File("calibrator.safetensors")  # what `semidice calibrate` kept for `predict`

    def parts(self) -> Sequence[Folder]:
        return self.existing_folds()

    def foreign_files(self) -> list[Path]:
        """What a start of a run did not write into a folder without a recipe; the path itself if a file."""
        if not self.path.is_dir():
            return [self.path] if os.path.lexists(self.path) else []
        # the recipe is written last, so a start that was stopped leaves the others
        own = {self.versions, self.folds, self.dataset, self.lock, *self.temp_files()}
        lock = f"{self.lock.name}."
        return [path for path in self.path.iterdir() if path not in own and not path.name.startswith(lock)]

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
    """The runs of one method that was trained with several seeds: METHOD/seed_K."""

    def seed(self, seed: int) -> RunFolder:
        return RunFolder(self.path / f"seed_{seed}")

    def seeds(self) -> dict[int, RunFolder]:
        """The runs that were started, in the order of their seeds."""
        found = {int(path.name[5:]): RunFolder(path) for path in self.path.glob("seed_*") if _is_seed(path)}
        return {seed: found[seed] for seed in sorted(found) if found[seed].recipe.is_file()}


def _is_seed(path: Path) -> bool:
    return re.fullmatch(r"seed_(0|[1-9]\d{0,18})", path.name) is not None


def run_name(path: Path) -> str:
    """The name of a run folder, with that of its method if the method has several seeds.

    >>> run_name(Path("runs/uniform")), run_name(Path("runs/uniform/seed_0"))
    ('uniform', 'uniform/seed_0')
    """
    return f"{path.parent.name}/{path.name}" if _is_seed(path) else path.name


def method_path(path: Path) -> Path:
    """The folder of the method that a run folder belongs to: its parent if the method has several seeds."""
    return path.parent if _is_seed(path) else path


class PredictionFolder(Folder):
    """What `semidice predict` writes, besides the probabilities and masks of each input."""

    settings = _File("prediction.json")  # run and options that made the predictions
    volumes = _File("volumes.csv")  # one row per input and foreground class


class ComparisonFolder(Folder):
    """What `semidice compare` writes; tables are Markdown, LaTeX and CSV files."""

    cases = _File("cases.parquet")  # every score of every case and method
    means = _File("means")  # the table of means, without its suffix
    arrays = _File("arrays.json")  # as in a run, for all runs of the comparison
    jobs = _File("jobs.csv")  # time of each phase of each fold of each run

    def pairs(self, metric: str) -> Path:
        """The table of pairs of methods in one metric, without its suffix."""
        return self.path / f"pairs_{metric}"


class ReproductionFolder(Folder):
    """What `semidice reproduce` writes; runs are in DATASET/METHOD."""

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
        """The runs on one dataset, each in a folder METHOD."""
        return self.path / dataset


class DemoFolder(Folder):
    """What `semidice demo` writes."""

    report = _File("report.html")
    overlays = _File("overlays.png")
    reliability = _File("reliability.png")
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
