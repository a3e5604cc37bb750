"""Tables of a comparison for the terminal, Markdown, LaTeX and CSV, with the best set marked.

Shares are shown in percent, other scores in their own unit. The CSV has the plain numbers, one row per mean
or pair. Left out: the statistics (`compare`).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from ..errors import UserError
from ..metrics.registry import ScoreKey
from ..paths import write_text
from .cases import escaped_cell
from .compare import Comparison

# name of the row with the raters' own scores
RATERS = "raters"
# of the pair after Holm's correction, alone, and alone by flipped signs
_P_HEADER = {"p": "corrected p", "p_single": "single p", "p_flips": "perm. p"}
_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash ", "~": r"\textasciitilde ", "^": r"\textasciicircum "}
    | {"−": "$-$", "<": "$<$", ">": "$>$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
)


class Cell(NamedTuple):
    """The text of a cell, and whether it is marked as best."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table to show, and the records that it is made from."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str
    records: tuple[dict[str, object], ...]

    def markdown(self) -> str:
        """The table in GitHub's Markdown; best cells are bold, and no name is read as HTML."""

        def line(cells: Sequence[str]) -> str:
            texts = (re.sub(r"<(?=\S)", "&lt;", cell).replace("|", r"\|") for cell in cells)
            return f"| {' | '.join(texts)} |"

        rule = line(["---", *["---:"] * (len(self.header) - 1)])
        body = [line([f"**{cell.text}**" if cell.best else cell.text for cell in row]) for row in self.rows]
        return "\n".join([line(self.header), rule, *body, "", self.note]) + "\n"

    def latex(self) -> str:
        """A tabular with rules of booktabs, the only package it needs; best cells are bold."""

        def line(cells: Sequence[Cell]) -> str:
            texts = [(cell.text.translate(_LATEX), cell.best) for cell in cells]
            return " & ".join(rf"\textbf{{{text}}}" if best else text for text, best in texts) + r" \\"

        lines = [
            f"% {self.title}. {self.note}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
            r"\toprule",
            line([Cell(name) for name in self.header]),
            r"\midrule",
            *map(line, self.rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """The records with all digits, one line each; None is an empty cell, nan is a value."""
        cells = pd.DataFrame(self.records, dtype=object)
        shown = cells.map(lambda cell: "" if cell is None else escaped_cell(cell))
        text: str = shown.to_csv(index=False, lineterminator="\n", na_rep="nan")
        return text

    def write(self, path: Path) -> list[Path]:
        """Write the table as CSV, Markdown and LaTeX; path: without a suffix. The files that were written."""
        texts = {".csv": self.csv(), ".md": self.markdown(), ".tex": self.latex()}
        files = {path.with_name(f"{path.name}{suffix}"): text for suffix, text in texts.items()}
        for file, text in files.items():
            write_text(file, text)
        return list(files)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """What `rich.print` shows: best cells are bold, green, and marked with a star.

        Columns that do not fit follow in further tables, each with the names of the methods.
        """
        # names of methods: the first column, and that of the second method of a pair
        names = [number for number, name in enumerate(self.header) if number == 0 or name == "minus"]
        shown: list[int] = []
        title: str | None = self.title
        for number in range(len(self.header)):
            if number in names:
                continue
            wider = self._columns([*names, *shown, number])
            # a measure is never above the width of its options
            width = Measurement.get(console, options.update_width(10_000), wider).minimum
            if shown and width > options.max_width:
                yield self._columns([*names, *shown], title)
                title, shown = None, []
            shown.append(number)
        yield self._columns([*names, *shown], title)
        yield Text(self.note, "table.caption")

    def _columns(self, numbers: Sequence[int], title: str | None = None) -> RichTable:
        """These columns. On a narrow terminal, names of methods are wrapped, and numbers are not."""
        table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, title=title)
        for number in sorted(numbers):
            # broken after underscores and spaces
            name = self.header[number]
            heading = name if len(name) <= 12 else re.sub("(.{4,11}[_ ])(?=.)", r"\1\n", name)
            # in Text, brackets such as "[0.1, 0.2]" are not markup
            if number == 0 or name == "minus":
                longest = max((len(row[number].text) for row in self.rows), default=0)
                table.add_column(Text(heading), overflow="fold", min_width=min(longest, 13))
            else:
                table.add_column(Text(heading, no_wrap=True), justify="right", no_wrap=True)
        for row in self.rows:
            cells = [row[number] for number in sorted(numbers)]
            table.add_row(*(Text(f"{text} ★", "bold green") if best else Text(text) for text, best in cells))
        return table


def means_table(
    comparisons: Sequence[Comparison],
    *,
    intervals: bool = True,
    raters: Mapping[tuple[ScoreKey, str], float] | None = None,
    title: str = "Mean over cases",
) -> Table:
    """The mean of each method and compared metric; of several methods the best set of each metric is marked.

    All comparisons have the same methods. intervals: whether to show the confidence intervals. With several
    seeds, the standard deviation of the mean over seeds follows as ± SD. raters: their own scores by score
    and class (`agreement.raters_own_scores`), for the last row.
    """
    if not comparisons or any(each.methods != comparisons[0].methods for each in comparisons):
        raise UserError(
            "means_table needs one or more comparisons, all of the same methods in the same order"
        )
    methods = comparisons[0].methods
    rows = [[Cell(name)] for name in (*methods, *([RATERS] if raters else []))]
    records: list[dict[str, object]] = []
    for each in comparisons:
        for cells, mean in zip(rows, each.means.itertuples(), strict=False):
            # one method is not compared with anything
            best = bool(mean.best) if len(methods) > 1 else None
            interval = f" {interval_text(each.key, mean.low, mean.high)}" if intervals else ""
            text = number_text(mean.mean * each.key.scale) + interval + _spread_text(each.key, mean.spread)
            cells.append(Cell(text, bool(best)))
            numbers = {name: float(getattr(mean, name)) for name in ("mean", "low", "high")}
            records.append({"method": mean.Index, **_score_cells(each, mean.spread), **numbers, "best": best})
        if raters:
            own = raters.get((each.key, each.class_name))
            rows[-1].append(Cell("–" if own is None else number_text(own * each.key.scale)))
    header = ("method", *(each.heading for each in comparisons))
    note = _note(comparisons, "not significantly worse than any other") + _seeds_note(comparisons)
    if raters:
        note += f" {RATERS}: their own agreement, each rater scored like a method."
    return Table(title, header, tuple(map(tuple, rows)), note, tuple(records))


def pairs_table(comparison: Comparison) -> Table:
    """Difference of each pair of methods with its interval and p-values; significant ones are marked.

    The interval belongs to the first p. The CSV also has the interval of a single pair.
    """
    key = comparison.key
    rows: list[tuple[Cell, ...]] = []
    records: list[dict[str, object]] = []
    for first, second in combinations(comparison.methods, 2):
        pair = comparison.pairs.loc[(first, second)]
        marked = bool(pair.better or comparison.pairs.loc[(second, first)].better)
        text = number_text(pair.difference * key.scale, signed=True)
        text += f" {interval_text(key, pair.low, pair.high, signed=True)}{_spread_text(key, pair.spread)}"
        p_values = (Cell(p_text(pair[name])) for name in _P_HEADER)
        rows.append((Cell(first), Cell(second), Cell(text, marked), *p_values))
        which = {**_score_cells(comparison, pair.spread), "first": first, "second": second}
        numbers = {name: float(cell) for name, cell in pair.items() if name not in ("spread", "better")}
        records.append({**which, **numbers, "significant": marked})
    if not records:
        raise UserError(f"pairs_table needs two or more methods; got {', '.join(comparison.methods)}")
    header = ("method", "minus", "difference (%)" if key.scale == 100 else "difference", *_P_HEADER.values())
    note = _note([comparison], "the difference is significant")
    if len(rows) > 1:
        note += (
            f" Intervals and the corrected p are after correction for {len(rows)} comparisons; "
            "the other p are of one comparison alone."
        )
    note += _seeds_note([comparison])
    return Table(f"Pairs of methods: {comparison.heading}", header, tuple(rows), note, tuple(records))


def baseline_table(comparisons: Sequence[Comparison], baseline: str, *, title: str) -> Table:
    """The mean of each method and metric, and its difference to a baseline with p; for the terminal.

    comparisons: with this baseline alone. It comes first. Marked: significantly better than the baseline.
    """
    methods = (baseline, *(name for name in comparisons[0].methods if name != baseline))
    header = ["method", *(head for each in comparisons for head in (each.heading, f"minus {baseline}", "p"))]
    rows = [[Cell(name)] for name in methods]
    for each in comparisons:
        scale = each.key.scale
        for cells, method in zip(rows, methods, strict=True):
            cells.append(Cell(number_text(each.means["mean"][method] * scale)))
            if method == baseline:
                cells += [Cell("–"), Cell("–")]
            else:
                pair = each.pairs.loc[(method, baseline)]
                difference = number_text(pair.difference * scale, signed=True)
                cells += [Cell(difference, bool(pair.better)), Cell(p_text(pair.p))]
    note = _note(comparisons, f"significantly better than {baseline}", over="methods")
    return Table(title, tuple(header), tuple(map(tuple, rows)), note, ())


def interval_text(key: ScoreKey, low: float, high: float, *, signed: bool = False) -> str:
    """The interval of a score as it is shown.

    >>> interval_text(ScoreKey("dice_score"), 0.812, 0.856)
    '[81.20, 85.60]'
    """
    return f"[{', '.join(number_text(end * key.scale, signed=signed) for end in (low, high))}]"


def p_text(p: float) -> str:
    """A p-value with three decimals.

    >>> p_text(0.00009), p_text(0.0312), p_text(1.0)
    ('< 0.001', '0.031', '1.000')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def number_text(value: float, *, signed: bool = False) -> str:
    """A number with two decimals and a minus sign, not a hyphen.

    >>> number_text(-1.5), number_text(0.256, signed=True), number_text(-0.001, signed=True)
    ('−1.50', '+0.26', '0.00')
    """
    text = f"{value:{'+' if signed else ''}.2f}".replace("-", "−").replace("inf", "∞")
    # a number that is rounded to 0 has no sign
    return "0.00" if text in ("+0.00", "−0.00") else text


def _spread_text(key: ScoreKey, spread: float) -> str:
    """± SD over seeds; empty if it is not known."""
    return "" if math.isnan(spread) else f" ± {number_text(spread * key.scale)}"


def _score_cells(comparison: Comparison, spread: float) -> dict[str, object]:
    """Cells of a CSV on the score, and on its seeds if there are several."""
    of_class = {"class": comparison.class_name, "num_cases": comparison.num_cases}
    seeds = {"num_seeds": len(comparison.seeds), "seed_spread": float(spread)}
    return {**comparison.key._asdict(), **of_class, **(seeds if comparison.seeds else {})}


def _note(comparisons: Sequence[Comparison], marked: str, *, over: str = "pairs") -> str:
    """What is marked, by which test, over how many cases."""
    first = comparisons[0]
    counts = [each.num_cases for each in comparisons]
    cases = " to ".join(str(count) for count in sorted({min(counts), max(counts)})) + " cases"
    if first.by_patient:
        cases += f" of {first.num_patients} patients"
    test = f"p < {first.alpha:g}, paired bootstrap and permutation over {cases}, Holm-corrected over {over}"
    note = f"Marked: {marked} ({test})." if len(first.methods) > 1 else f"Mean over {cases}."
    dropped = max(each.num_dropped for each in comparisons)
    return note + (f" Up to {dropped} cases without a score were left out." if dropped else "")


def _seeds_note(comparisons: Sequence[Comparison]) -> str:
    """What ± means; empty without several seeds."""
    counts = sorted({len(each.seeds) for each in comparisons if each.seeds})
    if not counts:
        return ""
    covered = "patients and seeds" if all(each.covers_seeds for each in comparisons) else "patients alone"
    return (
        f" Scores are means over {' or '.join(map(str, counts))} seeds; ±: standard deviation over them. "
        f"Intervals cover the draw of {covered}."
    )
