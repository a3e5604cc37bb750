"""Calibration error of each case by a kernel density estimate on key points, in bounded time.

The valid voxels of a case are split at random in two halves. Key points of one half (balanced over classes,
and weighted, `keypoints.draw_keys`) estimate the label to expect at a probability. The error is the mean
over points of the other half, drawn uniformly. So no voxel is used to judge itself, and the cost is
`NUM_POINTS` x `NUM_KEYS` for a case of any size. Left out: the estimator (`calibration.kde`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ..calibration.kde import kde_calibration_error as error_of_points
from ..calibration.keypoints import draw_keys
from .checks import check_scored

# a larger case is first reduced to this many voxels: sorting a volume would take seconds and gigabytes
MAX_VOXELS = 1 << 20
NUM_KEYS = 1024
NUM_POINTS = 4096


def kde_calibration_error(
    prob: Tensor,
    target: Tensor,
    *,
    bandwidth: float = 0.01,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Float[Tensor, " N"]:
    """Kernel estimate of each case's calibration error, against a hard or soft reference; lower is better.

    It is that of the top label, see `calibration.kde_calibration_error`. Errors at different bandwidths
    cannot be compared. A case has the same points in any batch; with fewer than two valid voxels it has NaN.

    >>> prob, target = torch.full((1, 1, 400), 0.8), torch.ones(1, 1, 400)
    >>> round(float(kde_calibration_error(prob, target)), 4)
    0.2
    """
    target, valid = check_scored(prob, target, valid=valid, ignore_index=ignore_index)
    errors = []
    for case in range(len(prob)):
        generator = torch.Generator(prob.device).manual_seed(0)
        voxels = _drawn_voxels(prob[case], None if valid is None else valid[case], generator)
        if len(voxels) < 2:
            errors.append(torch.full((), torch.nan, device=prob.device))
            continue
        key_half, point_half = voxels.tensor_split(2)
        # keys are drawn from the key voxels of this case only
        key_prob, key_target = (_at(voxels_of[case], key_half).unsqueeze(0) for voxels_of in (prob, target))
        keys = draw_keys(key_prob, key_target, NUM_KEYS, generator=generator)
        points = point_half[:NUM_POINTS]
        errors.append(
            error_of_points(
                _at(prob[case], points).movedim(0, -1),
                _at(target[case], points).movedim(0, -1),
                bandwidth=bandwidth,
                kind="top_label",
                keys=keys,
            )
        )
    return torch.stack(errors).float()


def _drawn_voxels(prob: Tensor, valid: Tensor | None, generator: torch.Generator) -> Tensor:
    """Indices of the valid voxels of a case in random order; about a million drawn from a larger case."""
    num_voxels, device = prob[0].numel(), prob.device
    if num_voxels > MAX_VOXELS:
        voxels = torch.randint(num_voxels, (MAX_VOXELS,), generator=generator, device=device)
        voxels = torch.unique(voxels)
    else:
        voxels = torch.arange(num_voxels, device=device)
    if valid is not None:
        voxels = voxels[valid.flatten()[voxels]]
    return voxels[torch.randperm(len(voxels), generator=generator, device=device)]


def _at(values: Tensor, voxels: Tensor) -> Tensor:
    """Values at some voxels: (n,) of class indices, (C, n) of floats (C, *space); one channel becomes two."""
    if not values.is_floating_point():
        return values.flatten()[voxels]
    taken = values.reshape(len(values), -1)[:, voxels]
    return torch.cat([1 - taken, taken]) if len(values) == 1 else taken
