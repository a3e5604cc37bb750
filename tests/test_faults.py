"""A full disk, a quota or a kill at any change of a folder costs nothing: a repeated command ends the same.

Each command runs once without faults, and the changes of its folder are counted. Then it fails at some of
them, is repeated, and must end with the same files. `make test` tries a few, `make test-slow` hundreds.
"""

import ast
import errno
import os
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from faults import KILL, Faults, injected, killed_at
from prepared import make_prepared
from raw_trees import make_folder, write_picture
from trained import make_run
from typer.testing import CliRunner

import semidice
from semidice.cli import app
from semidice.paths import atomic_write
from semidice.training import crossvalidation
from semidice.training.engine import train_fold

SETS = ["data.num_folds=2", "data.folds=[0]", "schedule.epochs=2", "batch_size=4"]
SETS += ["model.options.channels=[8,16]", "workers=0", "log_every=1", "validation.every=1"]
COMMANDS = ("prepare", "train", "compare", "predict", "report")
# errors of a disk: full, quota, read-only, broken
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Raw images, a prepared dataset, images to predict, a run of an untrained network, and a trained one."""
    folder = tmp_path_factory.mktemp("inputs")
    make_folder(folder / "raw", num_cases=3)
    make_prepared(folder / "data", num_cases=8, truth=False)
    make_run(folder / "run", make_prepared(folder / "other"))
    for name in "ab":
        write_picture(folder / f"{name}.png", np.arange(32 * 32, dtype=np.uint8).reshape(32, 32))
    assert run("train", folder, folder / "trained").exit_code == 0
    return folder


def arguments(command, inputs, out):
    sets = [part for option in SETS for part in ("--set", option)]
    dataset = ["--set", f"data.dataset={inputs / 'data'}"]
    return {
        "prepare": ["prepare", "folder", inputs / "raw", out, "--workers", "0"],
        "train": ["train", "quick", "-o", out, "--accelerator", "cpu", "--resume", *sets, *dataset],
        "compare": ["compare", inputs / "data", "quick", "-o", out, "--accelerator", "cpu", *sets],
        "predict": ["predict", inputs / "run", inputs / "a.png", inputs / "b.png", "-o", out],
        "report": ["report", inputs / "trained", "-o", out / "page.html"],
    }[command]


def run(command, inputs, out):
    result = CliRunner().invoke(app, [str(part) for part in arguments(command, inputs, out)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def content(work):
    """The bytes of every file, without those that hold times."""
    with_times = {"tensorboard", "seconds.json", "jobs.csv"}
    files = [path for path in sorted(work.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(work)): path.read_bytes() for path in files if not with_times & {*path.parts}
    }


def leftovers(work):
    """Locks, and files under a temporary name."""
    files = [path for path in work.rglob(".*") if path.is_file()]
    return [path.name for path in files if path.suffix == ".part" or path.name.startswith(".lock")]


class Trial:
    """A command, the files it must end with, and the number of changes that it makes."""

    def __init__(self, command, inputs, work):
        self.command, self.inputs, self.work = command, inputs, work
        work.mkdir()
        with injected(Faults(work)) as faults:
            done = self.run()
        assert done.exit_code == 0, done.stderr
        self.expected, self.num_changes = content(work), faults.count
        assert not leftovers(work)

    def run(self):
        return run(self.command, self.inputs, self.work / "out")

    def start_again(self):
        shutil.rmtree(self.work)
        self.work.mkdir()

    def fail_at(self, number, *, error, lasting):
        self.start_again()
        with injected(Faults(self.work, at=number, error=error, lasting=lasting)):
            failed = self.run()
        # one failed change of a figure for TensorBoard may go unnoticed, a lasting one never
        if failed.exit_code != 0:
            assert failed.exit_code == 1
            assert os.strerror(error) in failed.stderr, failed.stderr
            assert failed.stderr.startswith(f"semidice {self.command}: ")
            assert "Traceback" not in failed.stderr
        assert not leftovers(self.work), leftovers(self.work)
        self.ends_as_expected()

    def kill_at(self, number):
        self.start_again()
        code = killed_at(Faults(self.work, at=number, error=KILL), lambda: self.run().exit_code)
        assert code in (-9, 0)
        self.ends_as_expected()
        return code

    def ends_as_expected(self):
        again = self.run()
        assert again.exit_code == 0, again.stderr
        found = content(self.work)
        assert found.keys() == self.expected.keys()
        different = [name for name in found if found[name] != self.expected[name]]
        assert not different
        assert not leftovers(self.work)


@pytest.fixture(scope="module", params=COMMANDS)
def trial(request, inputs, tmp_path_factory):
    # a checkpoint after every line of the log, so that trainings are resumed in their middle
    often = partial(train_fold, seconds_between_checkpoints=0)
    with mock.patch.object(crossvalidation, "train_fold", often):
        yield Trial(request.param, inputs, tmp_path_factory.mktemp("work") / request.param)


# failures of each command in `make test` and in `make test-slow`: 200 together; a report takes long
FEW = {"prepare": 4, "train": 4, "compare": 2, "predict": 4, "report": 1}
MANY = {"prepare": 50, "train": 50, "compare": 50, "predict": 40, "report": 10}


def spread(num_changes, num_wanted, offset=0):
    """Numbers of changes, evenly spread; from the first again if there are fewer than wanted."""
    return [(round(turn * num_changes / num_wanted) + offset) % num_changes for turn in range(num_wanted)]


def test_a_command_makes_changes_that_can_fail(trial):
    assert trial.num_changes >= 10


def test_the_layer_fails_where_it_is_told_to(tmp_path):
    # otherwise nothing below could fail
    with injected(Faults(tmp_path, at=1)), pytest.raises(OSError, match="No space left"):
        (tmp_path / "file").write_text("abcd")
    assert (tmp_path / "file").read_text() == "ab"
    assert killed_at(Faults(tmp_path, at=0, error=KILL), lambda: (tmp_path / "b").mkdir()) == -9
    assert not (tmp_path / "b").exists()


def test_a_disk_that_fails_at_some_changes_costs_nothing(trial):
    for turn, number in enumerate(spread(trial.num_changes, FEW[trial.command], offset=1)):
        trial.fail_at(number, error=ERRORS[turn % len(ERRORS)], lasting=turn % 2 == 0)


@pytest.mark.slow
def test_a_disk_that_fails_at_any_change_costs_nothing(trial):
    assert sum(MANY.values()) == 200
    for turn, number in enumerate(spread(trial.num_changes, MANY[trial.command])):
        trial.fail_at(number, error=ERRORS[turn % len(ERRORS)], lasting=turn % 2 == 0)


def test_a_kill_at_some_changes_costs_nothing(trial):
    if trial.command == "report":
        pytest.skip("a report takes long: see the slow test")
    for number in spread(trial.num_changes, 3, offset=2):
        trial.kill_at(number)


@pytest.mark.slow
def test_a_kill_at_any_change_costs_nothing(trial):
    """One hundred kills each of prepare, train and compare; fewer of commands that take longer."""
    num_kills = {"predict": 40, "report": 10}.get(trial.command, 100)
    codes = [trial.kill_at(number) for number in spread(trial.num_changes, num_kills)]
    assert codes.count(-9) >= 0.9 * num_kills


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space", "temp"), OSError(28, "No space"), OSError(28, "No space", "a", None, "b")],
)
def test_an_error_names_the_file_and_not_its_temporary_name(error, tmp_path):
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space: '.*/file'$"), atomic_write(tmp_path / "file"):
        raise error


# modules that write on their own: a log that grows line by line, and a lock
# log: appends lines. onnx: its caller is inside of atomic_write
OWN_WRITERS = {"training/log.py", "integrations/onnx.py", "locks.py", "paths.py"}
# nnU-Net's messages of all attempts
APPENDS = {"nnunet/command.py": ["messages.open('ab')"]}
WRITES = {"write_text", "write_bytes", "savefig", "savez_compressed", "write_table"}


def unguarded_writes(source):
    """Lines that write a file and are not inside of `with atomic_write(...)`, and those of `save_file`.

    safetensors' save_file has temporary files of its own, which a killed process leaves.
    """
    lines = []

    def visit(node, guarded):
        if isinstance(node, ast.With):
            guarded = guarded or any("atomic_write" in ast.unparse(item) for item in node.items)
        if isinstance(node, ast.Call):
            name, _, text = ast.unparse(node).partition("(")
            name = name.rpartition(".")[2]
            # a plain name is a function of `paths`, which is atomic
            is_method = isinstance(node.func, ast.Attribute)
            opens = name == "open" and text.startswith(("'w", "'x", "'a"))
            is_write = is_method and (name in WRITES or opens)
            if name == "save_file" or (is_write and not guarded):
                lines.append(ast.unparse(node))
        for child in ast.iter_child_nodes(node):
            visit(child, guarded)

    visit(ast.parse(source), False)
    return lines


def test_every_file_is_written_through_the_atomic_writer():
    root = Path(semidice.__file__).parent
    found = {
        str(path.relative_to(root)): unguarded_writes(path.read_text())
        for path in root.rglob("*.py")
        if str(path.relative_to(root)) not in OWN_WRITERS
    }
    assert {path: lines for path, lines in found.items() if lines} == APPENDS


def test_an_unguarded_write_is_found():
    assert unguarded_writes("path.write_text('a')")
    assert unguarded_writes("path.open('w')")
    assert unguarded_writes("with atomic_write(path) as temp_path:\n    save_file({}, temp_path)")
    assert not unguarded_writes("with atomic_write(path) as temp_path:\n    temp_path.write_text('a')")
