"""Reads one scan: its image and its raters' masks, which must have one shape and be aligned.

Two files are aligned if each voxel is at most 0.1 of the smallest spacing away from the same voxel of the
other file; it is enough to compare the corners. The tolerance accepts the rounding of float32, quaternions
and affines with four decimals, but not a shift of half a voxel. An axis of one voxel is not compared. Without
a position (pictures, or a NIfTI with neither qform nor sform) there is nothing to compare. If a NIfTI sets
both forms and they differ, it is enough that one of them agrees: after a registration, one form holds the
old position and the other the new one, and programs differ in which one they keep.
Left out: reordering axes to match the image, because the header that asks for it may be the wrong one; and
changes of intensity or size, which are the work of `data.prepare`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from .dicom_segmentation import read_segmentation
from .dicom_series import read_series
from .placement import placement_difference
from .raw import RawDataset, RawScan, natural_order
from .readers import ImageFile, MaskFile, Placement, read_image, read_mask


@dataclass(frozen=True)
class ScanArrays:
    """A scan that was read: raw intensities, and one class map for each of `raters`.

    image: uint8 if the files hold uint8, else float32; `space` has two axes, or three for a volume.
    spacing_mm: along the spatial axes; None if the file does not say, as a picture.
    affine: 4 x 4, if the format has one. truth: the true probability, if the source knows it.
    inputs: SHA-256 of each file, by its path in the raw folder.
    """

    image: UInt8[np.ndarray, "channels *space"] | Float32[np.ndarray, "channels *space"]
    masks: UInt8[np.ndarray, "R *space"]
    raters: tuple[str, ...]
    spacing_mm: tuple[float, ...] | None
    affine: np.ndarray | None = None
    truth: Float32[np.ndarray, "C *space"] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)


def read_scan(dataset: RawDataset, scan: RawScan) -> ScanArrays:
    """Image and masks of a scan; a ValueError names the file that is wrong, and says what to do."""
    if dataset.phantom is not None:
        case = dataset.phantom.make_case(scan.number)
        return ScanArrays(
            image=case.image[0].numpy(),
            masks=case.masks[0].numpy().astype(np.uint8),
            raters=dataset.raters,
            spacing_mm=None,
            truth=case.prob[0].numpy(),
        )
    remedy = "" if dataset.options.ignore_placement else "use --ignore-placement"
    if dataset.class_of_label is not None:
        return _read_dicom(dataset, scan, dataset.class_of_label)
    image = read_channels(
        scan.image, num_axes=dataset.num_axes, num_channels=len(dataset.channels), remedy=remedy
    )
    masks = {}
    for rater, path in scan.masks.items():
        mask = read_mask(path, num_axes=dataset.num_axes, class_of_value=dataset.class_of_value)
        _check_aligned(
            f"mask {path}", mask.classes.shape, mask.placements, image, scan.image[0], remedy=remedy
        )
        masks[rater] = mask
    return _scan_arrays(dataset, scan, image, masks)


def _read_dicom(dataset: RawDataset, scan: RawScan, class_of_label: Mapping[str, int]) -> ScanArrays:
    if dataset.options.ignore_placement:
        raise ValueError("source dicom puts masks where their positions say: leave out --ignore-placement")
    image = read_series(scan.image)
    masks = {rater: read_segmentation(path, image, class_of_label) for rater, path in scan.masks.items()}
    return _scan_arrays(dataset, scan, image, masks)


def _scan_arrays(
    dataset: RawDataset, scan: RawScan, image: ImageFile, masks: Mapping[str, MaskFile]
) -> ScanArrays:
    raters = tuple(sorted(masks, key=natural_order))
    digests = dict(zip(scan.image, image.sha256, strict=True))
    digests |= {scan.masks[rater]: masks[rater].sha256 for rater in raters}
    return ScanArrays(
        image=image.values,
        masks=np.stack([masks[rater].classes for rater in raters]),
        raters=raters,
        spacing_mm=image.spacing_mm,
        affine=image.affine,
        inputs={path.relative_to(dataset.root).as_posix(): digest for path, digest in digests.items()},
    )


def read_channels(paths: Sequence[Path], *, num_axes: int, num_channels: int, remedy: str) -> ImageFile:
    """The image in one file, or in one file per channel; a ValueError if these are not on one grid.

    The position, spacing and affine are those of the first file.
    remedy: what a user can do if only the headers are wrong; "" does not compare positions.
    """
    if len(paths) not in (1, num_channels):
        raise ValueError(
            f"the image {paths[0]}, ... has {len(paths)} files, but the dataset has {num_channels} channels"
        )
    channels_per_file = num_channels if len(paths) == 1 else 1
    images = [read_image(path, num_axes=num_axes, num_channels=channels_per_file) for path in paths]
    first = images[0]
    if len(images) == 1:
        return first
    for path, image in zip(paths[1:], images[1:], strict=True):
        _check_aligned(
            f"image {path}", image.values.shape[1:], image.placements, first, paths[0], remedy=remedy
        )
    # uint8 and float32 together become float32
    values = np.concatenate([image.values for image in images])
    return replace(first, values=values, sha256=tuple(digest for image in images for digest in image.sha256))


def _check_aligned(
    name: str,
    space: tuple[int, ...],
    placements: Sequence[Placement],
    image: ImageFile,
    image_path: Path,
    *,
    remedy: str,
) -> None:
    """A ValueError if a file has another shape than the image, or is not aligned with it."""
    expected = image.values.shape[1:]
    if space != expected:
        raise ValueError(
            f"{name} has shape {space}, but image {image_path} has {expected}: resample them to one grid"
        )
    if not remedy:
        return
    differences = [
        placement_difference(of_image, of_file, space)
        for of_image in image.placements
        for of_file in placements
    ]
    if differences and all(differences):
        raise ValueError(
            f"{name} is not aligned with image {image_path}: {differences[0]}; it must be aligned with its "
            f"image to within 0.1 voxel: resample it to the image's grid, or {remedy} if only the headers "
            "are wrong"
        )
