"""The command line as a user meets it."""

import subprocess
import sys

from PIL import Image

import semidice


def run(*arguments, cwd):
    command = [sys.executable, "-m", "semidice", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_the_demo_prints_where_each_loss_lands_and_draws_two_figures(tmp_path):
    done = run("demo", "--steps", 300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (errors,) = [line for line in done.stdout.splitlines() if "mean error" in line]
    soft_dice, *ours = (float(cell) for cell in errors.strip("│ \n").split("│")[1:])
    assert soft_dice > 0.2
    assert max(ours) < 1e-3
    for name in ("landing.png", "cftl.png"):
        assert f"demo_out/{name}" in done.stdout
        with Image.open(tmp_path / "demo_out" / name) as figure:
            assert min(figure.size) > 500
    assert {path.name for path in (tmp_path / "demo_out").iterdir()} == {"landing.png", "cftl.png"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    done = run("demo", "--steps", 1, "--out", tmp_path / "taken", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot write to" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help(tmp_path):
    assert run("--version", cwd=tmp_path).stdout.strip() == f"semidice {semidice.__version__}"
    assert "demo" in run("--help", cwd=tmp_path).stdout
