"""Methods of other tools: their scores, from the tables that `semidice evaluate --predictions` writes."""

from collections.abc import Collection, Mapping, Sequence
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
        table = read_cases_of(dataset, path, "semidice evaluate --predictions -o")
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
    table = read_cases_of(dataset, path, "semidice evaluate --predictions -o")
    of_methods = {method: table.select(method=method) for method in table.methods if method not in taken}
    return {method: rows for method, rows in of_methods.items() if (rows.columns["fold"] == -1).all()}


def read_cases_of(dataset: Dataset, path: Path, command: str) -> CaseTable:
    """The case table in a file; a ValueError if it has a foreign case, or says another patient of a case.

    command: what writes the file, for the message.
    """
    if not path.is_file():
        raise ValueError(f"there is no case table {path}: write it with `{command}`")
    table = read_cases(path)
    pairs = zip(table.columns["case"].tolist(), table.columns["patient"].tolist(), strict=True)
    check_cases(dict(pairs), dataset, path, command)
    return table


def check_cases(patient_of: Mapping[str, str], dataset: Dataset, path: Path, command: str) -> None:
    """Raise unless the cases in a file are scans or slices of the dataset, and of the same patients there."""
    known = {case.name: case.patient for case in dataset.cases}
    known |= {scan.name: scan.patient for scan in dataset.manifest.scans}
    foreign = sorted(case for case in patient_of if case not in known)
    if foreign:
        raise ValueError(f"{path} has {enumerated(foreign, 'case')} that {dataset.folder.path} does not have")
    for case, patient in patient_of.items():
        if patient != known[case]:
            raise ValueError(
                f"{path} says that case {case} is of patient {patient}, but {dataset.folder.path} says "
                f"{known[case]}: write the file again with `{command}`"
            )
