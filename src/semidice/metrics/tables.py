"""Tables of a comparison for the terminal, Markdown, LaTeX and CSV, with the best set marked.

Fractions are shown in percent, other scores in their own unit (`registry`). The CSV has the plain numbers,
one row per mean or pair. Left out: the statistics (`statistics`).
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..paths import write_text
from .cells import escaped_row
from .registry import display_scale
from .statistics import Comparison, Correction, holm

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable
    from rich.text import Text


# name of the row with the raters' own scores
RATERS = "raters"
# of the pair after Holm's correction, alone, and alone by permutation
_P_HEADER = {"p_holm": "corrected p", "p": "single p", "p_permutation": "perm. p"}
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
        """The table in GitHub's Markdown; best cells are bold."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

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
        """The records with all digits, one line each."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.records[0]), lineterminator="\n")
        writer.writeheader()
        for record in self.records:
            writer.writerow(dict(zip(record, escaped_row(record.values()), strict=True)))
        return file.getvalue()

    def write(self, path: Path) -> list[Path]:
        """Write the table as CSV, Markdown and LaTeX; path: without a suffix. The files that were written."""
        texts = {".csv": self.csv(), ".md": self.markdown(), ".tex": self.latex()}
        files = {path.with_name(f"{path.name}{suffix}"): text for suffix, text in texts.items()}
        for file, text in files.items():
            write_text(file, text)
        return list(files)

    def rich(self) -> "_TerminalTable":
        """For `rich.print`: best cells are bold, green, and marked with a star.

        Columns that do not fit are shown in further tables, each with the names of the methods.
        """
        try:
            import rich.table  # noqa: F401
        except ImportError:
            raise ImportError("tables in the terminal need rich: pip install 'semidice[train]'") from None
        return _TerminalTable(self)


@dataclass(frozen=True)
class _TerminalTable:
    """One table, or several below each other if the terminal is narrow."""

    table: Table

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["RichTable | Text"]:
        from rich.measure import Measurement
        from rich.text import Text

        header = self.table.header
        # names of methods: the first column, and that of the second method of a pair
        names = [number for number, name in enumerate(header) if number == 0 or name == "minus"]
        parts: list[list[int]] = [[]]
        for number in range(len(header)):
            if number in names:
                continue
            wider = self._part(sorted([*names, *parts[-1], number]))
            # a measure is never above the width of its options
            width = Measurement.get(console, options.update_width(10_000), wider).minimum
            if parts[-1] and width > options.max_width:
                parts.append([])
            parts[-1].append(number)
        for number, part in enumerate(parts):
            table = self._part(sorted([*names, *part]))
            table.title = self.table.title if number == 0 else None
            yield table
        yield Text(self.table.note, "table.caption")

    def _part(self, columns: Sequence[int]) -> "RichTable":
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
        # a star marks the best
        texts = [[f"{text} ★" if best else text for text, best in row] for row in self.table.rows]
        for number in columns:
            name = self.table.header[number]
            # on a narrow terminal names of methods are wrapped, and numbers are not
            holds_names = number == 0 or name == "minus"
            longest = max((len(row[number]) for row in texts), default=0)
            heading = _narrow(name)
            longest_line = max(map(len, heading.split("\n")))
            table.add_column(
                Text(heading),
                justify="left" if holds_names else "right",
                no_wrap=not holds_names,
                overflow="fold",
                min_width=min(longest, 13) if holds_names else max(longest, longest_line),
            )
        for row, cells in zip(self.table.rows, texts, strict=True):
            # in Text, brackets such as "[0.1, 0.2]" are not markup
            shown = (Text(cells[number], "bold green" if row[number].best else "") for number in columns)
            table.add_row(*shown)
        return table


def means_table(
    comparisons: Sequence[Comparison],
    *,
    level: float = 0.05,
    correction: Correction = "holm",
    intervals: bool = True,
    raters: Mapping[tuple[str, str], float] | None = None,
    title: str = "Mean over cases",
) -> Table:
    """The mean of each method and compared metric; of several methods the best set of each metric is marked.

    raters: their own scores by metric and class (`agreement.raters_own_scores`), for the last row.

    All comparisons have the same methods. intervals: whether to show the confidence intervals. With several
    seeds, the standard deviation of the mean over seeds follows as ± SD.
    """
    if not comparisons or any(each.methods != comparisons[0].methods for each in comparisons):
        raise ValueError(
            "means_table needs one or more comparisons, all of the same methods in the same order"
        )
    records: list[dict[str, object]] = []
    columns = []
    has_seeds = any(each.seeds for each in comparisons)
    for each in comparisons:
        # one method is not compared with anything
        best = each.best(level=level, correction=correction) if len(each.methods) > 1 else ()
        column = []
        means = zip(each.methods, each.mean, each.mean_low, each.mean_high, each.seed_spread, strict=True)
        for method, mean, low, high, spread in means:
            text = _mean_text(each.metric, mean, (low, high) if intervals else None, spread)
            column.append(Cell(text, method in best))
            records.append(
                {
                    "method": method,
                    "metric": each.metric,
                    "class": each.class_name,
                    "num_cases": each.num_cases,
                    "mean": float(mean),
                    "low": float(low),
                    "high": float(high),
                    "best": method in best if len(each.methods) > 1 else None,
                    **(_seed_cells(each, spread) if has_seeds else {}),
                }
            )
        if raters:
            own = raters.get((each.metric, each.class_name))
            column.append(Cell("–" if own is None else number_text(own * display_scale(each.metric))))
        columns.append(column)
    names = (*comparisons[0].methods, *([RATERS] if raters else []))
    rows = tuple((Cell(name), *(column[row] for column in columns)) for row, name in enumerate(names))
    header = ("method", *(each.heading for each in comparisons))
    note = f"Marked: not significantly worse than any other {_test(comparisons, level, correction)}"
    if len(comparisons[0].methods) == 1:
        note = f"Mean over {_cases(comparisons)}."
    note += _seeds_note(comparisons)
    if raters:
        note += f" {RATERS}: their own agreement, each rater scored like a method."
    return Table(title, header, rows, note, tuple(records))


def _mean_text(metric: str, mean: float, interval: tuple[float, float] | None, spread: float) -> str:
    """The mean, its interval if there is one, and ± SD over seeds if it is not NaN."""
    scale = display_scale(metric)
    text = number_text(mean * scale)
    if interval is not None:
        text += f" [{', '.join(number_text(end * scale) for end in interval)}]"
    if not math.isnan(spread):
        text += f" ± {number_text(spread * scale)}"
    return text


def pairs_table(comparison: Comparison, *, level: float = 0.05, correction: Correction = "holm") -> Table:
    """Difference of each pair of methods with its interval and p-values; significant ones are marked.

    The interval belongs to the first p. The CSV also has the interval of a single pair.
    """
    scale = display_scale(comparison.metric)
    shown = comparison.corrected(correction)
    names = list(_P_HEADER) if correction == "holm" else ["p", "p_permutation"]
    superior = comparison.superior(level=level, correction=correction)
    rows: list[tuple[Cell, ...]] = []
    records: list[dict[str, object]] = []
    for i, j in combinations(range(len(comparison.methods)), 2):
        marked = bool(superior[i, j] or superior[j, i])
        difference, low, high = (float(part[i, j]) for part in (shown.value, shown.low, shown.high))
        first, second = comparison.methods[i], comparison.methods[j]
        interval = f"[{number_text(low * scale, signed=True)}, {number_text(high * scale, signed=True)}]"
        spread = float(comparison.pair_spread[i, j])
        if not math.isnan(spread):
            interval += f" ± {number_text(spread * scale)}"
        rows.append(
            (
                Cell(first),
                Cell(second),
                Cell(f"{number_text(difference * scale, signed=True)} {interval}", marked),
                *(Cell(p_text(float(getattr(comparison, name)[i, j]))) for name in names),
            )
        )
        records.append(
            {
                "metric": comparison.metric,
                "class": comparison.class_name,
                "first": first,
                "second": second,
                "num_cases": comparison.num_cases,
                **{
                    name: float(getattr(comparison, name)[i, j])
                    for name in (
                        *("difference", "low_holm", "high_holm", "p_holm"),
                        *("low", "high", "p", "p_permutation"),
                    )
                },
                "significant": marked,
                **(_seed_cells(comparison, spread) if comparison.seeds else {}),
            }
        )
    if not records:
        raise ValueError(f"pairs_table needs two or more methods; got {', '.join(comparison.methods)}")
    unit = "difference (%)" if scale == 100 else "difference"
    header = ("method", "minus", unit, *(_P_HEADER[name] for name in names))
    title = f"Pairs of methods: {comparison.heading}"
    note = f"Marked: the difference is significant {_test([comparison], level, correction)}"
    if correction == "holm" and comparison.num_pairs > 1:
        note += (
            f" Intervals and the corrected p are after correction for {comparison.num_pairs} comparisons; "
            "the other p are of one comparison alone."
        )
    note += _seeds_note([comparison])
    return Table(title, header, tuple(rows), note, tuple(records))


def baseline_table(
    comparisons: Sequence[Comparison], baseline: str, *, title: str, level: float = 0.05
) -> Table:
    """The mean of each method and metric, its difference to a baseline, and the p-value of the difference.

    The p-values are corrected for the number of methods, because only the baseline is compared with the
    others. Marked: significantly better than the baseline. The baseline comes first.
    """
    first = comparisons[0].methods.index(baseline)
    order = [first, *(number for number in range(len(comparisons[0].methods)) if number != first)]
    rows = [[Cell(comparisons[0].methods[number])] for number in order]
    header, records = ["method"], []
    for each in comparisons:
        scale = display_scale(each.metric)
        corrected = [1.0, *holm(each.p[order[1:], first]).tolist()]
        header += [each.heading, f"minus {baseline}", "p"]
        for cells, number, p in zip(rows, order, corrected, strict=True):
            mean, difference = float(each.mean[number]), float(each.difference[number, first])
            is_better = p < level and (difference > 0) == each.higher_is_better
            texts = ("–", "–")
            if number != first:
                texts = number_text(difference * scale, signed=True), p_text(p)
            cells += [Cell(number_text(mean * scale)), Cell(texts[0], is_better), Cell(texts[1])]
            records.append(
                {
                    "method": each.methods[number],
                    "metric": each.metric,
                    "class": each.class_name,
                    "num_cases": each.num_cases,
                    "mean": mean,
                    "difference": difference,
                    "p_holm": p,
                }
            )
    test = _test(comparisons, level, "holm").replace("pairs", "methods")
    note = f"Marked: significantly better than {baseline} {test}"
    return Table(title, tuple(header), tuple(map(tuple, rows)), note, tuple(records))


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


def _narrow(name: str, width: int = 12) -> str:
    """A heading in lines of about `width` characters, broken after underscores and spaces.

    >>> _narrow("binarized_dice_score (%)").split("\\n")
    ['binarized_', 'dice_score ', '(%)']
    """
    lines = [""]
    for part in re.findall(r"[^_ ]*[_ ]?", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _seed_cells(comparison: Comparison, spread: float) -> dict[str, object]:
    """Cells of a CSV on seeds."""
    return {"num_seeds": max(1, len(comparison.seeds)), "seed_spread": float(spread)}


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


def _cases(comparisons: Sequence[Comparison]) -> str:
    first = comparisons[0]
    counts = sorted({each.num_cases for each in comparisons})
    cases = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{cases} cases" if first.unit == "case" else f"{cases} cases of {first.num_patients} patients"


def _test(comparisons: Sequence[Comparison], level: float, correction: Correction) -> str:
    corrected = ", Holm-corrected over pairs" if correction == "holm" else ", not corrected for pairs"
    dropped = max(each.num_dropped for each in comparisons)
    left_out = f" Up to {dropped} cases without a score were left out." if dropped else ""
    combined = comparisons[0].interval == "combined"
    test = "paired bootstrap and permutation" if combined else "paired bootstrap"
    return f"(p < {level:g}, {test} over {_cases(comparisons)}{corrected}).{left_out}"
