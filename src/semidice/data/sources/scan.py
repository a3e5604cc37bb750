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
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from .raw import RawDataset, RawScan, natural_order
from .readers import ImageFile, Placement, read_image, read_mask

_TOLERANCE = 0.1


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
    image = read_channels(
        scan.image, num_axes=dataset.num_axes, num_channels=len(dataset.channels), remedy=remedy
    )
    inputs = dict(zip(scan.image, image.sha256, strict=True))
    raters = tuple(sorted(scan.masks, key=natural_order))
    masks = []
    for rater in raters:
        path = scan.masks[rater]
        mask = read_mask(path, num_axes=dataset.num_axes, class_of_value=dataset.class_of_value)
        _check_aligned(
            f"mask {path}", mask.classes.shape, mask.placements, image, scan.image[0], remedy=remedy
        )
        inputs[path] = mask.sha256
        masks.append(mask.classes)
    return ScanArrays(
        image=image.values,
        masks=np.stack(masks),
        raters=raters,
        spacing_mm=image.spacing_mm,
        affine=image.affine,
        inputs={path.relative_to(dataset.root).as_posix(): digest for path, digest in inputs.items()},
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


def placement_difference(image: Placement, other: Placement, space: Sequence[int]) -> str:
    """The largest distance between the same voxels of two files, and its causes; "" if they are aligned.

    space: lengths of the axes, the same in both files.

    >>> image = np.array([[0.7, 0, 0], [0, 0.7, 0], [0, 0, 5]])
    >>> placement_difference(image, image + [0, 0, 1.4], (64, 64))
    'voxels are up to 2.42 mm apart, it is moved by (1.4, 1.4, 1.4) mm'
    """
    axes = [axis for axis, length in enumerate(space) if length > 1]
    last = np.array([space[axis] - 1 for axis in axes])
    steps, other_steps = image[:, axes], other[:, axes]
    shift = other[:, -1] - image[:, -1]
    corners = np.array(list(product((0, 1), repeat=len(axes)))) * last
    apart = np.linalg.norm(shift + corners @ (other_steps - steps).T, axis=1).max()
    tolerance = _TOLERANCE * _lengths(steps).min(initial=np.inf)
    if apart <= tolerance:
        return ""
    reordered, words = _reordered(steps, other_steps, axes)
    turned = np.linalg.norm(_directions(reordered) - _directions(steps), axis=0)
    if (turned * _lengths(steps) * last > tolerance).any():
        degrees = np.degrees(2 * np.arcsin(turned.max() / 2))
        words.append(f"its axes are turned by up to {degrees:.2g} degrees")
    moved = "it"
    if words:
        # a flipped axis starts where the other one ends, so only the centre shows a shift
        moved, shift = "its centre", shift + (other_steps - steps) @ last / 2
    if (np.abs(_lengths(reordered) - _lengths(steps)) * last > tolerance).any():
        moved = moved if words else "its first voxel"
        words.append(f"its spacing is {_spacing(reordered)} mm, not {_spacing(steps)} mm")
    if np.linalg.norm(shift) > tolerance:
        vector = ", ".join("0" if abs(part) < tolerance / 10 else _short(part) for part in shift)
        words.append(f"{moved} is moved by ({vector}) mm")
    return ", ".join([f"voxels are up to {_short(apart)} mm apart", *words])


def _reordered(steps: np.ndarray, other: np.ndarray, axes: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """The other file's steps in the order and direction of the image's, and a description of the change."""
    cosines = _directions(steps).T @ _directions(other)
    numbers = np.arange(len(axes))
    order = np.abs(cosines).argmax(axis=0)
    if len(set(order)) < len(order):
        # turned so far that two axes are nearest to the same axis of the image
        order = numbers
    words = []
    if (order != numbers).any():
        along = ", ".join(str(axes[number]) for number in order)
        words.append(f"its axes {', '.join(map(str, axes))} run along axes {along} of the image")
    signs = np.where(cosines[order, numbers] < 0, -1, 1)
    flipped = [str(axis) for axis, sign in zip(axes, signs, strict=True) if sign < 0]
    if flipped:
        which = f"axis {flipped[0]} is" if len(flipped) == 1 else f"axes {', '.join(flipped)} are"
        words.append(f"its {which} flipped")
    reordered = np.empty_like(other)
    reordered[:, order] = other * signs
    return reordered, words


def _lengths(steps: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.linalg.norm(steps, axis=0)
    return lengths


def _directions(steps: np.ndarray) -> np.ndarray:
    # a damaged affine may have steps of length 0
    directions: np.ndarray = steps / np.maximum(_lengths(steps), np.finfo(np.float64).tiny)
    return directions


def _spacing(steps: np.ndarray) -> str:
    return " x ".join(f"{length:.6g}" for length in _lengths(steps))


def _short(number: float) -> str:
    """Three significant digits, without a power of ten for lengths that occur.

    >>> _short(-1043.7), _short(2.5)
    ('-1040', '2.5')
    """
    return f"{float(f'{number:.3g}'):g}"
