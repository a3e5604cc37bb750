"""What a score is: its name, function, references, direction, unit and meaning, in one record each.

Case tables, recipes, report pages and `semidice reproduce` all read these records. A score of your own is not
listed here: its name tells direction and unit (`*_score` and `*_index` up, `*_error` and `*_loss` down;
`_ml`, `_mm` and `_voxels` at the end are units). In the case table of a run, the name also tells more:

    hausdorff_error_voxels    the spacing is not known: distances are in voxels, and so are volumes
    surface_dice_score_2mm    the tolerance
    dice_score_per_slice      every slice of a volume on its own

Importing this module does not import torchmetrics.
"""

import re
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
from .volumes import volume_coverage_score, volume_crps_error_ml, volume_width_ml

Unit = Literal["percent", "ml", "mm", "nats", "none"]
Reference = Literal["target", "soft_target", "masks", "truth"]


@dataclass(frozen=True)
class ScoredBatch:
    """The predictions of N cases, and the references that they can be scored against.

    target: the decided reference, such as the majority of the raters. soft_target: the mean of the raters.
    masks, present: the mask of each rater, and who looked at the case. truth: the probability that the masks
    are drawn from, which only a phantom knows. decided: the masks (N, C, *space) that a rule made from prob,
    bool, for the scores of masks; None takes the most probable class.
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

    def need(self, name: str) -> Any:
        """The named reference; a ValueError if it is missing."""
        reference = getattr(self, name)
        if reference is None:
            raise ValueError(f"this score needs {name}: pass {name}=... to update")
        return reference


# from a batch to one value per case, (N,), or per case and class, (N, C)
ScoreFunction = Callable[[ScoredBatch], Tensor]


@dataclass(frozen=True)
class Score:
    """One score; call it with a `ScoredBatch`.

    function: of prob and the reference, with `valid`, and what else the reference or `needs_spacing` implies.
    unit "percent": a fraction of 1 that is shown in percent. short_name: as the paper writes it. package: an
    optional package that the function imports. of_confidence: whether it says nothing about a mask,
    whose probabilities are all 0 or 1. of_mask: whether it is a score of the decided mask, so that the rule
    that decides changes it.
    """

    function: Callable[..., Tensor]
    reference: Reference
    higher_is_better: bool
    meaning: str
    unit: Unit = "percent"
    short_name: str | None = None
    needs_spacing: bool = False
    package: str | None = None
    of_confidence: bool = False
    of_mask: bool = False

    def __call__(self, batch: ScoredBatch) -> Tensor:
        """One value per case, (N,), or per case and class, (N, C)."""
        options: dict[str, Any] = {"valid": batch.valid}
        if self.reference == "masks":
            options |= {"num_classes": max(2, batch.prob.shape[1]), "present": batch.present}
        if self.needs_spacing:
            options["spacing_mm"] = batch.need("spacing_mm")
        prediction = batch.prob
        if self.of_mask and batch.decided is not None:
            prediction = batch.decided.to(batch.prob.dtype)
        return self.function(prediction, batch.need(self.reference), **options)


def higher_is_better(metric: str) -> bool:
    """Direction of a score. The name tells it for a score of your own; a ValueError if it does not.

    >>> higher_is_better("dice_score"), higher_is_better("volume_error_ml"), higher_is_better("my_loss")
    (True, False, False)
    """
    if metric in SCORES:
        return SCORES[metric].higher_is_better
    if score_name(metric) != metric:
        return higher_is_better(score_name(metric))
    stem = re.sub("_(ml|mm|voxels)$", "", metric.removesuffix(PER_SLICE))
    if stem.endswith(("_score", "_index")):
        return True
    if stem.endswith(("_error", "_loss")):
        return False
    raise ValueError(
        f"the name {metric!r} does not say whether higher is better: "
        "end it in _score or _error, or pass higher_is_better=..."
    )


def display_scale(metric: str) -> float:
    """100 for a score that is a fraction of 1 and is shown in percent, else 1.

    >>> display_scale("dice_score"), display_scale("volume_error_ml"), display_scale("my_calibration_error")
    (100.0, 1.0, 100.0)
    """
    metric = score_name(metric)
    if metric in SCORES:
        return 100.0 if SCORES[metric].unit == "percent" else 1.0
    return 100.0 if metric.endswith(("_score", "_index", "calibration_error", "brier_error")) else 1.0


def heading(metric: str, class_name: str = "mean", *, higher_is_better: bool) -> str:
    """A score as the head of a column.

    >>> heading("dice_score", higher_is_better=True)
    'dice_score (%) ↑'
    >>> heading("volume_error_ml", "liver", higher_is_better=False)
    'volume_error_ml, liver ↓'
    >>> heading("dice_score_per_slice", higher_is_better=True)
    'dice_score per slice (%) ↑'
    """
    of_class = "" if class_name in ("mean", "all") else f", {class_name}"
    percent = " (%)" if display_scale(metric) == 100 else ""
    return f"{spoken_name(metric)}{of_class}{percent} {'↑' if higher_is_better else '↓'}"


def spoken_name(metric: str) -> str:
    """The name of a score in a heading.

    >>> spoken_name("dice_score_per_slice")
    'dice_score per slice'
    """
    return f"{metric.removesuffix(PER_SLICE)} per slice" if metric.endswith(PER_SLICE) else metric


def table_name(
    metric: str, *, in_voxels: bool = False, tolerance: float = 1.0, per_slice: bool = False
) -> str:
    """The name in the case table of a score in `SCORES`; see the module docstring.

    >>> table_name("hausdorff_error_mm", in_voxels=True), table_name("surface_dice_score", tolerance=2)
    ('hausdorff_error_voxels', 'surface_dice_score_2mm')
    """
    if metric == "surface_dice_score":
        metric = f"{metric}_{tolerance:g}{'voxels' if in_voxels else 'mm'}"
    elif in_voxels and SCORES[metric].needs_spacing:
        metric = f"{metric[:-3]}_voxels"
    return metric + PER_SLICE if per_slice else metric


def score_name(metric: str) -> str:
    """The name in `SCORES` of a name in a case table; a score of your own keeps its name.

    >>> score_name("hausdorff_error_voxels_per_slice"), score_name("surface_dice_score_2mm")
    ('hausdorff_error_mm', 'surface_dice_score')
    """
    name = re.sub("^(surface_dice_score)_.*$", r"\1", metric.removesuffix(PER_SLICE))
    name = _IN_VOXELS.get(name, name)
    return name if name in SCORES else metric


def tolerance_of(metric: str) -> float:
    """The tolerance in the name of a surface Dice in a case table; 1, the default, of another score.

    >>> tolerance_of("surface_dice_score_2mm"), tolerance_of("dice_score")
    (2.0, 1.0)
    """
    found = _TOLERANCE.match(metric)
    return float(found[1]) if found else 1.0


def meaning(metric: str) -> str | None:
    """What a score of a case table is, in words; None for a score of your own.

    >>> meaning("hausdorff_error_voxels")
    '95th percentile of the distance between surfaces, in voxels'
    """
    if score_name(metric) not in SCORES:
        return None
    name = metric.removesuffix(PER_SLICE)
    words = SCORES[score_name(metric)].meaning
    if tolerance := _TOLERANCE.fullmatch(name):
        words += f", {tolerance[1]} {tolerance[2]}"
    elif SCORES[score_name(metric)].needs_spacing:
        words += f", in {name.rpartition('_')[2]}"
    return f"{words}; of every slice on its own" if name != metric else words


def _energy_distance(prob: Tensor, masks: Tensor, **options: Any) -> Tensor:
    return generalised_energy_distance(level_masks(prob, num_samples=16), masks, **options)


def _mean_rater_dice(prob: Tensor, masks: Tensor, **options: Any) -> Tensor:
    return rater_dice_score(prob, masks, **options).nanmean(1)


def _in_plane(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with one side of a voxel per axis: a 2D image ignores its slice thickness."""
    return lambda prob, target, *, spacing_mm, **options: function(
        prob, target, spacing_mm=torch.as_tensor(spacing_mm)[..., : prob.ndim - 2], **options
    )


