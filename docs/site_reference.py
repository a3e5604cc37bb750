"""Pages of the site that are made from the code: the reference of public names, and that of the commands."""

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from typer.main import get_command

from semidice.cli import app

# packages with public names, in the order of the page, and what they are for
PACKAGES = {
    "losses": "Losses that have their minimum at the soft label",
    "labels": "Raters' masks to soft labels",
    "calibration": "Calibrators, kernel density, key points",
    "decisions": "Probabilities to masks, volumes and intervals",
    "metrics": "Scores of each case, and paired tests",
    "overlap": "Soft tp, fp, fn and the Tversky index",
    "kernels": "Switch between definition and kernels",
}


def integration_modules() -> list[str]:
    """The public modules of `semidice.integrations`, by name."""
    import pkgutil

    import semidice.integrations

    found = pkgutil.iter_modules(semidice.integrations.__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def api_pages() -> dict[str, str]:
    """The pages of the API reference in reStructuredText, by file name; index.rst lists the others."""
    pages = {f"{name}.rst": _package_page(f"semidice.{name}", title) for name, title in PACKAGES.items()}
    for name in integration_modules():
        page = _integration_page(f"semidice.integrations.{name}")
        if page is not None:
            pages[f"integrations_{name}.rst"] = page
    pages["index.rst"] = "\n".join(
        [
            *_heading("Reference"),
            "Every public name, from the docstrings. The names of ``losses``, ``labels``, ``calibration``,",
            "``overlap`` and ``kernels`` can be imported from ``semidice`` itself.",
            "",
            ".. toctree::",
            "   :maxdepth: 1",
            "",
            *(f"   {name.removesuffix('.rst')}" for name in pages),
            "   commands",
            "",
        ]
    )
    return pages


def _heading(title: str, mark: str = "=") -> list[str]:
    return [title, mark * len(title), ""]


def _package_page(module_name: str, title: str) -> str:
    module = importlib.import_module(module_name)
    names = list(module.__all__)
    return "\n".join([*_heading(f"{module_name}"), f"{title}.", "", *_members(module, names)])


def _integration_page(module_name: str) -> str | None:
    """The page of an adapter; None if its framework is not installed or it has no public names."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    names = getattr(module, "__all__", None)
    if not names:
        return None
    return "\n".join([*_heading(module_name), f".. automodule:: {module_name}", "", *_members(module, names)])


def _members(module: ModuleType, names: list[str]) -> Iterator[str]:
    yield f".. currentmodule:: {module.__name__}"
    yield ""
    yield ".. autosummary::"
    yield "   :nosignatures:"
    yield ""
    yield from (f"   {name}" for name in names)
    yield ""
    for name in names:
        member = getattr(module, name)
        if inspect.isclass(member):
            yield f".. autoclass:: {name}"
            yield "   :members:"
        elif callable(member):
            yield f".. autofunction:: {name}"
        else:
            yield f".. autodata:: {name}"
            yield "   :no-value:"
        yield ""


def command_page() -> str:
    """The reference of the command line in Markdown, from the application itself."""
    root = get_command(app)
    parts = ["# Commands", "", "What `semidice COMMAND --help` prints.", ""]
    for words, command in _commands(root, ()):
        parts += [f"## {' '.join(words)}", "", *_command_lines(words, command)]
    return "\n".join(parts)


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*words, name))
        elif not command.hidden:
            yield (*words, name), command


def _command_lines(words: tuple[str, ...], command: Any) -> Iterator[str]:
    text, _, example = command.help.partition("Example: **")
    context = command.make_context(words[-1], [], resilient_parsing=True)
    usage = " ".join(("semidice", *words, *map(_bare, command.collect_usage_pieces(context))))
    yield from (text.strip(), "", "```", usage, "```", "")
    for title, kind in (("argument", "argument"), ("option", "option")):
        rows = [parameter for parameter in command.params if parameter.param_type_name == kind]
        rows = [parameter for parameter in rows if not getattr(parameter, "hidden", False)]
        if rows:
            yield f"| {title} | meaning | default |"
            yield "| --- | --- | --- |"
            yield from (_parameter_row(parameter, context) for parameter in rows)
            yield ""
    yield from ("Example:", "", "```", example.strip().removesuffix("**"), "```", "")


def _bare(piece: str) -> str:
    """A part of the usage as `--help` prints it: the name of an argument in capitals, without braces."""
    return piece.replace("{", "").replace("}", "").upper()


def _parameter_row(parameter: Any, context: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = [_bare(piece) for piece in parameter.get_usage_pieces(context)] if is_argument else parameter.opts
    name = ", ".join(f"`{name}`" for name in [*names, *parameter.secondary_opts])
    default = parameter.default
    if parameter.required:
        shown = "required"
    elif default is None or default is False or callable(default):
        shown = ""
    else:
        shown = f"`{default}`"
    meaning = (parameter.help or "").replace("|", "\\|").replace("\n", " ")
    return f"| {name} | {meaning} | {shown} |"
