"""The figure and the table of docs/where.md, from the import contract in pyproject.toml."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from semidice.report.figures import COLOURS, new_figure

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "semidice"


class Room(NamedTuple):
    """One package of semidice, or a module beside the packages.

    subject: two or three words for the figure. work: what it does. addition: what is added to it, and where.
    """

    subject: str
    work: str
    addition: str


ROOMS: dict[str, Room] = {
    "__main__": Room("start", "Starts the command line, or names the extra that is not installed.", ""),
    "cli": Room("command line", "Reads arguments and calls one function per command.", "a command: `cli`"),
    "demo": Room(
        "semidice demo", "Compares four methods on phantoms.", "a method: `recipes/shipped/demo.yaml`"
    ),
    "reproduce": Room(
        "the paper's tables",
        "Runs the tables of the paper and checks its conclusions.",
        "a method of the paper: `recipes/shipped/paper_*.yaml`; a conclusion: `reproduce/conclusions.py`",
    ),
    "nnunet": Room(
        "nnU-Net with raters",
        "Gives nnU-Net the raters' masks, a label and a loss, and collects its predictions.",
        "an option of the trainer: `nnunet/options.py`",
    ),
    "integrations": Room(
        "other frameworks",
        "Small adapters for other frameworks, one module each.",
        "a framework: a module of `integrations`",
    ),
    "compare": Room("semidice compare", "Trains the variants of a grid and compares them case by case.", ""),
    "report": Room(
        "report page, figures, check of a dataset",
        "Writes the report page, figures and contact sheets; checks prepared datasets.",
        "a part of the report: `report/page.py`; a chart: `report/charts.py`",
    ),
    "training": Room(
        "step, engine, cross-validation",
        "Trains a recipe: step, engine, teacher, cross-validation, processes.",
        "a step of training: `training/step.py`",
    ),
    "prediction": Room(
        "masks and volumes of new images",
        "Predicts new images: reads inputs, writes masks and volumes.",
        "an input format: `prediction/inputs.py`",
    ),
    "runs": Room(
        "a run folder opened: recipe, networks, predictions, scores",
        "Opens a run folder: recipe, networks, stored predictions, scores.",
        "",
    ),
    "recipes": Room(
        "options of a training; shipped recipes and grids",
        "Reads and checks recipes and grids.",
        "an option: `recipes/options.py`; a rule of auto: `recipes/auto.py`; "
        "a recipe or grid: `recipes/shipped`",
    ),
    "networks": Room(
        "networks, systems",
        "Builds networks and comparison systems, stores weights, predicts batches and windows.",
        "a network: `networks/build.py`; a system: `networks/systems`",
    ),
    "data": Room(
        "datasets, batches",
        "Prepares raw data; reads, augments and batches prepared datasets.",
        "a source: `data/sources`; an augmentation: `data/batches/augment.py`",
    ),
    "metrics": Room(
        "scores",
        "Scores of each case, calibration bins.",
        "a score: `metrics/registry.py`",
    ),
    "decisions": Room(
        "masks, volumes, intervals",
        "Decides masks, and estimates volumes with intervals, from probabilities.",
        "a rule: `decisions/decision.py`",
    ),
    "statistics": Room(
        "case tables, comparisons",
        "Case tables, paired tests, comparisons, tables of them.",
        "",
    ),
    "locks": Room("one writer at a time", "Locks a folder that a command writes to.", ""),
    "losses": Room(
        "losses of soft labels",
        "Dice, Jaccard and Tversky losses, cross entropy, mixture, distillation.",
        "a loss: `losses`, then `tests/support/laws.py`",
    ),
    "calibration": Room(
        "kernel density, key points, calibrators",
        "Kernel density estimates, key points; calibrators that are fitted and stored.",
        "a calibrator: `calibration/calibrators.py`",
    ),
    "labels": Room(
        "raters' masks to soft labels", "Makes soft labels from raters' masks.", "a label: `labels/makers.py`"
    ),
    "kernels": Room(
        "the same sums with less memory traffic, on CPU and GPU",
        "Computes the sums of `overlap` and the kernel mean of `calibration` with less memory traffic.",
        "a kernel: `kernels`, equal to its definition in `overlap.py`",
    ),
    "overlap": Room(
        "soft tp, fp, fn, their sums, Tversky index",
        "Defines soft tp, fp and fn, their sums and the Tversky index.",
        "a form: `overlap.py`",
    ),
    "arrays": Room(
        "checks of inputs", "Checks predictions and targets of the user.", "a rule for inputs: `arrays.py`"
    ),
    "paths": Room("file names", "Knows all file names; writes files atomically.", "a file: `paths.py`"),
    "console": Room("messages, progress", "Prints lines and progress bars.", ""),
    "extras": Room(
        "optional packages",
        "Knows which extra installs which package of another project.",
        "an extra: `extras.py`",
    ),
    "errors": Room(
        "what a user can mend",
        "Turns what a user can mend into one message; any other error keeps its traceback.",
        "",
    ),
    "options": Room(
        "options as records", "Checks the fields of a record of options.", "a kind of bound: `options.py`"
    ),
    "processes": Room(
        "ends of processes", "Ends a process, and what it started, when its parent is gone.", ""
    ),
    "lazy": Room("late imports", "Imports the public names of a package when they are first asked for.", ""),
}


def layers() -> list[list[str]]:
    """Names of the import contract, one list per layer, from top to bottom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["type"] == "layers"]
    return [layer.split(" | ") for layer in contract["layers"]]


