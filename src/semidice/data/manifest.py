"""Options of `semidice prepare`, and manifest.json of a prepared dataset, which stores the values used.

A scan is an image and its raters' masks. It holds one case, or one case per slice of a volume. The arrays of
a scan are found by its name, which must be safe as a file name.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from ..limits import MAX_PIXELS, MAX_RATERS, check_shape, read_bytes
from ..paths import DatasetFolder, check_name

Kind = Literal["images", "masks", "truth"]
Slices = Literal["none", "all", "foreground"]
Name = Annotated[str, AfterValidator(check_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Record(BaseModel):
    """Content of a JSON file: other keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PrepareOptions(Record):
    """How raw scans are converted into arrays; each source has its own defaults."""

    size: tuple[int, int] | None = Field(
        default=None,
        description="rows and columns of every 2D image or slice; None keeps the size of the scan",
    )
    window: tuple[float, float] | None = Field(
        default=None,
        description="raw values that become 0 and 1, such as HU -60 and 140; values outside are clipped",
    )
    percentiles: tuple[float, float] = Field(
        default=(0.5, 99.5),
        description="of a scan's channel, which become 0 and 1 without a window and without `keep_bytes`",
    )
    keep_bytes: bool | None = Field(
        default=None,
        description="whether 0 and 255 become 0 and 1, for a dataset of 8-bit pictures; None, of an older "
        "semidice, decides it for each image by its type",
    )
    slices: Slices = Field(
        default="none",
        description="whether a volume becomes slices: all slices, or those with foreground",
    )
    slice_axis: int = Field(
        default=2, ge=0, le=2, description="axis of the raw volume that counts its slices"
    )
    ignore_placement: bool = Field(
        default=False,
        description="accept a mask with the shape of its image, also if the headers are not aligned",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "PrepareOptions":
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size needs 1 or more rows and columns; got {self.size}")
        if self.size is not None:
            check_shape(self.size, "size", max_values=MAX_PIXELS)
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError(f"window needs the lower value first; got {self.window}")
        low, high = self.percentiles
        if not 0 <= low < high <= 100:
            raise ValueError(f"percentiles need 0 <= low < high <= 100; got {self.percentiles}")
        return self


class Scan(Record):
    """One image and its raters' masks."""

    name: Name
    patient: str = Field(description="the same for all scans of one person")
    slices: tuple[int, ...] | None = Field(
        None, description="the volume's slices that became cases; None if the scan is one case"
    )
    shape: tuple[int, ...] = Field(description="of one case, without channels: rows, columns; or of a volume")
    spacing_mm: tuple[float, ...] | None = Field(
        description="voxel sizes along the axes of `shape`, then the slice thickness, if it is known; "
        "None if the raw file does not say"
    )
    affine: tuple[tuple[float, ...], ...] | None = Field(
        None, description="4 x 4, from voxels of the raw image to mm; None if the format has none"
    )
    raw_shape: tuple[int, ...] = Field(
        description="spatial shape of the raw image, before slicing and resizing"
    )
    raters: tuple[str, ...] = Field(description="the raters who looked at this scan")
    inputs: dict[str, Sha256] = Field(description="SHA-256 of each raw file, by its path in the raw folder")
    arrays: dict[Kind, Sha256] = Field(description="SHA-256 of the file of each stored array")
    mean: tuple[float, ...] | None = Field(
        None, description="of each channel's intensity over the scan; None if prepared by an older semidice"
    )
    std: tuple[float, ...] | None = Field(None, description="of each channel, 0 or more")

    @model_validator(mode="after")
    def _bounded(self) -> "Scan":
        for name in ("shape", "raw_shape"):
            check_shape(getattr(self, name), f"{name} of scan {self.name}")
        return self

    @property
    def known_spacing_mm(self) -> tuple[float, ...] | None:
        """`spacing_mm`, but None for a picture: an older semidice stored 1 mm there."""
        return None if self.affine is None else self.spacing_mm

    @property
    def num_cases(self) -> int:
        return 1 if self.slices is None else len(self.slices)

    @property
    def num_voxels(self) -> int:
        """Of all cases together."""
        return self.num_cases * math.prod(self.shape)

    def case_name(self, row: int) -> str:
        """The scan's name, or that of the slice in row `row` of its arrays."""
        return self.name if self.slices is None else f"{self.name}_slice{self.slices[row]:04d}"

    def case_names(self) -> tuple[str, ...]:
        """The scan's name, or one for each slice."""
        return tuple(map(self.case_name, range(self.num_cases)))

    @model_serializer(mode="wrap")
    def _without_unknown_numbers(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # so that the manifest of an older semidice keeps its SHA-256, which runs have stored
        missing = {name for name in ("mean", "std") if getattr(self, name) is None}
        return {name: value for name, value in handler(self).items() if name not in missing}


class Manifest(Record):
    """The content of manifest.json."""

    version: Literal[1] = 1
    source: str = Field(description="name of the source, see `data.sources`")
    class_names: tuple[str, ...] = Field(min_length=2, description="class 0, the background, comes first")
    raters: tuple[str, ...] = Field(
        min_length=1, max_length=MAX_RATERS, description="all raters of the dataset: the rater axis"
    )
    channels: tuple[str, ...] = Field(min_length=1, description="of the images, such as CT, or T1 and T2")
    mean: tuple[float, ...] = Field(description="of each channel's intensity in [0, 1] over the dataset")
    std: tuple[float, ...] = Field(description="of each channel, above 0")
    options: dict[str, Any] = Field(description="options of `semidice prepare`, resolved")
    scans: tuple[Scan, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        names = Counter(scan.name.casefold() for scan in self.scans)
        repeated = sorted(name for name, count in names.items() if count > 1)
        if repeated:
            raise ValueError(f"scans {', '.join(repeated)} occur twice")
        for scan in self.scans:
            unknown = set(scan.raters) - set(self.raters)
            if unknown or not scan.raters:
                raise ValueError(f"scan {scan.name} has raters {scan.raters}; the dataset has {self.raters}")
        for record, of_scan in ((self, ""), *((scan, f" of scan {scan.name}") for scan in self.scans)):
            for name in ("mean", "std"):
                numbers = getattr(record, name)
                if numbers is not None and len(numbers) != len(self.channels):
                    raise ValueError(
                        f"{name}{of_scan} needs one number for each of {len(self.channels)} channels"
                    )
        return self


def manifest_text(manifest: Manifest) -> str:
    """The text of `manifest.json`, with one line per scan; the same manifest gives the same text."""
    record = manifest.model_dump(mode="json")
    scans = ",\n  ".join(json.dumps(scan) for scan in record.pop("scans"))
    head = json.dumps(record, indent=1).removesuffix("\n}")
    return f'{head},\n "scans": [\n  {scans}\n ]\n}}\n'


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared dataset; a ValueError says what is wrong, and what to do."""
    path = DatasetFolder(folder).manifest
    if not path.is_file():
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {folder}: make a dataset with `semidice prepare SOURCE RAW_DIR {folder}`"
            )
        # a dataset is never written into the raw folder
        inside = Path("data").resolve().is_relative_to(folder.resolve())
        out = f"{folder.resolve()}_prepared" if inside else "data"
        raise ValueError(
            f"{folder} has no {path.name}, so it is not a prepared dataset: make one from raw images with "
            f"`semidice prepare folder {shlex.quote(str(folder))} {shlex.quote(out)}`"
        )
    try:
        return Manifest.model_validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "as a whole"
        raise ValueError(f"{path} is not a manifest of this semidice: {where}: {first['msg']}") from error
