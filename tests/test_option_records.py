"""A record of options: its bounds, and the options of a command that are made of its fields."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pytest
import typer
from start import refused
from typer.testing import CliRunner

from semidice.cli.application import Command, takes
from semidice.options import Bounds, Count, Share, check_options


@dataclass(frozen=True)
class Brew:
    minutes: Count | None = None
    """How long."""
    leaf: Literal["green", "black"] = "green"
    """What is brewed."""
    warm_cup: bool = False
    """Warm the cup."""
    sugar: Annotated[float, Bounds(above=0, below=9)] | None = None
    """Spoons."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Sweet(Brew):
    milk: Share = 0.0
    """Share of milk."""
    honey: Annotated[float, Bounds(above=0)] | Literal["none"] = "none"
    """Spoons."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"minutes": 0}, ("minutes", "whole number", "at least 1", "got 0")),
        ({"minutes": 1.5}, ("minutes", "whole number")),
        ({"minutes": True}, ("minutes",)),
        ({"leaf": "white"}, ("leaf", "green, black", "'white'")),
        ({"milk": float("nan")}, ("milk", "at most 1")),
        ({"milk": None}, ("milk", "at least 0")),
        ({"honey": -1.0}, ("honey", "above 0")),
        ({"sugar": 9.0}, ("sugar", "below 9")),
        ({"honey": "much"}, ("honey", "'much'")),
    ],
)
def test_a_value_outside_of_its_type_names_field_bounds_and_value(changes, words):
    refused(partial(Sweet, **changes), *words)


@pytest.mark.parametrize("changes", [{}, {"minutes": 3}, {"milk": 1}, {"sugar": 0.5}, {"honey": 0.5}])
def test_a_value_of_any_of_its_types_is_taken(changes):
    assert vars(Sweet(**changes)) == vars(Sweet()) | changes


def test_a_command_takes_a_record_as_options_with_help_from_its_docstrings():
    seen: list[Any] = []

    @takes
    def brew(cup: str, options: Brew, times: int = 1) -> None:
        seen.append((cup, options, times))

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command(cls=Command)(brew)
    call = CliRunner().invoke
    assert (
        call(app, ["big", "--minutes", "3", "--leaf", "black", "--warm-cup", "--times", "2"]).exit_code == 0
    )
    assert call(app, ["big"]).exit_code == 0
    assert seen == [("big", Brew(3, "black", True), 2), ("big", Brew(), 1)]
    said = call(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "What is brewed." in said
    assert "green|black" in said
    assert "--no-warm-cup" not in said
    for option, value in (("--leaf", "white"), ("--minutes", "0"), ("--sugar", "9")):
        ended = call(app, ["big", option, value])
        assert ended.exit_code in (1, 2)
        assert option in ended.output
