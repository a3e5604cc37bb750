"""The stored results of docs/results: the scores of every case, and how they were made.

    NAME.parquet   one row per case, method and seed; one float32 column per score, the mean over the classes
    NAME.json      the command, seeds, folds, epochs, seconds, device and versions

seed is -1 for a method with one training. `read_scores` gives the case table that all statistics start from.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import parquet

from semidice.metrics.cases import COLUMNS, NO_SEED, SEED, CaseTable
from semidice.paths import atomic_write

RESULTS = Path(__file__).parent / "results"
MAX_BYTES = 2_000_000
_KEYS = ("method", SEED, "case", "patient", "fold")


class Record(NamedTuple):
    """How a study was made. command: with names in place of folders. seconds: of all calls together.

    note: what a reader must know, such as methods that were not run.
    """

    command: str
    seeds: int
    folds: int
    epochs: int
    seconds: float
    device: str
    versions: dict[str, str]
    note: str = ""


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
    wide = parquet.read_table(path)
    metrics = [name for name in wide.column_names if name not in _KEYS]
    keys = {name: np.tile(np.array(wide.column(name).to_pylist()), len(metrics)) for name in _KEYS}
    keys["metric"] = np.repeat(metrics, len(wide))
    keys["class"] = np.full(len(keys["metric"]), "mean")
    keys["value"] = np.concatenate([wide.column(name).to_numpy() for name in metrics]).astype(np.float64)
    has_seeds = bool((keys[SEED] != NO_SEED).any())
    return CaseTable({name: keys[name] for name in (*COLUMNS, SEED)[: len(COLUMNS) + has_seeds]})


def write_record(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path:
        temp_path.write_text(json.dumps(record._asdict(), indent=1) + "\n")


def read_record(path: Path) -> Record:
    return Record(**json.loads(path.read_text()))
