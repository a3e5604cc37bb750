"""Where voxels are: the grid of an image, its slices, and how far two grids are apart.

Every record that has voxels has a Grid: a file, a scan, an input, an output. Axes are those of the array.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float64

# a step along each spatial axis, and the first voxel, in mm
Placement = Float64[np.ndarray, "3 steps_and_origin"]
# of the smallest spacing. It accepts the rounding of float32, of quaternions and of affines with four
# decimals, but not a shift of half a voxel
_TOLERANCE = 0.1


@dataclass(frozen=True, eq=False)
class Grid:
    """Spatial axes of an array. spacing_mm: along exactly these axes; None if it is not known.

    affines: the positions that a header declares, the one that is used first; none for a picture.
    """

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...] | None = None
    affines: tuple[Placement, ...] = ()

    def slice_of(self, axis: int) -> tuple["Grid", float | None]:
        """The grid of the first slice along an axis, and the distance of slices in mm."""
        rest = [number for number in range(len(self.shape)) if number != axis]
        spacing = None if self.spacing_mm is None else tuple(self.spacing_mm[number] for number in rest)
        affines = tuple(affine[:, [*rest, -1]] for affine in self.affines)
        distance = None if self.spacing_mm is None else self.spacing_mm[axis]
        return Grid(tuple(self.shape[number] for number in rest), spacing, affines), distance

    def resized(self, shape: Sequence[int]) -> "Grid":
        """The grid with other numbers of voxels in the same extent: voxels tile it before and after."""
        ratio = np.divide(self.shape, shape)
        spacing = self.spacing_mm and tuple(
            side * old / new for side, old, new in zip(self.spacing_mm, self.shape, shape, strict=True)
        )
        affines = []
        for affine in self.affines:
            steps = affine[:, :-1] * ratio
            # the corner of the first voxel stays where it is
            origin = affine[:, -1:] + (steps - affine[:, :-1]).sum(1, keepdims=True) / 2
            affines.append(np.hstack([steps, origin]))
        return replace(self, shape=tuple(shape), spacing_mm=spacing, affines=tuple(affines))


def misalignment(image: Grid, other: Grid) -> str:
    """How the voxels of two grids of one shape are apart, and why; "" if any of their positions are aligned.

    Headers may declare two positions, and programs differ in which one they use: after a registration, one
    holds the old position and the other the new one.
    """
    pairs = product(image.affines, other.affines)
    differences = [placement_difference(one, another, image.shape) for one, another in pairs]
    return "" if "" in differences or not differences else differences[0]


def placement_difference(image: Placement, other: Placement, space: Sequence[int]) -> str:
    """The largest distance between the same voxels of two files, and its first cause; "" if they are aligned.

    space: lengths of the axes, the same in both files. An axis of one voxel is not compared.

    >>> image = np.array([[0.7, 0, 0], [0, 0.7, 0], [0, 0, 5]])
    >>> placement_difference(image, image + [0, 0, 1.4], (64, 64))
    'voxels are up to 2.42 mm apart, it is moved by (1.4, 1.4, 1.4) mm'
    """
    axes = [axis for axis, length in enumerate(space) if length > 1]
    last = np.array([space[axis] - 1 for axis in axes])
    steps, other_steps = image[:, axes], other[:, axes]
    shift = other[:, -1] - image[:, -1]
    # the corners are farthest apart
    corners = np.array(list(product((0, 1), repeat=len(axes)))) * last
    apart = np.linalg.norm(shift + corners @ (other_steps - steps).T, axis=1).max()
    lengths, other_lengths = np.linalg.norm(steps, axis=0), np.linalg.norm(other_steps, axis=0)
    tolerance = _TOLERANCE * lengths.min(initial=np.inf)
    if apart <= tolerance:
        return ""
    # a damaged affine may have steps of length 0
    smallest = np.finfo(np.float64).tiny
    cosines = (steps / np.maximum(lengths, smallest)).T @ (other_steps / np.maximum(other_lengths, smallest))
    if (np.abs(cosines).argmax(axis=0) != np.arange(len(axes))).any():
        cause = "its axes are in another order"
    elif (np.diag(cosines) < 0).any():
        cause = f"its axis {axes[int(np.diag(cosines).argmin())]} is flipped"
    elif (np.sqrt(2 * (1 - np.diag(cosines)).clip(0)) * lengths * last > tolerance).any():
        degrees = np.degrees(np.arccos(np.diag(cosines).clip(-1, 1))).max()
        cause = f"its axes are turned by up to {degrees:.2g} degrees"
    elif (np.abs(other_lengths - lengths) * last > tolerance).any():
        theirs, ours = (" x ".join(f"{length:.6g}" for length in each) for each in (other_lengths, lengths))
        cause = f"its spacing is {theirs} mm, not {ours} mm"
    else:
        vector = ", ".join("0" if abs(part) < tolerance / 10 else f"{part:.4g}" for part in shift)
        cause = f"it is moved by ({vector}) mm"
    return f"voxels are up to {apart:.3g} mm apart, {cause}"
