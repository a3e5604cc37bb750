"""Pictures of cases for a page: two small images a case, from which a browser makes every layer it shows.

    image   the channels one below the other, grey, WebP
    maps    equal tiles in a grid, 8 bits, WebP without loss: the raters' class maps as bits, then the true
            probability where it is known, then the prediction of each method; one tile a foreground class

A probability is in units of 1/255. The mean of the raters and all differences follow from these. Of a volume,
the slice with most foreground. Pictures are shrunk, all to the same longest side, until they fit a number of
bytes. Left out: layout and colours, which are the page's.
"""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from ..data.dataset import Dataset
from ..data.packing import num_planes

# characters of all pictures together: the rest of a page of 100 cases is below a megabyte
BUDGET = 7_500_000
SIDES = (512, 384, 256, 192, 128)
_QUALITY = 80
# share of the darkest and brightest pixels that the contrast leaves out, in percent
_CLIPPED = 0.5


@dataclass(frozen=True)
class PictureLayout:
    """What the tiles of `maps` are, the same for every case of a page.

    A tile of raters holds `raters_per_tile` of them, `bits` each, the first in the lowest bits. Tiles follow
    each other row by row, `columns` in a row.
    """

    channels: tuple[str, ...]
    classes: tuple[str, ...]
    raters: tuple[str, ...]
    bits: int
    raters_per_tile: int
    rater_tiles: int
    has_truth: bool
    num_methods: int
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
            num_methods=num_methods,
            columns=math.ceil(math.sqrt(num_tiles)),
        )


@dataclass(frozen=True)
class Picture:
    """The pictures of one case as data URIs; sizes are rows and columns, aspect a pixel's height by width.

    full_size: before shrinking. slice_number: of a volume's `num_slices`; None for an image.
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

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Slice:
    """Everything of a case, cut to what is shown and not yet shrunk."""

    image: Float[np.ndarray, "channels H W"]
    masks: UInt8[np.ndarray, "R H W"]
    probs: list[Float[np.ndarray, "foreground H W"]]
    aspect: float
    number: int | None
    count: int | None


def make_pictures(
    dataset: Dataset,
    numbers: Sequence[int],
    predictions: Callable[[int], list[np.ndarray]],
    layout: PictureLayout,
    *,
    budget: int = BUDGET,
    on_case: Callable[[int, int], object] = lambda _, __: None,
) -> list[Picture]:
    """Pictures of the cases, as large as all of them together stay within `budget` characters.

    predictions: from a case's number to the probabilities (C, *space) of each method. on_case(done, total).
    """
    sides = _sides_for(dataset, numbers)
    sample = [numbers[at] for at in np.unique(np.linspace(0, len(numbers) - 1, 4).astype(int))]
    pictures: list[Picture] = []
    for side in sides:
        smallest = side == sides[-1]
        tried = [make_picture(dataset, number, predictions(number), layout, side=side) for number in sample]
        mean = sum(picture.num_characters() for picture in tried) / len(tried)
        if mean * len(numbers) > budget and not smallest:
            continue
        pictures = []
        for done, number in enumerate(numbers, start=1):
            pictures.append(make_picture(dataset, number, predictions(number), layout, side=side))
            on_case(done, len(numbers))
        # the sample may have been of the small ones
        if sum(picture.num_characters() for picture in pictures) <= budget:
            break
    return pictures


def make_picture(
    dataset: Dataset, number: int, probs: Sequence[np.ndarray], layout: PictureLayout, *, side: int
) -> Picture:
    """The pictures of one case, shrunk until no side is longer than `side` pixels."""
    truth = dataset.truth(number) if layout.has_truth else None
    shown = _cut(dataset, number, [*([] if truth is None else [truth]), *probs])
    height, width = shown.masks.shape[1:]
    shrink = min(1.0, side / max(height, width))
    size = max(1, round(height * shrink)), max(1, round(width * shrink))
    masks = _shrunk_classes(shown.masks, size, dataset.num_classes)
    tiles = [*_rater_tiles(masks, layout)]
    for prob in shown.probs:
        tiles += [(_shrunk(plane, size) * 255).round().astype(np.uint8) for plane in prob]
    channels = [_grey(_shrunk(channel, size)) for channel in shown.image]
    return Picture(
        case=dataset.cases[number].name,
        size=size,
        full_size=(height, width),
        aspect=shown.aspect,
        slice_number=shown.number,
        num_slices=shown.count,
        present=tuple(bool(there) for there in dataset.present[number]),
        image=_data_uri(np.concatenate(channels), quality=_QUALITY),
        maps=_data_uri(_grid(tiles, layout.columns), lossless=True),
    )


def fullest_slice(dataset: Dataset, masks: UInt8[np.ndarray, "R *space"]) -> tuple[int, int]:
    """Axis and number of the slice of a volume in which raters drew most; the middle one if nobody did."""
    chosen = dataset.manifest.options.get("slice_axis")
    axis = chosen if chosen in (0, 1, 2) else 2
    counts = (masks > 0).sum(axis=(0, *(other + 1 for other in range(3) if other != axis)))
    return axis, int(counts.argmax()) if counts.any() else len(counts) // 2


def _cut(dataset: Dataset, number: int, probs: Sequence[np.ndarray]) -> _Slice:
    """The case as an image: of a volume, the slice in which most raters drew most."""
    case = dataset.cases[number]
    image, masks = dataset.image(number), dataset.masks(number)
    foreground = [np.asarray(prob[1:], dtype=np.float32) for prob in probs]
    spacing = case.scan.spacing_mm[: len(case.shape)]
    if len(case.shape) == 2:
        return _Slice(image, masks, foreground, spacing[0] / spacing[1], None, None)
    axis, fullest = fullest_slice(dataset, masks)
    sides = [length for other, length in enumerate(spacing) if other != axis]
    return _Slice(
        image.take(fullest, axis + 1),
        masks.take(fullest, axis + 1),
        [np.asarray(prob.take(fullest, axis + 1)) for prob in foreground],
        sides[0] / sides[1],
        fullest,
        masks.shape[axis + 1],
    )


def _sides_for(dataset: Dataset, numbers: Sequence[int]) -> list[int]:
    """Sides to try, without those that are larger than every picture but the first of them."""
    longest = max(max(dataset.cases[number].shape) for number in numbers)
    return [side for side, next_side in zip(SIDES, (*SIDES[1:], 0), strict=True) if longest > next_side]


def _shrunk(plane: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Mean over the area of each new pixel."""
    if plane.shape == size:
        return plane
    picture = Image.fromarray(np.ascontiguousarray(plane, dtype=np.float32))
    shrunk: np.ndarray = np.asarray(picture.resize(size[::-1], Image.Resampling.BOX)).clip(0, 1)
    return shrunk


