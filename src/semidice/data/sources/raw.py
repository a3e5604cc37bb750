"""Records of what a source finds in a folder of raw scans, before any scan is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..options import PrepareOptions
from ..phantom import PhantomOptions


@dataclass(frozen=True)
class RawScan:
    """One image and its raters' masks, not read yet.

    image: one file, or one file per channel.
    masks: the file of each rater who looked at the scan.
    number: the case number of a phantom, which has no files.
    """

    name: str
    patient: str
    image: tuple[Path, ...]
    masks: Mapping[str, Path]
    number: int = -1


@dataclass(frozen=True, kw_only=True)
class RawDataset:
    """Scans that become one prepared dataset.

    name: of its folder below the output folder; "" for the output folder itself.
    class_of_value: the class of each value in the mask files; other values are errors. None: every value
    above 0 is class 1.
    problems: one message for each scan that was found but cannot be used; `prepare` reports them.
    num_skipped: scans without a mask; some public datasets have them.
    num_axes: number of spatial axes, 2 or 3. phantom: how to make the scans, if they are not read from files.
    """

    name: str = ""
    source: str
    root: Path
    class_names: tuple[str, ...]
    raters: tuple[str, ...] = ("reference",)
    channels: tuple[str, ...]
    scans: tuple[RawScan, ...]
    options: PrepareOptions = field(default_factory=PrepareOptions)
    class_of_value: Mapping[int, int] | None = None
    problems: tuple[str, ...] = ()
    num_skipped: int = 0
    num_axes: int = 2
    phantom: PhantomOptions | None = None
