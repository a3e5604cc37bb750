"""Reads one raw file into an array: NIfTI (.nii, .nii.gz), PNG, TIFF.

An error names the file and says what to do. Axes keep the order of the file, so that a prediction can be
written back voxel by voxel: a NIfTI is not reoriented, a picture is (rows, columns), a TIFF of several pages
is a volume with its pages first. Axes of length 1 are dropped, the last ones first, until as many are left as
the dataset has. Channels (the last axis of a NIfTI, the colours of a picture) move to the front. Pictures
have no spacing, because their resolution is meant for printing. The position of the voxels is known only for
a NIfTI whose header sets its qform, its sform or both.
"""

import gzip
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from ...errors import UserError, reading
from ..geometry import Grid, Placement
from .nifti import nifti_header, read_nifti
from .pictures import picture_header, read_picture
from .raw import Content

NIFTI_SUFFIXES = (".nii.gz", ".nii")
SUFFIXES = (*NIFTI_SUFFIXES, ".png", ".tif", ".tiff")
# a float32 slope and its product with a mask's values are rounded
_WHOLE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class FileHeader:
    """What a file declares: lengths of its axes without colours, number of colours, and its format."""

    shape: tuple[int, ...]
    colours: int
    is_nifti: bool
    is_byte_picture: bool

    @property
    def space(self) -> tuple[int, ...]:
        """The lengths without those of 1."""
        return tuple(length for length in self.shape if length != 1)


@dataclass(frozen=True)
class ImageFile:
    """Raw intensities (channels, *space), where they are, and the SHA-256 of each of their files.

    affine: that of the whole file of a NIfTI or a DICOM series; None for a picture.
    """

    values: UInt8[np.ndarray, "channels *space"] | Float32[np.ndarray, "channels *space"]
    grid: Grid
    affine: Float64[np.ndarray, "4 4"] | None
    sha256: tuple[str, ...]

    @property
    def orientation(self) -> str:
        """Where the axes of the file lead, such as RAS; "" for a picture, ? if it is not known."""
        if self.affine is None:
            return ""
        codes = nibabel.aff2axcodes(self.affine)  # type: ignore[no-untyped-call]
        return "".join(code or "?" for code in codes) if self.grid.affines else "?"


@dataclass(frozen=True)
class MaskFile:
    """Class indices (*space) in one file, and where they are."""

    classes: UInt8[np.ndarray, "*space"]
    grid: Grid
    sha256: str


def suffix_of(path: Path) -> str:
    """The suffix that decides how a file is read, in lower case; "" for a file that cannot be read.

    >>> suffix_of(Path("case.1.NII.gz")), suffix_of(Path("notes.txt"))
    ('.nii.gz', '')
    """
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def stem_of(path: Path) -> str:
    """The file name without that suffix."""
    return path.name[: len(path.name) - len(suffix_of(path))]


def channel_of(stem: str) -> tuple[str, int] | None:
    """Case and channel number of a file name CASE_0000 without suffix; None for another name.

    >>> channel_of("brain_001_0002"), channel_of("brain_001")
    (('brain_001', 2), None)
    """
    match = re.fullmatch(r"(.+)_(\d{4})", stem)
    return None if match is None else (match[1], int(match[2]))


def channel_file(case: str, number: int, suffix: str) -> str:
    """The file name of a channel.

    >>> channel_file("brain_001", 2, ".nii.gz")
    'brain_001_0002.nii.gz'
    """
    return f"{case}_{number:04d}{suffix}"


def read_header(path: Path) -> FileHeader:
    """What a file declares; its voxels are not read."""
    with _reading(path):
        if suffix_of(path) in NIFTI_SUFFIXES:
            shape = tuple(map(int, nifti_header(path).get_data_shape()))
            return FileHeader(shape, 1, is_nifti=True, is_byte_picture=False)
        with path.open("rb") as file:
            shape, colours, has_8_bits = picture_header(file)
        return FileHeader(shape, colours, is_nifti=False, is_byte_picture=has_8_bits)


def read_image(path: Path, *, num_axes: int, num_channels: int = 1) -> ImageFile:
    """The image in a file, with `num_axes` spatial axes: uint8 if the file holds uint8, else float32.

    Values that are not finite, and an image with one value everywhere, are errors.
    """
    content, sha256 = _read(path, is_mask=False)
    values, grid = _arrange(path, content, num_axes=num_axes, num_channels=num_channels)
    return ImageFile(usable_intensities(path, values), grid, content.affine, (sha256,))


