"""Cross-validation folds: every case is validated once, and all cases of a patient are in the same fold.

`folds.json` of a run holds the fold of each case by name, so a run can be read without splitting again.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from ..errors import UserError, read_record
from ..paths import write_text
from .dataset import Dataset
from .manifest import Record


class _Folds(Record):
    """The content of folds.json."""

    version: Literal[1] = 1
    num_folds: int = Field(ge=2)
    fold_of_case: dict[str, int]


def split_folds(patients: Sequence[str], *, num_folds: int = 5, seed: int = 0) -> list[int]:
    """The fold, 0 to num_folds - 1, in which each case is validated; `patients` has the patient of each case.

    Patients are shuffled with `seed` and sorted by their number of cases, largest first. Each one goes to the
    fold that has the fewest cases so far. The order of the cases does not change the fold of a patient.

    >>> split_folds(["ann", "ann", "bob", "cho", "dee"], num_folds=2)
    [0, 0, 0, 1, 1]
    """
    if num_folds < 2:
        raise UserError(
            f"num_folds must be 2 or more, so that a case is not validated on itself; got {num_folds}"
        )
    num_cases = Counter(patients)
    if len(num_cases) < num_folds:
        raise UserError(
            f"{num_folds} folds need {num_folds} patients or more, because a patient is in one fold; the "
            f"{len(patients)} cases have {len(num_cases)} patients: lower num_folds, or add patients"
        )
    names = sorted(num_cases)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    shuffled = [names[number] for number in rng.permutation(len(names))]
    load = [0] * num_folds
    fold_of_patient: dict[str, int] = {}
    # the sort is stable, so patients with the same number of cases stay shuffled
    for patient in sorted(shuffled, key=lambda name: -num_cases[name]):
        fold = load.index(min(load))
        fold_of_patient[patient] = fold
        load[fold] += num_cases[patient]
    return [fold_of_patient[patient] for patient in patients]


def split_dataset(dataset: Dataset, *, num_folds: int = 5, seed: int = 0) -> list[int]:
    """The fold of each case by `split_folds` of the scans: a volume has one fold, whole or in slices."""
    scans = dataset.manifest.scans
    folds = split_folds([scan.patient for scan in scans], num_folds=num_folds, seed=seed)
    fold_of_scan = {scan.name: fold for scan, fold in zip(scans, folds, strict=True)}
    return [fold_of_scan[case.scan.name] for case in dataset.cases]


def fold_cases(fold_of_case: Sequence[int], fold: int) -> tuple[list[int], list[int]]:
    """Numbers of the training cases of a fold, and of its validation cases.

    >>> fold_cases([0, 0, 1, 2], 0)
    ([2, 3], [0, 1])
    """
    numbers = range(len(fold_of_case))
    return (
        [number for number in numbers if fold_of_case[number] != fold],
        [number for number in numbers if fold_of_case[number] == fold],
    )


def write_folds(path: Path, dataset: Dataset, fold_of_case: Sequence[int]) -> None:
    """Store the folds of a dataset's cases, after the checks of `read_folds`."""
    if len(fold_of_case) != len(dataset):
        raise UserError(
            f"fold_of_case needs a fold for each of {len(dataset)} cases; got {len(fold_of_case)}"
        )
    names = [case.name for case in dataset.cases]
    num_folds = max(2, *(fold + 1 for fold in fold_of_case))
    folds = _Folds(num_folds=num_folds, fold_of_case=dict(zip(names, fold_of_case, strict=True)))
    _check_folds(folds, dataset, "the folds")
    write_text(path, json.dumps(folds.model_dump(), indent=1) + "\n")


def read_folds(path: Path, dataset: Dataset) -> list[int]:
    """The stored fold of each case of `dataset`.

    A ValueError if the names of the cases differ, a patient is in two folds, or a fold is empty.
    """
    folds = read_record(path, _Folds)
    _check_folds(folds, dataset, str(path))
    return [folds.fold_of_case[case.name] for case in dataset.cases]


def _check_folds(folds: _Folds, dataset: Dataset, where: str) -> None:
    names = {case.name for case in dataset.cases}
    differ = sorted(names ^ folds.fold_of_case.keys())
    if differ:
        lacks = "does not have" if differ[0] in names else "also has"
        raise UserError(
            f"{where} does not belong to the dataset {dataset.folder.path}: it {lacks} case {differ[0]}, and "
            f"{len(differ) - 1} more names differ: use the dataset of the run, or start a new run"
        )
    numbers = set(folds.fold_of_case.values())
    if len(numbers) != folds.num_folds or numbers != set(range(folds.num_folds)):
        raise UserError(
            f"{where} has cases in folds {sorted(numbers)}; each of 0 to {folds.num_folds - 1} needs one"
        )
    fold_of_patient: dict[str, int] = {}
    for case in dataset.cases:
        fold = folds.fold_of_case[case.name]
        if fold_of_patient.setdefault(case.patient, fold) != fold:
            raise UserError(
                f"{where} puts patient {case.patient} into folds {fold_of_patient[case.patient]} and {fold}: "
                "a model would be validated on a patient of its training; make the folds with split_folds"
            )
