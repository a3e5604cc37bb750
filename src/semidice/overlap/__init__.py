"""Soft overlap: the definition that every loss, score and rater weight is made of.

    forms     tp, fp, fn of one voxel, and their gradient
    stats     tp, fp, fn of an image and class, and the Tversky index of them
    sums      overlap, cross entropy and label mass of an image and class
    options   the options of a loss
    mixture   from the sums to the cross entropy, the region loss and their weighted sum

Kernels compute the same numbers with less memory traffic; they never define one.
"""

from .stats import OverlapStats, overlap_stats, tversky_index

__all__ = [
    "OverlapStats",
    "overlap_stats",
    "tversky_index",
]
