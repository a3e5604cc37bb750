"""Calibration: probabilities that agree with observed frequencies.

kde              E[y given f] by a Dirichlet kernel: recalibrated probabilities, the calibration error
keypoints        the voxels that the estimate uses, and the bandwidth
calibrator       what all calibrators share: fitted to a stream of batches, saved to a file
streams          what they keep of it: counts at 65536 probabilities, or a sample of voxels
curves           vector scaling (Platt for two classes), isotonic and beta calibration
calibrators      temperature, kernel density; all of them by name, and a saved one of any kind
"""

from .calibrators import CALIBRATORS, KDECalibrator, TemperatureScaling, load_calibrator
from .curves import BetaCalibrator, IsotonicCalibrator, VectorScaling
from .kde import Keys, kde_calibration_error, kde_recalibrate
from .keypoints import calibration_region, choose_bandwidth, draw_keys

__all__ = [
    "CALIBRATORS",
    "BetaCalibrator",
    "IsotonicCalibrator",
    "KDECalibrator",
    "Keys",
    "TemperatureScaling",
    "VectorScaling",
    "calibration_region",
    "choose_bandwidth",
    "draw_keys",
    "kde_calibration_error",
    "kde_recalibrate",
    "load_calibrator",
]
