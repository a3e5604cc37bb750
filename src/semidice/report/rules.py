"""Which decision: the rules that turn the probabilities of a method into masks, compared on the same cases.

RUN/decisions.parquet, which `semidice evaluate RUN --decide RULE` writes, is a case table whose methods are
the rules. Each rule of a method is compared with argmax, the plain rule, and Holm's correction is over these
comparisons. The best set is that of all pairs of rules, as for methods, without rules that are significantly
worse than argmax, and without argmax if another rule is significantly better.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..data.dataset import Dataset
from ..metrics.cases import CaseTable
from ..metrics.pairing import PairedScores
from ..metrics.registry import SCORES, display_scale, higher_is_better, score_name, spoken_name
from ..metrics.statistics import Comparison, compare_scores
from ..metrics.tables import Cell, Table, number_text, p_text
from ..paths import RunFolder
from .other_methods import read_cases_of
from .verdict import listed

PLAIN = "argmax"
FITTED = "fitted"
COMMAND = "semidice evaluate RUN --decide dice --decide fitted"


@dataclass(frozen=True)
class RuleScore:
    """One metric. comparisons: of each rule with argmax, by method. best: the best set of each method."""

    metric: str
    comparisons: Mapping[str, Comparison]
    best: Mapping[str, tuple[str, ...]]

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of all methods: argmax, then fitted, then the others in order of appearance."""
        names = dict.fromkeys(rule for each in self.comparisons.values() for rule in each.methods)
        return tuple(sorted(names, key=lambda rule: (rule != PLAIN, rule != FITTED)))

    @property
    def heading(self) -> str:
        return next(iter(self.comparisons.values())).heading


@dataclass(frozen=True)
class RuleDifference:
    """A rule of a method: mean, and its difference from argmax; interval and p are Holm-corrected."""

    rule: str
    mean: float
    mean_low: float
    mean_high: float
    difference: float
    low: float
    high: float
    p: float
    significant: bool
    better: bool
    best: bool


def read_rules(runs: Mapping[str, RunFolder], dataset: Dataset) -> tuple[dict[str, CaseTable], list[str]]:
    """The scores of the rules of each run that has them, and a sentence on each run that is left out.

    A file that is not such a table is a ValueError.
    """
    tables, notices = {}, []
    for method, folder in runs.items():
        if not folder.decisions.is_file():
            continue
        table = read_cases_of(dataset, folder.decisions, COMMAND)
        if PLAIN not in table.methods or len(table.methods) < 2:
            notices.append(
                f"The decisions of {method} are left out: {folder.decisions.name} has the rules "
                f"{', '.join(table.methods) or 'none'}, but {PLAIN} and another one are needed."
            )
            continue
        tables[method] = table
    return tables, notices


def compare_rules(
    tables: Mapping[str, CaseTable], *, num_resamples: int = 10_000, level: float = 0.05
) -> list[RuleScore]:
    """Every metric of masks, Dice first, with the comparison of all rules of each method."""
    metrics = dict.fromkeys(metric for table in tables.values() for metric in table.metrics)
    scores = []
    for metric in sorted(metrics, key=lambda name: score_name(name) != "dice_score"):
        comparisons, best = {}, {}
        for method, table in tables.items():
            paired = _paired_rules(table, metric)
            if paired is None:
                continue
            compare = partial(compare_scores, paired, num_resamples=num_resamples, level=level)
            comparisons[method] = against_plain = compare(baseline=PLAIN)
            unbeaten = against_plain.best(level=level)
            best[method] = tuple(rule for rule in compare().best(level=level) if rule in unbeaten)
        if comparisons:
            scores.append(RuleScore(metric, comparisons, best))
    return scores


def _paired_rules(table: CaseTable, metric: str) -> PairedScores | None:
    """The scores of the rules of a method by one metric; None if argmax or every other rule lacks it."""
    rules = table.select(metric=metric).methods
    if PLAIN not in rules or len(rules) < 2:
        return None
    try:
        higher_is_better(metric)
    except ValueError:
        return None
    paired = table.paired(metric, methods=rules, missing="drop")
    return paired if len(paired.cases) > 1 else None


def differences(score: RuleScore, method: str, *, level: float = 0.05) -> dict[str, RuleDifference]:
    """Each rule of a method against argmax, in the unit that is shown: percent for shares."""
    comparison, best = score.comparisons[method], score.best[method]
    scale = display_scale(comparison.metric)
    plain = comparison.methods.index(PLAIN)
    corrected, superior = comparison.corrected(), comparison.superior(level=level)
    return {
        rule: RuleDifference(
            rule=rule,
            mean=float(comparison.mean[at] * scale),
            mean_low=float(comparison.mean_low[at] * scale),
            mean_high=float(comparison.mean_high[at] * scale),
            difference=float(corrected.value[at, plain] * scale),
            low=_unbounded(float(corrected.low[at, plain]), scale),
            high=_unbounded(float(corrected.high[at, plain]), scale),
            p=float(corrected.p[at, plain]),
            significant=bool(superior[at, plain] or superior[plain, at]),
            better=bool(superior[at, plain]),
            best=rule in best,
        )
        for at, rule in enumerate(comparison.methods)
    }


