"""The section "What we learned" of docs/results.md: sentences that are made from the tables.

A question names cells of tables whose pairs were fixed beforehand. What is said of each follows from its
corrected p-value: better or worse if it is significant, and else that no difference was found. So no sentence
says more than its table.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from results_tables import BANDWIDTHS, NOT_RUN, SCORES_SHOWN, Effect, Results, number, p_words

from semidice.report.verdict import listed

Outcome = Literal["better", "worse", "no difference"]


class Item(NamedTuple):
    """One difference: its name in the sentence, and the cell of the table."""

    name: str
    method: str
    baseline: str
    metric: str


class Question(NamedTuple):
    """A change, and the differences that judge it. advice: what to do if it helps. section: of the table."""

    change: str
    advice: str
    table: str
    section: str
    items: tuple[Item, ...]


def _scores(method: str, baseline: str, *metrics: str) -> tuple[Item, ...]:
    return tuple(Item(SCORES_SHOWN[metric].name, method, baseline, metric) for metric in metrics)


def _networks(better: str, worse: str, *metrics: str) -> tuple[Item, ...]:
    names = {"small": "the small student", "efficientnet": "the EfficientNet student"}
    return tuple(
        Item(f"{SCORES_SHOWN[metric].name} of {name}", f"{net}_{better}", f"{net}_{worse}", metric)
        for net, name in names.items()
        for metric in metrics
    )


_MAIN = ("binarized_dice_score", "calibration_error", "rater_calibration_error", "dice_score")
_LABELS, _DISTILLATION = "labels-and-losses", "distillation"
QUESTIONS: tuple[Question, ...] = (
    Question(
        "The mean of the raters with DML1, in place of their majority with the soft Dice loss",
        "train on the mean with DML1",
        "labels_differences",
        _LABELS,
        _scores("uniform", "majority_sdl", *_MAIN, "generalised_energy_distance", "volume_crps_error_ml"),
    ),
    Question(
        "The mean in place of the majority, both with DML1",
        "keep the raters apart until the label is made",
        "label_alone_differences",
        "the-label-alone",
        _scores("uniform", "majority", *_MAIN),
    ),
    Question(
        "The mean in place of the majority, both with cross entropy alone",
        "train on the mean with cross entropy alone",
        "label_alone_differences",
        "the-label-alone",
        _scores("uniform_ce", "majority_ce", *_MAIN, "generalised_energy_distance"),
    ),
    Question(
        "Label smoothing of the majority with DML1, in place of the majority with the soft Dice loss",
        "smooth the label everywhere alike",
        "labels_differences",
        _LABELS,
        _scores("smoothing", "majority_sdl", *_MAIN),
    ),
    Question(
        "DML1 in place of the soft Dice loss, both on the mean",
        "use DML1 for a soft label",
        "loss_alone_differences",
        "the-loss-alone",
        _scores("uniform", "uniform_sdl", *_MAIN),
    ),
    Question(
        "DML1 added to cross entropy, on the mean",
        "add DML1 to cross entropy",
        "ce_differences",
        "cross-entropy-alone",
        _scores("uniform", "uniform_ce", *_MAIN),
    ),
    Question(
        "The mean with DML1 in place of a system for several raters",
        "try the mean with DML1 before such a system",
        "systems_differences",
        "comparison-systems",
        tuple(
            Item(f"{SCORES_SHOWN[metric].name} against {name}", "uniform", name, metric)
            for metric in ("binarized_dice_score", "calibration_error")
            for name in ("mc_dropout", "multi_head", "mrnet", "softseg")
        ),
    ),
    Question(
        "The mean of more raters in place of the mask of one",
        "ask a second rater",
        "raters_differences",
        "number-of-raters",
        tuple(
            Item(f"{SCORES_SHOWN[metric].name} with {count}", f"raters_{count}_mean", "raters_1", metric)
            for metric in ("dice_score", "binarized_dice_score", "calibration_error")
            for count in (2, 4)
        ),
    ),
    Question(
        "The mean of four raters in place of a random one per epoch",
        "average the raters",
        "raters_mean_differences",
        "number-of-raters",
        _scores("raters_4_mean", "raters_4_random", *_MAIN),
    ),
    Question(
        "A fitted rule in place of argmax, for the mean with DML1",
        "fit the rule that makes masks",
        "decisions_differences",
        "decisions",
        _scores("uniform, fitted", "uniform, argmax", "dice_score", "volume_error_ml"),
    ),
    Question(
        "A teacher calibrated by KDE in place of hard labels alone",
        "distil from a teacher calibrated by KDE",
        "distillation_differences",
        _DISTILLATION,
        _networks("kde", "hard", "dice_score", "calibration_error"),
    ),
    Question(
        "DML1 in place of the soft Dice loss, both for a student of a teacher as it is",
        "use DML1 for a teacher's probabilities",
        "distillation_losses",
        _DISTILLATION,
        _networks("dml", "sdl", "dice_score", "calibration_error"),
    ),
    Question(
        "KDE in place of the teacher as it is",
        "calibrate the teacher by KDE",
        "distillation_steps",
        _DISTILLATION,
        _networks("kde", "dml", "dice_score", "calibration_error"),
    ),
    Question(
        "KDE in place of a temperature",
        "prefer KDE to a temperature",
        "distillation_steps",
        _DISTILLATION,
        _networks("kde", "temperature", "dice_score", "calibration_error"),
    ),
    Question(
        "KDE with one of six bandwidths in place of the teacher as it is",
        "use KDE with such a bandwidth",
        "bandwidth_differences",
        "bandwidth",
        tuple(Item(f"Dice at {width}", f"h{width}", "no_kde", "dice_score") for width in BANDWIDTHS),
    ),
)


def outcome(effect: Effect) -> Outcome:
    """What may be said of a difference."""
    if not effect.is_significant:
        return "no difference"
    return "better" if effect.is_better else "worse"


def sentence(question: Question, effects: Sequence[Effect]) -> str:
    """The answer to a question, as one sentence with a link to its table."""
    named = [
        (
            outcome(effect),
            item.name,
            f"{number(effect.difference, effect.metric, signed=True)}, {p_words(effect.p)}",
        )
        for item, effect in zip(question.items, effects, strict=True)
    ]
    parts = []
    for kind, start in (
        ("better", "better in"),
        ("worse", "worse in"),
        ("no difference", "no difference was found in"),
    ):
        found = [f"{name} ({text})" for of_kind, name, text in named if of_kind == kind]
        if found:
            parts.append(f"{start} {listed(found)}")
    answer = f"{'; '.join(parts)}: {_advice(question, named)}"
    return f"- **{question.change}**: {answer} ([table](#{question.section}))."


def _advice(question: Question, named: Sequence[tuple[Outcome, str, str]]) -> str:
    kinds = {kind: [name for of_kind, name, _ in named if of_kind == kind] for kind, _, _ in named}
    if "better" in kinds and "worse" in kinds:
        return f"so weigh both before you {question.advice}"
    if "better" in kinds:
        return f"so {question.advice}"
    if "worse" in kinds:
        return f"so do not {question.advice}"
    return "so these data decide nothing"


def asked(results: Results) -> list[Question]:
    """The questions, with the items that were run."""
    found = []
    for question in QUESTIONS:
        pairs = results.pairs(question.table)
        items = tuple(item for item in question.items if (item.method, item.baseline) in pairs)
        if items:
            found.append(question._replace(items=items))
    return found


def claims_text(results: Results) -> str:
    """The section: one sentence per question."""
    sentences = [
        sentence(question, [results.effect(question.table, *item[1:]) for item in question.items])
        for question in asked(results)
    ]
    return "\n".join(sentences) or NOT_RUN
