"""The stored results of docs/results: the scores of every case, and how they were made.

NAME.parquet   a case table of the means over classes, to the precision of float32
NAME.json      the command, seeds, folds, epochs, seconds, device and versions
"""

import json
from pathlib import Path
from typing import NamedTuple

from semidice.paths import atomic_write
from semidice.statistics.cases import MAIN_CLASSES, CaseTable, write_cases

RESULTS = Path(__file__).parent / "results"
MAX_BYTES = 2_000_000


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
    path.parent.mkdir(parents=True, exist_ok=True)
    means = table[table["class"].isin(MAIN_CLASSES)]
    # the dataset is that of the record
    rounded = means.assign(value=means["value"].astype("float32").astype("float64"), dataset="")
    larger = path.with_name(f"new_{path.name}")
    write_cases(rounded, larger)
    size = larger.stat().st_size
    if size > MAX_BYTES:
        larger.unlink()
        raise ValueError(f"{path} would have {size} bytes; at most {MAX_BYTES} are stored: drop a score")
    larger.replace(path)


def write_record(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path:
        temp_path.write_text(json.dumps(record._asdict(), indent=1) + "\n")


def read_record(path: Path) -> Record:
    return Record(**json.loads(path.read_text()))
