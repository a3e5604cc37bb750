"""A scan as it was read, to the arrays that are stored: intensities in [0, 1], slices, sizes, bit planes.

    image   x -> clip((x - low) / (high - low), 0, 1), resized, rounded to the nearest of 0 .. 32767 (int16).
            low and high are the window, or else percentiles of each channel over the whole scan;
            where these are one number, the channel's smallest and largest value. Without a window, 8-bit
            images are stored as they are (uint8): resized, and rounded to the nearest.
    masks   each rater's class map, resized as probabilities: the most probable class, at a tie the lowest
    truth   probabilities, resized and scaled to sum to one

Intensities are clipped before they are resized, so that what lies beyond a window does not bleed into it.
Sizes change as in `resample`; a volume that is not cut into slices keeps its own.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int16, UInt8

from .dataset import INTENSITY_UNITS
from .options import PrepareOptions
from .packing import pack_classes
from .raw import ScanArrays
from .resample import resize_classes, resize_image, resize_probability

Size = tuple[int, int]
Limits = tuple[float, float]


@dataclass(frozen=True)
class StoredScan:
    """Arrays of a scan's S cases as `rundir` and `packing` lay them out, and what the manifest says of it."""

    images: UInt8[np.ndarray, "S channels *space"] | Int16[np.ndarray, "S channels *space"]
    masks: UInt8[np.ndarray, "S R B *packed"]
    truth: Float32[np.ndarray, "S C *space"] | None
    slices: tuple[int, ...] | None
    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]

    @property
    def levels(self) -> int:
        """The stored intensity that means 1."""
        return _levels(self.images.dtype)


def convert_scan(
    scan: ScanArrays, *, options: PrepareOptions, raters: tuple[str, ...], num_classes: int
) -> StoredScan | None:
    """The arrays to store, or None if no slice holds foreground; a ValueError for an image without contrast.

    raters: of the dataset, the rater axis of the masks; those who did not look at the scan have zeros.
    """
    limits = _limits(scan.image, options)
    is_volume = scan.image.ndim == 4
    slices = _chosen_slices(scan.masks, options) if is_volume and options.slices != "none" else None
    if slices == ():
        return None
    size = None if is_volume and slices is None else options.size

    images = np.stack([_stored(row, limits, size) for row in _rows(scan.image, slices, options)])
    shape = images.shape[2:]
    masks = np.zeros((len(images), len(raters), *shape), dtype=np.uint8)
    axis = [raters.index(rater) for rater in scan.raters]
    for case, classes in enumerate(_rows(scan.masks, slices, options)):
        masks[case, axis] = (
            classes if size is None else resize_classes(classes, size, num_classes=num_classes)
        )
    truth = None
    if scan.truth is not None:
        rows = _rows(scan.truth, slices, options)
        truth = np.stack([row if size is None else resize_probability(row, size) for row in rows])
    return StoredScan(
        images=images,
        masks=pack_classes(masks, num_classes=num_classes, num_space_axes=len(shape)),
        truth=truth,
        slices=slices,
        shape=shape,
        spacing_mm=_spacing(scan, slices, shape, options),
    )


def _chosen_slices(masks: UInt8[np.ndarray, "R D H W"], options: PrepareOptions) -> tuple[int, ...]:
    across = np.moveaxis(masks, 1 + options.slice_axis, 0)
    if options.slices == "all":
        return tuple(range(len(across)))
    return tuple(number for number, drawn in enumerate(across) if drawn.any())


def _rows(array: np.ndarray, slices: tuple[int, ...] | None, options: PrepareOptions) -> list[np.ndarray]:
    """The scan's cases, each (channels, raters or classes, *space); the axes of space keep their order."""
    if slices is None:
        return [array]
    across = np.moveaxis(array, 1 + options.slice_axis, 0)
    return [across[number] for number in slices]


def _spacing(
    scan: ScanArrays, slices: tuple[int, ...] | None, shape: tuple[int, ...], options: PrepareOptions
) -> tuple[float, ...]:
    """Voxel sides along `shape`, then the slice thickness of a volume that was cut."""
    sides, lengths = list(scan.spacing_mm), list(scan.image.shape[1:])
    thickness = []
    if slices is not None:
        thickness = [sides.pop(options.slice_axis)]
        lengths.pop(options.slice_axis)
    scaled = [side * old / new for side, old, new in zip(sides, lengths, shape, strict=True)]
    return tuple(map(float, scaled + thickness))


def _limits(image: np.ndarray, options: PrepareOptions) -> list[Limits] | None:
    """The raw values of each channel that become 0 and 1; None for an image that keeps its 8 bits."""
    extremes = [_extremes(number, channel) for number, channel in enumerate(image, 1)]
    if options.window is not None:
        low, high = options.window
        for number, (lowest, highest) in enumerate(extremes, 1):
            if lowest >= high or highest <= low:
                raise ValueError(
                    f"channel {number} holds values from {lowest:g} to {highest:g}, none of them in the "
                    f"window ({low:g}, {high:g}): give another --window"
                )
        return [options.window] * len(image)
    if image.dtype == np.uint8:
        return None
    percentiles = [tuple(map(float, np.percentile(channel, options.percentiles))) for channel in image]
    return [
        (low, high) if low < high else ends for (low, high), ends in zip(percentiles, extremes, strict=True)
    ]


def _extremes(number: int, channel: np.ndarray) -> Limits:
    """The smallest and the largest value of a channel, which must differ."""
    lowest, highest = float(channel.min()), float(channel.max())
    # a NaN in the channel is both of them
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise ValueError(f"channel {number} holds values that are not finite: repair the image")
    if lowest == highest:
        raise ValueError(f"channel {number} is {lowest:g} everywhere: an image without contrast")
    return lowest, highest


def _stored(image: np.ndarray, limits: list[Limits] | None, size: Size | None) -> np.ndarray:
    """A case's image in the dtype it is stored in."""
    if limits is None:
        # as float32 the 256 values are exact
        return (
            image if size is None else np.rint(resize_image(image.astype(np.float32), size)).astype(np.uint8)
        )
    scaled = np.empty(image.shape, dtype=np.float32)
    for channel, (low, high), out in zip(image, limits, scaled, strict=True):
        np.clip((channel.astype(np.float32) - low) / (high - low), 0, 1, out=out)
    if size is not None:
        scaled = resize_image(scaled, size)
    return np.rint(scaled * _levels(np.dtype(np.int16))).astype(np.int16)


def _levels(dtype: np.dtype[np.generic]) -> int:
    return round(1 / INTENSITY_UNITS[dtype.name])
