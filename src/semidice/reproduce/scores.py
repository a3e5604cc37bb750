"""Our numbers, from the scores of each case.

A cell is the mean over the cases for which all methods of the row have a score. A row over several datasets
is the mean of the means of the datasets: each dataset counts the same. For the tests, the scores s of such a
row are moved and stretched to

    s' = M + (s - m_t) N / (T n_t)       m_t mean of dataset t with n_t cases, M mean of the T means, N cases

Their mean is M, and their resampled mean has the variance of resampling within each dataset, so the tests of
`statistics` hold. Cases of one patient are drawn together, also across the tasks of QUBIQ.

Rater agreement needs no training: it is the mean Dice of each rater against the majority vote, on the masks
of the prepared datasets. Cases with only one rater are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..metrics.registry import ScoreKey
from ..report.check import check_dataset
from ..statistics.agreement import agreement_rows
from ..statistics.cases import CaseTable, case_table, concatenate, find_keys, methods_of, rows_of
from ..statistics.compare import compare_scores
from ..statistics.pairing import PairedScores, paired
from .paper import METRICS, PaperTable, Row, RowKey, TableValues

# (dataset, method) -> scores of the run
Runs = Mapping[tuple[str, str], CaseTable]


def our_values(table: PaperTable, runs: Runs) -> TableValues:
    """The table filled from the scores of the runs, without the cells that have no run."""
    values: dict[RowKey, dict[str, float]] = {}
    superior: dict[RowKey, frozenset[tuple[str, str]]] = {}
    best: dict[RowKey, frozenset[str]] = {}
    num_cases: dict[RowKey, int] = {}
    for row in table.rows:
        scores = row_scores(row, runs)
        if scores is None:
            continue
        means = scores.values.mean(0)
        values[row.key] = {
            column: 100 * float(mean) for column, mean in zip(scores.methods, means, strict=True)
        }
        num_cases[row.key] = len(scores.cases)
        if len(scores.methods) > 1 and len(set(scores.patients)) > 1:
            comparison = compare_scores(scores)
            superior[row.key] = frozenset(comparison.pairs.index[comparison.pairs["better"]])
            best[row.key] = frozenset(comparison.best)
    per_slice = frozenset(row.key for row in table.rows if row.key in values and _is_per_slice(row, runs))
    return TableValues(table.paper.columns, values, superior, best, num_cases, per_slice)


def row_scores(row: Row, runs: Runs) -> PairedScores | None:
    """Scores of one row; the methods are the columns of the table. None if no column has scores.

    A column is left out if it has no run on a dataset for which another column has one.
    """
    metric = METRICS[row.key.metric]
    scored = {key for key, table in runs.items() if _key_in(table, metric) is not None}
    datasets = [
        dataset
        for dataset in row.datasets
        if any((dataset, methods[dataset]) in scored for methods in row.runs.values())
    ]
    columns = [
        column
        for column, methods in row.runs.items()
        if datasets and all((dataset, methods[dataset]) in scored for dataset in datasets)
    ]
    if not columns:
        return None
    parts = []
    for dataset in datasets:
        tables = {column: runs[dataset, row.runs[column][dataset]] for column in columns}
        renamed = [_of_metric(table, metric).assign(method=column) for column, table in tables.items()]
        part = paired(concatenate(renamed), metric, methods=columns, drop=True)
        if part.cases:
            # names that no other dataset has; tasks of one QUBIQ folder share patients
            family = dataset.partition("_task")[0]
            cases = tuple(f"{dataset}/{case}" for case in part.cases)
            patients = tuple(f"{family}/{patient}" for patient in part.patients)
            parts.append(replace(part, cases=cases, patients=patients))
    return _pooled(parts) if parts else None


def _key_in(table: CaseTable, metric: str) -> ScoreKey | None:
    """The score of this metric in the table; per slice if its recipe says so."""
    return max(find_keys(table, metric), key=lambda key: key.per == "slice", default=None)


def _is_per_slice(row: Row, runs: Runs) -> bool:
    keys = [(dataset, method) for methods in row.runs.values() for dataset, method in methods.items()]
    found = [_key_in(runs[key], METRICS[row.key.metric]) for key in keys if key in runs]
    return any(key is not None and key.per == "slice" for key in found)


def _of_metric(table: CaseTable, metric: str) -> CaseTable:
    return rows_of(table, _key_in(table, metric) or ScoreKey(metric)).assign(per="scan")


def _pooled(parts: Sequence[PairedScores]) -> PairedScores:
    if len(parts) == 1:
        return parts[0]
    means = np.stack([part.values.mean(0) for part in parts])
    total = sum(len(part.cases) for part in parts)
    stretched = [
        means.mean(0) + (part.values - mean) * (total / (len(parts) * len(part.cases)))
        for part, mean in zip(parts, means, strict=True)
    ]
    return replace(
        parts[0],
        cases=tuple(case for part in parts for case in part.cases),
        patients=tuple(patient for part in parts for patient in part.patients),
        values=np.concatenate(stretched),
        num_dropped=sum(part.num_dropped for part in parts),
    )


def agreement_scores(
    dataset: Path, *, on_case: Callable[[int, int], object] = lambda _, __: None
) -> CaseTable:
    """Dice of each rater on each case, with the rater as method; a ValueError if the dataset has problems."""
    report = check_dataset(dataset, on_case=on_case)
    if report.problems:
        raise UserError(
            f"{dataset} has {len(report.problems)} problems, the first: {report.problems[0]}; "
            f"run `semidice check {dataset}`"
        )
    raters = report.dataset.manifest.raters
    return case_table(
        [
            row
            for scan, dice in zip(report.dataset.manifest.scans, report.agreement, strict=True)
            for row in agreement_rows(scan.name, scan.patient, raters, dice)
        ]
    )


def agreement_values(tables: Mapping[str, CaseTable]) -> TableValues:
    """For each dataset: number of raters, and the mean over raters of their means over cases."""
    values, num_cases = {}, {}
    for dataset, table in tables.items():
        means = [float(table["value"][table["method"] == rater].mean()) for rater in methods_of(table)]
        key = RowKey(dataset, "agreement")
        values[key] = {"raters": float(len(means)), "dice": 100 * sum(means) / len(means)}
        num_cases[key] = table["case"].nunique()
    return TableValues(("raters", "dice"), values, num_cases=num_cases)


def comparable_paper_values(table: PaperTable, datasets: Sequence[str]) -> TableValues:
    """The paper's numbers to compare with ours, if we only have these datasets.

    A row over all tasks of QUBIQ becomes the mean of the tasks that we have, without marks. It is empty if
    the paper has no numbers of single tasks.
    """
    paper = table.paper
    values = dict(paper.values)
    best = dict(paper.best)
    for row in table.rows:
        tasks = [dataset for dataset in row.datasets if dataset in datasets]
        if len(row.datasets) < 2 or len(tasks) in (0, len(row.datasets)):
            continue
        task_cells = [paper.values.get(RowKey(task, row.key.metric), {}) for task in tasks]
        values[row.key] = {
            column: float(np.mean([cells[column] for cells in task_cells]))
            for column in paper.columns
            if all(column in cells for cells in task_cells)
        }
        best[row.key] = frozenset()
    return replace(paper, values=values, best=best)
