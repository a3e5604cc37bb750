"""A lock on a folder: one process writes there at a time, and the others learn who does.

    with locked(folder, "semidice train"):
        ...

The lock is one of the operating system (flock) on the file `.lock` in the folder. It ends with its process,
however that ends: what a killed process leaves behind never stops the next command. On a file system without
flock, such as some network mounts, the file itself is the lock, and a killed process leaves it there.
Files that `paths.atomic_write` left in the folder because its process was killed are removed.

A fold of a run has a lock of its own: whoever trains a fold holds that of the fold, whoever writes the tables
of a run that of the run. So several processes can work on folds of one run.
"""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout

from .errors import UserError, writing
from .paths import Folder


class LockedError(UserError):
    """Another process has the folder; the message says which."""


@contextmanager
def locked(folder: Folder, command: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """A block with the lock of a folder, which this process may have already; a LockedError names another.

    The folder is created if it does not exist, and removed again if nothing is written to it. wait_s: how
    long to wait for another owner.
    """
    is_new = not folder.path.exists()
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.lock.resolve(), is_singleton=True, thread_local=False)
    if lock.is_locked:
        yield
        return
    if folder.lock.is_symlink():
        raise UserError(f"{folder.lock} is a link, but the lock of a folder is a file in it: remove the link")
    try:
        with writing(folder.lock):
            lock.acquire(timeout=wait_s, poll_interval=0.1)
    except Timeout:
        raise LockedError(
            f"{folder.path} is in use by {_owner(folder)}: wait until it is done, or stop it (its lock is "
            f"{folder.lock})"
        ) from None
    try:
        # of processes that were killed: no other one works on these files
        for path in folder.temp_files():
            path.unlink(missing_ok=True)
        with writing(folder.lock_owner):
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            process = f"process {os.getpid()} on {platform.node()}, since {since}"
            # new, so that nothing is written through a link
            folder.lock_owner.unlink(missing_ok=True)
            with folder.lock_owner.open("x", encoding="utf-8") as file:
                file.write(f"`{command}` ({process})")
        yield
    finally:
        folder.lock_owner.unlink(missing_ok=True)
        if is_new and not any(path != folder.lock for path in folder.path.iterdir()):
            # nothing was written, because of an error
            with suppress(OSError):
                folder.lock.unlink()
                folder.path.rmdir()
        lock.release()


def _owner(folder: Folder) -> str:
    with suppress(OSError):
        return folder.lock_owner.read_text(encoding="utf-8", errors="replace")
    return "another process"
