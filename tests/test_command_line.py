"""The command line: light help, one message for what a user can mend, a traceback for a bug."""

import errno
import inspect
import json
import signal

import pytest
import torch
from prepared import make_prepared
from start import refused, semidice
from trained import recipe_of
from typer.testing import CliRunner

from semidice import __version__
from semidice.cli import app

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]
HIDDEN = """
import sys
from importlib.abc import MetaPathFinder
class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith({name!r}):
            raise {error}
sys.meta_path.insert(0, Finder())
from semidice.__main__ import main
sys.argv = ["semidice", *{arguments!r}]
main()
"""
TRAIN = ["train", "quick", "--set", "data.dataset=x"]


def test_version_and_help(start, tmp_path):
    assert semidice("--version").out.strip() == f"semidice {__version__}"
    shown = start("-m", "semidice", "--help", cwd=tmp_path).end().out
    assert {"demo", "prepare", "check", "train", "predict", "compare"} <= set(COMMANDS)
    assert all(f" {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_a_worked_example(command):
    assert f"Example: semidice {command}" in " ".join(semidice(command, "--help").out.split())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments, start, tmp_path):
    code = f"""
import sys
from semidice.__main__ import main
sys.argv = ["semidice", *{arguments}]
try:
    main()
except SystemExit as stop:
    assert stop.code == 0
print([name for name in ("torch", "numpy", "matplotlib") if name in sys.modules])
"""
    assert start("-c", code, cwd=tmp_path).end().out.splitlines()[-1] == "[]"


def test_an_error_in_a_process_is_one_line_and_nothing_is_written(start, tmp_path):
    command = ["-m", "semidice", "train", "quick", "--set", "data.dataset=nowhere", "-o", "run"]
    ended = start(*command, cwd=tmp_path).end()
    refused(ended, "there is no", "nowhere", "semidice prepare")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("semidice train: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "not enough memory"),
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "file"), "free some space"),
        (ModuleNotFoundError("No module", name="no_such_package"), "pip install 'semidice[train]'"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, words, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("semidice.recipes.read_recipe", fail)
    refused(semidice(*TRAIN), "semidice train: ", words)
    # a developer sees where it comes from
    monkeypatch.setenv("SEMIDICE_DEBUG", "1")
    with pytest.raises(type(error)):
        semidice(*TRAIN)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes"), ValueError("x"), ModuleNotFoundError("x", name="numpy.x")]
)
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("semidice.recipes.read_recipe", fail)
    done = CliRunner().invoke(app, TRAIN)
    assert done.exception is error
    assert done.exc_info[2].tb_next is not None


def test_a_bug_inside_a_training_step_shows_its_traceback_in_the_terminal(start, tmp_path):
    make_prepared(tmp_path / "data", truth=False)
    code = """
import sys
from semidice.losses.segmentation import SegmentationLoss
def terms(self, *arguments, **options):
    raise RuntimeError("a bug of the loss")
SegmentationLoss.terms = terms
from semidice.__main__ import main
sys.argv = ["semidice", "train", "quick", "--set", "data.dataset=data", "--set", "data.num_folds=2"]
sys.argv += ["--set", "batch_size=2", "-o", "run", "--accelerator", "cpu"]
main()
"""
    ended = start("-c", code, cwd=tmp_path).end()
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "in terms" in ended.err
    assert ended.err.rstrip().endswith("RuntimeError: a bug of the loss")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("typer", [], "semidice: interrupted"),
        ("torch", TRAIN, "semidice train: interrupted; the same command with --resume continues"),
        ("semidice.training.command", TRAIN, "the same command with --resume continues"),
    ],
)
def test_an_interrupt_while_a_module_is_imported_is_one_line(start, tmp_path, name, arguments, words):
    code = HIDDEN.format(name=name, error="KeyboardInterrupt", arguments=arguments)
    ended = start("-c", code, cwd=tmp_path).end()
    assert ended.code == 130
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_the_command_line_without_its_extra_names_it(start, tmp_path):
    error = "ModuleNotFoundError(name, name='typer')"
    ended = start("-c", HIDDEN.format(name="typer", error=error, arguments=[]), cwd=tmp_path).end()
    refused(ended, "the command line needs typer", "pip install 'semidice[train]'")


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_logger_without_its_package_is_one_line_before_anything_is_read(monkeypatch, package):
    import importlib.util

    found = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == package else found(name, *rest)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", hidden)
    refused(semidice("train", "quick", "--log", package), f"needs {package}", f"'semidice[{package}]'")


def test_a_name_that_is_not_utf_8_is_refused_before_the_work(start, tmp_path):
    ended = start(
        "-m", "semidice", "predict", "run", b"\xff.png".decode(errors="surrogateescape"), "-o", "out"
    )
    refused(ended.end(), "not UTF-8", "rename it")


def test_the_name_of_a_method_is_printed_as_it_is(tmp_path):
    dataset = make_prepared(tmp_path / "data")
    name = "[x] :b: [/red]"
    recipe = recipe_of(dataset).model_dump(mode="json") | {"name": name, "batch_size": 2}
    recipe["schedule"]["epochs"] = 1
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = semidice("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", "--accelerator", "cpu")
    assert f"{name}: scores of the held-out cases" in done.out


def test_no_command_handles_hang_ups():
    # so that `nohup semidice ...` goes on; these tests may run by nohup too
    assert signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, signal.SIG_IGN)
    assert "SIGHUP" not in inspect.getsource(inspect.getmodule(app.registered_commands[0].cls))
