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

from semidice.options import Bounds
from semidice.recipes import shipped_recipes
from semidice.recipes.grid import shipped_grids
from semidice.recipes.options import Option, options_of
from semidice.recipes.recipe import shipped_files

PAGE = Path(__file__).parent / "recipes.md"


def tables() -> dict[str, str]:
    """The Markdown table of every section; options outside a section are in `recipe`."""
    options: dict[str, list[Option]] = {"recipe": []}
    for option in options_of():
        section = option.key.partition(".")[0]
        if option.section is None:
            options.setdefault(section if "." in option.key else "recipe", []).append(option)
    made = {section: _table(found) for section, found in options.items()}
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


def _table(options: Iterable[Option]) -> str:
    rows = [["option", "default", "values", "meaning"], ["---"] * 4]
    for option in options:
        default = "needed" if option.default is ... else f"`{_yaml(option.default)}`"
        meaning = option.meaning[0].lower() + option.meaning[1:].removesuffix(".")
        rows.append([f"`{option.key}`", default, _values(option.kind), meaning])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
        return " ".join(filter(None, (_values(inner[0]), _limits(inner[1:]))))
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


def _limits(metadata: Iterable[Any]) -> str:
    """Bounds of a number."""
    signs = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}
    limits = (
        f"{sign} {_yaml(getattr(part, name))}"
        for part in metadata
        if isinstance(part, Bounds)
        for name, sign in signs.items()
        if getattr(part, name) is not None
    )
    return ", ".join(limits)


def _first_lines(names: Iterable[str]) -> str:
    """Names of shipped files, and the first line of each."""
    rows = [["name", "what for"], ["---"] * 2]
    rows += [[f"`{name}`", shipped_files()[name].splitlines()[0].removeprefix("# ")] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
