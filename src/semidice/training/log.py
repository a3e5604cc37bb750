"""The log of a fold: log.jsonl, and the same values for TensorBoard and other loggers.

log.jsonl is the record: equal trainings write equal lines, so it holds no time and no speed. A killed
training may have lines after its last checkpoint; these steps are trained again, and their lines replaced.
TensorBoard hides the steps after a restart; other loggers get them again, with equal values. A logger that
fails is left out with a warning: it never stops a training.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..errors import writing
from ..paths import write_text
from ..recipes import flat_options
from ..runs.run import FoldRun


class Logger(Protocol):
    """Where the numbers of one fold go."""

    def params(self, values: Mapping[str, str]) -> None:
        """Options of the training. A resumed training passes them again."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """All values of a step. Steps increase, but a resumed training passes the steps before it again:
        values that the logger has are ignored."""

    def close(self) -> None:
        """Write what is not written yet. `scalars` is not called again."""


class TensorBoard:
    """Event files in the folder of a fold; steps after `start` that an earlier training wrote are hidden."""

    def __init__(self, fold: FoldRun, start: int) -> None:
        # imported here: it takes longer than all of semidice
        from torch.utils.tensorboard import SummaryWriter

        # an interrupt at the wrong moment waits for the next flush, which is 120 s away otherwise
        self.writer = SummaryWriter(str(fold.folder.tensorboard), purge_step=start, flush_secs=10)

    def params(self, values: Mapping[str, str]) -> None:
        """Not shown: recipe.yaml of the run has them."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


OpenLogger = Callable[[FoldRun], Logger]


class TrainingLog:
    """The log of a fold from the step `start` on.

    loggers: by their names; each opens the logger of a fold. warn: called with a line about a logger that
    failed.
    """

    def __init__(
        self,
        fold: FoldRun,
        start: int,
        loggers: Mapping[str, OpenLogger],
        warn: Callable[[str], object],
    ) -> None:
        self.path = fold.folder.log
        kept = read_log(self.path, start)
        write_text(self.path, "".join(f"{line}\n" for lines in kept.values() for line in lines))
        with writing(self.path):
            self.file = self.path.open("a")
        self.loggers = [_Guarded(name, fold, opened, warn) for name, opened in loggers.items()]
        for logger in self.loggers:
            logger.call("params", _params(fold))
            # a resumed training may have lines that a logger lacks
            for step, lines in kept.items():
                logger.call("scalars", step, _values(lines))
        self.loggers.insert(0, _Guarded("tensorboard", fold, partial(TensorBoard, start=start), warn))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with writing(self.path):
            print(json.dumps({"step": step, **values}), file=self.file, flush=True)
        for logger in self.loggers:
            logger.call("scalars", step, values)

    def force_to_disk(self) -> None:
        with writing(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        for logger in self.loggers:
            logger.call("close")


class _Guarded:
    """A logger whose first error ends it, with a warning. Packages of others raise errors of all kinds."""

    def __init__(self, name: str, fold: FoldRun, opened: OpenLogger, warn: Callable[[str], object]) -> None:
        self.name, self.warn = name, warn
        self.logger: Logger | None = None
        try:
            self.logger = opened(fold)
        except Exception as error:
            self._end(error)

    def call(self, method: str, *arguments: Any) -> None:
        if self.logger is None:
            return
        try:
            getattr(self.logger, method)(*arguments)
        except Exception as error:
            with suppress(Exception):
                self.logger.close()
            self._end(error)

    def _end(self, error: Exception) -> None:
        self.logger = None
        text = " ".join(str(error).split()) or type(error).__name__
        self.warn(
            f"warning: logging to {self.name} failed and ends here; training continues, and log.jsonl has "
            f"every value: {text}"
        )


def read_log(path: Path, last: int) -> dict[int, list[str]]:
    """The lines of a log by their step, up to the step `last`; lines that are not complete are left out."""
    lines: dict[int, list[str]] = {}
    if not path.exists():
        return lines
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if step <= last:
            lines.setdefault(step, []).append(line)
    return lines


def _values(lines: Sequence[str]) -> dict[str, float]:
    """The values of all lines of a step."""
    values = {name: value for line in lines for name, value in json.loads(line).items()}
    return {name: value for name, value in values.items() if name != "step"}


def _params(fold: FoldRun) -> dict[str, str]:
    """Options of the recipe, and the fold."""
    options = flat_options(fold.recipe)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
    return {**texts, "fold": str(fold.fold)}
