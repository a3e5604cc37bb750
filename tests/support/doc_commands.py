"""Commands that pages show, checked against the command line, the Makefile and the options of scripts."""

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from typer.main import get_command

from semidice.cli import app
from semidice.recipes import read_recipe

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ("semidice", "make", "python")


class Command(NamedTuple):
    """A command in a text. complete: it stands in a block of code, so nothing may be missing."""

    text: str
    complete: bool


def commands_in_page(text):
    """Commands in the code blocks of a Markdown page, and in its backticks."""
    # all blocks are matched, so that the end of a Python block is not taken for the start of another one
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    shell = [block for language, block in blocks if language in ("", "bash", "sh", "console")]
    lines = [line.strip().removeprefix("$ ") for block in shell for line in block.splitlines()]
    commands = [Command(line, complete=True) for line in lines if line.split(" ")[0] in PROGRAMS]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    commands += [
        Command(span, complete=False)
        for span in spans
        if span.split(" ")[0] in (*PROGRAMS, "--set") and " " in span
    ]
    return commands


def commands_in_comments(text):
    """Commands in the comments of a YAML file."""
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    return [Command(line, complete=True) for line in lines if line.startswith("semidice ")]


def commands_in_makefile(text):
    lines = [line.strip().replace("$(BIN)/", "") for line in text.splitlines() if line.startswith("\t")]
    return [Command(line, complete=True) for line in lines if line.split(" ")[0] in ("semidice", "python")]


def problem(command):
    """What is wrong with the command; None if it would be accepted."""
    program, *arguments = shlex.split(command.text, comments=True)
    if program == "make":
        return _make_problem(arguments)
    if program == "python":
        return _python_problem(arguments)
    if program == "--set":
        arguments = [program, *arguments]
    elif not arguments or arguments[0].startswith("-"):
        return None if arguments in (["--help"], ["--version"]) else f"no command in {command.text!r}"
    else:
        group, rest = get_command(app), arguments
        # a command, or one of a group such as nnunet
        while hasattr(group, "commands"):
            if not rest or rest[0] not in group.commands:
                return f"no command {' '.join(arguments)}; there are {', '.join(group.commands)}"
            group, rest = group.commands[rest[0]], rest[1:]
        found = _semidice_problem(group, rest, command.complete)
        if found:
            return found
    return _override_problem(arguments)


def _semidice_problem(command, arguments, complete):
    if complete:
        try:
            command.make_context(command.name, list(arguments))
        # typer may bring its own copy of click, so its exceptions cannot be named here
        except Exception as error:
            return f"{command.name}: {type(error).__name__}: {getattr(error, 'message', error)}"
        return None
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [part for part in arguments if part.startswith("-") and part not in known]
    return f"{command.name}: no such option: {', '.join(unknown)}" if unknown else None


def _override_problem(arguments):
    overrides = [value for name, value in pairwise(arguments) if name == "--set"]
    overrides = [value.replace("=...", "=PATH") for value in overrides if value != "KEY=VALUE"]
    teacher = ["teacher.run=TEACHER"] if any("teacher." in override for override in overrides) else []
    try:
        read_recipe("quick", ["data.dataset=DATASET", *teacher, *overrides])
    except ValueError as error:
        return str(error)
    return None


def _make_problem(arguments):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    unknown = [target for target in arguments if target not in targets and not target.isupper()]
    return f"the Makefile has no target {', '.join(unknown)}" if unknown else None


def _python_problem(arguments):
    script = next((part for part in arguments if part.endswith(".py")), None)
    if script is None:
        return None
    if not (ROOT / script).is_file():
        return f"no script {script}"
    known = {"--help"}
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            known |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    unknown = [part for part in arguments if part.startswith("--") and part not in known]
    return f"{script} has no option {', '.join(unknown)}" if unknown else None
