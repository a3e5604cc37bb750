"""From a probability to a decision: the best mask, and a volume with an honest interval."""

from .conformal import ConformalInterval, Intervals, fit_conformal
from .decision import Decision
from .fitting import FittedDecision, fit_decision
from .masks import decide, decide_classes
from .volumes import rater_volumes_ml, volume_interval, volume_ml, volume_quantiles

__all__ = [
    "ConformalInterval",
    "Decision",
    "FittedDecision",
    "Intervals",
    "decide",
    "decide_classes",
    "fit_conformal",
    "fit_decision",
    "rater_volumes_ml",
    "volume_interval",
    "volume_ml",
    "volume_quantiles",
]
