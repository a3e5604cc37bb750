"""What a score is: its name, function, references, direction, unit and meaning, in one record each.

Case tables, recipes, report pages and `semidice reproduce` all read these records. A `ScoreKey` is a score in
a case table: its name, the measure it is in, and whether a scan or a slice is one case. A score of your own
is not listed here: its name tells the direction (`*_score` and `*_index` up, `*_error` and `*_loss` down).
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
    unit: share (shown in percent), ml, mm or nats; empty if it has none. short_name: as the paper writes it.
    of_confidence: whether it says nothing about a mask, whose probabilities are all 0 or 1. of_mask: whether
    it is a score of the decided mask, so that the rule that decides changes it. over_classes: whether the
    function takes the mean over the classes itself.
    """

    function: Callable[..., Tensor]
    reference: Reference
    higher_is_better: bool
    meaning: str
    unit: str = "share"
    short_name: str | None = None
    needs_spacing: bool = False
    of_confidence: bool = False
    of_mask: bool = False
    over_classes: bool = False

    def __call__(self, batch: ScoredBatch) -> Tensor:
        """One value per case, (N,), or per case and class, (N, C)."""
        options: dict[str, Any] = {"valid": batch.valid}
        if self.reference == "masks":
            options |= {"num_classes": max(2, batch.prob.shape[1]), "present": batch.present}
        if self.over_classes:
            options["drawn"] = batch.drawn
        if self.needs_spacing:
            options["spacing_mm"] = batch.need("spacing_mm")
        prediction = batch.prob
        if self.of_mask and batch.decided is not None:
            prediction = batch.decided
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
    def score(self) -> Score | None:
        """The record in `SCORES`; None for a score of your own."""
        return SCORES.get(self.metric)

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
        if self.score is None:
            return None
        words = self.score.meaning
        if self.score.needs_spacing:
            words += f", {self.unit.removeprefix('share ')}" if self.scale == 100 else f", in {self.unit}"
        return f"{words}; of every slice on its own" if self.per == "slice" else words


def higher_is_better(metric: str) -> bool:
    """Direction of a score. The name tells it for a score of your own; a ValueError if it does not.

    >>> higher_is_better("dice_score"), higher_is_better("volume_error"), higher_is_better("my_loss")
    (True, False, False)
    """
    if metric in SCORES:
        return SCORES[metric].higher_is_better
    if metric.endswith(("_score", "_index", "_error", "_loss")):
        return metric.endswith(("_score", "_index"))
    raise UserError(f"the name {metric!r} does not say whether higher is better: end it in _score or _error")


def default_unit(metric: str) -> str:
    """The unit of a score whose table does not tell: that of `SCORES`; a share if the name is one.

    >>> default_unit("hausdorff_error"), default_unit("my_dice_score"), default_unit("my_error")
    ('mm', 'share', '')
    """
    if metric in SCORES:
        return SCORES[metric].unit
    return "share" if metric.endswith(("_score", "_index", "calibration_error", "brier_error")) else ""


def _energy_distance(prob: Tensor, masks: Tensor, *, valid: Tensor | None, **options: Any) -> Tensor:
    samples = level_masks(prob, num_samples=16, valid=valid)
    return generalised_energy_distance(samples, masks, valid=valid, **options)


def _mean_rater_dice(prob: Tensor, masks: Tensor, **options: Any) -> Tensor:
    return rater_dice_score(prob, masks, **options).nanmean(1)


