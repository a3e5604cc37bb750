"""A lock on a folder: one process writes there at a time, and the others learn who does.

    with FolderLock(folder, "semidice train") as lock:
        ...
        lock.check()

The lock is a file with its owner: process, machine, command. A hard link gives the file its name, which is
atomic on every file system, also over a network, where locks of the operating system are not reliable. While
the owner lives, a thread touches the file. A lock is taken over at once if its process on this machine is
gone, and after `STALE_SECONDS` without a touch if that is not known. Times are those of the file
server: clocks of machines may differ. A process that was stopped for so long learns by `check` that it lost
the lock. Files that `paths.atomic_write` left in the folder because its process was killed are removed.

A folder may have parts with locks of their own, such as the folds of a run. The lock of a part is taken
while the lock of the folder is held for a moment (`part_lock`), so that several processes can work on parts.
The lock of the whole folder is refused while a part is locked.
"""

import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from .limits import read_json
from .paths import Folder, write_error

STALE_SECONDS = 300.0
_SECONDS_BETWEEN_TOUCHES = 20.0
# process and path of the locks that this process has; a forked process does not have them
_held: set[tuple[int, Path]] = set()
# the lock of a process that died on another machine is free after that
PATIENCE_SECONDS = STALE_SECONDS + 60


class LockedError(ValueError):
    """Another process has the folder; the message says which."""


