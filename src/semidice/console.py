"""What commands print: plain lines, and progress bars with the remaining time."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def counting_bar(console: Console, *, doing: str, unit: str) -> Progress:
    """A bar that counts `unit`s and disappears at the end; it shows `doing` and the task's description."""
    return Progress(
        TextColumn(f"{doing} {{task.description}}", markup=False),
        BarColumn(),
        TextColumn(f"{{task.completed:.0f}}/{{task.total}} {unit}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def training_bars(console: Console, *, width: int = 0, transient: bool = False) -> Progress:
    """Bars of trainings, one per task, each with a text about its state: the field `status`."""
    return Progress(
        TextColumn(f"{{task.description:<{width}}}" if width else "{task.description}", markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
        transient=transient,
    )


def say(console: Console, text: str) -> None:
    """Print one line without markup and without breaking paths."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
