"""Scores of predictions: one number per case (and class).

    prob, target --scores, bins, density, raters, distances, volumes--> one number per case (and class)

`registry` lists all scores: name, function, direction, unit, meaning. Everything needs only torch and numpy,
but distances need SciPy. Tables of scores and their comparison are in `statistics`.
"""

from .bins import CalibrationBins, calibration_bins, calibration_error, classwise_calibration_error
from .density import kde_calibration_error
from .distances import hausdorff_error_mm, surface_dice_score
from .raters import generalised_energy_distance, level_masks, rater_dice_score
from .registry import SCORES, ScoredBatch, ScoreKey, higher_is_better
from .scores import (
    binarized_dice_score,
    brier_error,
    dice_score,
    foreground_mean,
    iou_score,
    negative_log_likelihood,
    soft_dice_score,
    volume_error_ml,
)
from .volumes import volume_coverage_score, volume_crps_error_ml, volume_width_ml

__all__ = [
    "SCORES",
    "CalibrationBins",
    "ScoreKey",
    "ScoredBatch",
    "binarized_dice_score",
    "brier_error",
    "calibration_bins",
    "calibration_error",
    "classwise_calibration_error",
    "dice_score",
    "foreground_mean",
    "generalised_energy_distance",
    "hausdorff_error_mm",
    "higher_is_better",
    "iou_score",
    "kde_calibration_error",
    "level_masks",
    "negative_log_likelihood",
    "rater_dice_score",
    "soft_dice_score",
    "surface_dice_score",
    "volume_coverage_score",
    "volume_crps_error_ml",
    "volume_error_ml",
    "volume_width_ml",
]
