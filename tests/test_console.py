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
from start import PATIENCE_S, Started

from semidice import console as console_module
from semidice.console import Bar, Progress, new_console, progress_bar, say

# several commands in one process, because its imports take long; each with the seconds between its lines
RUN = """
import json
import sys
from semidice import __main__, console

for seconds, *command in json.loads(sys.argv[1]):
    console.SECONDS_BETWEEN_LINES = seconds or console.SECONDS_BETWEEN_LINES
    sys.argv[1:] = command
    print("$", flush=True)
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


def program(*commands):
    texts = [[seconds, *map(str, arguments)] for seconds, *arguments in commands]
    return [sys.executable, "-c", RUN, json.dumps(texts)]


def train_arguments(dataset, out):
    return ["train", "quick", *TINY, "--set", f"data.dataset={dataset}", "-o", out, "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def piped(dataset, tmp_path_factory):
    """Lines of commands in a pipe; only the first has the default seconds between its lines."""
    root = tmp_path_factory.mktemp("piped")
    run, grid = root / "run", root / "grid.yaml"
    grid.write_text("recipe: quick\nvariants: {first: {}, second: {loss.form: product}}\n")
    write_images(root / "images")
    commands = {
        "default": (None, *train_arguments(dataset, root / "default")),
        "train": (0.001, *train_arguments(dataset, run)),
        "compare": (0.001, "compare", dataset, grid, *TINY, "-o", root / "out", "--accelerator", "cpu"),
        "prepare": (0.001, "prepare", "phantom", root / "data"),
        "predict": (0.001, "predict", run, root / "images", "-o", root / "predictions"),
        "report": (0.001, "report", run, "-o", root / "report.html"),
    }
    process = Started(program(*commands.values()), env={"COLUMNS": "200", "FORCE_COLOR": ""}, cwd=None)
    ended = process.end()
    assert ended.code == 0, ended.err
    parts = ended.out.split("$\n")[1:]
    return {name: part.splitlines() for name, part in zip(commands, parts, strict=True)}


def test_a_piped_training_prints_its_start_at_once_and_then_epoch_loss_rate_dice_and_time_left(piped):
    assert console_module.SECONDS_BETWEEN_LINES == 30.0
    assert piped["default"][0].startswith("quick: fold 0: training")
    steps = [line for line in piped["train"] if " epoch " in line]
    assert steps, piped["train"]
    for line in steps:
        assert re.match(r"quick: fold [01] epoch [123]/3  loss .* images/s, \d:\d\d:\d\d left$", line), line
    assert re.search(r"  loss \d\.\d{3}  .*lr \S+ ", " ".join(steps))


def test_a_piped_comparison_prints_the_start_and_the_end_of_each_variant(piped):
    lines = piped["compare"]
    for name in ("first", "second"):
        assert any(line.startswith(f"{name}: fold 0: training") for line in lines)
        assert any(line.startswith(f"{name}: 2 folds finished") for line in lines)


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


@pytest.fixture(scope="module")
def shown(dataset, tmp_path_factory):
    """What a training and a prediction write to a pseudo-terminal of 80 columns."""
    root = tmp_path_factory.mktemp("shown")
    write_images(root / "images")
    commands = [
        (0.001, *train_arguments(dataset, "run")),
        (0.001, "predict", "run", "images", "-o", "predictions"),
    ]
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        program(*commands), stdout=follower, stderr=follower, stdin=follower, env=environment, cwd=root
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
    text = b"".join(parts).decode()
    assert process.wait() == 0, text
    _, trained, predicted = text.split("$\r\n")
    return trained, predicted


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_a_bar_with_the_loss_and_no_lines(shown):
    trained, _ = shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", trained)
    # name, bar, share, remaining time, state
    assert re.search(r"quick ━+.* \d+%\s+\S+ left\s+fold \d epoch \d/3  loss \d\.\d{3}", plain)
    assert "quick: fold" not in plain


@pytest.mark.slow
def test_in_a_terminal_a_command_shows_bars_and_then_the_next_step_of_a_pipe(shown, piped):
    _, predicted = shown
    # a bar hides the cursor while it is drawn, and shows it again at the end
    assert predicted.rindex("\x1b[?25l") < predicted.rindex("\x1b[?25h")
    assert "inputs" in predicted
    assert predicted.splitlines()[-1].endswith("next: semidice report run -o report.html")
    assert re.search(r"next: semidice report \S+/run -o report.html$", piped["predict"][-1])


def printed(console, text):
    """Wait until the text was printed."""
    waited_until = time.monotonic() + PATIENCE_S
    while text not in console.file.getvalue():
        assert time.monotonic() < waited_until, console.file.getvalue()
        time.sleep(0.01)


class TestLines:
    @pytest.fixture
    def console(self, monkeypatch):
        monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0.05)
        return Console(file=io.StringIO(), width=200)

    def test_an_item_that_takes_long_still_prints_lines(self, console):
        with progress_bar(console, "preparing kidney", "scans", total=4) as bar:
            bar.advance()
            printed(console, "preparing kidney: 1/4 scans, 0:00:00 left\npreparing kidney: 1/4 scans, ")

    def test_work_of_unknown_size_says_how_long_it_takes(self, console):
        with progress_bar(console, "measuring"):
            printed(console, "measuring: 0:00:00 so far\n")

    def test_of_several_bars_the_one_that_changed_is_printed(self, console):
        with Progress(console) as progress:
            first, second = progress.bar("first"), progress.bar("second")
            first.status = "fold 0"
            printed(console, "second: ")
            first.status = "fold 1"
            printed(console, "first: fold 1")
            second.status = "fold 0"
            printed(console, "second: fold 0")

    def test_lines_wait_for_their_time(self, console, monkeypatch):
        monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 3600.0)
        with Progress(console) as progress:
            bar = progress.bar("quick")
            bar.status = "fold 0"
            progress.print_line(bar)
            bar.status = "fold 1"
        assert console.file.getvalue() == "quick: fold 0, 0:00:00 so far\n"


def test_the_time_left_does_not_count_what_an_earlier_command_did():
    bar = Bar("quick", total=100, done=60, before=50, since=time.monotonic() - 10)
    assert (bar.count, bar.left) == ("60%", "0:00:40 left")


def test_names_with_brackets_and_colons_are_printed_as_they_are(capsys):
    console = new_console()
    console.width = 200
    table = Table(title="[x] :b: [/red]")
    table.add_row("[/] :smile:")
    console.print(table)
    console.print("a [bold]name[/bold]")
    with progress_bar(console, "reading [/] :b:"):
        say(console, "[/] :b:")
    printed = capsys.readouterr().out
    for name in ("[x] :b: [/red]", "[/] :smile:", "a [bold]name[/bold]", "[/] :b:"):
        assert name in printed


def test_a_bar_shows_a_name_as_it_is():
    stream = io.StringIO()
    with progress_bar(Console(file=stream, force_terminal=True, width=80), "reading [/] :b:"):
        pass
    assert "reading [/] :b:" in stream.getvalue()
