"""Methods of other tools: their scores, from the tables that `semidice evaluate --predictions` writes."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..data.dataset import Dataset
from ..errors import UserError, listing
from ..runs.scoring import fingerprint
from ..statistics.cases import CaseTable, methods_of, read_cases


def read_other_methods(
    paths: Sequence[Path], dataset: Dataset, taken: Collection[str]
) -> dict[str, CaseTable]:
    """The table of each method in the files; a ValueError for a name that is taken or a foreign case."""
    tables: dict[str, CaseTable] = {}
    for path in paths:
        table = read_cases_of(dataset, path, "semidice evaluate --predictions -o")
        for method in methods_of(table):
            if method in tables or method in taken:
                raise UserError(
                    f"{path} has scores of {method}, but another method has this name: choose another one "
                    "with `semidice evaluate --name`"
                )
            tables[method] = table[table["method"] == method]
    return tables


def compared_methods(path: Path, dataset: Dataset, taken: Collection[str]) -> dict[str, CaseTable]:
    """The methods of other tools in a table of `semidice compare`, without those whose names are taken.

    They have no folds; the others are of runs.
    """
    table = read_cases_of(dataset, path, "semidice evaluate --predictions -o")
    of_methods = {method: table[table["method"] == method] for method in methods_of(table)}
    return {
        method: rows
        for method, rows in of_methods.items()
        if method not in taken and (rows["fold"] == -1).all()
    }


def read_cases_of(dataset: Dataset, path: Path, command: str) -> CaseTable:
    """The case table in a file; a ValueError if it is of another dataset, or tells another patient of a case.

    A table without a patient takes that of the dataset.

    command: what writes the file, for the message.
    """
    if not path.is_file():
        raise UserError(f"there is no case table {path}: write it with `{command}`")
    table = read_cases(path)
    others = table[~table["dataset"].isin(["", fingerprint(dataset)])]
    if len(others):
        raise UserError(
            f"{path} has scores of {others['method'].iloc[0]} on another dataset than {dataset.folder.path}, "
            f"or before it was prepared again, such as case {others['case'].iloc[0]}: score the predictions "
            f"on this one with `{command}`, or name the other dataset"
        )
    if (table["patient"] == table["case"]).all():
        # no column: patients that the dataset knows must not count as independent cases
        known = _patients(dataset)
        table["patient"] = table["case"].map(lambda case: known.get(case, case))
    check_cases(dict(zip(table["case"], table["patient"], strict=True)), dataset, path, command)
    return table


def _patients(dataset: Dataset) -> dict[str, str]:
    """The patient of each case and scan."""
    known = {case.name: case.patient for case in dataset.cases}
    return known | {scan.name: scan.patient for scan in dataset.manifest.scans}


def check_cases(patient_of: Mapping[str, str], dataset: Dataset, path: Path, command: str) -> None:
    """Raise unless the cases in a file are scans or slices of the dataset, and of the same patients there."""
    known = _patients(dataset)
    foreign = sorted(case for case in patient_of if case not in known)
    if foreign:
        raise UserError(f"{path} has {listing(foreign, 'case')} that {dataset.folder.path} does not have")
    for case, patient in patient_of.items():
        if patient != known[case]:
            raise UserError(
                f"{path} says that case {case} is of patient {patient}, but {dataset.folder.path} says "
                f"{known[case]}: write the file again with `{command}`"
            )
