"""One process writes to a folder at a time; the lock of a dead one is taken over."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from semidice import locks
from semidice.locks import FolderLock, LockedError, Owner, locked
from semidice.paths import Folder, RunFolder


def lock_of(folder, command="semidice train"):
    return FolderLock(folder, command)


def write_lock(folder, owner, *, silent_s=0.0):
    """A lock file as `owner` left it, last touched so many seconds ago."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.lock.write_text(json.dumps(asdict(owner)))
    then = time.time() - silent_s
    os.utime(folder.lock, (then, then))


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


@pytest.fixture
def me():
    return Owner.this_process("semidice train")


def ended_process():
    """The number of a process that no longer exists."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_second_lock_names_the_owner_and_what_to_do(folder):
    with (
        lock_of(folder),
        pytest.raises(LockedError, match=rf"run is in use by `semidice train` \(process {os.getpid()} on"),
    ):
        lock_of(folder, "semidice evaluate").__enter__()
    with lock_of(folder):
        assert folder.lock.exists()


def test_nothing_is_left_after_a_lock(folder):
    with lock_of(folder):
        (folder.path / "file").touch()
    assert [path.name for path in folder.path.iterdir()] == ["file"]


def test_a_function_that_writes_locks_the_folder_unless_its_process_has_the_lock(folder, me):
    with locked(folder, "semidice evaluate"):
        assert folder.lock.exists()
        with pytest.raises(LockedError), lock_of(folder):
            pass
    with lock_of(folder) as lock:
        with locked(folder, "semidice evaluate"):
            pass
        assert json.loads(folder.lock.read_text())["token"] == lock.owner.token
    assert not folder.path.exists()
    write_lock(folder, replace(me, host="other"))
    with pytest.raises(LockedError, match="on other"), locked(folder, "semidice evaluate"):
        pass


def test_what_a_killed_process_left_under_temporary_names_is_removed_and_nothing_else(folder):
    folder.fold(0).predictions.mkdir(parents=True)
    left = [folder.path / ".cases.parquet.7.part", folder.fold(0).predictions / ".a.npz.7.part"]
    kept = [folder.path / ".notes", folder.path / "a.part", folder.fold(0).path / "log.jsonl"]
    for path in (*left, *kept):
        path.touch()
    with lock_of(folder):
        pass
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)


def test_a_folder_in_which_nothing_was_written_is_removed_again(folder):
    with pytest.raises(KeyError), lock_of(folder):
        raise KeyError
    assert not folder.path.exists()


def test_the_lock_of_a_process_that_ended_is_taken_over_at_once(folder, me):
    write_lock(folder, replace(me, pid=ended_process(), start="1"))
    with lock_of(folder) as lock:
        assert json.loads(folder.lock.read_text())["token"] == lock.owner.token


def test_a_number_that_another_process_has_now_does_not_keep_a_lock(folder, me):
    # process 1 runs always, but it did not begin then
    write_lock(folder, replace(me, pid=1, start="no such time"))
    with lock_of(folder):
        pass


@pytest.mark.parametrize("field", ["host", "machine"])
def test_the_lock_of_another_machine_is_kept_while_it_is_touched_and_taken_over_later(folder, me, field):
    other = replace(me, **{field: "other"}, pid=ended_process())
    write_lock(folder, other, silent_s=locks.STALE_SECONDS - 30)
    with pytest.raises(LockedError, match="is in use by"):
        lock_of(folder).__enter__()
    write_lock(folder, other, silent_s=locks.STALE_SECONDS + 30)
    with lock_of(folder):
        pass


NO_OWNER = {"host": 1, "machine": "", "start": "", "command": "", "since": "", "token": ""}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"pid": 3}', "[" * 10_000),
        *(json.dumps(NO_OWNER | {"host": "h", "pid": pid}) for pid in ("x", 0, -1, 2**40, None)),
        json.dumps(NO_OWNER | {"pid": 1}),
    ],
)
def test_a_lock_that_cannot_be_read_is_kept_until_nobody_touches_it(folder, me, content):
    write_lock(folder, me)
    folder.lock.write_text(content)
    with pytest.raises(LockedError, match="in use by another process"):
        lock_of(folder).__enter__()
    os.utime(folder.lock, (0, 0))
    with lock_of(folder):
        pass


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(folder):
    folder.path.mkdir()
    os.mkfifo(folder.lock)
    with pytest.raises(LockedError, match="in use by another process"):
        lock_of(folder).__enter__()


def test_the_owner_touches_its_lock(folder, monkeypatch):
    monkeypatch.setattr(locks, "_SECONDS_BETWEEN_TOUCHES", 0.01)
    with lock_of(folder):
        os.utime(folder.lock, (0, 0))
        deadline = time.monotonic() + 10
        while folder.lock.stat().st_mtime < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - folder.lock.stat().st_mtime < 60


def test_an_owner_that_was_stopped_for_long_learns_that_it_lost_the_lock(folder, me, monkeypatch):
    monkeypatch.setattr(locks, "_SECONDS_BETWEEN_TOUCHES", 0.01)
    other = replace(me, host="other", token="new")
    with lock_of(folder) as lock:
        lock.check()
        write_lock(folder, other)
        deadline = time.monotonic() + 10
        while not lock._lost and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(LockedError, match=r"was taken over by `semidice train` .* on other"):
            lock.check()
    # the lock of the other is not removed
    assert json.loads(folder.lock.read_text())["token"] == "new"


def test_a_new_lock_that_was_taken_for_a_dead_one_is_put_back(folder, me, monkeypatch):
    """Two processes find the same dead lock. The first takes it over before the second removes it."""
    write_lock(folder, replace(me, pid=ended_process(), start="1"))
    first = replace(me, token="first")
    is_gone = Owner.is_gone

    def taken_over_meanwhile(owner):
        gone = is_gone(owner)
        if owner.token != "first":
            write_lock(folder, first)
        return gone

    monkeypatch.setattr(Owner, "is_gone", taken_over_meanwhile)
    with pytest.raises(LockedError, match="is in use by"):
        lock_of(folder).__enter__()
    assert json.loads(folder.lock.read_text())["token"] == "first"
    assert [path.name for path in folder.path.iterdir()] == [".lock"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_processes_one_gets_the_lock_at_a_time(tmp_path, links):
    """Each process adds one to a number in a file, which loses additions if two do it at once."""
    code = f"""
