"""Which conclusions of the paper hold here: the checks of `semidice reproduce` on our scores.

The paper's data cannot be had here, so other data stand for them: LIDC for QUBIQ, with all seven tasks in one
row, and slices of hippocampus for LiTS and KiTS. A check sees our numbers under the names of the paper's rows
and columns; a row that has no counterpart is missing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from results_tables import LEVEL, NOT_RUN, Cell, Effect, Results, Row, number, p_words

from semidice.metrics.registry import display_scale
from semidice.reproduce.conclusions import CONCLUSIONS, UNKNOWN, Verdict
from semidice.reproduce.tables import METRICS, RowKey, TableValues, paper_values

# a task of QUBIQ, and a tumour dataset, that ours stand for
_TASK = "kidney"
_SYSTEMS = ("multi_head", "mrnet", "softseg")


class Counterpart(NamedTuple):
    """Rows of the paper that one study stands for, by the paper's columns. same: in words, for the page."""

    file: str
    rows: tuple[RowKey, ...]
    columns: Mapping[str, str]
    same: str


def _rows(metrics: tuple[str, ...], *names: str) -> tuple[RowKey, ...]:
    return tuple(RowKey(name, metric) for name in names for metric in metrics)


def _terms(net: str, kde: str) -> dict[str, str]:
    return {"hard": f"{net}_hard", "ce": f"{net}_ce", "dml": f"{net}_dml", "kde": f"{net}_{kde}"}


def counterparts(kde: str) -> dict[str, tuple[Counterpart, ...]]:
    """By table of the paper. kde: `kde` with our key points, or `kde_paper_keys`."""
    labels = ("majority", "random", "uniform", "weighted", "smoothing")
    students = {"small": "unet_resnet18 on lits", "efficientnet": "unet_efficientnet_b0 on lits"}
    return {
        "qubiq_labels": (
            Counterpart(
                "labels",
                _rows(("dice", "bdice", "ece"), _TASK, "all"),
                {name: name for name in labels},
                "LIDC for QUBIQ",
            ),
        ),
        "qubiq_sota": (
            Counterpart(
                "systems",
                _rows(("bdice",), _TASK, "all"),
                {"dropout": "mc_dropout", "ours": "uniform", **{name: name for name in _SYSTEMS}},
                "LIDC for QUBIQ; ours is the mean with DML1",
            ),
        ),
        "sdl_against_dml": (
            Counterpart(
                "labels",
                (RowKey("qubiq", "bdice"),),
                {"hard": "majority", "sdl": "uniform_sdl", "dml1": "uniform", "dml2": "uniform_dml2"},
                "LIDC for QUBIQ, the mean for Dice weights; no students",
            ),
        ),
        "ce_against_dml": (
            Counterpart(
                "labels",
                (RowKey("qubiq", "dice"),),
                {"ce": "majority_ce", "dml": "majority"},
                "LIDC for QUBIQ; no tumours",
            ),
        ),
        "lits_kits": (
            *(
                Counterpart(
                    "distillation",
                    _rows(("dice", "ece"), row),
                    {"hard": f"{net}_hard", "distillation": f"{net}_{kde}"},
                    _STUDENTS,
                )
                for net, row in students.items()
            ),
            Counterpart(
                "distillation", _rows(("dice",), "unet_resnet50 on lits"), {"hard": "teacher"}, _STUDENTS
            ),
        ),
        "distillation_terms": tuple(
            Counterpart("distillation", (RowKey(row, "dice"),), _terms(net, kde), _STUDENTS)
            for net, row in (("small", "lits"), ("efficientnet", "kits"))
        ),
        "kde_bandwidth": (
            Counterpart(
                "bandwidth",
                (RowKey("lits", "dice"),),
                {"0": "no_kde", **{width: f"h{width}" for width in ("1e-4", "5e-4", "1e-3", "5e-3", "1e-2")}},
                "small student on hippocampus, our keys; without 5e-5",
            ),
        ),
    }


