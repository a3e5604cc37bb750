"""Calibration: probabilities that agree with observed frequencies.

kde              E[y given f] by a Dirichlet kernel, computed as attention
keypoints        the voxels that the estimate uses
recalibration    recalibrated probabilities, the calibration error, and the bandwidth
calibrator       what all calibrators share: fitted to a stream of batches, saved to a file
temperature      one number for all logits
scaling          vector scaling (Platt for two classes) and beta calibration, fitted by `newton`
isotonic         any increasing function
curves           counts at 65536 probabilities, which the last two are fitted to
kde_calibrator   kernel density with key points of a stream, a `voxel_sample`
calibrators      all of them by name, and a saved one of any kind
"""

from .calibrators import CALIBRATORS, load_calibrator
from .isotonic import IsotonicCalibrator
from .kde_calibrator import KDECalibrator
from .keypoints import calibration_region, sample_keys, take_keys
from .recalibration import choose_bandwidth, kde_calibration_error, kde_recalibrate
from .scaling import BetaCalibrator, VectorScaling
from .temperature import TemperatureScaling

__all__ = [
    "CALIBRATORS",
    "BetaCalibrator",
    "IsotonicCalibrator",
    "KDECalibrator",
    "TemperatureScaling",
    "VectorScaling",
    "calibration_region",
    "choose_bandwidth",
    "kde_calibration_error",
    "kde_recalibrate",
    "load_calibrator",
    "sample_keys",
    "take_keys",
]
