"""YAML 1.2: 1e-3 is a number, `off` and 2024-01-31 are text, and a key that occurs twice is an error.

PyYAML reads YAML 1.1, so its rules for plain values are replaced. ruamel.yaml reads YAML 1.2, but it also
takes 1_000 for a number and 2024-01-31 for a date, and it writes 1e-05, which readers of YAML 1.1 take for
text.
"""

import re
from typing import Any

import yaml

from ..limits import MAX_RECIPE_BYTES, MAX_RECIPE_VALUES

# type, pattern, and the characters that a value of this type can begin with
_SCALARS = (
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("null", r"(?:~|null|Null|NULL|)$", ("~", "n", "N", "")),
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader without tags for Python objects that refuses a key that occurs twice."""

    # empty, because SafeLoader has the rules of YAML 1.1
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                raise yaml.MarkedYAMLError(
                    problem="a key must be a word, not a list or a mapping", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """A dumper with lists in one line; text is quoted if YAML 1.1 or 1.2 would read it as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in _SCALARS:
    for _reader in (_Loader, _Dumper):
        _reader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list(_first))
# 010 is ten; SafeLoader reads it as octal, as in YAML 1.1
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; a ValueError names the source, the line and the column."""
    if len(text) > MAX_RECIPE_BYTES:
        raise ValueError(f"{source}: it has {len(text)} characters; at most {MAX_RECIPE_BYTES} are read")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        # before values are made: an alias of an alias of ... makes a billion of them from ten lines
        num_values = _num_values(node, {})
        if num_values <= MAX_RECIPE_VALUES:
            return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{source}: lists or mappings are nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{source}{where}: not YAML: {error.problem}") from error
    # for example, a control character
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source}: not YAML: {error}") from error
    raise ValueError(f"{source}: aliases make it {num_values} values; at most {MAX_RECIPE_VALUES} are read")


def _num_values(node: Any, counted: dict[int, int]) -> int:
    """The number of values of a node, each alias replaced by what it names. counted: of nodes by their id."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        # what an alias finds that lies inside of the value it names
        counted[id(node)] = MAX_RECIPE_VALUES
        is_mapping = isinstance(node, yaml.MappingNode)
        items = [item for pair in node.value for item in pair] if is_mapping else node.value
        counted[id(node)] = 1 + sum(_num_values(item, counted) for item in items)
    return counted[id(node)]


def yaml_text(value: Any) -> str:
    """The value as YAML; `parse_yaml` and readers of YAML 1.1 read the same value from it.

    >>> print(yaml_text({"rate": 1e-05, "name": "1e-3", "size": [1, 2], "flip": "off"}), end="")
    rate: 1.0e-05
    name: '1e-3'
    size: [1, 2]
    flip: 'off'
    """
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text
