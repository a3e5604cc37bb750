"""Bounds on what is read from files that a stranger may have made, all of them here.

A small file can ask for much: a compressed one expands a thousandfold, a header declares any shape, an alias
in YAML repeats a value, and a pipe never ends. So a size is compared with its bound before anything is
allocated, and the message has both numbers. The bounds lie far above what real data needs.
"""

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# values of one image, mask or prediction: a CT of 512 x 512 x 4096 voxels
MAX_VALUES = 2**30
# rows times columns that `prepare` or `predict` resizes a slice to
MAX_PIXELS = 2**26
# data of a NIfTI besides its voxels: header, extensions, and what comes after the voxels
MAX_NIFTI_EXTRA_BYTES = 2**24
# what comes before the pixels of a DICOM file; a segmentation of 4096 frames has 4 MB
MAX_DICOM_HEADER_BYTES = 2**25
# of recipes and grids: the text, and the number of values after aliases are replaced by what they name
MAX_RECIPE_BYTES = 2**20
MAX_RECIPE_VALUES = 100_000
# of manifests, folds and other JSON files; a dataset of 100 000 scans has a manifest of 150 MB
MAX_JSON_BYTES = 2**28
# of the log of a fold: 200 bytes per line, a line per step
MAX_LOG_BYTES = 2**30
# of a case table: 10 000 cases, 20 methods, 50 scores and classes
MAX_TABLE_ROWS = 10_000_000
MAX_CSV_BYTES = 2**30
MAX_FOLDS = 1000
# trainings of one method
MAX_SEEDS = 1000
MAX_RATERS = 1000
# any number in `model.options`, such as the channels of a layer
MAX_NETWORK_NUMBER = 4096


def check_file(path: Path, *, max_bytes: int | None = None) -> None:
    """A ValueError if the path is a pipe, a device or another thing without an end, or is too large.

    A folder and a path that does not exist pass: to open them raises the error that the caller expects.
    """
    try:
        status = os.stat(path)
    except OSError:
        return
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a {_kind(status.st_mode)}, which has no end: copy its content to a file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(f"{path} has {status.st_size} bytes; at most {max_bytes} are read")


def read_bytes(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file, after `check_file`; an OSError if it cannot be read."""
    check_file(path, max_bytes=max_bytes)
    return path.read_bytes()


def read_text(path: Path, *, max_bytes: int, encoding: str = "utf-8") -> str:
    """The same as text; lines may end as on any system."""
    return read_bytes(path, max_bytes=max_bytes).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file; a ValueError if it is none, an OSError if it cannot be read."""
    return parse_json(read_bytes(path))


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text stands for; a ValueError, also for one that is nested too deeply.

    >>> parse_json('{"step": 3}')
    {'step': 3}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def check_shape(shape: Sequence[int], what: str, *, max_values: int = MAX_VALUES) -> None:
    """A ValueError if an array of this shape has too many values. what: the thing that declares the shape."""
    num_values = math.prod(int(length) for length in shape)
    if num_values > max_values:
        axes = " x ".join(str(int(length)) for length in shape)
        raise ValueError(f"{what} declares {axes} = {num_values} values; at most {max_values} are read")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "pipe"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "socket")