# conclusions that our data cannot judge, and why
NOT_TESTABLE = {
    "raters disagree most on brain_tumor_task2": "a fact about the tasks of QUBIQ",
    "on brain_tumor_task2 uniform weights beat Dice weights in BDice": "LIDC has one task",
    "label smoothing raises Dice of every network": "no smoothing on hippocampus",
    "label smoothing lowers ECE of every network": "no smoothing on hippocampus",
    "the best bandwidth is the same on LiTS and KiTS": "one dataset",
}
_STUDENTS = "students on hippocampus, as far as they were run, for those on LiTS and KiTS"
_KEYS = {"kde_paper_keys": "the paper's keys", "kde": "our keys"}


def our_values(results: Results, table: str, kde: str) -> TableValues:
    """Our numbers in the rows and columns of a table of the paper; only those of studies that were run."""
    values, superior, best = {}, {}, {}
    for part in counterparts(kde).get(table, ()):
        if not results.has(part.file):
            continue
        run = set(results.table(part.file).methods)
        column_of = {method: column for column, method in part.columns.items() if method in run}
        if not column_of:
            continue
        for key in part.rows:
            metric = METRICS[key.metric]
            found = results.comparison(part.file, metric, LEVEL, tuple(column_of))
            columns = [column_of[method] for method in found.methods]
            scale = display_scale(metric)
            values[key] = {
                column: float(mean) * scale for column, mean in zip(columns, found.mean, strict=True)
            }
            is_superior = found.superior(level=LEVEL)
            superior[key] = frozenset(
                (columns[i], columns[j])
                for i in range(len(columns))
                for j in range(len(columns))
                if is_superior[i, j]
            )
            best[key] = frozenset(column_of[method] for method in found.best(level=LEVEL))
    return TableValues(paper_values(table).columns, values, superior, best)


class Check(NamedTuple):
    """The differences that a conclusion is about, with our names; KDE stands for a kind of key points."""

    file: str
    metric: str
    pairs: tuple[tuple[str, str], ...]

    def cells(self, kde: str) -> list[Cell]:
        return [
            Cell(self.file, method.replace("KDE", kde), baseline, self.metric)
            for method, baseline in self.pairs
        ]


def _over(better: str, *others: str) -> tuple[tuple[str, str], ...]:
    return tuple((better, other) for other in others)


def _students(*pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{net}_{better}", worse if worse == "teacher" else f"{net}_{worse}")
        for net in ("small", "efficientnet")
        for better, worse in pairs
    )


_BDICE = "binarized_dice_score"
_SOFT = tuple((label, "majority") for label in ("uniform", "weighted", "smoothing"))
_STEPS = (("ce", "hard"), ("dml", "ce"), ("KDE", "dml"))
CHECKS: Mapping[str, Check] = {
    "soft labels beat the majority vote in Dice on most tasks": Check("labels", "dice_score", _SOFT),
    "soft labels beat the majority vote in BDice on most tasks": Check("labels", _BDICE, _SOFT),
    "soft labels beat the majority vote in ECE on most tasks": Check("labels", "calibration_error", _SOFT),
    "uniform weights have the highest BDice over all tasks": Check(
        "labels", _BDICE, _over("uniform", "majority", "random", "weighted", "smoothing")
    ),
    "Dice weights have the highest Dice over all tasks": Check(
        "labels", "dice_score", _over("weighted", "majority", "random", "uniform", "smoothing")
    ),
    "Dice weights beat the majority vote in Dice, which is judged by that very vote": Check(
        "labels", "dice_score", _over("weighted", "majority")
    ),
    "averaged labels have the highest BDice over all tasks": Check(
        "systems", _BDICE, _over("uniform", "mc_dropout", *_SYSTEMS)
    ),
    "DML1 beats the soft Dice loss": Check("labels", _BDICE, _over("uniform", "uniform_sdl")),
    "DML2 beats the soft Dice loss": Check("labels", _BDICE, _over("uniform_dml2", "uniform_sdl")),
    "DML1 is slightly better than DML2": Check("labels", _BDICE, _over("uniform", "uniform_dml2")),
    "soft labels help the soft Dice loss too": Check("labels", _BDICE, _over("uniform_sdl", "majority")),
    "DML beats cross entropy alone": Check("labels", "dice_score", _over("majority", "majority_ce")),
    "distillation raises Dice of every student": Check(
        "distillation", "dice_score", _students(("KDE", "hard"))
    ),
    "distillation does not raise ECE of any student": Check(
        "distillation", "calibration_error", _students(("KDE", "hard"))
    ),
    "on LiTS the students ResNet18 and EfficientNetB0 pass their teacher": Check(
        "distillation", "dice_score", _students(("KDE", "teacher"))
    ),
    "each term adds to the one before": Check("distillation", "dice_score", _students(*_STEPS)),
    "DML adds to CE": Check("distillation", "dice_score", _students(("dml", "ce"))),
    "KDE adds to DML": Check("distillation", "dice_score", _students(("KDE", "dml"))),
    "1e-3 beats a teacher without KDE": Check("bandwidth", "dice_score", _over("h1e-3", "no_kde")),
}


