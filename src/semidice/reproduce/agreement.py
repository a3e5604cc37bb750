"""Rater agreement on QUBIQ: mean Dice of each rater against the majority vote, without any training.

The masks are those of the prepared datasets, so resized to 256 x 256 where they were prepared as the paper
says. Cases that one rater alone looked at have no agreement.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from ..metrics.agreement import agreement_rows
from ..metrics.cases import CaseTable
from ..report.check import check_dataset
from .figures import Figures, RowKey


def agreement_of(dataset: Path, *, on_case: Callable[[int, int], object] = lambda _, __: None) -> CaseTable:
    """Dice of each rater, as method, on each case; a ValueError if the dataset has problems."""
    report = check_dataset(dataset, on_case=on_case)
    if report.problems:
        raise ValueError(
            f"{dataset} has {len(report.problems)} problems, the first: {report.problems[0]}; "
            f"run `semidice check {dataset}`"
        )
    raters = report.dataset.manifest.raters
    return CaseTable.from_rows(
        row
        for case, dice in zip(report.dataset.cases, report.agreement, strict=True)
        for row in agreement_rows(case.name, case.patient, raters, dice)
    )


def agreement_figures(tables: Mapping[str, CaseTable]) -> Figures:
    """Number of raters, and the mean over raters of their means over cases, of each dataset."""
    values, num_cases = {}, {}
    for dataset, table in tables.items():
        means = [float(table.select(method=rater).columns["value"].mean()) for rater in table.methods]
        key = RowKey(dataset, "agreement")
        values[key] = {"raters": float(len(means)), "dice": 100 * sum(means) / len(means)}
        num_cases[key] = len(set(table.columns["case"].tolist()))
    return Figures(("raters", "dice"), values, num_cases=num_cases)
