"""Recipe files: reading with overrides, one message for each problem, writing with all defaults.

file < overrides < what `auto` chooses       flat mappings of dotted keys, such as loss.form
"""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import __version__
from ..data.dataset import Dataset
from ..errors import UserError, nearest, reading
from ..paths import method_path, write_text
from .options import Recipe, flattened, option_value, options_of
from .text import parse_yaml, yaml_text

# an override: KEY=VALUE, where the value is YAML, or a pair of key and value
Override = str | tuple[str, Any]

_PATHS = ("data.dataset", "teacher.run", "model.weights")
# of an option that a section does not have: of the recipe, and of a record
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


@cache
def shipped_files() -> dict[str, str]:
    """Text of every recipe and grid that comes with the package, by name."""
    files = (resources.files("semidice.recipes") / "shipped").iterdir()
    return {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".yaml")
    }


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package.

    >>> "quick" in shipped_recipes()
    True
    """
    # a grid is a file with variants
    return sorted(name for name, text in shipped_files().items() if "\nvariants:" not in text)


def read_recipe(
    source: str | Path,
    overrides: Sequence[Override] = (),
    *,
    accelerator: str | None = "auto",
    open_dataset: Callable[[Path], Dataset] = Dataset,
) -> Recipe:
    """The recipe of a file, or the shipped recipe of a name, with overrides.

    accelerator: auto, cpu or cuda; the device for which a recipe with `auto: true` chooses its options. None
    chooses nothing, for a recipe of a run. open_dataset: opens the dataset that `auto` looks at.
    A UserError lists all problems, one line each, with source, key, what is wrong and the value.

    >>> recipe = read_recipe("quick", ["data.dataset=prepared", "loss.form=relaxed"])
    >>> recipe.model.architecture, recipe.loss.form
    ('small_unet', 'relaxed')
    """
    where, text, folder = _recipe_text(source)
    content = _parsed(text, where) or {}
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected options such as `data: ...`; got {type(content).__name__}")
    options: dict[str, Any] = {"name": Path(source).stem}
    for key, value in content.items():
        _put(options, key, value, folder)
    overridden = []
    for override in overrides:
        key, value = _key_and_value(override)
        _put(options, key, value, Path.cwd())
        overridden.append(key)
    recipe = _validated(options, where, overridden)
    if accelerator is None:
        return recipe
    if (ignored := _ignored(recipe, where, overridden, is_shipped=where == f"recipe {source}")) is not None:
        raise UserError(ignored)
    if recipe.auto:
        _choose(options, recipe, accelerator, open_dataset)
        recipe = _validated(options, where, overridden)
    return recipe


def with_stored_choices(recipe: Recipe, stored: Recipe) -> Recipe:
    """The recipe with the values that `auto` chose for a stored recipe, which may be of another device."""
    options = dict(flattened(recipe.model_dump(mode="json")))
    chosen = [key for key in recipe.reasons if key in stored.reasons]
    for key in chosen:
        _put(options, key, option_value(stored, key), Path())
    options["reasons"] = recipe.reasons | {key: stored.reasons[key] for key in chosen}
    return Recipe.model_validate(_nested(options))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write every option in the order of its declaration; `read_recipe` returns the same recipe.

    path: in the run folder. A teacher beside it is written as ../NAME or ../../NAME/seed_K, because runs that
    lie in one folder are moved together.
    """
    options = recipe.model_dump(mode="json")
    run = Path(os.path.abspath(path)).parent
    if recipe.teacher is not None and method_path(recipe.teacher.run).parent == method_path(run).parent:
        options["teacher"]["run"] = Path(os.path.relpath(recipe.teacher.run, run)).as_posix()
    heading = f"# Resolved by semidice {__version__}: every option, defaults included.\n"
    write_text(path, heading + yaml_text(options))


def source_text(source: str | Path) -> tuple[str, str, Path]:
    """How messages name a file or shipped file, its text, and the folder that relative paths start from."""
    path = Path(source)
    if not path.exists() and str(source) in shipped_files():
        kind = "recipe" if str(source) in shipped_recipes() else "grid"
        return f"{kind} {source}", shipped_files()[str(source)], Path.cwd()
    with reading(path):
        return str(source), path.read_text(encoding="utf-8"), path.absolute().parent


def _recipe_text(source: str | Path) -> tuple[str, str, Path]:
    known = shipped_files()
    if not Path(source).exists() and str(source) not in known:
        hint = nearest(str(source), shipped_recipes(), most=3)
        raise UserError(f"there is neither a file nor a shipped recipe {source}{hint}")
    where, text, folder = source_text(source)
    if where == f"grid {source}":
        raise UserError(f"{source} is a grid of recipes: run `semidice compare DATASET {source} -o OUT`")
    return where, text, folder


