"""Reads one raw file into an array: NIfTI (.nii, .nii.gz), PNG, TIFF.

This module alone decides what an image file and a mask file may be; an error names the file and says what to
do. Axes keep the order of the file, so that a prediction can be written back voxel by voxel: a NIfTI is not
reoriented, a picture is (rows, columns), a TIFF of several pages is a volume with its pages first.
Axes of length 1 are dropped, the last ones first, until as many are left as the dataset has. Channels (the
last axis of a NIfTI, the colours of a picture) move to the front. Pictures have no spacing, because their
resolution is meant for printing. The position of the voxels is known only for a NIfTI whose header sets its
qform, its sform or both.

What would be lost or guessed is refused: transparency that varies, 16-bit colours (which Pillow reads with 8
bits), whole numbers that float32 does not hold, a rotation in EXIF, channels or times among the pages of a
TIFF, and a mask whose palette does not say which index is the background.
"""

import gzip
import hashlib
import logging
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from jaxtyping import Float32, Float64, UInt8
from nibabel.imageglobals import logger as nibabel_log
from nibabel.spatialimages import HeaderDataError
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from ...errors import UserError, reading
from ..geometry import Grid, Placement

NIFTI_SUFFIXES = (".nii.gz", ".nii")
SUFFIXES = (*NIFTI_SUFFIXES, ".png", ".tif", ".tiff")
_MM = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}
_NIFTI_CLASSES = {348: nibabel.Nifti1Image, 540: nibabel.Nifti2Image}
# Pillow's modes of grey pictures; those with more than 8 bits
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_GREY_MODES = ("1", "L", "LA", "La", *_DEEP_MODES)
_ADVICE = "copy or export it again"
# voxels of one file: a CT of 512 x 512 x 4096
_MAX_VALUES = 2**30
# of TIFF and EXIF
_BITS, _COMPRESSION, _PHOTOMETRIC, _DESCRIPTION, _ORIENTATION = 258, 259, 262, 270, 274
_SAMPLES, _PREDICTOR, _SAMPLE_FORMAT = 277, 317, 339
# a float32 slope and its product with a mask's values are rounded
_WHOLE_TOLERANCE = 1e-5
# pixdim and affine are stored as float32, the affine sometimes with four decimals
_SPACING_TOLERANCE = 0.01


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


@dataclass(frozen=True)
class _Stored:
    """The content of a file, with its axes and dtype; colours are the last axis.

    spacing_mm: for each axis; 0 for an axis without one, None for a picture.
    affines_mm: those that the header sets, the one that nibabel uses first.
    """

    values: np.ndarray
    has_colours: bool
    sha256: str
    spacing_mm: tuple[float, ...] | None = None
    affine: np.ndarray | None = None
    affines_mm: tuple[np.ndarray, ...] = ()


def check_size(shape: Sequence[int], what: str) -> None:
    """A ValueError if an array of this shape has too many values, before memory is reserved for it."""
    num_values = math.prod(int(length) for length in shape)
    if num_values > _MAX_VALUES:
        axes = " x ".join(str(int(length)) for length in shape)
        raise ValueError(f"{what} declares {axes} = {num_values} values; at most {_MAX_VALUES} are read")


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
    with _reading(path), path.open("rb") as file:
        if suffix_of(path) in NIFTI_SUFFIXES:
            shape = tuple(map(int, _open_nifti(path, file).shape))
            return FileHeader(shape, 1, is_nifti=True, is_byte_picture=False)
        try:
            with Image.open(file, formats=("PNG", "TIFF")) as picture:
                num_pages = int(getattr(picture, "n_frames", 1))
                colours = 1 if picture.mode in _GREY_MODES and not _has_more_samples(picture) else 3
                kind, size = picture.mode, picture.size
        except UnidentifiedImageError:
            rows, columns, colours = _plain_tiff(file).shape
            num_pages, kind, size = 1, "F", (columns, rows)
        shape = (*((num_pages,) if num_pages > 1 else ()), size[1], size[0])
        check_size(shape, "it")
        return FileHeader(shape, colours, is_nifti=False, is_byte_picture=kind not in _DEEP_MODES)


def read_image(path: Path, *, num_axes: int, num_channels: int = 1) -> ImageFile:
    """The image in a file, with `num_axes` spatial axes: uint8 if the file holds uint8, else float32.

    Values that are not finite, and an image with one value everywhere, are errors.
    """
    stored = _read(path, is_mask=False)
    values, grid = _arrange(path, stored, num_axes=num_axes, num_channels=num_channels)
    return ImageFile(usable_intensities(path, values), grid, stored.affine, (stored.sha256,))


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
    stored = _read(path, is_mask=True)
    values, grid = _arrange(path, stored, num_axes=num_axes, num_channels=1)
    classes = _classes(path, _whole_numbers(path, values[0]), class_of_value)
    return MaskFile(np.ascontiguousarray(classes), grid, stored.sha256)


