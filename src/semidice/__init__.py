"""semidice: image segmentation with soft labels.

    label = mean_label(masks)                            # raters' masks -> soft label
    loss = SegmentationLoss()                            # 0.25 cross entropy + 0.75 DML1
    total = loss(logits, target)                         # class indices or soft labels

    prob, target --overlap_stats--> tp, fp, fn --tversky_index--> score
    teacher = Teacher(network, calibration="kde")
    total = DistillationLoss()(logits, target, teacher(image, target))

Everything named here needs torch, numpy and jaxtyping alone.
"""

from .calibration import choose_bandwidth, kde_calibration_error, kde_recalibrate
from .calibrators import KDECalibrator, TemperatureScaling
from .cross_entropy import soft_cross_entropy
from .distillation import DistillationLoss, Teacher
from .kernels import use_kernels
from .keypoints import calibration_region, sample_keys, take_keys
from .labels import (
    boundary_smooth_label,
    dice_weighted_label,
    dice_weights,
    majority_label,
    mean_label,
    random_rater_label,
    rater_agreement,
    smooth_label,
    spatially_smooth_label,
    staple,
    staple_label,
)
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
    "DistillationLoss",
    "JaccardLoss",
    "KDECalibrator",
    "OverlapStats",
    "SegmentationLoss",
    "Teacher",
    "TemperatureScaling",
    "TverskyLoss",
    "boundary_smooth_label",
    "calibration_region",
    "choose_bandwidth",
    "dice_loss",
    "dice_weighted_label",
    "dice_weights",
    "jaccard_loss",
    "kde_calibration_error",
    "kde_recalibrate",
    "majority_label",
    "mean_label",
    "overlap_stats",
    "random_rater_label",
    "rater_agreement",
    "sample_keys",
    "smooth_label",
    "soft_cross_entropy",
    "spatially_smooth_label",
    "staple",
    "staple_label",
    "take_keys",
    "tversky_index",
    "tversky_loss",
    "use_kernels",
]
