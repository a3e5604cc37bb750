"""Progress is a bar in a terminal and plain lines in a pipe; commands run as processes of their own."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from rich.table import Table

from semidice import console as console_module
from semidice.console import counting_bar, new_console, print_line, say, training_bars, waiting

# commands whose lines may follow each other after SECONDS; one process for all, because its imports take long
RUN = """
import json
import sys
from semidice import __main__, console

console.SECONDS_BETWEEN_LINES, *commands = json.loads(sys.argv[1])
for command in commands:
    sys.argv[1:] = command
    print("$", command[0], flush=True)
    try:
        __main__.main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""
TINY = [
    *("--set", "schedule.epochs=3"),
    *("--set", "validation.every=2", "--set", "data.num_folds=2", "--set", "batch_size=4"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, size=(32, 32), num_raters=2)
    return path


def program(*commands, seconds):
    texts = [[str(argument) for argument in command] for command in commands]
    return [sys.executable, "-c", RUN, json.dumps([seconds, *texts])]


def train_arguments(dataset, out):
    return ["train", "quick", *TINY, "--set", f"data.dataset={dataset}", "-o", out, "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def piped(dataset, tmp_path_factory):
    """The lines that each command writes into a pipe, without a pause between lines."""
    root = tmp_path_factory.mktemp("piped")
    run, grid = root / "run", root / "grid.yaml"
    grid.write_text("recipe: quick\nvariants: {first: {}, second: {loss.form: product}}\n")
    write_images(root / "images")
    commands = [
        train_arguments(dataset, run),
        ["compare", dataset, grid, *TINY, "-o", root / "out", "--accelerator", "cpu"],
        ["prepare", "phantom", root / "data"],
        ["predict", run, root / "images", "-o", root / "predictions"],
        ["report", run, "-o", root / "report.html"],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(
        program(*commands, seconds=0.001), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^\$ (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    return {name: text.splitlines() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_a_piped_training_prints_each_epoch_with_loss_rate_dice_and_remaining_time(piped):
    lines = piped["train"]
    assert lines[0] == "quick: fold 0: training"
    epochs = [line for line in lines if " epoch " in line]
    assert [re.search(r"fold (\d) epoch (\d)/3", line).groups() for line in epochs] == [
        (fold, epoch) for fold in "01" for epoch in "123"
    ]
    for line in epochs:
        assert re.match(
            r"quick: fold \d epoch \d/3  loss \d\.\d{3}  .*lr \S+  .*  \d+:\d\d:\d\d left$", line
        ), line
    # validated after the second and the last epoch; the scores stay until the next ones
    assert [" Dice " in line for line in epochs[:3]] == [False, True, True]
    assert any(line.startswith("quick: fold 1: predicting") for line in lines)


def test_by_default_a_piped_training_prints_at_once_and_then_every_30_seconds(dataset, tmp_path):
    arguments = program(train_arguments(dataset, tmp_path / "run"), seconds=30.0)
    assert console_module.SECONDS_BETWEEN_LINES == 30.0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "$ train\n"
        assert process.stdout.readline() == "quick: fold 0: training\n"
        assert process.poll() is None
        later = process.stdout.read()
    assert process.returncode == 0
    # the whole training is shorter, so no epoch is due
    assert " epoch " not in later


def test_a_piped_comparison_prints_the_epochs_and_the_end_of_each_variant(piped):
    lines = piped["compare"]
    for name in ("first", "second"):
        assert len([line for line in lines if re.match(rf"{name}: fold \d epoch \d/3  loss ", line)]) == 6
        assert f"{name}: 2 folds finished" in lines


@pytest.mark.parametrize(
    ("name", "start"),
    [("prepare", "preparing phantom: "), ("predict", "predicting case"), ("report", "report: ")],
)
def test_other_piped_commands_print_lines_too(name, start, piped):
    assert any(line.startswith(start) for line in piped[name]), piped[name]


def write_images(folder):
    folder.mkdir()
    for number in range(6):
        values = np.random.default_rng(number).integers(0, 255, (64, 64), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"case{number}.png")


def terminal_text(arguments, columns):
    """What a command writes to a pseudo-terminal of this width."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        program(arguments, seconds=0.001), stdout=follower, stderr=follower, stdin=follower, env=environment
    )
    os.close(follower)
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    # Linux reports the end of a pseudo-terminal as an error
    except OSError:
        pass
    os.close(leader)
    assert process.wait() == 0, b"".join(parts).decode()
    return b"".join(parts).decode()


def test_a_terminal_of_80_columns_shows_a_bar_with_the_loss_and_no_lines(dataset, tmp_path):
    text = terminal_text(train_arguments(dataset, tmp_path / "run"), columns=80)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    # name, bar, share, remaining time, state
    assert re.search(r"quick ━+.* \d+% \S+ fold \d epoch \d/3  loss \d\.\d{3}", plain)
    assert " left" not in plain


class TestLines:
    @pytest.fixture
    def console(self):
        return Console(file=io.StringIO(), width=200)

    def test_an_item_that_takes_long_still_prints_lines(self, console, monkeypatch):
        monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0.05)
        with counting_bar(console, doing="preparing", unit="scans") as progress:
            bar = progress.add_task("kidney", total=4)
            progress.advance(bar)
            time.sleep(0.5)
        lines = console.file.getvalue().splitlines()
        assert len(lines) >= 3
        for line in lines:
            assert re.fullmatch(r"preparing kidney: 1/4 scans, 0:00:0\d left", line)

    def test_a_short_command_prints_none(self, console):
        with counting_bar(console, doing="preparing", unit="scans") as progress:
            progress.add_task("kidney", total=4)
        assert console.file.getvalue() == ""

    def test_waiting_is_said_too(self, console, monkeypatch):
        monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0.05)
        with waiting(console, "measuring"):
            time.sleep(0.3)
        assert console.file.getvalue().startswith("measuring, 0:00:00 so far\n")

    def test_a_training_is_repeated_only_if_it_says_so(self, console, monkeypatch):
        monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0.05)
        with training_bars(console, names=["quick"]) as progress:
            task = progress.add_task("quick", total=None, status="fold 0", left="", repeats=False)
            time.sleep(0.3)
            assert console.file.getvalue() == ""
            print_line(progress, task)
            assert console.file.getvalue() == "quick: fold 0\n"
            progress.update(task, status="fold 0: predicting", repeats=True)
            time.sleep(0.3)
        assert console.file.getvalue().count("quick: fold 0: predicting\n") >= 2

    def test_lines_wait_for_their_time(self, console):
        with training_bars(console, names=["quick"]) as progress:
            task = progress.add_task("quick", total=None, status="fold 0", left="", repeats=False)
            print_line(progress, task, now=True)
            print_line(progress, task)
        assert console.file.getvalue() == "quick: fold 0\n"


def test_names_with_brackets_and_colons_are_printed_as_they_are(capsys):
    console = new_console()
    console.width = 200
    table = Table(title="[x] :b: [/red]")
    table.add_row("[/] :smile:")
    console.print(table)
    console.print("a [bold]name[/bold]")
    with waiting(console, "reading [/] :b:"):
        say(console, "[/] :b:")
    printed = capsys.readouterr().out
    for name in ("[x] :b: [/red]", "[/] :smile:", "a [bold]name[/bold]", "[/] :b:"):
        assert name in printed


def test_a_spinner_shows_a_name_as_it_is():
    stream = io.StringIO()
    with waiting(Console(file=stream, force_terminal=True, width=80), "reading [/] :b:"):
        pass
    assert "reading [/] :b:" in stream.getvalue()
