"""Scores of a fold from its stored predictions, at the end of its training and by `semidice evaluate` again.

    target   majority of the raters who looked at a case      soft_target   their mean
    masks    each of theirs                                   truth         p*, where the source knows it

Both commands score the file, not the network, with the same functions in the same order, so on one device
their numbers agree to the bit. A stored 0 stands for up to half a unit (`stored`): the likelihood counts it
as that, 11.8 nats, instead of as a thing the network had ruled out.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..data.dataset import Dataset
from ..labels.makers import majority_label, mean_label
from ..metrics.accumulators import SCORES, CaseScores, Score, ScoredBatch
from ..metrics.cases import CaseTable, concatenate
from ..metrics.scores import negative_log_likelihood
from ..paths import FoldFolder
from .predictions import UNITS, read_prediction

Predictions = FoldFolder | Callable[[str], np.ndarray]

# values of a batch, probabilities and masks together: tens of megabytes with the copies that scores make
_BATCH = 1 << 22
_NEEDS_MONAI = ("hausdorff_error_mm", "surface_dice_score")


def truth_error(
    prob: Float[Tensor, "N C *space"], truth: Float[Tensor, "N C *space"]
) -> Float[Tensor, "N C"]:
    """Mean over voxels of |p - p*| of each class, p* the probability that the raters' masks are drawn from.

    >>> truth_error(torch.tensor([[[0.5, 0.0]]]), torch.tensor([[[1.0, 0.0]]]))
    tensor([[0.2500]])
    """
    return (prob - truth).abs().flatten(2).mean(2, dtype=torch.float64).float()


def _stored_likelihood(batch: ScoredBatch) -> Tensor:
    prob = batch.prob.clamp(min=0.5 / UNITS)
    return negative_log_likelihood(prob / prob.sum(1, keepdim=True), batch.need("target"), valid=batch.valid)


_STORED_SCORES: dict[str, Score] = SCORES | {"negative_log_likelihood": _stored_likelihood}
TRUTH_SCORES: dict[str, Score] = {"truth_error": lambda b: truth_error(b.prob, b.need("soft_target"))}


def score_fold(
    dataset: Dataset,
    cases: Sequence[int],
    predictions: Predictions,
    *,
    metrics: Sequence[str],
    method: str,
    fold: int,
    device: torch.device | str = "cpu",
    on_cases: Callable[[int], object] = lambda _: None,
) -> CaseTable:
    """The case table of a fold's validation cases, sorted.

    predictions: the fold's folder, or a function from a case's name to its probabilities (C, *space).
    metrics: names of `metrics.accumulators.SCORES`; `inapplicable_metrics` are left out, and `TRUTH_SCORES`
    added where the truth is known. on_cases(number) is called after so many more cases.
    """
    left_out = inapplicable_metrics(dataset, metrics)
    wanted = {name: _STORED_SCORES[name] for name in metrics if name in SCORES and name not in left_out}
    class_names = dataset.manifest.class_names
    scores = CaseScores(wanted, class_names=class_names, method=method).to(device)
    against_truth = CaseScores(TRUTH_SCORES, class_names=class_names, method=method).to(device)
    has_truth = _has_truth(dataset)
    for batch in _equal_batches(dataset, cases):
        prob = torch.from_numpy(_stacked(dataset, batch, predictions)).to(device)
        masks = torch.from_numpy(np.stack([dataset.masks(number) for number in batch])).to(device)
        present = torch.from_numpy(dataset.present[batch]).to(device)
        whom: dict[str, Any] = {
            "case": [dataset.cases[number].name for number in batch],
            "patient": [dataset.cases[number].patient for number in batch],
            "fold": fold,
        }
        scores.update(
            prob,
            majority_label(masks, num_classes=len(class_names), present=present, batched=True).argmax(1),
            soft_target=mean_label(masks, num_classes=len(class_names), present=present, batched=True),
            masks=masks.bool() if len(class_names) == 2 else masks,
            present=present,
            spacing_mm=torch.tensor(
                [dataset.cases[number].scan.spacing_mm for number in batch],
                dtype=torch.float64,
                device=device,
            ),
            **whom,
        )
        if has_truth:
            truths = [_known_truth(dataset, number) for number in batch]
            truth = torch.from_numpy(np.stack(truths)).to(device)
            against_truth.update(prob, soft_target=truth, **whom)
        on_cases(len(batch))
    return concatenate([scores.table(), against_truth.table()]).sorted()


def inapplicable_metrics(dataset: Dataset, metrics: Sequence[str]) -> dict[str, str]:
    """Which of the metrics cannot be had of this dataset, and why; an unknown name is a ValueError."""
    unknown = [name for name in metrics if name not in SCORES and name not in TRUTH_SCORES]
    if unknown:
        known = ", ".join([*SCORES, *TRUTH_SCORES])
        raise ValueError(f"there is no metric {', '.join(map(repr, unknown))}; there are {known}")
    flat = sum(len(case.scan.spacing_mm) < 3 for case in dataset.cases)
    reasons = {}
    for name in metrics:
        if name == "volume_error_ml" and flat:
            reasons[name] = (
                f"{flat} of {len(dataset)} cases are images of unknown thickness, without a volume"
            )
        if name in TRUTH_SCORES and not _has_truth(dataset):
            reasons[name] = "the true probability is known of phantoms alone"
        if name in _NEEDS_MONAI and importlib.util.find_spec("monai") is None:
            reasons[name] = "it needs MONAI: pip install 'semidice[monai]'"
    return reasons


def _has_truth(dataset: Dataset) -> bool:
    return all("truth" in scan.arrays for scan in dataset.manifest.scans)


def _known_truth(dataset: Dataset, number: int) -> np.ndarray:
    truth = dataset.truth(number)
    assert truth is not None
    return truth


def _equal_batches(dataset: Dataset, cases: Sequence[int]) -> Iterator[list[int]]:
    """Case numbers in groups of one shape, in an order that does not depend on that of `cases`."""
    by_shape: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number in sorted(set(cases)):
        scan = dataset.cases[number].scan
        by_shape.setdefault((scan.shape, len(scan.spacing_mm)), []).append(number)
    width = dataset.num_classes + len(dataset.manifest.raters)
    for (shape, _), numbers in by_shape.items():
        step = max(1, _BATCH // (width * int(np.prod(shape))))
        for first in range(0, len(numbers), step):
            yield numbers[first : first + step]


def _stacked(dataset: Dataset, batch: Sequence[int], predictions: Predictions) -> np.ndarray:
    """Predictions (N, C, *space) of cases of one shape; a ValueError names one that does not fit its case."""
    probs = []
    for number in batch:
        case = dataset.cases[number]
        if isinstance(predictions, FoldFolder):
            source = str(predictions.prediction(case.name))
            prob = read_prediction(predictions.prediction(case.name))
        else:
            source = f"the prediction of case {case.name}"
            prob = predictions(case.name)
        expected = (dataset.num_classes, *case.shape)
        if prob.shape != expected:
            raise ValueError(
                f"{source} has shape {prob.shape}, but {dataset.folder.path} says {expected}: "
                "it was made from another dataset; predict again"
            )
        probs.append(prob)
    return np.stack(probs)