def read_probability(
    path: Path, *, num_axes: int, num_classes: int
) -> tuple[Float32[np.ndarray, "C *space"], Grid]:
    """Class probabilities in a file as they are, and where they are.

    The file holds the foreground of two classes, or all classes on the last axis. Whole numbers in a picture
    are shares of 255 or, with more than 8 bits, of 65535.
    """
    stored = _read(path, is_mask=True)
    has_classes = stored.values.ndim > num_axes and stored.values.shape[-1] == num_classes
    if not has_classes and num_classes != 2:
        raise UserError(f"{path} holds one probability per voxel, but there are {num_classes} classes")
    values, grid = _arrange(path, stored, num_axes=num_axes, num_channels=num_classes if has_classes else 1)
    highest = 1
    if suffix_of(path) not in NIFTI_SUFFIXES and values.dtype.kind in "iu":
        highest = 255 if values.dtype == np.uint8 else 65535
    prob = values.astype(np.float32) / np.float32(highest)
    return (prob if has_classes else np.concatenate([1 - prob, prob])), grid


def holds_fractions(path: Path) -> bool:
    """Whether a NIfTI holds numbers that are not whole, hence no mask; read only if its type allows it."""
    if suffix_of(path) not in NIFTI_SUFFIXES:
        return False
    with _reading(path), path.open("rb") as file:
        stored = _open_nifti(path, file).dataobj
    if stored.dtype.kind in "iu" and (stored.slope, stored.inter) == (1, 0):
        return False
    values = _read(path, is_mask=True).values
    return values.dtype.kind == "f" and not _are_whole(values).all()


def mask_values(path: Path) -> tuple[int, ...]:
    """The distinct values in a mask file, ascending: whole numbers, 0 or more."""
    values = _whole_numbers(path, _read(path, is_mask=True).values)
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
    return reading(path, _ADVICE)


def _read(path: Path, *, is_mask: bool) -> _Stored:
    with _reading(path), path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if not file.tell():
            raise ValueError("it is empty")
        file.seek(0)
        if suffix_of(path) in NIFTI_SUFFIXES:
            return _read_nifti(path, file, sha256)
        values, has_colours = _read_picture(file, is_mask=is_mask)
    if is_mask and has_colours:
        # a grey mask that was saved as red, green and blue
        if (values != values[..., :1]).any():
            raise UserError(f"mask {path} is in colour: save it with one grey value for each class")
        values, has_colours = values[..., 0], False
    return _Stored(values, has_colours, sha256)


def _open_nifti(path: Path, file: BufferedReader) -> Any:
    """The NIfTI image in an open file; its voxels are not read yet."""
    stream: Any = gzip.GzipFile(fileobj=file) if suffix_of(path) == ".nii.gz" else file
    size = stream.read(4)
    kind: Any = _NIFTI_CLASSES.get(int.from_bytes(size, "little"))
    kind = kind or _NIFTI_CLASSES.get(int.from_bytes(size, "big"))
    if kind is None:
        raise ValueError("it is not a NIfTI file")
    stream.seek(0)
    header = kind.header_class(stream.read(kind.header_class.template_dtype.itemsize), check=False)
    check_size(header.get_data_shape(), "its header")
    stream.seek(0)
    # nibabel repairs small faults of headers and logs that to the terminal, into the progress bar
    level = nibabel_log.level
    nibabel_log.setLevel(logging.CRITICAL + 1)
    try:
        image = kind.from_stream(stream)
    finally:
        nibabel_log.setLevel(level)
    # nibabel turns a side of 0 into 1
    image.extra["pixdim"] = header["pixdim"][1:].astype(np.float32)
    return image


def _read_nifti(path: Path, file: BufferedReader, sha256: str) -> _Stored:
    image = _open_nifti(path, file)
    dtype = image.get_data_dtype()
    if dtype.kind not in "iuf":
        raise ValueError(f"it holds {dtype}, and not one real number per voxel")
    sides = image.extra["pixdim"][: len(image.shape)]
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
    spacing = tuple(side * unit for side in _spacing(image, sides))
    affines_mm = tuple(np.diag([unit, unit, unit, 1.0]) @ declared for declared in _declared_affines(image))
    return _Stored(values, False, sha256, spacing, affine, affines_mm)


