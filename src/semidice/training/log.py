"""The log of a fold: log.jsonl, and the same values for TensorBoard and other loggers.

log.jsonl is the record: equal trainings write equal lines, so it holds no time and no speed. A killed
training may have lines after its last checkpoint; these steps are trained again, and their lines replaced.
TensorBoard is written at once and hides the steps after a restart. Other loggers cannot take a step back, so
they get a step only when a checkpoint of it, or of a later step, is on the disk. A logger that fails is left
out with a warning: it never stops a training.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from torch.utils.tensorboard import SummaryWriter

from ..limits import MAX_LOG_BYTES, parse_json, read_bytes
from ..paths import FoldFolder, named_errors, write_text
from ..recipes.options import flattened
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

    def __init__(self, folder: FoldFolder, start: int) -> None:
        self.writer = SummaryWriter(str(folder.tensorboard), purge_step=start)

    def params(self, values: Mapping[str, str]) -> None:
        """Not shown: recipe.yaml of the run has them."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class TrainingLog:
    """The log of a fold from the step `start` on.

    loggers: by their names; each opens the logger of a fold. on_warning: called with a line about a logger
    that failed.
    """

    def __init__(
        self,
        fold_run: FoldRun,
        start: int,
        *,
        loggers: Mapping[str, Callable[[FoldRun], Logger]] | None = None,
        on_warning: Callable[[str], object] = print,
    ) -> None:
        folder = fold_run.folder
        folder.path.mkdir(parents=True, exist_ok=True)
        kept = read_log(folder.log, start)
        write_text(folder.log, "".join(f"{line}\n" for lines in kept.values() for line in lines))
        self.path, self.file = folder.log, folder.log.open("a")
        self.on_warning = on_warning
        self.board = _Guarded("tensorboard", lambda: TensorBoard(folder, start), on_warning)
        self.loggers = [
            _Guarded(name, lambda opened=opened: opened(fold_run), on_warning)  # type: ignore[misc]
            for name, opened in (loggers or {}).items()
        ]
        # values of each step that the loggers do not have yet
        self.waiting = {step: _values(lines) for step, lines in kept.items()} if self.loggers else {}
        for logger in self.loggers:
            logger.params(_params(fold_run))
        self.send(start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with named_errors(self.path):
            print(json.dumps({"step": step, **values}), file=self.file, flush=True)
        self.board.scalars(step, values)
        if self.loggers:
            self.waiting.setdefault(step, {}).update(values)

    def send(self, last: int) -> None:
        """Give the loggers all steps up to `last`, which a checkpoint on the disk has."""
        for step in [step for step in self.waiting if step <= last]:
            values = self.waiting.pop(step)
            for logger in self.loggers:
                logger.scalars(step, values)

    def force_to_disk(self) -> None:
        with named_errors(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.file.close)
            for logger in (self.board, *self.loggers):
                stack.callback(logger.close)


class _Guarded:
    """A logger whose first error ends it, with a warning."""

    def __init__(self, name: str, opened: Callable[[], Logger], on_warning: Callable[[str], object]) -> None:
        self.name, self.on_warning = name, on_warning
        self.logger: Logger | None = None
        try:
            self.logger = opened()
        # packages of others raise errors of all kinds
        except Exception as error:
            self._end(error)

    def params(self, values: Mapping[str, str]) -> None:
        self._try(lambda logger: logger.params(values))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda logger: logger.scalars(step, values))

    def close(self) -> None:
        self._try(lambda logger: logger.close())

    def _try(self, call: Callable[[Logger], None]) -> None:
        if self.logger is None:
            return
        try:
            call(self.logger)
        except Exception as error:
            with suppress(Exception):
                self.logger.close()
            self._end(error)

    def _end(self, error: Exception) -> None:
        self.logger = None
        text = " ".join(str(error).split()) or type(error).__name__
        self.on_warning(
            f"warning: logging to {self.name} failed and ends here; training continues, and log.jsonl has "
            f"every value: {text}"
        )


def read_log(path: Path, last: int) -> dict[int, list[str]]:
    """The lines of a log by their step, up to the step `last`; lines that are not complete are left out."""
    lines: dict[int, list[str]] = {}
    if not path.exists():
        return lines
    for line in read_bytes(path, max_bytes=MAX_LOG_BYTES).decode(errors="replace").splitlines():
        try:
            step = int(parse_json(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if step <= last:
            lines.setdefault(step, []).append(line)
    return lines


def _values(lines: Sequence[str]) -> dict[str, float]:
    """The values of all lines of a step."""
    values = {name: value for line in lines for name, value in parse_json(line).items()}
    return {name: value for name, value in values.items() if name != "step"}


def _params(fold_run: FoldRun) -> dict[str, str]:
    """Options of the recipe, and the fold."""
    options = fold_run.recipe.model_dump(mode="json", exclude={"auto", "reasons"})
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flattened(options)}
    return {**texts, "fold": str(fold_run.fold)}
