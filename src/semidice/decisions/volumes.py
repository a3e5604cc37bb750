"""Volumes in millilitres: of a mask, expected from probabilities, and their distribution.

A volume is a number of voxels, or a sum of probabilities, times the volume of a voxel. The distribution is
that of nested raters, who differ by one shared level t ~ U(0, 1): a rater marks {p >= t} and has the volume

    V = |{p >= t}|,    P(V <= k) = 1 - p_(k+1),    p_(1) >= p_(2) >= ... the sorted probabilities.

So its q-quantile is the number of voxels with p > 1 - q, and its mean is the sum of p. Each channel is a
distribution of its own, of this class against all others. docs/theory.md, section 8, has the proofs.
Left out: scores of the distribution (`metrics.volumes`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..arrays import check_prob, check_valid, describe, nan_without_voxels, read_numbers

# three sides of a voxel, or (N, 3), one triple per case; a 2D image needs its slice thickness
Spacing = Sequence[float] | Tensor


def volume_ml(
    mask_or_prob: Tensor, *, spacing_mm: Spacing, valid: Tensor | None = None
) -> Float[Tensor, "N C"]:
    """Volume of each case and class in ml: a bool mask is counted, probabilities are summed.

    mask_or_prob: (N, C, *space). The sum of probabilities is the expected volume, unbiased if they are
    calibrated. spacing_mm: the three sides of a voxel, or (N, 3), one triple per case; a 2D image needs its
    slice thickness. A case without a valid voxel has NaN.

    >>> prob = torch.full((1, 1, 10, 10, 10), 0.4)
    >>> float(volume_ml(prob, spacing_mm=(1, 1, 2))), float(volume_ml(prob > 0.3, spacing_mm=(1, 1, 2)))
    (0.800000011920929, 2.0)
    """
    check_prob(mask_or_prob, valid)
    per_voxel = voxel_ml(spacing_mm, num_cases=len(mask_or_prob)).to(mask_or_prob.device)
    voxels = [sum_voxels(mass, valid) for mass in mask_or_prob.unbind(1)]
    return nan_without_voxels((torch.stack(voxels, 1) * per_voxel).float(), valid)


def volume_quantiles(
    prob: Tensor, levels: Sequence[float], *, spacing_mm: Spacing, valid: Tensor | None = None
) -> Float64[Tensor, "N C L"]:
    """Quantiles of the volume of each case and class in ml, if raters are nested; exact.

    levels: of the quantiles, from 0 to 1. The quantile q is the smallest volume that is not exceeded with
    probability q or more. spacing_mm as in `volume_ml`. A case without a valid voxel has NaN.

    >>> prob = torch.tensor([[[1.0, 0.75, 0.25, 0.0]]])
    >>> volume_quantiles(prob, [0.25, 0.5, 0.9], spacing_mm=(10, 10, 10))
    tensor([[[1., 2., 3.]]], dtype=torch.float64)
    """
    check_prob(prob, valid)
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"levels must be one or more numbers from 0 to 1; got {tuple(levels)}")
    per_voxel = voxel_ml(spacing_mm, num_cases=len(prob)).to(prob.device)
    # 1 - 0.9 is 0.1 less a rounding error, which must not decide about a voxel with p = 0.1
    cuts = [round(1 - level, 12) for level in levels]
    counts = [torch.stack([sum_voxels(p > cut, valid) for cut in cuts], 1) for p in prob.unbind(1)]
    return nan_without_voxels(torch.stack(counts, 1) * per_voxel.unsqueeze(2), valid)


def volume_interval(
    prob: Tensor, level: float = 0.9, *, spacing_mm: Spacing, valid: Tensor | None = None
) -> tuple[Float64[Tensor, "N C"], Float64[Tensor, "N C"]]:
    """The two ends, in ml, of the interval that has the volume of a nested rater with probability `level`.

    As much probability, (1 - level) / 2 or less, lies below it as above. `conformal` corrects it with cases
    whose raters are known.

    >>> low, high = volume_interval(torch.linspace(0, 1, 101).view(1, 1, 101), spacing_mm=(10, 10, 10))
    >>> float(low), float(high)
    (5.0, 95.0)
    """
    check_level(level)
    ends = volume_quantiles(prob, [(1 - level) / 2, (1 + level) / 2], spacing_mm=spacing_mm, valid=valid)
    return ends[..., 0], ends[..., 1]


def check_level(level: float) -> None:
    """Raise unless `level` can be the probability of an interval."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, such as 0.9; got {level}")