def _shrunk_classes(masks: np.ndarray, size: tuple[int, int], num_classes: int) -> np.ndarray:
    """The class that has most of each new pixel."""
    if masks.shape[1:] == size:
        return masks
    shares = [[_shrunk(mask == index, size) for index in range(num_classes)] for mask in masks]
    classes: np.ndarray = np.asarray(shares).argmax(axis=1).astype(np.uint8)
    return classes


def _rater_tiles(masks: np.ndarray, layout: PictureLayout) -> list[np.ndarray]:
    tiles = [np.zeros(masks.shape[1:], dtype=np.uint8) for _ in range(layout.rater_tiles)]
    for rater, mask in enumerate(masks):
        tile, place = divmod(rater, layout.raters_per_tile)
        tiles[tile] |= mask << np.uint8(place * layout.bits)
    return tiles


def _grey(plane: np.ndarray) -> np.ndarray:
    low, high = np.percentile(plane, [_CLIPPED, 100 - _CLIPPED])
    stretched = (plane - low) / max(high - low, 1e-6)
    grey: np.ndarray = (stretched.clip(0, 1) * 255).round().astype(np.uint8)
    return grey


def _grid(tiles: Sequence[np.ndarray], columns: int) -> np.ndarray:
    blank = [np.zeros_like(tiles[0])] * (-len(tiles) % columns)
    whole = [*tiles, *blank]
    rows = [np.concatenate(whole[first : first + columns], axis=1) for first in range(0, len(whole), columns)]
    return np.concatenate(rows)


def _data_uri(pixels: UInt8[np.ndarray, "H W"], **options: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", method=4, **options)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
