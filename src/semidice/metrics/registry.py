"""What a score is: its name, function, references, direction, unit and meaning, in one record each.

Case tables, recipes, report pages and `semidice reproduce` all read these records. A `ScoreKey` is a score in
a case table: its name, the measure it is in, and whether a scan or a slice is one case. A score of your own
is not listed here. The name of every score tells its direction, see `higher_is_better`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from .bins import calibration_error, classwise_calibration_error
from .density import kde_calibration_error
from .distances import hausdorff_error_mm, surface_dice_score
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
from .volumes import volume_coverage_score, volume_crps_error_ml, volume_width_ml

Reference = Literal["target", "soft_target", "masks", "truth"]
_REFERENCES: dict[Reference, str] = {
    "target": "the majority of the raters",
    "soft_target": "the mean of the raters",
    "masks": "each rater",
    "truth": "the true probability",
}
# as the paper writes them
SHORT_NAMES = {"dice_score": "Dice", "binarized_dice_score": "BDice", "calibration_error": "ECE"}


@dataclass(frozen=True)
class ScoredBatch:
    """The predictions of N cases, and the references that they can be scored against.

    target: the decided reference, such as the majority of the raters. soft_target: the mean of the raters.
    masks, present: the mask of each rater, and who looked at the case. truth: the probability that the masks
    are drawn from, which only a phantom knows. decided: the masks (N, C, *space) that a rule made from prob,
    bool, for the scores of masks; None takes the most probable class. drawn: the classes that anybody drew in
    any case of the dataset, for means over classes; None counts all.
    """

    prob: Tensor
    target: Tensor | None = None
    soft_target: Tensor | None = None
    masks: Tensor | None = None
    present: Tensor | None = None
    spacing_mm: Sequence[float] | Tensor | None = None
    valid: Tensor | None = None
    truth: Tensor | None = None
    decided: Tensor | None = None
    drawn: Sequence[bool] | None = None

    def need(self, name: str) -> Any:
        """The named reference; a ValueError if it is missing."""
        reference = getattr(self, name)
        if reference is None:
            raise UserError(f"this score needs {name}: pass {name}=... to update")
        return reference


# from a batch to one value per case, (N,), or per case and class, (N, C)
ScoreFunction = Callable[[ScoredBatch], Tensor]


@dataclass(frozen=True)
class Score:
    """One score; call it with a `ScoredBatch`.

    function: of prob and the reference, with `valid`, and what else the reference or `needs_spacing` implies.
    judges: the decided mask, which a rule of decision changes; the probability; or the confidence alone,
    which says nothing about a mask, whose probabilities are all 0 or 1. unit: share (shown in percent), ml,
    mm or nats; empty if it has none. over_classes: whether the function takes the mean over the classes.
    """

    function: Callable[..., Tensor]
    reference: Reference
    judges: Literal["mask", "probability", "confidence"]
    meaning: str
    unit: str = "share"
    needs_spacing: bool = False
    over_classes: bool = False

    def __call__(self, batch: ScoredBatch) -> Tensor:
        """One value per case, (N,), or per case and class, (N, C)."""
        options: dict[str, Any] = {"valid": batch.valid}
        if self.reference == "masks":
            options["present"] = batch.present
        if self.over_classes:
            options["drawn"] = batch.drawn
        if self.needs_spacing:
            options["spacing_mm"] = batch.need("spacing_mm")
        is_decided = self.judges == "mask" and batch.decided is not None
        prediction = batch.decided if is_decided else batch.prob
        return self.function(prediction, batch.need(self.reference), **options)


class ScoreKey(NamedTuple):
    """A score in a case table; two scores are compared only if all three are the same.

    unit: of `Score`, and voxels where the spacing is not known. Of surface Dice it also has the tolerance.

    >>> ScoreKey("dice_score").heading(), ScoreKey("volume_error", "ml", "slice").heading("liver")
    ('dice_score (%) ↑', 'volume_error per slice, liver (ml) ↓')
    >>> str(ScoreKey("surface_dice_score", "share within 2 mm")), ScoreKey("hausdorff_error", "mm").file_name
    ('surface_dice_score within 2 mm', 'hausdorff_error_mm')
    """

    metric: str
    unit: str = "share"
    per: str = "scan"

    @property
    def scale(self) -> float:
        """100 for a share, which is shown in percent, else 1."""
        return 100.0 if self.unit.startswith("share") else 1.0

    @property
    def higher_is_better(self) -> bool:
        return higher_is_better(self.metric)

    @property
    def label(self) -> str:
        """The score without the unit that its numbers have."""
        within = self.unit.removeprefix("share") if self.scale == 100 else ""
        return f"{self.metric}{within}{' per slice' if self.per == 'slice' else ''}"

    def __str__(self) -> str:
        return self.label + (f" ({self.unit})" if self.scale == 1 and self.unit else "")

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.-]+", "_", str(self)).strip("_")

    def heading(self, class_name: str = "mean") -> str:
        """The score as the head of a column, with unit and direction."""
        of_class = "" if class_name in ("mean", "all") else f", {class_name}"
        unit = "%" if self.scale == 100 else self.unit
        return f"{self.label}{of_class}{f' ({unit})' if unit else ''} {'↑' if self.higher_is_better else '↓'}"

    @property
    def meaning(self) -> str | None:
        """What the score is, in words; None for a score of your own."""
        score = SCORES.get(self.metric)
        if score is None:
            return None
        within = f" {self.unit.removeprefix('share ')}" if self.unit.startswith("share ") else ""
        words = f"{score.meaning}{within}, against {_REFERENCES[score.reference]}"
        return f"{words}; of every slice on its own" if self.per == "slice" else words


def higher_is_better(metric: str) -> bool:
    """Direction of a score, which its name tells; a UserError if it does not.

    >>> higher_is_better("dice_score"), higher_is_better("volume_error"), higher_is_better("my_loss")
    (True, False, False)
    """
    up = metric.endswith(("_score", "_index"))
    if not up and not metric.endswith(("_error", "_loss", "_distance", "_width", "negative_log_likelihood")):
        raise UserError(
            f"the name {metric!r} does not say whether higher is better: end it in _score or _error"
        )
    return up


def default_unit(metric: str) -> str:
    """The unit of a score whose table does not tell: that of `SCORES`; a share if the name is one.

    >>> default_unit("hausdorff_error"), default_unit("my_dice_score"), default_unit("my_error")
    ('mm', 'share', '')
    """
    if metric in SCORES:
        return SCORES[metric].unit
    return "share" if metric.endswith(("_score", "_index", "calibration_error", "brier_error")) else ""


def _energy_distance(prob: Tensor, masks: Tensor, *, valid: Tensor | None, **options: Any) -> Tensor:
    samples, num_classes = level_masks(prob, num_samples=16, valid=valid), max(2, prob.shape[1])
    return generalised_energy_distance(samples, masks, num_classes=num_classes, valid=valid, **options)


def _mean_rater_dice(prob: Tensor, masks: Tensor, **options: Any) -> Tensor:
    return rater_dice_score(prob, masks, **options).nanmean(1)


def _volume_width(prob: Tensor, masks: Tensor, *, present: Tensor | None, **options: Any) -> Tensor:
    return volume_width_ml(prob, **options)


def _in_plane(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with one side of a voxel per axis: a 2D image ignores its slice thickness."""
    return lambda prob, target, *, spacing_mm, **options: function(
        prob, target, spacing_mm=torch.as_tensor(spacing_mm)[..., : prob.ndim - 2], **options
    )


