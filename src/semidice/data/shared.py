"""The dataset that several trainings share: opened and loaded once, and compared with its hashes once."""

from pathlib import Path
from typing import Any

from .dataset import Dataset
from .integrity import check_arrays


class SharedDataset:
    """The dataset that was opened last in this process, kept while it is asked for again.

    Its cases stay in the memory of the device on which they were loaded, see `data.storage`.
    """

    def __init__(self) -> None:
        self._dataset: Dataset | None = None
        self._known: dict[str, Any] = {}

    def open(self, path: Path) -> Dataset:
        """The prepared dataset; the same object as before if it is the same and has the same manifest."""
        dataset, kept = Dataset(path), self._dataset
        if kept is None or kept.folder != dataset.folder or kept.manifest != dataset.manifest:
            self._dataset, self._known = dataset, {}
            return dataset
        return kept

    def check(self, dataset: Dataset, *seen: Path) -> None:
        """A ValueError if an array is not the one that was prepared; only arrays not yet seen are read.

        seen: files of `check_arrays`, of a run and of the grid that it belongs to.
        """
        for path in seen:
            self._known = check_arrays(dataset, path, known=self._known)
