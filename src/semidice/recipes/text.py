"""YAML 1.2: 1e-3 is a number, `off` and 2024-01-31 are text, and a key that occurs twice is an error.

PyYAML reads YAML 1.1, so its rules for plain values are replaced. ruamel.yaml reads YAML 1.2, but it also
takes 1_000 for a number and 2024-01-31 for a date, and it writes 1e-05, which readers of YAML 1.1 take for
text.
"""

import re
from typing import Any

import yaml

from ..errors import UserError

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
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise UserError(f"{source}{where}: not YAML: {error.problem}") from error
    # for example, a control character, or brackets in brackets without end
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: not YAML: {error}") from error


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
