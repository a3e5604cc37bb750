"""Losses that have their minimum at the soft label.

region          a region loss (Dice, Jaccard, Tversky) from the sums of a batch
cross_entropy   the cross entropy of soft labels
segmentation    the public losses and their mixture
distillation    a frozen, calibrated teacher and the loss that learns from it
"""

from .cross_entropy import soft_cross_entropy
from .distillation import DistillationLoss, Teacher
from .segmentation import (
    DiceLoss,
    JaccardLoss,
    SegmentationLoss,
    TverskyLoss,
    dice_loss,
    jaccard_loss,
    tversky_loss,
)

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
