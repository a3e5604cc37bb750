"""A grid: recipes that differ in a few options, to be run on one dataset and compared.

    recipe: quick                    the recipe that all variants start from: a file or a shipped name
    set: {schedule.epochs: 40}       options of all variants
    variants:
      uniform: {label.maker: mean}   name of the method: the options that differ
      student: {teacher.run: uniform, label.maker: majority}
      large: {recipe: auto}          a variant can start from a recipe of its own

If `teacher.run` names another variant, the teacher is the run of that variant.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..limits import MAX_RECIPE_BYTES, read_text
from ..paths import check_name
from . import Recipe, read_recipe
from .files import shipped_files, shipped_recipes
from .text import parse_yaml, yaml_text

# options of a recipe that a grid does not decide
_DECIDED = {"data.dataset": "the first argument of the command", "name": "the name of the variant"}


@dataclass(frozen=True)
class Variant:
    """One method of a grid: its recipe, its run folder, and the variant that must be trained before it."""

    recipe: Recipe
    folder: Path
    teacher: str | None = None

    @property
    def name(self) -> str:
        return self.recipe.name


def shipped_grids() -> list[str]:
    """Names of the grids that come with the package.

    >>> shipped_grids()
    ['calibration_losses', 'demo', 'distillation', 'labels', 'paper_qubiq', 'paper_tumours']
    """
    return sorted(set(shipped_files()) - set(shipped_recipes()))


def read_variants(
    sources: Sequence[str],
    *,
    dataset: Path,
    out: Path,
    overrides: Sequence[str] = (),
    only: Collection[str] | None = None,
    accelerator: str = "auto",
) -> list[Variant]:
    """All variants of the sources, each with its own folder in `out`, teachers before their students.

    sources: files or shipped names, of grids and of recipes; a recipe is one variant under its own name.
    overrides: KEY=VALUE for every variant. only: names of the variants to read; their teachers are added.
    """
    for override in overrides:
        if override.partition("=")[0].strip() in _DECIDED:
            key = override.partition("=")[0].strip()
            raise ValueError(f"--set {override}: {key} is {_DECIDED[key]}: leave it out")
    variants: list[Variant] = []
    for source in sources:
        grid = _read_grid(source)
        if grid is None:
            recipe = read_recipe(
                source, [f"data.dataset={_quoted(dataset.absolute())}", *overrides], accelerator=accelerator
            )
            variants.append(Variant(recipe, out / folder_name(recipe.name)))
        else:
            variants += _grid_variants(grid, source, dataset, out, overrides, only, accelerator)
    folders = [variant.folder for variant in variants]
    for variant in variants:
        if folders.count(variant.folder) > 1:
            raise ValueError(f"two variants are called {variant.name}; rename one of them")
    return _teachers_first(variants)


def folder_name(method: str) -> str:
    """Name of the folder for the run of a method.

    >>> folder_name("uniform + DML1")
    'uniform_DML1'
    """
    return check_name("_".join(part for part in method.replace("/", " ").split() if part != "+"))


def _read_grid(source: str) -> dict[str, Any] | None:
    """The checked grid of a file or a shipped name; None if the source is a recipe."""
    path = Path(source)
    if path.is_file():
        try:
            text, name, folder = read_text(path, max_bytes=MAX_RECIPE_BYTES), source, path.parent
        except UnicodeDecodeError:
            raise ValueError(f"{source} is neither a grid nor a recipe: the file is not UTF-8 text") from None
    elif source in shipped_grids():
        text, name, folder = shipped_files()[source], f"grid {source}", Path()
    elif source in shipped_recipes() or path.exists():
        return None
    else:
        raise ValueError(f"there is neither a file nor a shipped grid or recipe {source}: {_hint(source)}")
    grid = parse_yaml(text, name)
    if not isinstance(grid, dict) or "variants" not in grid:
        return None
    unknown = sorted(set(grid) - {"recipe", "set", "variants"})
    if unknown:
        raise ValueError(f"{name}: a grid has the keys recipe, set and variants; got {', '.join(unknown)}")
    for key in ("set", "variants"):
        if not isinstance(grid.setdefault(key, {}), dict):
            raise ValueError(f"{name}: {key} must be a mapping; got {grid[key]!r}")
    if not isinstance(grid.get("recipe"), str) or not grid["variants"]:
        raise ValueError(f"{name}: a grid needs a recipe to start from, and one variant or more")
    grid["variants"] = {str(variant): options for variant, options in grid["variants"].items()}
    for variant, options in grid["variants"].items():
        if options is None:
            grid["variants"][variant] = {}
        elif not isinstance(options, dict):
            raise ValueError(f"{name}: variant {variant} must be a mapping of options; got {options!r}")
    for options in (grid["set"], *grid["variants"].values()):
        _check_free_options(options, name)
    for options in (grid, *grid["variants"].values()):
        if "recipe" in options and not isinstance(options["recipe"], str):
            raise ValueError(f"{name}: recipe must be a file or a shipped name; got {options['recipe']!r}")
        if "recipe" in options and (folder / options["recipe"]).is_file():
            options["recipe"] = str(folder / options["recipe"])
    return grid


def _check_free_options(options: Mapping[str, Any], source: str) -> None:
    """Raise if options of a variant set what the command and the variant's name decide."""
    for key, owner in _DECIDED.items():
        if key in options:
            raise ValueError(f"{source}: {key} has no effect in a grid, because it is {owner}: leave it out")
    teacher = options.get("teacher.run", "")
    if not isinstance(teacher, str):
        raise ValueError(f"{source}: teacher.run must be a variant or a folder; got {teacher!r}")