def check_effects(results: Results) -> dict[Cell, Effect]:
    """All differences of the checks that were run, corrected for their number."""
    cells = [
        cell
        for check in CHECKS.values()
        if results.has(check.file)
        for kde in _KEYS
        for cell in check.cells(kde)
        if {cell.method, cell.baseline} <= set(results.table(check.file).methods)
    ]
    unique = list(dict.fromkeys(cells))
    return dict(zip(unique, results.corrected(unique), strict=True)) if unique else {}


def outcome(verdict: Verdict, effects: Sequence[Effect]) -> str:
    """The verdict of `reproduce` in the light of the p-values: no more is said than they say."""
    if verdict.outcome == "unknown":
        return "undecided"
    if verdict.outcome == "fails":
        is_clear = not effects or any(each.is_significant and not each.is_better for each in effects)
        return "**fails**" if is_clear else "fails, not significantly"
    if not effects:
        return f"**{verdict.outcome}**"
    is_clear = all(each.is_significant and each.is_better for each in effects)
    return "**holds**" if is_clear else "tendency"


def _our_cells(
    results: Results, table: str, conclusion: str, known: Mapping[Cell, Effect], kde: str
) -> tuple[str, list[str]]:
    """Outcome and figures with one kind of key points."""
    verdict = CONCLUSIONS[table][conclusion](our_values(results, table, kde))
    cells = CHECKS[conclusion].cells(kde) if conclusion in CHECKS else []
    about_kde = [cell for cell in cells if cell.method.endswith(f"_{kde}")]
    if verdict == UNKNOWN or (about_kde and not any(cell in known for cell in about_kde)):
        return NOT_RUN.rstrip(".").lower(), []
    if not cells:
        return outcome(verdict, ()), [verdict.detail.replace("lits", "hippocampus")]
    effects = [known[cell] for cell in cells if cell in known]
    differences = [number(each.difference, each.metric, signed=True) for each in effects]
    figures = [
        f"{each.method} − {each.baseline} {difference}, {p_words(each.p)}"
        for each, difference in zip(effects, differences, strict=True)
    ]
    return outcome(verdict, effects), figures


def conclusion_rows(results: Results) -> str:
    """Every conclusion of the paper: its own figures, ours, and what stands for what."""
    known = check_effects(results)
    if not known:
        return NOT_RUN
    rows: list[Row] = [["conclusion", "paper", "here", "figures here", "what stands for what"], ["---"] * 5]
    for table, judges in CONCLUSIONS.items():
        for conclusion, judge in judges.items():
            start = [conclusion, judge(paper_values(table)).detail]
            if conclusion in NOT_TESTABLE:
                rows.append([*start, "not testable", "", NOT_TESTABLE[conclusion]])
                continue
            ours = {kde: _our_cells(results, table, conclusion, known, kde) for kde in _KEYS}
            (same,) = {part.same for part in counterparts("kde")[table]}
            words = {kde: word for kde, (word, _) in ours.items()}
            # both kinds of key points where they differ
            here = "; ".join(f"{word} ({_KEYS[kde]})" for kde, word in words.items())
            here = here if len(set(words.values())) > 1 else words["kde"]
            figures = dict.fromkeys(figure for _, of_kde in ours.values() for figure in of_kde)
            rows.append([*start, here, "; ".join(figures), same])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
