"""Converts a scan that was read into the arrays that are stored: slices, sizes, intensities, bit planes.

    image   as in `data.intensities`
    masks   each rater's class map, resized as probabilities: the most probable class, at a tie the lowest
    truth   probabilities, resized and scaled to sum to one

Sizes change as in `data.resample`. A volume that is not cut into slices keeps its size.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int16, UInt8

from ..intensities import intensity_limits, stored_image
from ..manifest import PrepareOptions
from ..packing import pack_classes
from ..resample import resize_classes, resize_probability
from ..sources.scan import ScanArrays


@dataclass(frozen=True)
class StoredScan:
    """The arrays of a scan's S cases, as described in `paths.DatasetFolder`, and entries of the manifest."""

    images: UInt8[np.ndarray, "S channels *space"] | Int16[np.ndarray, "S channels *space"]
    masks: UInt8[np.ndarray, "S R B *packed"]
    truth: Float32[np.ndarray, "S C *space"] | None
    slices: tuple[int, ...] | None
    spacing_mm: tuple[float, ...] | None


def convert_image(
    image: np.ndarray, options: PrepareOptions, *, slices: tuple[int, ...] | None
) -> UInt8[np.ndarray, "S channels *space"] | Int16[np.ndarray, "S channels *space"]:
    """The images of a scan's cases as they are stored; a ValueError for intensities that cannot be used.

    slices: numbers of the slices that become cases; None makes the whole image one case.
    """
    limits = intensity_limits(image, options)
    size = _new_size(image, options, slices)
    return np.stack([stored_image(case, limits, size) for case in _cases(image, slices, options)])


def convert_scan(
    scan: ScanArrays, *, options: PrepareOptions, raters: tuple[str, ...], num_classes: int
) -> StoredScan | None:
    """The arrays to store; None if only slices with foreground are wanted and there is none.

    raters: all raters of the dataset; those who did not look at the scan get zeros.
    """
    slices = None
    if scan.image.ndim == 4 and options.slices != "none":
        masks_by_slice = np.moveaxis(scan.masks, 1 + options.slice_axis, 0)
        slices = tuple(
            number for number, drawn in enumerate(masks_by_slice) if options.slices == "all" or drawn.any()
        )
    if slices == ():
        # an image without contrast is an error nevertheless
        intensity_limits(scan.image, options)
        return None
    images = convert_image(scan.image, options, slices=slices)
    size = _new_size(scan.image, options, slices)
    shape = images.shape[2:]
    masks = np.zeros((len(images), len(raters), *shape), dtype=np.uint8)
    rows = [raters.index(rater) for rater in scan.raters]
    for case, classes in enumerate(_cases(scan.masks, slices, options)):
        masks[case, rows] = (
            classes if size is None else resize_classes(classes, size, num_classes=num_classes)
        )
    truth = None
    if scan.truth is not None:
        probs = _cases(scan.truth, slices, options)
        truth = np.stack([prob if size is None else resize_probability(prob, size) for prob in probs])
    return StoredScan(
        images=images,
        masks=pack_classes(masks, num_classes=num_classes, num_space_axes=len(shape)),
        truth=truth,
        slices=slices,
        spacing_mm=_spacing(scan, slices, shape, options),
    )


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


def _spacing(
    scan: ScanArrays, slices: tuple[int, ...] | None, shape: tuple[int, ...], options: PrepareOptions
) -> tuple[float, ...] | None:
    """Voxel sizes along `shape`, then the slice thickness if the volume was cut into slices."""
    if scan.spacing_mm is None:
        return None
    sides, lengths = list(scan.spacing_mm), list(scan.image.shape[1:])
    thickness = []
    if slices is not None:
        thickness = [sides.pop(options.slice_axis)]
        lengths.pop(options.slice_axis)
    scaled = [side * old / new for side, old, new in zip(sides, lengths, shape, strict=True)]
    return tuple(map(float, scaled + thickness))
