"""Every command shown in a page, a shipped recipe, the Makefile or a help text is valid."""

import re
from pathlib import Path

import pytest
from doc_commands import (
    ROOT,
    Command,
    commands_in_comments,
    commands_in_makefile,
    commands_in_page,
    problem,
)
from typer.main import get_command

from semidice.cli import app

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
SHIPPED = list((ROOT / "src" / "semidice" / "recipes" / "shipped").glob("*.yaml"))


def commands_in(path: Path):
    text = path.read_text()
    if path.suffix == ".md":
        return commands_in_page(text)
    return commands_in_makefile(text) if path.name == "Makefile" else commands_in_comments(text)


@pytest.mark.parametrize("path", [*PAGES, *SHIPPED, ROOT / "Makefile"], ids=lambda path: path.name)
def test_every_command_in_a_file_is_valid(path):
    problems = {command.text: problem(command) for command in commands_in(path)}
    assert {text: message for text, message in problems.items() if message} == {}


def test_the_example_in_the_help_of_a_command_is_valid():
    commands = list(get_command(app).commands.values())
    # the commands of a group, such as nnunet, come after the group itself
    for command in commands:
        if hasattr(command, "commands"):
            commands += command.commands.values()
            continue
        (example,) = re.findall(r"Example: \*\*(.*?)\*\*", command.help)
        assert problem(Command(example, complete=True)) is None


def test_commands_are_found_in_blocks_and_in_backticks():
    page = """
Text with `semidice check` and `semidice evaluate RUN
--metric dice_score`, `dice_loss` and `make test`.

```
semidice prepare folder my_scans data   # a comment
    make bench
```

```python
semidice = 1
```
"""
    assert commands_in_page(page) == [
        ("semidice prepare folder my_scans data   # a comment", True),
        ("make bench", True),
        ("semidice check", False),
        ("semidice evaluate RUN --metric dice_score", False),
        ("make test", False),
    ]
    for page, number in (("README.md", 8), ("docs/start.md", 15)):
        shown = commands_in_page((ROOT / page).read_text())
        assert sum(command.complete for command in shown) >= number, page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("semidice reproduce qubiq_labels --data DIR --tasks kidney", "NoSuchOption"),
        ("semidice reproduce qubiq_labels --folds two", "BadParameter"),
        ("semidice check", "MissingParameter"),
        ("semidice agreement data", "no command agreement"),
        ("semidice train quick --set loss.fom=min", "did you mean loss.form"),
        ("semidice --hlp", "no command"),
        ("make tests", "no target tests"),
        ("python benchmarks/bench_loss.py --devise cuda", "no option --devise"),
        ("python benchmarks/bench_lost.py", "no script"),
    ],
)
def test_a_wrong_command_in_a_block_is_detected(text, message):
    assert message in problem(Command(text, complete=True))


def test_a_command_in_backticks_may_omit_arguments_but_may_not_have_wrong_options():
    assert problem(Command("semidice check", complete=False)) is None
    assert problem(Command("semidice evaluate --metric", complete=False)) is None
    assert "no such option: --tasks" in problem(Command("semidice reproduce --tasks", complete=False))
    assert "no such option" in problem(Command("--set loss.fom=min", complete=False))
