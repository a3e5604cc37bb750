"""Recipe files: reading with overrides, messages for every problem, writing with all defaults."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import __version__
from ..errors import UserError, nearest, reading
from ..paths import method_path, write_text
from .options import DataOptions, Recipe, flattened, option_fields, option_value
from .text import parse_yaml, yaml_text


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
    path: str | Path,
    overrides: Sequence[str | tuple[str, Any]] = (),
    *,
    accelerator: str | None = "auto",
    open_dataset: Callable[[Path], Any] | None = None,
) -> Recipe:
    """The recipe of a file, or the shipped recipe of a name, with overrides.

    overrides: `KEY=VALUE`, where the value is YAML, or a pair of key and value.
    open_dataset: opens the dataset for `auto: true`; None opens it anew.
    accelerator: auto, cpu or cuda; the device for which a recipe with `auto: true` chooses its options. None
    chooses nothing, for a recipe of a run.
    A ValueError lists all problems, one line each, with source, key, expected value and actual value.

    >>> recipe = read_recipe("quick", ["data.dataset=prepared", "loss.form=relaxed"])
    >>> recipe.model.architecture, recipe.loss.form
    ('small_unet', 'relaxed')
    """
    source, text, folder = _recipe_text(path)
    raw = deepcopy(_parsed(text, source))
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise UserError(f"{source}: expected options such as `data: ...`; got {type(raw).__name__}")
    raw.setdefault("name", Path(path).stem)
    raw["data"] = {} if raw.get("data") is None else raw["data"]
    overridden = [_override(raw, override) for override in overrides]
    _resolve_paths(raw, folder, overridden)
    try:
        recipe = Recipe.model_validate(raw)
        if accelerator is not None:
            _check_no_ignored(recipe, source, overridden, is_shipped=source == f"recipe {path}")
        if accelerator is None or not recipe.auto:
            return recipe
        _choose(raw, recipe.data, accelerator, open_dataset)
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise UserError("\n".join(_problems(error, source, overridden))) from error


def _check_no_ignored(recipe: Recipe, source: str, overridden: Sequence[str], *, is_shipped: bool) -> None:
    """Raise if an option that was given has no effect. A shipped recipe has options for its variants."""
    for name, reason in recipe.label.ignored().items():
        set_by = f"label.{name}" in overridden or "label" in overridden
        if set_by or not is_shipped:
            where = f"--set label.{name}" if set_by else f"{source}: label.{name}"
            raise UserError(f"{where}: {reason}")


def _choose(
    raw: dict[str, Any],
    data: DataOptions,
    accelerator: str,
    open_dataset: Callable[[Path], Any] | None,
) -> None:
    """Set every option that `auto` chooses and the recipe leaves out, and the reasons."""
    # imported here: recipes without `auto` need neither torch nor a dataset
    import torch

    from ..data.dataset import Dataset
    from .auto import choose_options

    device = "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    given = dict(flattened(raw))
    dataset = (open_dataset or Dataset)(data.dataset)
    choices = choose_options(dataset, given, num_folds=data.num_folds, device=device)
    for choice in choices:
        _set(raw, choice.key, choice.value)
    raw["auto"], raw["reasons"] = False, {choice.key: choice.reason for choice in choices}


def with_stored_choices(recipe: Recipe, stored: Recipe) -> Recipe:
    """The recipe with the values that `auto` chose for a stored recipe, which may be of another device."""
    options = recipe.model_dump(mode="json")
    for key in recipe.reasons.keys() & stored.reasons.keys():
        _set(options, key, option_value(stored, key))
        options["reasons"][key] = stored.reasons[key]
    return Recipe.model_validate(options)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write every option in the order of its declaration; `read_recipe` returns the same recipe.

    path: in the run folder. A teacher in the same folder as the run is written as ../NAME, and one with
    several seeds as ../../NAME/seed_K, so that the runs can be moved together.
    """
    options = recipe.model_dump(mode="json")
    run = Path(os.path.abspath(path)).parent
    if recipe.teacher is not None:
        teacher = recipe.teacher.run
        if method_path(teacher).parent == method_path(run).parent:
            options["teacher"]["run"] = Path(os.path.relpath(teacher, run)).as_posix()
    heading = f"# Resolved by semidice {__version__}: every option, defaults included.\n"
    write_text(path, heading + yaml_text(options))


def _recipe_text(path: str | Path) -> tuple[str, str, Path]:
    """The source for messages, the text, and the folder that relative paths start from."""
    file = Path(path)
    shipped = shipped_recipes()
    if not file.is_file() and str(path) in shipped:
        return f"recipe {path}", shipped_files()[str(path)], Path.cwd()
    if not file.exists():
        if str(path) in shipped_files():
            raise UserError(f"{path} is a grid of recipes: run `semidice compare DATASET {path} -o OUT`")
        hint = nearest(str(path), shipped, most=3)
        raise UserError(f"there is neither a file nor a shipped recipe {path}{hint}")
    with reading(file):
        return str(path), file.read_text(encoding="utf-8"), file.absolute().parent


