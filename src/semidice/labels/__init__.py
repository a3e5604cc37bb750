"""From the masks of several raters to one soft label.

raters      masks read and checked; their majority and mean, which predictions are scored against
makers      majority, mean, weighted, random rater: one function each; the agreement of raters by Dice
staple      the hidden truth behind the raters
smoothing   labels made softer; the band of voxels around class boundaries
"""

from .makers import (
    dice_weighted_label,
    dice_weights,
    majority_label,
    mean_label,
    random_rater_label,
    rater_agreement,
)
from .smoothing import boundary_smooth_label, smooth_label, spatially_smooth_label
from .staple import staple, staple_label

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
