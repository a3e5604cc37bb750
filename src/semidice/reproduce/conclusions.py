"""What the paper concludes from its tables, as checks that are asked of our figures and of its own.

    holds      it is so; where the paper claims significance, significantly (p < 0.05, Holm-corrected)
    tendency   the means say so, but not significantly
    fails      the means say otherwise
    unknown    a figure that it needs is not there, or nothing differs significantly

Of a claim about several datasets or networks those count that have figures. Every check holds for the
paper's own figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

from .figures import NETWORKS, QUBIQ, TUMOURS, Figures, RowKey

Outcome = Literal["holds", "tendency", "fails", "unknown"]
SOFT = ("uniform", "weighted", "smoothing")
_DISAGREED = "brain_tumor_task2"


class Verdict(NamedTuple):
    """Of one check: the outcome, and the numbers behind it in a few words."""

    outcome: Outcome
    detail: str


Judge = Callable[[Figures], Verdict]
UNKNOWN = Verdict("unknown", "no figures")


@dataclass(frozen=True)
class Conclusion:
    """A sentence of the paper, and how figures are asked whether it holds."""

    sentence: str
    judge: Judge


def keys(metric: str, names: Sequence[str]) -> list[RowKey]:
    """Rows of one metric."""
    return [RowKey(name, metric) for name in names]


def _verdict(so: bool, detail: str, *, significant: bool = True) -> Verdict:
    if not so:
        return Verdict("fails", detail)
    return Verdict("holds" if significant else "tendency", detail)


def beats(better: str, worse: str, rows: Sequence[RowKey], *, significant: bool = True) -> Judge:
    """One column is better than another in every row, and if the paper says so, significantly."""

    def judge(figures: Figures) -> Verdict:
        gains = {key: figures.gain(key, better, worse) for key in figures.present(rows)}
        known = {key: gain for key, gain in gains.items() if gain is not None}
        if not known:
            return UNKNOWN
        wins = sum(gain > 0 for gain in known.values())
        clear = sum((better, worse) in figures.superior.get(key, ()) for key in known)
        detail = f"on {wins} of {len(known)}"
        detail += f", significantly on {clear}" if significant else ""
        return _verdict(wins == len(known), detail, significant=not significant or clear == len(known))

    return judge


def no_worse(better: str, worse: str, rows: Sequence[RowKey]) -> Judge:
    """One column is at least as good as another in every row, to the two digits that are shown."""

    def judge(figures: Figures) -> Verdict:
        gains = [figures.gain(key, better, worse) for key in figures.present(rows)]
        known = [round(gain, 2) >= 0 for gain in gains if gain is not None]
        return _verdict(all(known), f"on {sum(known)} of {len(known)}") if known else UNKNOWN

    return judge


def mostly_beat(columns: Sequence[str], worse: str, rows: Sequence[RowKey]) -> Judge:
    """Each of the columns is better than another in more than half of the rows."""

    def judge(figures: Figures) -> Verdict:
        counts = {}
        for column in columns:
            gains = [figures.gain(key, column, worse) for key in figures.present(rows)]
            known = [gain > 0 for gain in gains if gain is not None]
            if known:
                counts[column] = (sum(known), len(known))
        if not counts:
            return UNKNOWN
        detail = ", ".join(f"{column} on {wins} of {total}" for column, (wins, total) in counts.items())
        return _verdict(all(2 * wins > total for wins, total in counts.values()), detail)

    return judge


def highest(column: str, metric: str, row: str) -> Judge:
    """The column has the best mean of a row, and it is significantly better than all others."""

    def judge(figures: Figures) -> Verdict:
        key = RowKey(row, metric)
        cells = figures.values.get(key, {})
        if column not in cells or len(cells) < 2:
            return UNKNOWN
        gains = {name: figures.gain(key, name, column) or 0.0 for name in cells if name != column}
        top = max(gains, key=lambda name: gains[name])
        so = gains[top] < 0
        alone = figures.best.get(key) == frozenset([column])
        shown = column if so else top
        return _verdict(so, f"best is {shown}, {cells[shown]:.2f}", significant=alone)

    return judge


def among_best(column: str, rows: Sequence[RowKey]) -> Judge:
    """No other is significantly superior to the column, in any row; unknown where all methods are alike."""

    def judge(figures: Figures) -> Verdict:
        judged = [
            key for key in figures.present(rows) if column in figures.values[key] and key in figures.best
        ]
        if all(len(figures.best[key]) == len(figures.values[key]) for key in judged):
            return Verdict("unknown", "no difference is significant") if judged else UNKNOWN
        wins = sum(column in figures.best[key] for key in judged)
        return _verdict(wins == len(judged), f"on {wins} of {len(judged)}")

    return judge


def _students_pass_teacher(figures: Figures) -> Verdict:
    teacher = figures.value(RowKey(f"{NETWORKS[0]} on lits", "dice"), "hard")
    students = [
        figures.value(RowKey(f"{network} on lits", "dice"), "distillation") for network in NETWORKS[1:3]
    ]
    if teacher is None or None in students:
        return UNKNOWN
    passed = [student > teacher for student in students if student is not None]
    return _verdict(all(passed), f"{sum(passed)} of 2 students")


def _each_term_adds(figures: Figures) -> Verdict:
    known, steps = 0, 0
    for key in figures.present(keys("dice", TUMOURS)):
        for worse, better in (("hard", "ce"), ("ce", "dml"), ("dml", "kde")):
            gain = figures.gain(key, better, worse)
            if gain is not None:
                known, steps = known + 1, steps + (gain > 0)
    return _verdict(steps == known, f"{steps} of {known} steps are upwards") if known else UNKNOWN


def _one_optimum(figures: Figures) -> Verdict:
    tops = {}
    for key in figures.present(keys("dice", TUMOURS)):
        cells = {name: value for name, value in figures.values[key].items() if name != "0"}
        if len(cells) == len(figures.columns) - 1:
            tops[key.name] = [name for name, value in cells.items() if value == max(cells.values())]
    if len(tops) < len(TUMOURS):
        return UNKNOWN
    detail = ", ".join(f"{dataset} {' or '.join(top)}" for dataset, top in tops.items())
    first, second = tops.values()
    return _verdict(len(first) == 1 and first == second, detail)


def _sensitive(figures: Figures) -> Verdict:
    rows = [key for key in figures.present(keys("dice", TUMOURS)) if key in figures.best]
    left_out = [len(figures.best[key]) < len(figures.values[key]) for key in rows]
    spread = ", ".join(
        f"{key.name} {max(cells) - min(cells):.2f} points"
        for key in rows
        for cells in [figures.values[key].values()]
    )
    return _verdict(all(left_out), spread) if rows else UNKNOWN


def _most_disagreement(figures: Figures) -> Verdict:
    dice = {key.name: figures.values[key]["dice"] for key in figures.present(keys("agreement", QUBIQ))}
    if _DISAGREED not in dice or len(dice) < 2:
        return UNKNOWN
    least = min(dice, key=lambda name: dice[name])
    return _verdict(least == _DISAGREED, f"least on {least}, {dice[least]:.2f}")


_QUBIQ_BUT_ONE = tuple(task for task in QUBIQ if task != _DISAGREED)
_THREE = ("qubiq", *TUMOURS)
# QUBIQ is judged by BDice there
_SDL_ROWS = (RowKey("qubiq", "bdice"), RowKey("lits", "dice"), RowKey("kits", "dice"))
_ALL_NETWORKS = tuple(f"{network} on {dataset}" for network in NETWORKS for dataset in TUMOURS)
_STUDENTS = tuple(f"{network} on {dataset}" for network in NETWORKS[1:] for dataset in TUMOURS)


CONCLUSIONS: dict[str, tuple[Conclusion, ...]] = {
    "rater_agreement": (Conclusion("raters disagree most on brain_tumor_task2", _most_disagreement),),
    "qubiq_labels": (
        *(
            Conclusion(
                f"soft labels beat the majority vote in {name} on most tasks",
                mostly_beat(SOFT, "majority", keys(metric, QUBIQ)),
            )
            for metric, name in (("dice", "Dice"), ("bdice", "BDice"), ("ece", "ECE"))
        ),
        Conclusion(
            "uniform weights have the highest BDice over all tasks", highest("uniform", "bdice", "all")
        ),
        Conclusion("Dice weights have the highest Dice over all tasks", highest("weighted", "dice", "all")),
        Conclusion(
            "Dice weights beat the majority vote in Dice, which is judged by that very vote",
            beats("weighted", "majority", [RowKey("all", "dice")]),
        ),
        Conclusion(
            "Dice weights are among the best in Dice on all tasks but brain_tumor_task2",
            among_best("weighted", keys("dice", _QUBIQ_BUT_ONE)),
        ),
        Conclusion(
            "on brain_tumor_task2 uniform weights beat Dice weights in BDice",
            beats("uniform", "weighted", [RowKey(_DISAGREED, "bdice")]),
        ),
    ),
    "qubiq_sota": (
        Conclusion("averaged labels have the highest BDice over all tasks", highest("ours", "bdice", "all")),
        Conclusion(
            "averaged labels are among the best on every task", among_best("ours", keys("bdice", QUBIQ))
        ),
    ),
    "sdl_against_dml": (
        Conclusion("DML1 beats the soft Dice loss", beats("dml1", "sdl", _SDL_ROWS)),
        Conclusion("DML2 beats the soft Dice loss", beats("dml2", "sdl", _SDL_ROWS)),
        Conclusion("DML1 is slightly better than DML2", beats("dml1", "dml2", _SDL_ROWS, significant=False)),
        Conclusion(
            "soft labels help the soft Dice loss too", beats("sdl", "hard", _SDL_ROWS, significant=False)
        ),
    ),
    "ce_against_dml": (
        Conclusion("DML beats cross entropy alone", beats("dml", "ce", keys("dice", _THREE))),
    ),
    "lits_kits": (
        Conclusion(
            "label smoothing raises Dice of every network",
            beats("smoothing", "hard", keys("dice", _ALL_NETWORKS), significant=False),
        ),
        Conclusion(
            "label smoothing lowers ECE of every network",
            beats("smoothing", "hard", keys("ece", _ALL_NETWORKS)),
        ),
        Conclusion(
            "distillation raises Dice of every student",
            beats("distillation", "hard", keys("dice", _STUDENTS)),
        ),
        Conclusion(
            "distillation is among the best in Dice for every student",
            among_best("distillation", keys("dice", _STUDENTS)),
        ),
        Conclusion(
            "distillation does not raise ECE of any student",
            no_worse("distillation", "hard", keys("ece", _STUDENTS)),
        ),
        Conclusion(
            "on LiTS the students ResNet18 and EfficientNetB0 pass their teacher", _students_pass_teacher
        ),
    ),
    "distillation_terms": (
        Conclusion("each term adds to the one before", _each_term_adds),
        Conclusion("DML adds to CE", beats("dml", "ce", keys("dice", TUMOURS), significant=False)),
        Conclusion("KDE adds to DML", beats("kde", "dml", keys("dice", TUMOURS))),
    ),
    "kde_bandwidth": (
        Conclusion("the best bandwidth is the same on LiTS and KiTS", _one_optimum),
        Conclusion("1e-3 is among the best", among_best("1e-3", keys("dice", TUMOURS))),
        Conclusion("1e-3 beats a teacher without KDE", beats("1e-3", "0", keys("dice", TUMOURS))),
        Conclusion("the bandwidth matters: some are significantly worse", _sensitive),
    ),
}


class Match(NamedTuple):
    """How often ours and the paper say the same, of how many."""

    same: int
    total: int

    def __str__(self) -> str:
        return f"{self.same} of {self.total}"


def order_match(ours: Figures, paper: Figures) -> Match:
    """Pairs of columns of a row that are in the paper's order; those equal in the paper are left out."""
    same = total = 0
    for key in paper.values:
        if key.metric == "agreement":
            continue
        for first, second in combinations(paper.columns, 2):
            theirs, here = paper.gain(key, first, second), ours.gain(key, first, second)
            if here is None or not theirs:
                continue
            total, same = total + 1, same + (here * theirs > 0)
    return Match(same, total)


def best_match(ours: Figures, paper: Figures) -> Match:
    """Cells that are marked, or not marked, as in the paper."""
    same = total = 0
    for key, marks in ours.best.items():
        theirs = paper.best.get(key)
        for column in ours.values[key] if theirs else ():
            total, same = total + 1, same + ((column in marks) == (column in (theirs or ())))
    return Match(same, total)


def close_match(ours: Figures, paper: Figures, *, points: float) -> Match:
    """Figures within so many points of the paper's."""
    differences = [
        abs(value - theirs)
        for key, cells in ours.values.items()
        for column, value in cells.items()
        if column != "raters" and (theirs := paper.value(key, column)) is not None
    ]
    return Match(sum(difference <= points for difference in differences), len(differences))
