"""A lock on a folder: one process writes there at a time, and the others learn who does.

    with FolderLock(folder, "semidice train") as lock:
        ...
        lock.check()

The lock is a file with its owner: process, machine, command. A hard link gives the file its name, which is
atomic on every file system, also over a network, where locks of the operating system are not reliable. While
the owner lives, a thread touches the file. A lock is taken over at once if its process on this machine is
gone, and after `STALE_SECONDS` without a touch if that is not known. Times are those of the file
server: clocks of machines may differ. A process that was stopped for so long learns by `check` that it lost
the lock.
"""

import json
import os
import platform
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from .paths import Folder, write_error

STALE_SECONDS = 300.0
_SECONDS_BETWEEN_TOUCHES = 20.0


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
    """

    def __init__(self, folder: Folder, command: str) -> None:
        self.folder, self.path = folder, folder.lock
        self.owner = Owner.this_process(command)
        self._lost, self._is_new = False, False
        self._released = Event()
        self._thread = Thread(target=self._keep_alive, name="lock", daemon=True)

    def __enter__(self) -> "FolderLock":
        try:
            self._is_new = not self.folder.path.exists()
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise write_error(self.folder.path, error) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # a forked process has a copy of this object, and is not the owner
        if os.getpid() != self.owner.pid:
            return
        self._released.set()
        self._thread.join()
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
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    # missing, or not written by this version
    except (OSError, ValueError, TypeError):
        return None


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
