"""Metrics that collect over batches and processes, as torchmetrics `Metric` classes.

Several processes give the same bits as one. They exchange rows as text in a byte tensor: names of cases have
any length, a process may have no case, and the shortest decimal of a float reads back as the same float. A
case that a sampler repeats to fill the last batch counts once.
Needs the extra: pip install 'semidice[train]'.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .bins import Binning, CalibrationBins, Confidence, calibration_bins
from .cases import CaseRow, CaseTable
from .registry import SCORES, ScoredBatch, ScoreFunction
from .scores import foreground_mean

try:
    from torchmetrics import Metric
except ImportError:
    raise ImportError(
        "collecting metrics over batches needs torchmetrics: pip install 'semidice[train]'"
    ) from None


class CaseScores(Metric):
    """Rows of the case table for every case: `update` with batches, then `table()`.

    scores: names of `registry.SCORES`, or a mapping from your own names to functions of a `ScoredBatch`, for
    example to set options. class_names: one per channel of the prediction. `compute` returns the mean of each
    score over cases (and over the foreground if it has classes) without NaN. Call `compute` and `table` on
    every process.

    >>> scores = CaseScores(["dice_score"], class_names=["lesion"], method="DML1")
    >>> scores.update(torch.tensor([[[0.9, 0.2]]]), torch.tensor([[[1.0, 0.0]]]), case=["a"])
    >>> [(row.case, row.class_name, row.value) for row in scores.table().rows()]
    [('a', 'lesion', 1.0), ('a', 'mean', 1.0)]
    """

    higher_is_better = None
    is_differentiable = False
    full_state_update = False
    encoded: list[Tensor]

    def __init__(
        self, scores: Sequence[str] | Mapping[str, ScoreFunction], *, class_names: Sequence[str], method: str
    ) -> None:
        super().__init__()
        # names are stored instead of functions, so that the metric can be pickled
        self.own_scores = dict(scores) if isinstance(scores, Mapping) else {}
        unknown = [name for name in scores if name not in SCORES and name not in self.own_scores]
        if unknown:
            raise ValueError(f"there is no score {', '.join(unknown)}; there are {', '.join(SCORES)}")
        self.metrics, self.class_names, self.method = tuple(scores), tuple(class_names), method
        # In a MetricCollection, metrics whose states are equal after one batch share them from then on. Other
        # functions of the same name may differ later, so their states must never be equal.
        self.state_mark = str(id(self)) if self.own_scores else ""
        self.add_state("encoded", default=[], dist_reduce_fx="cat")

    def update(
        self,
        prob: Tensor,
        target: Tensor | None = None,
        *,
        case: Sequence[str],
        patient: Sequence[str] | None = None,
        fold: int = -1,
        soft_target: Tensor | None = None,
        masks: Tensor | None = None,
        present: Tensor | None = None,
        spacing_mm: Sequence[float] | Tensor | None = None,
        valid: Tensor | None = None,
        truth: Tensor | None = None,
        decided: Tensor | None = None,
    ) -> None:
        """Score N cases. Pass the references that the scores need; `ScoredBatch` says what they are."""
        if len(case) != len(prob) or (patient is not None and len(patient) != len(prob)):
            raise ValueError(
                f"case and patient need one name for each of {len(prob)} cases; got {len(case)}"
                + ("" if patient is None else f" and {len(patient)}")
            )
        if len(self.class_names) != prob.shape[1]:
            raise ValueError(
                f"class_names needs one name for each of {prob.shape[1]} channels; got {self.class_names}"
            )
        batch = ScoredBatch(prob, target, soft_target, masks, present, spacing_mm, valid, truth, decided)
        rows = []
        for metric in self.metrics:
            scores = (self.own_scores.get(metric) or SCORES[metric])(batch).double()
            columns = [("all", scores)]
            if scores.ndim > 1:
                columns = list(zip(self.class_names, scores.unbind(1), strict=True))
                columns.append(("mean", foreground_mean(scores)))
            for class_name, values in columns:
                for name, owner, value in zip(case, patient or case, values.tolist(), strict=True):
                    rows.append(CaseRow(name, owner, fold, self.method, class_name, metric, value))
        self.encoded.append(_encode(rows, self.device, self.state_mark))

    def compute(self) -> dict[str, Tensor]:
        """Mean of each score over the cases of all processes."""
        table = _decode(self.encoded)
        means = {}
        for metric, class_name in product(self.metrics, ("mean", "all")):
            rows = table.select(metric=metric, class_name=class_name)
            if len(rows):
                means[metric] = torch.from_numpy(rows.columns["value"]).nanmean()
        return means

    def table(self) -> CaseTable:
        """The sorted rows of all processes; the number of processes does not change them."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return _decode(self.encoded).sorted()

    def sync(self, *arguments: Any, **options: Any) -> None:
        # a process without a case must also send a tensor, because the others wait for it
        if not self.encoded:
            self.encoded.append(_encode([], self.device))
        super().sync(*arguments, **options)


