"""Scores of several methods on the same cases, and the mean over seeds within a case.

A method with several seeds was trained several times on the same folds. Its score of a case is the mean over
the seeds that all such methods have. A method with one training, such as one of another tool, has seed -1 and
is compared with these means. Left out: the statistics (`compare`) and their spread over seeds (`seeds`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..errors import UserError
from ..metrics.registry import ScoreKey
from .cases import MAIN_CLASSES, CaseTable, find_keys, in_order, keys_of, methods_of, rows_of


class SeedScores(NamedTuple):
    """The scores of each training, where there are two seeds or more."""

    seeds: tuple[int, ...]
    # float64 (seeds, cases, methods); a method with one training has the same scores for every seed
    values: np.ndarray
    # whether each method has several seeds
    trained: tuple[bool, ...]
    # fold of each case; -1 for all cases if methods with several seeds disagree
    folds: tuple[int, ...]


class PairedScores(NamedTuple):
    """Scores of one metric and class, one row per case and one column per method, without gaps."""

    key: ScoreKey
    class_name: str
    cases: tuple[str, ...]
    patients: tuple[str, ...]
    methods: tuple[str, ...]
    # float64 (cases, methods)
    values: np.ndarray
    # cases left out because a method has no score for them
    num_dropped: int = 0
    # of each training; None without seeds, or if the methods have one seed in common
    of_seeds: SeedScores | None = None


class SharedSeeds(NamedTuple):
    """The seeds that all methods with several seeds have, and who lacks each of the others."""

    seeds: tuple[int, ...]
    lacking: Mapping[int, tuple[str, ...]]


def paired(
    table: CaseTable,
    score: ScoreKey | str,
    class_name: str | None = None,
    *,
    methods: Sequence[str] = (),
    drop: bool = False,
) -> PairedScores:
    """Scores of one metric, one row per case (sorted) and one column per method, for paired statistics.

    score: a name of one score alone stands for its key. class_name: None is the mean over the classes, or the
    score itself if it has no classes. methods: all if empty. drop: a case without a score of every method,
    or with NaN, is dropped for all methods; otherwise it is an error. The score of a method with several
    seeds is the mean over the seeds that all such methods have.
    """
    key = _key_of(table, score)
    of_metric = rows_of(table, key)
    classes = MAIN_CLASSES if class_name is None else (class_name,)
    rows = of_metric[of_metric["class"].isin(classes)]
    methods = tuple(methods or methods_of(rows))
    unknown = [method for method in methods if method not in set(rows["method"])]
    if not len(rows) or unknown:
        raise UserError(
            f"the case table has no {key}"
            + (f" of class {class_name!r}" if class_name else "")
            + (f" for {', '.join(unknown)}" if unknown else "")
            + f"; it has metrics {', '.join(map(str, keys_of(table)))}, methods "
            + ", ".join(methods_of(table))
            + f", and {key} for classes {', '.join(of_metric['class'].unique())}" * bool(len(of_metric))
        )
    rows = rows[rows["method"].isin(methods)]
    shared = shared_seeds(rows).seeds or (-1,)
    cases = pd.Index(sorted(rows["case"].unique()))
    trained = tuple(bool((rows["seed"][rows["method"] == method] != -1).any()) for method in methods)
    wide = rows.set_index(["seed", "case", "method"])["value"].unstack("method").reindex(columns=methods)
    of_seeds = np.full((len(shared), len(cases), len(methods)), np.nan)
    for number, seed in enumerate(shared):
        for column, has_seeds in enumerate(trained):
            own = seed if has_seeds else -1
            if own in wide.index.levels[0]:
                of_seeds[number, :, column] = wide.iloc[:, column].xs(own).reindex(cases)
    complete = _complete(of_seeds, cases, methods, key, drop)
    of_seeds = of_seeds[:, complete]
    # the mean of equal numbers may differ in its last digit
    values = np.where(trained, of_seeds.mean(0), of_seeds[0])
    patients = rows.drop_duplicates("case").set_index("case")["patient"].reindex(cases)[complete]
    folds = _shared_folds(rows, cases)[complete]
    return PairedScores(
        key,
        class_name or str(rows["class"].iloc[0]),
        tuple(cases[complete]),
        tuple(patients),
        methods,
        values,
        int((~complete).sum()),
        SeedScores(shared, of_seeds, trained, tuple(folds.tolist())) if len(shared) > 1 else None,
    )


def _key_of(table: CaseTable, score: ScoreKey | str) -> ScoreKey:
    if isinstance(score, ScoreKey):
        return score
    found = find_keys(table, score)
    if len(found) != 1:
        names = ", ".join(map(str, found or keys_of(table)))
        several = f"{score} stands for several scores" if found else f"the case table has no {score}"
        raise UserError(f"{several}; it has metrics {names}, methods {', '.join(methods_of(table))}")
    return found[0]


def shared_seeds(table: CaseTable) -> SharedSeeds:
    """The seeds that all methods with seeds have; none if no method has seeds.

    A UserError if methods have seeds, but none in common.

    >>> shared_seeds(pd.DataFrame({"method": ["a", "a", "b", "tool"], "seed": [0, 1, 0, -1]}))
    SharedSeeds(seeds=(0,), lacking={1: ('b',)})
    """
    trainings = table.loc[table["seed"] != -1, ["method", "seed"]].drop_duplicates()
    of_method = {name: set(map(int, own)) for name, own in trainings.groupby("method", sort=False)["seed"]}
    every = sorted(set().union(*of_method.values()))
    shared = tuple(seed for seed in every if all(seed in own for own in of_method.values()))
    if every and not shared:
        has = "; ".join(f"{name} has {', '.join(map(str, sorted(own)))}" for name, own in of_method.items())
        raise UserError(f"no seed is common to all methods: {has}; train the methods with the same seeds")
    lacking = {
        seed: tuple(name for name, own in of_method.items() if seed not in own)
        for seed in every
        if seed not in shared
    }
    return SharedSeeds(shared, lacking)


def mean_over_seeds(table: CaseTable) -> CaseTable:
    """The table with the mean over the seeds that all methods have, as in `paired`; sorted if it has seeds.

    NaN where a seed has no score.
    """
    if (table["seed"] == -1).all():
        return table
    shared = shared_seeds(table).seeds
    kept = table[table["seed"].isin((-1, *shared))]
    same = [name for name in table if name not in ("seed", "value", "dataset", "patient", "fold")]
    groups = kept.groupby(same, sort=False)
    first, count = groups.first(), groups["value"].count()
    is_complete = count == np.where(first["seed"] == -1, 1, len(shared))
    means = first.assign(value=groups["value"].mean().where(is_complete), seed=-1).reset_index()
    return in_order(means[list(table)])


def _complete(
    of_seeds: np.ndarray, cases: pd.Index, methods: Sequence[str], key: ScoreKey, drop: bool
) -> np.ndarray:
    """Whether each case has all scores; a UserError if one has not, unless such cases are to be dropped."""
    gaps = np.isnan(of_seeds).any(0)
    if gaps.any() and not drop:
        case, column = np.argwhere(gaps)[0]
        raise UserError(
            f"{key} is missing or NaN in {int(gaps.any(1).sum())} of {len(cases)} cases, first for case "
            f"{cases[case]} and method {methods[column]}: score it, or pass drop=True to leave such cases "
            "out for every method"
        )
    complete: np.ndarray = ~gaps.any(1)
    return complete


def _shared_folds(rows: CaseTable, cases: pd.Index) -> np.ndarray:
    """The fold of each case in the methods with seeds; -1 for all cases if the methods disagree."""
    folds = rows.loc[rows["seed"] != -1, ["case", "fold"]].drop_duplicates()
    if folds["case"].duplicated().any():
        return np.full(len(cases), -1)
    found: np.ndarray = folds.set_index("case")["fold"].reindex(cases, fill_value=-1).to_numpy()
    return found
