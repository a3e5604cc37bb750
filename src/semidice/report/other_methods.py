"""Methods of other tools: their scores, from the tables that `semidice evaluate --predictions` writes."""

from collections.abc import Collection, Sequence
from pathlib import Path

from ..data.dataset import Dataset
from ..data.integrity import enumerated
from ..metrics.cases import CaseTable, read_cases


def read_other_methods(
    paths: Sequence[Path], dataset: Dataset, taken: Collection[str]
) -> dict[str, CaseTable]:
    """The table of each method in the files; a ValueError for a name that is taken or a foreign case."""
    tables: dict[str, CaseTable] = {}
    for path in paths:
        table = _read_cases_of(dataset, path)
        for method in table.methods:
            if method in tables or method in taken:
                raise ValueError(
                    f"{path} has scores of {method}, but another method has this name: choose another one "
                    "with `semidice evaluate --name`"
                )
            tables[method] = table.select(method=method)
    return tables


def compared_methods(path: Path, dataset: Dataset, taken: Collection[str]) -> dict[str, CaseTable]:
    """The methods of other tools in a table of `semidice compare`, without those whose names are taken.

    They have no folds; the others are of runs.
    """
    table = _read_cases_of(dataset, path)
    of_methods = {method: table.select(method=method) for method in table.methods if method not in taken}
    return {method: rows for method, rows in of_methods.items() if (rows.columns["fold"] == -1).all()}


def _read_cases_of(dataset: Dataset, path: Path) -> CaseTable:
    if not path.is_file():
        raise ValueError(f"there is no case table {path}: write it with `semidice evaluate --predictions -o`")
    table = read_cases(path)
    patient_of = {case.name: case.patient for case in dataset.cases}
    patient_of |= {scan.name: scan.patient for scan in dataset.manifest.scans}
    pairs = dict(zip(table.columns["case"].tolist(), table.columns["patient"].tolist(), strict=True))
    foreign = sorted(case for case in pairs if case not in patient_of)
    if foreign:
        raise ValueError(f"{path} has {enumerated(foreign, 'case')} that {dataset.folder.path} does not have")
    for case, patient in pairs.items():
        if patient != patient_of[case]:
            raise ValueError(
                f"{path} says that case {case} is of patient {patient}, but {dataset.folder.path} says "
                f"{patient_of[case]}: score the predictions again with `semidice evaluate --predictions`"
            )
    return table
