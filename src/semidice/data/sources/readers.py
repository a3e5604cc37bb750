"""Reads one raw file into an array: NIfTI (.nii, .nii.gz), PNG, TIFF.

This module alone decides what an image file and a mask file may be; a ValueError names the file and says
what to do. Axes keep the order of the file, so that a prediction can be written back voxel by voxel: a NIfTI
is not reoriented, a picture is (rows, columns), a TIFF of several pages is a volume with its pages first.
Axes of length 1 are dropped, the last ones first, until as many are left as the dataset has. Channels (the
last axis of a NIfTI, the colours of a picture) move to the front. Transparency is ignored. Pillow reads
16-bit colours as 8-bit. Pictures have 1 mm pixels, because their resolution is meant for printing.
The position of the voxels is known only for a NIfTI whose header sets its qform, its sform or both.
"""

import gzip
import hashlib
import logging
import math
import os
import re
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from jaxtyping import Float32, Float64, UInt8
from nibabel.imageglobals import logger as nibabel_log
from nibabel.spatialimages import HeaderDataError
from PIL import Image, UnidentifiedImageError

from ...limits import MAX_NIFTI_EXTRA_BYTES, check_file, check_shape

NIFTI_SUFFIXES = (".nii.gz", ".nii")
SUFFIXES = (*NIFTI_SUFFIXES, ".png", ".tif", ".tiff")
_MM = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}
_NIFTI_CLASSES = {348: nibabel.Nifti1Image, 540: nibabel.Nifti2Image}
# the part of an affine that belongs to the spatial axes, in mm: a step along each, and the first voxel
Placement = Float64[np.ndarray, "3 steps_and_origin"]
# Pillow's modes of grey pictures; those with more than 8 bits
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_GREY_MODES = ("1", "L", "LA", "La", *_DEEP_MODES)


@dataclass(frozen=True)
class ImageFile:
    """Raw intensities, the spacing along the spatial axes, and the affine of a NIfTI.

    spacing_mm: None for a picture, and for a NIfTI that does not say.
    placements: the positions of the voxels by the sform and the qform, as far as the header sets them.
    sha256: of each file that the image was read from.
    """

    values: UInt8[np.ndarray, "channels *space"] | Float32[np.ndarray, "channels *space"]
    spacing_mm: tuple[float, ...] | None
    affine: np.ndarray | None
    placements: tuple[Placement, ...]
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class MaskFile:
    """Class indices in one file; placements as in `ImageFile`."""

    classes: UInt8[np.ndarray, "*space"]
    placements: tuple[Placement, ...]
    sha256: str


@dataclass(frozen=True)
class _Stored:
    """The content of a file, with its axes and dtype; colours are the last axis.

    spacing_mm: for each axis; 0 for an axis without one, None for a picture.
    affines_mm: those that the header sets, the one that nibabel uses first.
    """

    values: np.ndarray
    spacing_mm: tuple[float, ...] | None
    affine: np.ndarray | None
    affines_mm: tuple[np.ndarray, ...]
    has_colours: bool
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


def channel_file(case: str, number: int, ending: str) -> str:
    """The file name of a channel."""
    return f"{case}_{number:04d}{ending}"


def read_image(path: Path, *, num_axes: int, num_channels: int = 1) -> ImageFile:
    """The image in a file, with `num_axes` spatial axes: uint8 if the file holds uint8, else float32.

    Values that are not finite, and an image with one value everywhere, are errors.
    """
    stored = _read(path, palette_to_colours=True)
    values, spacing, placements = _arrange(path, stored, num_axes=num_axes, num_channels=num_channels)
    return ImageFile(usable_intensities(path, values), spacing, stored.affine, placements, (stored.sha256,))


def usable_intensities(path: Path, values: np.ndarray) -> np.ndarray:
    """Intensities as uint8 or float32; values that are not finite, or all equal, are errors."""
    if values.dtype == np.bool_:
        values = values * np.uint8(255)
    elif values.dtype != np.uint8:
        # values too large for float32 become infinite, which is an error below
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32, order="C")
        num_bad = values.size - int(np.isfinite(values).sum())
        if num_bad:
            raise ValueError(
                f"{path} holds NaN or infinite values in {num_bad} of {values.size} voxels: repair it, for "
                f"example with the lowest finite value"
            )
    if values.min() == values.max():
        raise ValueError(f"{path} is {values.flat[0]:g} everywhere: it has no contrast; export it again")
    return np.ascontiguousarray(values)


