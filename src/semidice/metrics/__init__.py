"""Scores of predictions, tables of them, and tests of which method is better.

    prob, target --scores, bins, density, raters, surfaces, volumes--> one number per case (and class)
    batches, processes --accumulators--> case table --statistics--> comparison --tables--> text

`registry` lists all scores: name, function, direction, unit, meaning.
Everything exported here needs only torch and numpy, but distances need MONAI, Parquet files pyarrow, and
tables in the terminal rich. `metrics.accumulators` needs torchmetrics and is not imported here.
"""

from .agreement import rater_agreement_table
from .bins import CalibrationBins, calibration_bins, calibration_error, classwise_calibration_error
from .cases import CaseRow, CaseTable, concatenate, read_cases, write_cases
from .density import kde_calibration_error
from .raters import generalised_energy_distance, level_masks, rater_dice_score
from .registry import higher_is_better
from .resampling import paired_bootstrap, permutation_test
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
from .statistics import Comparison, compare_cases, compare_scores, holm
from .surfaces import hausdorff_error_mm, surface_dice_score
from .tables import means_table, pairs_table
from .volumes import volume_coverage_score, volume_crps_error_ml, volume_width_ml

__all__ = [
    "CalibrationBins",
    "CaseRow",
    "CaseTable",
    "Comparison",
    "binarized_dice_score",
    "brier_error",
    "calibration_bins",
    "calibration_error",
    "classwise_calibration_error",
    "compare_cases",
    "compare_scores",
    "concatenate",
    "dice_score",
    "foreground_mean",
    "generalised_energy_distance",
    "hausdorff_error_mm",
    "higher_is_better",
    "holm",
    "iou_score",
    "kde_calibration_error",
    "level_masks",
    "means_table",
    "negative_log_likelihood",
    "paired_bootstrap",
    "pairs_table",
    "permutation_test",
    "rater_agreement_table",
    "rater_dice_score",
    "read_cases",
    "soft_dice_score",
    "surface_dice_score",
    "volume_coverage_score",
    "volume_crps_error_ml",
    "volume_error_ml",
    "volume_width_ml",
    "write_cases",
]
