"""From a probability to a decision: the best mask, and a volume with an honest interval."""

from .conformal import ConformalInterval, fit_conformal
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
from .volumes import rater_volumes_ml, volume_crps, volume_interval, volume_ml, volume_quantiles

__all__ = [
    "ConformalInterval",
    "Decision",
    "FittedDecision",
    "argmax_mask",
    "decide",
    "dice_optimal_mask",
    "fit_conformal",
    "fit_decision",
    "jaccard_optimal_mask",
    "mix_optimal_mask",
    "nested_optimal_mask",
    "rater_volumes_ml",
    "threshold_mask",
    "volume_crps",
    "volume_interval",
    "volume_ml",
    "volume_quantiles",
]
