"""The calibrators by name, and a saved one of any kind."""

from collections.abc import Mapping
from pathlib import Path

from .calibrator import Calibrator, StoredCalibrator
from .isotonic import IsotonicCalibrator
from .kde_calibrator import KDECalibrator
from .scaling import BetaCalibrator, VectorScaling
from .temperature import TemperatureScaling

CALIBRATORS: Mapping[str, type[Calibrator]] = {
    "temperature": TemperatureScaling,
    "vector": VectorScaling,
    "isotonic": IsotonicCalibrator,
    "beta": BetaCalibrator,
    "kde": KDECalibrator,
}


def load_calibrator(path: str | Path) -> Calibrator:
    """The calibrator that `save` wrote, of whichever kind; a ValueError names what is wrong in the file.

    Nothing is unpickled: a file of a stranger can give wrong probabilities, but runs no code.
    """
    stored = StoredCalibrator.read(path)
    for calibrator in CALIBRATORS.values():
        if calibrator.__name__ == stored.kind:
            return calibrator.from_stored(stored)
    known = ", ".join(calibrator.__name__ for calibrator in CALIBRATORS.values())
    raise ValueError(f"{path} must hold one of {known}; got {stored.kind}")


def calibrator_name(calibrator: Calibrator) -> str:
    """The name of a calibrator's kind, as in `CALIBRATORS`."""
    return next(name for name, kind in CALIBRATORS.items() if kind is type(calibrator))
