"""Volumes in millilitres, of a decided mask or expected from probabilities.

A volume is a number of voxels, or a sum of probabilities, times the volume of a voxel.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_choice, check_prediction, nan_without_voxels, read_numbers
from .masks import Decision, chosen_rule, decided_masks

VolumeOf = Literal["mask", "probability"]


def volume_ml(
    prob: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    of: VolumeOf = "mask",
    decision: Decision | None = None,
    threshold: float = 0.5,
    valid: Tensor | None = None,
) -> Float[Tensor, "N C"]:
    """Volume of each case and class in ml: of the decided mask, or expected from the probabilities.

    spacing_mm: the three sides of a voxel, or (N, 3), one triple per case; a 2D image needs its slice
    thickness. of: "mask" counts decided voxels, "probability" sums prob, which is unbiased if prob is
    calibrated. A case without a valid voxel has NaN.

    >>> float(volume_ml(torch.full((1, 1, 10, 10, 10), 0.4), spacing_mm=(1, 1, 2), of="probability"))
    0.800000011920929
    """
    check_choice("of", of, VolumeOf)
    check_prediction(prob)
    per_voxel = voxel_ml(spacing_mm, num_cases=len(prob)).to(prob.device)
    masses: Iterable[Tensor] = prob.unbind(1)
    if of == "mask":
        masses = decided_masks(prob, rule=chosen_rule(decision, prob.shape[1]), threshold=threshold)
    voxels = [sum_voxels(mass, valid) for mass in masses]
    return nan_without_voxels((torch.stack(voxels, 1) * per_voxel).float(), valid)


def sum_voxels(mass: Tensor, valid: Tensor | None) -> Float[Tensor, " N"]:
    """Float64 sum over the valid voxels of a mask, or of probabilities, (N, *space)."""
    mass = mass if valid is None else torch.where(valid, mass, 0)
    return mass.reshape(len(mass), -1).sum(1, dtype=torch.float64)


def voxel_ml(spacing_mm: Sequence[float] | Tensor, *, num_cases: int = 1) -> Float[Tensor, "N 1"]:
    """Volume of a voxel in ml, float64, of each case, from three sides or one triple per case.

    >>> float(voxel_ml((1.0, 1.0, 5.0)))
    0.005
    """
    spacing = read_numbers("spacing_mm", spacing_mm)
    is_side = (spacing > 0) & spacing.isfinite()
    if tuple(spacing.shape) not in ((3,), (num_cases, 3)) or not bool(is_side.all()):
        raise ValueError(
            f"spacing_mm needs three positive sides of a voxel, or (N, 3) = ({num_cases}, 3); got "
            f"{spacing.tolist()}: give a 2D image its slice thickness as the third"
        )
    return (spacing.prod(-1) / 1000).expand(num_cases).unsqueeze(1)
