"""The voxels that calibration uses: key points to learn from, and the region it is applied to; the bandwidth.

Keys and region as in the paper, appendix E. On a GPU they read no value on the host, and no shape depends on
values, so a CUDA graph can capture them. The bandwidth is that with the highest likelihood of points that are
left out of the sums. Left out: the estimate from the keys (`kde`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int64, Shaped
from torch import Tensor

from ..arrays import check_prediction, describe, one_hot, read_target, values_are_readable
from ..labels.smoothing import boundary_band
from ..options import Count, Positive, check_value
from .kde import MIN_PROB, Keys, check_classes, flat_rows, kernel_mean

# larger than every class, and small enough that 32 bits for a random number fit below it
_NO_CLASS = 2**30
# 5e-5 to 0.11; with wider kernels the likelihood of saturated predictions has a second, worse maximum
DEFAULT_BANDWIDTHS = tuple(5e-5 * 10 ** (step / 3) for step in range(11))


def draw_keys(
    prob: Tensor,
    target: Tensor,
    num_keys: int,
    *,
    valid: Tensor | None = None,
    generator: torch.Generator | None = None,
    per_image: bool = False,
) -> Keys:
    """`num_keys` key points of the batch (or of each image), without replacement, balanced over classes.

    prob is (N, C, *space), target follows the contract in `arrays`; the class of a voxel with a soft label is
    the argmax. Each present class gets ceil(num_keys / present classes) keys, the last classes one fewer if
    that would be more than num_keys. A class with fewer voxels gives all of them, and leaves keys of weight
    0. With more classes than keys, the first num_keys classes get one key each. The weight of a key is the
    number of voxels of its class that it stands for.

    Needs the time and memory of one sort of the voxels. The generator is on the device of the target (for a
    CUDA graph, register it with the graph). Without a valid voxel: a ValueError on the CPU; on other devices,
    and for one image of several, all weights are 0. Differentiable in prob.

    >>> prob = torch.tensor([[[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]]])
    >>> keys = draw_keys(prob, torch.tensor([[0, 0, 0, 1]]), 4)
    >>> keys.label.argmax(-1), keys.weight
    (tensor([[0, 1, 0, 0]]), tensor([[1.5000, 1.0000, 1.5000, 0.0000]]))
    """
    check_value(Count, num_keys=num_keys)
    check_prediction(prob)
    target, valid = read_target(prob, target, valid=valid)
    class_map = _class_map(target)
    counted = torch.ones_like(class_map, dtype=torch.bool) if valid is None else valid
    if values_are_readable(class_map) and not bool(counted.any()):
        raise ValueError(f"there is no valid voxel to draw keys from in target {describe(target)}")
    rows = len(class_map) if per_image else 1
    class_of = torch.where(counted, class_map.long(), _NO_CLASS).reshape(rows, -1)
    index, weight = _draw_balanced(class_of, num_keys, generator)
    if target.is_floating_point():
        return Keys(_taken(prob, index), _taken(target, index), weight)
    label = one_hot(_taken(target.unsqueeze(1), index).squeeze(-1), prob.shape[1]).movedim(1, -1)
    return Keys(_taken(prob, index), label.to(prob.dtype), weight)


def _taken(voxels: Shaped[Tensor, "N C *space"], index: Int64[Tensor, "B K"]) -> Shaped[Tensor, "B K C"]:
    """Values at numbers of voxels, which count over the batch (B = 1) or over each image."""
    flat = voxels.reshape(*voxels.shape[:2], -1)
    if len(index) == 1:
        return flat[index // flat.shape[-1], :, index % flat.shape[-1]]
    return flat[torch.arange(len(flat), device=flat.device).unsqueeze(1), :, index]


def _class_map(target: Tensor) -> Tensor:
    """Class indices (N, *space) of a checked target, which may be soft."""
    return target.argmax(1) if target.is_floating_point() else target


def _draw_balanced(
    class_of: Int64[Tensor, "B V"], num_keys: int, generator: torch.Generator | None
) -> tuple[Int64[Tensor, "B K"], Float32[Tensor, "B K"]]:
    """Number and weight of the keys of each row, given to its classes in turn.

    Entry s is draw s // present of class s % present. A class that has no voxel left gives 0 and 0.
    """
    draw = torch.randint(2**32, class_of.shape, generator=generator, device=class_of.device)
    drawn, order = torch.sort((class_of << 32) + draw, dim=1)
    sorted_class = drawn >> 32
    # after sorting, each class is a run in random order; group is the number of the run
    group = F.pad((sorted_class[:, 1:] != sorted_class[:, :-1]).long().cumsum(1), (1, 0))
    present = group[:, -1:] + (sorted_class[:, -1:] != _NO_CLASS).long()
    slot = torch.arange(num_keys + 1, device=class_of.device).expand(len(class_of), -1).contiguous()
    edges = torch.searchsorted(group, slot)
    size = edges.diff(dim=1)
    slot, divisor = slot[:, :-1], present.clamp(min=1)
    turn, which = slot // divisor, slot % divisor
    available = size.gather(1, which)
    mask = (turn < available) & (present > 0)
    position = torch.where(mask, edges.gather(1, which) + turn, 0)
    taken = torch.minimum(available, (num_keys - which + divisor - 1) // divisor).clamp(min=1)
    return torch.where(mask, order.gather(1, position), 0), torch.where(mask, available / taken, 0)


def calibration_region(
    prob: Tensor, target: Tensor, *, width: int = 3, valid: Tensor | None = None
) -> Bool[Tensor, "N *space"]:
    """True where calibration is applied: where the argmax of `prob` is wrong, or a boundary is near.

    prob is (N, C, *space), target follows the contract in `arrays`. Wrong means another class than the argmax
    of the target (the first of equal ones); near means inside its `boundary_band`. Voxels outside `valid` are
    False, but their values in the target count as classes for the band.
    Use: torch.where(region.unsqueeze(1), recalibrated, prob).

    >>> prob = torch.tensor([[[0.9, 0.4, 0.9, 0.9, 0.2], [0.1, 0.6, 0.1, 0.1, 0.8]]])
    >>> calibration_region(prob, torch.tensor([[0, 0, 0, 0, 1]]), width=1)
    tensor([[False,  True, False,  True,  True]])
    """
    check_prediction(prob)
    target, valid = read_target(prob, target, valid=valid)
    class_map = _class_map(target)
    region = (prob.argmax(1) != class_map) | boundary_band(class_map, width=width)
    return region if valid is None else region & valid


class BandwidthChoice(NamedTuple):
    """The best bandwidth, all that were tried, and the mean log-likelihood of a point under each."""

    bandwidth: float
    bandwidths: tuple[float, ...]
    log_likelihood: tuple[float, ...]


def choose_bandwidth(
    prob: Tensor,
    target: Tensor,
    *,
    bandwidths: Sequence[float] = DEFAULT_BANDWIDTHS,
    valid: Tensor | None = None,
    num_points: int = 2048,
    generator: torch.Generator | None = None,
) -> BandwidthChoice:
    """The bandwidth with the highest leave-one-out likelihood, and the likelihoods of all that were tried.

    The likelihood is the mean of Σ_c y_jc log E[y_c | f_j] with point j left out, the aim of recalibration.
    (The density of the points would prefer ever smaller bandwidths where many probabilities are equal.)

    If there are more than `num_points` voxels, `draw_keys` draws that many, with weights. A label estimated
    as 0 counts as 1e-7. Time num_points² x bandwidths, memory one chunk. Reads values.

    >>> prob = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0, -1.0]])
    >>> prob = prob + torch.tensor([[0.0, 1.0]])
    >>> choose_bandwidth(prob, (prob[:, 1] > 0.5).long(), bandwidths=(1e-3, 1e-2, 1e-1)).bandwidth
    0.001
    """
    if not bandwidths:
        raise ValueError("bandwidths is empty: name one or more")
    for bandwidth in bandwidths:
        check_value(Positive, bandwidth=bandwidth)
    check_classes(prob)
    if prob.numel() // prob.shape[1] > num_points:
        keys = draw_keys(prob.detach(), target, num_points, valid=valid, generator=generator)
    else:
        rows = flat_rows(prob.detach(), target, valid)
        keys = Keys(*(part.unsqueeze(0) for part in rows))
    return bandwidth_of_keys(keys, bandwidths=bandwidths)


@torch.no_grad()
def bandwidth_of_keys(keys: Keys, *, bandwidths: Sequence[float] = DEFAULT_BANDWIDTHS) -> BandwidthChoice:
    """`choose_bandwidth` of one set of checked keys with weights, of which two or more count."""
    assert keys.weight is not None
    counts = keys.weight[0] > 0
    if counts.sum() < 2:
        raise ValueError(f"leave-one-out needs two points or more; got {int(counts.sum())} valid")
    prob, label, weight = (part[:, counts] for part in (keys.prob, keys.label, keys.weight.double()))
    points, counted, share = prob.double().transpose(1, 2), Keys(prob, label, weight), weight / weight.sum()
    table = []
    for bandwidth in bandwidths:
        mean = kernel_mean(points, counted, bandwidth=bandwidth, leave_one_out=True)
        each = (label * mean.transpose(1, 2).clamp(min=MIN_PROB).log()).sum(-1)
        table.append(float((share * each).sum()))
    best = max(range(len(table)), key=table.__getitem__)
    return BandwidthChoice(float(bandwidths[best]), tuple(map(float, bandwidths)), tuple(table))
