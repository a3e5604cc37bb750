"""What commands print: plain lines, and progress with the remaining time.

    with progress_bar(console, "scoring", "cases", total=100) as bar:
        bar.done += 1

A terminal shows bars, which disappear at the end. Elsewhere (a pipe, a file, a batch job) one that changed is
printed as a plain line, every `SECONDS_BETWEEN_LINES`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Drawn
from rich.table import Column

SECONDS_BETWEEN_LINES = 30.0


def new_console() -> Console:
    """The console of a command. It prints names as they are: `[x]` is no markup and `:b:` no emoji."""
    return Console(markup=False, emoji=False)


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


@dataclass
class Bar:
    """One piece of work, whose state is set as it goes on: a thread shows it.

    unit: what is counted; without one, the bar has a percentage. total: None if it is not known. status: a
    few words. before: of what is done, what an earlier command did; the time left does not count it.
    """

    name: str
    unit: str = ""
    total: float | None = None
    done: float = 0
    status: str = ""
    before: float = 0
    since: float = field(default_factory=time.monotonic)

    def advance(self, by: float = 1) -> None:
        self.done += by

    def to(self, done: float, total: float | None) -> None:
        self.done, self.total = done, total

    @property
    def count(self) -> str:
        """How much is done."""
        if not self.unit:
            return f"{100 * self.done / self.total:.0f}%" if self.total else ""
        of_total = "" if self.total is None else f"/{self.total:.0f}"
        return f"{self.done:.0f}{of_total} {self.unit}"

    @property
    def left(self) -> str:
        """The time left at the pace so far, or the time that passed if the pace is not known."""
        seconds = time.monotonic() - self.since
        if self.total is None or self.done <= self.before:
            return f"{clock(seconds)} so far"
        pace = seconds / (self.done - self.before)
        return f"{clock(max(0, pace * (self.total - self.done)))} left"

    @property
    def line(self) -> str:
        """The state as text."""
        parts = (self.count if self.unit else "", self.status, self.left)
        return f"{self.name}: {', '.join(part for part in parts if part)}"


class Progress:
    """Bars of one command, shown while the block of this context runs."""

    def __init__(self, console: Console) -> None:
        self.console, self.bars, self._stopped = console, list[Bar](), Event()
        is_terminal = console.is_interactive or console.is_jupyter
        self._thread = Thread(target=self._draw if is_terminal else self._print, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def bar(self, name: str, unit: str = "", *, total: float | None = None) -> Bar:
        """A new bar below the others."""
        self.bars.append(Bar(name, unit, total))
        return self.bars[-1]

    def print_line(self, bar: Bar) -> None:
        """Print the state at once, if there is no terminal that shows it."""
        if not (self.console.is_interactive or self.console.is_jupyter):
            say(self.console, bar.line)

    def _draw(self) -> None:
        # a narrow terminal cuts the status, and never the name, the bar or the remaining time
        widths = {"name": Column(no_wrap=True), "status": Column(no_wrap=True, ratio=1)}
        name, count, left, status = (
            TextColumn(f"{{task.fields[{part}]}}", markup=False, table_column=widths.get(part))
            for part in ("name", "count", "left", "status")
        )
        columns = (name, BarColumn(bar_width=16), count, left, status)
        with Drawn(*columns, console=self.console, transient=True, expand=True, auto_refresh=False) as drawn:
            is_last = False
            while not is_last:
                is_last = self._stopped.wait(0.1)
                for number, bar in enumerate(list(self.bars)):
                    state = {part: getattr(bar, part) for part in ("name", "count", "left", "status")}
                    if number == len(drawn.tasks):
                        drawn.add_task("", **state)
                    task = drawn.tasks[number].id
                    drawn.update(task, completed=bar.done, total=bar.total, **state)
                drawn.refresh()

    def _print(self) -> None:
        states: list[tuple[object, ...]] = []
        latest: list[Bar] = []
        while not self._stopped.wait(SECONDS_BETWEEN_LINES):
            bars, before = list(self.bars), states
            states = [(bar.name, bar.done, bar.status) for bar in bars]
            changed = [bar for bar, state in zip(bars, states, strict=True) if state not in before]
            # a long item has lines too
            latest = changed[-1:] or latest
            for bar in latest:
                say(self.console, bar.line)


@contextmanager
def progress_bar(
    console: Console, doing: str, unit: str = "", *, total: float | None = None
) -> Iterator[Bar]:
    """One bar while the block runs. doing: its name, such as `scoring`."""
    with Progress(console) as progress:
        yield progress.bar(doing, unit, total=total)
