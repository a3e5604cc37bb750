"""Calibration: probabilities that agree with observed frequencies.

kde             E[y given f] by a Dirichlet kernel, computed as attention
keypoints       the voxels that the estimate uses
recalibration   recalibrated probabilities, the calibration error, and the bandwidth
calibrators     calibrators that are fitted and saved to a file
"""

from .calibrators import KDECalibrator, TemperatureScaling
from .keypoints import calibration_region, sample_keys, take_keys
from .recalibration import choose_bandwidth, kde_calibration_error, kde_recalibrate

__all__ = [
    "KDECalibrator",
    "TemperatureScaling",
    "calibration_region",
    "choose_bandwidth",
    "kde_calibration_error",
    "kde_recalibrate",
    "sample_keys",
    "take_keys",
]