def usable_intensities(path: Path, values: np.ndarray) -> np.ndarray:
    """Intensities as uint8 or float32; values that are not finite, or all equal, are errors."""
    if values.dtype == np.bool_:
        values = values * np.uint8(255)
    elif values.dtype != np.uint8:
        stored = values
        # values too large for float32 become infinite, which is an error below
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32, order="C")
        if stored.dtype.kind in "iu" and stored.dtype.itemsize > 2:
            _check_exact(path, stored)
        num_bad = values.size - int(np.isfinite(values).sum())
        if num_bad:
            raise UserError(
                f"{path} holds NaN or infinite values in {num_bad} of {values.size} voxels: repair it, for "
                "example with the lowest finite value"
            )
    if values.min() == values.max():
        raise UserError(f"{path} is {values.flat[0]:g} everywhere: it has no contrast; export it again")
    return np.ascontiguousarray(values)


def _check_exact(path: Path, values: np.ndarray) -> None:
    """A UserError if float32 would merge whole numbers whose differences matter."""
    low, high = int(values.min()), int(values.max())
    # float32 has 24 bits: the step at the largest value
    step = max(abs(low), abs(high)) / 2**24
    if step > 1 and high - low < step * 2**12:
        raise UserError(
            f"{path} holds whole numbers from {low} to {high}, which float32 keeps only in steps of "
            f"{2 ** math.ceil(math.log2(step))}: subtract {low} and save it again"
        )


def read_mask(path: Path, *, num_axes: int, class_of_value: Mapping[int, int] | None = None) -> MaskFile:
    """Class indices in a file, with `num_axes` spatial axes.

    class_of_value: the class of each value in the file; None: every value above 0 is class 1. Fractions,
    negative values and values without a class are errors. Floats that are whole numbers are allowed.
    """
    content, sha256 = _read(path, is_mask=True)
    values, grid = _arrange(path, content, num_axes=num_axes, num_channels=1)
    classes = _classes(path, _whole_numbers(path, values[0]), class_of_value)
    return MaskFile(np.ascontiguousarray(classes), grid, sha256)


def read_probability(
    path: Path, *, num_axes: int, num_classes: int
) -> tuple[Float32[np.ndarray, "C *space"], Grid]:
    """Class probabilities in a file as they are, and where they are.

    The file holds the foreground of two classes, or all classes on the last axis. Whole numbers in a picture
    are shares of 255 or, with more than 8 bits, of 65535.
    """
    content, _ = _read(path, is_mask=True)
    has_classes = content.values.ndim > num_axes and content.values.shape[-1] == num_classes
    if not has_classes and num_classes != 2:
        raise UserError(f"{path} holds one probability per voxel, but there are {num_classes} classes")
    values, grid = _arrange(path, content, num_axes=num_axes, num_channels=num_classes if has_classes else 1)
    highest = 1
    if suffix_of(path) not in NIFTI_SUFFIXES and values.dtype.kind in "iu":
        highest = 255 if values.dtype == np.uint8 else 65535
    prob = values.astype(np.float32) / np.float32(highest)
    return (prob if has_classes else np.concatenate([1 - prob, prob])), grid


def holds_fractions(path: Path) -> bool:
    """Whether a NIfTI holds numbers that are not whole, hence no mask; read only if its type allows it."""
    if suffix_of(path) not in NIFTI_SUFFIXES:
        return False
    with _reading(path):
        header = nifti_header(path)
        if header.get_data_dtype().kind in "iu" and header.get_slope_inter() in ((None, None), (1.0, 0.0)):
            return False
    values = _read(path, is_mask=True)[0].values
    return values.dtype.kind == "f" and not _are_whole(values).all()


def mask_values(path: Path) -> tuple[int, ...]:
    """The distinct values in a mask file, ascending: whole numbers, 0 or more."""
    values = _whole_numbers(path, _read(path, is_mask=True)[0].values)
    # a table of 65536 flags is much faster than sorting the voxels of a volume
    if values.max() < 2**16:
        seen = np.zeros(2**16, dtype=bool)
        seen[values] = True
        return tuple(map(int, np.flatnonzero(seen)))
    return tuple(map(int, np.unique(values)))


def _reading(path: Path) -> Any:
    """`errors.reading` with the way out of a damaged file."""
    if not suffix_of(path):
        raise UserError(f"{path} cannot be read: images and masks must be {', '.join(SUFFIXES)}")
    return reading(path, "copy or export it again")


