"""Calibration error by bins, from counts that can be added exactly over slabs, cases, batches and processes.

    ECE = sum over bins of |sum of accuracy - sum of confidence| / number of voxels

top_class  confidence of the most probable class (one channel: max(x, 1 - x)); accuracy is 1 if the reference
           has that class, or for a soft reference the probability of that class
classwise  confidence x_c of each class against y_c: one error per class (Kull et al., 2019)

Equal-width bins are [k/B, (k+1)/B); the last one includes confidence 1. Equal-mass bins are made of 5891
fixed cells, which are fine near 0 and 1, where networks put nearly all voxels. The sums of a cell are exact;
only the edges of bins are rounded to cells.
All sums are integers in units of 2^-26 voxel: up to 10^11 voxels, their order does not change a bit.
Left out: the kernel estimate of the same error (`density`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..options import Bounds, check_value
from .checks import check_scored
from .slabs import Slab, slabs

Binning = Literal["equal_width", "equal_mass"]
Confidence = Literal["top_class", "classwise"]

_UNIT = 1 << 26
_SUMS = ("count", "confidence", "accuracy")
# 0.7 in float32 is below 0.7: a confidence within 1.2e-7 below an edge counts as above it in every dtype
_EDGE_SLACK = 8
# Equal-mass cells: 128 for each factor of two in the distance to the nearer end of [0, 1], down to 2^-24, the
# smallest distance of a float32 to 1; exactly 0 and exactly 1 each have their own cell.
_MANTISSA_BITS = 7
_SMALLEST = (127 - 24) << _MANTISSA_BITS
_NUM_CELLS = 2 * (1 + (23 << _MANTISSA_BITS)) + 1


class BinMeans(NamedTuple):
    """Share of all voxels, mean confidence and mean accuracy of each bin; an empty bin has NaN means."""

    share: Float[Tensor, "*lead bins"]
    confidence: Float[Tensor, "*lead bins"]
    accuracy: Float[Tensor, "*lead bins"]


@dataclass(frozen=True)
class CalibrationBins:
    """Number of voxels, confidence and accuracy summed in each bin (equal mass: cell); `+` adds exactly.

    Leading axes: cases, then classes if classwise; none for a dataset. confidence and accuracy are in units
    of 2^-26 voxel. The size does not depend on the number of voxels.
    """

    count: Int64[Tensor, "*lead cells"]
    confidence: Int64[Tensor, "*lead cells"]
    accuracy: Int64[Tensor, "*lead cells"]
    num_bins: int
    binning: Binning

    def __add__(self, other: "CalibrationBins") -> "CalibrationBins":
        if (self.num_bins, self.binning) != (other.num_bins, other.binning):
            raise ValueError(
                f"cannot merge {self.num_bins} {self.binning} bins with {other.num_bins} {other.binning} ones"
            )
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMS})

    def over_cases(self) -> "CalibrationBins":
        """The bins of all cases together: sums over the first axis."""
        return replace(self, **{name: getattr(self, name).sum(0) for name in _SUMS})

    def error(self) -> Float[Tensor, "*lead"]:
        """Calibration error in [0, 1], float64, of each entry of the leading axes; NaN without a voxel."""
        count, confidence, accuracy = self._binned()
        return (accuracy - confidence).abs().sum(-1).double() / _UNIT / count.sum(-1)

    def means(self) -> BinMeans:
        """The values of a reliability diagram."""
        count, confidence, accuracy = self._binned()
        return BinMeans(
            count.double() / count.sum(-1, keepdim=True),
            confidence.double() / _UNIT / count,
            accuracy.double() / _UNIT / count,
        )

    def _binned(self) -> Iterable[Tensor]:
        """Count, confidence and accuracy, summed in each bin."""
        sums = (self.count, self.confidence, self.accuracy)
        if self.binning == "equal_width":
            return sums
        # a cell belongs to the bin of its middle voxel in the order of confidence
        doubled_middle = 2 * self.count.cumsum(-1) - self.count
        total = self.count.sum(-1, keepdim=True).clamp_min(1)
        bin_of_cell = (doubled_middle * self.num_bins // (2 * total)).clamp_max(self.num_bins - 1)
        empty = self.count.new_zeros(*self.count.shape[:-1], self.num_bins)
        return (empty.scatter_add(-1, bin_of_cell, part) for part in sums)


def calibration_bins(
    prob: Tensor,
    target: Tensor,
    *,
    confidence: Confidence = "top_class",
    num_bins: int = 10,
    binning: Binning = "equal_width",
    per_case: bool = True,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> CalibrationBins:
    """Bins of each case (N, ...), or with per_case=False of all cases together; see the module docstring.

    The target is hard (class indices, or 0 and 1) or soft. The mean of several raters as target gives the
    mean of the bins against each rater. One sigmoid channel counts as two classes; several sigmoid channels
    have no top class, so score them one by one. Memory: a few MB and the bins.

    >>> bins = calibration_bins(torch.tensor([[[0.95, 1.0, 0.3]]]), torch.tensor([[[1.0, 0.0, 0.0]]]))
    >>> bins.count[0].tolist(), round(float(bins.error()), 4)
    ([0, 0, 0, 0, 0, 0, 0, 1, 0, 2], 0.4167)
    """
    check_value(Confidence, confidence=confidence)
    check_value(Binning, binning=binning)
    check_value(Annotated[int, Bounds(at_least=1, at_most=10_000)], num_bins=num_bins)
    target, valid = check_scored(prob, target, valid=valid, ignore_index=ignore_index)
    num_rows = prob.shape[1] if confidence == "classwise" else 1
    num_cells = num_bins if binning == "equal_width" else _NUM_CELLS
    lead = (len(prob) if per_case else 1) * num_rows
    sums = torch.zeros(3, lead * num_cells, dtype=torch.int64, device=prob.device)
    for slab in slabs(prob, target, valid):
        cases = slab.first_case + torch.arange(len(slab.prob), device=prob.device).unsqueeze(1)
        for row, (sure, right) in enumerate(_confidence_and_accuracy(slab, confidence)):
            quantised = _in_units(sure)
            if binning == "equal_width":
                cell = ((quantised + _EDGE_SLACK) * num_bins >> 26).clamp_(max=num_bins - 1)
            else:
                cell = _mass_cell(sure)
            cell += ((cases if per_case else 0) * num_rows + row) * num_cells
            right = right.long() << 26 if right.dtype == torch.bool else _in_units(right)
            parts = torch.ones_like(quantised), quantised, right
            for total, part in zip(sums, parts, strict=True):
                counted = part if slab.valid is None else part * slab.valid
                total.scatter_add_(0, cell.flatten(), counted.flatten())
    shape = ((len(prob),) if per_case else ()) + ((num_rows,) if confidence == "classwise" else ())
    count, confident, accurate = sums.view(3, *shape, num_cells)
    return CalibrationBins(count, confident, accurate, num_bins, binning)


def calibration_error(prob: Tensor, target: Tensor, **options: Any) -> Float[Tensor, " N"]:
    """Expected calibration error of the top class, per case; the paper's ECE column (10 equal-width bins).

    options: num_bins, binning, valid and ignore_index of `calibration_bins`. Over a whole dataset:
    `calibration_bins(..., per_case=False).error()`, merged with `+` over batches.

    >>> round(float(calibration_error(torch.tensor([[[0.9, 0.9]]]), torch.tensor([[[1.0, 0.0]]]))), 4)
    0.4
    """
    return calibration_bins(prob, target, **options).error()


def classwise_calibration_error(prob: Tensor, target: Tensor, **options: Any) -> Float[Tensor, "N C"]:
    """Calibration error of each class against the rest, per case and class; one channel is the foreground.

    >>> prob, target = torch.tensor([[[0.1, 0.1]]]), torch.tensor([[[1.0, 0.0]]])
    >>> round(float(classwise_calibration_error(prob, target)), 4)
    0.4
    """
    return calibration_bins(prob, target, confidence="classwise", **options).error()


def _confidence_and_accuracy(slab: Slab, confidence: Confidence) -> Iterator[tuple[Tensor, Tensor]]:
    """Confidence (n, v) and accuracy (n, v), bool or float: once, or for each class."""
    prob, target = slab.prob, slab.target
    soft = target.is_floating_point()
    if confidence == "classwise":
        for channel in range(prob.shape[1]):
            yield prob[:, channel], target[:, channel] if soft else target == channel
        return
    if prob.shape[1] == 1:
        decided = prob[:, 0] > 0.5
        sure, right = (torch.where(decided, part[:, 0], 1 - part[:, 0]) for part in (prob, target))
        yield sure, right
        return
    sure, decided = prob.max(1)
    yield sure, target.gather(1, decided.unsqueeze(1)).squeeze(1) if soft else target == decided


def _in_units(part: Tensor) -> Tensor:
    # truncated, not rounded: torch.round starts threads even for a slab, and a unit is only 1.5e-8
    return (part * _UNIT).long()


def _mass_cell(sure: Tensor) -> Tensor:
    """The equal-mass cell of each confidence; a higher confidence never has a lower cell.

    It comes from the bits of the distance to the nearer end: a logarithm may differ between devices.
    """
    sure = sure.float()
    below_half = sure < 0.5
    distance = torch.where(below_half, sure, 1 - sure)
    octave_and_part = distance.view(torch.int32) >> (23 - _MANTISSA_BITS)
    level = torch.where(distance > 0, (octave_and_part - _SMALLEST).clamp_(min=0) + 1, 0).long()
    return torch.where(below_half, level, _NUM_CELLS - 1 - level)