def _spacing(image: Any, sides: np.ndarray) -> list[float]:
    """The sides of a voxel by the header; a side of 0 is that of the sform, if there is one."""
    # through text, so that the float32 number 0.7 becomes 0.7 and not 0.699999988
    spacing = [abs(float(str(side))) for side in sides]
    sform, code = image.get_sform(coded=True)
    if sform is None or not np.isfinite(sform).all():
        return spacing
    steps = [float(str(np.float32(step))) for step in np.linalg.norm(sform[:3, :3], axis=0)]
    for axis, (side, step) in enumerate(zip(spacing, steps, strict=False)):
        if side == 0:
            spacing[axis] = step
        # after a registration (codes 3 and more) the sform is the space of the atlas, not that of the scan
        elif image.shape[axis] > 1 and code < 3 and abs(step - side) > _SPACING_TOLERANCE * side:
            raise ValueError(
                f"its voxel size is {side:g} along axis {axis} by its pixdim, but {step:g} by its sform: "
                "write the right one into both"
            )
    return spacing


def _declared_affines(image: Any) -> list[np.ndarray]:
    """The sform and the qform, if their codes are set and they are finite."""
    affines = [image.get_sform(coded=True)[0]]
    # nibabel does not check that the qform is a rotation if there is an sform
    with suppress(ValueError, HeaderDataError):
        affines.append(image.get_qform(coded=True)[0])
    return [
        affine.astype(np.float64) for affine in affines if affine is not None and np.isfinite(affine).all()
    ]


def _tag(picture: Image.Image, tag: int, default: Any) -> Any:
    """A tag of a TIFF; the default for a PNG."""
    return getattr(picture, "tag_v2", {}).get(tag, default)


def _has_more_samples(picture: Image.Image) -> bool:
    """Whether a pixel of a TIFF has more values than Pillow reads."""
    return bool(_tag(picture, _SAMPLES, 1) > len(picture.getbands()))


def _read_picture(file: BufferedReader, *, is_mask: bool) -> tuple[np.ndarray, bool]:
    """Pixels, with the pages of a TIFF as first axis, and whether the last axis is colours."""
    try:
        picture = Image.open(file, formats=("PNG", "TIFF"))
    except UnidentifiedImageError:
        values = _plain_tiff(file)
        return (values[..., 0], False) if values.shape[-1] == 1 else (values, True)
    with picture:
        num_pages = int(getattr(picture, "n_frames", 1))
        check_size((num_pages, picture.height, picture.width, len(picture.getbands())), "it")
        if num_pages > 1 and picture.format != "TIFF":
            raise ValueError("it is an animation")
        _check_kept(picture)
        if _has_more_samples(picture) and num_pages == 1:
            return _plain_tiff(file), True
        pages = []
        for page in range(num_pages):
            picture.seek(page)
            pages.append(_mask_pixels(picture) if is_mask else _image_pixels(picture))
    kinds = {(page.shape, page.dtype) for page in pages}
    if len(kinds) > 1:
        raise ValueError(f"its pages differ in size or kind: {', '.join(str(kind[0]) for kind in kinds)}")
    has_colours = pages[0].ndim == 3
    return pages[0] if num_pages == 1 else np.stack(pages), has_colours


def _check_kept(picture: Image.Image) -> None:
    """A ValueError if Pillow would change values, or pages are something else than slices."""
    bits = _tag(picture, _BITS, (1,))
    is_deep = any(len(tile) > 3 and ";16" in str(tile[3]) for tile in getattr(picture, "tile", ()))
    if len(picture.getbands()) > 1 and (is_deep or max(bits) > 8):
        raise ValueError("its colours have 16 bits, of which 8 would be lost: save one file per channel")
    if max(bits) == 8 and _tag(picture, _SAMPLE_FORMAT, (1,))[0] == 2:
        raise ValueError("it holds 8-bit numbers with a sign (int8), which Pillow misreads: save it as int16")
    if picture.format == "PNG" and picture.getexif().get(_ORIENTATION, 1) != 1:
        raise ValueError("its EXIF data turn it, which other programs ignore: save it upright, without EXIF")
    declared = dict(
        re.findall(r"^(channels|slices|frames)=(\d+)", str(_tag(picture, _DESCRIPTION, "")), re.M)
    )
    kinds = [name for name, number in declared.items() if int(number) > 1]
    if "channels" in kinds or len(kinds) > 1:
        raise ValueError(f"its pages are {' and '.join(kinds)} of ImageJ: save one stack of slices per file")


def _image_pixels(picture: Image.Image) -> np.ndarray:
    *_, alpha = picture.split() if picture.mode in ("RGBA", "LA", "La", "PA") else (None,)
    if alpha is not None and alpha.getextrema()[0] != alpha.getextrema()[1]:
        raise ValueError("its transparency varies and would be lost: save it without, or as another channel")
    if picture.mode in ("LA", "La"):
        return np.array(picture.getchannel(0))
    pixels = np.array(picture if picture.mode in _GREY_MODES else picture.convert("RGB"))
    # Pillow reads 32 bits with a sign
    is_unsigned = picture.mode == "I" and _tag(picture, _BITS, (1,))[0] == 32
    return pixels.view(np.uint32) if is_unsigned and _tag(picture, _SAMPLE_FORMAT, (1,))[0] == 1 else pixels


