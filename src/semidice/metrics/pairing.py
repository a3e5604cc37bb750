"""Scores of several methods on the same cases, and the mean over seeds within a case.

A method with several seeds was trained several times on the same folds. Its score of a case is the mean over
the seeds that all such methods have. A method with one training, such as one of another tool, has seed -1 and
is compared with these means. Left out: the statistics (`statistics`) and their spread over seeds (`seeds`).
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

Missing = Literal["error", "drop"]


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

    metric: str
    class_name: str
    cases: tuple[str, ...]
    patients: tuple[str, ...]
    methods: tuple[str, ...]
    # float64 (cases, methods)
    values: np.ndarray
    # cases left out because a method has no score for them
    num_dropped: int
    # of each training; None without seeds, or if the methods have one seed in common
    of_seeds: SeedScores | None = None


class SharedSeeds(NamedTuple):
    """The seeds that all methods with several seeds have, and who lacks each of the others."""

    seeds: tuple[int, ...]
    lacking: Mapping[int, tuple[str, ...]]


def shared_seeds(methods: np.ndarray, seeds: np.ndarray) -> SharedSeeds:
    """The seeds that all methods have in a table with these columns; none if no method has seeds.

    A ValueError if methods have seeds, but none in common.

    >>> shared_seeds(np.array(["a", "a", "b", "tool"]), np.array([0, 1, 0, -1]))
    SharedSeeds(seeds=(0,), lacking={1: ('b',)})
    """
    of_method = {str(name): set(seeds[methods == name].tolist()) - {-1} for name in dict.fromkeys(methods)}
    of_method = {name: own for name, own in of_method.items() if own}
    every = sorted(set().union(*of_method.values()))
    shared = tuple(seed for seed in every if all(seed in own for own in of_method.values()))
    if every and not shared:
        has = "; ".join(f"{name} has {', '.join(map(str, sorted(own)))}" for name, own in of_method.items())
        raise ValueError(f"no seed is common to all methods: {has}; train the methods with the same seeds")
    lacking = {
        seed: tuple(name for name, own in of_method.items() if seed not in own)
        for seed in every
        if seed not in shared
    }
    return SharedSeeds(shared, lacking)


def pair_columns(
    columns: Mapping[str, np.ndarray],
    seeds: np.ndarray,
    metric: str,
    class_name: str,
    methods: tuple[str, ...],
    missing: Missing,
) -> PairedScores:
    """The paired scores of a case table's columns, which are of one metric, one class and these methods."""
    cases, first, row = np.unique(columns["case"], return_index=True, return_inverse=True)
    shared = shared_seeds(columns["method"], seeds).seeds or (-1,)
    of_seeds = np.full((len(shared), len(cases), len(methods)), np.nan)
    trained = []
    for column, method in enumerate(methods):
        of_method = columns["method"] == method
        has_seeds = bool((seeds[of_method] != -1).any())
        trained.append(has_seeds)
        for number, seed in enumerate(shared):
            rows = of_method & (seeds == (seed if has_seeds else -1))
            of_seeds[number, row[rows], column] = columns["value"][rows]
    gaps = np.isnan(of_seeds).any(0)
    _check_gaps(gaps, cases, methods, metric, class_name, missing)
    complete = ~gaps.any(1)
    of_seeds = of_seeds[:, complete]
    # the mean of equal numbers may differ in its last digit
    values = np.where(trained, of_seeds.mean(0), of_seeds[0])
    folds = _shared_folds(columns, seeds, row, len(cases))[complete]
    return PairedScores(
        metric,
        class_name,
        tuple(cases[complete].tolist()),
        tuple(columns["patient"][first][complete].tolist()),
        methods,
        values,
        int((~complete).sum()),
        SeedScores(shared, of_seeds, tuple(trained), tuple(folds.tolist())) if len(shared) > 1 else None,
    )


def _check_gaps(
    gaps: np.ndarray,
    cases: np.ndarray,
    methods: Sequence[str],
    metric: str,
    class_name: str,
    missing: Missing,
) -> None:
    """Raise if a score is missing, unless such cases are to be dropped."""
    if not gaps.any() or missing == "drop":
        return
    case, column = np.argwhere(gaps)[0]
    raise ValueError(
        f"{metric} of class {class_name!r} is missing or NaN in {int(gaps.any(1).sum())} of {len(cases)} "
        f"cases, first for case {cases[case]} and method {methods[column]}: score it, or pass "
        "missing='drop' to leave such cases out for every method"
    )


def _shared_folds(
    columns: Mapping[str, np.ndarray], seeds: np.ndarray, row: np.ndarray, num_cases: int
) -> np.ndarray:
    """The fold of each case in the methods with seeds; -1 for all cases if the methods disagree."""
    folds = np.full(num_cases, -1, dtype=np.int64)
    trained = seeds != -1
    folds[row[trained]] = columns["fold"][trained]
    if (folds[row[trained]] != columns["fold"][trained]).any():
        return np.full(num_cases, -1, dtype=np.int64)
    return folds
