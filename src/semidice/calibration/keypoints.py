"""The voxels that calibration uses: key points to learn from, and the region it is applied to.

Both as in the paper, appendix E. On a GPU no function here reads a value on the host, and no shape depends on
values, so a CUDA graph can capture them. Left out: the estimate from the keys (`recalibration`).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int64, Shaped
from torch import Tensor

from ..arrays import check_prediction, describe, one_hot, read_target, values_are_readable
from ..labels.smoothing import boundary_band
from ..options import check_value
from .kde import Keys

# larger than every class, and small enough that 32 bits for a random number fit below it
_NO_CLASS = 2**30


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
    check_value(int, num_keys=num_keys)
    if num_keys < 1:
        raise ValueError(f"num_keys must be 1 or more; got {num_keys}")
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