def read_mask(path: Path, *, num_axes: int, class_of_value: Mapping[int, int] | None = None) -> MaskFile:
    """Class indices in a file, with `num_axes` spatial axes.

    class_of_value: the class of each value in the file; None: every value above 0 is class 1. Fractions,
    negative values and values without a class are errors. Floats that are whole numbers are allowed.
    """
    stored = _read(path, palette_to_colours=False)
    values, _, placements = _arrange(path, _grey(path, stored), num_axes=num_axes, num_channels=1)
    classes = _classes(path, _whole_numbers(path, values[0]), class_of_value)
    return MaskFile(np.ascontiguousarray(classes), placements, stored.sha256)


def read_probability(
    path: Path, *, num_axes: int, num_classes: int
) -> tuple[Float32[np.ndarray, "C *space"], tuple[Placement, ...]]:
    """Class probabilities in a file as they are, and the positions of the voxels.

    The file holds the foreground of two classes, or all classes on the last axis. Whole numbers in a picture
    are shares of 255 or, with more than 8 bits, of 65535.
    """
    stored = _grey(path, _read(path, palette_to_colours=False))
    has_classes = stored.values.ndim > num_axes and stored.values.shape[-1] == num_classes
    if not has_classes and num_classes != 2:
        raise ValueError(f"{path} holds one probability per voxel, but there are {num_classes} classes")
    values, _, placements = _arrange(
        path, stored, num_axes=num_axes, num_channels=num_classes if has_classes else 1
    )
    highest = 1
    if suffix_of(path) not in NIFTI_SUFFIXES and values.dtype.kind in "iu":
        highest = 255 if values.dtype == np.uint8 else 65535
    prob = values.astype(np.float32) / np.float32(highest)
    return (prob if has_classes else np.concatenate([1 - prob, prob])), placements


def holds_fractions(path: Path) -> bool:
    """Whether a NIfTI holds numbers that are not whole, hence no mask; read only if its type allows it."""
    if suffix_of(path) not in NIFTI_SUFFIXES:
        return False
    with _opened(path) as file:
        try:
            stored = _nifti(path, file).dataobj
        except Exception as error:
            raise unreadable(path, error) from error
    if stored.dtype.kind in "iu" and (stored.slope, stored.inter) == (1, 0):
        return False
    values = _read(path, palette_to_colours=False).values
    return values.dtype.kind == "f" and bool((values != np.rint(values)).any())


def mask_values(path: Path) -> tuple[int, ...]:
    """The distinct values in a mask file, ascending: whole numbers, 0 or more."""
    stored = _grey(path, _read(path, palette_to_colours=False))
    values = _whole_numbers(path, stored.values)
    # a table of 65536 flags is much faster than sorting the voxels of a volume
    if values.max() < 2**16:
        seen = np.zeros(2**16, dtype=bool)
        seen[values] = True
        return tuple(int(value) for value in np.flatnonzero(seen))
    return tuple(int(value) for value in np.unique(values))


def file_shape(path: Path) -> tuple[tuple[int, ...], int]:
    """Lengths of a file's axes without those of length 1, and its number of colours (1 if grey).

    Only the header is read.
    """
    with _opened(path) as file:
        try:
            if suffix_of(path) in NIFTI_SUFFIXES:
                shape, colours = _nifti(path, file).shape, 1
            else:
                with Image.open(file, formats=("PNG", "TIFF")) as picture:
                    pages = getattr(picture, "n_frames", 1)
                    shape = (pages, picture.height, picture.width)
                    check_shape(shape, "it")
                    colours = 1 if picture.mode in _GREY_MODES else 3
        except Exception as error:
            raise unreadable(path, error) from error
    return tuple(int(length) for length in shape if length != 1), colours


def can_be_volume(path: Path) -> bool:
    """Whether a file has three axes or more, also of length 1: a NIfTI of one slice is still a volume."""
    if suffix_of(path) not in NIFTI_SUFFIXES:
        return len(file_shape(path)[0]) > 2
    with _opened(path) as file:
        try:
            return len(_nifti(path, file).shape) > 2
        except Exception as error:
            raise unreadable(path, error) from error


def is_8_bit_picture(path: Path) -> bool:
    """Whether a file is a picture that `read_image` returns as uint8; only the header is read."""
    if suffix_of(path) in NIFTI_SUFFIXES:
        return False
    with _opened(path) as file:
        try:
            with Image.open(file, formats=("PNG", "TIFF")) as picture:
                return picture.mode not in _DEEP_MODES
        except Exception as error:
            raise unreadable(path, error) from error


