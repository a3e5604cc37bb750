"""From raters' masks to one soft label.

raters      masks read and checked, in the shapes that users have
makers      majority, mean, weighted, STAPLE, smoothed: one function each
boundary    the band of voxels around a label's boundary
"""

from .makers import (
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

__all__ = [
    "boundary_smooth_label",
    "dice_weighted_label",
    "dice_weights",
    "majority_label",
    "mean_label",
    "random_rater_label",
    "rater_agreement",
    "smooth_label",
    "spatially_smooth_label",
    "staple",
    "staple_label",
]
