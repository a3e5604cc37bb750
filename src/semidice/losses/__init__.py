"""Losses that have their minimum at the soft label.

tversky         the region losses: Dice, Jaccard, Tversky
cross_entropy   the cross entropy of soft labels
segmentation    the mixture of cross entropy and a region loss
distillation    a frozen, calibrated teacher and the loss that learns from it
"""

from .cross_entropy import soft_cross_entropy
from .distillation import DistillationLoss, Teacher
from .segmentation import SegmentationLoss
from .tversky import DiceLoss, JaccardLoss, TverskyLoss, dice_loss, jaccard_loss, tversky_loss

__all__ = [
    "DiceLoss",
    "DistillationLoss",
    "JaccardLoss",
    "SegmentationLoss",
    "Teacher",
    "TverskyLoss",
    "dice_loss",
    "jaccard_loss",
    "soft_cross_entropy",
    "tversky_loss",
]
