"""The case table: a pandas frame with one score per row; every comparison, table and figure is made from it.

`COLUMNS` says what its columns are, in their order; a table of another tool needs those in `NEEDED` alone.
(case, method, seed, class, metric, unit, per) is unique; a case has one patient, and one fold per method. The
suffix of a file, .parquet or .csv, tells its format; both keep every bit of a value. Left out: computing
scores (`collect`), and pairing them (`pairing`).
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..errors import UserError, listing, nearest, reading
from ..metrics.registry import ScoreKey, default_unit
from ..paths import atomic_write
from .cells import escaped_cell, unescaped_cell

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
_KEY = ["case", "method", "seed", "class", "metric", "unit", "per"]
_ORDER = ["metric", "unit", "per", "class", "method", "seed", "case"]
_WHOLE = ("fold", "seed")
_TEXTS = [name for name in COLUMNS if name not in (*_WHOLE, "value")]
_DEFAULTS = {"fold": -1, "seed": -1, "class": "mean", "per": "scan", "dataset": ""}
_ARE_WRITTEN_AS_NAN = ("", "nan", "NaN", "NA", "N/A", "null", "None")


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
    for name in _TEXTS:
        if name in table:
            table[name] = _texts(table[name], name, source)
    if "patient" not in table:
        table["patient"] = table["case"]
    if "unit" not in table:
        table["unit"] = table["metric"].map({name: default_unit(name) for name in table["metric"].unique()})
        table["unit"] = table["unit"].astype("str")
    for name, default in _DEFAULTS.items():
        if name not in table:
            table[name] = default
    for name in (*_WHOLE, "value"):
        table[name] = _numbers(table[name], name, source)
    table = table[list(COLUMNS)]
    _check_unique(table, source)
    _check_values(table, source)
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
    columns = ["method", "metric", "unit", "per"]
    replaced = pd.MultiIndex.from_frame(table[columns]).isin(pd.MultiIndex.from_frame(scores[columns]))
    return in_order(concatenate([table[~replaced], scores]))


def keys_of(table: CaseTable) -> list[ScoreKey]:
    """The scores in a table, in order of appearance."""
    found = table[["metric", "unit", "per"]].drop_duplicates()
    return [ScoreKey(*row) for row in found.itertuples(index=False)]


def rows_of(table: CaseTable, key: ScoreKey, class_name: str | None = None) -> CaseTable:
    """The rows of a score, of all classes or of one."""
    kept = (table["metric"] == key.metric) & (table["unit"] == key.unit) & (table["per"] == key.per)
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
    suffix, table = _suffix(path), in_order(case_table(table))
    with atomic_write(path) as temp_path:
        if suffix == ".csv":
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
    if _suffix(path) == ".csv":
        with reading(path, "save it as CSV in UTF-8"), warnings.catch_warnings():
            # rows with more cells than the header
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False, encoding="utf-8")
        for name in table:
            texts = table[name].unique()
            table[name] = table[name].map({text: unescaped_cell(str(text)) for text in texts})
    else:
        with reading(path):
            table = pd.read_parquet(path)
    return case_table(table, str(path))


def check_suffix(path: Path | None) -> None:
    """A UserError if a table cannot be written to the path, before the work for it is done."""
    if path is not None:
        _suffix(path)


def _suffix(path: Path) -> str:
    if path.suffix not in (".parquet", ".csv"):
        raise UserError(f"a case table is a .parquet or a .csv file; got {path}")
    return path.suffix


def _check_columns(table: CaseTable, source: str) -> None:
    missing = [name for name in NEEDED if name not in table]
    unknown = [str(name) for name in table if name not in COLUMNS]
    if missing or unknown:
        hint = nearest(unknown[0], list(COLUMNS)) if unknown else ""
        raise UserError(
            f"{source} must have the columns {', '.join(NEEDED)}, and may have "
            f"{', '.join(name for name in COLUMNS if name not in NEEDED)}"
            + (f"; it lacks {listing(missing, 'column')}" if missing else "")
            + (f"; it also has {listing(unknown, 'column')}{hint}: rename or drop it" if unknown else "")
        )
    twice = table.columns[table.columns.duplicated()]
    if len(twice):
        raise UserError(f"{source} has two columns {twice[0]}: drop one")


def _texts(column: pd.Series, name: str, source: str) -> pd.Series:
    if pd.api.types.is_integer_dtype(column):
        column = column.map(str)
    empty = column.isna() if name in ("unit", "dataset") else column.isna() | (column == "")
    if empty.any():
        raise UserError(f"{source}: column {name} is empty in row {int(np.argmax(empty))}")
    if not column.map(type).eq(str).all() if column.dtype == object else not _is_text(column):
        raise UserError(f"{source}: column {name} must be strings; got {column.dtype}: use .astype(str)")
    column = column.astype("str")
    if name == "metric":
        wrong = column[column.str.contains(r"[/\\\x00-\x1f]", regex=True)]
        if len(wrong):
            raise UserError(
                f"{source}: the metric {wrong.iloc[0]!r} names files, so it must not have a slash, a "
                f"backslash or a control character: rename it in row {wrong.index[0]}"
            )
    if name == "per" and not column.isin(["scan", "slice"]).all():
        wrong = column[~column.isin(["scan", "slice"])]
        raise UserError(f"{source}: per must be scan or slice; got {wrong.iloc[0]!r} in row {wrong.index[0]}")
    return column


def _is_text(column: pd.Series) -> bool:
    return isinstance(column.dtype, pd.StringDtype | pd.CategoricalDtype) or not len(column)


def _numbers(column: pd.Series, name: str, source: str) -> pd.Series:
    """Float64 values, or whole numbers of -1 or more."""
    if name == "value" and not pd.api.types.is_numeric_dtype(column):
        # as numpy reads it: the nearest float64 of a text
        column = column.where(~column.isin(_ARE_WRITTEN_AS_NAN), "nan")
    if column.isna().any() and not pd.api.types.is_float_dtype(column):
        row = int(np.argmax(column.isna()))
        raise UserError(f"{source}: {name} is empty in row {row}: write NaN for a value that is not defined")
    try:
        numbers = column.to_numpy(object).astype(np.float64)
    except (TypeError, ValueError):
        row, cell = next((row, cell) for row, cell in enumerate(column) if not _is_number(cell))
        raise UserError(f"{source}: {name} must be a number; got {cell!r} in row {row}") from None
    if name == "value":
        return pd.Series(numbers)
    wrong = ~(numbers >= -1) | (numbers != np.floor(numbers))
    if wrong.any():
        row = int(wrong.argmax())
        meaning = "no folds" if name == "fold" else "one training"
        raise UserError(
            f"{source}: {name} must be -1 ({meaning}) or a whole number above it; got {numbers[row]:g} "
            f"in row {row}"
        )
    return pd.Series(numbers.astype(np.int64))


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _check_unique(table: CaseTable, source: str) -> None:
    """Raise if a score occurs twice, a case has two patients, or a case of a method has two folds."""
    twice = table.duplicated(_KEY)
    if twice.any():
        second = int(np.argmax(twice))
        same = (table[_KEY] == table.loc[second, _KEY]).all(axis=1)
        which = ", ".join(f"{name} {table.loc[second, name]}" for name in _KEY)
        raise UserError(
            f"{source}: rows {int(np.argmax(same))} and {second} score the same thing twice: {which}"
        )
    for key, single in ((["case"], "patient"), (["case", "method"], "fold")):
        pairs = table.drop_duplicates([*key, single])
        several = pairs[pairs.duplicated(key)]
        if len(several):
            second = several.index[0]
            first = pairs.index[(pairs[key] == pairs.loc[second, key]).all(axis=1)][0]
            which = ", ".join(f"{name} {table.loc[second, name]}" for name in key)
            values = f"{table.loc[first, single]} and {table.loc[second, single]}"
            raise UserError(
                f"{source}: {which} has two values of {single}, {values}, in rows {first} and {second}"
            )


def _check_values(table: CaseTable, source: str) -> None:
    """Raise if a share such as Dice is not between 0 and 1; NaN stands for one that is not defined."""
    value = table["value"]
    # the mean of many float32 numbers may be above 1 by a rounding error
    outside = (value < -1e-6) | (value > 1 + 1e-6)
    wrong = outside & table["unit"].str.startswith("share") if outside.any() else outside
    if wrong.any():
        row = int(np.argmax(wrong))
        first = table.loc[row]
        raise UserError(
            f"{source}: {first['metric']} of case {first['case']} and method {first['method']} is "
            f"{first['value']:g} in row {row}; a share must be 0 to 1, or NaN if it is not defined: divide "
            "percentages by 100"
        )
