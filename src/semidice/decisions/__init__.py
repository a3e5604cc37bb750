"""From a probability to a decision: the best mask, and a volume with an honest interval."""

from .decision import Decision
from .fitting import FittedDecision, fit_decision
from .masks import decide
from .optimal import (
    argmax_mask,
    dice_optimal_mask,
    jaccard_optimal_mask,
    mix_optimal_mask,
    nested_optimal_mask,
    threshold_mask,
)
from .volumes import volume_ml

__all__ = [
    "Decision",
    "FittedDecision",
    "argmax_mask",
    "decide",
    "dice_optimal_mask",
    "fit_decision",
    "jaccard_optimal_mask",
    "mix_optimal_mask",
    "nested_optimal_mask",
    "threshold_mask",
    "volume_ml",
]
