"""The section "What we learned" of docs/results.md: sentences that are made from the tables.

A question names cells of tables whose pairs were fixed beforehand. What is said of each follows from its
corrected p-value: better or worse if it is significant, and else that no difference was found. So no sentence
says more than its table. A change is worth doing if it is better in a score and worse in none.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from results_tables import BANDWIDTHS, NETWORKS, NOT_RUN, SCORES_SHOWN, Effect, Results, number, p_words

from semidice.report.answer import listed

Outcome = Literal["better", "worse", "no difference"]


class Item(NamedTuple):
    """A cell of the table. of: its name beside other cells with this score, such as `with two`."""

    method: str
    baseline: str
    metric: str
    of: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (SCORES_SHOWN[self.metric].name, self.of)))


class Question(NamedTuple):
    """A change, and the differences that judge it. section: of the table."""

    change: str
    table: str
    section: str
    items: tuple[Item, ...]


def _scores(method: str, baseline: str, *metrics: str) -> tuple[Item, ...]:
    return tuple(Item(method, baseline, metric) for metric in metrics)


def _networks(better: str, worse: str, *metrics: str) -> tuple[Item, ...]:
    names = dict(zip(NETWORKS, ("of the small student", "of the EfficientNet student"), strict=True))
    return tuple(
        Item(f"{net}_{better}", f"{net}_{worse}", metric, name)
        for metric in metrics
        for net, name in names.items()
    )


_MAIN = ("binarized_dice_score", "calibration_error", "rater_calibration_error", "dice_score")
_LABELS, _DISTILLATION = "labels-and-losses", "distillation"
QUESTIONS: tuple[Question, ...] = (
    Question(
        "The mean of the raters with DML1, in place of their majority with the soft Dice loss",
        "labels_differences",
        _LABELS,
        _scores("uniform", "majority_sdl", *_MAIN, "generalised_energy_distance", "volume_crps_error"),
    ),
    Question(
        "The mean in place of the majority, both with DML1",
        "label_alone_differences",
        "the-label-alone",
        _scores("uniform", "majority", *_MAIN),
    ),
    Question(
        "The mean in place of the majority, both with cross entropy alone",
        "label_alone_differences",
        "the-label-alone",
        _scores("uniform_ce", "majority_ce", *_MAIN, "generalised_energy_distance"),
    ),
    Question(
        "Label smoothing everywhere with DML1, in place of the majority with the soft Dice loss",
        "labels_differences",
        _LABELS,
        _scores("smoothing", "majority_sdl", *_MAIN),
    ),
    Question(
        "Label smoothing at boundaries alone in place of the majority as it is, both with DML1",
        "smoothing_differences",
        "label-smoothing",
        _scores("smoothing_boundary", "majority", *_MAIN),
    ),
    Question(
        "DML1 in place of the soft Dice loss, both on the mean",
        "loss_alone_differences",
        "the-loss-alone",
        _scores("uniform", "uniform_sdl", *_MAIN),
    ),
    Question(
        "DML1 added to cross entropy, on the mean",
        "ce_differences",
        "cross-entropy-alone",
        _scores("uniform", "uniform_ce", *_MAIN),
    ),
    Question(
        "The mean with DML1 in place of each of four systems for several raters",
        "systems_differences",
        "comparison-systems",
        tuple(
            Item("uniform", name, metric, f"against {name}")
            for metric in ("binarized_dice_score", "calibration_error")
            for name in ("mc_dropout", "multi_head", "mrnet", "softseg")
        ),
    ),
    Question(
        "The mean of two or four raters in place of the mask of one",
        "raters_differences",
        "number-of-raters",
        tuple(
            Item(f"raters_{count}_mean", "raters_1", metric, f"with {word}")
            for metric in ("dice_score", "binarized_dice_score", "calibration_error")
            for count, word in ((2, "two"), (4, "four"))
        ),
    ),
    Question(
        "The mean of four raters in place of a random one per epoch",
        "raters_mean_differences",
        "number-of-raters",
        _scores("raters_4_mean", "raters_4_random", *_MAIN),
    ),
    Question(
        "A fitted rule in place of argmax, for the mean with DML1",
        "decisions_differences",
        "decisions",
        _scores("uniform, fitted", "uniform, argmax", "dice_score", "volume_error"),
    ),
    Question(
        "A teacher calibrated by KDE in place of hard labels alone, for two students",
        "distillation_differences",
        _DISTILLATION,
        _networks("kde", "hard", "dice_score", "calibration_error"),
    ),
    Question(
        "DML1 in place of the soft Dice loss, for a small student of a teacher as it is",
        "distillation_losses",
        _DISTILLATION,
        _scores("small_dml", "small_sdl", "dice_score", "calibration_error"),
    ),
    Question(
        "KDE in place of the teacher as it is, for two students",
        "distillation_steps",
        _DISTILLATION,
        _networks("kde", "dml", "dice_score", "calibration_error"),
    ),
    Question(
        "The default key points of KDE in place of the paper's, for two students",
        "distillation_steps",
        _DISTILLATION,
        _networks("kde", "kde_paper_keys", "dice_score", "calibration_error"),
    ),
    Question(
        "A temperature in place of hard labels alone, for two students",
        "distillation_differences",
        _DISTILLATION,
        _networks("temperature", "hard", "dice_score", "calibration_error"),
    ),
    Question(
        "KDE in place of a temperature, for two students",
        "distillation_steps",
        _DISTILLATION,
        _networks("kde", "temperature", "dice_score", "calibration_error"),
    ),
    Question(
        "KDE with each of six bandwidths in place of the teacher as it is, for the small student",
        "bandwidth_differences",
        "bandwidth",
        tuple(
            Item(f"h{width}", "no_kde", metric, f"at {width}")
            for metric in ("dice_score", "calibration_error")
            for width in BANDWIDTHS
        ),
    ),
)


def outcome(effect: Effect) -> Outcome:
    """What may be said of a difference."""
    if not effect.is_significant:
        return "no difference"
    return "better" if effect.is_better else "worse"


# how a clause starts, and on which side of the bound its p-values are
_CLAUSES: Mapping[Outcome, tuple[str, Literal["≤", "≥"]]] = {
    "better": ("better in", "≤"),
    "worse": ("worse in", "≤"),
    "no difference": ("no difference was found in", "≥"),
}


def sentence(question: Question, effects: Sequence[Effect]) -> str:
    """The answer to a question, as one sentence with a link to its table."""
    found = list(zip(question.items, effects, strict=True))
    parts = []
    for kind, (start, relation) in _CLAUSES.items():
        of_kind = [(item, effect) for item, effect in found if outcome(effect) == kind]
        if of_kind:
            named = listed(_named(of_kind, question.items))
            parts.append(f"{start} {named} ({_bound(relation, [effect.p for _, effect in of_kind])})")
    return f"- {question.change}: {'; '.join(parts)} ([table](#{question.section}))."


def _named(found: Sequence[tuple[Item, Effect]], items: Sequence[Item]) -> list[str]:
    """Each score with its difference; as a range if all items of the question with this score are here."""
    texts = []
    for metric in dict.fromkeys(item.metric for item, _ in found):
        of_metric = [(item, effect) for item, effect in found if item.metric == metric]
        ordered = sorted((effect for _, effect in of_metric), key=lambda effect: effect.difference)
        ends = list(dict.fromkeys(_text(effect) for effect in (ordered[0], ordered[-1])))
        if len(of_metric) == sum(item.metric == metric for item in items):
            texts.append(f"{SCORES_SHOWN[metric].name} {' to '.join(ends)}")
        else:
            texts += [f"{item.name} {_text(effect)}" for item, effect in of_metric]
    return texts


def _text(effect: Effect) -> str:
    return number(effect.difference, effect.key, signed=True)


def _bound(relation: Literal["≤", "≥"], p: Sequence[float]) -> str:
    """What holds for all p-values, rounded to the safe side.

    >>> _bound("≤", [0.0101, 0.0002]), _bound("≥", [0.0519, 1.0]), _bound("≤", [0.0312])
    ('p ≤ 0.011', 'p ≥ 0.051', 'p = 0.031')
    """
    if len(set(p)) == 1:
        return p_words(p[0])
    bound = math.ceil(max(p) * 1000) if relation == "≤" else math.floor(min(p) * 1000)
    return f"p {relation} {bound / 1000:.3f}"


def asked(results: Results) -> list[Question]:
    """The questions, with the items that were run."""
    found = []
    for question in QUESTIONS:
        pairs = results.pairs(question.table)
        items = tuple(item for item in question.items if (item.method, item.baseline) in pairs)
        if items:
            found.append(question._replace(items=items))
    return found


_GROUPS: Mapping[frozenset[Outcome], str] = {
    frozenset(["better"]): "**Worth doing**: better, and worse in no score that was asked for.",
    frozenset(["better", "worse"]): "**To be weighed**: better in one score, worse in another.",
    frozenset(["worse"]): "**Not worth doing**: worse, and better in no score that was asked for.",
    frozenset[Outcome](): "**Not decided by these data**.",
}


def claims_text(results: Results) -> str:
    """The section: one sentence per question, grouped by what to do."""
    groups: dict[frozenset[Outcome], list[str]] = {kinds: [] for kinds in _GROUPS}
    for question in asked(results):
        effects = [results.effect(question.table, *item[:3]) for item in question.items]
        kinds = frozenset(outcome(effect) for effect in effects) - {"no difference"}
        groups[kinds].append(sentence(question, effects))
    parts = ["\n".join([_GROUPS[kinds], "", *lines]) for kinds, lines in groups.items() if lines]
    return "\n\n".join(parts) or NOT_RUN