# a grid reads the same recipe and the same overrides for each of its variants
@lru_cache(maxsize=64)
def _parsed(text: str, source: str) -> Any:
    return parse_yaml(text, source)


def _key_and_value(override: Override) -> tuple[str, Any]:
    if not isinstance(override, str):
        return override
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not key:
        raise UserError(f"--set {override}: expected KEY=VALUE, such as loss.form=relaxed")
    return key, _parsed(text, f"--set {override}")


def _put(options: dict[str, Any], key: str, value: Any, folder: Path) -> None:
    """Set an option, or all options of a section. folder: that relative paths start from."""
    sections = [key[:end] for end, letter in enumerate(key) if letter == "."]
    for section in sections:
        if options.pop(section, None):
            raise UserError(f"{key} cannot be set: {section} is not a section with options in the recipe")
    for other in [other for other in options if other == key or other.startswith(f"{key}.")]:
        del options[other]
    added = dict(flattened({key: value})) or {key: value}
    options |= {name: _located(name, each, folder) for name, each in added.items()}


def _located(key: str, value: Any, folder: Path) -> Any:
    """The value of an option; a path becomes absolute."""
    if key not in _PATHS or not isinstance(value, str):
        return value
    # imagenet and none are names; the path of a file has a suffix or a separator
    if key == "model.weights" and not (os.sep in value or Path(value).suffix):
        return value
    return os.path.abspath(folder / Path(value).expanduser())


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of flat options."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _ignored(recipe: Recipe, where: str, overridden: Sequence[str], *, is_shipped: bool) -> str | None:
    """Why an option that was given has no effect. A shipped recipe has options for its variants."""
    for name, reason in recipe.label.ignored().items():
        is_set = f"label.{name}" in overridden or "label" in overridden
        if is_set or not is_shipped:
            return f"{'--set ' if is_set else f'{where}: '}label.{name}: {reason}"
    return None


def _choose(
    options: dict[str, Any], recipe: Recipe, accelerator: str, open_dataset: Callable[[Path], Dataset]
) -> None:
    """Set every option that `auto` chooses and the recipe leaves out, and the reasons."""
    import torch

    from .auto import choose_options

    device = "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    dataset = open_dataset(recipe.data.dataset)
    choices = choose_options(dataset, dict(options), num_folds=recipe.data.num_folds, device=device)
    for choice in choices:
        _put(options, choice.key, choice.value, Path())
    options |= {"auto": False, "reasons": {choice.key: choice.reason for choice in choices}}


def _validated(options: Mapping[str, Any], where: str, overridden: Collection[str]) -> Recipe:
    """The recipe of flat options; a UserError has one line for each wrong option."""
    # a missing dataset is a missing option, not a missing section
    nested = {"data": {}} | _nested(options)
    try:
        return Recipe.model_validate(nested)
    except ValidationError as error:
        problems: dict[str, list[Any]] = {}
        for problem in error.errors():
            problems.setdefault(_key_of(problem), []).append(problem)
    lines = []
    for key, of_key in problems.items():
        # an unknown section has the key of its option
        named = next((each for each in overridden if f"{each}.".startswith(f"{key}.")), key) if key else key
        is_set = any(f"{named}.".startswith(f"{each}.") for each in overridden)
        is_unknown = of_key[0]["type"] in _UNKNOWN
        shown = named if is_unknown else key
        at = f"--set {shown}" if is_set else ": ".join(filter(None, (where, shown)))
        lines.append(f"{at}: {_no_such(shown) if is_unknown else _wrong(of_key, key)}")
    raise UserError("\n".join(lines))


def _key_of(problem: Any) -> str:
    """The key of the option, without list indices and the names of types that pydantic appends."""
    parts = [str(part) for part in problem["loc"]]
    known = _known_keys()
    while parts and problem["type"] not in _UNKNOWN and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def _wrong(problems: Sequence[Any], key: str) -> str:
    """What is wrong with the value of an option; each type that it may have reports a problem."""
    first = problems[0]
    if first["type"] == "missing":
        return f"missing; give it in the file, or with --set {key}=..."
    texts = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in problems)
    said = " or ".join(texts).replace(" or Input should be ", " or ")
    # a check of a record, or of the recipe, names its values
    if isinstance(first["input"], dict | Recipe):
        return said
    hint = ": put it in quotes" if first["type"] == "string_type" else ""
    return f"{said}; got {json.dumps(first['input'], default=str)}{hint}"


@cache
def _known_keys() -> frozenset[str]:
    return frozenset(option.key for option in options_of())


def _no_such(key: str) -> str:
    known = [option.key for option in options_of()]
    section, _, last = key.rpartition(".")
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    if same_name:
        return f"no such option; did you mean {' or '.join(same_name)}?"
    hint = nearest(key, known)
    in_section = [name for name in known if name.rpartition(".")[0] == section]
    return f"no such option{hint if 'did you' in hint else nearest(key, in_section or known)}"
