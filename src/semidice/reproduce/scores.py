"""Our figures, from the case tables of the runs.

A cell is the mean over the cases that all methods of its line have scores of. A line over several datasets
is the mean of their means, each dataset counting the same; its cases s are moved and stretched to

    s' = M + (s - m_t) N / (T n_t)       m_t mean of dataset t with n_t cases, M mean of the T means, N cases

whose mean is M and whose resampled mean has the variance of resampling within each dataset, so the tests of
`metrics.statistics` hold for it. Cases of one patient are drawn together, over the tasks of QUBIQ too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..metrics.cases import CaseTable, PairedScores, concatenate
from ..metrics.statistics import Comparison, compare_scores, resampling_unit
from .figures import METRICS, Figures, RowKey
from .tables import PaperTable, Row

# (dataset, method) to the scores of the run
Runs = Mapping[tuple[str, str], CaseTable]


def our_figures(table: PaperTable, runs: Runs) -> Figures:
    """The table filled with what the runs scored; cells without a run are left out."""
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
        comparison = _compared(scores)
        if comparison is not None:
            superior[row.key] = _superior(comparison)
            best[row.key] = frozenset(comparison.best())
    return Figures(table.paper.columns, values, superior, best, num_cases)


def row_scores(row: Row, runs: Runs) -> PairedScores | None:
    """Scores of a line with a column of the table as method; None if there are none.

    A column without a run on one of the datasets that others have is left out.
    """
    metric = METRICS[row.key.metric]
    scored = {key for key, table in runs.items() if metric in table.metrics}
    there = [
        dataset
        for dataset in row.datasets
        if any((dataset, of_column.get(dataset, "")) in scored for of_column in row.runs.values())
    ]
    columns = [
        column
        for column, of_column in row.runs.items()
        if there and all((dataset, of_column.get(dataset, "")) in scored for dataset in there)
    ]
    if not columns:
        return None
    parts = []
    for dataset in there:
        tables = [_renamed(runs[dataset, row.runs[column][dataset]], column) for column in columns]
        part = concatenate(tables).paired(metric, methods=columns, missing="drop")
        if part.cases:
            parts.append(_prefixed(part, dataset))
    return _pooled(parts) if parts else None


def _renamed(table: CaseTable, method: str) -> CaseTable:
    return CaseTable({**table.columns, "method": np.full(len(table), method)})


def _prefixed(scores: PairedScores, dataset: str) -> PairedScores:
    """Names that do not occur in another dataset; tasks of one folder of QUBIQ share their patients."""
    family = dataset.partition("_task")[0]
    return scores._replace(
        cases=tuple(f"{dataset}/{case}" for case in scores.cases),
        patients=tuple(f"{family}/{patient}" for patient in scores.patients),
    )


def _pooled(parts: Sequence[PairedScores]) -> PairedScores:
    if len(parts) == 1:
        return parts[0]
    means = np.stack([part.values.mean(0) for part in parts])
    total = sum(len(part.cases) for part in parts)
    stretched = [
        means.mean(0) + (part.values - mean) * (total / (len(parts) * len(part.cases)))
        for part, mean in zip(parts, means, strict=True)
    ]
    return parts[0]._replace(
        cases=tuple(case for part in parts for case in part.cases),
        patients=tuple(patient for part in parts for patient in part.patients),
        values=np.concatenate(stretched),
        num_dropped=sum(part.num_dropped for part in parts),
    )


def _compared(scores: PairedScores) -> Comparison | None:
    """Tests of all pairs; None where there is nothing to compare, or one patient alone."""
    if len(scores.methods) < 2 or len(set(scores.patients)) < 2:
        return None
    return compare_scores(scores, unit=resampling_unit(scores.patients, scores.cases))


def _superior(comparison: Comparison) -> frozenset[tuple[str, str]]:
    better, worse = np.nonzero(comparison.superior())
    return frozenset(
        (comparison.methods[i], comparison.methods[j]) for i, j in zip(better, worse, strict=True)
    )


def paper_beside(table: PaperTable, datasets: Sequence[str]) -> Figures:
    """The paper's figures to compare ours with, where ours are of these datasets alone.

    A row over all tasks of QUBIQ becomes the mean of the tasks that are there, without marks; where the paper
    has no figures of the tasks, it is left out.
    """
    paper = table.paper
    values = dict(paper.values)
    best = dict(paper.best)
    for row in table.rows:
        there = [dataset for dataset in row.datasets if dataset in datasets]
        if len(row.datasets) < 2 or len(there) in (0, len(row.datasets)):
            continue
        of_tasks = [paper.values.get(RowKey(task, row.key.metric), {}) for task in there]
        values[row.key] = {
            column: float(np.mean([cells[column] for cells in of_tasks]))
            for column in paper.columns
            if all(column in cells for cells in of_tasks)
        }
        best[row.key] = frozenset()
    return replace(paper, values=values, best=best)
