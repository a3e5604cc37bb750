"""YAML as version 1.2 has it: 1e-3 is a number, `off` and 2024-01-31 are text, and no key occurs twice."""

import re
from typing import Any

import yaml

# kind, how all of it looks, and what it can begin with
_SCALARS = (
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("null", r"(?:~|null|Null|NULL|)$", ("~", "n", "N", "")),
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values alone, no key twice."""

    # not those of YAML 1.1, which SafeLoader has
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Lists in one line; text in quotes where YAML 1.1 or 1.2 would take it for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in _SCALARS:
    for _reader in (_Loader, _Dumper):
        _reader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list(_first))
# 010 is ten; SafeLoader would take it for octal, as version 1.1 does
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def parse_yaml(text: str, source: str) -> Any:
    """The value that a text holds; a ValueError names the source, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{source}{where}: not YAML: {error.problem}") from error
    # such as a control character
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source}: not YAML: {error}") from error


def yaml_text(value: Any) -> str:
    """The value as text that `parse_yaml` reads as the same value, and so does YAML 1.1.

    >>> print(yaml_text({"rate": 1e-05, "name": "1e-3", "size": [1, 2], "flip": "off"}), end="")
    rate: 1.0e-05
    name: '1e-3'
    size: [1, 2]
    flip: 'off'
    """
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text
