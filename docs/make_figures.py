"""Make the figures and tables of the documentation: `python docs/make_figures.py`, or `--only NAME`.

Each figure is a function without arguments in `FIGURES`; its key is the name of the PNG in docs/figures.
Each table is such a function in `TABLES`, by page. It is written into the page between the two lines

    <!-- made by docs/make_figures.py: NAME -->
    <!-- end -->

Everything shown is computed by the package itself, with fixed seeds. Figures of the theory are drawn below or
in `landing`, the others in the modules NAME_study and in `rooms`.
"""

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import calibration_study
import calibrator_study
import decision_study
import label_study
import results_page
import rooms
import seed_study
import torch
import volume_study
from jaxtyping import Float
from landing import Loss, draw_focal_curves, draw_landing, landing_table
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from semidice import dice_loss, overlap_stats, tversky_index
from semidice.report.figures import COLOURS, LINES, MARKERS, new_axes, save_figure

PAGES = Path(__file__).parent
OUT = PAGES / "figures"
MAX_BYTES = 150_000

DICE_LOSSES: Mapping[str, Loss] = {
    "soft Dice (SDL)": partial(dice_loss, form="relaxed"),
    "DML1": dice_loss,
    "DML2": partial(dice_loss, form="product"),
    "squared (L2)": partial(dice_loss, form="squared"),
}