def _read(path: Path, *, palette_to_colours: bool) -> _Stored:
    with _opened(path) as file:
        try:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            if suffix_of(path) in NIFTI_SUFFIXES:
                return _read_nifti(path, file, sha256)
            values, has_colours = _read_picture(file, palette_to_colours=palette_to_colours)
        # the libraries have no common error for a damaged file: nibabel alone raises nine kinds
        except Exception as error:
            raise unreadable(path, error) from error
    return _Stored(values, None, None, (), has_colours=has_colours, sha256=sha256)


def _opened(path: Path) -> BufferedReader:
    if not suffix_of(path):
        raise ValueError(f"{path} cannot be read: images and masks must be {', '.join(SUFFIXES)}")
    file = open_file(path)
    if not file.read(1):
        file.close()
        raise ValueError(f"{path} is empty: copy or export it again")
    file.seek(0)
    return file


def open_file(path: Path) -> BufferedReader:
    """An open file; a ValueError for a pipe, a broken link, or a file without permission."""
    check_file(path)
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}: it, or the file it links to, is missing") from error
    except PermissionError as error:
        raise ValueError(f"no permission to read {path}: change its permissions") from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    """The error of a file that a library cannot read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnidentifiedImageError):
        reason = "it is neither PNG nor TIFF"
    elif isinstance(error, MemoryError):
        reason = "there is not enough memory for as many voxels as its header declares"
    return ValueError(f"cannot read {path}: {reason}; copy or export it again")


def _nifti(path: Path, file: BufferedReader) -> Any:
    """The NIfTI image in an open file; its voxels are not read yet."""
    is_gzip = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    wants_gzip = suffix_of(path) == ".nii.gz"
    if wants_gzip != is_gzip:
        raise ValueError("it is not a gzip file" if wants_gzip else "it is a gzip file: name it .nii.gz")
    stream: Any = _BoundedGzip(fileobj=file) if is_gzip else file
    first = stream.read(4)
    kind = _NIFTI_CLASSES.get(int.from_bytes(first, "little")) or _NIFTI_CLASSES.get(
        int.from_bytes(first, "big")
    )
    if kind is None:
        raise ValueError("it is not a NIfTI file")
    stream.seek(0)
    header_class: Any = kind.header_class
    header = header_class(stream.read(header_class.template_dtype.itemsize), check=False)
    check_shape(header.get_data_shape(), "its header")
    if isinstance(stream, _BoundedGzip):
        stream.bound(math.prod(header.get_data_shape()) * header.get_data_dtype().itemsize)
    stream.seek(0)
    # nibabel repairs small faults of headers and logs that to the terminal, into the progress bar
    level = nibabel_log.level
    nibabel_log.setLevel(logging.CRITICAL + 1)
    try:
        return kind.from_stream(stream)
    finally:
        nibabel_log.setLevel(level)


class _BoundedGzip(gzip.GzipFile):
    """A gzip stream that must not expand to more than the voxels that the header declares, and a bit."""

    max_bytes = MAX_NIFTI_EXTRA_BYTES

    def bound(self, num_voxel_bytes: int) -> None:
        self.max_bytes = MAX_NIFTI_EXTRA_BYTES + num_voxel_bytes

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or self.tell() + size > self.max_bytes:
            raise ValueError(f"it holds more than the {self.max_bytes} bytes that its header allows")
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        # `tell` is a step of 0 from the current position
        is_tell = whence == os.SEEK_CUR and offset == 0
        if not is_tell and (whence != os.SEEK_SET or offset > self.max_bytes):
            raise ValueError(f"it holds more than the {self.max_bytes} bytes that its header allows")
        return super().seek(offset, whence)


def _read_nifti(path: Path, file: BufferedReader, sha256: str) -> _Stored:
    image = _nifti(path, file)
    dtype = image.get_data_dtype()
    if dtype.kind not in "iuf":
        raise ValueError(f"its voxels are {dtype}; one real number per voxel is expected")
    sides = _declared_sides(path, image, file)[: len(image.shape)]
    # the fourth side of a NIfTI is time
    if not np.isfinite(sides[:3]).all():
        raise ValueError(
            f"its voxel size is {' x '.join(map(str, sides[:3]))}: write the right one into its header"
        )
    affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all():
        raise ValueError("its affine is not finite")
    values = np.asanyarray(image.dataobj)
    if isinstance(values, np.memmap):
        # a copy: a later change of the file must not change the array
        values = np.array(values)
    stream = image.file_map["image"].fileobj
    # gzip compares its checksum at the end of the stream, which is after the last voxel
    while isinstance(stream, gzip.GzipFile) and stream.read(2**16):
        pass
    unit = _MM.get(image.header.get_xyzt_units()[0], 1.0)
    # through text, so that the float32 number 0.7 becomes 0.7 and not 0.699999988
    spacing = [abs(float(str(side))) * unit for side in sides]
    # a side of 0 is not known, but an sform has its own
    for axis in np.flatnonzero(sides[:3] == 0):
        sform = image.get_sform(coded=True)[0]
        step = 0.0 if sform is None else np.linalg.norm(sform[:3, axis])
        spacing[axis] = float(str(np.float32(step))) * unit
    affines_mm = tuple(np.diag([unit, unit, unit, 1.0]) @ declared for declared in _declared_affines(image))
    return _Stored(values, tuple(spacing), affine, affines_mm, has_colours=False, sha256=sha256)


def _declared_sides(path: Path, image: Any, file: BufferedReader) -> np.ndarray:
    """The sides of a voxel as the header has them; nibabel turns a side of 0 into 1."""
    # the voxels are read from here later
    position = file.tell()
    file.seek(0)
    is_gzip = suffix_of(path) == ".nii.gz"
    stream: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
    sides: np.ndarray = type(image.header).from_fileobj(stream, check=False)["pixdim"][1:]
    file.seek(position)
    return sides


def _declared_affines(image: Any) -> list[np.ndarray]:
    """The sform and the qform, if their codes are set and they are finite."""
    affines = [image.get_sform(coded=True)[0]]
    # nibabel does not check that the qform is a rotation if there is an sform
    with suppress(ValueError, HeaderDataError):
        affines.append(image.get_qform(coded=True)[0])
    return [
        affine.astype(np.float64) for affine in affines if affine is not None and np.isfinite(affine).all()
    ]


def _read_picture(file: BufferedReader, *, palette_to_colours: bool) -> tuple[np.ndarray, bool]:
    """Pixels, with the pages of a TIFF as first axis, and whether the last axis is red, green, blue."""
    _verify_png(file)
    with Image.open(file, formats=("PNG", "TIFF")) as picture:
        num_pages = getattr(picture, "n_frames", 1)
        check_shape((num_pages, picture.height, picture.width, len(picture.getbands())), "it")
        if num_pages > 1 and picture.format != "TIFF":
            raise ValueError("it is an animation")
        pages = []
        for page in range(num_pages):
            picture.seek(page)
            pages.append(_pixels(picture, palette_to_colours=palette_to_colours))
    kinds = {(page.shape, page.dtype) for page in pages}
    if len(kinds) > 1:
        raise ValueError(f"its pages differ in size or kind: {', '.join(str(kind[0]) for kind in kinds)}")
    has_colours = pages[0].ndim == 3
    return pages[0] if num_pages == 1 else np.stack(pages), has_colours


def _verify_png(file: BufferedReader) -> None:
    """Raise if a PNG file is cut, has a wrong checksum, or too few rows: Pillow fills in what is missing."""
    if file.read(8) != b"\x89PNG\r\n\x1a\n":
        file.seek(0)
        return
    kind, header, num_bytes = b"", b"", 0
    rows = zlib.decompressobj()
    while kind != b"IEND":
        head = file.read(8)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        content, checksum = file.read(length), file.read(4)
        if len(head) < 8 or len(content) < length or len(checksum) < 4:
            raise ValueError("it is truncated")
        if zlib.crc32(kind + content) != int.from_bytes(checksum, "big"):
            raise ValueError(f"its part {kind.decode('latin-1')!r} has a wrong checksum")
        if kind == b"IHDR":
            header = content
            check_shape(struct.unpack(">II", header[:8]), "it")
        if kind == b"IDAT":
            for first in range(0, length, 2**16):
                num_bytes += len(rows.decompress(content[first : first + 2**16]))
    if num_bytes < _png_bytes(header):
        raise ValueError(f"its data end after {num_bytes} of {_png_bytes(header)} bytes")
    file.seek(0)


def _png_bytes(header: bytes) -> int:
    """Bytes of all rows of a PNG; an interlaced one has its pixels in seven small images."""
    width, height, bits, colours, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    num_bits = bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colours]
    parts = [(width, height)]
    if interlaced:
        steps = (
            (0, 0, 8, 8),
            (4, 0, 8, 8),
            (0, 4, 4, 8),
            (2, 0, 4, 4),
            (0, 2, 2, 4),
            (1, 0, 2, 2),
            (0, 1, 1, 2),
        )
        parts = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in steps]
    # every row begins with a byte for its filter
    return sum(
        rows * (1 + (columns * num_bits + 7) // 8) for columns, rows in parts if columns > 0 and rows > 0
    )


def _check_not_drawn_in_alpha(picture: Image.Image) -> None:
    """Raise if only the transparency of a mask varies: it is ignored, so the mask would be empty."""
    if picture.mode not in ("RGBA", "LA", "La", "PA"):
        return
    *colours, alpha = picture.split()
    if alpha.getextrema()[0] != alpha.getextrema()[1] and all(
        channel.getextrema()[0] == channel.getextrema()[1] for channel in colours
    ):
        raise ValueError(
            "it has one colour everywhere and is drawn in its transparency, which is ignored: save it with "
            "one grey value for each class"
        )


def _pixels(picture: Image.Image, *, palette_to_colours: bool) -> np.ndarray:
    if not palette_to_colours:
        _check_not_drawn_in_alpha(picture)
    # the indices of a palette are the class numbers of a mask
    is_indices = picture.mode in ("P", "PA") and not palette_to_colours
    if is_indices or picture.mode in ("LA", "La"):
        return np.array(picture.getchannel(0))
    if picture.mode in _GREY_MODES:
        return np.array(picture)
    return np.array(picture.convert("RGB"))


def _arrange(
    path: Path, stored: _Stored, *, num_axes: int, num_channels: int
) -> tuple[np.ndarray, tuple[float, ...] | None, tuple[Placement, ...]]:
    """Values (channels, *space), and the spacing, None if not known, and positions of the spatial axes."""
    shape = stored.values.shape
    has_channels = stored.has_colours or num_channels > 1
    remaining = list(range(len(shape)))
    for axis in reversed(range(len(shape))):
        if len(remaining) > num_axes + has_channels and shape[axis] == 1:
            remaining.remove(axis)
    values = stored.values.reshape([shape[axis] for axis in remaining])
    if values.ndim != num_axes + has_channels or not values.size:
        channels = f" and {num_channels} channels last" if has_channels else ""
        raise ValueError(f"{path} has shape {shape}; expected {num_axes} spatial axes{channels}")
    axes = remaining[:num_axes]
    sides = () if stored.spacing_mm is None else tuple(stored.spacing_mm[axis] for axis in axes)
    spacing = sides if sides and min(sides) > 0 else None
    # an affine has no column for a fourth axis
    affines = stored.affines_mm if max(axes) < 3 else ()
    placements = tuple(affine[:3, [*axes, 3]] for affine in affines)
    if not has_channels:
        return values[None], spacing, placements
    if values.shape[-1] != num_channels:
        raise ValueError(f"{path} has {values.shape[-1]} channels; expected {num_channels}: shape {shape}")
    return np.moveaxis(values, -1, 0), spacing, placements


def _grey(path: Path, stored: _Stored) -> _Stored:
    """The content without colours, for a grey mask that was saved as red, green and blue."""
    if not stored.has_colours:
        return stored
    grey = stored.values[..., 0]
    if (stored.values != grey[..., None]).any():
        raise ValueError(f"mask {path} is in colour: save it with one grey value for each class")
    return replace(stored, values=grey, has_colours=False)


def _whole_numbers(path: Path, values: np.ndarray) -> np.ndarray:
    """The values of a mask as integers, 0 or more."""
    if not values.size:
        raise ValueError(f"mask {path} has no voxels: its shape is {values.shape}")
    if values.dtype == np.bool_:
        return values.astype(np.uint8)
    if values.dtype.kind == "f":
        # NaN counts as a fraction here
        fractions = values[values != np.rint(values)]
        if fractions.size:
            raise ValueError(
                f"mask {path} holds fractions such as {fractions[0]:.6g}: it was resampled, or it is not "
                f"a mask; threshold it and save whole numbers"
            )
    low, high = values.min(), values.max()
    if low < 0 or high >= 2**31:
        raise ValueError(f"mask {path} holds values from {low:g} to {high:g}; class values must be 0 or more")
    return values.astype(np.int32) if values.dtype.kind == "f" else values


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
        raise ValueError(f"mask {path} holds {unknown}; its values must be {expected}")
    classes: np.ndarray = table[index]
    return classes
