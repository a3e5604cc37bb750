"""semidice: segmentation losses that are right on soft labels.

    import torch, semidice
    loss = semidice.SegmentationLoss()                  # 0.25 cross entropy + 0.75 DML1
    total = loss(logits, target)                        # target: class indices or soft labels

    raters' masks --labels--> soft label --losses--> loss
    prob, target --overlap_stats--> tp, fp, fn --tversky_index--> score

Everything named here needs torch, numpy and jaxtyping alone.
"""

from .cross_entropy import soft_cross_entropy
from .kernels import use_kernels
from .losses import (
    DiceLoss,
    JaccardLoss,
    SegmentationLoss,
    TverskyLoss,
    dice_loss,
    jaccard_loss,
    tversky_loss,
)
from .overlap import OverlapStats, overlap_stats, tversky_index

__version__ = "0.1.0"

__all__ = [
    "DiceLoss",
    "JaccardLoss",
    "OverlapStats",
    "SegmentationLoss",
    "TverskyLoss",
    "dice_loss",
    "jaccard_loss",
    "overlap_stats",
    "soft_cross_entropy",
    "tversky_index",
    "tversky_loss",
    "use_kernels",
]
