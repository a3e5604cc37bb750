"""Distances between surfaces in millimetres, through MONAI: HD95 and surface Dice.

The surface of a mask is its voxels with a neighbour (6 in 3D, 4 in 2D) outside the mask or outside the image.
HD95 is the larger of the two directed 95th percentiles of the distance from one surface to the other. Surface
Dice is the share of the voxels of both surfaces within a tolerance of the other (Nikolov et al., 2021, with
voxels as surface elements).

    class in            HD95                                   surface Dice
    neither             0                                      1          (`empty`)
    one of the two      the diagonal of the image, in mm       0          (HD95: `missed`)

MONAI returns NaN or infinity there; a mean without NaN would not penalise a method for what it misses. Voxels
outside `valid` count as background of both. Needs the extra: pip install 'semidice[monai]'.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_number, nan_without_voxels, read_numbers
from ..decisions.masks import PlainRule, chosen_rule, decided_masks
from .checks import check_hard_target, check_rule_numbers, check_scored


def hausdorff_error_mm(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    percentile: float = 95.0,
    empty: float = 0.0,
    missed: float | None = None,
    decision: PlainRule | None = None,
    threshold: float = 0.5,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Float[Tensor, "N C"]:
    """Hausdorff distance in mm at a percentile (HD95) of each case and class, of decided masks.

    The target is hard. spacing_mm: one side per axis of space, or (N, axes). missed: the distance where only
    one of the two has the class; None is the diagonal of the image, the largest possible distance. Other
    options as in `dice_score`.
    """
    check_number(percentile=percentile)
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be above 0 and at most 100; got {percentile}")
    compute = _monai("compute_hausdorff_distance")
    return _each_class(
        "hausdorff_error_mm", prob, target, partial(compute, percentile=percentile),
        spacing_mm=spacing_mm, empty=empty, missed=missed,
        decision=decision, threshold=threshold, valid=valid, ignore_index=ignore_index,
    )  # fmt: skip


def surface_dice_score(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    tolerance_mm: float = 1.0,
    empty: float = 1.0,
    decision: PlainRule | None = None,
    threshold: float = 0.5,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Float[Tensor, "N C"]:
    """Share of both surfaces within `tolerance_mm` of the other, of each case and class; 0 if one has none.

    tolerance_mm: the difference between two careful raters; 0 or more. Other options as in
    `hausdorff_error_mm`.
    """
    compute = _monai("compute_surface_dice")
    check_number(tolerance_mm=tolerance_mm)
    if tolerance_mm < 0:
        raise ValueError(f"tolerance_mm must be 0 mm or more; got {tolerance_mm}")
    return _each_class(
        "surface_dice_score", prob, target, partial(compute, class_thresholds=[tolerance_mm]),
        spacing_mm=spacing_mm, empty=empty, missed=0.0,
        decision=decision, threshold=threshold, valid=valid, ignore_index=ignore_index,
    )  # fmt: skip


def _each_class(
    metric: str,
    prob: Tensor,
    target: Tensor,
    compute: Callable[..., Tensor],
    *,
    spacing_mm: Sequence[float] | Tensor,
    empty: float,
    missed: float | None,
    decision: PlainRule | None,
    threshold: float,
    valid: Tensor | None,
    ignore_index: int | None,
) -> Float[Tensor, "N C"]:
    check_rule_numbers(threshold=threshold, empty=empty)
    target, valid = check_scored(prob, target, valid=valid, ignore_index=ignore_index)
    if prob.ndim not in (4, 5):
        raise ValueError(f"{metric} needs images or volumes, (N, C, *space); got {tuple(prob.shape)}")
    rule = chosen_rule(decision, prob.shape[1])
    check_hard_target(metric, target, one_hot=rule == "argmax", valid=valid)
    spacing = read_numbers("spacing_mm", spacing_mm).cpu()
    axes = prob.ndim - 2
    if tuple(spacing.shape) not in ((axes,), (len(prob), axes)) or not bool(
        ((spacing > 0) & spacing.isfinite()).all()
    ):
        raise ValueError(
            f"{metric}: spacing_mm needs {axes} positive sides of a voxel, or ({len(prob)}, {axes}), "
            f"one row per case; got {spacing.tolist()}"
        )
    spacing = spacing.expand(len(prob), axes)
    scores = torch.empty(prob.shape[:2], device=prob.device)
    for channel, mask in enumerate(decided_masks(prob, rule=rule, threshold=threshold)):
        reference = target[:, channel] == 1 if target.is_floating_point() else target == channel
        if valid is not None:
            mask, reference = mask & valid, reference & valid
        for case in range(len(prob)):
            sides = spacing[case]
            num_with_class = int(mask[case].any()) + int(reference[case].any())
            if num_with_class == 2:
                # MONAI needs a case axis and a channel axis
                pair = mask[case][None, None], reference[case][None, None]
                score = compute(*pair, include_background=True, spacing=sides.tolist()).squeeze()
            elif num_with_class == 0:
                score = torch.tensor(empty)
            elif missed is None:
                score = (sides.float() * (torch.tensor(mask.shape[1:]) - 1)).norm()
            else:
                score = torch.tensor(missed)
            scores[case, channel] = score
    return nan_without_voxels(scores, valid)


def _monai(name: str) -> Any:
    """The function of `monai.metrics`, without the deprecation warnings of MONAI about its own calls."""
    try:
        function = getattr(importlib.import_module("monai.metrics"), name)
    except ImportError:
        message = "surface distances need MONAI: pip install 'semidice[monai]'"
        raise ModuleNotFoundError(message, name="monai") from None

    def quiet(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*always_return_as_numpy.*", FutureWarning)
            return function(*arguments, **options)

    return quiet
