"""Compares the positions of the voxels of two files: how far they are apart, and why."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from .readers import Placement

_TOLERANCE = 0.1


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
