"""Collects the scores of cases over batches and processes as rows of a case table.

Several processes give the same bits as one: they exchange their rows, and a process may have no case. A case
that a sampler repeats to fill the last batch counts once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from ..errors import UserError
from ..metrics.registry import SCORES, ScoredBatch, ScoreFunction, ScoreKey, default_unit
from ..metrics.scores import foreground_mean
from .cases import COLUMNS, MAIN_CLASSES, CaseTable, case_table, in_order


class CaseScores:
    """Rows of the case table for every case: `update` with batches, then `table()`.

    scores: names of `metrics.SCORES`, or a mapping from keys or names of your own to functions of a
    `ScoredBatch`, for example to set options. class_names: one per channel of the prediction. Call `means`
    and `table` on every process.

    >>> scores = CaseScores(["dice_score"], class_names=["lesion"], method="DML1")
    >>> prob, target = torch.tensor([[[0.9, 0.2]]]), torch.tensor([[[1.0, 0.0]]])
    >>> scores.update(ScoredBatch(prob, target), ["a"])
    >>> scores.table()[["case", "class", "value"]].values.tolist()
    [['a', 'lesion', 1.0], ['a', 'mean', 1.0]]
    """

    def __init__(
        self,
        scores: Sequence[str] | Mapping[ScoreKey, ScoreFunction] | Mapping[str, ScoreFunction],
        *,
        class_names: Sequence[str],
        method: str,
    ) -> None:
        known: Mapping[Any, ScoreFunction] = scores if isinstance(scores, Mapping) else SCORES
        unknown = [str(name) for name in scores if name not in known]
        if unknown:
            raise UserError(f"there is no score {', '.join(unknown)}; there are {', '.join(SCORES)}")
        self._scores = {
            name if isinstance(name, ScoreKey) else ScoreKey(name, default_unit(name)): known[name]
            for name in scores
        }
        self.class_names, self.method = tuple(class_names), method
        self._rows: list[tuple[Any, ...]] = []

    def reset(self) -> None:
        """Forget all cases."""
        self._rows.clear()

    def update(
        self, batch: ScoredBatch, case: Sequence[str], *, patient: Sequence[str] | None = None, fold: int = -1
    ) -> None:
        """Score N cases, with one name each. `ScoredBatch` says what its parts are."""
        num_cases, num_channels = batch.prob.shape[:2]
        if len(case) != num_cases or (patient is not None and len(patient) != num_cases):
            raise UserError(
                f"case and patient need one name for each of {num_cases} cases; got {len(case)}"
                + ("" if patient is None else f" and {len(patient)}")
            )
        if len(self.class_names) != num_channels:
            raise UserError(
                f"class_names needs one name for each of {num_channels} channels; got {self.class_names}"
            )
        for key, function in self._scores.items():
            scores = function(batch).double()
            columns = [("all", scores)]
            if scores.ndim > 1:
                columns = list(zip(self.class_names, scores.unbind(1), strict=True))
                columns.append(("mean", foreground_mean(scores, batch.drawn)))
            for class_name, values in columns:
                for name, owner, value in zip(case, patient or case, values.tolist(), strict=True):
                    self._rows.append((name, owner, fold, -1, self.method, class_name, *key, "", value))

    def table(self) -> CaseTable:
        """The sorted rows of all processes; the number of processes does not change them."""
        parts = [self._rows]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts = [[] for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(parts, self._rows)
        # case, class and score, of one method
        seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for row in (row for part in parts for row in part):
            other = seen.setdefault((row[0], *row[5:9]), row)
            both_nan = math.isnan(row[-1]) and math.isnan(other[-1])
            if other[:-1] != row[:-1] or not (other[-1] == row[-1] or both_nan):
                raise UserError(f"case {row[0]} was scored twice with different results: {other} and {row}")
        return in_order(case_table(pd.DataFrame(list(seen.values()), columns=list(COLUMNS))))

    def means(self) -> dict[str, float]:
        """Mean of each score over the cases of all processes, and over the foreground if it has classes."""
        table = self.table()
        main = table[table["class"].isin(MAIN_CLASSES)].groupby("metric", sort=False)["value"].mean()
        return {key.metric: float(main[key.metric]) for key in self._scores if key.metric in main}
