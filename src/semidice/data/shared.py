"""The dataset that several trainings share: opened and loaded once, and compared with its hashes once."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import SECONDS_BETWEEN_LINES, say
from ..paths import DatasetFolder, file_hash, write_text
from .dataset import Dataset
from .integrity import check_arrays, read_seen

# a pass over all arrays that takes longer than this is shown
_SECONDS_BEFORE_LINE = 5.0


class SharedDataset:
    """The dataset that was opened last in this process, kept while it is asked for again.

    Its cases stay in the memory of the device on which they were loaded, see `data.storage`.
    """

    def __init__(self) -> None:
        self._dataset: Dataset | None = None
        self._manifest_hash = ""
        self._known: dict[str, Any] = {}

    def open(self, path: Path) -> Dataset:
        """The prepared dataset; the same object as before if it is the same and has the same manifest."""
        folder, kept = DatasetFolder(Path(path)), self._dataset
        # the text and not what it says: a manifest of 100 000 scans takes seconds to read
        if (
            kept is not None
            and kept.folder == folder
            and folder.manifest.is_file()
            and file_hash(folder.manifest) == self._manifest_hash
        ):
            return kept
        dataset = Dataset(path)
        self._dataset, self._known = dataset, {}
        self._manifest_hash = file_hash(folder.manifest)
        return dataset

    def check(self, dataset: Dataset, *seen: Path) -> None:
        """A ValueError if an array is not the one that was prepared; only arrays not yet seen are read.

        seen: files of `check_arrays`, of a run and of the grid that it belongs to. The dataset has one too,
        so that its arrays are read once for all runs, unless its folder cannot be written to.
        """
        own = dataset.folder.checked
        stored = read_seen(own)
        self._known = {**stored, **self._known}
        for path in seen:
            self._known = check_arrays(dataset, path, known=self._known, on_bytes=_Lines(dataset))
        if self._known != stored:
            # a dataset may lie where this user cannot write
            with suppress(OSError):
                write_text(own, json.dumps(self._known) + "\n")


class _Lines:
    """Prints how much of the arrays was compared with their hashes, if that takes long."""

    def __init__(self, dataset: Dataset) -> None:
        self.path, self.next_at = dataset.folder.path, time.monotonic() + _SECONDS_BEFORE_LINE

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self.next_at:
            self.next_at = time.monotonic() + SECONDS_BETWEEN_LINES
            text = f"comparing {self.path} with its hashes: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
            say(Console(stderr=True), text)
