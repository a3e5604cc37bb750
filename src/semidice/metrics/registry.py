"""What a score is: its name, function, references, direction, unit and meaning, in one record each.

Case tables, recipes, report pages and `semidice reproduce` all read these records. A score of your own is not
listed here: its name tells direction and unit (`*_score` and `*_index` up, `*_error` and `*_loss` down; `_ml`
and `_mm` at the end are units). Importing this module does not import torchmetrics.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .bins import calibration_error, classwise_calibration_error
from .density import kde_calibration_error
from .raters import generalised_energy_distance, level_masks, rater_dice_score
from .scores import (
    binarized_dice_score,
    brier_error,
    dice_score,
    iou_score,
    negative_log_likelihood,
    soft_dice_score,
    truth_error,
    volume_error_ml,
)
from .surfaces import hausdorff_error_mm, surface_dice_score

Unit = Literal["percent", "ml", "mm", "nats", "none"]
Reference = Literal["target", "soft_target", "masks", "spacing_mm", "truth"]


@dataclass(frozen=True)
class ScoredBatch:
    """The predictions of N cases, and the references that they can be scored against.

    target: the decided reference, such as the majority of the raters. soft_target: the mean of the raters.
    masks, present: the mask of each rater, and who looked at the case. truth: the probability that the masks
    are drawn from, which only a phantom knows.
    """

    prob: Tensor
    target: Tensor | None = None
    soft_target: Tensor | None = None
    masks: Tensor | None = None
    present: Tensor | None = None
    spacing_mm: Sequence[float] | Tensor | None = None
    valid: Tensor | None = None
    truth: Tensor | None = None

    def need(self, name: Reference) -> Any:
        """The named reference; a ValueError if it is missing."""
        reference = getattr(self, name)
        if reference is None:
            raise ValueError(f"this score needs {name}: pass {name}=... to update")
        return reference


# from a batch to one value per case, (N,), or per case and class, (N, C)
ScoreFunction = Callable[[ScoredBatch], Tensor]


@dataclass(frozen=True)
class Score:
    """One score.

    needs: references that the function reads. unit "percent": a fraction of 1 that is shown in percent.
    short_name: as the paper writes it. package: an optional package that the function imports.
    """

    name: str
    function: ScoreFunction
    meaning: str
    higher_is_better: bool
    needs: tuple[Reference, ...] = ("target",)
    unit: Unit = "percent"
    short_name: str | None = None
    package: str | None = None


def higher_is_better(metric: str) -> bool:
    """Direction of a score. The name tells it for a score of your own; a ValueError if it does not.

    >>> higher_is_better("dice_score"), higher_is_better("volume_error_ml"), higher_is_better("my_loss")
    (True, False, False)
    """
    if metric in SCORES:
        return SCORES[metric].higher_is_better
    stem = metric.removesuffix("_ml").removesuffix("_mm")
    if stem.endswith(("_score", "_index")):
        return True
    if stem.endswith(("_error", "_loss")):
        return False
    raise ValueError(
        f"the name {metric!r} does not say whether higher is better: "
        "end it in _score or _error, or pass higher_is_better=..."
    )


def is_fraction(metric: str) -> bool:
    """Whether a score is a fraction of 1, which is shown in percent.

    >>> is_fraction("dice_score"), is_fraction("volume_error_ml"), is_fraction("my_calibration_error")
    (True, False, True)
    """
    if metric in SCORES:
        return SCORES[metric].unit == "percent"
    return metric.endswith(("_score", "_index", "calibration_error", "brier_error"))


def display_scale(metric: str) -> float:
    """100 for a score that is shown in percent, else 1.

    >>> display_scale("dice_score"), display_scale("volume_error_ml")
    (100.0, 1.0)
    """
    return 100.0 if is_fraction(metric) else 1.0


def heading(metric: str, class_name: str = "mean", *, higher_is_better: bool) -> str:
    """A score as the head of a column.

    >>> heading("dice_score", higher_is_better=True)
    'dice_score (%) ↑'
    >>> heading("volume_error_ml", "liver", higher_is_better=False)
    'volume_error_ml, liver ↓'
    """
    of_class = "" if class_name in ("mean", "all") else f", {class_name}"
    percent = " (%)" if is_fraction(metric) else ""
    return f"{metric}{of_class}{percent} {'↑' if higher_is_better else '↓'}"


def _against(reference: Reference, function: Callable[..., Tensor]) -> ScoreFunction:
    return lambda batch: function(batch.prob, batch.need(reference), valid=batch.valid)


def _against_masks(function: Callable[..., Tensor]) -> ScoreFunction:
    return lambda batch: function(
        batch.prob,
        batch.need("masks"),
        num_classes=max(2, batch.prob.shape[1]),
        present=batch.present,
        valid=batch.valid,
    )


def _energy_distance(prob: Tensor, masks: Tensor, **options: Any) -> Tensor:
    return generalised_energy_distance(level_masks(prob, num_samples=16), masks, **options)


def _mean_rater_dice(prob: Tensor, masks: Tensor, **options: Any) -> Tensor:
    return rater_dice_score(prob, masks, **options).nanmean(1)


def _volume_error(batch: ScoredBatch) -> Tensor:
    return volume_error_ml(
        batch.prob, batch.need("target"), spacing_mm=batch.need("spacing_mm"), valid=batch.valid
    )


def _between_surfaces(function: Callable[..., Tensor]) -> ScoreFunction:
    def score(batch: ScoredBatch) -> Tensor:
        # one side of a voxel per axis of space: a distance in a 2D image ignores the slice thickness
        spacing = torch.as_tensor(batch.need("spacing_mm"))[..., : batch.prob.ndim - 2]
        return function(batch.prob, batch.need("target"), spacing_mm=spacing, valid=batch.valid)

    return score


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score(
            "dice_score",
            _against("target", dice_score),
            "overlap of the decided mask with the raters' majority: 2 tp / (2 tp + fp + fn)",
            higher_is_better=True,
            short_name="Dice",
        ),
        Score(
            "iou_score",
            _against("target", iou_score),
            "overlap of the decided mask with the raters' majority: tp / (tp + fp + fn)",
            higher_is_better=True,
        ),
        Score(
            "binarized_dice_score",
            _against("soft_target", binarized_dice_score),
            "BDice: Dice of prediction and mean of the raters, both cut at 0.1, 0.2, ... 0.9, averaged",
            higher_is_better=True,
            needs=("soft_target",),
            short_name="BDice",
        ),
        Score(
            "soft_dice_score",
            _against("soft_target", soft_dice_score),
            "overlap of the probabilities and the mean of the raters, 1 only where they are equal",
            higher_is_better=True,
            needs=("soft_target",),
        ),
        Score(
            "calibration_error",
            _against("target", calibration_error),
            "ECE: distance of confidence from accuracy over 10 bins of the top class, against the majority",
            higher_is_better=False,
            short_name="ECE",
        ),
        Score(
            "rater_calibration_error",
            _against("soft_target", calibration_error),
            "the same, accuracy being the share of raters who agree with the top class",
            higher_is_better=False,
            needs=("soft_target",),
        ),
        Score(
            "classwise_calibration_error",
            _against("target", classwise_calibration_error),
            "the calibration error of each class on its own",
            higher_is_better=False,
        ),
        Score(
            "kde_calibration_error",
            _against("target", kde_calibration_error),
            "how far probabilities are from what is observed at them, by kernel density",
            higher_is_better=False,
        ),
        Score(
            "brier_error",
            _against("target", brier_error),
            "mean squared difference of probabilities and the majority",
            higher_is_better=False,
        ),
        Score(
            "negative_log_likelihood",
            _against("target", negative_log_likelihood),
            "mean of -log of the probability given to the majority's class, in nats",
            higher_is_better=False,
            unit="nats",
        ),
        Score(
            "volume_error_ml",
            _volume_error,
            "difference of the volumes of the decided mask and of the majority, in ml",
            higher_is_better=False,
            needs=("target", "spacing_mm"),
            unit="ml",
        ),
        Score(
            "hausdorff_error_mm",
            _between_surfaces(hausdorff_error_mm),
            "95th percentile of the distance between surfaces, in mm",
            higher_is_better=False,
            needs=("target", "spacing_mm"),
            unit="mm",
            package="monai",
        ),
        Score(
            "surface_dice_score",
            _between_surfaces(surface_dice_score),
            "share of the surfaces that lie within a tolerance of each other",
            higher_is_better=True,
            needs=("target", "spacing_mm"),
            package="monai",
        ),
        Score(
            "generalised_energy_distance",
            _against_masks(_energy_distance),
            "distance between the masks a prediction allows and those the raters drew",
            higher_is_better=False,
            needs=("masks",),
            unit="none",
        ),
        Score(
            "rater_dice_score",
            _against_masks(_mean_rater_dice),
            "overlap of the decided mask with each rater, averaged over the raters",
            higher_is_better=True,
            needs=("masks",),
        ),
        Score(
            "truth_error",
            lambda batch: truth_error(batch.prob, batch.need("truth")),
            "mean distance of the probabilities from the true ones, which are known of phantoms alone",
            higher_is_better=False,
            needs=("truth",),
        ),
    )
}
