"""Scores of cases from predictions of any origin: in a training, at its end, of another tool, calibrated.

    target   majority of the raters who annotated a case      soft_target   their mean
    masks    the mask of each rater                           truth         p*, if the dataset has it

A score is of a scan: slices of a volume are put together in their order, and a slice that was not kept is not
scored. With unit "slice", each slice is scored on its own, and the column `per` says so. If the spacing of a
scan is not known, all distances and volumes are in voxels, and the column `unit` says so.
`train` and `evaluate` score the stored files in the same order, so their numbers agree to the bit. A stored 0
can be a probability of up to half a unit (see `predictions`). The likelihood takes it as half a unit, 11.8
nats, and not as probability zero.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from ..data.dataset import Dataset, ScoredUnit, Unit
from ..data.manifest import Scan
from ..decisions import Decision, decide
from ..errors import UserError
from ..labels.raters import read_raters
from ..metrics.registry import SCORES, Reference, ScoredBatch, ScoreFunction, ScoreKey
from ..metrics.scores import negative_log_likelihood
from ..statistics.cases import CaseTable
from ..statistics.collect import CaseScores
from .predictions import UNITS

# from numbers of cases to their class probabilities (C, *space), in this order
Read = Callable[[Sequence[int]], Iterable[Tensor]]

# values of a batch, probabilities and masks together: tens of megabytes with the copies that scores make
_MAX_VALUES = 1 << 22
# sides in mm that make one voxel 1 ml, so that a volume in ml is the number of voxels
ONE_ML = (10.0, 10.0, 10.0)


def _stored_likelihood(batch: ScoredBatch, *, reference: Reference) -> Tensor:
    prob = batch.prob.clamp(min=0.5 / UNITS)
    return negative_log_likelihood(prob / prob.sum(1, keepdim=True), batch.need(reference), valid=batch.valid)


_TRUTH_SCORES = tuple(name for name, score in SCORES.items() if score.reference == "truth")


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored. metrics: names of `metrics.registry.SCORES`.

    Those of `inapplicable_metrics` are left out; scores that need the truth are added where it is known,
    unless `only`. tolerance: of surface Dice, in mm, or in voxels without spacing.
    """

    metrics: Sequence[str]
    unit: Unit = "scan"
    tolerance: float = 1.0
    only: bool = False


def score_cases(
    dataset: Dataset,
    cases: Sequence[int],
    read: Read,
    options: ScoreOptions,
    *,
    method: str,
    fold: int = -1,
    decision: Decision | None = None,
    on_cases: Callable[[int], object] = lambda _: None,
) -> CaseTable:
    """The scores of cases, sorted: of scans, or of slices if `unit` says so, on the predictions' device.

    decision: the rule that makes the masks, from each scan (or slice) as a whole; None is argmax.
    on_cases(number) is called after every batch of `number` cases. All processes get the scores of all.
    """
    unit = options.unit
    names = dict.fromkeys((*options.metrics, *(() if options.only else _TRUTH_SCORES)))
    left_out = inapplicable_metrics(dataset, tuple(names))
    wanted = [name for name in names if name not in left_out]
    functions = {
        score_key(dataset, name, unit=unit, tolerance=options.tolerance): _function(
            name, in_voxels=in_voxels(dataset, name, unit), tolerance=options.tolerance
        )
        for name in wanted
    }
    scores = CaseScores(functions, class_names=dataset.manifest.class_names, method=method)
    references = {SCORES[name].reference for name in wanted}
    for batch in predicted_batches(dataset, cases, read, unit=unit):
        reference = read_raters(batch.masks, dataset.num_classes, batch.present, batched=True)
        scored = ScoredBatch(
            batch.prob,
            reference.majority() if "target" in references else None,
            reference.mean() if "soft_target" in references else None,
            batch.masks,
            batch.present,
            spacing_mm=batch.spacing_mm,
            valid=batch.valid,
            truth=_truth(dataset, batch) if "truth" in references else None,
            decided=None if decision is None else decide(batch.prob, decision, valid=batch.valid),
            drawn=dataset.drawn_classes,
        )
        scores.update(scored, [each.name for each in batch.units], patient=batch.patients, fold=fold)
        on_cases(batch.num_cases)
    return scores.table().assign(dataset=fingerprint(dataset))


def fingerprint(dataset: Dataset) -> str:
    """What tables of scores carry, so that those of another dataset with the same names are refused."""
    return dataset.manifest_sha256[:16]


