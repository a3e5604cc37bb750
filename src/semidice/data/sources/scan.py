"""Reads one scan of files: its image and its raters' masks, which must have one shape and be aligned.

Files without a position (pictures, or a NIfTI with neither qform nor sform) are compared by their shape.
Left out: reordering axes to match the image, because the header that asks for it may be the wrong one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import UserError
from ..geometry import Grid, misalignment
from .files import ImageFile, MaskFile, read_image, read_mask
from .raw import RawDataset, RawScan, ScanArrays, natural_order


def read_scan(dataset: RawDataset, scan: RawScan) -> ScanArrays:
    """Image and masks of a scan of files; a UserError names the file that is wrong, and says what to do."""
    remedy = "" if dataset.options.ignore_placement else "use --ignore-placement"
    channels = len(dataset.channels)
    image = read_channels(scan.image, num_axes=dataset.num_axes, num_channels=channels, remedy=remedy)
    masks = {}
    for rater, path in scan.masks.items():
        mask = read_mask(path, num_axes=dataset.num_axes, class_of_value=dataset.class_of)
        _check_aligned(f"mask {path}", mask.grid, image.grid, scan.image[0], remedy=remedy)
        masks[rater] = mask
    return scan_arrays(dataset, scan, image, masks)


def scan_arrays(
    dataset: RawDataset, scan: RawScan, image: ImageFile, masks: Mapping[str, MaskFile]
) -> ScanArrays:
    """The record of a scan from its files."""
    raters = tuple(sorted(masks, key=natural_order))
    digests = dict(zip(scan.image, image.sha256, strict=True))
    digests |= {scan.masks[rater]: masks[rater].sha256 for rater in raters}
    return ScanArrays(
        image=image.values,
        masks=np.stack([masks[rater].classes for rater in raters]),
        raters=raters,
        grid=image.grid,
        affine=image.affine,
        orientation=image.orientation,
        inputs={dataset.relative(path): digest for path, digest in digests.items()},
    )


def read_channels(paths: Sequence[Path], *, num_axes: int, num_channels: int, remedy: str) -> ImageFile:
    """The image in one file, or in one file per channel; a UserError if these are not on one grid.

    The grid is that of the first file. remedy: what a user can do if only the headers are wrong; "" does not
    compare positions.
    """
    if len(paths) not in (1, num_channels):
        raise UserError(
            f"the image {paths[0]}, ... has {len(paths)} files, but the dataset has {num_channels} channels"
        )
    channels_per_file = num_channels if len(paths) == 1 else 1
    images = [read_image(path, num_axes=num_axes, num_channels=channels_per_file) for path in paths]
    first = images[0]
    for path, image in zip(paths[1:], images[1:], strict=True):
        _check_aligned(f"image {path}", image.grid, first.grid, paths[0], remedy=remedy)
    if len(images) == 1:
        return first
    # uint8 and float32 together become float32
    values = np.concatenate([image.values for image in images])
    return replace(first, values=values, sha256=tuple(digest for image in images for digest in image.sha256))


def _check_aligned(name: str, grid: Grid, of_image: Grid, image: Path, *, remedy: str) -> None:
    """A UserError if a file has another shape than the image, or is not aligned with it."""
    if grid.shape != of_image.shape:
        raise UserError(
            f"{name} has shape {grid.shape}, but image {image} has {of_image.shape}: resample them to one "
            "grid"
        )
    apart = misalignment(of_image, grid) if remedy else ""
    if apart:
        raise UserError(
            f"{name} is not aligned with image {image}: {apart}; it must be aligned with its image to within "
            f"0.1 voxel: resample it to the image's grid, or {remedy} if only the headers are wrong"
        )
