"""From the masks of several raters to one soft label.

raters      masks read and checked; their majority and mean, which predictions are scored against
makers      majority, mean, weighted, random rater, STAPLE: one function each; how well the raters agree
smoothing   labels made softer; the band of voxels around class boundaries
"""

from .makers import (
    dice_weighted_label,
    majority_label,
    mean_label,
    random_rater_label,
    rater_agreement,
    staple,
    staple_label,
)
from .smoothing import boundary_smooth_label, smooth_label, spatially_smooth_label

__all__ = [
    "boundary_smooth_label",
    "dice_weighted_label",
    "majority_label",
    "mean_label",
    "random_rater_label",
    "rater_agreement",
    "smooth_label",
    "spatially_smooth_label",
    "staple",
    "staple_label",
]
