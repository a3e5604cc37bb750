"""File names: the only module that knows how a prepared dataset and a run folder are laid out.

    DATASET/manifest.json            what was prepared, from what, with which options
            images/SCAN.npy          (S, channels, *space) uint8 or int16: S is 1, or the slices of a volume
            masks/SCAN.npy           the raters' class maps as packed bits, see `data.packing`
            truth/SCAN.npy           (S, C, *space) float32, only where the true probability is known

    .DATASET.part/job.json           what is being prepared, beside the dataset it will become
                  records/SCAN.json  of each scan that is finished
                  dataset/           the dataset, renamed when all scans are

    RUN/recipe.yaml                  the resolved recipe
        versions.json                of everything that could change a number
        folds.json                   the validation fold of every case
        dataset.json                 what of the manifest a prediction needs, see `predict.networks`
        cases.parquet                scores of every case, by the model that never saw its patient
        fold_K/last.safetensors      weights, optimiser and progress: what a resumed run starts from
               best.safetensors      the weights with the best validation score
               log.jsonl             a line for every logged step and every validation
               tensorboard/          the same for TensorBoard
               predictions/CASE.npz  stored probabilities, see `predict`
               cases.parquet         scores of the fold's cases; it is there when the fold is finished

Files appear under their names only when they are whole (`atomic_write`).
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+=,@-][A-Za-z0-9_.+=,@ -]*")


def check_name(name: str) -> str:
    """The name, if it can be a file's: letters, digits and _.+=,@- with no dot in front and no separator."""
    if not _SAFE_NAME.fullmatch(name) or len(name) > 150 or name.endswith(" "):
        raise ValueError(
            f"{name!r} cannot name a file: use letters, digits, and _ - . + = , @ (no dot in front)"
        )
    return name


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends; after an error nothing of it is left.

    The bytes are on the disk before the name is: a machine that loses power has the old file or the new one.
    durable=False leaves that to the system, which is many times quicker for small files: after a loss of
    power, but not after a crash, there may be a file of that name with less in it.
    """
    temp_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temp_path
        if durable:
            force_to_disk(temp_path)
        temp_path.replace(path)
    finally:
        temp_path.unlink(missing_ok=True)


def force_to_disk(path: Path) -> None:
    """Return when the file's bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class DatasetFolder:
    """Paths in a prepared dataset."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    def array(self, kind: str, scan: str) -> Path:
        """kind: images, masks or truth."""
        return self.path / kind / f"{scan}.npy"


@dataclass(frozen=True)
class UnfinishedDataset:
    """Paths of a dataset that is being prepared, all beside the folder it will become."""

    path: Path

    @classmethod
    def of(cls, dataset: Path) -> "UnfinishedDataset":
        return cls(dataset.with_name(f".{dataset.name}.part"))

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def records(self) -> Path:
        return self.path / "records"

    def record(self, scan: str) -> Path:
        return self.records / f"{scan}.json"

    @property
    def dataset(self) -> DatasetFolder:
        return DatasetFolder(self.path / "dataset")

    def foreign_files(self) -> list[Path]:
        """What is in the folder, or the folder itself, that was not put there by a preparation."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            return [self.path]
        if not self.path.exists():
            return []
        ours = {self.job, self.records, self.dataset.path}
        temp_path = f".{self.job.name}."
        return [
            path for path in self.path.iterdir() if path not in ours and not path.name.startswith(temp_path)
        ]


@dataclass(frozen=True)
class FoldFolder:
    """Paths of one fold of a run."""

    path: Path

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def cases(self) -> Path:
        return self.path / "cases.parquet"

    def prediction(self, case: str) -> Path:
        return self.path / "predictions" / f"{case}.npz"


@dataclass(frozen=True)
class RunFolder:
    """Paths in a run folder."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def versions(self) -> Path:
        return self.path / "versions.json"

    @property
    def folds(self) -> Path:
        return self.path / "folds.json"

    @property
    def dataset(self) -> Path:
        return self.path / "dataset.json"

    @property
    def cases(self) -> Path:
        return self.path / "cases.parquet"

    def fold(self, fold: int) -> FoldFolder:
        return FoldFolder(self.path / f"fold_{fold}")
