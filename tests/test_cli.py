"""The command line as a user sees it."""

import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from prepared import make_prepared
from trained import recipe_of
from typer.testing import CliRunner

import semidice
from semidice import extras
from semidice.cli import app

COMMANDS = (
    "demo",
    "prepare",
    "check",
    "train",
    "evaluate",
    "calibrate",
    "predict",
    "export",
    "compare",
    "report",
    "reproduce",
)


def run(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "semidice", *map(str, arguments)]
    # one thread, because several tests may run at the same time; 200 columns keep each message on one line
    settings = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=settings)


def test_the_error_names_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("a file")
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "taken")])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert f"semidice demo: {tmp_path / 'taken'}: File exists" in done.stderr


def test_version_and_help(tmp_path):
    assert run("--version", cwd=tmp_path).stdout.strip() == f"semidice {semidice.__version__}"
    shown = run("--help", cwd=tmp_path).stdout
    assert all(f" {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_a_worked_example(command):
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert f"Example: semidice {command}" in " ".join(shown.output.split())


def test_help_takes_less_than_half_a_second_of_cpu_time(tmp_path):
    def cpu_seconds():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(3):
        start = cpu_seconds()
        assert run("--help", cwd=tmp_path).returncode == 0
        seconds.append(cpu_seconds() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments, tmp_path):
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("missing", "extra"), [("monai.metrics", "monai"), ("monai", "monai"), ("pyarrow", "train")]
)
def test_a_missing_package_is_one_line_that_names_its_extra(missing, extra, tmp_path):
    code = f"""
from semidice.cli import reported
with reported("evaluate"):
    raise ModuleNotFoundError("No module", name={missing!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    package = missing.partition(".")[0]
    message = f"semidice evaluate: needs {package}; run: pip install 'semidice[{extra}]'"
    assert done.stderr.splitlines()[0] == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "folder", "nowhere", "data"), "there is no folder nowhere"),
        (("prepare", "folder", "nowhere"), "folder needs RAW_DIR OUT_DIR; got 1 folders"),
        (("prepare", "phantom", "data", "--size", "large"), "--size must be ROWSxCOLUMNS"),
        (("check", "nowhere"), "there is no folder nowhere"),
        (
            ("check", "."),
            "so it is not a prepared dataset: make one from raw images with `semidice prepare folder . /",
        ),
        (
            ("train", "quik", "-o", "run"),
            "there is neither a file nor a shipped recipe quik; did you mean quick?",
        ),
        (
            ("train", "quick", "-o", "run"),
            "data.dataset: missing; give it in the file, or with --set data.dataset=",
        ),
        (("train", "quick", "--set", "loss.fom=min", "-o", "run"), "did you mean loss.form?"),
        (("train", "quick", "--set", "data.dataset=nowhere", "-o", "run"), "there is no folder"),
        (("evaluate", "nowhere"), "nowhere is not a run folder"),
        (("predict", "nowhere", "x.png", "-o", "out"), "nowhere is not a run folder"),
        (
            ("train", "labels", "-o", "run"),
            "labels is a grid of recipes: run `semidice compare DATASET labels",
        ),
        (("compare", "nowhere", "labels", "-o", "out"), "there is no folder"),
        (
            ("compare", "nowhere", "label", "-o", "out"),
            "grid or recipe label: did you mean labels? grids are bandwidth, calibration_losses,",
        ),
        (("compare", "nowhere", "labls", "-o", "out"), "did you mean labels?"),
        (("compare", "nowhere", "qick", "-o", "out"), "did you mean quick? grids are "),
        (("report", "nowhere"), "there is no folder nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_error_is_one_message_and_exit_code_1(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert message in done.stderr
    assert done.stderr.startswith(f"semidice {arguments[0]}: ")
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_separate_process_shows_no_traceback(tmp_path):
    done = run("train", "quick", "--set", "data.dataset=nowhere", "-o", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no folder" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_an_interrupt_while_the_command_line_is_imported_is_one_line(tmp_path):
    code = """
import sys
from importlib.abc import MetaPathFinder
class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from semidice.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 130
    assert done.stderr == "semidice: interrupted\n"


@pytest.mark.parametrize("module", ["torch", "semidice.training.command"])
def test_an_interrupt_while_a_command_is_imported_is_one_line(tmp_path, module):
    code = f"""
import sys
from importlib.abc import MetaPathFinder
class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from semidice.__main__ import main
sys.argv = ["semidice", "train", "quick", "--set", "data.dataset=x"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 130
    assert done.stderr.startswith("semidice train: interrupted; the same command with --resume continues")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 36000000000 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
    ],
    ids=["CPU", "GPU", "Python"],
)
def test_out_of_memory_is_one_line_with_advice(error, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("semidice.recipes.read_recipe", fail)
    done = CliRunner().invoke(app, ["train", "quick"])
    assert done.exit_code == 1
    assert done.output.startswith("semidice train: there is not enough memory: ")


def test_the_name_of_a_method_is_printed_as_it_is(tmp_path):
    dataset = make_prepared(tmp_path / "data")
    name = "[x] :b: [/red]"
    recipe = recipe_of(dataset).model_dump(mode="json") | {"name": name, "batch_size": 2}
    recipe["schedule"]["epochs"] = 1
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["train", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "run"), "--accelerator", "cpu"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert f"{name}: scores of the held-out cases" in done.output


@pytest.mark.parametrize(
    ("package", "command"),
    [("mlflow", ["train", "quick", "--log", "mlflow"]), ("wandb", ["train", "quick", "--log", "wandb"])],
)
def test_a_logger_without_its_package_is_one_line_before_anything_is_read(monkeypatch, package, command):
    found = extras.importlib.util.find_spec
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert done.output == f"semidice train: needs {package}; run: pip install 'semidice[{package}]'\n"