def _unbounded(end: float, scale: float) -> float:
    """The end of an interval; infinite if only the range of a share limits it.

    That happens if a rule changes the masks of very few cases.
    """
    return math.copysign(math.inf, end) if scale == 100 and abs(end) >= 1 else end * scale


def rules_sentences(score: RuleScore, *, level: float = 0.05) -> list[str]:
    """What each rule changes; of rules beside the fitted one, only those that change something for sure."""
    others = [rule for rule in score.rules if rule != PLAIN]

    def is_told(rule: str) -> bool:
        found = [differences(score, method, level=level).get(rule) for method in score.comparisons]
        return rule == FITTED or FITTED not in others or any(each and each.significant for each in found)

    return [_sentence(score, rule, level) for rule in others if is_told(rule)]


def _sentence(score: RuleScore, rule: str, level: float) -> str:
    name = SCORES[score_name(score.metric)].short_name if score_name(score.metric) in SCORES else None
    unit = " points" if display_scale(score.metric) == 100 else ""
    changes: dict[str, list[str]] = {"raises": [], "lowers": []}
    unchanged = []
    for method, comparison in score.comparisons.items():
        if rule not in comparison.methods:
            continue
        change = differences(score, method, level=level)[rule]
        if not change.significant:
            unchanged.append(method)
            continue
        p = f"p {p_text(change.p)}" if change.p < 0.001 else f"p = {p_text(change.p)}"
        size = number_text(abs(change.difference))
        changes["raises" if change.difference > 0 else "lowers"].append(f"by {size}{unit} for {method} ({p})")
    parts = [
        f"{verb} {name or spoken_name(score.metric)} {listed(texts)}"
        for verb, texts in changes.items()
        if texts
    ]
    subject = f"The {rule} rule"
    if not parts:
        return f"{subject} changes {name or spoken_name(score.metric)} significantly for no method."
    last = f"; for {listed(unchanged)} it changes nothing that is significant" if unchanged else ""
    return f"{subject} {' and '.join(parts)}{last}."


def rules_table(score: RuleScore, *, level: float = 0.05) -> Table:
    """One row per method and rule: mean, difference from argmax and corrected p; the best set is marked."""
    rows, records = [], []
    for method, comparison in score.comparisons.items():
        for rule in (rule for rule in score.rules if rule in comparison.methods):
            each = differences(score, method, level=level)[rule]
            mean = f"{number_text(each.mean)} [{number_text(each.mean_low)}, {number_text(each.mean_high)}]"
            difference = Cell("–")
            if rule != PLAIN:
                ends = ", ".join(number_text(end, signed=True) for end in (each.low, each.high))
                difference = Cell(f"{number_text(each.difference, signed=True)} [{ends}]", each.significant)
            p = Cell("–" if rule == PLAIN else p_text(each.p))
            rows.append((Cell(method), Cell(rule), Cell(mean, each.best), difference, p))
            records.append(_record(comparison, method, rule, each))
    num_cases = sorted({each.num_cases for each in score.comparisons.values()})
    cases = f"{num_cases[0]}" if len(num_cases) == 1 else f"{num_cases[0]} to {num_cases[-1]}"
    note = (
        f"Marked means: not significantly worse than any other rule of the method; marked differences: "
        f"significant (p < {level:g}, Holm-corrected over the rules of a method, {cases} cases)."
    )
    header = ("method", "rule", f"{score.heading} [95 % interval]", f"minus {PLAIN}", "corrected p")
    return Table(f"Rules of decision: {score.heading}", header, tuple(rows), note, tuple(records))


def _record(comparison: Comparison, method: str, rule: str, each: RuleDifference) -> dict[str, object]:
    """The plain numbers of a row; shares, not percent."""
    at, plain = comparison.methods.index(rule), comparison.methods.index(PLAIN)
    corrected = comparison.corrected()
    numbers = {
        "mean": comparison.mean[at],
        "low": comparison.mean_low[at],
        "high": comparison.mean_high[at],
        "difference": corrected.value[at, plain],
        "difference_low_holm": corrected.low[at, plain],
        "difference_high_holm": corrected.high[at, plain],
        "p_holm": corrected.p[at, plain],
    }
    return {
        "metric": comparison.metric,
        "class": comparison.class_name,
        "method": method,
        "rule": rule,
        "num_cases": comparison.num_cases,
        **{name: float(np.asarray(number)) for name, number in numbers.items()},
        "significant": each.significant,
        "best": each.best,
    }
