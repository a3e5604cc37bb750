"""Case tables of tests, one row per score."""

from typing import NamedTuple

from semidice.metrics.registry import default_unit
from semidice.statistics import case_table
from semidice.statistics.cases import find_keys, keys_of


class CaseRow(NamedTuple):
    """A row; `class_name` is the column `class`."""

    case: str
    patient: str
    fold: int
    method: str
    class_name: str
    metric: str
    value: float
    seed: int = -1
    unit: str | None = None
    per: str = "scan"


def table_of(rows):
    """The case table of rows; the unit of a score is the usual one unless the row tells."""
    rows = [{"class": row.class_name} | row._asdict() for row in rows]
    for row in rows:
        del row["class_name"]
        row["unit"] = default_unit(row["metric"]) if row["unit"] is None else row["unit"]
    return case_table(rows)


def rows_of(table):
    """The rows of a table."""
    names = {"class_name": "class"}
    columns = [table[names.get(name, name)].tolist() for name in CaseRow._fields]
    return [CaseRow(*row) for row in zip(*columns, strict=True)]


def select(table, *, class_name=None, **wanted):
    """The rows with these values in columns; also of a score by its printed name."""
    wanted |= {} if class_name is None else {"class": class_name}
    for name, value in wanted.items():
        values = [value]
        if name == "metric":
            keys = find_keys(table, value)
            table = table[
                [key in keys for key in zip(table["metric"], table["unit"], table["per"], strict=True)]
            ]
            values = [key.metric for key in keys]
        table = table[table[name].isin(values)]
    return table


def metrics_of(table):
    """The names of the scores of a table, in their order."""
    return tuple(dict.fromkeys(key.metric for key in keys_of(table)))
