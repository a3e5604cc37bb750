"""A grid: recipes that differ in a few options, to be run on one dataset and compared.

    recipe: quick                    the recipe that all variants start from: a file or a shipped name
    set: {schedule.epochs: 40}       options of all variants
    seeds: 3                         trainings of each variant, on the same folds; 1 by default
    variants:
      uniform: {label.maker: mean}   name of the method: the options that differ
      student: {teacher.run: uniform, label.maker: majority}
      large: {recipe: auto}          a variant can start from a recipe of its own

If `teacher.run` names another variant, the teacher is the run of that variant. With several seeds, the runs
are NAME/seed_K. K is the option `seed` of the run and starts with that of the recipe; `data.fold_seed`, which
decides the folds, stays. A student learns from the teacher of its own seed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from ..errors import UserError, nearest, reading
from ..paths import MethodFolder, RunFolder, check_name
from . import Recipe, read_recipe
from .files import shipped_files, shipped_recipes
from .text import parse_yaml

# options of a recipe that a grid does not decide
_DECIDED = {"data.dataset": "the first argument of the command", "name": "the name of the variant"}


@dataclass(frozen=True)
class Variant:
    """One training of a grid: its recipe, its run folder, and the variant that must be trained before it.

    seed: of the recipe, if the method has several; None if it has one training.
    """

    recipe: Recipe
    folder: Path
    teacher: str | None = None
    seed: int | None = None

    @property
    def method(self) -> str:
        return self.recipe.name

    @property
    def name(self) -> str:
        return self.method if self.seed is None else f"{self.method}/seed_{self.seed}"


def shipped_grids() -> list[str]:
    """Names of the grids that come with the package.

    >>> shipped_grids()
    ['bandwidth', 'calibration_losses', 'demo', 'distillation', 'labels', ..., 'smoothing', 'systems']
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
    seeds: int | None = None,
) -> list[Variant]:
    """All variants of the sources, each with its own folder in `out`, teachers before their students.

    sources: files or shipped names, of grids and of recipes; a recipe is one variant under its own name.
    overrides: KEY=VALUE for every variant. only: names of the variants to read; their teachers are added.
    seeds: number of trainings of every method, each a variant of its own; None takes that of the grid, or 1.
    All methods come with their first seed before any comes with its second.
    """
    if seeds is not None:
        _check_seeds(seeds, "--seeds")
    for override in overrides:
        if override.partition("=")[0].strip() in _DECIDED:
            key = override.partition("=")[0].strip()
            raise UserError(f"--set {override}: {key} is {_DECIDED[key]}: leave it out")
    variants: list[Variant] = []
    num_seeds: list[int] = []
    read = partial(read_recipe, accelerator=accelerator, open_dataset=cache(_open_dataset))
    on_dataset = ("data.dataset", str(dataset.absolute()))
    for source in sources:
        grid = _read_grid(source)
        if grid is None:
            recipe = read(source, [on_dataset, *overrides])
            variants.append(Variant(recipe, out / folder_name(recipe.name)))
        else:
            variants += _grid_variants(grid, source, out, [on_dataset, *overrides], only, read)
        of_source = seeds or (1 if grid is None else grid["seeds"])
        num_seeds += [of_source] * (len(variants) - len(num_seeds))
    num_of_folder = Counter(variant.folder for variant in variants)
    for variant in variants:
        if num_of_folder[variant.folder] > 1:
            raise UserError(f"two variants are called {variant.name}; rename one of them")
    return _teachers_first(_with_seeds(variants, num_seeds))


def _open_dataset(path: Path) -> Any:
    # imported here: only `auto` needs the dataset
    from ..data.dataset import Dataset

    return Dataset(path)


def _check_seeds(seeds: object, name: str) -> None:
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise UserError(f"{name} must be the number of trainings, 1 or more; got {seeds!r}")


def _with_seeds(variants: Sequence[Variant], num_seeds: Sequence[int]) -> list[Variant]:
    """The variants, with one for each seed of those that have several."""
    counts = {variant.name: count for variant, count in zip(variants, num_seeds, strict=True)}
    first = {variant.recipe.seed: variant.name for variant in variants if counts[variant.name] > 1}
    if len(first) > 1:
        starts = ", ".join(f"{name} {seed}" for seed, name in first.items())
        raise UserError(
            f"methods with several seeds start with different ones: {starts}; give all the same option seed"
        )
    expanded = []
    for number in range(max(num_seeds, default=0)):
        for variant in variants:
            count = counts[variant.name]
            if count == 1 and number == 0:
                expanded.append(variant)
            elif count > 1 and number < count:
                expanded.append(_of_seed(variant, variant.recipe.seed + number, counts))
    return expanded


