"""The case table: a pandas frame with one score per row; every comparison, table and figure is made from it.

`COLUMNS` says what its columns are, in their order; a table of another tool needs those in `NEEDED` alone.
(case, method, seed, class, metric, unit, per) is unique; a case has one patient, and one fold per method. The
suffix of a file, .parquet or .csv, tells its format; both keep every bit of a value. Left out: computing
scores (`collect`), and pairing them (`pairing`).
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..errors import UserError, given, listing, nearest, reading
from ..metrics.registry import ScoreKey, default_unit
from ..paths import atomic_write

COLUMNS = {
    "case": "one image or volume; unique within its dataset",
    "patient": "the same for all cases of one person; the name of the case if the person is not known",
    "fold": "validation fold of the case, 0, 1, ...; -1 without folds",
    "seed": "of the training; -1 for a method with one training",
    "method": "what produced the prediction: a recipe, a rule, a rater",
    "class": "name of a class; mean over the foreground classes; all for scores without a class",
    "metric": "name of the score, such as dice_score, without unit and level",
    "unit": "the measure: mm, ml, voxels, nats, share (of surface Dice, share within 2 mm)",
    "per": "what is scored as one case: scan or slice",
    "dataset": "fingerprint of the prepared dataset; empty if it is not known",
    "value": "the score; NaN where it is not defined",
}
NEEDED = ("case", "method", "metric", "value")
# a frame with these columns, checked by `case_table`
CaseTable: TypeAlias = pd.DataFrame
# classes of a score over all classes
MAIN_CLASSES = ("mean", "all")
_SCORE = list(ScoreKey._fields)
_KEY = ["case", "method", "seed", "class", *_SCORE]
_ORDER = [*_SCORE, "class", "method", "seed", "case"]
_NUMBERS = ("fold", "seed", "value")
_TEXTS = [name for name in COLUMNS if name not in _NUMBERS]
_DEFAULTS = {"fold": -1, "seed": -1, "class": "mean", "per": "scan", "dataset": ""}
_ARE_WRITTEN_AS_NAN = ("", "nan", "NaN", "NA", "N/A", "null", "None")
# what a spreadsheet would run as a formula, also where it is escaped already
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")


def case_table(rows: Any, source: str = "case table") -> CaseTable:
    """The checked table of a frame, or of what makes one, such as a list of dicts with the names of columns.

    A UserError names `source` and the first row that is wrong. Columns that are not in `NEEDED` may be
    missing: a case is then its own patient, without fold and seed, scored as a scan over all classes.

    >>> case_table([{"case": "a", "method": "DML1", "metric": "dice_score", "value": 0.9}]).iloc[0]["unit"]
    'share'
    """
    is_empty = not isinstance(rows, pd.DataFrame) and not len(rows)
    table = pd.DataFrame(rows, columns=list(COLUMNS) if is_empty else None).reset_index(drop=True)
    _check_columns(table, source)
    for name in COLUMNS:
        if name not in table:
            table[name] = table["case"] if name == "patient" else _DEFAULTS.get(name)
            if name == "unit":
                units = {metric: default_unit(metric) for metric in table["metric"].unique()}
                table[name] = table["metric"].map(units)
        table[name] = (_numbers if name in _NUMBERS else _texts)(table, name, source)
    table = table[list(COLUMNS)]
    _check_rows(table, source)
    return table


def concatenate(tables: Iterable[CaseTable]) -> CaseTable:
    """One table with the rows of all tables; a score that occurs twice is an error."""
    tables = list(tables)
    if not tables:
        raise UserError("concatenate needs at least one case table; got none")
    return case_table(pd.concat(tables, ignore_index=True))


def in_order(table: CaseTable) -> CaseTable:
    """The rows sorted by score, class, method, seed and case."""
    return table.sort_values(_ORDER, kind="stable", ignore_index=True)


def with_scores(table: CaseTable, scores: CaseTable) -> CaseTable:
    """The table with these scores added, sorted; they replace all rows of the same method and score."""
    columns = ["method", *_SCORE]
    replaced = pd.MultiIndex.from_frame(table[columns]).isin(pd.MultiIndex.from_frame(scores[columns]))
    return in_order(concatenate([table[~replaced], scores]))


def keys_of(table: CaseTable) -> list[ScoreKey]:
    """The scores in a table, in order of appearance."""
    return [ScoreKey(*row) for row in table[_SCORE].drop_duplicates().itertuples(index=False)]


def rows_of(table: CaseTable, key: ScoreKey, class_name: str | None = None) -> CaseTable:
    """The rows of a score, of all classes or of one."""
    kept = (table[_SCORE] == list(key)).all(axis=1)
    return table[kept if class_name is None else kept & (table["class"] == class_name)]


def methods_of(table: CaseTable) -> list[str]:
    """The methods in a table, in order of appearance."""
    return list(table["method"].unique())


def find_keys(table: CaseTable, metric: str) -> list[ScoreKey]:
    """The scores in a table with this name: `dice_score`, or in full as it is printed."""
    return [key for key in keys_of(table) if metric in (key.metric, key.label, str(key), key.file_name)]


def write_cases(table: CaseTable, path: str | Path) -> None:
    """Write the sorted table to a .parquet or .csv file, which appears only when it is complete."""
    path = Path(path)
    check_suffix(path)
    table = in_order(case_table(table))
    with atomic_write(path) as temp_path:
        if path.suffix == ".csv":
            for name in _TEXTS:
                table[name] = table[name].map({text: escaped_cell(text) for text in table[name].unique()})
            table.to_csv(temp_path, index=False, na_rep="nan", lineterminator="\n")
        else:
            # neighbouring values differ in few bytes; names repeat
            options = {"use_dictionary": _TEXTS, "column_encoding": {"value": "BYTE_STREAM_SPLIT"}}
            table.to_parquet(temp_path, index=False, compression="zstd", **options)


def read_cases(path: str | Path) -> CaseTable:
    """The table in a .parquet or .csv file; a UserError names the file and the row of an error."""
    path = Path(path)
    check_suffix(path)
    if path.suffix == ".parquet":
        with reading(path):
            table = pd.read_parquet(path)
    else:
        with reading(path, "save it as CSV in UTF-8"), warnings.catch_warnings():
            # rows with more cells than the header
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False, encoding="utf-8")
        for name in table:
            table[name] = table[name].map({text: unescaped_cell(str(text)) for text in table[name].unique()})
    return case_table(table, str(path))


def check_suffix(path: Path | None) -> None:
    """A UserError if a file of this name is no case table, before the work for it is done."""
    if path is not None and path.suffix not in (".parquet", ".csv"):
        raise UserError(f"a case table is a .parquet or a .csv file; got {path}")


def escaped_cell(cell: Any) -> Any:
    """A cell of a CSV: a name that a spreadsheet would compute gets an apostrophe in front.

    >>> escaped_cell("=1+1"), escaped_cell("tumour"), escaped_cell(-1)
    ("'=1+1", 'tumour', -1)
    """
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def unescaped_cell(cell: str) -> str:
    """The name in a cell of `escaped_cell`.

    >>> unescaped_cell("'=1+1"), unescaped_cell("'s-Hertogenbosch")
    ('=1+1', "'s-Hertogenbosch")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _refuse(table: CaseTable, wrong: Any, source: str, names: Sequence[str], problem: str) -> None:
    """A UserError with some cells of the first row that is wrong, if there is one."""
    if np.any(wrong):
        row = int(np.argmax(wrong))
        cells = ", ".join(f"{name} {table[name].iloc[row]}" for name in names)
        raise UserError(f"{source}, row {row}, {cells}: {problem}")


