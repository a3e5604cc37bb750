"""Distances between surfaces in millimetres, through MONAI: HD95 and surface Dice.

A surface is the mask's voxels that have a neighbour (6 in 3D, 4 in 2D) outside it; beyond the image's border
is outside. HD95 is the larger of the two directed 95th percentiles of the distance from one surface to the
other; surface Dice is the share of both surfaces' voxels within a tolerance of the other (Nikolov et al.,
2021, with voxels for surface elements).

    class in            HD95                                   surface Dice
    neither             0                                      1          (`empty`)
    one of the two      the diagonal of the image, in mm       0          (HD95: `missed`)

MONAI gives NaN or infinity there, and NaN leaves a mean, so that a method would not be charged for what it
misses. Voxels outside `valid` count as background of both. Needs the extra: pip install 'semidice[monai]'.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .checks import check_hard_target, check_scored, nan_without_voxels
from .decision import Decision, chosen_rule, decided_masks


def hausdorff_error_mm(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    percentile: float = 95.0,
    empty: float = 0.0,
    missed: float | None = None,
    decision: Decision | None = None,
    threshold: float = 0.5,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Float[Tensor, "N C"]:
    """Hausdorff distance in mm at a percentile (HD95) of each case and class, of decided masks.

    The target is hard. spacing_mm: one side a space axis, or (N, axes). missed: the distance where only one
    of the two has the class; None is the image's diagonal, the farthest that two voxels can be. Options of
    the decision as in `dice_score`.
    """
    compute = _monai("compute_hausdorff_distance")

    def distance(mask: Tensor, reference: Tensor, spacing: list[float]) -> Tensor:
        if not bool(mask.any() or reference.any()):
            return torch.tensor(empty)
        if not bool(mask.any() and reference.any()):
            sides = torch.tensor(spacing) * torch.tensor([side - 1 for side in mask.shape[2:]])
            return sides.norm() if missed is None else torch.tensor(missed)
        found: Tensor = compute(
            mask, reference, include_background=True, percentile=percentile, spacing=spacing
        )
        return found.squeeze()

    return _each_class(
        "hausdorff_error_mm", distance, prob, target, spacing_mm, decision, threshold, valid, ignore_index
    )


def surface_dice_score(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    tolerance_mm: float = 1.0,
    empty: float = 1.0,
    decision: Decision | None = None,
    threshold: float = 0.5,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Float[Tensor, "N C"]:
    """Share of both surfaces within `tolerance_mm` of the other, of each case and class; 0 if one has none.

    tolerance_mm: what two careful raters differ by; 0 or more. Other options as in `hausdorff_error_mm`.
    """
    compute = _monai("compute_surface_dice")
    if not 0 <= tolerance_mm < float("inf"):
        raise ValueError(f"tolerance_mm must be 0 mm or more; got {tolerance_mm}")

    def share(mask: Tensor, reference: Tensor, spacing: list[float]) -> Tensor:
        if not bool(mask.any() or reference.any()):
            return torch.tensor(empty)
        if not bool(mask.any() and reference.any()):
            return torch.tensor(0.0)
        found: Tensor = compute(mask, reference, [tolerance_mm], include_background=True, spacing=spacing)
        return found.squeeze()

    return _each_class(
        "surface_dice_score", share, prob, target, spacing_mm, decision, threshold, valid, ignore_index
    )


def _each_class(
    metric: str,
    measure: Callable[[Tensor, Tensor, list[float]], Tensor],
    prob: Tensor,
    target: Tensor,
    spacing_mm: Sequence[float] | Tensor,
    decision: Decision | None,
    threshold: float,
    valid: Tensor | None,
    ignore_index: int | None,
) -> Float[Tensor, "N C"]:
    valid = check_scored(prob, target, valid=valid, ignore_index=ignore_index)
    if prob.ndim not in (4, 5):
        raise ValueError(f"{metric} needs images or volumes, (N, C, *space); got {tuple(prob.shape)}")
    rule = chosen_rule(decision, prob.shape[1])
    check_hard_target(metric, target, one_hot=rule == "argmax", valid=valid)
    spacing = _spacing(metric, spacing_mm, prob)
    scores = torch.empty(prob.shape[:2], device=prob.device)
    for channel, mask in enumerate(decided_masks(prob, rule=rule, threshold=threshold)):
        reference = target[:, channel] == 1 if target.is_floating_point() else target == channel
        if valid is not None:
            mask, reference = mask & valid, reference & valid
        for case in range(len(prob)):
            # MONAI wants a case axis and a channel axis, and measures on the CPU or with cuCIM
            one = (mask[case][None, None], reference[case][None, None])
            scores[case, channel] = measure(*one, spacing[case])
    return nan_without_voxels(scores, valid)


def _spacing(metric: str, spacing_mm: Sequence[float] | Tensor, prob: Tensor) -> list[list[float]]:
    spacing = torch.as_tensor(spacing_mm, dtype=torch.float64).cpu()
    axes = prob.ndim - 2
    if tuple(spacing.shape) not in ((axes,), (len(prob), axes)) or not bool((spacing > 0).all()):
        raise ValueError(
            f"{metric}: spacing_mm needs {axes} positive sides of a voxel, or ({len(prob)}, {axes}), "
            f"one row a case; got {spacing.tolist()}"
        )
    rows: list[list[float]] = spacing.expand(len(prob), axes).tolist()
    return rows


def _monai(name: str) -> Any:
    """MONAI's function of that name, without its warnings of what it passes to itself."""
    try:
        function = getattr(importlib.import_module("monai.metrics"), name)
    except ImportError:
        raise ImportError("surface distances need MONAI: pip install 'semidice[monai]'") from None

    def quiet(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*always_return_as_numpy.*", FutureWarning)
            return function(*arguments, **options)

    return quiet
