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

from ..data.dataset import Dataset
from ..metrics.registry import SCORES, ScoreKey
from ..paths import RunFolder
from ..statistics.cases import CaseTable, keys_of, methods_of, rows_of
from ..statistics.compare import Comparison, compare_scores
from ..statistics.pairing import PairedScores, paired
from ..statistics.resampling import ALPHA
from ..statistics.tables import Cell, Table, number_text, p_text
from .other_methods import read_cases_of
from .verdict import listed

PLAIN = "argmax"
FITTED = "fitted"
COMMAND = "semidice evaluate RUN --decide dice --decide fitted"


@dataclass(frozen=True)
class RuleScore:
    """One score. comparisons: of each rule with argmax, by method. best: the best set of each method."""

    key: ScoreKey
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
        rules = methods_of(table)
        if PLAIN not in rules or len(rules) < 2:
            notices.append(
                f"The decisions of {method} are left out: {folder.decisions.name} has the rules "
                f"{', '.join(rules) or 'none'}, but {PLAIN} and another one are needed."
            )
            continue
        tables[method] = table
    return tables, notices


def compare_rules(tables: Mapping[str, CaseTable], *, num_resamples: int = 10_000) -> list[RuleScore]:
    """Every metric of masks, Dice first, with the comparison of all rules of each method."""
    keys = dict.fromkeys(key for table in tables.values() for key in keys_of(table))
    scores = []
    for key in sorted(keys, key=lambda each: each.metric != "dice_score"):
        comparisons, best = {}, {}
        for method, table in tables.items():
            of_rules = _paired_rules(table, key)
            if of_rules is None:
                continue
            compare = partial(compare_scores, of_rules, num_resamples=num_resamples)
            comparisons[method] = against_plain = compare(baseline=PLAIN)
            best[method] = tuple(rule for rule in compare().best if rule in against_plain.best)
        if comparisons:
            scores.append(RuleScore(key, comparisons, best))
    return scores


def _paired_rules(table: CaseTable, key: ScoreKey) -> PairedScores | None:
    """The scores of the rules of a method by one metric; None if argmax or every other rule lacks it."""
    rules = methods_of(rows_of(table, key))
    if PLAIN not in rules or len(rules) < 2 or not _has_direction(key):
        return None
    found = paired(table, key, methods=rules, drop=True)
    return found if len(found.cases) > 1 else None


def _has_direction(key: ScoreKey) -> bool:
    try:
        return key.higher_is_better in (True, False)
    except ValueError:
        return False


def differences(score: RuleScore, method: str) -> dict[str, RuleDifference]:
    """Each rule of a method against argmax, in the unit that is shown: percent for shares."""
    comparison, best = score.comparisons[method], score.best[method]
    scale = score.key.scale
    found = {}
    for mean in comparison.means.itertuples():
        rule = mean.Index
        pair = against_plain(comparison, rule)
        found[rule] = RuleDifference(
            rule=rule,
            mean=float(mean.mean * scale),
            mean_low=float(mean.low * scale),
            mean_high=float(mean.high * scale),
            difference=pair["difference"] * scale,
            low=_unbounded(pair["low"], scale),
            high=_unbounded(pair["high"], scale),
            p=pair["p"],
            significant=bool(
                pair["better"] or (rule != PLAIN and comparison.pairs.loc[(PLAIN, rule)].better)
            ),
            better=bool(pair["better"]),
            best=rule in best,
        )
    return found


def against_plain(comparison: Comparison, rule: str) -> Mapping[str, float]:
    """The numbers of a rule minus argmax; 0 of argmax itself."""
    if rule == PLAIN:
        return {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "better": 0.0}
    return {name: float(value) for name, value in comparison.pairs.loc[(rule, PLAIN)].items()}


def _unbounded(end: float, scale: float) -> float:
    """The end of an interval; infinite if only the range of a share limits it.

    That happens if a rule changes the masks of very few cases.
    """
    return math.copysign(math.inf, end) if scale == 100 and abs(end) >= 1 else end * scale


