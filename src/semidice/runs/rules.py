"""Rules that make masks, fitted and scored on the held-out predictions of a run; no network is needed.

    rule     argmax, threshold:T, dice, ... as `decisions.Decision` reads them, or `fitted`
    fitted   for each fold, the rule that is best on the predictions of all other folds: no case has a part in
             the choice of the rule that it is scored by. New scans get the rule that is best on all folds

Only scores of masks depend on the rule. They are stored by rule in decisions.parquet of the run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from rich.console import Console

from ..console import progress_bar, say
from ..data.dataset import Dataset
from ..decisions.decision import Decision
from ..decisions.fitting import CANDIDATES, Case, ScoredCase, choose_decision, score_candidates
from ..errors import UserError, given
from ..labels.raters import read_raters
from ..metrics.registry import SCORES
from ..recipes.options import FITTED, checked_rule
from ..statistics.cases import (
    CaseTable,
    concatenate,
    in_order,
    keys_of,
    methods_of,
    read_cases,
    with_scores,
    write_cases,
)
from ..statistics.compare import compare_cases
from ..statistics.tables import baseline_table
from .fits import FittedRule, forget_others, store_fits, stored_fits
from .held_out import ALL_FOLDS, HeldOut, cross_fit
from .scoring import ScoreOptions, inapplicable_metrics, score_cases

ARGMAX = str(Decision())


def rule_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The rules as tables name them, argmax first; a UserError names one that does not exist."""
    with given("--decide"):
        return tuple(dict.fromkeys((ARGMAX, *map(checked_rule, texts))))


def mask_metrics(dataset: Dataset, metrics: Sequence[str], *, asked: bool = False) -> list[str]:
    """The metrics that a rule changes and that apply to the dataset; Dice if there is none.

    asked: whether the user named them. Then one that no rule changes is a UserError.
    """
    left_out = inapplicable_metrics(dataset, metrics)
    others = [name for name in metrics if SCORES[name].judges != "mask"]
    if asked and others:
        known = [name for name, score in SCORES.items() if score.judges == "mask"]
        raise UserError(
            f"no rule changes {', '.join(others)}: scores of masks are {', '.join(known)}; leave out "
            "--decide for the others"
        )
    of_masks = [name for name in metrics if SCORES[name].judges == "mask" and name not in left_out]
    return of_masks or ["dice_score"]


def run_rules(
    held_out: HeldOut, rules: Sequence[str], options: ScoreOptions, console: Console, *, store: bool
) -> CaseTable:
    """Score the rules and print them; the scores. store: add them to the run, if all folds are finished."""
    run = held_out.run
    if not run.missing_folds:
        forget_others(held_out)
    if FITTED in rules:
        num_scans = held_out.num_cases(run.recipe.validation.unit)
        with progress_bar(console, "fitting the rule", "scans", total=num_scans) as bar:
            fitted = fitted_rules(held_out, on_scan=bar.advance)
        say(console, fitted_text(fitted))
    with progress_bar(console, "scoring", "cases", total=len(rules) * held_out.num_cases()) as bar:
        table = score_rules(held_out, rules, options, on_cases=bar.advance)
    console.print(rules_table(table, ARGMAX, title=f"{run.recipe.name}: masks by {len(rules)} rules"))
    if store and run.missing_folds:
        say(console, f"{run.folder.decisions} is written when all folds are finished; name a file with -o")
    elif store:
        _add_to_run(held_out, table, console)
    return table


def fitted_text(fitted: Mapping[str, FittedRule]) -> str:
    of_folds = [f"fold {fold}: {fit.decision}" for fold, fit in fitted.items() if fold != ALL_FOLDS]
    return f"fitted for {', '.join(of_folds)}; for new scans: {fitted[ALL_FOLDS].decision}"


def fitted_rules(
    held_out: HeldOut, *, on_scan: Callable[[], object] = lambda: None
) -> Mapping[str, FittedRule]:
    """The fitted rule of each finished fold, and of all; fitted now unless fits.json has them.

    on_scan() is called after each scan that all candidates were scored on. fits.json is written if all
    folds are finished.
    """
    rules = stored_fits(held_out).rules
    folds = {*map(str, held_out.cases), ALL_FOLDS}
    if rules.keys() == folds and all(fit.scores.keys() == {*CANDIDATES} for fit in rules.values()):
        return rules
    held_out.need_two_folds("a fitted rule")
    # each case is scored once, and has a part in the fits of all folds but its own
    scored: dict[int, list[ScoredCase]] = {fold: [] for fold in held_out.cases}
    for fold, of_fold in scored.items():
        for case in score_candidates(_cases(held_out, fold)):
            of_fold.append(case)
            on_scan()
    chosen = cross_fit(scored, lambda parts: choose_decision(chain(*parts)))
    rules = {
        name: FittedRule(decision=str(fit.decision), scores=dict(fit.scores), num_cases=fit.num_cases)
        for name, fit in chosen.items()
    }
    if not held_out.run.missing_folds:
        store_fits(held_out, rules=rules)
    return rules


def _cases(held_out: HeldOut, fold: int) -> Iterator[Case]:
    """Probabilities, majority, valid and patient of the held-out cases of a fold, in the unit of scores."""
    for batch in held_out.batches(fold, held_out.run.recipe.validation.unit):
        target = read_raters(batch.masks, held_out.dataset.num_classes, batch.present, batched=True)
        for row, (patient, majority) in enumerate(zip(batch.patients, target.majority(), strict=True)):
            valid = None if batch.valid is None else batch.valid[row]
            yield batch.prob[row], majority, valid, patient


def score_rules(
    held_out: HeldOut,
    rules: Sequence[str],
    options: ScoreOptions,
    *,
    on_cases: Callable[[int], object] = lambda _: None,
) -> CaseTable:
    """Scores of masks of the finished folds by each rule; the methods are the rules."""
    fitted = fitted_rules(held_out) if FITTED in rules else {}
    tables = [
        score_cases(
            held_out.dataset,
            cases,
            held_out.read(fold),
            options,
            method=rule,
            fold=fold,
            decision=Decision.parse(fitted[str(fold)].decision if rule == FITTED else rule),
            on_cases=on_cases,
        )
        for rule in rules
        for fold, cases in held_out.cases.items()
    ]
    return in_order(mask_scores(concatenate(tables)))


def mask_scores(table: CaseTable) -> CaseTable:
    """The rows of scores of masks: scores against the truth are added to every table of phantoms."""
    names = [name for name, score in SCORES.items() if score.judges == "mask"]
    return table[table["metric"].isin(names)]


def _add_to_run(held_out: HeldOut, scores: CaseTable, console: Console) -> None:
    """Add the scores of rules to decisions.parquet, where those of the same rule and score are replaced."""
    path = held_out.run.folder.decisions
    whole = with_scores(read_cases(path), scores) if path.is_file() else scores
    write_cases(whole, path)
    others = [rule for rule in methods_of(whole) if rule not in methods_of(scores)]
    say(console, f"wrote {path}" + (f", which also has {', '.join(others)}" if others else ""))


def rules_table(table: CaseTable, baseline: str, *, title: str) -> object:
    """One row per method: the mean of each score, its difference to the baseline, and the p-value."""
    methods = [baseline, *(method for method in methods_of(table) if method != baseline)]
    comparisons = [
        compare_cases(table, key, methods=methods, baseline=baseline, drop=True) for key in keys_of(table)
    ]
    return baseline_table(comparisons, baseline, title=title)