def _mask_pixels(picture: Image.Image) -> np.ndarray:
    if picture.mode in ("RGBA", "LA", "La", "PA"):
        *colours, alpha = picture.split()
        is_flat = all(channel.getextrema()[0] == channel.getextrema()[1] for channel in colours)
        if is_flat and alpha.getextrema()[0] != alpha.getextrema()[1]:
            raise ValueError(
                "it has one colour everywhere and is drawn in its transparency, which is ignored: save it "
                "with one grey value for each class"
            )
    if picture.mode in ("P", "PA"):
        return _palette_classes(picture)
    if picture.mode in ("LA", "La"):
        return np.array(picture.getchannel(0))
    if picture.mode not in _GREY_MODES:
        return np.array(picture.convert("RGB"))
    pixels = np.array(picture)
    # 0 is white: Pillow shows what is drawn, but tools that write masks this way mean the stored values
    if _tag(picture, _PHOTOMETRIC, 1) == 0 and picture.mode in ("1", "L"):
        return ~pixels
    return pixels


def _palette_classes(picture: Image.Image) -> np.ndarray:
    """The indices of a palette, which are the class numbers; its greys, if index 0 is not black."""
    indices = np.array(picture.getchannel(0))
    colours = np.array(picture.convert("RGB"))
    palette = np.array((picture.getpalette() or [0, 0, 0])[:3])
    if not palette.any():
        return indices
    if (colours != colours[..., :1]).any():
        raise ValueError(
            f"it is in colour, and index 0 of its palette is {tuple(palette.tolist())} instead of black, so "
            "the background is not certain: save it with one grey value for each class"
        )
    greys: np.ndarray = colours[..., 0]
    return greys


def _plain_tiff(file: BufferedReader) -> np.ndarray:
    """The first page (rows, columns, samples) of a TIFF whose type Pillow does not know, such as float64.

    Its strips must be stored as they are, or deflated.
    """
    file.seek(0)
    tags: Any = ImageFileDirectory_v2(header := file.read(8))
    if header[:4] not in (b"II*\0", b"MM\0*"):
        raise ValueError("it is neither PNG nor TIFF")
    file.seek(tags.next)
    tags.load(file)
    width, height, samples = int(tags[256]), int(tags[257]), int(tags.get(_SAMPLES, 1))
    bits, kind = set(tags.get(_BITS, (1,))), tags.get(_SAMPLE_FORMAT, (1,))[0]
    codes = {1: "u", 2: "i", 3: "f"}
    compression = tags.get(_COMPRESSION, 1)
    is_plain = compression in (1, 8, 32946) and tags.get(_PREDICTOR, 1) == 1 and tags.get(284, 1) == 1
    if tags.next or not is_plain or len(bits) != 1 or min(bits) % 8 or kind not in codes or 273 not in tags:
        raise ValueError("it is a TIFF of a kind that is not read: save it as float32, without compression")
    check_size((height, width, samples), "it")
    content = b""
    for start, size in zip(tags[273], tags[279], strict=True):
        file.seek(start)
        strip = file.read(size)
        content += strip if compression == 1 else zlib.decompress(strip)
    order = "<" if header[:2] == b"II" else ">"
    values = np.frombuffer(content, dtype=f"{order}{codes[kind]}{min(bits) // 8}")
    return values.astype(values.dtype.newbyteorder("=")).reshape(height, width, samples)


def _arrange(path: Path, stored: _Stored, *, num_axes: int, num_channels: int) -> tuple[np.ndarray, Grid]:
    """Values (channels, *space) and the grid of the spatial axes."""
    shape = stored.values.shape
    has_channels = stored.has_colours or num_channels > 1
    remaining = list(range(len(shape)))
    for axis in reversed(range(len(shape))):
        if len(remaining) > num_axes + has_channels and shape[axis] == 1:
            remaining.remove(axis)
    values = stored.values.reshape([shape[axis] for axis in remaining])
    if values.ndim != num_axes + has_channels or not values.size:
        channels = f" and {num_channels} channels last" if has_channels else ""
        raise UserError(f"{path} has shape {shape}; expected {num_axes} spatial axes{channels}")
    if has_channels and values.shape[-1] != num_channels:
        raise UserError(f"{path} has {values.shape[-1]} channels; expected {num_channels}: shape {shape}")
    values = np.moveaxis(values, -1, 0) if has_channels else values[None]
    axes = remaining[:num_axes]
    sides = () if stored.spacing_mm is None else tuple(stored.spacing_mm[axis] for axis in axes)
    # an affine has no column for a fourth axis
    affines = stored.affines_mm if max(axes) < 3 else ()
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