PER_SLICE = "_per_slice"
_TOLERANCE = re.compile("surface_dice_score_(.*?)(mm|voxels)")
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
    "volume_error_ml": Score(
        volume_error_ml,
        "target",
        _DOWN,
        "difference of the volumes of the decided mask and of the majority",
        "ml",
        needs_spacing=True,
        of_mask=True,
    ),
    "hausdorff_error_mm": Score(
        _in_plane(hausdorff_error_mm),
        "target",
        _DOWN,
        "95th percentile of the distance between surfaces",
        "mm",
        needs_spacing=True,
        package="monai",
        of_mask=True,
    ),
    "surface_dice_score": Score(
        _in_plane(surface_dice_score),
        "target",
        _UP,
        "share of the surfaces that lie within a tolerance of each other",
        needs_spacing=True,
        package="monai",
        of_mask=True,
    ),
    "generalised_energy_distance": Score(
        _energy_distance,
        "masks",
        _DOWN,
        "distance between masks sampled from a prediction and the raters'",
        "none",
    ),
    "rater_dice_score": Score(
        _mean_rater_dice,
        "masks",
        _UP,
        "overlap of the decided mask with each rater, averaged over the raters",
        of_mask=True,
    ),
    "volume_crps_error_ml": Score(
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
    "volume_width_ml": Score(
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
# the name in a table of a score whose own name ends in mm or ml
_IN_VOXELS = {f"{name[:-3]}_voxels": name for name in SCORES if name.endswith(("_mm", "_ml"))}