def _check_columns(table: CaseTable, source: str) -> None:
    missing = [name for name in NEEDED if name not in table]
    unknown = [str(name) for name in table if name not in COLUMNS]
    if missing or unknown:
        raise UserError(
            f"{source} must have the columns {', '.join(NEEDED)}, and may have "
            f"{', '.join(name for name in COLUMNS if name not in NEEDED)}"
            + (f"; it lacks {listing(missing, 'column')}" if missing else "")
            + (f"; rename or drop {listing(unknown, 'column')}" if unknown else "")
            + (nearest(unknown[0], list(COLUMNS)) if unknown else "")
        )
    twice = table.columns[table.columns.duplicated()]
    if len(twice):
        raise UserError(f"{source} has two columns {twice[0]}: drop one")


def _texts(table: CaseTable, name: str, source: str) -> pd.Series:
    column = table[name]
    if pd.api.types.is_integer_dtype(column):
        column = column.map(str)
    may_be_empty = name in ("unit", "dataset")
    _refuse(table, column.isna() | ((column == "") & (not may_be_empty)), source, [name], "the cell is empty")
    is_text = isinstance(column.dtype, pd.StringDtype | pd.CategoricalDtype) or not len(column)
    if not (is_text or (column.dtype == object and column.map(type).eq(str).all())):
        raise UserError(f"{source}: column {name} must be strings; got {column.dtype}: use .astype(str)")
    column = column.astype("str")
    if name == "metric":
        is_path = column.str.contains(r"[/\\\x00-\x1f]", regex=True)
        _refuse(table, is_path, source, [name], "it names files: write it without a slash or a line break")
    if name == "per":
        _refuse(table, ~column.isin(["scan", "slice"]), source, [name], "it must be scan or slice")
    return column


def _numbers(table: CaseTable, name: str, source: str) -> pd.Series:
    """Float64 values, or whole numbers of -1 or more."""
    column = table[name]
    if name == "value" and not pd.api.types.is_numeric_dtype(column):
        # as numpy reads it: the nearest float64 of a text
        column = column.where(~column.isin(_ARE_WRITTEN_AS_NAN), "nan")
    is_empty = column.isna() & (not pd.api.types.is_float_dtype(column))
    _refuse(table, is_empty, source, [name], "write NaN for a value that is not defined")
    with given(f"{source}: column {name}"):
        numbers = column.to_numpy(object).astype(np.float64)
    if name == "value":
        return pd.Series(numbers)
    wrong = ~(numbers >= -1) | (numbers != np.floor(numbers))
    _refuse(table, wrong, source, [name], f"it must be -1 (no {name}) or a whole number above it")
    return pd.Series(numbers.astype(np.int64))


def _check_rows(table: CaseTable, source: str) -> None:
    """Raise for a score that occurs twice, a case of two patients or folds, a share that is not 0 to 1."""
    _refuse(table, table.duplicated(_KEY), source, _KEY, "the same is scored twice: drop one of the rows")
    for key, single in ((["case"], "patient"), (["case", "method"], "fold")):
        pairs = table.drop_duplicates([*key, single])
        problem = f"an earlier row has another {single} of the same {' and '.join(key)}"
        wrong = pairs.index[pairs.duplicated(key)]
        _refuse(table, table.index.isin(wrong[:1]), source, [*key, single], problem)
    value = table["value"]
    # the mean of many float32 numbers may be above 1 by a rounding error
    outside = (value < -1e-6) | (value > 1 + 1e-6)
    if outside.any():
        problem = "a share must be 0 to 1, or NaN if it is not defined: divide percentages by 100"
        wrong = outside & table["unit"].str.startswith("share")
        _refuse(table, wrong, source, ["metric", "case", "method", "value"], problem)
