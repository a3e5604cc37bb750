"""Losses that have their minimum at the soft label.

tversky             the region losses: Dice, Jaccard, Tversky
cross_entropy       the cross entropy of soft labels
calibration_error   the average calibration error, a term to add to the others
segmentation        the mixture of cross entropy, a region loss and the calibration error
distillation        a frozen, calibrated teacher and the loss that learns from it
"""

from .calibration_error import CalibrationErrorLoss, calibration_error_loss
from .cross_entropy import soft_cross_entropy
from .distillation import DistillationLoss, Teacher
from .segmentation import SegmentationLoss
from .tversky import DiceLoss, JaccardLoss, TverskyLoss, dice_loss, jaccard_loss, tversky_loss

__all__ = [
    "CalibrationErrorLoss",
    "DiceLoss",
    "DistillationLoss",
    "JaccardLoss",
    "SegmentationLoss",
    "Teacher",
    "TverskyLoss",
    "calibration_error_loss",
    "dice_loss",
    "jaccard_loss",
    "soft_cross_entropy",
    "tversky_loss",
]