def _in_plane(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with one side of a voxel per axis: a 2D image ignores its slice thickness."""
    return lambda prob, target, *, spacing_mm, **options: function(
        prob, target, spacing_mm=torch.as_tensor(spacing_mm)[..., : prob.ndim - 2], **options
    )


_UP, _DOWN = True, False
SCORES: dict[str, Score] = {
    "dice_score": Score(
        dice_score,
        "target",
        _UP,
        "overlap of the decided mask with the raters' majority: 2 tp / (2 tp + fp + fn)",
        short_name="Dice",
        of_mask=True,
    ),
    "iou_score": Score(
        iou_score,
        "target",
        _UP,
        "overlap of the decided mask with the raters' majority: tp / (tp + fp + fn)",
        of_mask=True,
    ),
    "binarized_dice_score": Score(
        binarized_dice_score,
        "soft_target",
        _UP,
        "BDice: Dice of prediction and mean of the raters, both cut at 0.1, 0.2, ... 0.9, averaged",
        short_name="BDice",
    ),
    "soft_dice_score": Score(
        soft_dice_score,
        "soft_target",
        _UP,
        "overlap of the probabilities and the mean of the raters, 1 only where they are equal",
    ),
    "calibration_error": Score(
        calibration_error,
        "target",
        _DOWN,
        "ECE: distance of confidence from accuracy over 10 bins of the top class, against the majority",
        short_name="ECE",
        of_confidence=True,
    ),
    "rater_calibration_error": Score(
        calibration_error,
        "soft_target",
        _DOWN,
        "the same, but accuracy is the share of raters who agree with the top class",
        of_confidence=True,
    ),
    "classwise_calibration_error": Score(
        classwise_calibration_error,
        "target",
        _DOWN,
        "the calibration error of each class against the rest",
        of_confidence=True,
    ),
    "kde_calibration_error": Score(
        kde_calibration_error,
        "target",
        _DOWN,
        "distance of probabilities from observed rates, by kernel density",
        of_confidence=True,
    ),
    "brier_error": Score(
        brier_error,
        "target",
        _DOWN,
        "mean squared difference of probabilities and the majority",
        of_confidence=True,
    ),
    "negative_log_likelihood": Score(
        negative_log_likelihood,
        "target",
        _DOWN,
        "mean of -log of the probability of the majority's class",
        "nats",
        of_confidence=True,
    ),
    "rater_brier_error": Score(
        brier_error,
        "soft_target",
        _DOWN,
        "mean squared difference of probabilities and the mean of the raters",
        of_confidence=True,
    ),
    "rater_negative_log_likelihood": Score(
        negative_log_likelihood,
        "soft_target",
        _DOWN,
        "mean over the raters of -log of the probability of the rater's class",
        "nats",
        of_confidence=True,
    ),
    "volume_error": Score(
        volume_error_ml,
        "target",
        _DOWN,
        "difference of the volumes of the decided mask and of the majority",
        "ml",
        needs_spacing=True,
        of_mask=True,
    ),
    "hausdorff_error": Score(
        _in_plane(hausdorff_error_mm),
        "target",
        _DOWN,
        "95th percentile of the distance between surfaces",
        "mm",
        needs_spacing=True,
        of_mask=True,
    ),
    "surface_dice_score": Score(
        _in_plane(surface_dice_score),
        "target",
        _UP,
        "share of the surfaces that lie within a tolerance of each other",
        needs_spacing=True,
        of_mask=True,
    ),
    "generalised_energy_distance": Score(
        _energy_distance,
        "masks",
        _DOWN,
        "distance between masks sampled from a prediction and the raters'",
        "",
        over_classes=True,
    ),
    "rater_dice_score": Score(
        _mean_rater_dice,
        "masks",
        _UP,
        "overlap of the decided mask with each rater, averaged over the raters",
        of_mask=True,
        over_classes=True,
    ),
    "volume_crps_error": Score(
        volume_crps_error_ml,
        "masks",
        _DOWN,
        "CRPS: distance of the distribution of the volume from the volume of each rater, averaged",
        "ml",
        needs_spacing=True,
    ),
    "volume_coverage_score": Score(
        volume_coverage_score,
        "masks",
        _UP,
        "share of the raters whose volume lies in the 90 % interval of the prediction; the aim is 90 %",
        of_confidence=True,
    ),
    "volume_width": Score(
        volume_width_ml,
        "masks",
        _DOWN,
        "width of the 90 % interval of the volume, to be compared where the coverage is the same",
        "ml",
        needs_spacing=True,
        of_confidence=True,
    ),
    "truth_error": Score(
        truth_error, "truth", _DOWN, "mean distance from the true probabilities, which only phantoms have"
    ),
}