class CalibrationError(Metric):
    """Calibration error over all voxels of a dataset: options as in `bins.calibration_bins`.

    >>> error = CalibrationError()
    >>> error.update(torch.tensor([[[0.9, 0.9]]]), torch.tensor([[[1.0, 0.0]]]))
    >>> round(float(error.compute()), 4)
    0.4
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False
    sums: Tensor

    def __init__(
        self,
        *,
        confidence: Confidence = "top_class",
        num_classes: int = 1,
        num_bins: int = 10,
        binning: Binning = "equal_width",
    ) -> None:
        super().__init__()
        self.confidence: Confidence = confidence
        self.num_classes, self.num_bins = num_classes, num_bins
        self.binning: Binning = binning
        # bins of one voxel that does not count have the right shape and are 0
        voxel = torch.full((1, num_classes), 1 / num_classes)
        sums = self._sums_of(voxel, voxel, valid=torch.zeros(1, dtype=torch.bool))
        self.add_state("sums", default=sums, dist_reduce_fx="sum")

    def update(
        self, prob: Tensor, target: Tensor, *, valid: Tensor | None = None, ignore_index: int | None = None
    ) -> None:
        """Count the voxels of a batch."""
        if self.confidence == "classwise" and prob.shape[1] != self.num_classes:
            raise ValueError(f"num_classes is {self.num_classes}, but prob has {prob.shape[1]} channels")
        self.sums += self._sums_of(prob, target, valid=valid, ignore_index=ignore_index)

    def compute(self) -> Tensor:
        """The error over the voxels of all processes: one number, or one per class if classwise."""
        return self._bins().error()

    def bins(self) -> CalibrationBins:
        """The bins of all processes together, for a reliability diagram."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._bins()

    def _bins(self) -> CalibrationBins:
        count, confidence, accuracy = self.sums
        return CalibrationBins(count, confidence, accuracy, self.num_bins, self.binning)

    def _sums_of(self, prob: Tensor, target: Tensor, **options: Any) -> Tensor:
        bins = calibration_bins(
            prob,
            target,
            confidence=self.confidence,
            num_bins=self.num_bins,
            binning=self.binning,
            per_case=False,
            **options,
        )
        return torch.stack([bins.count, bins.confidence, bins.accuracy])


def _encode(rows: Sequence[CaseRow], device: torch.device, mark: str = "") -> Tensor:
    """The rows as bytes, one JSON list per line that ends with the mark, which `_decode` ignores."""
    text = "".join(json.dumps([*row, mark]) + "\n" for row in rows)
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _decode(encoded: Tensor | Sequence[Tensor]) -> CaseTable:
    """The table of encoded rows; a row that occurs twice must be equal, and counts once."""
    parts = [encoded] if isinstance(encoded, Tensor) else encoded
    seen: dict[tuple[str, ...], CaseRow] = {}
    for part in parts:
        for line in bytes(part.cpu().numpy()).decode().splitlines():
            row = CaseRow(*json.loads(line)[:-1])
            key = (row.case, row.method, row.class_name, row.metric)
            other = seen.setdefault(key, row)
            same = row[:-1] == other[:-1] and (
                row.value == other.value or (math.isnan(row.value) and math.isnan(other.value))
            )
            if not same:
                raise ValueError(
                    f"case {row.case} was scored twice with different results: {other} and {row}"
                )
    return CaseTable.from_rows(seen.values())
