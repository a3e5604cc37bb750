"""Converts a scan that was read into the arrays that are stored: slices, sizes, intensities, bit planes.

    image   as in `data.intensities`
    masks   each rater's class map, resized as probabilities: the most probable class, at a tie the lowest
    truth   probabilities, resized and scaled to sum to one

Sizes change as in `data.resample`. A volume that is not cut into slices keeps its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int16, UInt8

from .geometry import Grid
from .intensities import Limits, intensity_limits, stored_image
from .manifest import Kind, PrepareOptions
from .packing import pack_classes
from .resample import resize_classes, resize_probability
from .sources.raw import RawDataset, ScanArrays


@dataclass(frozen=True)
class StoredScan:
    """The arrays of a scan's S cases, as described in `paths.DatasetFolder`, and entries of the manifest.

    arrays: empty if no slice became a case. grid: of a case. thickness_mm: the distance of slices.
    drawn: the classes in the masks.
    """

    arrays: Mapping[Kind, np.ndarray]
    slices: tuple[int, ...] | None
    grid: Grid
    thickness_mm: float | None
    limits: tuple[Limits, ...]
    drawn: tuple[int, ...]


def convert_image(
    image: np.ndarray, options: PrepareOptions, *, slices: tuple[int, ...] | None
) -> tuple[
    UInt8[np.ndarray, "S channels *space"] | Int16[np.ndarray, "S channels *space"], tuple[Limits, ...]
]:
    """The images of a scan's cases as they are stored, and the limits of its channels.

    A UserError for intensities that cannot be used. slices: numbers of the slices that become cases; None
    makes the whole image one case.
    """
    limits = tuple(intensity_limits(image, options))
    size, keep_bytes = _new_size(image, options, slices), options.keep_bytes
    cases = _cases(image, slices, options)
    return np.stack([stored_image(case, limits, size, keep_bytes=keep_bytes) for case in cases]), limits


def convert_scan(scan: ScanArrays, dataset: RawDataset) -> StoredScan:
    """The arrays to store; raters of the dataset who did not look at the scan get zeros.

    There is no array if only slices with foreground are wanted and there is none.
    """
    options, num_classes = dataset.options, len(dataset.class_names)
    slices, grid, thickness = None, scan.grid, None
    if scan.image.ndim == 4 and options.slices != "none":
        by_slice = np.moveaxis(scan.masks, 1 + options.slice_axis, 0)
        slices = tuple(n for n, drawn in enumerate(by_slice) if options.slices == "all" or drawn.any())
        grid, thickness = grid.slice_of(options.slice_axis)
    if slices == ():
        # an image without contrast is an error nevertheless
        return StoredScan({}, slices, grid, thickness, tuple(intensity_limits(scan.image, options)), ())
    images, limits = convert_image(scan.image, options, slices=slices)
    size, shape = _new_size(scan.image, options, slices), images.shape[2:]
    masks = np.zeros((len(images), len(dataset.raters), *shape), dtype=np.uint8)
    rows = [dataset.raters.index(rater) for rater in scan.raters]
    for case, classes in enumerate(_cases(scan.masks, slices, options)):
        masks[case, rows] = (
            classes if size is None else resize_classes(classes, size, num_classes=num_classes)
        )
    packed = pack_classes(masks, num_classes=num_classes, num_space_axes=len(shape))
    arrays: dict[Kind, np.ndarray] = {"images": images, "masks": packed}
    if scan.truth is not None:
        probs = _cases(scan.truth, slices, options)
        arrays["truth"] = np.stack([p if size is None else resize_probability(p, size) for p in probs])
    seen = np.zeros(256, dtype=bool)
    seen[masks] = True
    drawn = tuple(np.flatnonzero(seen).tolist())
    return StoredScan(arrays, slices, grid.resized(shape), thickness, limits, drawn)


def _new_size(
    image: np.ndarray, options: PrepareOptions, slices: tuple[int, ...] | None
) -> tuple[int, int] | None:
    is_whole_volume = image.ndim == 4 and slices is None
    return None if is_whole_volume else options.size


def _cases(array: np.ndarray, slices: tuple[int, ...] | None, options: PrepareOptions) -> list[np.ndarray]:
    """The parts of an array (channels, raters or classes, *space) that become cases."""
    if slices is None:
        return [array]
    slices_first = np.moveaxis(array, 1 + options.slice_axis, 0)
    return [slices_first[number] for number in slices]
