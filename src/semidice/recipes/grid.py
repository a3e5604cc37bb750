"""A grid: recipes that differ in a few options, to be run on one dataset and compared.

    recipe: quick                    a file, or a shipped recipe, that all variants start from
    set: {schedule.epochs: 40}       options of all variants
    variants:
      uniform: {label.maker: mean}   name of a method: what is different in it
      student: {teacher.run: uniform, label.maker: majority}

A `teacher.run` that names another variant is that variant's run. Recipes of their own, one file each, make a
grid too, whose variants have the names of the recipes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..paths import check_name
from . import Recipe, read_recipe
from .text import parse_yaml, yaml_text

_KEYS = {"recipe", "set", "variants"}


@dataclass(frozen=True)
class Variant:
    """One method of a grid: its recipe, where it is run, and the variant that must be run before it."""

    recipe: Recipe
    folder: Path
    teacher: str | None = None

    @property
    def name(self) -> str:
        return self.recipe.name


def shipped_grids() -> list[str]:
    """Names of the grids that come with the package.

    >>> shipped_grids()
    ['distillation', 'labels']
    """
    files = (resources.files("semidice.recipes") / "grids").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_variants(
    sources: Sequence[str], *, dataset: Path, out: Path, overrides: Sequence[str] = ()
) -> list[Variant]:
    """The variants of grids and recipes, each in a folder of its own in `out`, teachers before students.

    sources: files, or names of shipped grids and recipes. overrides: KEY=VALUE for all of them.
    """
    variants: list[Variant] = []
    for source in sources:
        grid = _grid_of(source)
        if grid is None:
            recipe = read_recipe(source, [f"data.dataset={dataset.absolute()}", *overrides])
            variants.append(Variant(recipe, out / folder_name(recipe.name)))
        else:
            variants += _variants_of(grid, source, dataset, out, overrides)
    names = [variant.folder.name for variant in variants]
    for variant in variants:
        if names.count(variant.folder.name) > 1:
            raise ValueError(f"two variants are called {variant.name}: give one another name")
    return _in_order(variants)


def folder_name(method: str) -> str:
    """A folder for the method's run.

    >>> folder_name("uniform + DML1")
    'uniform_DML1'
    """
    return check_name("_".join(part for part in method.replace("/", " ").split() if part != "+"))


def _grid_of(source: str) -> dict[str, Any] | None:
    """The grid of a file or a shipped name; None if it is a recipe."""
    path = Path(source)
    if path.is_file():
        try:
            text, name, folder = path.read_text(encoding="utf-8"), source, path.parent
        except UnicodeDecodeError:
            raise ValueError(f"{source} is neither a grid nor a recipe: it is no UTF-8 text") from None
    elif source in shipped_grids():
        text = (resources.files("semidice.recipes") / "grids" / f"{source}.yaml").read_text(encoding="utf-8")
        name, folder = f"grid {source}", Path()
    else:
        return None
    grid = parse_yaml(text, name)
    if not isinstance(grid, dict) or "variants" not in grid:
        return None
    unknown = sorted(set(grid) - _KEYS)
    if unknown:
        raise ValueError(f"{name}: a grid has recipe, set and variants; got {', '.join(unknown)}")
    for key in ("set", "variants"):
        if not isinstance(grid.setdefault(key, {}), dict):
            raise ValueError(f"{name}: {key} must be a mapping; got {grid[key]!r}")
    if not isinstance(grid.get("recipe"), str) or not grid["variants"]:
        raise ValueError(f"{name}: a grid needs a recipe to start from, and one variant or more")
    if (folder / grid["recipe"]).is_file():
        grid["recipe"] = str(folder / grid["recipe"])
    return grid


def _variants_of(
    grid: Mapping[str, Any], source: str, dataset: Path, out: Path, overrides: Sequence[str]
) -> list[Variant]:
    variants = []
    names = {str(name) for name in grid["variants"]}
    for name, changes in grid["variants"].items():
        if not isinstance(changes, (dict, type(None))):
            raise ValueError(f"{source}: variant {name} must be a mapping of options; got {changes!r}")
        options = {**grid["set"], **(changes or {})}
        teacher = options.get("teacher.run")
        if teacher in names:
            options["teacher.run"] = str((out / folder_name(teacher)).absolute())
        sets = [f"{key}={_one_line(value)}" for key, value in options.items()]
        fixed = [f"name={name}", f"data.dataset={dataset.absolute()}"]
        try:
            recipe = read_recipe(grid["recipe"], [*sets, *fixed, *overrides])
        except ValueError as error:
            raise ValueError(f"{source}, variant {name}: {error}") from error
        needs = teacher if teacher in names else None
        variants.append(Variant(recipe, out / folder_name(str(name)), needs))
    return variants


def _one_line(value: Any) -> str:
    """A value as YAML in one line, as an override has it."""
    return yaml_text({"value": value}).removeprefix("value:").strip() if not isinstance(value, str) else value


def _in_order(variants: Sequence[Variant]) -> list[Variant]:
    """Teachers before their students, otherwise as given; a ValueError if that cannot be."""
    done: list[Variant] = []
    waiting = list(variants)
    while waiting:
        ready = [
            variant
            for variant in waiting
            if variant.teacher is None or variant.teacher in {other.name for other in done}
        ]
        if not ready:
            circle = ", ".join(variant.name for variant in waiting)
            raise ValueError(f"no variant of {circle} can be first: each has another as its teacher")
        done.append(ready[0])
        waiting.remove(ready[0])
    return done
