"""Scores of a fold from its stored predictions, at the end of its training and by `semidice evaluate`.

    target   majority of the raters who annotated a case      soft_target   their mean
    masks    the mask of each rater                           truth         p*, if the dataset has it

Both commands score the stored files with the same functions in the same order, so on one device their numbers
agree to the bit. A stored 0 can be a probability of up to half a unit (see `predictions`). The likelihood
takes it as half a unit, 11.8 nats, and not as probability zero.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..data.dataset import Dataset
from ..labels.raters import read_raters
from ..metrics.accumulators import CaseScores
from ..metrics.cases import CaseTable
from ..metrics.registry import SCORES, ScoredBatch, ScoreFunction
from ..metrics.scores import negative_log_likelihood
from ..paths import FoldFolder
from .predictions import UNITS, read_case

# values of a batch, probabilities and masks together: tens of megabytes with the copies that scores make
_MAX_VALUES = 1 << 22


def _stored_likelihood(batch: ScoredBatch) -> Tensor:
    prob = batch.prob.clamp(min=0.5 / UNITS)
    return negative_log_likelihood(prob / prob.sum(1, keepdim=True), batch.need("target"), valid=batch.valid)


_STORED_SCORES: dict[str, ScoreFunction] = {"negative_log_likelihood": _stored_likelihood}
_TRUTH_SCORES = tuple(name for name, score in SCORES.items() if score.reference == "truth")


def score_fold(
    dataset: Dataset,
    cases: Sequence[int],
    folder: FoldFolder,
    *,
    metrics: Sequence[str],
    method: str,
    fold: int,
    device: torch.device | str = "cpu",
    on_cases: Callable[[int], object] = lambda _: None,
) -> CaseTable:
    """The case table of a fold's validation cases, sorted.

    metrics: names of `metrics.registry.SCORES`. `inapplicable_metrics` are left out; scores that need the
    truth are added where it is known. on_cases(number) is called after every batch of `number` cases.
    """
    names = dict.fromkeys((*metrics, *_TRUTH_SCORES))
    left_out = inapplicable_metrics(dataset, tuple(names))
    wanted = {name: _STORED_SCORES.get(name, SCORES[name]) for name in names if name not in left_out}
    scores = CaseScores(wanted, class_names=dataset.manifest.class_names, method=method).to(device)
    for batch in _batches_of_equal_shape(dataset, cases):
        probs = np.stack([read_case(folder, dataset, number) for number in batch])
        masks = torch.from_numpy(np.stack([dataset.masks(number) for number in batch])).to(device)
        present = torch.from_numpy(dataset.present[batch]).to(device)
        reference = read_raters(masks, dataset.num_classes, present, batched=True)
        truth = None
        if _has_truth(dataset):
            truth = torch.from_numpy(np.stack([dataset.stored("truth", number) for number in batch]))
        scores.update(
            torch.from_numpy(probs).to(device),
            reference.majority(),
            case=[dataset.cases[number].name for number in batch],
            patient=[dataset.cases[number].patient for number in batch],
            fold=fold,
            soft_target=reference.mean(),
            masks=masks,
            present=present,
            spacing_mm=torch.tensor(
                [dataset.cases[number].scan.spacing_mm for number in batch],
                dtype=torch.float64,
                device=device,
            ),
            truth=None if truth is None else truth.to(device),
        )
        on_cases(len(batch))
    return scores.table()


def inapplicable_metrics(dataset: Dataset, metrics: Sequence[str]) -> dict[str, str]:
    """The metrics that the dataset has no reference for, and the reason; an unknown name is a ValueError."""
    unknown = [name for name in metrics if name not in SCORES]
    if unknown:
        raise ValueError(f"there is no metric {', '.join(map(repr, unknown))}; there are {', '.join(SCORES)}")
    flat = sum(len(case.scan.spacing_mm) < 3 for case in dataset.cases)
    reasons = {}
    for name in metrics:
        score = SCORES[name]
        if score.unit == "ml" and flat:
            reasons[name] = (
                f"{flat} of {len(dataset)} cases are images of unknown thickness, without a volume"
            )
        if score.reference == "truth" and not _has_truth(dataset):
            reasons[name] = "the true probability is known of phantoms alone"
        if score.package is not None and importlib.util.find_spec(score.package) is None:
            reasons[name] = f"it needs {score.package}: pip install 'semidice[{score.package}]'"
    return reasons


def _has_truth(dataset: Dataset) -> bool:
    return all("truth" in scan.arrays for scan in dataset.manifest.scans)


def _batches_of_equal_shape(dataset: Dataset, cases: Sequence[int]) -> Iterator[list[int]]:
    """Case numbers in batches of equal shape; the order does not depend on the order of `cases`."""
    by_shape: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number in sorted(set(cases)):
        scan = dataset.cases[number].scan
        by_shape.setdefault((scan.shape, len(scan.spacing_mm)), []).append(number)
    width = dataset.num_classes + len(dataset.manifest.raters)
    for (shape, _), numbers in by_shape.items():
        step = max(1, _MAX_VALUES // (width * int(np.prod(shape))))
        for first in range(0, len(numbers), step):
            yield numbers[first : first + step]
