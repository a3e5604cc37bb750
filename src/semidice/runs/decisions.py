"""Rules that make masks, fitted and scored on the out-of-fold predictions of a run; no network is needed.

    rule     argmax, threshold:T, dice, ... as `decisions.Decision` reads them, or `fitted`
    fitted   for each fold, the rule that is best on the predictions of all other folds: no case has a part in
             the choice of the rule that it is scored by. New scans get the rule that is best on all folds

Only scores of masks depend on the rule. They are stored by rule in decisions.parquet of the run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..data.dataset import Dataset, Unit
from ..data.folds import fold_cases, read_folds
from ..decisions.decision import Decision
from ..decisions.fitting import CANDIDATES, Case, ScoredCase, choose_decision, score_candidates
from ..errors import UserError, given
from ..labels.raters import read_raters
from ..locks import locked
from ..metrics.registry import SCORES
from ..recipes.options import FITTED, checked_rule
from ..statistics.cases import (
    CaseTable,
    concatenate,
    in_order,
    keys_of,
    read_cases,
    rows_of,
    with_scores,
    write_cases,
)
from .decision_file import ALL_FOLDS, FittedRule, store_rules, stored_fits
from .run import TrainedRun
from .scoring import inapplicable_metrics, predicted_batches, score_fold

ARGMAX = str(Decision())


def rule_names(texts: Sequence[str]) -> list[str]:
    """The rules as tables name them, argmax first; a ValueError names one that does not exist."""
    with given("--decide"):
        return list(dict.fromkeys((ARGMAX, *map(checked_rule, texts))))


def mask_metrics(dataset: Dataset, metrics: Sequence[str], *, asked: bool = False) -> list[str]:
    """The metrics that a rule changes and that apply to the dataset; Dice if there is none.

    asked: whether the user named them. Then one that no rule changes is a ValueError.
    """
    unknown = [name for name in metrics if name not in SCORES]
    if unknown:
        inapplicable_metrics(dataset, unknown)
    others = [name for name in metrics if SCORES[name].judges != "mask"]
    if asked and others:
        known = [name for name, score in SCORES.items() if score.judges == "mask"]
        raise UserError(
            f"no rule changes {', '.join(others)}: scores of masks are {', '.join(known)}; leave out "
            "--decide for the others"
        )
    left_out = inapplicable_metrics(dataset, metrics)
    return [name for name in metrics if SCORES[name].judges == "mask" and name not in left_out] or [
        "dice_score"
    ]


def fitted_rules(
    run: TrainedRun, dataset: Dataset, *, on_scan: Callable[[], object] = lambda: None
) -> Mapping[str, FittedRule]:
    """The fitted rule of each finished fold, and "all"; fitted now unless decision.json has them.

    on_scan() is called after each scan that all candidates were scored on. decision.json is written if all
    folds are finished.
    """
    fits, folds = stored_fits(run, dataset), run.finished_folds
    names = [str(fold) for fold in folds]
    candidates = {str(each) for each in CANDIDATES}
    if fits.rules.keys() == {*names, ALL_FOLDS} and all(
        set(fit.scores) == candidates for fit in fits.rules.values()
    ):
        return fits.rules
    check_can_fit(run, "a fitted rule")
    # each case is scored once, and has a part in the fits of all folds but its own
    scored: dict[str, list[ScoredCase]] = {name: [] for name in names}
    for fold in folds:
        for case in score_candidates(_held_out(run, dataset, fold)):
            scored[str(fold)].append(case)
            on_scan()
    rules = {}
    for name in (*names, ALL_FOLDS):
        fitted = choose_decision(case for fold in names if fold != name for case in scored[fold])
        rules[name] = FittedRule(
            decision=str(fitted.decision), scores=dict(fitted.scores), num_cases=fitted.num_cases
        )
    if not run.missing_folds:
        store_rules(run, dataset, rules)
    return rules


def check_can_fit(run: TrainedRun, what: str) -> None:
    """A ValueError unless two folds are finished; what: is fitted, for the message."""
    if len(run.finished_folds) < 2:
        raise UserError(
            f"{what} of a fold is chosen on the other folds, but {run.folder.path} has "
            f"{len(run.finished_folds)} finished fold: train the others with `semidice train --resume`"
        )


def _held_out(run: TrainedRun, dataset: Dataset, fold: int) -> Iterator[Case]:
    """Probabilities, majority, valid and patient of the held-out cases of a fold, in the unit of scores."""
    cases = fold_cases(read_folds(run.folder.folds, dataset), fold)[1]
    unit = run.recipe.validation.unit
    for batch in predicted_batches(dataset, cases, run.folder.fold(fold), unit=unit):
        target = read_raters(batch.masks, dataset.num_classes, batch.present, batched=True).majority()
        for row, patient in enumerate(batch.patients):
            valid = None if batch.valid is None else batch.valid[row]
            yield batch.prob[row], target[row], valid, patient


def rule_of_fold(rule: str, fitted: Mapping[str, FittedRule], fold: int | str) -> Decision:
    """The decision of a fold, by a rule of `rule_names`; fitted: needed for the rule `fitted` alone."""
    return Decision.parse(fitted[str(fold)].decision if rule == FITTED else rule)


def score_rules(
    run: TrainedRun,
    dataset: Dataset,
    rules: Sequence[str],
    *,
    metrics: Sequence[str],
    unit: Unit | None = None,
    tolerance: float | None = None,
    device: torch.device | str = "cpu",
    on_cases: Callable[[int], object] = lambda _: None,
) -> CaseTable:
    """Scores of masks of the finished folds by each rule; the methods are the rules.

    unit, tolerance: None takes those of the recipe.
    """
    validation = run.recipe.validation
    fold_of_case = read_folds(run.folder.folds, dataset)
    fitted = fitted_rules(run, dataset) if FITTED in rules else {}
    tables = [
        score_fold(
            dataset,
            fold_cases(fold_of_case, fold)[1],
            run.folder.fold(fold),
            metrics=metrics,
            method=rule,
            fold=fold,
            unit=unit or validation.unit,
            tolerance=validation.tolerance if tolerance is None else tolerance,
            device=device,
            decision=rule_of_fold(rule, fitted, fold),
            on_cases=on_cases,
        )
        for rule in rules
        for fold in run.finished_folds
    ]
    return in_order(mask_scores(concatenate(tables)))


def mask_scores(table: CaseTable) -> CaseTable:
    """The rows of scores of masks: scores against the truth are added to every table of phantoms."""
    names = [name for name, score in SCORES.items() if score.judges == "mask"]
    return table[table["metric"].isin(names)]


def add_decisions(run: TrainedRun, scores: CaseTable) -> CaseTable:
    """Add the scores of rules to decisions.parquet, and return the whole table.

    Rows of the same rule and score are replaced. If argmax has other scores than before, the predictions have
    changed, and all older rows are dropped.
    """
    with locked(run.folder, "semidice evaluate"):
        table = _with_older_rules(run, scores)
        write_cases(table, run.folder.decisions)
    return table


def _with_older_rules(run: TrainedRun, scores: CaseTable) -> CaseTable:
    path = run.folder.decisions
    if path.is_file():
        older = read_cases(path)
        shared = [key for key in keys_of(scores) if key in keys_of(older)]
        before, now = (
            [in_order(rows_of(each[each["method"] == ARGMAX], key)) for key in shared]
            for each in (older, scores)
        )
        if shared and all(map(lambda old, new: old.equals(new), before, now)):
            return with_scores(older, scores)
    return scores
