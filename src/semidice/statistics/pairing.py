"""Scores of several methods on the same cases, and the mean over seeds within a case.

A method with several seeds was trained several times on the same folds. Its score of a case is the mean over
the seeds that all such methods have. A method with one training, such as one of another tool, has seed -1 and
is compared with these means. Left out: the statistics (`compare`) and their spread over seeds (`seeds`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..errors import UserError
from ..metrics.registry import ScoreKey
from .cases import MAIN_CLASSES, CaseTable, find_keys, in_order, keys_of, methods_of, rows_of


@dataclass(frozen=True)
class PairedScores:
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
    # the seeds that the scores are means over; empty without several
    seeds: tuple[int, ...] = ()
    # float64 (seeds, cases, methods); a method with one training has the same scores for every seed
    of_seeds: np.ndarray | None = None
    # whether each method has several trainings
    trained: tuple[bool, ...] = ()
    # fold of each case; -1 for all cases if methods with several seeds disagree
    folds: tuple[int, ...] = ()

    @property
    def num_cases(self) -> int:
        return len(self.cases)

    @property
    def num_patients(self) -> int:
        return len(set(self.patients))

    @property
    def by_patient(self) -> bool:
        """Whether to resample patients with all their cases, because a patient has several.

        Not where all cases are of one patient, because one patient cannot be resampled.
        """
        return 1 < self.num_patients < self.num_cases

    @property
    def seed_means(self) -> np.ndarray:
        """The mean over cases of each seed, (seeds, methods); NaN for a method with one training."""
        if self.of_seeds is None:
            return np.empty((0, len(self.methods)))
        return np.where(self.trained, self.of_seeds.mean(1), np.nan)

    @property
    def heading(self) -> str:
        """Metric, class, unit and direction, as the head of a column."""
        return self.key.heading(self.class_name)


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
    or with NaN, is dropped for all methods; otherwise it is an error.
    """
    key = _key_of(table, score)
    of_metric = rows_of(table, key)
    rows = of_metric[of_metric["class"].isin(MAIN_CLASSES if class_name is None else [class_name])]
    methods = tuple(methods or methods_of(rows))
    unknown = [method for method in methods if method not in set(rows["method"])]
    if not len(rows) or unknown:
        raise UserError(
            f"the case table has no {key}"
            + (f" of class {class_name!r}" if class_name else "")
            + (f" for {', '.join(unknown)}" if unknown else "")
            + f"; it has methods {', '.join(methods_of(table))}, and {key} for classes "
            + (", ".join(of_metric["class"].unique()) or "none")
        )
    rows = rows[rows["method"].isin(methods)]
    datasets = rows[rows["dataset"] != ""].drop_duplicates(["case", "dataset"])
    mixed = datasets["case"][datasets["case"].duplicated()]
    if len(mixed):
        raise UserError(
            f"case {mixed.iloc[0]} was scored on two datasets, or before and after one was prepared again: "
            "score all methods on one dataset"
        )
    seeds = shared_seeds(rows).seeds or (-1,)
    seeded = rows[rows["seed"] != -1]
    trained = tuple(method in set(seeded["method"]) for method in methods)
    wide = rows.pivot(index="case", columns=["method", "seed"], values="value").sort_index()
    columns = [
        [(method, seed if own else -1) for method, own in zip(methods, trained, strict=True)]
        for seed in seeds
    ]
    of_seeds = np.stack(
        [wide.reindex(columns=pd.MultiIndex.from_tuples(each)).to_numpy() for each in columns]
    )
    gaps = np.isnan(of_seeds).any(0)
    complete = ~gaps.any(1)
    if not drop and not complete.all():
        case, column = np.argwhere(gaps)[0]
        raise UserError(
            f"{key} is missing or NaN in {int((~complete).sum())} of {len(wide)} cases, first for case "
            f"{wide.index[case]} and method {methods[column]}: score it, or pass drop=True to leave such "
            "cases out for every method"
        )
    cases, of_seeds = wide.index[complete], of_seeds[:, complete]
    folds = seeded[["case", "fold"]].drop_duplicates()
    one_fold = not folds["case"].duplicated().any()
    folds = (folds if one_fold else folds[:0]).set_index("case")["fold"].reindex(cases, fill_value=-1)
    several = len(seeds) > 1
    return PairedScores(
        key,
        class_name or str(rows["class"].iloc[0]),
        tuple(cases),
        tuple(rows.drop_duplicates("case").set_index("case")["patient"].reindex(cases)),
        methods,
        # the mean of equal numbers may differ in its last digit
        np.where(trained, of_seeds.mean(0), of_seeds[0]),
        int((~complete).sum()),
        seeds=seeds if several else (),
        of_seeds=of_seeds if several else None,
        trained=trained,
        folds=tuple(folds.tolist()),
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
    trainings = table[table["seed"] != -1].groupby("method", sort=False)["seed"]
    of_method = {str(name): set(map(int, seeds.unique())) for name, seeds in trainings}
    lacking = {
        seed: tuple(name for name, own in of_method.items() if seed not in own)
        for seed in sorted(set().union(*of_method.values()))
    }
    shared = tuple(seed for seed, names in lacking.items() if not names)
    if of_method and not shared:
        has = "; ".join(f"{name} has {', '.join(map(str, sorted(own)))}" for name, own in of_method.items())
        raise UserError(f"no seed is common to all methods: {has}; train the methods with the same seeds")
    return SharedSeeds(shared, {seed: names for seed, names in lacking.items() if names})


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
