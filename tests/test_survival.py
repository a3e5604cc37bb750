"""A full disk or a kill at any change of a folder costs nothing: the same command again ends as it would.

Each command runs once without faults, and the changes of its folder are counted. Then it fails at some of
them, is repeated, and must end with the same files. `make test` tries a few changes, `make test-slow` many.
"""

import errno
import os
import shutil
from functools import partial
from unittest import mock

import numpy as np
import pytest
from faults import KILL, Faults, injected, killed_at
from prepared import make_prepared
from raw_trees import make_folder, write_picture
from start import semidice
from trained import make_run

from semidice.training import command, jobs
from semidice.training.context import Context

SETS = ["data.num_folds=2", "data.folds=[0]", "schedule.epochs=2", "batch_size=4", "workers=0", "log_every=1"]
SETS = [
    part
    for option in (*SETS, "model.options.channels=[8,16]", "validation.every=1")
    for part in ("--set", option)
]
CPU = ("--accelerator", "cpu")
# each command, the inputs that it changes, and how many failures are tried in `make test`
COMMANDS = {
    "prepare": (("prepare", "folder", "raw", "work/out", "--workers", "0"), (), 4),
    "train": (
        ("train", "quick", "-o", "work/out", *CPU, "--resume", "--set", "data.dataset=data", *SETS),
        (),
        4,
    ),
    "compare": (("compare", "data", "quick", "-o", "work/out", *CPU, *SETS), (), 2),
    "predict": (("predict", "run", "a.png", "b.png", "-o", "work/out"), (), 4),
    "evaluate": (("evaluate", "work/run", "--decide", "fitted", "--interval", "0.5"), ("run",), 3),
    "calibrate": (("calibrate", "work/run", "--keep", "temperature"), ("run",), 3),
    "report": (("report", "run", "-o", "work/out/page.html"), (), 1),
}
# full, quota, read-only, broken
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
WITH_TIMES = {"tensorboard", "seconds.json"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Raw images, a prepared dataset, images to predict, and a run of untrained networks."""
    folder = tmp_path_factory.mktemp("inputs")
    make_folder(folder / "raw", num_cases=3)
    make_run(folder / "run", make_prepared(folder / "data", num_cases=8, truth=False))
    # the table of the run, which a report needs
    assert semidice("evaluate", folder / "run").code == 0
    for name in "ab":
        write_picture(folder / f"{name}.png", np.arange(32 * 32, dtype=np.uint8).reshape(32, 32))
    return folder


class Trial:
    """A command, the files it must end with, and the number of changes that it makes."""

    def __init__(self, command, inputs):
        self.command, self.inputs, self.work = command, inputs, inputs / "work"
        self.arguments, self.changed, self.num_few = COMMANDS[command]
        self.start_again()
        with injected(Faults(self.work)) as faults:
            assert self.run().code == 0
        self.expected, self.num_changes = self.content(), faults.count
        assert self.num_changes >= 5

    def run(self):
        return semidice(*self.arguments)

    def start_again(self):
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in self.changed:
            shutil.copytree(self.inputs / name, self.work / name)

    def content(self):
        """The bytes of every file, without locks and those that hold times; no temporary file may be left."""
        files = [path for path in self.work.rglob("*") if path.is_file() and path.name != ".lock"]
        assert not [path for path in files if path.suffix == ".part" or path.name == ".lock.owner"]
        return {
            path.relative_to(self.work): path.read_bytes() for path in files if not WITH_TIMES & {*path.parts}
        }

    def ends_as_expected(self):
        again = self.run()
        assert again.code == 0, again.err
        found = self.content()
        assert found.keys() == self.expected.keys()
        assert [name for name in found if found[name] != self.expected[name]] == []

    def fail_at(self, number, *, error, lasting):
        self.start_again()
        with injected(Faults(self.work, at=number, error=error, lasting=lasting)):
            failed = self.run()
        # one failed change of a figure for TensorBoard may go unnoticed, a lasting one never
        if failed.code != 0 or lasting:
            assert failed.code == 1
            assert os.strerror(error) in failed.err, failed.err
            assert failed.err.startswith(f"semidice {self.command}: ")
            assert "Traceback" not in failed.err
            if self.command == "train" and error in (errno.ENOSPC, errno.EDQUOT):
                assert "--resume" in failed.err, failed.err
        self.content()
        self.ends_as_expected()

    def kill_at(self, number):
        self.start_again()
        code = killed_at(Faults(self.work, at=number, error=KILL), lambda: self.run().code)
        assert code in (-9, 0)
        self.ends_as_expected()


@pytest.fixture(scope="module", params=COMMANDS)
def trial(request, inputs):
    # a checkpoint after every line of the log, so that trainings are resumed in their middle
    before = os.getcwd()
    os.chdir(inputs)
    often = partial(Context, seconds_between_checkpoints=0.0)
    with mock.patch.object(command, "Context", often), mock.patch.object(jobs, "Context", often):
        yield Trial(request.param, inputs)
    os.chdir(before)


def spread(num_changes, num_wanted, offset=0):
    """Numbers of changes, evenly spread; from the first again if there are fewer than wanted."""
    return [(round(turn * num_changes / num_wanted) + offset) % num_changes for turn in range(num_wanted)]


def test_a_disk_that_fails_at_some_changes_costs_nothing(trial):
    for turn, number in enumerate(spread(trial.num_changes, trial.num_few, offset=1)):
        trial.fail_at(number, error=ERRORS[turn % len(ERRORS)], lasting=turn % 2 == 0)


def test_a_kill_at_some_changes_costs_nothing(trial):
    for number in spread(trial.num_changes, trial.num_few, offset=2):
        trial.kill_at(number)


@pytest.mark.slow
def test_a_disk_that_fails_at_any_change_costs_nothing(trial):
    for turn, number in enumerate(spread(trial.num_changes, 10 * trial.num_few)):
        trial.fail_at(number, error=ERRORS[turn % len(ERRORS)], lasting=turn % 2 == 0)


@pytest.mark.slow
def test_a_kill_at_any_change_costs_nothing(trial):
    for number in spread(trial.num_changes, 20 * trial.num_few):
        trial.kill_at(number)


def test_the_layer_fails_where_it_is_told_to(tmp_path):
    # otherwise nothing above could fail
    with injected(Faults(tmp_path, at=1)), pytest.raises(OSError, match="No space left"):
        (tmp_path / "file").write_text("abcd")
    assert (tmp_path / "file").read_text() == "ab"
    assert killed_at(Faults(tmp_path, at=0, error=KILL), lambda: (tmp_path / "b").mkdir()) == -9
    assert not (tmp_path / "b").exists()
