"""Reads a PNG or TIFF: the pixels of Pillow, where these are what the file means.

What would be lost or guessed is refused: transparency that varies, 16-bit colours (which Pillow reads with 8
bits), a rotation in EXIF, channels or times among the pages of a TIFF, and a mask whose palette does not say
which index is the background.
"""

import re
import zlib
from contextlib import suppress
from io import BufferedReader, BytesIO
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from .raw import Content, check_size

# Pillow's modes of grey pictures; those with more than 8 bits
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_GREY_MODES = ("1", "L", "LA", "La", *_DEEP_MODES)
_ALPHA_MODES = ("RGBA", "LA", "La", "PA")
# tags of TIFF and EXIF
_BITS, _COMPRESSION, _PHOTOMETRIC, _DESCRIPTION, _ORIENTATION = 258, 259, 262, 270, 274
_SAMPLES, _PLANES, _PREDICTOR, _SAMPLE_FORMAT = 277, 284, 317, 339
_MAX_PAGES = 4096


def picture_header(file: BufferedReader) -> tuple[tuple[int, ...], int, bool]:
    """Pages (if there are several), rows and columns; the number of colours; and whether it has 8 bits."""
    try:
        with Image.open(file, formats=("PNG", "TIFF")) as picture:
            num_pages = _num_pages(picture)
            colours = 1 if picture.mode in _GREY_MODES and not _has_more_samples(picture) else 3
            kind, (columns, rows) = picture.mode, picture.size
    except UnidentifiedImageError:
        rows, columns, colours = _plain_tiff(file).shape
        num_pages, kind = 1, "F"
    pages = (num_pages,) if num_pages > 1 else ()
    return (*pages, rows, columns), colours, kind not in _DEEP_MODES


def read_picture(content: bytes, *, is_mask: bool) -> Content:
    """Pixels, with the pages of a TIFF as first axis."""
    file: Any = BytesIO(content)
    try:
        picture = Image.open(file, formats=("PNG", "TIFF"))
    except UnidentifiedImageError:
        values = _plain_tiff(file)
        return Content(values[..., 0]) if values.shape[-1] == 1 else Content(values, has_colours=True)
    with picture:
        num_pages = _num_pages(picture)
        if num_pages > 1 and picture.format != "TIFF":
            raise ValueError("it is an animation")
        _check_kept(picture)
        if _has_more_samples(picture) and num_pages == 1:
            return Content(_plain_tiff(file), has_colours=True)
        pages: list[np.ndarray] = []
        for page in range(num_pages):
            picture.seek(page)
            pages.append(_mask_pixels(picture) if is_mask else _image_pixels(picture))
    kinds = {(page.shape, page.dtype) for page in pages}
    if len(kinds) > 1:
        raise ValueError(f"its pages differ in size or kind: {', '.join(str(kind[0]) for kind in kinds)}")
    return Content(pages[0] if num_pages == 1 else np.stack(pages), pages[0].ndim == 3)


def _num_pages(picture: Any) -> int:
    num_pages = 1 if picture.format == "TIFF" else int(getattr(picture, "n_frames", 1))
    # Pillow would count all pages of a TIFF, in a time that grows with the square of their number
    with suppress(EOFError):
        while picture.format == "TIFF":
            picture.seek(num_pages)
            num_pages += 1
            if num_pages > _MAX_PAGES:
                raise ValueError(f"it has more than {_MAX_PAGES} pages: save fewer slices per file")
    picture.seek(0)
    check_size((num_pages, picture.height, picture.width, len(picture.getbands())))
    return num_pages


def _tag(picture: Image.Image, tag: int, default: Any) -> Any:
    """A tag of a TIFF; the default for a PNG."""
    return getattr(picture, "tag_v2", {}).get(tag, default)


def _has_more_samples(picture: Image.Image) -> bool:
    """Whether a pixel of a TIFF has more values than Pillow reads."""
    return bool(_tag(picture, _SAMPLES, 1) > len(picture.getbands()))


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


def _is_flat(channel: Image.Image) -> bool:
    low, high = channel.getextrema()
    return bool(low == high)


def _image_pixels(picture: Image.Image) -> np.ndarray:
    if picture.mode in _ALPHA_MODES and not _is_flat(picture.getchannel("A")):
        raise ValueError("its transparency varies and would be lost: save it without, or as another channel")
    if picture.mode in ("LA", "La"):
        return np.array(picture.getchannel(0))
    pixels = np.array(picture if picture.mode in _GREY_MODES else picture.convert("RGB"))
    # Pillow reads 32 bits with a sign
    is_unsigned = picture.mode == "I" and _tag(picture, _BITS, (1,))[0] == 32
    return pixels.view(np.uint32) if is_unsigned and _tag(picture, _SAMPLE_FORMAT, (1,))[0] == 1 else pixels


def _mask_pixels(picture: Image.Image) -> np.ndarray:
    if picture.mode in _ALPHA_MODES:
        *colours, alpha = picture.split()
        if all(map(_is_flat, colours)) and not _is_flat(alpha):
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
    palette = (picture.getpalette() or [0, 0, 0])[:3]
    if not any(palette):
        return np.array(picture.getchannel(0))
    colours = np.array(picture.convert("RGB"))
    if (colours != colours[..., :1]).any():
        raise ValueError(
            f"it is in colour, and index 0 of its palette is {tuple(palette)} instead of black, so "
            "the background is not certain: save it with one grey value for each class"
        )
    greys: np.ndarray = colours[..., 0]
    return greys


def _plain_tiff(file: Any) -> np.ndarray:
    """The first page (rows, columns, samples) of a TIFF whose type Pillow does not know, such as float64.

    Its strips must be stored as they are, or deflated.
    """
    file.seek(0)
    tags: Any = ImageFileDirectory_v2(header := file.read(8))
    if header[:4] not in (b"II*\0", b"MM\0*"):
        raise ValueError("it is neither PNG nor TIFF")
    file.seek(tags.next)
    tags.load(file)
    bits, kind = set(tags.get(_BITS, (1,))), tags.get(_SAMPLE_FORMAT, (1,))[0]
    codes, compression = {1: "u", 2: "i", 3: "f"}, tags.get(_COMPRESSION, 1)
    is_plain = compression in (1, 8, 32946) and tags.get(_PREDICTOR, 1) == tags.get(_PLANES, 1) == 1
    if tags.next or not is_plain or len(bits) != 1 or min(bits) % 8 or kind not in codes or 273 not in tags:
        raise ValueError("it is a TIFF of a kind that is not read: save it as float32, without compression")
    check_size((int(tags[257]), int(tags[256])))
    content = b""
    for start, size in zip(tags[273], tags[279], strict=True):
        file.seek(start)
        strip = file.read(size)
        content += strip if compression == 1 else zlib.decompress(strip)
    dtype = np.dtype(f"{'<' if header[:2] == b'II' else '>'}{codes[kind]}{min(bits) // 8}")
    values = np.frombuffer(content, dtype).reshape(int(tags[257]), int(tags[256]), -1)
    return values.astype(dtype.newbyteorder("="))
