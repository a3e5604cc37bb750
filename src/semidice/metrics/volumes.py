"""Scores of the distribution of a volume against the volumes of the raters.

The distribution is that of nested raters (`decisions.volumes`), from one probability map; each class is
judged on its own. Masks are bool (N, R, *space), or class maps of integers. `present`, bool (N, R), is False
for a rater who did not look at the case. A case without a valid voxel has NaN.
Left out: the error of a decided volume (`scores.volume_error_ml`), and corrected intervals
(`decisions.conformal`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..arrays import check_tensor, describe
from ..decisions.volumes import rater_volumes_ml, volume_interval, voxel_ml
from .checks import check_prob
from .raters import check_present

# share of the raters whose volumes an interval is made for
COVERAGE = 0.9
# sides in mm that make a voxel 1 ml
_ONE_ML = (10.0, 10.0, 10.0)


def volume_crps_error_ml(
    prob: Tensor,
    masks: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    present: Tensor | None = None,
    valid: Tensor | None = None,
) -> Float[Tensor, "N C"]:
    """CRPS of the volume in ml, mean over the raters: E|V - v| - E|V - V'| / 2.

    Lower is better. It is the volume error of a hard mask, and lowest, but not 0, if V is distributed as the
    raters' volumes are: half the mean difference between two of them.

    >>> raters = torch.tensor([[[True, True], [True, False]]])
    >>> volume_crps_error_ml(torch.tensor([[[1.0, 0.5]]]), raters, spacing_mm=(10, 10, 10))
    tensor([[0.2500]])
    """
    voxels = _rater_volumes(prob, masks, _ONE_ML, present, valid)
    per_voxel = voxel_ml(spacing_mm, num_cases=len(prob)).to(prob.device)
    scores = []
    for case, of_classes in enumerate(prob):
        counted = None if valid is None else valid[case]
        for p, volumes in zip(of_classes, voxels[case], strict=True):
            scores.append(_crps_voxels(p.flatten() if counted is None else p[counted], volumes))
    return (torch.stack(scores).view(prob.shape[:2]) * per_voxel).float()


def _crps_voxels(p: Float[Tensor, " n"], volumes: Float64[Tensor, " R"]) -> Float64[Tensor, ""]:
    """Mean CRPS against volumes in voxels: sum of (1 - p)^2 of the v largest p and of p^2 of the others."""
    volumes = volumes[~volumes.isnan()].long()
    if len(volumes) == 0:
        return p.new_tensor(torch.nan, dtype=torch.float64)
    # only the largest p are sorted, as many as the largest volume has voxels
    top = p.topk(int(volumes.max())).values.double()
    sums = torch.cat([top.new_zeros(1), (1 - 2 * top).cumsum(0)])
    squares = p.to(torch.promote_types(p.dtype, torch.float32)).square()
    score = squares.sum(dtype=torch.float64) + sums[volumes]
    # the sums cancel where the score is 0, up to rounding
    return score.clamp(min=0).mean()


def volume_coverage_score(
    prob: Tensor,
    masks: Tensor,
    *,
    coverage: float = COVERAGE,
    present: Tensor | None = None,
    valid: Tensor | None = None,
) -> Float[Tensor, "N C"]:
    """Share of the raters whose volume lies in the interval of `coverage`, its ends included.

    The mean over cases should be `coverage`: more means that the intervals are too wide.

    >>> raters = torch.tensor([[[True, True], [False, False]]])
    >>> volume_coverage_score(torch.tensor([[[1.0, 0.5]]]), raters)
    tensor([[0.5000]])
    """
    volumes = _rater_volumes(prob, masks, _ONE_ML, present, valid)
    low, high = volume_interval(prob, coverage, spacing_mm=_ONE_ML, valid=valid)
    covered = ((volumes >= low.unsqueeze(2)) & (volumes <= high.unsqueeze(2))).double()
    return covered.masked_fill(volumes.isnan(), float("nan")).nanmean(2).float()


def volume_width_ml(
    prob: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    coverage: float = COVERAGE,
    valid: Tensor | None = None,
) -> Float[Tensor, "N C"]:
    """Width in ml of the interval of `coverage`; of methods that cover the same share, narrower is better.

    >>> volume_width_ml(torch.tensor([[[1.0, 0.5]]]), spacing_mm=(10, 10, 10))
    tensor([[1.]])
    """
    check_prob(prob, valid)
    low, high = volume_interval(prob, coverage, spacing_mm=spacing_mm, valid=valid)
    return (high - low).float()


def _rater_volumes(
    prob: Tensor,
    masks: Tensor,
    spacing_mm: Sequence[float] | Tensor,
    present: Tensor | None,
    valid: Tensor | None,
) -> Float[Tensor, "N C R"]:
    check_prob(prob, valid)
    check_tensor("masks", masks)
    if masks.shape[:1] + masks.shape[2:] != prob.shape[:1] + prob.shape[2:]:
        raise ValueError(
            f"prob (N, C, *space) and masks (N, R, *space) differ in cases or space: "
            f"got {describe(prob)} and {describe(masks)}"
        )
    return rater_volumes_ml(
        masks,
        num_channels=prob.shape[1],
        spacing_mm=spacing_mm,
        present=check_present(masks, present),
        valid=valid,
    )
