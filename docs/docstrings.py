"""Docstrings of the package as reStructuredText, for the API reference.

Docstrings are written to be read in the source: names in single backticks, shapes such as (N, C, *space), and
tables or formulas that are indented or aligned in columns. Sections `Args:` and examples stay as they are.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

_CODE = re.compile(r"(`+)(.+?)\1", flags=re.DOTALL)
# two spaces inside of a line: a table that must keep its columns
_COLUMNS = re.compile(r"\S {2,}\S")


def to_rst(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring in reStructuredText.

    >>> to_rst(["Mean of `x`, (N, *space).", "", "    a table", "", ">>> f(*x)", "1"])
    ['Mean of ``x``, (N, \\\\*space).', '', '::', '', '    a table', '', '>>> f(*x)', '1']
    """
    return [line for block in _blocks(lines) for line in (*_converted(block), "")][:-1]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Paragraphs; one of columns is split from the text above it."""
    block: list[str] = []
    for line in lines:
        if line.strip():
            starts_table = block and _is_table(line) and not _is_table(block[-1]) and not _is_fixed(block)
            if starts_table:
                yield block
                block = []
            block.append(line.rstrip())
        elif block:
            yield block
            block = []
    if block:
        yield block


def _is_table(line: str) -> bool:
    return line.startswith("  ") or bool(_COLUMNS.search(line))


def _is_fixed(block: Sequence[str]) -> bool:
    return block[0].startswith((">>>", "Args:"))


def _converted(block: Sequence[str]) -> list[str]:
    if block[0].startswith(">>>"):
        return list(block)
    if block[0].startswith("Args:"):
        return [block[0], *_escaped("\n".join(block[1:])).split("\n")]
    if any(map(_is_table, block)):
        indent = "" if all(line.startswith("  ") for line in block) else "    "
        return ["::", "", *(indent + line for line in block)]
    return _escaped("\n".join(block)).split("\n")


def _escaped(text: str) -> str:
    """Text without markup: names in backticks are code, and everything else is plain."""
    parts = []
    start = 0
    for match in _CODE.finditer(text):
        parts += [_plain(text[start : match.start()]), f"``{match[2]}``"]
        # a letter after the name, as in `x`s, would not end it
        if text[match.end() : match.end() + 1].isalnum():
            parts.append("\\ ")
        start = match.end()
    return "".join([*parts, _plain(text[start:])])


def _plain(text: str) -> str:
    return re.sub(r"(\w)_(?!\w)", r"\1\\_", re.sub(r"([*|\\])", r"\\\1", text))