import os, sys, time
from pathlib import Path
from semidice.locks import FolderLock, LockedError
from semidice.paths import Folder
if not {links}:
    def no_links(*args):
        raise PermissionError
    os.link = no_links
folder = Folder(Path(sys.argv[1]))
number = folder.path / "number"
for _ in range(20):
    while True:
        try:
            with FolderLock(folder, "test"):
                value = int(number.read_text())
                time.sleep(0.001)
                number.write_text(str(value + 1))
            break
        except LockedError:
            time.sleep(0.002)
"""
    (tmp_path / "number").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    assert (tmp_path / "number").read_text() == "80"


def test_without_hard_links_a_removed_source_leaves_no_lock_without_an_owner(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError

    monkeypatch.setattr("os.link", no_links)
    assert not locks._link(tmp_path / "removed", tmp_path / ".lock")
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "choose a folder that you may write to"),
        (errno.EACCES, "choose a folder that you may write to"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_the_reason(folder, monkeypatch, number, remedy):
    folder.path.mkdir()

    def refuse(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    with pytest.raises(ValueError, match=f"cannot write .*run: {os.strerror(number)}; {remedy}"):
        lock_of(folder).__enter__()
    assert not list(folder.path.iterdir())


def test_the_check_of_a_step_costs_less_than_a_hundredth_of_the_shortest_step(folder):
    # steps take several milliseconds, see docs/performance.md; 1 ms is shorter than any of them
    with lock_of(folder) as lock:
        times = []
        for _ in range(5):
            started = time.process_time()
            for _ in range(10_000):
                lock.check()
            times.append((time.process_time() - started) / 10_000)
    assert min(times) < 0.01 * 1e-3


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*file: File exists"):
        lock_of(Folder(tmp_path / "file")).__enter__()
