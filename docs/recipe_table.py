"""Write the tables of docs/recipes.md from the options of a recipe: `python docs/recipe_table.py`.

The table of a section is between the two lines

    <!-- made by docs/recipe_table.py: SECTION -->
    <!-- end -->
"""

import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from semidice.recipes import Recipe, shipped_recipes
from semidice.recipes.files import shipped_files
from semidice.recipes.grid import shipped_grids
from semidice.recipes.options import section_fields, section_of

PAGE = Path(__file__).parent / "recipes.md"


def tables() -> dict[str, str]:
    """The Markdown table of every section; options outside a section are in `recipe`."""
    made = {"recipe": _table(("", field) for field in _own_fields().items())}
    for name, field in Recipe.model_fields.items():
        section = section_of(field)
        if section is not None:
            made[name] = _table((f"{name}.", item) for item in section_fields(section).items())
    made["shipped"] = _first_lines(shipped_recipes())
    made["grids"] = _first_lines(shipped_grids())
    return made


def with_tables(page: str) -> str:
    """The page with new tables; a ValueError if its markers are not those of the sections."""
    made = tables()
    markers = re.findall(r"<!-- made by docs/recipe_table\.py: (\w+) -->", page)
    if sorted(markers) != sorted(made):
        raise ValueError(f"recipes.md needs one marker for each of {sorted(made)}; it has {sorted(markers)}")
    for name, table in made.items():
        start = f"<!-- made by docs/recipe_table.py: {name} -->\n"
        before, _, after = page.partition(start)
        page = f"{before}{start}{table}\n<!-- end -->{after.partition('<!-- end -->')[2]}"
    return page


def _own_fields() -> dict[str, FieldInfo]:
    return {name: field for name, field in Recipe.model_fields.items() if section_of(field) is None}


def _table(fields: Iterable[tuple[str, tuple[str, FieldInfo]]]) -> str:
    rows = [["option", "default", "values", "meaning"], ["---"] * 4]
    for prefix, (name, field) in fields:
        kinds = _values(field.annotation).removesuffix(", null")
        values = " ".join(filter(None, (kinds, _limits(field))))
        values += ", null" if type(None) in get_args(field.annotation) else ""
        rows.append([f"`{prefix}{name}`", _default(field), values, field.description or ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    return f"`{_yaml(field.get_default(call_default_factory=True, validated_data={}))}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(kind: Any) -> str:
    """The possible values of a type, in words."""
    names = {float: "number", int: "whole number", str: "text", bool: "true, false", Path: "path"}
    origin, inner = get_origin(kind), get_args(kind)
    if kind in names:
        return names[kind]
    if origin is Annotated:
        return _values(inner[0])
    if origin is Literal:
        return ", ".join(_yaml(value) for value in inner)
    if origin in (Union, types.UnionType):
        return ", ".join("null" if part is type(None) else _values(part) for part in inner)
    if origin is tuple:
        item = _values(inner[0])
        return f"list of {item}" if inner[-1] is Ellipsis else f"{len(inner)} × {item}"
    if origin is dict:
        return "mapping"
    raise TypeError(f"the page has no words for {kind}")


def _limits(field: FieldInfo) -> str:
    """Bounds of a number."""
    signs = {"ge": "≥", "at_least": "≥", "gt": ">", "above": ">", "le": "≤", "at_most": "≤", "lt": "<"}
    limits = (
        f"{sign} {_yaml(bound)}"
        for part in field.metadata
        for name, sign in signs.items()
        if (bound := getattr(part, name, None)) is not None
    )
    return ", ".join(limits)


def _first_lines(names: Iterable[str]) -> str:
    """Names of shipped files, and the first line of each."""
    rows = [["name", "what for"], ["---"] * 2]
    rows += [[f"`{name}`", shipped_files()[name].splitlines()[0].removeprefix("# ")] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
