"""Metrics that collect over batches and processes, as torchmetrics `Metric` classes.

CaseScores        per-case rows of any scores; those of all processes make the table of one, bit by bit
CalibrationError  calibration over a whole dataset in a state of the size of the bins, merged exactly

The rows travel as text in one byte tensor: case names have any length, a process may have seen no case, and
a float's shortest decimal reads back as the same float. A case that a sampler repeats to fill up the last
batch counts once. Needs the extra: pip install 'semidice[train]'.
"""

import json
import math
from collections.abc import Mapping, Sequence
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
    """Rows of the case table for every case seen: `update` with batches, then `table()`.

    scores: names of `SCORES`, or a mapping from names of your own to functions of a `ScoredBatch`, which also
    is how options are set. class_names: one a channel of the prediction. `compute` gives each score's mean
    over cases (over the foreground where it has classes), leaving out NaN; call it, like `table`, on every
    process.

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
        # names are kept as names, so that the metric can be pickled
        self.own_scores = dict(scores) if isinstance(scores, Mapping) else {}
        unknown = [name for name in scores if name not in SCORES and name not in self.own_scores]
        if unknown:
            raise ValueError(f"no score is called {', '.join(unknown)}; there are {', '.join(SCORES)}")
        self.metrics, self.class_names, self.method = tuple(scores), tuple(class_names), method
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
        batch = ScoredBatch(prob, target, soft_target, masks, present, spacing_mm, valid, truth)
        rows = []
        for metric in self.metrics:
            score = self.own_scores.get(metric) or SCORES[metric].function
            for class_name, values in self._columns(score(batch)):
                for name, person, value in zip(case, patient or case, values.tolist(), strict=True):
                    rows.append(CaseRow(name, person, fold, self.method, class_name, metric, value))
        self.encoded.append(_encode(rows, self.device))

    def compute(self) -> dict[str, Tensor]:
        """Mean of each score over the cases of all processes."""
        table = _decode(self.encoded)
        means = {}
        for metric in self.metrics:
            of_metric = table.select(metric=metric)
            classes = ("mean", "all") if len(of_metric) else ()
            for class_name in classes:
                values = torch.from_numpy(of_metric.select(class_name=class_name).columns["value"])
                if len(values):
                    means[metric] = values.nanmean()
        return means

    def table(self) -> CaseTable:
        """The rows of all processes, sorted: the same table however many there were."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return _decode(self.encoded).sorted()

    def sync(self, *arguments: Any, **options: Any) -> None:
        # a process without a case must still send bytes, or the others wait for it in vain
        if not self.encoded:
            self.encoded.append(_encode([], self.device))
        super().sync(*arguments, **options)

    def _columns(self, values: Tensor) -> list[tuple[str, Tensor]]:
        values = values.double()
        if values.ndim == 1:
            return [("all", values)]
        per_class = list(zip(self.class_names, values.unbind(1), strict=True))
        return [*per_class, ("mean", foreground_mean(values))]


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
        # a prediction of one voxel has the shapes of every other
        one = torch.full((1, num_classes), 1 / num_classes)
        bins = self._bins_of(one, one, valid=torch.zeros(1, dtype=torch.bool))
        self.add_state("sums", default=_stack(bins), dist_reduce_fx="sum")

    def update(
        self, prob: Tensor, target: Tensor, *, valid: Tensor | None = None, ignore_index: int | None = None
    ) -> None:
        """Count the voxels of a batch."""
        if self.confidence == "classwise" and prob.shape[1] != self.num_classes:
            raise ValueError(f"num_classes is {self.num_classes}, but prob has {prob.shape[1]} channels")
        self.sums += _stack(self._bins_of(prob, target, valid=valid, ignore_index=ignore_index))

    def compute(self) -> Tensor:
        """The error of all processes' voxels: one number, or one a class if classwise."""
        return self._bins().error()

    def bins(self) -> CalibrationBins:
        """The bins of all processes together, for a reliability diagram."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._bins()

    def _bins(self) -> CalibrationBins:
        count, confidence, accuracy = self.sums
        return CalibrationBins(count, confidence, accuracy, self.num_bins, self.binning)

    def _bins_of(self, prob: Tensor, target: Tensor, **options: Any) -> CalibrationBins:
        return calibration_bins(
            prob,
            target,
            confidence=self.confidence,
            num_bins=self.num_bins,
            binning=self.binning,
            per_case=False,
            **options,
        )


def _stack(bins: CalibrationBins) -> Tensor:
    return torch.stack([bins.count, bins.confidence, bins.accuracy])


def _encode(rows: Sequence[CaseRow], device: torch.device) -> Tensor:
    """One JSON list a line, in bytes; Python writes floats so that they read back as they were."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _decode(encoded: Tensor | Sequence[Tensor]) -> CaseTable:
    """The table of encoded rows; a row that comes twice counts once, if it says the same."""
    parts = [encoded] if isinstance(encoded, Tensor) else encoded
    seen: dict[tuple[str, ...], CaseRow] = {}
    for part in parts:
        for line in bytes(part.cpu().numpy()).decode().splitlines():
            row = CaseRow(*json.loads(line))
            key = (row.case, row.method, row.class_name, row.metric)
            other = seen.setdefault(key, row)
            same = row[:-1] == other[:-1] and (
                row.value == other.value or (math.isnan(row.value) and math.isnan(other.value))
            )
            if not same:
                raise ValueError(f"case {row.case} was scored twice, and differently: {other} and {row}")
    return CaseTable.from_rows(seen.values())
