"""What a source finds in a folder of raw scans, and what is read of it: between sources and prepare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from .options import PrepareOptions
from .phantom import PhantomOptions


@dataclass(frozen=True)
class RawScan:
    """One image and its raters' masks, not read yet.

    image: one file, or one for each channel. masks: rater to file, of those who looked at the scan.
    number: of a scan that has no files, such as a phantom's case.
    """

    name: str
    patient: str
    image: tuple[Path, ...]
    masks: Mapping[str, Path]
    number: int = -1


@dataclass(frozen=True)
class RawDataset:
    """Scans that become one prepared dataset.

    name: of the folder it is prepared in, below the output folder; "" for the output folder itself.
    class_of_value: what a value in a mask file means; None: everything above 0 is class 1. A value that is
    not in it is an error that names the file.
    problems: what is wrong with scans that were found but left out, one message each; prepare reports them
    with everything else and fails. num_skipped: scans without any mask, which some releases have.
    num_axes: of space, 2 or 3 for volumes. phantom: what to make, where scans are not read but made.
    """

    name: str
    source: str
    root: Path
    class_names: tuple[str, ...]
    raters: tuple[str, ...]
    channels: tuple[str, ...]
    scans: tuple[RawScan, ...]
    options: PrepareOptions
    class_of_value: Mapping[int, int] | None = None
    problems: tuple[str, ...] = ()
    num_skipped: int = 0
    num_axes: int = 2
    phantom: PhantomOptions | None = None


@dataclass(frozen=True)
class ScanArrays:
    """A scan, read: raw intensities, class maps of the raters who looked at it, in the order of `raters`.

    image: uint8 where the files hold that, float32 otherwise; `space` has two axes, or three for a volume.
    spacing_mm: along the axes of space; a 2D NIfTI or PNG without spacing has 1 mm.
    affine: 4 x 4, of the raw image, where its format has one. truth: where the source knows it.
    """

    image: UInt8[np.ndarray, "channels *space"] | Float32[np.ndarray, "channels *space"]
    masks: UInt8[np.ndarray, "R *space"]
    raters: tuple[str, ...]
    spacing_mm: tuple[float, ...]
    affine: np.ndarray | None = None
    truth: Float32[np.ndarray, "C *space"] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