@dataclass(frozen=True)
class PredictedBatch:
    """Scans or slices of equal shape: probabilities (N, C, *space), raters' class maps (N, R, *space).

    valid: False in slices that were not kept; None if all were. spacing_mm: (N, 3), or (N, 2) of images; None
    if it is not known.
    """

    units: Sequence[ScoredUnit]
    patients: Sequence[str]
    prob: Tensor
    masks: Tensor
    present: Tensor
    valid: Tensor | None
    spacing_mm: Tensor | None

    @property
    def num_cases(self) -> int:
        return sum(len(each.cases) for each in self.units)


def predicted_batches(
    dataset: Dataset, cases: Sequence[int], read: Read, *, unit: Unit
) -> Iterator[PredictedBatch]:
    """Predictions of all cases with the masks of the raters; the slices of a scan are put together."""
    batches = list(_batches_of_equal_shape(dataset, dataset.units(cases, unit)))
    predictions = iter(read([number for batch in batches for each in batch for number in each.cases]))
    for units in batches:
        numbers = [number for each in units for number in each.cases]
        scans = [dataset.cases[each.cases[0]].scan for each in units]
        prob = _together(dataset, units, islice(predictions, len(numbers)))
        device = prob.device
        kept = kept_slices(scan_slices(dataset, units[0]))
        sides = [_sides(scan, unit) for scan in scans]
        yield PredictedBatch(
            units,
            patients=[scan.patient for scan in scans],
            prob=prob,
            masks=_together(dataset, units, _masks(dataset, numbers, device)),
            present=torch.from_numpy(dataset.present[[each.cases[0] for each in units]]).to(device),
            valid=None if kept is None else _valid(kept, prob),
            spacing_mm=None if () in sides else torch.tensor(sides, dtype=torch.float64, device=device),
        )


def _masks(dataset: Dataset, numbers: Sequence[int], device: torch.device) -> Iterable[Tensor]:
    """The raters' class maps of cases of one shape: of a training, if it has loaded them on the device."""
    loaded = dataset.loaded.get(str(device))
    if loaded is None or loaded.packed is None:
        return (torch.from_numpy(dataset.masks(number)).to(device) for number in numbers)
    masks = loaded.masks(loaded.packed[torch.tensor(numbers, device=device)])
    return masks[(slice(None), slice(None), *map(slice, dataset.cases[numbers[0]].shape))]


def _truth(dataset: Dataset, batch: PredictedBatch) -> Tensor:
    numbers = [number for each in batch.units for number in each.cases]
    stored = (torch.from_numpy(np.array(dataset.stored("truth", number))) for number in numbers)
    return _together(dataset, batch.units, stored).to(batch.prob.device)


def _together(dataset: Dataset, batch: Sequence[ScoredUnit], of_cases: Iterable[Tensor]) -> Tensor:
    """Tensors of all cases of the batch, in their order, with the slices of each scan put together."""
    each_case = iter(of_cases)
    volumes = [
        volume_of(list(islice(each_case, len(unit.cases))), scan_slices(dataset, unit)) for unit in batch
    ]
    return torch.stack(volumes)


def volume_of(
    slices: Sequence[Shaped[Tensor, "any *space"]], numbers: Sequence[int] | None
) -> Shaped[Tensor, "any *volume"]:
    """The slices with these numbers as one volume, (any, slices, *space), 0 where a slice is missing.

    numbers: None if there is one part, which is not a slice.
    """
    if numbers is None:
        return slices[0]
    kept = kept_slices(numbers)
    if kept is None:
        return torch.stack(list(slices), 1)
    volume = slices[0].new_zeros(len(slices[0]), len(kept), *slices[0].shape[1:])
    volume[:, kept.to(volume.device)] = torch.stack(list(slices), 1)
    return volume


def kept_slices(numbers: Sequence[int] | None) -> Shaped[Tensor, " slices"] | None:
    """Bool: whether each slice from the first to the last is one of `numbers`; None if all are."""
    if numbers is None or numbers[-1] - numbers[0] + 1 == len(numbers):
        return None
    kept = torch.zeros(numbers[-1] - numbers[0] + 1, dtype=torch.bool)
    kept[torch.tensor(numbers) - numbers[0]] = True
    return kept


def _valid(kept: Tensor, prob: Tensor) -> Tensor:
    valid: Tensor = kept.to(prob.device).view(1, -1, *[1] * (prob.ndim - 3))
    return valid.expand(len(prob), *prob.shape[2:])


