"""Options of `semidice prepare`, and manifest.json of a prepared dataset, which stores the values used.

A scan is an image and its raters' masks. It holds one case, or one case per slice of a volume. The arrays of
a scan are found by its name, which must be safe as a file name.
"""

import hashlib
import json
import math
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..errors import UserError, listing, read_record
from ..paths import DatasetFolder, check_name

Kind = Literal["images", "masks", "truth"]
Slices = Literal["none", "all", "foreground"]
Name = Annotated[str, AfterValidator(check_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# class maps are stored as uint8
MAX_CLASSES = 256


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
    keep_bytes: bool = Field(
        default=False, description="whether 0 and 255 become 0 and 1, for a dataset of 8-bit pictures"
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
        description="accept a mask with the shape of its image, even if the headers are not aligned",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "PrepareOptions":
        if self.size is not None and min(self.size) < 1:
            raise UserError(f"size needs 1 or more rows and columns; got {self.size}")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise UserError(f"window needs the lower value first; got {self.window}")
        return self


class Scan(Record):
    """One image and its raters' masks."""

    name: Name
    patient: str = Field(description="the same for all scans of one person")
    slices: tuple[int, ...] | None = Field(
        default=None, description="the volume's slices that became cases; None if the scan is one case"
    )
    shape: tuple[int, ...] = Field(description="of one case, without channels: rows, columns; or of a volume")
    spacing_mm: tuple[float, ...] | None = Field(
        description="voxel sizes along the axes of `shape`; None if the raw file does not say"
    )
    thickness_mm: float | None = Field(
        default=None, description="distance of the slices of a volume, if it is known"
    )
    affine: tuple[tuple[float, ...], ...] | None = Field(
        default=None, description="4 x 4, from voxels of the raw image to mm; None if the format has none"
    )
    orientation: str = Field(
        default="",
        description="where the raw axes lead, such as RAS; empty: a picture, ?: not known",
    )
    raw_shape: tuple[int, ...] = Field(
        description="spatial shape of the raw image, before slicing and resizing"
    )
    raters: tuple[str, ...] = Field(min_length=1, description="the raters who looked at this scan")
    drawn: tuple[int, ...] = Field(description="the classes that somebody drew in it")
    limits: tuple[tuple[float, float], ...] = Field(
        default=(), description="raw values of each channel, now 0 and 1"
    )
    inputs: dict[str, Sha256] = Field(description="SHA-256 of each raw file, by its path in the raw folder")
    arrays: dict[Kind, Sha256] = Field(description="SHA-256 of the file of each stored array")
    num_bytes: dict[Kind, int] = Field(description="size of the file of each stored array")
    mean: tuple[float, ...] = Field(description="of each channel's intensity over the scan")
    std: tuple[float, ...] = Field(description="of each channel, 0 or more")

    @property
    def num_cases(self) -> int:
        return 1 if self.slices is None else len(self.slices)

    @property
    def num_voxels(self) -> int:
        """Of all cases together."""
        return self.num_cases * math.prod(self.shape)

    @property
    def voxel_mm(self) -> tuple[float, ...]:
        """Voxel sizes along the axes of `shape`, then the distance of slices, as far as they are known."""
        thickness = () if self.thickness_mm is None else (self.thickness_mm,)
        return () if self.spacing_mm is None else (*self.spacing_mm, *thickness)

    def case_name(self, row: int) -> str:
        """The scan's name, or that of the slice in row `row` of its arrays."""
        return self.name if self.slices is None else f"{self.name}_slice{self.slices[row]:04d}"

    def case_names(self) -> tuple[str, ...]:
        """The scan's name, or one for each slice."""
        return tuple(map(self.case_name, range(self.num_cases)))


class Manifest(Record):
    """The content of manifest.json."""

    version: Literal[1] = 1
    source: str = Field(description="name of the source, see `data.sources`")
    raw_folder: str = Field(default="", description="where the raw files were")
    class_names: tuple[str, ...] = Field(min_length=2, description="class 0, the background, comes first")
    raters: tuple[str, ...] = Field(min_length=1, description="all raters of the dataset: the rater axis")
    channels: tuple[str, ...] = Field(min_length=1, description="of the images, such as CT, or T1 and T2")
    mean: tuple[float, ...] = Field(description="of each channel's intensity in [0, 1] over the dataset")
    std: tuple[float, ...] = Field(description="of each channel, above 0")
    options: PrepareOptions = Field(description="of `semidice prepare`, resolved")
    class_of: dict[str, int] | None = Field(
        default=None, description="the class of each value or label in a mask"
    )
    made_with: dict[str, Any] | None = Field(default=None, description="options of a phantom")
    left_out: tuple[str, ...] = Field(default=(), description="problems of scans that were left out")
    without_foreground: tuple[str, ...] = Field(
        default=(), description="scans that were left out because no slice has foreground"
    )
    scans: tuple[Scan, ...] = Field(min_length=1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes numbers of this dataset mean less than they seem."""
        found = []
        drawn = {0}.union(*(scan.drawn for scan in self.scans))
        never = [name for number, name in enumerate(self.class_names) if number not in drawn]
        if never:
            found.append(f"nobody drew {', '.join(never)} in any case: means over classes leave it out")
        no_size = [scan.name for scan in self.scans if scan.affine is not None and scan.spacing_mm is None]
        if no_size:
            found.append(
                f"the header of {listing(no_size, 'scan')} has no voxel size: distances and volumes will be "
                "in voxels; to have mm and ml, write the size into the header and prepare again"
            )
        orientations = {scan.orientation: scan.name for scan in self.scans if scan.orientation != "?"}
        if len(orientations) > 1:
            kinds = ", ".join(f"{kind or 'none'} ({name})" for kind, name in sorted(orientations.items()))
            found.append(
                f"the axes of the scans lead to different sides of the patient, {kinds}: slices are cut "
                "along one axis of the files; bring all scans into one orientation and prepare them again"
            )
        return tuple(found)


def manifest_text(manifest: Manifest) -> str:
    """The text of `manifest.json`, with one line per scan; the same manifest gives the same text."""
    record = manifest.model_dump(mode="json")
    scans = ",\n  ".join(json.dumps(scan) for scan in record.pop("scans"))
    head = json.dumps(record, indent=1).removesuffix("\n}")
    return f'{head},\n "scans": [\n  {scans}\n ]\n}}\n'


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared dataset; a UserError says what is wrong, and what to do."""
    dataset = DatasetFolder(folder)
    if dataset.manifest.is_file():
        return read_record(dataset.manifest, Manifest)
    if dataset.entries.is_dir():
        raise UserError(f"{folder} is not finished: run the same `semidice prepare` again, which continues")
    if not folder.is_dir():
        raise UserError(f"there is no {folder}: make it with `semidice prepare SOURCE RAW_DIR {folder}`")
    raw, out = shlex.quote(str(folder)), shlex.quote(f"{folder.resolve()}_prepared")
    raise UserError(
        f"{folder} has no manifest.json, so it is not a prepared dataset: make one from raw images with "
        f"`semidice prepare folder {raw} {out}`"
    )


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 of the content; the layout of the file and the raw folder do not matter."""
    return hashlib.sha256(manifest.model_dump_json(exclude={"raw_folder"}).encode()).hexdigest()