@dataclass(frozen=True)
class Owner:
    """The process that has a lock.

    machine: the boot and the process namespace in which `pid` has a meaning. start: when the process began,
    because numbers of processes are used again. since: for messages. token: of this lock alone.
    """

    pid: int
    host: str
    machine: str
    start: str
    command: str
    since: str
    token: str

    @classmethod
    def this_process(cls, command: str) -> "Owner":
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        pid = os.getpid()
        return cls(pid, platform.node(), _machine(), _start_of(pid), command, since, uuid.uuid4().hex)

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if it cannot be known: on another machine, or on Windows."""
        # on Windows, signal 0 is an interrupt: it would stop the process
        if (self.host, self.machine) != (platform.node(), _machine()) or platform.system() == "Windows":
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            # a process of another user
            pass
        return _start_of(self.pid) != self.start

    def __str__(self) -> str:
        return f"`{self.command}` (process {self.pid} on {self.host}, since {self.since})"


class FolderLock:
    """The lock of a folder, held while a `with` block runs; a LockedError names another owner.

    The folder is created if it does not exist, and removed again if nothing is written to it.
    whole: the lock is also for the parts of the folder, none of which may be locked. wait_s: how long to wait
    for another owner.
    """

    def __init__(self, folder: Folder, command: str, *, whole: bool = True, wait_s: float = 0.0) -> None:
        self.folder, self.path = folder, folder.lock
        self.whole, self.wait_s = whole, wait_s
        self.owner = Owner.this_process(command)
        self._key = (self.owner.pid, self.path.resolve())
        self._lost, self._is_new = False, False
        self._released = Event()
        self._thread = Thread(target=self._keep_alive, name="lock", daemon=True)

    def __enter__(self) -> "FolderLock":
        deadline, pause_s = time.monotonic() + self.wait_s, 0.01
        try:
            while not self._entered(may_wait=time.monotonic() < deadline):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
        except OSError as error:
            raise write_error(self.folder.path, error) from error
        _held.add(self._key)
        self._thread.start()
        return self

    def _entered(self, *, may_wait: bool) -> bool:
        """Whether the lock was acquired; False only if another owner has it and `may_wait`."""
        self._is_new = not self.folder.path.exists()
        self.folder.path.mkdir(parents=True, exist_ok=True)
        try:
            self._acquire()
            try:
                for part in self.folder.parts() if self.whole else ():
                    if part.lock.exists():
                        # removes the lock of a dead owner
                        with FolderLock(part, self.owner.command):
                            pass
                # of processes that were killed: no other one works on these files
                for path in self.folder.temp_files() if self.whole else self.folder.own_temp_files():
                    path.unlink(missing_ok=True)
            except BaseException:
                self._release()
                raise
        except LockedError:
            if not may_wait:
                raise
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # a forked process has a copy of this object, and is not the owner
        if os.getpid() != self.owner.pid:
            return
        _held.discard(self._key)
        self._released.set()
        self._thread.join()
        self._release()

    def _release(self) -> None:
        if _read_owner(self.path) == self.owner:
            self.path.unlink(missing_ok=True)
        if self._is_new:
            # nothing was written, because of an error
            with suppress(OSError):
                self.folder.path.rmdir()

    def check(self) -> None:
        """A LockedError if another process took the lock over, because this one was stopped for long."""
        if self._lost:
            owner = _read_owner(self.path) or "another process"
            raise LockedError(
                f"{self.folder.path} was taken over by {owner}, because this process was stopped for "
                f"{STALE_SECONDS:.0f} s or more: nothing more is written"
            )

    def _acquire(self) -> None:
        temp_path = self.path.with_name(f"{self.path.name}.{self.owner.token}.part")
        try:
            while True:
                # written in each round: its time is the present time of the file server
                temp_path.write_text(json.dumps(asdict(self.owner)), encoding="utf-8")
                if _link(temp_path, self.path):
                    break
                self._remove_dead_lock(temp_path)
        finally:
            temp_path.unlink(missing_ok=True)
        # of processes that were killed here; one that still tries writes its file again
        for path in self.path.parent.glob(f"{self.path.name}.*.part"):
            path.unlink(missing_ok=True)

    def _remove_dead_lock(self, temp_path: Path) -> None:
        """Remove the lock of an owner that is gone; a LockedError if it is not."""
        owner = _read_owner(self.path)
        try:
            silent_s = temp_path.stat().st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:
            # released in the meantime
            return
        is_gone = None if owner is None else owner.is_gone()
        if is_gone is False or (is_gone is None and silent_s < STALE_SECONDS):
            raise LockedError(
                f"{self.folder.path} is in use by {owner or 'another process'}: wait until it is done, "
                "or stop it"
            )
        # of several processes that find a dead lock, one renames it; one that comes late finds a new lock
        # under the name, and puts it back
        removed = self.path.with_name(f"{self.path.name}.{self.owner.token}.dead.part")
        try:
            self.path.rename(removed)
            if _read_owner(removed) != owner:
                _link(removed, self.path)
            removed.unlink()
        except FileNotFoundError:
            return

    def _keep_alive(self) -> None:
        while not self._released.wait(_SECONDS_BETWEEN_TOUCHES):
            owner = _read_owner(self.path)
            if owner is not None and owner != self.owner:
                self._lost = True
                return
            try:
                os.utime(self.path)
            except OSError:
                # the server does not answer, or the folder is being removed: the next touch decides
                continue


@contextmanager
def locked(folder: Folder, command: str) -> Iterator[None]:
    """A block with the lock of a folder, which the process may have already.

    For functions that write to a folder and are also called by commands that lock it for long.
    """
    with ExitStack() as stack:
        if (os.getpid(), folder.lock.resolve()) not in _held:
            stack.enter_context(FolderLock(folder, command))
        yield


@contextmanager
def part_lock(folder: Folder, part: Folder, command: str, *, wait_s: float = 0.0) -> Iterator[FolderLock]:
    """The lock of a part; a LockedError if the folder as a whole, or this part, has another owner.

    The lock of the folder is not held while the block runs.
    """
    deadline = time.monotonic() + wait_s
    with ExitStack() as stack:
        while True:
            left_s = deadline - time.monotonic()
            try:
                with FolderLock(folder, command, whole=False, wait_s=left_s):
                    lock = stack.enter_context(FolderLock(part, command))
                break
            except LockedError:
                if left_s <= 0:
                    raise
            # without the lock of the folder: other parts can be started
            time.sleep(min(left_s, 1.0))
        yield lock


def _link(source: Path, target: Path) -> bool:
    """Give a file its second name; False if the name exists, or the file does not."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        return False
    except OSError:
        # a file system without hard links: creating a file is atomic, its content comes a moment later
        try:
            # read first: another process may remove the source, and an empty lock would have no owner
            content = source.read_text(encoding="utf-8")
            with target.open("x", encoding="utf-8") as file:
                file.write(content)
        except (FileExistsError, FileNotFoundError):
            return False
    return True


def _read_owner(path: Path) -> Owner | None:
    try:
        owner = Owner(**read_json(path))
    # missing, or not written by this version
    except (OSError, ValueError, TypeError):
        return None
    is_valid = all(type(getattr(owner, field.name)) is field.type for field in fields(Owner))
    return owner if is_valid and 0 < owner.pid < 2**31 else None


def _machine() -> str:
    """This boot of the machine and its process namespace: containers may share a host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        # not Linux
        return hex(uuid.getnode())


def _start_of(pid: int) -> str:
    """When a process began, in ticks since the boot; "" if not known, as outside of Linux."""
    try:
        # the name of the program, in parentheses, may contain spaces
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
