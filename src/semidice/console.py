"""How commands speak: a line as it is, and progress bars of one kind with the time that is left."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def counting_bar(console: Console, *, doing: str, unit: str) -> Progress:
    """A bar that counts `unit`s and vanishes at the end; what a task is called stands behind `doing`."""
    return Progress(
        TextColumn(f"{doing} {{task.description}}", markup=False),
        BarColumn(),
        TextColumn(f"{{task.completed:.0f}}/{{task.total}} {unit}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def training_bars(console: Console, *, width: int = 0, transient: bool = False) -> Progress:
    """Bars of trainings, one a task, each with a line of its own about what it is at: the field `status`."""
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
    """One line, as it is: nothing in it is markup, and a path is not broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
