"""Losses that have their minimum at the soft label.

options             every option that a recipe may set, as one record
segmentation        cross entropy, the region losses (Dice, Jaccard, Tversky), and their mixture
calibration_error   the average calibration error, a term to add to the others
distillation        a calibrated teacher and the loss that learns from it
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .distillation import *  # noqa: F403
    from .options import *  # noqa: F403
    from .segmentation import *  # noqa: F403

__getattr__, __dir__ = lazy_names(__name__, ("distillation", "options", "segmentation"))
