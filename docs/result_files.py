"""The stored results of docs/results: the scores of every case, and how they were made.

    NAME.parquet   one row per case, method and seed; one float32 column per score, the mean over the classes
    NAME.json      the command, seeds, folds, epochs, seconds, device and versions

seed is -1 for a method with one training. `read_scores` gives the case table that all statistics start from.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import parquet

from semidice.metrics.cases import SEED, CaseRow, CaseTable
from semidice.paths import atomic_write

RESULTS = Path(__file__).parent / "results"
MAX_BYTES = 2_000_000
_KEYS = ("method", SEED, "case", "patient", "fold")


class Record(NamedTuple):
    """How a study was made. command: with names in place of folders. seconds: of all calls together."""

    command: str
    seeds: int
    folds: int
    epochs: int
    seconds: float
    device: str
    versions: dict[str, str]


def write_scores(table: CaseTable, path: Path) -> None:
    """Write the means over classes; a ValueError if a file would be larger than a repository should hold."""
    wide: dict[tuple[Any, ...], dict[str, float]] = {}
    metrics = sorted(table.metrics)
    for row in table.rows():
        if row.class_name in ("mean", "all"):
            wide.setdefault((row.method, row.seed, row.case, row.patient, row.fold), {})[row.metric] = (
                row.value
            )
    rows = sorted(wide)
    columns: dict[str, Any] = dict(zip(_KEYS, map(list, zip(*rows, strict=True)), strict=True))
    types = {SEED: pyarrow.int32(), "fold": pyarrow.int32()}
    arrays = {name: pyarrow.array(values, type=types.get(name)) for name, values in columns.items()}
    for metric in metrics:
        values = np.array([wide[row].get(metric, np.nan) for row in rows], dtype=np.float32)
        arrays[metric] = pyarrow.array(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path:
        # differences of neighbouring bytes of a float are small, those of whole floats are not
        parquet.write_table(
            pyarrow.table(arrays),
            temp_path,
            compression="zstd",
            compression_level=19,
            use_dictionary=list(_KEYS),
            column_encoding=dict.fromkeys(metrics, "BYTE_STREAM_SPLIT"),
        )
        size = temp_path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{path} would have {size} bytes; at most {MAX_BYTES} are stored: drop a score")


def read_scores(path: Path) -> CaseTable:
    """The case table of a file; the class of all scores is `mean`."""
    return CaseTable.from_rows(_rows(parquet.read_table(path).to_pydict()))


def _rows(columns: dict[str, list[Any]]) -> Iterator[CaseRow]:
    keys = list(zip(*(columns[name] for name in _KEYS), strict=True))
    for metric, values in columns.items():
        if metric in _KEYS:
            continue
        for (method, seed, case, patient, fold), value in zip(keys, values, strict=True):
            yield CaseRow(case, patient, fold, method, "mean", metric, value, seed)


def write_record(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path:
        temp_path.write_text(json.dumps(record._asdict(), indent=1) + "\n")


def read_record(path: Path) -> Record:
    return Record(**json.loads(path.read_text()))
