"""A file layer that fails: the k-th change of a folder raises an error, or kills the process.

A change is to open a file for writing, to write to it, to force it to the disk, to rename or link it, or to
create a folder. A write that fails has written half of its bytes, as on a disk that is full.
"""

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

KILL = 0


class Faults:
    """Counts the changes below `root`; at number `at` and after it they fail with `error`, or KILL.

    lasting: all later changes fail too, as on a full disk; otherwise only this one.
    """

    def __init__(self, root: Path, *, at: int | None = None, error: int = errno.ENOSPC, lasting: bool = True):
        self.root, self.at, self.error, self.lasting = str(root), at, error, lasting
        self.count = 0
        self._counting = threading.Lock()

    def has(self, path: Any) -> bool:
        """Whether the path is in the folder."""
        return os.path.abspath(path).startswith(self.root)

    def fails(self, path: Any) -> bool:
        """Count a change of a path; whether it must fail."""
        if not self.has(path):
            return False
        with self._counting:
            number = self.count
            self.count += 1
        if self.at is None or number < self.at or (number > self.at and not self.lasting):
            return False
        if self.error == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def check(self, path: Any) -> None:
        if self.fails(path):
            raise OSError(self.error, os.strerror(self.error), str(path))


class _FailingFile:
    """A file whose writes are counted."""

    def __init__(self, file: Any, path: str, faults: Faults) -> None:
        self.__dict__.update(_file=file, _path=path, _faults=faults)

    def write(self, content: Any) -> Any:
        if self._faults.fails(self._path):
            self._file.write(content[: len(content) // 2])
            raise OSError(self._faults.error, os.strerror(self._faults.error))
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_FailingFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


@contextmanager
def injected(faults: Faults) -> Iterator[Faults]:
    """Use the file layer in this process while the block runs."""
    real_open, real_fsync, real_link = io.open, os.fsync, os.link
    replace, rename, mkdir = Path.replace, Path.rename, Path.mkdir

    def open_file(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        is_path = isinstance(path, str | os.PathLike)
        if not is_path or not set(mode) & set("wax+"):
            return real_open(path, mode, *arguments, **options)
        faults.check(path)
        file = real_open(path, mode, *arguments, **options)
        # files that are only forced to the disk are handed on as they are
        is_counted = "+" not in mode and faults.has(path)
        return _FailingFile(file, str(path), faults) if is_counted else file

    def fsync(number: int) -> None:
        faults.check(os.readlink(f"/proc/self/fd/{number}"))
        real_fsync(number)

    def link(source: Any, target: Any) -> None:
        faults.check(target)
        real_link(source, target)

    def counted(method: Any) -> Any:
        def run(path: Path, *arguments: Any, **options: Any) -> Any:
            faults.check(path)
            return method(path, *arguments, **options)

        return run

    with (
        mock.patch.object(builtins, "open", open_file),
        mock.patch.object(io, "open", open_file),
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(os, "link", link),
        mock.patch.object(Path, "replace", counted(replace)),
        mock.patch.object(Path, "rename", counted(rename)),
        mock.patch.object(Path, "mkdir", counted(mkdir)),
    ):
        yield faults


def killed_at(faults: Faults, run: Any) -> int:
    """Run a function in a forked process that is killed at the change; its exit code, negative if killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with injected(faults):
                code = run()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
