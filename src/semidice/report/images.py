"""Pictures of cases for a page: two small images per case, from which a browser makes every layer it shows.

    image   the channels below each other, grey, WebP
    maps    equal tiles in a grid, 8 bits, lossless WebP: the raters' class maps as bits, then the true
            probability if it is known, then the prediction of each method; one tile per foreground class

A probability is stored in units of 1/255. The page computes the mean of the raters and all differences from
these tiles. Of a volume, the slice with the most foreground is shown. All pictures are shrunk to the same
longest side until they fit a number of bytes. Layout and colours belong to the page.
"""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ..data.dataset import Dataset, ScoredUnit
from ..data.manifest import Scan
from ..data.packing import num_planes

# characters of all pictures together; everything else on a page of 100 cases takes less than a megabyte
MAX_CHARACTERS = 7_500_000
# longest sides that are tried, in pixels
SIDES = (512, 384, 256, 192, 128)
_QUALITY = 80
# percentage of the darkest and of the brightest pixels that are clipped for contrast
_CLIPPED = 0.5


@dataclass(frozen=True)
class PictureLayout:
    """The meaning of the tiles of `maps`; it is the same for every case of a page.

    A tile of raters holds `raters_per_tile` class maps with `bits` bits each, the first one in the lowest
    bits. Tiles are in rows of `columns` tiles.
    """

    channels: tuple[str, ...]
    classes: tuple[str, ...]
    raters: tuple[str, ...]
    bits: int
    raters_per_tile: int
    rater_tiles: int
    has_truth: bool
    columns: int

    @classmethod
    def of(cls, dataset: Dataset, num_methods: int) -> "PictureLayout":
        manifest = dataset.manifest
        bits = num_planes(dataset.num_classes)
        raters_per_tile = 8 // bits
        rater_tiles = -(-len(manifest.raters) // raters_per_tile)
        has_truth = all("truth" in scan.arrays for scan in manifest.scans)
        num_tiles = rater_tiles + (dataset.num_classes - 1) * (num_methods + has_truth)
        return cls(
            channels=manifest.channels,
            classes=manifest.class_names[1:],
            raters=manifest.raters,
            bits=bits,
            raters_per_tile=raters_per_tile,
            rater_tiles=rater_tiles,
            has_truth=has_truth,
            columns=math.ceil(math.sqrt(num_tiles)),
        )


@dataclass(frozen=True)
class Picture:
    """The pictures of one case as data URIs; sizes are rows and columns, aspect is a pixel's height by width.

    full_size: before shrinking. slice_number, num_slices: of a volume; None for an image.
    present: which of the raters looked at the case.
    """

    case: str
    size: tuple[int, int]
    full_size: tuple[int, int]
    aspect: float
    slice_number: int | None
    num_slices: int | None
    present: tuple[bool, ...]
    image: str
    maps: str

    def num_characters(self) -> int:
        return len(self.image) + len(self.maps)


@dataclass(frozen=True)
class ShownSlice:
    """The part of a case that is shown: an image as a whole, or one slice of a volume along `axis`.

    aspect: height of a pixel divided by its width.
    """

    aspect: float
    axis: int | None = None
    number: int | None = None
    num_slices: int | None = None

    @classmethod
    def of(cls, dataset: Dataset, number: int, masks: UInt8[np.ndarray, "R *space"]) -> "ShownSlice":
        """The slice of case `number` in which the raters drew most; the middle one if they drew nothing."""
        case = dataset.cases[number]
        spacing = voxel_sides(case.scan, dataset.slice_axis)
        if len(case.shape) == 2:
            return cls(spacing[0] / spacing[1])
        axis = dataset.slice_axis
        others = [other for other in range(3) if other != axis]
        counts = (masks > 0).sum(axis=(0, *(other + 1 for other in others)))
        fullest = int(counts.argmax()) if counts.any() else len(counts) // 2
        return cls(spacing[others[0]] / spacing[others[1]], axis, fullest, len(counts))

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The slice of an array (leading, *space)."""
        if self.axis is None or self.number is None:
            return array
        return np.asarray(array.take(self.number, self.axis + 1))


def voxel_sides(scan: Scan, slice_axis: int) -> tuple[float, ...]:
    """Sides of a stored voxel along the axes of a case; without spacing, of raw voxels with sides of 1."""
    if scan.spacing_mm is not None:
        return scan.spacing_mm
    lengths = list(scan.raw_shape)
    if len(lengths) > len(scan.shape):
        lengths.pop(slice_axis)
    return tuple(old / new for old, new in zip(lengths, scan.shape, strict=True))


def shown_case(dataset: Dataset, unit: ScoredUnit) -> int:
    """The slice of a scan in which the raters drew most; the middle one if they drew nothing."""
    if len(unit.cases) == 1:
        return unit.cases[0]
    counts = [int((dataset.masks(number) > 0).sum()) for number in unit.cases]
    return unit.cases[int(np.argmax(counts)) if any(counts) else len(counts) // 2]


def picture_of_scan(dataset: Dataset, unit: ScoredUnit, picture: Picture) -> Picture:
    """The picture of one of its slices as that of the scan, with the number of the slice."""
    scan = dataset.cases[unit.cases[0]].scan
    if scan.slices is None or picture.case == unit.name:
        return picture
    (row,) = [case.row for number in unit.cases if (case := dataset.cases[number]).name == picture.case]
    num_slices = scan.raw_shape[dataset.slice_axis]
    return replace(picture, case=unit.name, slice_number=scan.slices[row], num_slices=num_slices)


def make_pictures(
    dataset: Dataset,
    numbers: Sequence[int],
    predictions: Callable[[int], list[np.ndarray]],
    layout: PictureLayout,
    *,
    max_characters: int = MAX_CHARACTERS,
    on_case: Callable[[int, int], object] = lambda _, __: None,
) -> list[Picture]:
    """Pictures of the cases, as large as possible with `max_characters` for all of them together.

    predictions: returns the probabilities (C, *space) of each method for the number of a case.
    on_case(done, total) is called after each case.
    """
    longest = max(max(dataset.cases[number].shape) for number in numbers)
    # of the sides that are larger than every picture, only the smallest
    sides = [side for side, next_side in zip(SIDES, (*SIDES[1:], 0), strict=True) if longest > next_side]
    sample = [numbers[at] for at in np.unique(np.linspace(0, len(numbers) - 1, 4).astype(int))]
    pictures: list[Picture] = []
    for side in sides:
        tried = [make_picture(dataset, number, predictions(number), layout, side=side) for number in sample]
        mean = sum(picture.num_characters() for picture in tried) / len(tried)
        if mean * len(numbers) > max_characters and side != sides[-1]:
            continue
        pictures = []
        for done, number in enumerate(numbers, start=1):
            pictures.append(make_picture(dataset, number, predictions(number), layout, side=side))
            on_case(done, len(numbers))
        # the pictures of the sample may be smaller than the others
        if sum(picture.num_characters() for picture in pictures) <= max_characters:
            break
    return pictures


def make_picture(
    dataset: Dataset, number: int, probs: Sequence[np.ndarray], layout: PictureLayout, *, side: int
) -> Picture:
    """The pictures of one case, shrunk until no side is longer than `side` pixels."""
    truth = dataset.truth(number) if layout.has_truth else None
    all_masks = dataset.masks(number)
    shown = ShownSlice.of(dataset, number, all_masks)
    image, masks = shown.cut(dataset.image(number)), shown.cut(all_masks)
    height, width = masks.shape[1:]
    shrink = min(1.0, side / max(height, width))
    size = max(1, round(height * shrink)), max(1, round(width * shrink))
    tiles = _rater_tiles(_shrunk_classes(masks, size, dataset.num_classes), layout)
    for prob in [*([] if truth is None else [truth]), *probs]:
        foreground = shown.cut(np.asarray(prob[1:], dtype=np.float32))
        tiles += [(_shrunk(plane, size) * 255).round().astype(np.uint8) for plane in foreground]
    channels = [_grey(_shrunk(channel, size)) for channel in image]
    return Picture(
        case=dataset.cases[number].name,
        size=size,
        full_size=(height, width),
        aspect=shown.aspect,
        slice_number=shown.number,
        num_slices=shown.num_slices,
        present=tuple(dataset.present[number].tolist()),
        image=_data_uri(np.concatenate(channels), quality=_QUALITY),
        maps=_data_uri(_grid(tiles, layout.columns), lossless=True),
    )


def _shrunk(plane: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The mean over the area of each new pixel."""
    if plane.shape == size:
        return plane
    picture = Image.fromarray(np.ascontiguousarray(plane, dtype=np.float32))
    shrunk: np.ndarray = np.asarray(picture.resize(size[::-1], Image.Resampling.BOX)).clip(0, 1)
    return shrunk


def _shrunk_classes(masks: np.ndarray, size: tuple[int, int], num_classes: int) -> np.ndarray:
    """The class with the largest area in each new pixel."""
    if masks.shape[1:] == size:
        return masks
    shares = [[_shrunk(mask == index, size) for index in range(num_classes)] for mask in masks]
    classes: np.ndarray = np.asarray(shares).argmax(axis=1).astype(np.uint8)
    return classes


def _rater_tiles(masks: np.ndarray, layout: PictureLayout) -> list[np.ndarray]:
    tiles = [np.zeros(masks.shape[1:], dtype=np.uint8) for _ in range(layout.rater_tiles)]
    for rater, mask in enumerate(masks):
        tile, position = divmod(rater, layout.raters_per_tile)
        tiles[tile] |= mask << np.uint8(position * layout.bits)
    return tiles


def _grey(plane: np.ndarray) -> np.ndarray:
    low, high = np.percentile(plane, [_CLIPPED, 100 - _CLIPPED])
    stretched = (plane - low) / max(high - low, 1e-6)
    grey: np.ndarray = (stretched.clip(0, 1) * 255).round().astype(np.uint8)
    return grey


def _grid(tiles: Sequence[np.ndarray], columns: int) -> np.ndarray:
    blank = [np.zeros_like(tiles[0])] * (-len(tiles) % columns)
    filled = [*tiles, *blank]
    return np.block([filled[first : first + columns] for first in range(0, len(filled), columns)])


def _data_uri(pixels: UInt8[np.ndarray, "H W"], **options: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", method=4, **options)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
