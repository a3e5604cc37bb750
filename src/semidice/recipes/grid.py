"""A grid: recipes that differ in a few options, to be run on one dataset and compared.

    recipe: quick                    the recipe that all variants start from: a file or a shipped name
    set: {schedule.epochs: 40}       options of all variants
    seeds: 3                         trainings of each variant, on the same folds; 1 by default
    variants:
      uniform: {label.maker: mean}   name of the method: the options that differ
      student: {teacher.run: uniform, label.maker: majority}
      large: {recipe: auto}          a variant can start from a recipe of its own

The run of a variant is NAME/seed_K. K is the option `seed` of the run and starts with that of the recipe;
`data.fold_seed`, which decides the folds, stays. If `teacher.run` names another variant, that variant is the
teacher; with several seeds, a student learns from the teacher of its own seed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..data.dataset import Dataset
from ..errors import UserError, given, nearest
from ..paths import MethodFolder, RunFolder, check_name, find_run
from . import Recipe, read_recipe
from .recipe import shipped_files, shipped_recipes, source_text
from .text import parse_yaml

# options of a recipe that a grid does not decide
_DECIDED = {"data.dataset": "the first argument of the command", "name": "the name of the variant"}


@dataclass(frozen=True)
class Variant:
    """One training of a grid: its recipe, its run folder, and the variant that must be trained before it.

    name: that of the method, and the seed if the method has several.
    """

    recipe: Recipe
    folder: Path
    name: str
    teacher: str | None = None

    @property
    def method(self) -> str:
        return self.recipe.name

    @property
    def seed(self) -> int | None:
        """The seed, if the method has several."""
        return None if self.name == self.method else self.recipe.seed


class _Grid(BaseModel):
    """The content of a grid file."""

    model_config = ConfigDict(extra="forbid")

    recipe: str
    set: dict[str, Any] = {}
    seeds: int = Field(default=1, ge=1, strict=True)
    variants: dict[str, dict[str, Any] | None] = Field(min_length=1)


@dataclass(frozen=True)
class _Method:
    """What is trained once for each seed. teacher: another method of the same grid."""

    recipe: Recipe
    teacher: str | None
    num_seeds: int

    @property
    def seeds(self) -> range:
        return range(self.recipe.seed, self.recipe.seed + self.num_seeds)


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
    Sources may share a variant. overrides: KEY=VALUE for every variant. only: names of the variants to read;
    their teachers are added. seeds: number of trainings of every method, each a variant of its own; None
    takes that of the grid, or 1. All methods come with their first seed before any comes with its second.
    """
    for override in overrides:
        _check_free([override.partition("=")[0].strip()], "--set")
    read = partial(read_recipe, accelerator=accelerator, open_dataset=cache(Dataset))
    common: list[str | tuple[str, Any]] = [("data.dataset", str(dataset.absolute())), *overrides]
    methods: dict[str, _Method] = {}
    for source in sources:
        for method in _methods(source, out, common, only, read, seeds):
            other = methods.setdefault(folder_name(method.recipe.name), method)
            if other != method:
                raise UserError(
                    f"two variants with different options are called {method.recipe.name}: rename one of them"
                )
    ordered = _teachers_first({method.recipe.name: method for method in methods.values()})
    _check_seeds(ordered.values())
    return [
        _variant(method, seed, ordered, out)
        for number in range(max((method.num_seeds for method in ordered.values()), default=0))
        for method in ordered.values()
        for seed in method.seeds[number : number + 1]
    ]


def folder_name(method: str) -> str:
    """Name of the folder for the runs of a method.

    >>> folder_name("uniform + DML1")
    'uniform_DML1'
    """
    return check_name("_".join(part for part in method.replace("/", " ").split() if part != "+"))


def _variant(method: _Method, seed: int, methods: Mapping[str, _Method], out: Path) -> Variant:
    """The training of a method with one seed, with its teacher of this seed if that has several."""
    folder = MethodFolder(out / folder_name(method.recipe.name))
    if RunFolder(folder.path).recipe.is_file():
        raise UserError(f"{folder.path} is a run of `semidice train`: choose another folder with -o")
    changes: dict[str, Any] = {"seed": seed}
    teacher = None
    if method.recipe.teacher is not None:
        run = MethodFolder(method.recipe.teacher.run)
        if method.teacher is not None:
            of_teacher = methods[method.teacher]
            teacher_seed = seed if seed in of_teacher.seeds else of_teacher.recipe.seed
            teacher = _name(of_teacher, teacher_seed)
            found = run.seed(teacher_seed)
        else:
            found = run.seeds().get(seed) or find_run(run.path)
        changes["teacher"] = replace(method.recipe.teacher, run=found.path.absolute())
    recipe = method.recipe.model_copy(update=changes)
    return Variant(recipe, folder.seed(seed).path, _name(method, seed), teacher)


