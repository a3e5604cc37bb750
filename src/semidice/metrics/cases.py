"""The case table: one score per row; every comparison, table and figure is made from it.

    column    type     meaning
    case      string   one image or volume; unique within its dataset
    patient   string   the same for all cases of one person; the name of the case if the person is not known
    fold      integer  validation fold of the case, 0, 1, ...; -1 without folds
    method    string   what produced the prediction (a recipe, a rater)
    class     string   name of a class; "mean" over the foreground classes; "all" for scores without a class
    metric    string   name of the score, such as dice_score
    value     float64  the score; NaN where it is not defined

(case, method, class, metric) is unique; a case has one patient, and one fold per method. The suffix of a
file, .parquet or .csv, tells its format; both keep every bit of a value. Left out: computing scores.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from ..limits import MAX_CSV_BYTES, MAX_TABLE_ROWS, check_file
from ..paths import atomic_write
from .cells import escaped_row, unescaped_cell
from .registry import SCORES, score_name

SCHEMA_VERSION = "1"
COLUMNS = ("case", "patient", "fold", "method", "class", "metric", "value")
_KEY = ("case", "method", "class", "metric")
_DTYPES = {"fold": np.dtype(np.int64), "value": np.dtype(np.float64)}

Missing = Literal["error", "drop"]


class CaseRow(NamedTuple):
    """One row of the table; `class_name` is the column `class`, which cannot be a name in Python."""

    case: str
    patient: str
    fold: int
    method: str
    class_name: str
    metric: str
    value: float


class PairedScores(NamedTuple):
    """Scores of one metric and class, one row per case and one column per method, without gaps."""

    metric: str
    class_name: str
    cases: tuple[str, ...]
    patients: tuple[str, ...]
    methods: tuple[str, ...]
    # float64 (cases, methods)
    values: np.ndarray
    # cases left out because a method has no score for them
    num_dropped: int


@dataclass(frozen=True, eq=False)
class CaseTable:
    """Columns of equal length, checked at construction: a ValueError names the first row that is wrong."""

    columns: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        check_columns(self.columns)

    @classmethod
    def from_rows(cls, rows: Iterable[CaseRow]) -> "CaseTable":
        """The table of these rows.

        >>> table = CaseTable.from_rows([CaseRow("a", "p1", 0, "DML1", "mean", "dice_score", 0.9)])
        >>> len(table), table.methods
        (1, ('DML1',))
        """
        records = list(rows)
        for number, row in enumerate(records):
            if not isinstance(row, tuple) or len(row) != len(COLUMNS):
                raise ValueError(f"row {number} must be a CaseRow ({', '.join(COLUMNS)}); got {row!r}")
        parts: Sequence[Sequence[Any]] = list(zip(*records, strict=True)) or [()] * len(COLUMNS)
        return cls({name: _column(name, part) for name, part in zip(COLUMNS, parts, strict=True)})

    def __len__(self) -> int:
        return len(self.columns["value"])

    def rows(self) -> Iterator[CaseRow]:
        """The rows in order."""
        for row in zip(*(self.columns[name].tolist() for name in COLUMNS), strict=True):
            yield CaseRow(*row)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods in order of appearance."""
        return _in_order(self.columns["method"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics in order of appearance."""
        return _in_order(self.columns["metric"])

    def select(self, **wanted: str | int) -> "CaseTable":
        """The rows in which each named column has the wanted value; `class_name` stands for `class`."""
        keep = np.ones(len(self), dtype=bool)
        for name, value in wanted.items():
            column = "class" if name == "class_name" else name
            if column not in self.columns:
                raise ValueError(f"the case table has columns {', '.join(COLUMNS)}; got {name!r}")
            keep &= self.columns[column] == value
        return CaseTable({name: column[keep] for name, column in self.columns.items()})

    def sorted(self) -> "CaseTable":
        """The rows sorted by metric, class, method and case."""
        order = np.lexsort([self.columns[name] for name in ("case", "method", "class", "metric")])
        return CaseTable({name: column[order] for name, column in self.columns.items()})

    def paired(
        self,
        metric: str,
        *,
        class_name: str | None = None,
        methods: Sequence[str] | None = None,
        missing: Missing = "error",
    ) -> PairedScores:
        """Scores of one metric, one row per case (sorted) and one column per method, for paired statistics.

        class_name: by default "mean" if the metric has it, else "all". missing: a case without a score of
        every method, or with NaN, is an error, or is dropped for all methods.
        """
        table = self.select(metric=metric)
        classes = _in_order(table.columns["class"])
        if class_name is None:
            class_name = "mean" if "mean" in classes else "all"
        table = table.select(class_name=class_name)
        methods = tuple(table.methods if methods is None else methods)
        unknown = [method for method in methods if method not in table.methods]
        if len(table) == 0 or unknown:
            raise ValueError(
                f"the case table has no {metric} of class {class_name!r}"
                + (f" for {', '.join(unknown)}" if unknown else "")
                + f"; it has metrics {', '.join(self.metrics)}, methods {', '.join(self.methods)}"
                + (f", and {metric} for classes {', '.join(classes)}" if classes else "")
            )
        return _pair(table, metric, class_name, methods, missing)


def concatenate(tables: Iterable[CaseTable]) -> CaseTable:
    """One table with the rows of all tables; a score that occurs twice is an error."""
    tables = list(tables)
    if not tables:
        raise ValueError("concatenate needs at least one case table; got none")
    return CaseTable({name: np.concatenate([table.columns[name] for table in tables]) for name in COLUMNS})


def with_scores(table: CaseTable, scores: CaseTable) -> CaseTable:
    """The table with these scores added, sorted; they replace all rows of the same method and metric."""
    new = set(zip(scores.columns["method"].tolist(), scores.columns["metric"].tolist(), strict=True))
    old = zip(table.columns["method"].tolist(), table.columns["metric"].tolist(), strict=True)
    keep = np.array([pair not in new for pair in old], dtype=bool)
    kept = CaseTable({name: column[keep] for name, column in table.columns.items()})
    return concatenate([kept, scores]).sorted()


def check_columns(columns: dict[str, np.ndarray], source: str = "case table") -> None:
    """Raise unless the columns follow the schema; `source` is their name in the message."""
    if not isinstance(columns, dict) or not all(isinstance(part, np.ndarray) for part in columns.values()):
        raise ValueError(f"{source} must be a dict of numpy arrays; got {columns!r:.80}: use from_rows")
    if tuple(columns) != COLUMNS:
        missing = [name for name in COLUMNS if name not in columns]
        unknown = [name for name in columns if name not in COLUMNS]
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown) or 'another order'}"
        raise ValueError(f"{source} must have the columns {', '.join(COLUMNS)} in this order; it {problem}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{source} has columns of different lengths: {lengths}")
    for name, column in columns.items():
        dtype = _DTYPES.get(name)
        if column.dtype.kind != "U" if dtype is None else column.dtype != dtype:
            raise ValueError(f"{source}: column {name} must be {dtype or 'strings'}; got {column.dtype}")
        if dtype is None and (column == "").any():
            raise ValueError(f"{source}: column {name} is empty in row {int((column == '').argmax())}")
    _check_consistent(columns, source)
    _check_scores(columns, source)


def _check_scores(columns: dict[str, np.ndarray], source: str) -> None:
    """Raise if a share such as Dice is not between 0 and 1; NaN stands for one that is not defined."""
    value, metric = columns["value"], columns["metric"]
    shares = [
        name
        for name in np.unique(metric).tolist()
        if score_name(name) in SCORES and SCORES[score_name(name)].unit == "percent"
    ]
    # the mean of many float32 numbers may be above 1 by a rounding error
    wrong = np.isin(metric, shares) & ((value < -1e-6) | (value > 1 + 1e-6))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{source}: {metric[row]} of case {columns['case'][row]} and method {columns['method'][row]} is "
            f"{value[row]:g} in row {row}; it must be 0 to 1, or NaN if it is not defined: divide "
            "percentages by 100"
        )


def _check_consistent(columns: dict[str, np.ndarray], source: str) -> None:
    if (columns["fold"] < -1).any():
        raise ValueError(f"{source}: fold must be -1 (no folds) or more; got {int(columns['fold'].min())}")
    for key, single in ((_KEY, None), (("case",), "patient"), (("case", "method"), "fold")):
        codes = _codes([columns[name] for name in key])
        order = np.argsort(codes, kind="stable")
        repeated = codes[order][1:] == codes[order][:-1]
        if single is not None:
            repeated &= columns[single][order][1:] != columns[single][order][:-1]
        if not repeated.any():
            continue
        first, second = sorted(order[[int(repeated.argmax()), int(repeated.argmax()) + 1]].tolist())
        which = ", ".join(f"{name} {columns[name][second]}" for name in key)
        if single is None:
            raise ValueError(f"{source}: rows {first} and {second} score the same thing twice: {which}")
        values = f"{columns[single][first]} and {columns[single][second]}"
        raise ValueError(
            f"{source}: {which} has two values of {single}, {values}, in rows {first} and {second}"
        )


def _codes(columns: Sequence[np.ndarray]) -> np.ndarray:
    """One integer per row; two rows have the same integer if they are equal in every column."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        names, inverse = np.unique(column, return_inverse=True)
        codes = np.unique(codes * max(1, len(names)) + inverse, return_inverse=True)[1]
    return codes


def _pair(
    table: CaseTable, metric: str, class_name: str, methods: tuple[str, ...], missing: Missing
) -> PairedScores:
    columns = table.columns
    cases, first, row = np.unique(columns["case"], return_index=True, return_inverse=True)
    values = np.full((len(cases), len(methods)), np.nan)
    for column, method in enumerate(methods):
        of_method = columns["method"] == method
        values[row[of_method], column] = columns["value"][of_method]
    gaps = np.isnan(values)
    if gaps.any() and missing == "error":
        case, column = np.argwhere(gaps)[0]
        raise ValueError(
            f"{metric} of class {class_name!r} is missing or NaN in {int(gaps.any(1).sum())} of {len(cases)} "
            f"cases, first for case {cases[case]} and method {methods[column]}: score it, or pass "
            "missing='drop' to leave such cases out for every method"
        )
    complete = ~gaps.any(1)
    return PairedScores(
        metric,
        class_name,
        tuple(cases[complete].tolist()),
        tuple(columns["patient"][first][complete].tolist()),
        methods,
        values[complete],
        int((~complete).sum()),
    )


def write_cases(table: CaseTable, path: str | Path) -> None:
    """Write the sorted table to a .parquet or .csv file, which appears only when it is complete."""
    path = Path(path)
    suffix, table = _suffix(path), table.sorted()
    with atomic_write(path) as temp_path:
        if suffix == ".csv":
            with temp_path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                # repr gives the shortest text that reads back as the same float
                writer.writerows((*escaped_row(row[:-1]), repr(row.value)) for row in table.rows())
        else:
            pyarrow, parquet = _import_pyarrow()
            arrow = pyarrow.table({name: column.tolist() for name, column in table.columns.items()})
            types = {"fold": pyarrow.int64(), "value": pyarrow.float64()}
            fields = [(name, types.get(name, pyarrow.string())) for name in COLUMNS]
            schema = pyarrow.schema(fields, metadata={"semidice_case_table": SCHEMA_VERSION})
            parquet.write_table(arrow.cast(schema), temp_path)


def read_cases(path: str | Path) -> CaseTable:
    """The table in a .parquet or .csv file; a ValueError names the file and the line of an error."""
    path = Path(path)
    check_file(path, max_bytes=MAX_CSV_BYTES)
    if _suffix(path) == ".csv":
        try:
            columns = _read_csv(path)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is not a table: {error}; save it as CSV in UTF-8") from error
    else:
        pyarrow, parquet = _import_pyarrow()
        try:
            num_rows = parquet.read_metadata(path).num_rows
            if num_rows > MAX_TABLE_ROWS:
                raise ValueError(f"{path} declares {num_rows} rows; at most {MAX_TABLE_ROWS} are read")
            arrow = parquet.read_table(path)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}") from error
        version = (arrow.schema.metadata or {}).get(b"semidice_case_table", b"").decode()
        if version not in ("", SCHEMA_VERSION):
            raise ValueError(
                f"{path} is a case table of version {version}; this semidice reads version {SCHEMA_VERSION}"
            )
        if any(arrow.column(name).null_count for name in arrow.column_names):
            raise ValueError(f"{path} has empty cells: write NaN for a score that is not defined")
        columns = {name: _column(name, arrow.column(name).to_pylist()) for name in arrow.column_names}
    check_columns(columns, str(path))
    return CaseTable(columns)


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if tuple(header) != COLUMNS:
            check_columns({name: np.array([], dtype=np.str_) for name in header}, str(path))
        rows = []
        for row in reader:
            if len(row) != len(COLUMNS):
                raise ValueError(
                    f"{path}, line {reader.line_num}: expected {len(COLUMNS)} cells, got {len(row)}"
                )
            rows.append([unescaped_cell(cell) for cell in row])
            for name, parse in (("fold", int), ("value", float)):
                cell = row[COLUMNS.index(name)]
                try:
                    parse(cell)
                except ValueError:
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {name} must be a number; got {cell!r}"
                    ) from None
    parts = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    return {name: _column(name, part) for name, part in zip(COLUMNS, parts, strict=True)}


def _column(name: str, values: Sequence[Any]) -> np.ndarray:
    try:
        return np.array(values, dtype=_DTYPES.get(name, np.dtype(np.str_)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name} of a case table must hold numbers: {error}") from error


def _in_order(column: np.ndarray) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column.tolist()))


def check_suffix(path: Path | None) -> None:
    """A ValueError if a table cannot be written to the path, before the work for it is done."""
    if path is not None:
        _suffix(path)


def _suffix(path: Path) -> str:
    if path.suffix not in (".parquet", ".csv"):
        raise ValueError(f"a case table is a .parquet or a .csv file; got {path}")
    return path.suffix


def _import_pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            "Parquet needs pyarrow: pip install 'semidice[train]', or write a .csv file"
        ) from None
    return pyarrow, pyarrow.parquet
