"""The paper's conclusions as checks of the numbers of a table, ours or the paper's.

    holds      the means say so, and were tested; if the paper claims significance, significantly (p < 0.05,
               Holm-corrected)
    tendency   the means say so, but not significantly, or there are too few cases for a test
    fails      the means say the opposite
    unknown    a number is missing or equal to another, no difference is significant, or nothing was learned

A conclusion about several datasets or networks is checked on those that have numbers. Every conclusion holds
for the paper's own numbers.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from .paper import NETWORKS, QUBIQ, TUMOURS, RowKey, TableValues

Outcome = Literal["holds", "tendency", "fails", "unknown"]


class Verdict(NamedTuple):
    """Outcome of one check, and the numbers behind it in a few words."""

    outcome: Outcome
    detail: str


Judge = Callable[[TableValues], Verdict]
UNKNOWN = Verdict("unknown", "no figures")


def _verdict(so: bool, detail: str, *, significant: bool = True) -> Verdict:
    if not so:
        return Verdict("fails", detail)
    return Verdict("holds" if significant else "tendency", detail)


def _gains(table: TableValues, better: str, worse: str, rows: Sequence[RowKey]) -> dict[RowKey, float]:
    gains = {key: table.gain(key, better, worse) for key in rows}
    return {key: gain for key, gain in gains.items() if gain is not None}


def beats(better: str, worse: str, rows: Sequence[RowKey], *, significant: bool = True) -> Judge:
    """One column is better than another in every row; significantly, if the paper says so."""

    def judge(table: TableValues) -> Verdict:
        gains = _gains(table, better, worse, rows)
        if not gains:
            return UNKNOWN
        wins = sum(gain > 0 for gain in gains.values())
        clear = sum((better, worse) in table.superior.get(key, ()) for key in gains)
        detail = f"on {wins} of {len(gains)}" + (f", significantly on {clear}" if significant else "")
        if wins < len(gains) and min(gains.values()) == 0:
            return Verdict("unknown", f"{detail}, no difference on the others")
        enough = clear == len(gains) if significant else all(key in table.best for key in gains)
        return _verdict(wins == len(gains), detail, significant=enough)

    return judge


def no_worse(better: str, worse: str, rows: Sequence[RowKey]) -> Judge:
    """One column is at least as good as another in every row, in the two digits that are shown."""

    def judge(table: TableValues) -> Verdict:
        wins = [round(gain, 2) >= 0 for gain in _gains(table, better, worse, rows).values()]
        return _verdict(all(wins), f"on {sum(wins)} of {len(wins)}") if wins else UNKNOWN

    return judge


def mostly_beat(columns: Sequence[str], worse: str, rows: Sequence[RowKey]) -> Judge:
    """Each of the columns is better than another in more than half of the rows."""

    def judge(table: TableValues) -> Verdict:
        gains = {column: _gains(table, column, worse, rows).values() for column in columns}
        counts = {
            column: (sum(gain > 0 for gain in known), len(known)) for column, known in gains.items() if known
        }
        if not counts:
            return UNKNOWN
        detail = ", ".join(f"{column} on {wins} of {total}" for column, (wins, total) in counts.items())
        so = all(2 * wins > total for wins, total in counts.values())
        if not so and all(
            2 * sum(gain < 0 for gain in known) < len(known) for known in gains.values() if known
        ):
            return Verdict("unknown", detail)
        tested = all(key in table.best for key in table.present(rows))
        return _verdict(so, detail, significant=tested)

    return judge


def highest(column: str, key: RowKey) -> Judge:
    """The column has the best mean of a row, significantly better than all others."""

    def judge(table: TableValues) -> Verdict:
        cells = table.values.get(key, {})
        if column not in cells or len(cells) < 2:
            return UNKNOWN
        gains = {name: table.gain(key, name, column) or 0.0 for name in cells if name != column}
        runner_up = max(gains, key=lambda name: gains[name])
        if gains[runner_up] == 0:
            return Verdict("unknown", f"{column} and {runner_up} are equal, {cells[column]:.2f}")
        so = gains[runner_up] < 0
        shown = column if so else runner_up
        only_best = table.best.get(key) == frozenset([column])
        return _verdict(so, f"best is {shown}, {cells[shown]:.2f}", significant=only_best)

    return judge


def among_best(column: str, rows: Sequence[RowKey]) -> Judge:
    """In no row is another column significantly superior; unknown if no difference is significant."""

    def judge(table: TableValues) -> Verdict:
        tested = [key for key in table.present(rows) if column in table.values[key] and key in table.best]
        if all(len(table.best[key]) == len(table.values[key]) for key in tested):
            return Verdict("unknown", "no difference is significant") if tested else UNKNOWN
        wins = sum(column in table.best[key] for key in tested)
        return _verdict(wins == len(tested), f"on {wins} of {len(tested)}")

    return judge


def _students_pass_teacher(table: TableValues) -> Verdict:
    teacher = table.value(RowKey(f"{NETWORKS[0]} on lits", "dice"), "hard")
    students = [
        table.value(RowKey(f"{network} on lits", "dice"), "distillation") for network in NETWORKS[1:3]
    ]
    if teacher is None or None in students:
        return UNKNOWN
    passed = [student > teacher for student in students if student is not None]
    return _verdict(all(passed), f"{sum(passed)} of 2 students")


def _each_term_adds(table: TableValues) -> Verdict:
    steps = [
        gain
        for worse, better in (("hard", "ce"), ("ce", "dml"), ("dml", "kde"))
        for gain in _gains(table, better, worse, _TUMOUR_DICE).values()
    ]
    if not steps:
        return UNKNOWN
    detail = f"{sum(step > 0 for step in steps)} of {len(steps)} steps are upwards"
    return Verdict("unknown", detail) if min(steps) == 0 else _verdict(min(steps) > 0, detail)


def _one_optimum(table: TableValues) -> Verdict:
    optima = {}
    for key in table.present(_TUMOUR_DICE):
        cells = {name: value for name, value in table.values[key].items() if name != "0"}
        if len(cells) == len(table.columns) - 1:
            optima[key.name] = [name for name, value in cells.items() if value == max(cells.values())]
    if len(optima) < len(TUMOURS):
        return UNKNOWN
    detail = ", ".join(f"{dataset} {' or '.join(names)}" for dataset, names in optima.items())
    first, second = optima.values()
    if len(first) > 1 or len(second) > 1:
        return Verdict("unknown", detail)
    return _verdict(first == second, detail)


def _sensitive(table: TableValues) -> Verdict:
    rows = {key: table.values[key] for key in table.present(_TUMOUR_DICE) if key in table.best}
    some_are_worse = [len(table.best[key]) < len(cells) for key, cells in rows.items()]
    spread = ", ".join(
        f"{key.name} {max(cells.values()) - min(cells.values()):.2f} points" for key, cells in rows.items()
    )
    return _verdict(all(some_are_worse), spread) if rows else UNKNOWN


def _most_disagreement(table: TableValues) -> Verdict:
    dice = {key.name: table.values[key]["dice"] for key in table.present(_keys("agreement", QUBIQ))}
    if _DISAGREED not in dice or len(dice) < 2:
        return UNKNOWN
    least = min(dice, key=lambda name: dice[name])
    return _verdict(least == _DISAGREED, f"least on {least}, {dice[least]:.2f}")


def _keys(metric: str, names: Sequence[str]) -> list[RowKey]:
    return [RowKey(name, metric) for name in names]


_DISAGREED = "brain_tumor_task2"
_SOFT_LABELS = ("uniform", "weighted", "smoothing")
_TUMOUR_DICE = _keys("dice", TUMOURS)
# the table of the paper has BDice for QUBIQ
_SDL_ROWS = [RowKey("qubiq", "bdice"), *_TUMOUR_DICE]
_NETWORK_ROWS = [f"{network} on {dataset}" for network in NETWORKS for dataset in TUMOURS]
_STUDENT_ROWS = [name for name in _NETWORK_ROWS if not name.startswith(NETWORKS[0])]

# table -> sentence -> check
CONCLUSIONS: dict[str, dict[str, Judge]] = {
    "rater_agreement": {"raters disagree most on brain_tumor_task2": _most_disagreement},
    "qubiq_labels": {
        **{
            f"soft labels beat the majority vote in {name} on most tasks": mostly_beat(
                _SOFT_LABELS, "majority", _keys(metric, QUBIQ)
            )
            for metric, name in (("dice", "Dice"), ("bdice", "BDice"), ("ece", "ECE"))
        },
        "uniform weights have the highest BDice over all tasks": highest("uniform", RowKey("all", "bdice")),
        "Dice weights have the highest Dice over all tasks": highest("weighted", RowKey("all", "dice")),
        "Dice weights beat the majority vote in Dice, which is judged by that very vote": beats(
            "weighted", "majority", [RowKey("all", "dice")]
        ),
        "Dice weights are among the best in Dice on all tasks but brain_tumor_task2": among_best(
            "weighted", [key for key in _keys("dice", QUBIQ) if key.name != _DISAGREED]
        ),
        "on brain_tumor_task2 uniform weights beat Dice weights in BDice": beats(
            "uniform", "weighted", [RowKey(_DISAGREED, "bdice")]
        ),
    },
    "qubiq_sota": {
        "averaged labels have the highest BDice over all tasks": highest("ours", RowKey("all", "bdice")),
        "averaged labels are among the best on every task": among_best("ours", _keys("bdice", QUBIQ)),
    },
    "sdl_against_dml": {
        "DML1 beats the soft Dice loss": beats("dml1", "sdl", _SDL_ROWS),
        "DML2 beats the soft Dice loss": beats("dml2", "sdl", _SDL_ROWS),
        "DML1 is slightly better than DML2": beats("dml1", "dml2", _SDL_ROWS, significant=False),
        "soft labels help the soft Dice loss too": beats("sdl", "hard", _SDL_ROWS, significant=False),
    },
    "ce_against_dml": {
        "DML beats cross entropy alone": beats("dml", "ce", [RowKey("qubiq", "dice"), *_TUMOUR_DICE]),
    },
    "lits_kits": {
        "label smoothing raises Dice of every network": beats(
            "smoothing", "hard", _keys("dice", _NETWORK_ROWS), significant=False
        ),
        "label smoothing lowers ECE of every network": beats(
            "smoothing", "hard", _keys("ece", _NETWORK_ROWS)
        ),
        "distillation raises Dice of every student": beats(
            "distillation", "hard", _keys("dice", _STUDENT_ROWS)
        ),
        "distillation is among the best in Dice for every student": among_best(
            "distillation", _keys("dice", _STUDENT_ROWS)
        ),
        "distillation does not raise ECE of any student": no_worse(
            "distillation", "hard", _keys("ece", _STUDENT_ROWS)
        ),
        "on LiTS the students ResNet18 and EfficientNetB0 pass their teacher": _students_pass_teacher,
    },
    "distillation_terms": {
        "each term adds to the one before": _each_term_adds,
        "DML adds to CE": beats("dml", "ce", _TUMOUR_DICE, significant=False),
        "KDE adds to DML": beats("kde", "dml", _TUMOUR_DICE),
    },
    "kde_bandwidth": {
        "the best bandwidth is the same on LiTS and KiTS": _one_optimum,
        "1e-3 is among the best": among_best("1e-3", _TUMOUR_DICE),
        "1e-3 beats a teacher without KDE": beats("1e-3", "0", _TUMOUR_DICE),
        "the bandwidth matters: some are significantly worse": _sensitive,
    },
}