def scan_slices(dataset: Dataset, unit: ScoredUnit) -> tuple[int, ...] | None:
    """The numbers of the slices that are put together; None for an image, or one slice on its own."""
    cases = [dataset.cases[number] for number in unit.cases]
    if cases[0].scan.slices is None or unit.name == cases[0].name:
        return None
    return tuple(cases[0].scan.slices[case.row] for case in cases)


def _sides(scan: Scan, unit: Unit) -> tuple[float, ...]:
    """Sides of a voxel in the order of the axes that are scored; empty if one is not known."""
    sides = scan.voxel_mm
    if unit == "slice" or scan.slices is None:
        return sides
    return (sides[2], *sides[:2]) if len(sides) == 3 else ()


def in_voxels(dataset: Dataset, metric: str, unit: Unit) -> bool:
    """Whether the score has a length or volume, and a scan does not tell how large its voxels are."""
    if not SCORES[metric].needs_spacing:
        return False
    num_sides = 3 if SCORES[metric].unit == "ml" else 2
    scans = dataset.manifest.scans
    return any(len(_sides(scan, unit)) < max(num_sides, len(scan.shape)) for scan in scans)


def score_key(dataset: Dataset, metric: str, *, unit: Unit = "scan", tolerance: float = 1.0) -> ScoreKey:
    """The score in the case table of the dataset: in voxels where the spacing of a scan is not known."""
    score, voxels = SCORES[metric], in_voxels(dataset, metric, unit)
    measure = score.unit
    if metric == "surface_dice_score":
        measure = f"share within {tolerance:g} {'voxels' if voxels else 'mm'}"
    elif voxels:
        measure = "voxels"
    return ScoreKey(metric, measure, "slice" if unit == "slice" and dataset.has_slices else "scan")


def _function(metric: str, *, in_voxels: bool, tolerance: float) -> ScoreFunction:
    score = SCORES[metric]
    if score.function is negative_log_likelihood:
        return partial(_stored_likelihood, reference=score.reference)
    if metric == "surface_dice_score":
        score = replace(score, function=partial(score.function, tolerance_mm=tolerance))
    if not in_voxels:
        return score
    # as many sides as any score of an image or volume takes
    sides = ONE_ML if score.unit == "ml" else (1.0, 1.0, 1.0)
    return lambda batch: score(replace(batch, spacing_mm=sides))


def inapplicable_metrics(dataset: Dataset, metrics: Sequence[str]) -> dict[str, str]:
    """The metrics that the dataset has no reference for, and the reason; an unknown name is a ValueError."""
    unknown = [name for name in metrics if name not in SCORES]
    if unknown:
        raise UserError(f"there is no metric {', '.join(map(repr, unknown))}; there are {', '.join(SCORES)}")
    one_rater = int(dataset.present.sum(1).max()) == 1
    reasons = {}
    for name in metrics:
        score = SCORES[name]
        if one_rater and (score.reference == "masks" or name.startswith("rater_")):
            reasons[name] = "every case has one rater"
        is_surface = name in ("hausdorff_error", "surface_dice_score")
        if is_surface and not any(dataset.drawn_classes[1:]):
            reasons[name] = "all masks are empty, so that there is no surface"
        if score.reference == "truth" and not _has_truth(dataset):
            reasons[name] = "the true probability is known of phantoms alone"
    return reasons


def _has_truth(dataset: Dataset) -> bool:
    return all("truth" in scan.arrays for scan in dataset.manifest.scans)


def _batches_of_equal_shape(dataset: Dataset, units: Sequence[ScoredUnit]) -> Iterator[list[ScoredUnit]]:
    """Units in batches that have one shape and lack the same slices."""
    by_shape: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[ScoredUnit]] = {}
    for unit in units:
        scan = dataset.cases[unit.cases[0]].scan
        slices = scan_slices(dataset, unit) or ()
        offsets = tuple(number - slices[0] for number in slices)
        by_shape.setdefault((scan.shape, len(scan.voxel_mm), offsets), []).append(unit)
    width = dataset.num_classes + len(dataset.manifest.raters)
    for (shape, _, offsets), same in by_shape.items():
        num_voxels = math.prod(shape) * (1 + max(offsets, default=0))
        step = max(1, _MAX_VALUES // (width * num_voxels))
        for first in range(0, len(same), step):
            yield same[first : first + step]
