"""What a process trains with, the one thing that is handed down: its place among others, who hears of it,
and where the time of a fold goes.

    start         waiting for the lock, opening run and dataset
    import        start of a local worker process; 0 if it has worked before
    data          loading the dataset; 0 if it was loaded before
    network       building network, optimiser and teacher
    first_steps   the steps before and while a CUDA graph is recorded, or a network compiled
    steps, validation, checkpoints, prediction, scoring

Times are those of the host. A GPU is waited for at a line of the log, so its work counts as steps.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import UserError, read_json, reading
from ..paths import FoldFolder, write_text
from .log import OpenLogger
from .processes import Processes

PHASES = (
    *("start", "import", "data", "network", "first_steps"),
    *("steps", "validation", "checkpoints", "prediction", "scoring"),
)
# memory of a CUDA context and of libraries, which PyTorch does not count
_CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True)
class Event:
    """What happens in a training, or to a job.

    content: what a fold does now (training, predicting, finished), the `StepStatus` of a step, the text of a
    warning or an error, or the share of the GPU's memory that a job has needed.
    """

    kind: Literal["phase", "step", "warning", "memory", "finished", "failed", "lost"]
    content: Any = None
    # of a phase
    fold: int = -1


@dataclass
class Context:
    """One per process. say: called with all that happens. loggers: by their names, see `TrainingLog`."""

    processes: Processes = field(default_factory=Processes)
    say: Callable[[Event], object] = lambda _: None
    loggers: Mapping[str, OpenLogger] = field(default_factory=dict)
    seconds_between_checkpoints: float = 60.0
    # steps of the fold that are finished, before and after this process worked on it
    first_step: int = 0
    last_step: int = 0

    def __post_init__(self) -> None:
        self._open: list[str] = []
        self.clear_seconds()

    def warn(self, text: str) -> None:
        self.say(Event("warning", text))

    def clear_seconds(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.first_step = self.last_step = 0
        self._since = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for a phase. A phase inside of another one is not counted twice."""
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

    def store_seconds(self, folder: FoldFolder) -> None:
        """Append the seconds to those that the fold has from before, and begin again."""
        entry = {
            "host": platform.node(),
            "first_step": self.first_step,
            "last_step": self.last_step,
            **{name: round(seconds, 4) for name, seconds in self.seconds.items()},
        }
        write_text(folder.seconds, json.dumps([*read_seconds(folder), entry]) + "\n")
        self.clear_seconds()

    def memory_share(self) -> float:
        """The share of the memory of the GPU that was needed since `work` began; 0 on a CPU."""
        device = self.processes.device
        if device.type == "cpu":
            return 0.0
        used = torch.cuda.max_memory_reserved(device) + _CONTEXT_BYTES
        return used / torch.cuda.get_device_properties(device).total_memory


def read_seconds(folder: FoldFolder) -> list[dict[str, Any]]:
    """Seconds of each time that the fold was worked on; empty if none are stored, or the file is damaged."""
    # times are not results: a fold without them is as good
    with suppress(UserError), reading(folder.seconds):
        entries = read_json(folder.seconds)
        return [{**entry, **{name: float(entry[name]) for name in PHASES}} for entry in entries]
    return []
