"""Where the time of a fold goes: seconds of each phase, in the fold's folder and in one table of all folds.

    start         waiting for the lock, opening run and dataset
    import        start of a local worker process; 0 if it has worked before
    data          loading the dataset; 0 if it was loaded before
    network       building network, optimiser and teacher
    first_steps   the steps before and while a CUDA graph is recorded, or a network compiled
    steps, validation, checkpoints, prediction, scoring

Times are those of the host. A GPU is waited for at a line of the log, so its work counts as steps.
"""

import csv
import io
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import UserError, read_json, reading
from ..paths import FoldFolder, RunFolder, write_text
from ..recipes.grid import Variant

PHASES = (
    "start",
    "import",
    "data",
    "network",
    "first_steps",
    "steps",
    "validation",
    "checkpoints",
    "prediction",
    "scoring",
)
_FACTS = ("method", "fold", "host", "first_step", "last_step")


class PhaseClock:
    """Seconds of each phase. A phase inside of another one is not counted twice.

    first_step, last_step: the steps that were trained, as numbers of finished steps before and after.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.first_step, self.last_step = 0, 0
        self._open: list[str] = []
        self._since = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for a phase."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = time.monotonic()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def store(self, folder: FoldFolder) -> None:
        """Append the seconds to those that the fold has from before."""
        entry = {
            "host": platform.node(),
            "first_step": self.first_step,
            "last_step": self.last_step,
            **{name: round(seconds, 4) for name, seconds in self.seconds.items()},
        }
        write_text(folder.seconds, json.dumps([*read_seconds(folder), entry]) + "\n")


def read_seconds(folder: FoldFolder) -> list[dict[str, Any]]:
    """Seconds of each time that the fold was worked on; empty if none are stored, or the file is damaged."""
    # times are not results: a fold without them is as good
    with suppress(UserError), reading(folder.seconds):
        entries = read_json(folder.seconds)
        return [{**entry, **{name: float(entry[name]) for name in PHASES}} for entry in entries]
    return []


def write_jobs_table(variants: Sequence[Variant], path: Path) -> None:
    """One row for each time that a fold was worked on, with its seconds; no file if none are stored."""
    rows = []
    for variant in variants:
        for fold in variant.recipe.data.fold_numbers:
            for entry in read_seconds(RunFolder(variant.folder).fold(fold)):
                total = round(sum(entry[name] for name in PHASES), 4)
                rows.append({"method": variant.name, "fold": fold, **entry, "total": total})
    if not rows:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_FACTS, *PHASES, "total"], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
