"""YAML as PyYAML reads it, with two changes: 1e-3 is a number, and a key that occurs twice is an error.

So `off` is false and 010 is 8, as in YAML 1.1; a text that looks like a number or a date needs quotes. Keys
are text as they are written.
"""

import re
from typing import Any

import yaml

from ..errors import UserError

_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$|[-+]\.[0-9]+$")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        mapping = {}
        for key, value in node.value:
            if not isinstance(key.value, str) or key.value in mapping:
                problem = "a key must be a word, and cannot occur twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=True)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _reader in (_Loader, _Dumper):
    _reader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; a UserError names the source, the line and the column."""
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
    """The value as YAML, with lists in one line; `parse_yaml` and other readers read the same value from it.

    >>> print(yaml_text({"rate": 1e-05, "name": "1e-3", "size": [1, 2], "flip": "off"}), end="")
    rate: 1.0e-05
    name: '1e-3'
    size: [1, 2]
    flip: 'off'
    """
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text