SCORES: dict[str, Score] = {
    "dice_score": Score(dice_score, "target", "mask", "overlap of the decided mask: 2 tp / (2 tp + fp + fn)"),
    "iou_score": Score(iou_score, "target", "mask", "overlap of the decided mask: tp / (tp + fp + fn)"),
    "binarized_dice_score": Score(
        binarized_dice_score, "soft_target", "probability", "Dice of both cut at 0.1, 0.2, ... 0.9, averaged"
    ),
    "soft_dice_score": Score(
        soft_dice_score, "soft_target", "probability", "overlap of the probabilities, 1 only if equal"
    ),
    "calibration_error": Score(
        calibration_error, "target", "confidence", "distance of confidence from accuracy, over 10 bins"
    ),
    "rater_calibration_error": Score(
        calibration_error, "soft_target", "confidence", "distance of confidence from accuracy, over 10 bins"
    ),
    "classwise_calibration_error": Score(
        classwise_calibration_error, "target", "confidence", "calibration error of each class by itself"
    ),
    "kde_calibration_error": Score(
        kde_calibration_error, "target", "confidence", "calibration error by kernel density, without bins"
    ),
    "brier_error": Score(brier_error, "target", "confidence", "mean squared difference of the probabilities"),
    "negative_log_likelihood": Score(
        negative_log_likelihood,
        "target",
        "confidence",
        "mean of -log of the probability of the class",
        "nats",
    ),
    "rater_brier_error": Score(
        brier_error, "soft_target", "confidence", "mean squared difference of the probabilities"
    ),
    "rater_negative_log_likelihood": Score(
        negative_log_likelihood, "soft_target", "confidence", "mean of -log of the probability", "nats"
    ),
    "volume_error": Score(
        volume_error_ml, "target", "mask", "difference of the volumes", "ml", needs_spacing=True
    ),
    "hausdorff_error": Score(
        _in_plane(hausdorff_error_mm), "target", "mask", "95 % of surface distances", "mm", needs_spacing=True
    ),
    "surface_dice_score": Score(
        _in_plane(surface_dice_score), "target", "mask", "share of the surfaces", needs_spacing=True
    ),
    "generalised_energy_distance": Score(
        _energy_distance, "masks", "probability", "distance of sampled masks", "", over_classes=True
    ),
    "rater_dice_score": Score(
        _mean_rater_dice, "masks", "mask", "Dice of the decided mask, averaged", over_classes=True
    ),
    "volume_crps_error": Score(
        volume_crps_error_ml,
        "masks",
        "probability",
        "CRPS: distance of the distribution of the volume, averaged",
        "ml",
        needs_spacing=True,
    ),
    "volume_coverage_score": Score(
        volume_coverage_score,
        "masks",
        "confidence",
        "share of the volumes in the 90 % interval of the prediction; the aim is 90 %",
    ),
    "volume_width": Score(
        _volume_width,
        "masks",
        "confidence",
        "width of the 90 % interval of the volume; to be compared where the coverage is the same",
        "ml",
        needs_spacing=True,
    ),
    "truth_error": Score(
        truth_error, "truth", "probability", "mean distance of the probabilities, known of phantoms alone"
    ),
}
