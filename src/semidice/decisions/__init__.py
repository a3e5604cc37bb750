"""From a probability to a decision: the best mask, and a volume with an honest interval."""

from .conformal import ConformalInterval, fit_conformal
from .masks import decide
from .volumes import rater_volumes_ml, volume_crps, volume_interval, volume_ml, volume_quantiles

__all__ = [
    "ConformalInterval",
    "decide",
    "fit_conformal",
    "rater_volumes_ml",
    "volume_crps",
    "volume_interval",
    "volume_ml",
    "volume_quantiles",
]