def rater_volumes_ml(
    masks: Tensor,
    *,
    num_channels: int,
    spacing_mm: Spacing,
    present: Tensor | None = None,
    valid: Tensor | None = None,
) -> Float64[Tensor, "N C R"]:
    """Volume in ml of each rater's mask (N, R, *space), for each channel of a prediction.

    masks: bool, or class maps of integers. num_channels: 1 is the foreground, class 1; channel c of several
    is class c. An absent rater has NaN, and so has a case without a valid voxel.

    >>> masks = torch.tensor([[[0, 1, 1], [0, 0, 2]]])
    >>> rater_volumes_ml(masks, num_channels=3, spacing_mm=(10, 10, 10))[0].tolist()
    [[1.0, 2.0], [2.0, 0.0], [0.0, 1.0]]
    """
    if not isinstance(masks, Tensor) or masks.ndim < 2 or masks.is_floating_point() or masks.is_complex():
        raise ValueError(f"masks must be bool or integers (N, R, *space); got {describe(masks)}")
    if present is not None and (present.dtype != torch.bool or present.shape != masks.shape[:2]):
        raise ValueError(f"present must be bool {tuple(masks.shape[:2])}; got {describe(present)}")
    if valid is not None:
        check_valid(masks, valid)
    if masks.dtype == torch.bool:
        # bytes are compared with a number without a copy as int64
        masks = masks.view(torch.uint8)
    num_classes = max(2, num_channels)
    counts = [
        torch.stack([sum_voxels(mask == number, valid) for number in range(num_classes)], 1)
        for mask in masks.unbind(1)
    ]
    voxels = torch.stack(counts, 2)
    if present is not None:
        voxels = voxels.masked_fill(~present.to(masks.device).unsqueeze(1), torch.nan)
    num_voxels = masks[0, 0].numel() if valid is None else valid.flatten(1).sum(1).view(-1, 1)
    total = voxels.sum(1)
    if bool(((total != num_voxels) & ~total.isnan()).any()):
        raise ValueError(
            f"masks must hold class indices below {num_classes}; got {describe(masks)} with values "
            f"up to {int(masks.max())}: use masks > 0 for binary masks such as 0 and 255"
        )
    per_voxel = voxel_ml(spacing_mm, num_cases=len(masks)).to(masks.device)
    volumes = (voxels[:, 1:] if num_channels == 1 else voxels) * per_voxel.unsqueeze(2)
    return nan_without_voxels(volumes, valid)


def sum_voxels(mass: Tensor, valid: Tensor | None) -> Float[Tensor, " N"]:
    """Float64 sum over the valid voxels of a mask, or of probabilities, (N, *space)."""
    if mass.dtype == torch.bool:
        counted = mass if valid is None else mass & valid
        # to count a whole tensor is ten times as fast as to sum along an axis
        return torch.stack([case.count_nonzero() for case in counted]).double()
    mass = mass if valid is None else torch.where(valid, mass, 0)
    return mass.reshape(len(mass), -1).sum(1, dtype=torch.float64)


def voxel_ml(spacing_mm: Spacing, *, num_cases: int = 1) -> Float[Tensor, "N 1"]:
    """Volume of a voxel in ml, float64, of each case."""
    spacing = read_numbers("spacing_mm", spacing_mm)
    is_side = (spacing > 0) & spacing.isfinite()
    if tuple(spacing.shape) not in ((3,), (num_cases, 3)) or not bool(is_side.all()):
        raise ValueError(
            f"spacing_mm needs three positive sides of a voxel, or (N, 3) = ({num_cases}, 3); got "
            f"{spacing.tolist()}: give a 2D image its slice thickness as the third"
        )
    return (spacing.prod(-1) / 1000).expand(num_cases).unsqueeze(1)
