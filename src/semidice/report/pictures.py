"""Images of the cases for a page: layers of each method over the grey image, and outlines as paths.

Every layer is a small WebP that the page stacks over the image: probability, difference from the soft label,
and disagreement, at half size. Of a volume, the most contested and the central slice are shown. If the images
together would exceed a number of bytes, all are made again, smaller.
"""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import contourpy
import matplotlib
import numpy as np
from jaxtyping import Bool, Float, UInt8
from matplotlib.colors import to_rgb
from PIL import Image

from ..data.dataset import Dataset, ScoredUnit
from .figures import line_style

# bytes of the images of a page; everything else on a page of 100 cases takes less than a megabyte
MAX_BYTES = 6_500_000
MAX_SIDE = 512
LAYERS = ("probability", "difference", "disagreement")
_QUALITY = 60
# percentage of the darkest and of the brightest pixels that are clipped for contrast
_CLIPPED = 0.5


@dataclass(frozen=True)
class Plane:
    """What is shown of a scan: a case as it is, or one slice of it. index, total: of a slice in its scan.

    aspect: height of a pixel divided by its width. axis: along which a case with three axes is cut.
    """

    number: int
    aspect: float
    index: int | None = None
    total: int | None = None
    axis: int | None = None

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The plane of an array (leading, *space)."""
        return (
            array
            if self.axis is None or self.index is None
            else np.asarray(array.take(self.index, self.axis + 1))
        )


class Outline(NamedTuple):
    """The outline of a mask as an SVG path; empty if the mask is. name: of the rater, or empty."""

    path: str
    colour: str
    dashes: str
    name: str


@dataclass(frozen=True)
class Panel:
    """What one method, or the raters, say of a plane. layers: data URIs by the names in `LAYERS`."""

    title: str
    layers: dict[str, str]
    outlines: tuple[Outline, ...]


@dataclass(frozen=True)
class Picture:
    """A plane of a scan or slice `name`: the channels of its image, and the panels that lie over it."""

    name: str
    caption: str
    height: int
    width: int
    aspect: float
    channels: tuple[str, ...]
    panels: tuple[Panel, ...]

    @property
    def num_bytes(self) -> int:
        layers = (layer for panel in self.panels for layer in panel.layers.values())
        outlines = (path for panel in self.panels for path, *_ in panel.outlines)
        return sum(map(len, (*self.channels, *layers, *outlines)))


def shown_planes(dataset: Dataset, unit: ScoredUnit) -> list[Plane]:
    """An image as it is; of a volume the slice that the raters contest most, and the central one."""
    scan = dataset.cases[unit.cases[0]].scan
    axis = dataset.slice_axis
    sides = scan.voxel_mm or tuple(_relative_sides(scan.raw_shape, scan.shape, axis))
    if dataset.num_axes == 3:
        (number,) = unit.cases
        masks = list(np.moveaxis(dataset.masks(number), axis + 1, 0))
        rows, columns = (side for each, side in enumerate(sides) if each != axis)
        places = [Plane(number, rows / columns, index, len(masks), axis) for index in range(len(masks))]
    else:
        masks = [dataset.masks(number) for number in unit.cases]
        total = None if scan.slices is None else scan.raw_shape[axis]
        rows_of_cases = [dataset.cases[number].row for number in unit.cases]
        indices = [None if scan.slices is None else scan.slices[row] for row in rows_of_cases]
        aspect = sides[0] / sides[1]
        pairs = zip(unit.cases, indices, strict=True)
        places = [Plane(number, aspect, index, total) for number, index in pairs]
    if len(places) == 1:
        return places
    # the voxels that some raters drew and others not; with one rater, the voxels that are drawn
    contested = [int((each != each[:1]).any(axis=0).sum()) for each in masks]
    drawn = [int((each > 0).sum()) for each in masks]
    most = int(np.argmax(contested if any(contested) else drawn))
    return [places[most], *([places[len(places) // 2]] if most != len(places) // 2 else [])]


def _relative_sides(raw_shape: Sequence[int], shape: Sequence[int], slice_axis: int) -> list[float]:
    """Sides of a stored voxel if raw voxels have sides of 1."""
    lengths = list(raw_shape)
    if len(lengths) > len(shape):
        lengths.pop(slice_axis)
    return [old / new for old, new in zip(lengths, shape, strict=True)]


def make_pictures(
    dataset: Dataset,
    units: Sequence[ScoredUnit],
    methods: Sequence[str],
    predictions: Callable[[int], Sequence[np.ndarray]],
    *,
    max_bytes: int = MAX_BYTES,
    on_case: Callable[[int, int], object] = lambda _, __: None,
) -> list[Picture]:
    """Pictures of the scans or slices, as large as possible with `max_bytes` for all of them together.

    predictions: the probabilities (C, *space) of each method for the number of a case. on_case(done, total)
    is called after each scan or slice.
    """
    side = min(MAX_SIDE, max((max(dataset.cases[unit.cases[0]].shape) for unit in units), default=1))
    while True:
        pictures: list[Picture] = []
        for done, unit in enumerate(units, start=1):
            for plane in shown_planes(dataset, unit):
                found = predictions(plane.number)
                pictures.append(_picture(dataset, unit.name, plane, methods, found, side=side))
            on_case(done, len(units))
        total = sum(picture.num_bytes for picture in pictures)
        if total <= max_bytes or side <= 64:
            return pictures
        # bytes grow a little slower than the area
        side = max(64, int(0.9 * side * math.sqrt(max_bytes / total)))


def _picture(
    dataset: Dataset,
    name: str,
    plane: Plane,
    methods: Sequence[str],
    probs: Sequence[np.ndarray],
    *,
    side: int,
) -> Picture:
    case = dataset.cases[plane.number]
    present = dataset.present[plane.number]
    image, masks = plane.cut(dataset.image(plane.number)), plane.cut(dataset.masks(plane.number))
    shrink = min(1.0, side / max(image.shape[1:]))
    height, width = image.shape[1:]
    size = max(1, round(height * shrink)), max(1, round(width * shrink))
    one_hot = masks[present][:, None] == np.arange(dataset.num_classes)[:, None, None]
    soft_label = one_hot.mean(axis=0, dtype=np.float32)
    names = enumerate(zip(dataset.manifest.raters, masks, strict=True))
    raters = [_outline(mask > 0, at, rater) for at, (rater, mask) in names if present[at]]
    panels = [Panel("raters", {}, tuple(raters)), _panel("soft label", soft_label, None, size)]
    truth = dataset.truth(plane.number)
    if truth is not None:
        panels.append(_panel("true probability", plane.cut(truth), soft_label, size))
    for method, prob in zip(methods, probs, strict=True):
        panels.append(_panel(method, plane.cut(np.asarray(prob, dtype=np.float32)), soft_label, size))
    of_volume = "" if plane.index is None else f", slice {plane.index + 1} of {plane.total}"
    small = "" if shrink == 1 else f", shown at {size[0]} x {size[1]}"
    return Picture(
        name=name,
        caption=f"{case.name}{of_volume}: {height} x {width} pixels{small}",
        height=height,
        width=width,
        aspect=plane.aspect,
        channels=tuple(_data_uri(_grey(_shrunk(channel, size))) for channel in image),
        panels=tuple(panels),
    )


def _panel(
    title: str, prob: Float[np.ndarray, "C H W"], label: np.ndarray | None, size: tuple[int, int]
) -> Panel:
    """label: the soft label, which has no difference from itself."""
    half = max(1, size[0] // 2), max(1, size[1] // 2)
    small = np.stack([_shrunk(plane, half) for plane in prob])
    layers = {"probability": _class_colours(np.stack([_shrunk(plane, size) for plane in prob[1:]]))}
    if label is not None:
        change = small[1:] - np.stack([_shrunk(plane, half) for plane in label[1:]])
        # of several classes: the share of the probability that is elsewhere
        signed = change[0] if len(change) == 1 else np.abs(change).max(axis=0)
        layers["difference"] = _coloured("RdBu_r", (signed + 1) / 2)
    entropy = -(small * np.log2(np.maximum(small, 1e-9))).sum(axis=0) / math.log2(len(small))
    layers["disagreement"] = _coloured("inferno", entropy)
    return Panel(title, {name: _data_uri(layer) for name, layer in layers.items()}, (_outline_of(prob),))


def _class_colours(foreground: Float[np.ndarray, "K H W"]) -> UInt8[np.ndarray, "H W 3"]:
    """One class from dark to bright; several as colours of their classes, mixed over black."""
    if len(foreground) == 1:
        return _coloured("cividis", foreground[0])
    colours = np.array([to_rgb(line_style(number)[0]) for number in range(len(foreground))])
    mixed: np.ndarray = (255 * np.einsum("khw,kc->hwc", foreground, colours)).round().astype(np.uint8)
    return mixed


def _coloured(name: str, values: Float[np.ndarray, "H W"]) -> UInt8[np.ndarray, "H W 3"]:
    coloured: np.ndarray = matplotlib.colormaps[name](values, bytes=True)[..., :3]
    return coloured


def _outline_of(prob: Float[np.ndarray, "C H W"]) -> Outline:
    """The outline of the voxels whose most probable class is not the background."""
    return Outline(_path(prob.argmax(axis=0) > 0), "#ffffff", "", "")


def _outline(mask: Bool[np.ndarray, "H W"], number: int, rater: str) -> Outline:
    colour, line = line_style(number)
    dashes = {"-": "", "--": "4 2", "-.": "5 2 1 2", ":": "1 2"}.get(line) if isinstance(line, str) else None
    return Outline(_path(mask), colour, " ".join(map(str, line[1])) if dashes is None else dashes, rater)


def _path(mask: Bool[np.ndarray, "H W"]) -> str:
    """The outline as an SVG path, in pixels of the image."""
    # a border of background closes the outlines at the edges of the image
    found: Any = contourpy.contour_generator(z=np.pad(mask, 1).astype(float)).lines(0.5)
    parts = []
    for line in found:
        # twice the position is a whole number: an outline passes half-way between two pixels
        steps = np.diff(np.rint(2 * line).astype(int), axis=0)
        keep = np.r_[True, (steps[1:] != steps[:-1]).any(axis=1), True]
        x, y = (line[keep] - 0.5).T
        parts.append("M" + "L".join(f"{a:g} {b:g}" for a, b in zip(x, y, strict=True)) + "Z")
    return "".join(parts)


def _shrunk(plane: np.ndarray, size: tuple[int, int]) -> Float[np.ndarray, "H W"]:
    """The mean over the area of each new pixel."""
    if plane.shape == size:
        return plane
    picture = Image.fromarray(np.ascontiguousarray(plane, dtype=np.float32))
    shrunk: np.ndarray = np.asarray(picture.resize(size[::-1], Image.Resampling.BOX)).clip(0, 1)
    return shrunk


def _grey(plane: np.ndarray) -> UInt8[np.ndarray, "H W"]:
    low, high = np.percentile(plane, [_CLIPPED, 100 - _CLIPPED])
    grey: np.ndarray = ((plane - low) / max(high - low, 1e-6)).clip(0, 1) * 255
    return grey.round().astype(np.uint8)


def _data_uri(pixels: UInt8[np.ndarray, "H W *rgb"]) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", method=4, quality=_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