def _hint(source: str) -> str:
    """The shipped names closest to an unknown one, and all of them."""
    grids, recipes = shipped_grids(), shipped_recipes()
    close = get_close_matches(source, [*grids, *recipes])
    question = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{question}grids are {', '.join(grids)}; recipes are {', '.join(recipes)}"


def _grid_variants(
    grid: Mapping[str, Any],
    source: str,
    dataset: Path,
    out: Path,
    overrides: Sequence[str],
    only: Collection[str] | None,
    accelerator: str,
) -> list[Variant]:
    all_options = {
        name: {"recipe": grid["recipe"], **grid["set"], **changes}
        for name, changes in grid["variants"].items()
    }
    teachers = {name: options.get("teacher.run") for name, options in all_options.items()}
    if only is None:
        only = all_options
    wanted = {*only, *(teachers[name] for name in only if name in teachers)}
    variants = []
    for name, options in all_options.items():
        if name not in wanted:
            continue
        teacher = teachers[name] if teachers[name] in all_options else None
        if teacher is not None:
            options["teacher.run"] = str((out / folder_name(teacher)).absolute())
        recipe_name = options.pop("recipe")
        sets = [f"{key}={_one_line(value)}" for key, value in options.items()]
        fixed = [f"name={_quoted(name)}", f"data.dataset={_quoted(dataset.absolute())}"]
        try:
            recipe = read_recipe(recipe_name, [*sets, *fixed, *overrides], accelerator=accelerator)
        except ValueError as error:
            raise ValueError(f"{source}, variant {name}: {error}") from error
        variants.append(Variant(recipe, out / folder_name(name), teacher))
    return variants


def _one_line(value: Any) -> str:
    """The value as YAML on one line, as in an override."""
    return yaml_text({"value": value}).removeprefix("value:").strip() if not isinstance(value, str) else value


def _quoted(text: str | Path) -> str:
    """A text for an override; brackets, colons and # in a path are not YAML."""
    return json.dumps(str(text), ensure_ascii=False)


def _teachers_first(variants: Sequence[Variant]) -> list[Variant]:
    """The variants in the given order, but teachers before their students; a ValueError for a circle."""
    ordered: list[Variant] = []
    waiting = list(variants)
    while waiting:
        done = {variant.name for variant in ordered}
        ready = [variant for variant in waiting if variant.teacher is None or variant.teacher in done]
        if not ready:
            names = ", ".join(variant.name for variant in waiting)
            raise ValueError(f"no variant of {names} can be trained first: each has another as its teacher")
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return ordered