def _read(path: Path, *, is_mask: bool) -> tuple[Content, str]:
    """The content of a file, and its SHA-256."""
    with _reading(path):
        stored = path.read_bytes()
        if not stored:
            raise ValueError("it is empty")
        sha256 = hashlib.sha256(stored).hexdigest()
        if suffix_of(path) in NIFTI_SUFFIXES:
            # before memory is reserved for the voxels
            nifti_header(path)
            # at once: in pieces, threads would wait for each other
            return read_nifti(gzip.decompress(stored) if suffix_of(path) == ".nii.gz" else stored), sha256
        content = read_picture(stored, is_mask=is_mask)
    if is_mask and content.has_colours:
        # a grey mask that was saved as red, green and blue
        if (content.values != content.values[..., :1]).any():
            raise UserError(f"mask {path} is in colour: save it with one grey value for each class")
        content = Content(content.values[..., 0])
    return content, sha256


def _arrange(path: Path, content: Content, *, num_axes: int, num_channels: int) -> tuple[np.ndarray, Grid]:
    """Values (channels, *space) and the grid of the spatial axes."""
    shape = content.values.shape
    has_channels = content.has_colours or num_channels > 1
    remaining = list(range(len(shape)))
    for axis in reversed(range(len(shape))):
        if len(remaining) > num_axes + has_channels and shape[axis] == 1:
            remaining.remove(axis)
    values = content.values.reshape([shape[axis] for axis in remaining])
    if values.ndim != num_axes + has_channels or not values.size:
        channels = f" and {num_channels} channels last" if has_channels else ""
        raise UserError(f"{path} has shape {shape}; expected {num_axes} spatial axes{channels}")
    if has_channels and values.shape[-1] != num_channels:
        raise UserError(f"{path} has {values.shape[-1]} channels; expected {num_channels}: shape {shape}")
    values = np.moveaxis(values, -1, 0) if has_channels else values[None]
    axes = remaining[:num_axes]
    sides = () if content.sides_mm is None else tuple(content.sides_mm[axis] for axis in axes)
    # an affine has no column for a fourth axis
    affines = content.affines_mm if max(axes) < 3 else ()
    placements: tuple[Placement, ...] = tuple(affine[:3, [*axes, 3]] for affine in affines)
    return values, Grid(values.shape[1:], sides if sides and min(sides) > 0 else None, placements)


def _are_whole(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        whole = np.abs(values - np.rint(values)) <= _WHOLE_TOLERANCE
    # infinite values are refused for their size
    is_whole: np.ndarray = whole | np.isinf(values)
    return is_whole


def _whole_numbers(path: Path, values: np.ndarray) -> np.ndarray:
    """The values of a mask as integers, 0 or more."""
    if not values.size:
        raise UserError(f"mask {path} has no voxels: its shape is {values.shape}")
    if values.dtype == np.bool_:
        return values.astype(np.uint8)
    if values.dtype.kind == "f":
        # NaN counts as a fraction here
        fractions = values[~_are_whole(values)]
        if fractions.size:
            raise UserError(
                f"mask {path} holds fractions such as {fractions[0]:.6g}: it was resampled, or it is not "
                "a mask; threshold it and save whole numbers"
            )
    low, high = values.min(), values.max()
    if low < -_WHOLE_TOLERANCE or high >= 2**31:
        raise UserError(f"mask {path} holds values from {low:g} to {high:g}; class values must be 0 or more")
    return np.rint(values).astype(np.int32) if values.dtype.kind == "f" else values


def _classes(path: Path, values: np.ndarray, class_of_value: Mapping[int, int] | None) -> np.ndarray:
    if class_of_value is None:
        return (values > 0).astype(np.uint8)
    table = np.zeros(max(class_of_value) + 1, dtype=np.uint8)
    declared = np.zeros(len(table) + 1, dtype=bool)
    for value, label in class_of_value.items():
        table[value], declared[value] = label, True
    # every value that is too large looks up the last flag, which is False
    index = values if values.max() < len(table) else np.minimum(values, len(table))
    if not declared[index].all():
        unknown = ", ".join(f"{value:g}" for value in np.unique(values[~declared[index]])[:5])
        expected = ", ".join(str(value) for value in sorted(class_of_value))
        raise UserError(f"mask {path} holds {unknown}; its values must be {expected}")
    classes: np.ndarray = table[index]
    return classes
