"""Names in CSV files, written so that a spreadsheet shows them and does not compute them.

A spreadsheet runs a cell that begins with = + - @ as a formula. Such a name gets an apostrophe in front when
it is written, and loses it when it is read: every name is read back as it was. Numbers stay as they are.
"""

import re
from collections.abc import Iterable

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")


def escaped_cell(name: str) -> str:
    """The cell of a name.

    >>> escaped_cell("=1+1"), escaped_cell("tumour")
    ("'=1+1", 'tumour')
    """
    return f"'{name}" if _FORMULA.match(name) else name


def escaped_row(cells: Iterable[object]) -> list[object]:
    """The cells of a row: names are escaped, numbers are not.

    >>> escaped_row(["-a", -1])
    ["'-a", -1]
    """
    return [escaped_cell(cell) if isinstance(cell, str) else cell for cell in cells]


def unescaped_cell(cell: str) -> str:
    """The name in a cell of `escaped_cell`.

    >>> unescaped_cell("'=1+1"), unescaped_cell("'s-Hertogenbosch")
    ('=1+1', "'s-Hertogenbosch")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
