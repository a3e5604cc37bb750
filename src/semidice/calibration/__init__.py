"""Calibration: probabilities that agree with observed frequencies.

kde              E[y given f] by a Dirichlet kernel, computed as attention
keypoints        the voxels that the estimate uses
recalibration    recalibrated probabilities, the calibration error, and the bandwidth
calibrator       what all calibrators share: fitted to a stream of batches, saved to a file
streams          what they keep of it: counts at 65536 probabilities, or a sample of voxels
temperature      one number for all logits
curves           vector scaling (Platt for two classes), isotonic and beta calibration
kde_calibrator   kernel density with key points of a stream
calibrators      all of them by name, and a saved one of any kind
"""

from .calibrators import CALIBRATORS, load_calibrator
from .curves import BetaCalibrator, IsotonicCalibrator, VectorScaling
from .kde import Keys
from .kde_calibrator import KDECalibrator
from .keypoints import calibration_region, draw_keys
from .recalibration import choose_bandwidth, kde_calibration_error, kde_recalibrate
from .temperature import TemperatureScaling

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
