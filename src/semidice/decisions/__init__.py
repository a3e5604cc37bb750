"""From a probability to a decision: the best mask, and a volume with an honest interval."""

from .masks import decide
from .volumes import volume_ml

__all__ = ["decide", "volume_ml"]
