"""One process writes to a folder at a time; what a killed one left behind stops nobody."""

import errno
import os
import signal

import numpy as np
import pytest
from prepared import make_prepared
from raw_trees import write_picture
from start import refused, semidice
from trained import make_run

from semidice.locks import locked
from semidice.paths import Folder, ReportFolder, RunFolder

HOLD = """
import sys, time
from pathlib import Path
from semidice.locks import locked
from semidice.paths import RunFolder
with locked(RunFolder(Path(sys.argv[1])), "semidice train"):
    print("locked", flush=True)
    (Path(sys.argv[1]) / "ready").touch()
    time.sleep(600)
"""
COUNT = """
import sys
from pathlib import Path
from semidice.locks import locked
from semidice.paths import Folder
number = Path(sys.argv[1]) / "number"
for _ in range(20):
    with locked(Folder(Path(sys.argv[1])), "count", wait_s=120):
        value = int(number.read_text())
        number.write_text(str(value + 1))
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_second_process_is_refused_until_the_first_ends_however_it_ends(folder, start, number):
    owner = start("-c", HOLD, folder.path)
    owner.wait_until((folder.path / "ready").exists)
    message = refused(lambda: locked(folder, "semidice evaluate").__enter__(), str(folder.path), ".lock")
    assert f"`semidice train` (process {owner.process.pid} on " in message
    owner.send_signal(number)
    owner.end()
    with locked(folder, "semidice evaluate"):
        assert f"process {os.getpid()}" in folder.lock_owner.read_text()


def test_of_many_processes_one_has_the_lock_at_a_time(tmp_path, start):
    # each adds one to a number in a file, which loses additions if two do it at once
    (tmp_path / "number").write_text("0")
    assert [process.end().code for process in [start("-c", COUNT, tmp_path) for _ in range(4)]] == [0] * 4
    assert (tmp_path / "number").read_text() == "80"


def test_a_process_may_lock_a_folder_that_it_has_locked(folder):
    with locked(folder, "semidice train"):
        with locked(folder, "semidice evaluate"):
            pass
        assert "semidice train" in folder.lock_owner.read_text()
    with locked(folder, "semidice evaluate"):
        pass


def test_a_folder_in_which_nothing_was_written_is_removed_again(folder):
    with pytest.raises(KeyError), locked(folder, "semidice train"):
        raise KeyError
    assert not folder.path.exists()


def test_temporary_files_of_killed_processes_are_removed_and_nothing_else(folder):
    folder.fold(0).predictions.mkdir(parents=True)
    left = [folder.path / ".cases.parquet.7.part", folder.path / ".a.7-bc.part"]
    kept = [folder.path / ".notes", folder.path / "a.part", folder.fold(0).predictions / ".a.npz.7.part"]
    for path in (*left, *kept):
        path.touch()
    with locked(folder, "semidice train"):
        pass
    assert not any(path.exists() for path in left)
    # the fold has a lock of its own, whose owner may write this file now
    assert all(path.exists() for path in kept)
    with locked(folder.fold(0), "semidice train"):
        assert not kept[-1].exists()


def test_a_link_in_the_place_of_a_lock_is_refused_by_name(folder, tmp_path):
    folder.path.mkdir()
    folder.lock.symlink_to(tmp_path / "nowhere")
    refused(lambda: locked(folder, "semidice train").__enter__(), str(folder.lock), "is a link", "remove")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_named_with_the_reason(folder, monkeypatch, number):
    def refuse(path, *arguments, **options):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    refused(lambda: locked(folder, "x").__enter__(), "cannot write", str(folder.path), os.strerror(number))
    assert not folder.path.exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    refused(lambda: locked(Folder(tmp_path / "file"), "x").__enter__(), "cannot write", "file: File exists")


def test_every_command_that_writes_names_who_has_the_folder_and_changes_nothing(tmp_path, start):
    data, page = make_prepared(tmp_path / "data"), tmp_path / "page.html"
    run = make_run(tmp_path / "run", data)
    write_picture(tmp_path / "a.png", np.arange(1024, dtype=np.uint8).reshape(32, 32))
    table = ("--cases", tmp_path / "table.csv", "--dataset", data.folder.path)
    assert semidice("evaluate", run.path, "-o", tmp_path / "table.csv").code == 0
    folders = (run.path, tmp_path / "out", ReportFolder.of(page).path)
    for folder in folders:
        start("-c", HOLD, folder).wait_until((folder / "ready").exists)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    small = [part for option in ("data.num_folds=2", "batch_size=2") for part in ("--set", option)]
    for command in (
        ["train", "quick", "-o", run.path, "--set", f"data.dataset={data.folder.path}", "--resume", *small],
        ["evaluate", run.path],
        ["evaluate", run.path, "--interval", "0.9"],
        ["evaluate", run.path, "--decide", "fitted"],
        ["calibrate", run.path, "--by", "temperature"],
        ["predict", run.path, tmp_path / "a.png", "-o", tmp_path / "out"],
        ["report", *table, "-o", page],
        ["compare", data.folder.path, "quick", "-o", tmp_path / "out", *small],
    ):
        refused(semidice(*command), "is in use by `semidice train`")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    # without a rule that is stored in the run, scores in another file need no lock
    assert semidice("evaluate", run.path, "-o", tmp_path / "scores.csv").code == 0
