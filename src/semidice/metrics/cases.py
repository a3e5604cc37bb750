"""The case table: one score per row; every comparison, table and figure is made from it.

    column    type     meaning
    case      string   one image or volume; unique within its dataset
    patient   string   the same for all cases of one person; the name of the case if the person is not known
    fold      integer  validation fold of the case, 0, 1, ...; -1 without folds
    method    string   what produced the prediction (a recipe, a rater)
    class     string   name of a class; "mean" over the foreground classes; "all" for scores without a class
    metric    string   name of the score, such as dice_score
    value     float64  the score; NaN where it is not defined
    seed      integer  only in tables of several seeds: of the training; -1 for a method with one training

(case, method, seed, class, metric) is unique; a case has one patient, and one fold per method. The suffix of
a file, .parquet or .csv, tells its format; both keep every bit of a value. Left out: computing scores.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..limits import MAX_CSV_BYTES, MAX_TABLE_ROWS, check_file
from ..paths import atomic_write
from .cells import escaped_row, unescaped_cell
from .pairing import Missing, PairedScores, pair_columns, shared_seeds
from .registry import SCORES, score_name

SCHEMA_VERSION = "1"
COLUMNS = ("case", "patient", "fold", "method", "class", "metric", "value")
SEED, NO_SEED = "seed", -1
_KEY = ("case", "method", SEED, "class", "metric")
_DTYPES = {"fold": np.dtype(np.int64), "value": np.dtype(np.float64), SEED: np.dtype(np.int64)}


class CaseRow(NamedTuple):
    """One row of the table; `class_name` is the column `class`, which cannot be a name in Python."""

    case: str
    patient: str
    fold: int
    method: str
    class_name: str
    metric: str
    value: float
    seed: int = NO_SEED


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
            if not isinstance(row, tuple) or len(row) not in (len(COLUMNS), len(COLUMNS) + 1):
                raise ValueError(f"row {number} must be a CaseRow ({', '.join(COLUMNS)}); got {row!r}")
        has_seeds = any(row[len(COLUMNS) :] not in ((), (NO_SEED,)) for row in records)
        names = (*COLUMNS, SEED) if has_seeds else COLUMNS
        # a plain tuple may leave the seed out
        full = [(*row, NO_SEED)[: len(names)] for row in records]
        parts: Sequence[Sequence[Any]] = list(zip(*full, strict=True)) or [()] * len(names)
        return cls({name: _column(name, part) for name, part in zip(names, parts, strict=True)})

    def __len__(self) -> int:
        return len(self.columns["value"])

    def rows(self) -> Iterator[CaseRow]:
        """The rows in order."""
        for row in zip(*(column.tolist() for column in self.columns.values()), strict=True):
            yield CaseRow(*row)

    @property
    def seeds(self) -> np.ndarray:
        """The seed of each row; -1 where a method has one training."""
        return _seeds(self.columns)

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
                raise ValueError(f"the case table has columns {', '.join(self.columns)}; got {name!r}")
            keep &= self.columns[column] == value
        return CaseTable({name: column[keep] for name, column in self.columns.items()})

    def sorted(self) -> "CaseTable":
        """The rows sorted by metric, class, method, seed and case."""
        order = np.lexsort(
            [
                self.columns["case"],
                self.seeds,
                *(self.columns[name] for name in ("method", "class", "metric")),
            ]
        )
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
        every method, or with NaN, is an error, or is dropped for all methods. The score of a method with
        several seeds is the mean over the seeds that all such methods have.
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
        keep = np.isin(table.columns["method"], methods)
        columns = {name: column[keep] for name, column in table.columns.items()}
        return pair_columns(columns, _seeds(columns), metric, class_name, methods, missing)


def concatenate(tables: Iterable[CaseTable]) -> CaseTable:
    """One table with the rows of all tables; a score that occurs twice is an error."""
    tables = list(tables)
    if not tables:
        raise ValueError("concatenate needs at least one case table; got none")
    columns = {name: np.concatenate([table.columns[name] for table in tables]) for name in COLUMNS}
    if any(SEED in table.columns for table in tables):
        columns[SEED] = np.concatenate([table.seeds for table in tables])
    return CaseTable(columns)


def with_seed(table: CaseTable, seed: int) -> CaseTable:
    """The table with this seed in every row."""
    return CaseTable({**table.columns, SEED: np.full(len(table), seed, dtype=np.int64)})


def mean_over_seeds(table: CaseTable) -> CaseTable:
    """The table with the mean over the seeds that all methods have, as in `CaseTable.paired`.

    NaN where a seed has no score. A table without seeds is returned as it is.
    """
    if SEED not in table.columns:
        return table
    shared = shared_seeds(table.columns["method"], table.seeds).seeds
    kept = of_seeds(table, shared)
    inverse = _codes([kept.columns[name] for name in _KEY if name != SEED])
    first = np.unique(inverse, return_index=True)[1]
    counts = np.bincount(inverse)
    value = np.bincount(inverse, weights=kept.columns["value"]) / counts
    complete = counts == np.where(kept.seeds[first] == NO_SEED, 1, len(shared))
    columns = {name: kept.columns[name][first] for name in COLUMNS}
    return CaseTable({**columns, "value": np.where(complete, value, np.nan)}).sorted()


def of_seeds(table: CaseTable, seeds: Sequence[int]) -> CaseTable:
    """The rows of these seeds, and those of methods with one training."""
    keep = np.isin(table.seeds, (NO_SEED, *seeds))
    return CaseTable({name: column[keep] for name, column in table.columns.items()})


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
    if tuple(columns) not in (COLUMNS, (*COLUMNS, SEED)):
        missing = [name for name in COLUMNS if name not in columns]
        unknown = [name for name in columns if name not in (*COLUMNS, SEED)]
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
    if (_seeds(columns) < NO_SEED).any():
        raise ValueError(f"{source}: seed must be -1 (one training) or more; got {int(columns[SEED].min())}")
    unique = tuple(name for name in _KEY if name in columns)
    for key, single in ((unique, None), (("case",), "patient"), (("case", "method"), "fold")):
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


def write_cases(table: CaseTable, path: str | Path) -> None:
    """Write the sorted table to a .parquet or .csv file, which appears only when it is complete."""
    path = Path(path)
    suffix, table = _suffix(path), table.sorted()
    with atomic_write(path) as temp_path:
        if suffix == ".csv":
            with temp_path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                names = tuple(table.columns)
                writer.writerow(names)
                # repr gives the shortest text that reads back as the same float
                writer.writerows(
                    (*escaped_row(row[:6]), repr(row.value), row.seed)[: len(names)] for row in table.rows()
                )
        else:
            pyarrow, parquet = _import_pyarrow()
            arrow = pyarrow.table({name: column.tolist() for name, column in table.columns.items()})
            types = {"fold": pyarrow.int64(), "value": pyarrow.float64(), SEED: pyarrow.int64()}
            fields = [(name, types.get(name, pyarrow.string())) for name in table.columns]
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
        header = tuple(next(reader, []))
        if header not in (COLUMNS, (*COLUMNS, SEED)):
            check_columns({name: np.array([], dtype=np.str_) for name in header}, str(path))
        rows = []
        numbers = [(name, int if name != "value" else float) for name in _DTYPES if name in header]
        for row in reader:
            if len(row) != len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num}: expected {len(header)} cells, got {len(row)}"
                )
            rows.append([unescaped_cell(cell) for cell in row])
            for name, parse in numbers:
                cell = row[header.index(name)]
                try:
                    parse(cell)
                except ValueError:
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {name} must be a number; got {cell!r}"
                    ) from None
    parts = list(zip(*rows, strict=True)) or [()] * len(header)
    return {name: _column(name, part) for name, part in zip(header, parts, strict=True)}


def _column(name: str, values: Sequence[Any]) -> np.ndarray:
    try:
        return np.array(values, dtype=_DTYPES.get(name, np.dtype(np.str_)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name} of a case table must hold numbers: {error}") from error


def _seeds(columns: dict[str, np.ndarray]) -> np.ndarray:
    return columns.get(SEED, np.full(len(columns["value"]), NO_SEED, dtype=np.int64))


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
