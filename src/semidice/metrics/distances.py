"""Distances between surfaces in millimetres: HD95 and surface Dice.

The surface of a mask is its voxels with a neighbour (6 in 3D, 4 in 2D) outside the mask or outside the image.
HD95 is the larger of the two directed 95th percentiles of the distance from one surface to the other. Surface
Dice is the share of the voxels of both surfaces within a tolerance of the other (Nikolov et al., 2021, with
voxels as surface elements).

    class in            HD95                                   surface Dice
    neither             0                                      1          (`empty`)
    one of the two      the diagonal of the image, in mm       0

A mean without these cases would not penalise a method for what it misses. Voxels outside `valid` count as
background of both. Distances are float32, so that a distance of exactly the tolerance is within it.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import nan_without_voxels, read_numbers
from ..options import Bounds, Weight, check_value
from .checks import check_empty, check_scored
from .scores import decided_channels


def hausdorff_error_mm(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    percentile: float = 95.0,
    empty: float = 0.0,
    **options: Any,
) -> Float[Tensor, "N C"]:
    """Hausdorff distance in mm at a percentile (HD95) of each case and class, of decided masks.

    The target is hard. spacing_mm: one side of a voxel per axis of space, or (N, axes). options: valid and
    ignore_index as in `dice_score`.

    >>> prob, target = torch.eye(5)[None, :1, :, None], torch.eye(5)[None, 3:4, :, None]
    >>> float(hausdorff_error_mm(prob, target, spacing_mm=(2, 1)))
    6.0
    """
    check_value(Annotated[float, Bounds(above=0, at_most=100)], percentile=percentile)

    def largest(of_mask: np.ndarray, of_reference: np.ndarray) -> float:
        return float(max(np.percentile(part, percentile) for part in (of_mask, of_reference)))

    return _each_class(
        "hausdorff_error_mm", prob, target, largest, spacing_mm, empty=empty, missed=None, **options
    )


def surface_dice_score(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    tolerance_mm: float = 1.0,
    empty: float = 1.0,
    **options: Any,
) -> Float[Tensor, "N C"]:
    """Share of both surfaces within `tolerance_mm` of the other, of each case and class; 0 if one has none.

    tolerance_mm: the difference between two careful raters; 0 or more. Other options as in
    `hausdorff_error_mm`.
    """
    check_value(Weight, tolerance_mm=tolerance_mm)

    def share(of_mask: np.ndarray, of_reference: np.ndarray) -> float:
        return float((np.concatenate([of_mask, of_reference]) <= np.float32(tolerance_mm)).mean())

    return _each_class(
        "surface_dice_score", prob, target, share, spacing_mm, empty=empty, missed=0.0, **options
    )


def _each_class(
    metric: str,
    prob: Tensor,
    target: Tensor,
    score_of: Callable[[np.ndarray, np.ndarray], float],
    spacing_mm: Sequence[float] | Tensor,
    *,
    empty: float,
    missed: float | None,
    **options: Any,
) -> Float[Tensor, "N C"]:
    """missed: the score where one of the two has the class; None is the diagonal of the image."""
    check_empty(empty)
    target, valid = check_scored(prob, target, hard=metric, **options)
    if prob.ndim not in (4, 5):
        raise ValueError(f"{metric} needs images or volumes, (N, C, *space); got {tuple(prob.shape)}")
    spacing, axes = read_numbers("spacing_mm", spacing_mm).cpu(), prob.ndim - 2
    fits = tuple(spacing.shape) in ((axes,), (len(prob), axes))
    if not fits or not bool(((spacing > 0) & spacing.isfinite()).all()):
        raise ValueError(
            f"{metric}: spacing_mm needs {axes} positive sides of a voxel, or ({len(prob)}, {axes}), "
            f"one row per case; got {spacing.tolist()}"
        )
    spacing = spacing.expand(len(prob), axes)
    scores = torch.empty(prob.shape[:2])
    for channel, mask in enumerate(decided_channels(prob)):
        reference = target[:, channel] == 1 if target.is_floating_point() else target == channel
        if valid is not None:
            mask, reference = mask & valid, reference & valid
        for case, sides in enumerate(spacing):
            pair = mask[case].cpu().numpy(), reference[case].cpu().numpy()
            num_with_class = sum(bool(each.any()) for each in pair)
            if num_with_class == 2:
                score = score_of(*_surface_distances(*pair, sides.double().numpy()))
            elif num_with_class == 0:
                score = empty
            else:
                diagonal = (sides.float() * (torch.tensor(mask.shape[1:]) - 1)).norm()
                score = float(diagonal) if missed is None else missed
            scores[case, channel] = score
    return nan_without_voxels(scores.to(prob.device), valid)


def _surface_distances(
    mask: np.ndarray, reference: np.ndarray, sides: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Float32 distances from each surface voxel of a mask to the other surface, and the other way round."""
    from scipy.ndimage import binary_erosion
    from scipy.spatial import KDTree

    points = []
    for region in (mask, reference):
        # erosion takes most of the time, so it is done in the smallest box alone
        box = tuple(
            slice(int(kept[0]), int(kept[-1]) + 1)
            for axis in range(region.ndim)
            for kept in [np.flatnonzero(region.any(tuple(set(range(region.ndim)) - {axis})))]
        )
        start = np.array([each.start for each in box])
        surface = region[box] & ~binary_erosion(region[box])
        points.append((np.argwhere(surface) + start) * sides)
    there, back = (
        KDTree(other, leafsize=32).query(each)[0].astype(np.float32)
        for each, other in (points, reversed(points))
    )
    return there, back
