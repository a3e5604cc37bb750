"""Options of `semidice predict`. This module imports no torch: `semidice --help` reads the record."""

from dataclasses import dataclass
from typing import Annotated

from ..options import Bounds, Count, check_options


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How files are predicted."""

    fold: Annotated[int, Bounds(at_least=0)] | None = None
    """Use the network of one fold. Default: mean of all folds."""
    flips: bool | None = None
    """Mean over mirrored images. Default: as in the recipe."""
    decide: str | None = None
    """Rule that makes masks: argmax, threshold:T, dice, jaccard, nested, mix:W or fitted. Default: argmax."""
    interval: float | None = None
    """Add intervals of volumes that cover this share of raters, such as 0.9."""
    uncertainty: bool = False
    """Also write a map of uncertainty, from 0 to 1."""
    window: Count = 1024
    """Larger images are predicted in overlapping windows of this size, a multiple of 32."""
    batch_size: Count = 8
    """Number of slices predicted at once."""
    slice_axis: Annotated[int, Bounds(at_least=0, at_most=2)] | None = None
    """Axis along which volumes are cut. Default: as in the dataset."""
    calibrate: bool = True
    """Use the calibrator of the run, if it has one."""
    device: str | None = None
    """cpu or cuda. Default: cuda if available."""
    overwrite: bool = False
    """Predict again where output files exist."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.window % 32:
            raise ValueError(f"window must be a multiple of 32; got {self.window}")