def rules_sentences(score: RuleScore) -> list[str]:
    """What each rule changes; of rules beside the fitted one, only those that change something for sure."""
    others = [rule for rule in score.rules if rule != PLAIN]

    def is_told(rule: str) -> bool:
        found = [differences(score, method).get(rule) for method in score.comparisons]
        return rule == FITTED or FITTED not in others or any(each and each.significant for each in found)

    return [_sentence(score, rule) for rule in others if is_told(rule)]


def _sentence(score: RuleScore, rule: str) -> str:
    of_score = SCORES.get(score.key.metric)
    name = of_score.short_name if of_score is not None and of_score.short_name else str(score.key)
    unit = " points" if score.key.scale == 100 else ""
    changes: dict[str, list[str]] = {"raises": [], "lowers": []}
    unchanged = []
    for method, comparison in score.comparisons.items():
        if rule not in comparison.methods:
            continue
        change = differences(score, method)[rule]
        if not change.significant:
            unchanged.append(method)
            continue
        p = f"p {p_text(change.p)}" if change.p < 0.001 else f"p = {p_text(change.p)}"
        size = number_text(abs(change.difference))
        changes["raises" if change.difference > 0 else "lowers"].append(f"by {size}{unit} for {method} ({p})")
    parts = [f"{verb} {name} {listed(texts)}" for verb, texts in changes.items() if texts]
    subject = f"The {rule} rule"
    if not parts:
        return f"{subject} changes {name} significantly for no method."
    last = f"; for {listed(unchanged)} it changes nothing that is significant" if unchanged else ""
    return f"{subject} {' and '.join(parts)}{last}."


def rules_table(score: RuleScore) -> Table:
    """One row per method and rule: mean, difference from argmax and corrected p; the best set is marked."""
    rows, records = [], []
    for method, comparison in score.comparisons.items():
        for rule in (rule for rule in score.rules if rule in comparison.methods):
            each = differences(score, method)[rule]
            mean = f"{number_text(each.mean)} [{number_text(each.mean_low)}, {number_text(each.mean_high)}]"
            difference = Cell("–")
            if rule != PLAIN:
                ends = ", ".join(number_text(end, signed=True) for end in (each.low, each.high))
                difference = Cell(f"{number_text(each.difference, signed=True)} [{ends}]", each.significant)
            p = Cell("–" if rule == PLAIN else p_text(each.p))
            rows.append((Cell(method), Cell(rule), Cell(mean, each.best), difference, p))
            records.append(_record(comparison, method, each))
    num_cases = sorted({each.num_cases for each in score.comparisons.values()})
    cases = f"{num_cases[0]}" if len(num_cases) == 1 else f"{num_cases[0]} to {num_cases[-1]}"
    note = (
        f"Marked means: not significantly worse than any other rule of the method; marked differences: "
        f"significant (p < {ALPHA:g}, Holm-corrected over the rules of a method, {cases} cases)."
    )
    header = ("method", "rule", f"{score.heading} [95 % interval]", f"minus {PLAIN}", "corrected p")
    return Table(f"Rules of decision: {score.heading}", header, tuple(rows), note, tuple(records))


def _record(comparison: Comparison, method: str, each: RuleDifference) -> dict[str, object]:
    """The plain numbers of a row; shares, not percent."""
    pair, mean = against_plain(comparison, each.rule), comparison.means.loc[each.rule]
    return {
        **comparison.key._asdict(),
        "class": comparison.class_name,
        "method": method,
        "rule": each.rule,
        "num_cases": comparison.num_cases,
        **{name: float(mean[name]) for name in ("mean", "low", "high")},
        "difference": pair["difference"],
        "difference_low": pair["low"],
        "difference_high": pair["high"],
        "p": pair["p"],
        "significant": each.significant,
        "best": each.best,
    }