def _of_seed(variant: Variant, seed: int, counts: Mapping[str, int]) -> Variant:
    """The variant with this seed, in its own folder, with the teacher of this seed if there are several."""
    if RunFolder(variant.folder).recipe.is_file():
        raise UserError(
            f"{variant.folder} holds a run with one seed: choose another folder with -o, or move the run to "
            f"{MethodFolder(variant.folder).seed(variant.recipe.seed).path}"
        )
    changes: dict[str, Any] = {"seed": seed}
    teacher = variant.teacher
    if variant.recipe.teacher is not None:
        folder = MethodFolder(variant.recipe.teacher.run)
        if counts.get(teacher or "", 1) > 1 or (teacher is None and folder.seeds()):
            changes["teacher"] = variant.recipe.teacher.model_copy(update={"run": folder.seed(seed).path})
            teacher = None if teacher is None else f"{teacher}/seed_{seed}"
    run = MethodFolder(variant.folder).seed(seed).path
    recipe = variant.recipe.model_copy(update=changes)
    return replace(variant, recipe=recipe, folder=run, teacher=teacher, seed=seed)


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
        with reading(path):
            text, name, folder = path.read_text(encoding="utf-8"), source, path.parent
    elif source in shipped_grids():
        text, name, folder = shipped_files()[source], f"grid {source}", Path()
    elif source in shipped_recipes() or path.exists():
        return None
    else:
        raise UserError(f"there is neither a file nor a shipped grid or recipe {source}: {_hint(source)}")
    grid = parse_yaml(text, name)
    if not isinstance(grid, dict) or "variants" not in grid:
        return None
    unknown = sorted(set(grid) - {"recipe", "set", "seeds", "variants"})
    if unknown:
        raise UserError(
            f"{name}: a grid has the keys recipe, set, seeds and variants; got {', '.join(unknown)}"
        )
    _check_seeds(grid.setdefault("seeds", 1), f"{name}: seeds")
    for key in ("set", "variants"):
        if not isinstance(grid.setdefault(key, {}), dict):
            raise UserError(f"{name}: {key} must be a mapping; got {grid[key]!r}")
    if not isinstance(grid.get("recipe"), str) or not grid["variants"]:
        raise UserError(f"{name}: a grid needs a recipe to start from, and one variant or more")
    grid["variants"] = {str(variant): options for variant, options in grid["variants"].items()}
    for variant, options in grid["variants"].items():
        if options is None:
            grid["variants"][variant] = {}
        elif not isinstance(options, dict):
            raise UserError(f"{name}: variant {variant} must be a mapping of options; got {options!r}")
    for options in (grid["set"], *grid["variants"].values()):
        _check_free_options(options, name)
    for options in (grid, *grid["variants"].values()):
        if "recipe" in options and not isinstance(options["recipe"], str):
            raise UserError(f"{name}: recipe must be a file or a shipped name; got {options['recipe']!r}")
        if "recipe" in options and (folder / options["recipe"]).is_file():
            options["recipe"] = str(folder / options["recipe"])
    return grid


def _check_free_options(options: Mapping[str, Any], source: str) -> None:
    """Raise if options of a variant set what the command and the variant's name decide."""
    for key, owner in _DECIDED.items():
        if key in options:
            raise UserError(f"{source}: {key} has no effect in a grid, because it is {owner}: leave it out")
    teacher = options.get("teacher.run", "")
    if not isinstance(teacher, str):
        raise UserError(f"{source}: teacher.run must be a variant or a folder; got {teacher!r}")


def _hint(source: str) -> str:
    """The shipped names closest to an unknown one, and all of them."""
    grids, recipes = shipped_grids(), shipped_recipes()
    close = nearest(source, [*grids, *recipes], most=3).removeprefix("; ")
    question = f"{close} " if close.startswith("did") else ""
    return f"{question}grids are {', '.join(grids)}; recipes are {', '.join(recipes)}"


def _grid_variants(
    grid: Mapping[str, Any],
    source: str,
    out: Path,
    overrides: Sequence[str | tuple[str, Any]],
    only: Collection[str] | None,
    read: Callable[..., Recipe],
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
        try:
            sets = [(str(key), value) for key, value in options.items()]
            recipe = read(recipe_name, [*sets, ("name", name), *overrides])
        except ValueError as error:
            raise UserError(f"{source}, variant {name}: {error}") from error
        variants.append(Variant(recipe, out / folder_name(name), teacher))
    return variants


def _teachers_first(variants: Sequence[Variant]) -> list[Variant]:
    """The variants in the given order, but teachers before their students; a ValueError for a circle."""
    students: dict[str, list[int]] = {}
    for number, variant in enumerate(variants):
        if variant.teacher is not None:
            students.setdefault(variant.teacher, []).append(number)
    # numbers in ascending order are a heap
    ready = [number for number, variant in enumerate(variants) if variant.teacher is None]
    ordered: list[Variant] = []
    while ready:
        variant = variants[heappop(ready)]
        ordered.append(variant)
        for student in students.get(variant.name, ()):
            heappush(ready, student)
    if len(ordered) < len(variants):
        done = {variant.name for variant in ordered}
        names = ", ".join(variant.name for variant in variants if variant.name not in done)
        raise UserError(f"no variant of {names} can be trained first: each has another as its teacher")
    return ordered
