"""Options of a part, as one record beside it: a frozen dataclass that checks its own values.

    @dataclass(frozen=True)
    class LossOptions:
        gamma: Positive = 1.0
        \"""Focal exponent.\"""

        def __post_init__(self) -> None:
            check_options(self)

A recipe takes the record as a section, a command takes its fields as options, and the docstring below a field
is what both say about it. This module imports no torch: `semidice --help` reads every record.
"""

import ast
import inspect
import math
import textwrap
from dataclasses import dataclass, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Bounds:
    """The numbers that a field may have; None does not bound it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        named = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        return " and ".join(f"{name} {bound:g}" for name, bound in named.items() if bound is not None)

    def hold(self, value: float) -> bool:
        """Whether the number is finite and within the bounds."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        # pydantic is needed by recipes alone
        from pydantic_core import core_schema

        def checked(value: float) -> float:
            if not self.hold(value):
                raise ValueError(f"must be a number, {self}")
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))


Weight = Annotated[float, Bounds(at_least=0)]
Positive = Annotated[float, Bounds(above=0)]
Share = Annotated[float, Bounds(at_least=0, at_most=1)]
Count = Annotated[int, Bounds(at_least=1)]


def check_options(record: Any) -> None:
    """A ValueError for the first field that is not one of its choices, or not within its bounds."""
    for name, hint in _hints(record.__class__).items():
        check_value(hint, **{name: getattr(record, name)})


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def check_value(hint: Any, **named: object) -> None:
    """A ValueError for the first named value that does not have the type: a Literal, or numbers in bounds.

    >>> check_value(int, num_bins=2.5)
    Traceback (most recent call last):
    ValueError: num_bins must be a whole number; got 2.5
    """
    for name, value in named.items():
        problems = [_problem(member, value) for member in members(hint)]
        if all(problems):
            raise ValueError(f"{name} must be {problems[0]}; got {value!r}")


def members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows.

    >>> members(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _problem(hint: Any, value: Any) -> str | None:
    """What the value must be to have this type; None if it has, or if nothing is known of the type."""
    if hint is NoneType:
        return None if value is None else "left out"
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return None if value in choices else f"one of {', '.join(map(str, choices))}"
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if kind not in (int, float):
        return None
    bounds = next((each for each in metadata if isinstance(each, Bounds)), Bounds())
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if is_number and bounds.hold(value):
        return None
    return f"a {'whole' if kind is int else 'finite'} number{f', {bounds}' if str(bounds) else ''}"


@cache
def meanings(record: type) -> dict[str, str]:
    """What the docstring below each field of a record says.

    >>> from semidice.losses.options import LossOptions
    >>> meanings(LossOptions)["gamma"]
    'Focal exponent; above 1, classes that are segmented badly weigh more.'
    """
    found = {}
    for each in reversed(record.__mro__):
        if each is record or is_dataclass(each):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(node, ast.ClassDef)
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
