"""What commands print: plain lines, and progress with the remaining time.

A terminal shows bars. Without one (a pipe, a file, a batch job) progress is printed as plain lines, at most
one every `SECONDS_BETWEEN_LINES`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

SECONDS_BETWEEN_LINES = 30.0


def new_console() -> Console:
    """The console of a command. It prints names as they are: `[x]` is no markup and `:b:` no emoji."""
    return Console(markup=False, emoji=False)


def counting_bar(console: Console, *, doing: str, unit: str) -> Progress:
    """A bar that counts `unit`s and disappears at the end; it shows `doing` and the task's description."""
    if not _shows_bars(console):
        return ProgressLines(console, lambda task: _counting_line(task, doing, unit))
    return Progress(
        TextColumn(f"{doing} {{task.description}}", markup=False),
        BarColumn(),
        TextColumn(f"{{task.completed:.0f}}/{{task.total}} {unit}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def training_bars(console: Console, *, names: Sequence[str], transient: bool = False) -> Progress:
    """Bars of trainings, one per task, each with a text about its state: the field `status`.

    names: of all trainings.

    Lines also have the field `left`, the remaining time. They are printed by `print_line`, and repeated only
    while the field `repeats` is true.
    """
    if not _shows_bars(console):
        return ProgressLines(
            console, lambda task: "{}: {status}{left}".format(task.description, **task.fields)
        )
    # a narrow terminal cuts the status, and never the name, the bar or the remaining time
    return Progress(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, min_width=max(map(len, names))),
        ),
        BarColumn(bar_width=16),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        console=console,
        transient=transient,
        expand=True,
    )


@contextmanager
def waiting(console: Console, doing: str) -> Iterator[None]:
    """Show `doing` while the block runs: a spinner, or a line from time to time."""
    if _shows_bars(console):
        with console.status(Text(doing)):
            yield
        return
    with ProgressLines(console, lambda task: f"{doing}, {clock(task.elapsed or 0)} so far") as progress:
        progress.add_task("")
        yield


def print_line(progress: Progress, task: TaskID, *, now: bool = False) -> None:
    """Print the state of a task if progress is shown as lines and the last line is old enough, or `now`."""
    if isinstance(progress, ProgressLines):
        progress.print_line(task, now=now)


def say(console: Console, text: str) -> None:
    """Print one line without markup and without breaking paths."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters spelled out: a name from a file must not change the terminal.

    >>> printable("a\\x1b[31m, b")
    'a\\\\x1b[31m, b'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def clock(seconds: float) -> str:
    """A duration as h:mm:ss.

    >>> clock(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class ProgressLines(Progress):
    """Progress as plain lines: the task that was updated last, printed again when the last line is old.

    line: the text of a task. A thread prints, so that there is a line even while one item takes long.
    """

    def __init__(self, console: Console, line: Callable[[Task], str]) -> None:
        # disabled: tasks are counted, and nothing is drawn
        super().__init__(console=console, disable=True)
        self._line = line
        self._printed_at, self._current = time.monotonic(), TaskID(0)
        self._stopped = Event()
        self._thread = Thread(target=self._repeat, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        self._current = task_id
        super().update(task_id, **changes)

    def print_line(self, task: TaskID, *, now: bool = False) -> None:
        """Print the line of a task if it is due, or `now`."""
        with self._lock:
            if not now and self._seconds_left() > 0:
                return
            self._printed_at = time.monotonic()
            text = self._line(self._tasks[task])
        say(self.console, text)

    def _seconds_left(self) -> float:
        return self._printed_at + SECONDS_BETWEEN_LINES - time.monotonic()

    def _repeat(self) -> None:
        while not self._stopped.wait(max(self._seconds_left(), min(1.0, SECONDS_BETWEEN_LINES))):
            task = self._tasks.get(self._current)
            if task is not None and task.fields.get("repeats", True):
                self.print_line(self._current)


def _shows_bars(console: Console) -> bool:
    return console.is_interactive or console.is_jupyter


def _counting_line(task: Task, doing: str, unit: str) -> str:
    text = " ".join(part for part in (doing, task.description) if part)
    if task.total is None:
        return f"{text}: {task.completed:.0f} {unit}" if task.completed else text
    text += f": {task.completed:.0f}/{task.total:.0f} {unit}"
    if not task.completed or not task.elapsed:
        return text
    return f"{text}, {clock(task.elapsed * (task.total / task.completed - 1))} left"
