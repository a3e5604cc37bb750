"""The calibrators by name, and a saved one of any kind."""

from collections.abc import Mapping
from pathlib import Path

from ..errors import reading
from .calibrator import Calibrator, read_calibrator
from .curves import BetaCalibrator, IsotonicCalibrator, VectorScaling
from .kde_calibrator import KDECalibrator
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
    with reading(Path(path), "fit it again, with `semidice calibrate`"):
        kind = read_calibrator(Path(path))[0]
        kinds = {calibrator.__name__: calibrator for calibrator in CALIBRATORS.values()}
        if kind not in kinds:
            raise ValueError(f"it must hold one of {', '.join(kinds)}; got {kind}")
        return kinds[kind].load(path)


def calibrator_name(calibrator: Calibrator) -> str:
    """The name of a calibrator's kind, as in `CALIBRATORS`."""
    return next(name for name, kind in CALIBRATORS.items() if kind is type(calibrator))
