"""Which conclusions of the paper hold here: the checks of `semidice reproduce` on our scores.

The paper's data cannot be had here, so other data stand for them: LIDC for QUBIQ, with all seven tasks in one
row, and slices of hippocampus for LiTS and KiTS. A check sees our numbers under the names of the paper's rows
and columns; a row that has no counterpart is missing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from results_tables import (
    BANDWIDTHS,
    LEVEL,
    NETWORKS,
    NOT_RUN,
    Cell,
    Effect,
    Results,
    Row,
    number,
    p_words,
)

from semidice.reproduce.conclusions import CONCLUSIONS, UNKNOWN, Verdict
from semidice.reproduce.paper import METRICS, TUMOURS, RowKey, TableValues, paper_tables

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
    students = dict(zip(NETWORKS, ("unet_resnet18 on lits", "unet_efficientnet_b0 on lits"), strict=True))
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
                _LOSSES,
            ),
            Counterpart(
                "distillation",
                (RowKey("lits", "dice"),),
                {"hard": "small_hard", "sdl": "small_sdl", "dml1": "small_dml", "dml2": "small_dml2"},
                _LOSSES,
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
                    {
                        "hard": f"{net}_hard",
                        "smoothing": f"{net}_smoothing",
                        "distillation": f"{net}_{kde}",
                    },
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
            for net, row in zip(NETWORKS, TUMOURS, strict=True)
        ),
        "kde_bandwidth": (
            Counterpart(
                "bandwidth",
                (RowKey("lits", "dice"),),
                {"0": "no_kde", **{width: f"h{width}" for width in BANDWIDTHS}},
                "small student on hippocampus, our keys",
            ),
        ),
    }


# conclusions that our data cannot judge, and why
NOT_TESTABLE = {
    "raters disagree most on brain_tumor_task2": "a fact about the tasks of QUBIQ",
    "on brain_tumor_task2 uniform weights beat Dice weights in BDice": "LIDC has one task",
    "the best bandwidth is the same on LiTS and KiTS": "one dataset",
}
_STUDENTS = "students on hippocampus for those on LiTS and KiTS"
_LOSSES = "LIDC for QUBIQ, the mean for Dice weights; the small student on hippocampus for LiTS"
_KEYS = {"kde_paper_keys": "the paper's keys", "kde": "our keys"}


def our_values(results: Results, table: str, kde: str) -> TableValues:
    """Our numbers in the rows and columns of a table of the paper; only those of studies that were run."""
    values, superior, best = {}, {}, {}
    for part in counterparts(kde).get(table, ()):
        if not results.has(part.file):
            continue
        run = set(results.table(part.file)["method"])
        column_of = {method: column for column, method in part.columns.items() if method in run}
        if not column_of:
            continue
        for key in part.rows:
            metric = METRICS[key.metric]
            found = results.comparison(part.file, metric, LEVEL, tuple(column_of))
            values[key] = {
                column_of[method]: float(mean) * found.key.scale
                for method, mean in found.means["mean"].items()
            }
            superior[key] = frozenset(
                (column_of[better], column_of[worse])
                for better, worse in found.pairs.index[found.pairs["better"]]
            )
            best[key] = frozenset(column_of[method] for method in found.best)
    return TableValues(paper_tables()[table].paper.columns, values, superior, best)


def _over(file: str, metric: str, better: str, *others: str) -> tuple[Cell, ...]:
    return tuple(Cell(file, better, other, metric) for other in others)


def _students(metric: str, *pairs: tuple[str, str]) -> tuple[Cell, ...]:
    return tuple(
        Cell("distillation", f"{net}_{better}", worse if worse == "teacher" else f"{net}_{worse}", metric)
        for net in NETWORKS
        for better, worse in pairs
    )


def _soft_labels(metric: str) -> tuple[Cell, ...]:
    return tuple(Cell("labels", label, "majority", metric) for label in ("uniform", "weighted", "smoothing"))


def _losses(better: str, worse: str, student: str, other_student: str) -> tuple[Cell, ...]:
    return (
        *_over("labels", _BDICE, better, worse),
        *_over("distillation", _DICE, f"small_{student}", f"small_{other_student}"),
    )


_DICE, _BDICE, _ECE = "dice_score", "binarized_dice_score", "calibration_error"
# the differences that a conclusion is about, with our names; KDE stands for a kind of key points
CHECKS: Mapping[str, tuple[Cell, ...]] = {
    "soft labels beat the majority vote in Dice on most tasks": _soft_labels(_DICE),
    "soft labels beat the majority vote in BDice on most tasks": _soft_labels(_BDICE),
    "soft labels beat the majority vote in ECE on most tasks": _soft_labels(_ECE),
    "uniform weights have the highest BDice over all tasks": _over(
        "labels", _BDICE, "uniform", "majority", "random", "weighted", "smoothing"
    ),
    "Dice weights have the highest Dice over all tasks": _over(
        "labels", _DICE, "weighted", "majority", "random", "uniform", "smoothing"
    ),
    "Dice weights beat the majority vote in Dice, which is judged by that very vote": _over(
        "labels", _DICE, "weighted", "majority"
    ),
    "averaged labels have the highest BDice over all tasks": _over(
        "systems", _BDICE, "uniform", "mc_dropout", *_SYSTEMS
    ),
    "DML1 beats the soft Dice loss": _losses("uniform", "uniform_sdl", "dml", "sdl"),
    "DML2 beats the soft Dice loss": _losses("uniform_dml2", "uniform_sdl", "dml2", "sdl"),
    "DML1 is slightly better than DML2": _losses("uniform", "uniform_dml2", "dml", "dml2"),
    "soft labels help the soft Dice loss too": _losses("uniform_sdl", "majority", "sdl", "hard"),
    "DML beats cross entropy alone": _over("labels", _DICE, "majority", "majority_ce"),
    "label smoothing raises Dice of every network": _students(_DICE, ("smoothing", "hard")),
    "label smoothing lowers ECE of every network": _students(_ECE, ("smoothing", "hard")),
    "distillation raises Dice of every student": _students(_DICE, ("KDE", "hard")),
    "distillation does not raise ECE of any student": _students(_ECE, ("KDE", "hard")),
    "on LiTS the students ResNet18 and EfficientNetB0 pass their teacher": _students(
        _DICE, ("KDE", "teacher")
    ),
    "each term adds to the one before": _students(_DICE, ("ce", "hard"), ("dml", "ce"), ("KDE", "dml")),
    "DML adds to CE": _students(_DICE, ("dml", "ce")),
    "KDE adds to DML": _students(_DICE, ("KDE", "dml")),
    "1e-3 beats a teacher without KDE": _over("bandwidth", _DICE, "h1e-3", "no_kde"),
}


def _cells(conclusion: str, kde: str) -> list[Cell]:
    return [cell._replace(method=cell.method.replace("KDE", kde)) for cell in CHECKS.get(conclusion, ())]


def check_effects(results: Results) -> dict[Cell, Effect]:
    """All differences of the checks that were run, corrected for their number."""
    cells = [
        cell
        for conclusion in CHECKS
        for kde in _KEYS
        for cell in _cells(conclusion, kde)
        if results.has(cell.file) and {cell.method, cell.baseline} <= set(results.table(cell.file)["method"])
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
    cells = _cells(conclusion, kde)
    about_kde = [cell for cell in cells if cell.method.endswith(f"_{kde}")]
    if verdict == UNKNOWN or (about_kde and not any(cell in known for cell in about_kde)):
        return NOT_RUN.rstrip(".").lower(), []
    if not cells:
        return outcome(verdict, ()), [verdict.detail.replace("lits", "hippocampus")]
    effects = [known[cell] for cell in cells if cell in known]
    differences = [number(each.difference, each.key, signed=True) for each in effects]
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
            start = [conclusion, judge(paper_tables()[table].paper).detail]
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
