"""A stored array (.npy): one case at a time is read from its file, and nothing of it is kept.

Files are not memory-mapped: pages of a map count as memory of the process while the map is open, so that a
training would seem to need the whole dataset, and is stopped where memory is limited.
"""

from functools import lru_cache
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from ..limits import check_file


class _Header(NamedTuple):
    """What a file holds, and where the values start. columns_first: the order of Fortran."""

    shape: tuple[int, ...]
    columns_first: bool
    dtype: np.dtype[np.generic]
    offset: int


class StoredArray:
    """An open file with the array (cases, ...); a ValueError names the file. It is a context manager.

    shape, dtype: of the array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_file(path)
            self._file = path.open("rb", buffering=0)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        try:
            # 12 bytes say how long the header is
            start = self._file.read(12)
            is_first_version = start[6:7] == b"\x01"
            num_left = int.from_bytes(start[8 : 10 if is_first_version else 12], "little")
            num_left -= 2 if is_first_version else 0
            self._header = _parsed(start + self._file.read(min(num_left, 2**16)))
        # NumPy has no common error for a damaged header: ValueError, SyntaxError, TokenError, ...
        except Exception as error:
            self._file.close()
            raise self._unreadable(error) from error
        self.shape, self.dtype = self._header.shape, self._header.dtype

    def __enter__(self) -> "StoredArray":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, row: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """The array of the case in this row. out: contiguous, of the same shape and type; it is filled."""
        num_rows, *shape = self.shape
        if out is None:
            out = np.empty(shape, self.dtype)
        try:
            if row >= num_rows:
                raise ValueError(f"it has {num_rows} cases, and not number {row}")
            if self._header.columns_first:
                out[...] = np.lib.format.open_memmap(self.path, mode="r")[row]
                return out
            self._file.seek(self._header.offset + row * out.nbytes)
            left = out.reshape(-1).view(np.uint8).data
            while left:
                # Linux reads at most 2 GB at once
                num_read = self._file.readinto(left)
                if not num_read:
                    raise ValueError(f"it ends {len(left)} bytes too early")
                left = left[num_read:]
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        return out

    def _unreadable(self, error: Exception) -> ValueError:
        return ValueError(
            f"cannot read {self.path}: {error}; run `semidice check`, then prepare the dataset again"
        )


@lru_cache(maxsize=256)
def _parsed(text: bytes) -> _Header:
    """The header of a file, kept: most files of a dataset have the same, and parsing it takes a while."""
    file = BytesIO(text)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columns_first, dtype = read(file)
    if dtype.hasobject or not shape:
        raise ValueError(f"it holds {dtype} {shape}, which is no array of cases")
    return _Header(shape, columns_first, dtype, file.tell())
