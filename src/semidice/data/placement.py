"""Where the voxels of a file lie in space, and in what way those of another file lie elsewhere.

A placement is the part of a NIfTI's affine that belongs to the axes of space: the step along each of them
and the position of the first voxel, in mm. Two are the same if no voxel is further from its fellow than a
tenth of the smallest spacing, which is so if it is so for the corners: float32, quaternions and affines of
four decimals pass, half a voxel does not. Nothing is compared along an axis of one voxel.
Left out: bringing axes into the image's order. A header that asks for it may be what is wrong.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from jaxtyping import Float64

Placement = Float64[np.ndarray, "3 steps_and_origin"]
_TOLERANCE = 0.1


def placement_difference(image: Placement, other: Placement, space: Sequence[int]) -> str:
    """How far another file's voxels are from the image's and what differs, in words; "" if they are the same.

    space: lengths of the axes, which both have.

    >>> here = np.array([[0.7, 0, 0], [0, 0.7, 0], [0, 0, 5]])
    >>> placement_difference(here, here + [0, 0, 1.4], (64, 64))
    'voxels are up to 2.42 mm apart, it is moved by (1.4, 1.4, 1.4) mm'
    """
    axes = [axis for axis, length in enumerate(space) if length > 1]
    last = np.array([space[axis] - 1 for axis in axes])
    here, there = image[:, axes], other[:, axes]
    shift = other[:, -1] - image[:, -1]
    corners = np.array(list(product((0, 1), repeat=len(axes)))) * last
    apart = np.linalg.norm(shift + corners @ (there - here).T, axis=1).max()
    tolerance = _TOLERANCE * _lengths(here).min(initial=np.inf)
    if apart <= tolerance:
        return ""
    reordered, words = _in_order_of(here, there, axes)
    turned = np.linalg.norm(_directions(reordered) - _directions(here), axis=0)
    if (turned * _lengths(here) * last > tolerance).any():
        degrees = np.degrees(2 * np.arcsin(turned.max() / 2))
        words.append(f"its axes are turned by up to {degrees:.2g} degrees")
    what = "it"
    if words:
        # a flipped axis begins where the other ends, so only the middle says whether it is moved as well
        what, shift = "its centre", shift + (there - here) @ last / 2
    if (np.abs(_lengths(reordered) - _lengths(here)) * last > tolerance).any():
        what = what if words else "its first voxel"
        words.append(f"its spacing is {_spacing(reordered)} mm, not {_spacing(here)} mm")
    if np.linalg.norm(shift) > tolerance:
        vector = ", ".join("0" if abs(part) < tolerance / 10 else _short(part) for part in shift)
        words.append(f"{what} is moved by ({vector}) mm")
    return ", ".join([f"voxels are up to {_short(apart)} mm apart", *words])


def _in_order_of(here: np.ndarray, there: np.ndarray, axes: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """The steps `there` in the order and direction of those they run along, and what was done to them."""
    cosines = _directions(here).T @ _directions(there)
    numbers = np.arange(len(axes))
    order = np.abs(cosines).argmax(axis=0)
    if len(set(order)) < len(order):
        # turned so far that two of them are nearest to one
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
    reordered = np.empty_like(there)
    reordered[:, order] = there * signs
    return reordered, words


def _lengths(steps: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.linalg.norm(steps, axis=0)
    return lengths


def _directions(steps: np.ndarray) -> np.ndarray:
    # a damaged affine may have steps of no length
    directions: np.ndarray = steps / np.maximum(_lengths(steps), np.finfo(np.float64).tiny)
    return directions


def _spacing(steps: np.ndarray) -> str:
    return " x ".join(f"{length:.6g}" for length in _lengths(steps))


def _short(number: float) -> str:
    """Three digits, never as a power of ten for what can be met with.

    >>> _short(-1043.7), _short(2.5)
    ('-1040', '2.5')
    """
    return f"{float(f'{number:.3g}'):g}"