def _name(method: _Method, seed: int) -> str:
    return f"{method.recipe.name}/seed_{seed}" if method.num_seeds > 1 else method.recipe.name


def _check_seeds(methods: Iterable[_Method]) -> None:
    """A UserError if methods with several seeds do not have the same ones."""
    first = {method.recipe.seed: method.recipe.name for method in methods if method.num_seeds > 1}
    if len(first) > 1:
        starts = ", ".join(f"{name} {seed}" for seed, name in first.items())
        raise UserError(
            f"methods with several seeds start with different ones: {starts}; give all the same option seed"
        )


def _methods(
    source: str,
    out: Path,
    common: Sequence[str | tuple[str, Any]],
    only: Collection[str] | None,
    read: Callable[..., Recipe],
    seeds: int | None,
) -> Iterator[_Method]:
    """The methods of a grid, or the one of a recipe. common: overrides of all of them."""
    grid, folder = _read_grid(source)
    if grid is None:
        yield _Method(read(source, common), None, seeds or 1)
        return
    options = {
        name: {"recipe": grid.recipe, **grid.set, **(changes or {})}
        for name, changes in grid.variants.items()
    }
    teachers = {name: of_method.get("teacher.run") for name, of_method in options.items()}
    wanted = options.keys() if only is None else {*only, *(teachers.get(name) for name in only)}
    for name, of_method in options.items():
        if name not in wanted:
            continue
        teacher = teachers[name] if teachers[name] in options else None
        if teacher is not None:
            of_method["teacher.run"] = str((out / folder_name(teacher)).absolute())
        start = str(of_method.pop("recipe"))
        start = str(folder / start) if (folder / start).is_file() else start
        try:
            recipe = read(start, [*of_method.items(), ("name", name), *common])
        except UserError as error:
            raise UserError(f"{source}, variant {name}: {error}") from error
        yield _Method(recipe, teacher, seeds or grid.seeds)


def _read_grid(source: str) -> tuple[_Grid | None, Path]:
    """The grid of a file or a shipped name, and the folder of the file; no grid if the source is a recipe."""
    if not Path(source).is_file() and source not in shipped_files():
        raise UserError(f"there is neither a file nor a shipped grid or recipe {source}: {_hint(source)}")
    name, text, folder = source_text(source)
    content = parse_yaml(text, name)
    if not isinstance(content, dict) or "variants" not in content:
        return None, folder
    with given(name):
        grid = _Grid.model_validate(content)
    for options in (grid.set, *grid.variants.values()):
        _check_free(options or (), name)
    return grid, folder


def _check_free(keys: Iterable[str], source: str) -> None:
    """A UserError if options of a variant set what the command and the variant's name decide."""
    for key in _DECIDED.keys() & set(keys):
        raise UserError(
            f"{source}: {key} has no effect in a grid, because it is {_DECIDED[key]}: leave it out"
        )


def _hint(source: str) -> str:
    """The shipped names closest to an unknown one, and all of them."""
    grids, recipes = shipped_grids(), shipped_recipes()
    close = nearest(source, [*grids, *recipes], most=3).removeprefix("; ")
    question = f"{close} " if close.startswith("did") else ""
    return f"{question}grids are {', '.join(grids)}; recipes are {', '.join(recipes)}"


def _teachers_first(methods: Mapping[str, _Method]) -> dict[str, _Method]:
    """The methods in the given order, but a teacher before its first student; an error for a circle."""
    ordered: dict[str, _Method] = {}
    for name in methods:
        chain = [name]
        while (teacher := methods[chain[-1]].teacher) is not None and teacher not in ordered:
            if teacher in chain:
                circle = ", ".join(chain[chain.index(teacher) :])
                raise UserError(
                    f"no variant of {circle} can be trained first: each has another as its teacher"
                )
            chain.append(teacher)
        for each in reversed(chain):
            ordered.setdefault(each, methods[each])
    return ordered