def is_folder(name: str) -> bool:
    return (PACKAGE / name).is_dir()


def rooms_table() -> list[Sequence[str]]:
    """One row per package or module: what it does, what it may import, and what is added to it."""
    rows: list[Sequence[str]] = [("package", "what it does", "may import", "to add")]
    contract = layers()
    for number, layer in enumerate(contract):
        below = contract[number + 1] if number + 1 < len(contract) else []
        allowed = ", ".join(f"`{name}`" for name in below)
        for name in layer:
            room = ROOMS[name]
            shown = f"`{name}/`" if is_folder(name) else f"`{name}.py`"
            imports = (
                f"{allowed} and below" if number + 2 < len(contract) else allowed or "nothing of semidice"
            )
            rows.append((shown, room.work, imports, room.addition))
    return rows


def draw_rooms() -> Figure:
    """The layers of the import contract as rows of boxes; packages are coloured, modules are white."""
    contract = layers()
    figure = new_figure(width=7.2, height=0.62 * len(contract))
    axes = figure.subplots()
    for row, layer in enumerate(contract):
        width = 1 / len(layer)
        for column, name in enumerate(layer):
            colour = COLOURS[5] if is_folder(name) else "white"
            left, bottom = column * width + 0.008, len(contract) - row - 0.9
            box = FancyBboxPatch((left, bottom), width - 0.016, 0.74, "round,pad=0,rounding_size=0.01")
            box.set(facecolor=colour, edgecolor="0.3", alpha=0.55)
            axes.add_patch(box)
            text = f"{name}{'/' if is_folder(name) else '.py'}"
            middle = column * width + width / 2
            axes.text(middle, bottom + 0.5, text, ha="center", va="center", fontsize=10, weight="bold")
            axes.text(middle, bottom + 0.2, ROOMS[name].subject, ha="center", va="center", fontsize=8)
    arrow = {"arrowstyle": "->", "color": "0.3", "linewidth": 1.5}
    axes.annotate("", xy=(1.025, 0.1), xytext=(1.025, len(contract) - 0.2), arrowprops=arrow)
    axes.text(1.05, len(contract) / 2, "may import", rotation=-90, va="center", color="0.3")
    axes.set(xlim=(0, 1.08), ylim=(0, len(contract)), title="A package imports only packages below it")
    axes.axis("off")
    return figure