# a grid reads the same recipe and the same overrides for each of its variants
@lru_cache(maxsize=64)
def _parsed(text: str, source: str) -> Any:
    return parse_yaml(text, source)


def _override(raw: dict[str, Any], override: str | tuple[str, Any]) -> str:
    """Set the option of an override and return its key."""
    if isinstance(override, str):
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not key:
            raise UserError(f"--set {override}: expected KEY=VALUE, such as loss.form=relaxed")
    else:
        key = override[0]
    if not _is_known(key):
        raise UserError(f"--set {_shown(override)}: {_no_such(key)}")
    value = _parsed(text, f"--set {override}") if isinstance(override, str) else override[1]
    # the options of one recipe must not change those of another
    _set(raw, key, deepcopy(value))
    return key


def _shown(override: str | tuple[str, Any]) -> str:
    """An override as KEY=VALUE."""
    if isinstance(override, str):
        return override
    key, value = override
    return f"{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set the option of a dotted key; sections that are missing are made."""
    *sections, name = key.split(".")
    node = raw
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise UserError(f"{key} cannot be set: {section} is {node!r} in the recipe and has no options")
    node[name] = value


def _resolve_paths(raw: Mapping[str, Any], folder: Path, overridden: Sequence[str]) -> None:
    for section, name in (("data", "dataset"), ("teacher", "run"), ("model", "weights")):
        options = raw.get(section)
        value = options.get(name) if isinstance(options, dict) else None
        if not isinstance(options, dict) or not isinstance(value, str):
            continue
        # imagenet and none are names; the path of a file has a suffix or a separator
        if name == "weights" and not (os.sep in value or Path(value).suffix):
            continue
        base = Path.cwd() if {section, f"{section}.{name}"} & set(overridden) else folder
        options[name] = os.path.abspath(base / Path(value).expanduser())


def _problems(error: ValidationError, source: str, overridden: Sequence[str]) -> list[str]:
    """One message for each wrong option."""
    by_key: dict[str, list[Any]] = {}
    for problem in error.errors():
        by_key.setdefault(_key_of(problem), []).append(problem)
    lines = []
    for key, problems in by_key.items():
        set_by = any(key == other or key.startswith(f"{other}.") for other in overridden)
        where = f"--set {key}" if set_by else ": ".join(filter(None, (source, key)))
        lines.append(f"{where}: {_describe(key, problems)}")
    return lines


# of an option that a section does not have: a model, and a record
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _key_of(problem: Any) -> str:
    """The key of the option, without list indices and the names of types that pydantic appends."""
    parts = [str(part) for part in problem["loc"]]
    if problem["type"] in _UNKNOWN:
        return ".".join(parts)
    if problem["type"] == "value_error":
        # a record of options names the field that it refuses
        field = ".".join([*parts, str(problem["ctx"]["error"]).partition(" ")[0].rstrip(",")])
        parts = field.split(".") if _is_known(field) else parts
    while parts and not _is_known(".".join(parts)):
        parts.pop()
    return ".".join(parts)


def _describe(key: str, problems: Sequence[Any]) -> str:
    kind, first = problems[0]["type"], problems[0]
    if kind in _UNKNOWN:
        return _no_such(key)
    if kind == "missing":
        return f"missing; give it in the file, or with --set {key}=..."
    if kind == "value_error":
        return str(first["ctx"]["error"])
    # each possible type of an option reports a problem, and a list with a wrong item is also reported as too
    # short: the deepest problems are about the value itself
    deepest = max(len(problem["loc"]) for problem in problems)
    problems = [problem for problem in problems if len(problem["loc"]) == deepest]
    expected = " or ".join(dict.fromkeys(_expected(problem) for problem in problems))
    hint = ": put it in quotes" if kind in ("string_type", "path_type") and first["input"] is not None else ""
    return f"expected {expected}; got {json.dumps(first['input'], default=repr)}{hint}"


def _expected(problem: Any) -> str:
    known = {
        "model_type": "a mapping of options",
        "dataclass_type": "a mapping of options",
        "path_type": "a path",
        "int_from_float": "a whole number",
        "too_long": "{max_length} items or fewer",
        "too_short": "{min_length} or more items",
    }
    text = known.get(problem["type"], "").format(**problem.get("ctx", {}))
    return text or str(problem["msg"]).split(", unable")[0].removeprefix("Input should be ")


def _is_known(key: str) -> bool:
    return key.startswith("model.options.") or key in _known_keys()


@cache
def _known_keys() -> frozenset[str]:
    return frozenset(name for name, _ in option_fields())


def _no_such(key: str) -> str:
    known = [name for name, _ in option_fields()]
    section, _, last = key.rpartition(".")
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    in_section = [name for name in known if name.rpartition(".")[0] == section]
    if same_name:
        return f"no such option; did you mean {' or '.join(same_name)}?"
    hint = nearest(key, known)
    return f"no such option{hint if 'did you' in hint else nearest(key, in_section or known)}"