def draw_one_voxel(label: float) -> Figure:
    """Four Dice losses of one voxel against its prediction; a dot where the soft Dice loss is lowest."""
    figure, axes = new_axes(width=5.0)
    target = torch.tensor([[[label]]], dtype=torch.float64)
    probs = torch.linspace(0, 1, 401, dtype=torch.float64)
    axes.axvline(label, color="0.4", linewidth=1, label=f"label {label:g}")
    for (name, loss), colour, line in zip(DICE_LOSSES.items(), COLOURS, LINES, strict=False):
        values = torch.stack([loss(p.reshape(1, 1, 1), target) for p in probs])
        axes.plot(probs, values, color=colour, linestyle=line, label=name)
        lowest = int(values.argmin())
        # the other three are lowest at the label, where the dots would hide each other
        if probs[lowest] != label:
            axes.plot(probs[lowest], values[lowest], "o", color=colour, clip_on=False)
    axes.set(
        xlabel="prediction",
        ylabel="loss",
        title=f"One voxel, label {label:g}: the soft Dice loss falls until 1",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.legend(loc="upper right", framealpha=1)
    return figure


def draw_triangle_ratio() -> Figure:
    """How far triples of vectors stretch the triangle inequality of DML1, and the bound of the proof."""
    figure, axes = new_axes(width=6.6, height=4.4)
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(3, 800, 3, generator=generator, dtype=torch.float64)
    extreme = (5 * torch.randn(3, 800, 3, generator=generator, dtype=torch.float64)).sigmoid()
    for name, triples, colour, marker in (
        ("uniform triples", spread, COLOURS[5], "."),
        ("triples near 0 and 1", extreme, COLOURS[3], "+"),
    ):
        total, ratio = _triangle_ratio(*triples)
        axes.plot(total, ratio, marker, color=colour, markersize=3, label=name)
    total, ratio = _triangle_ratio(*_extremal_triples())
    axes.plot(
        total, ratio, MARKERS[4], color=COLOURS[0], markersize=5, fillstyle="none", label="extremal triples"
    )
    total = torch.linspace(0.01, 2, 400, dtype=torch.float64)
    bound = torch.where(total <= 1, (2 - total / 2) / (2 - total.clamp_max(1)), (2 - total / 2) / total)
    axes.plot(total, bound, color="0.2", linewidth=1.2, label="bound of the proof")
    for height, words in ((1.5, "3/2: tight"), ((1 + 5**0.5) / 2, "1.62: the paper's bound")):
        axes.axhline(height, color="0.4", linewidth=1, linestyle="--")
        axes.annotate(words, (2, height), xytext=(0, 3), textcoords="offset points", ha="right", color="0.3")
    axes.set(
        xlabel="u = JML1(a, b) + JML1(b, c)",
        ylabel="DML1(a, c) / (DML1(a, b) + DML1(b, c))",
        title="No triple exceeds 3/2, and some attain the bound at every u",
        xlim=(0, 2),
        ylim=(0, 1.75),
    )
    axes.legend(loc="lower left", framealpha=1)
    return figure


def _triangle_ratio(
    a: Float[Tensor, "n p"], b: Float[Tensor, "n p"], c: Float[Tensor, "n p"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """JML1(a, b) + JML1(b, c), and DML1(a, c) as a share of DML1(a, b) + DML1(b, c), a triple a row."""

    def distance(x: Tensor, y: Tensor, weight: float) -> Tensor:
        stats = overlap_stats(x.unsqueeze(1), y.unsqueeze(1))
        return 1 - tversky_index(stats, alpha=weight, beta=weight)[:, 0]

    ratio = distance(a, c, 0.5) / (distance(a, b, 0.5) + distance(b, c, 0.5))
    return distance(a, b, 1) + distance(b, c, 1), ratio


def _extremal_triples() -> Float[Tensor, "3 n p"]:
    """[0, 1], [t, t], [1, 0] for u >= 1; for u <= 1, k shared voxels beside [0, 1], [1, 1], [1, 0]."""
    rows: list[list[list[float]]] = []
    for t in torch.linspace(0, 1, 13).tolist():
        rows.append([[0.0, 1.0] + [0.0] * 24, [t, t] + [0.0] * 24, [1.0, 0.0] + [0.0] * 24])
    for k in (1, 2, 3, 4, 6, 8, 12, 24):
        shared = [1.0] * k + [0.0] * (24 - k)
        rows.append([[0.0, 1.0, *shared], [1.0, 1.0, *shared], [1.0, 0.0, *shared]])
    return torch.tensor(rows, dtype=torch.float64).transpose(0, 1)


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "one_voxel_50": partial(draw_one_voxel, 0.5),
    "one_voxel_80": partial(draw_one_voxel, 0.8),
    "cftl": partial(draw_focal_curves, alpha=0.7, beta=0.3, label=0.8, gammas=(0.5, 1.0, 2.0, 3.0, 4.0)),
    "landing": draw_landing,
    "triangle_ratio": draw_triangle_ratio,
    "rooms": rooms.draw_rooms,
    **label_study.FIGURES,
    **calibration_study.FIGURES,
    **decision_study.FIGURES,
    **calibrator_study.FIGURES,
    **volume_study.FIGURES,
    **results_page.FIGURES,
}

# rows of cells, of which the first is the header; a text; or None if the data are not on this machine
Part = list[Sequence[str]] | str
TABLES: Mapping[str, Mapping[str, Callable[[], Part | None]]] = {
    "labels.md": label_study.TABLES,
    "decisions.md": decision_study.TABLES,
    "calibration.md": {**calibration_study.TABLES, **calibrator_study.TABLES},
    "volumes.md": volume_study.TABLES,
    "metrics.md": seed_study.TABLES,
    "landing.md": {"landed_predictions": landing_table},
    "where.md": {"rooms_and_imports": rooms.rooms_table},
    "results.md": results_page.TABLES,
}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a Markdown table; columns with numbers are aligned to the right."""
    head, *body = rows
    columns = list(zip(*body, strict=True))[1:]
    rule = ["---", *("---:" if any(map(_has_digit, column)) else "---" for column in columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def part_text(part: Part) -> str:
    """A text as it is, rows as a table."""
    return part if isinstance(part, str) else markdown(part)


def table_in(text: str, name: str) -> str:
    """The table between the markers `name` of a page."""
    tables = re.findall(_between(name), text, flags=re.DOTALL)
    if len(tables) != 1:
        raise ValueError(f"the page needs one pair of markers for the table {name!r}; found {len(tables)}")
    return str(tables[0]).strip()


def with_table(text: str, name: str, table: str) -> str:
    """The page with that table between its markers."""
    table_in(text, name)
    start, end = f"<!-- made by docs/make_figures.py: {name} -->\n", "<!-- end -->"
    before, _, after = text.partition(start)
    return f"{before}{start}{table}\n{end}{after.partition(end)[2]}"


def _has_digit(cell: str) -> bool:
    return any(character.isdigit() for character in cell)


def _between(name: str) -> str:
    return rf"<!-- made by docs/make_figures\.py: {name} -->\n(.*?)<!-- end -->"


def save_compact(figure: Figure, path: Path) -> None:
    """Write the figure; with a palette, which takes a third of the size, if it would exceed `MAX_BYTES`."""
    save_figure(figure, path)
    if path.stat().st_size <= MAX_BYTES:
        return
    with Image.open(path) as image:
        compact = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    compact.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the figures and tables of the documentation.")
    tables = {name: page for page, makers in TABLES.items() for name in makers}
    known = [*FIGURES, *tables]
    parser.add_argument("--only", choices=known, metavar="NAME", help=f"one of: {', '.join(known)}")
    only = parser.parse_args().only
    names = [only] if only else known
    OUT.mkdir(exist_ok=True)
    # the tensors are small: a second thread on two cores would double the time
    torch.set_num_threads(1)
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        started = time.perf_counter()
        if name in FIGURES:
            path = OUT / f"{name}.png"
            save_compact(FIGURES[name](), path)
            done = f"{path.stat().st_size // 1024} KB"
        else:
            page = PAGES / tables[name]
            rows = TABLES[tables[name]][name]()
            if rows is not None:
                page.write_text(with_table(page.read_text(), name, part_text(rows)))
            done = f"in {page.name}" if rows is not None else "not changed: its data are not on this machine"
        print(f"      {done}, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
