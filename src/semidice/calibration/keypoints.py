"""The voxels that calibration uses: key points to learn from, and the region it is applied to.

Both as in the paper, appendix E. On a GPU no function here reads a value on the host, and no shape depends on
values, so a CUDA graph can capture them. Left out: the estimate from the keys (`recalibration`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from ..arrays import (
    check_prediction,
    check_target,
    check_tensor,
    check_whole_number,
    describe,
    values_are_readable,
)
from ..labels.smoothing import boundary_band

# larger than every class, and small enough that 32 bits for a random number fit below it
_NO_CLASS = 2**30


@dataclass(frozen=True)
class KeySample:
    """Key points drawn by `sample_keys`: always K entries (or N x K); those where `mask` is True are real.

    index: number of the voxel in the batch or, per image, in its image; 0 if not real.
    weight: number of valid voxels of its class that a key represents; 0 if not real.
    """

    index: Int64[Tensor, "*N K"]
    mask: Bool[Tensor, "*N K"]
    weight: Float32[Tensor, "*N K"]


def sample_keys(
    target: Tensor,
    num_keys: int,
    *,
    valid: Tensor | None = None,
    generator: torch.Generator | None = None,
    per_image: bool = False,
) -> KeySample:
    """`num_keys` key points of the batch (or of each image), without replacement, balanced over classes.

    target is class indices (N, *space), or soft (N, C, *space), where the class of a voxel is its argmax.
    Each present class gets ceil(num_keys / present classes) keys, the last classes one fewer if that would be
    more than num_keys. A class with fewer voxels gives all of them, and leaves entries that are not real.
    With more classes than keys, the first num_keys classes get one key each.

    Needs the time and memory of one sort of the voxels. The generator is on the device of the target (for a
    CUDA graph, register it with the graph). Without a valid voxel: a ValueError on the CPU; on other devices,
    and for one image of several, no key is real.

    >>> target = torch.tensor([[0, 0, 0, 0, 0, 1]])
    >>> keys = sample_keys(target, 4)
    >>> take_keys(target, keys), keys.mask, keys.weight
    (tensor([0, 1, 0, 0]), tensor([ True,  True,  True, False]), tensor([2.5000, 1.0000, 2.5000, 0.0000]))
    """
    check_whole_number(num_keys=num_keys)
    if num_keys < 1:
        raise ValueError(f"num_keys must be 1 or more; got {num_keys}")
    class_map = _class_map(target)
    if valid is not None and (valid.dtype != torch.bool or valid.shape != class_map.shape):
        raise ValueError(
            f"valid must be bool {tuple(class_map.shape)}, one flag per voxel and no channel axis; "
            f"got {describe(valid)}"
        )
    counted = torch.ones_like(class_map, dtype=torch.bool) if valid is None else valid
    if values_are_readable(class_map):
        if not bool(counted.any()):
            raise ValueError(f"there is no valid voxel to draw keys from in target {describe(target)}")
        lowest = int(class_map.masked_fill(~counted, 0).min())
        if lowest < 0:
            raise ValueError(
                f"target holds class {lowest}, but classes start at 0: mark voxels to ignore in valid=..."
            )
    rows = class_map.shape[0] if per_image else 1
    class_of = class_map.reshape(rows, -1).long()
    class_of = torch.where(counted.reshape(rows, -1) & (class_of >= 0), class_of, _NO_CLASS)
    keys = _draw_balanced(class_of, num_keys, generator)
    return keys if per_image else KeySample(keys.index[0], keys.mask[0], keys.weight[0])


def _class_map(target: Tensor) -> Tensor:
    """Class indices (N, *space) of a target with class indices, or of a soft one (N, C, *space)."""
    check_tensor("target", target)
    if target.dtype == torch.bool or target.is_complex() or target.numel() == 0:
        raise ValueError(f"target must hold class indices or soft labels; got {describe(target)}")
    if not target.is_floating_point():
        return target
    if target.ndim < 2:
        raise ValueError(f"a soft target needs a class axis, (N, C, *space); got {describe(target)}")
    return target.argmax(1)


def _draw_balanced(
    class_of: Int64[Tensor, "B V"], num_keys: int, generator: torch.Generator | None
) -> KeySample:
    """Keys of each row, given to its classes in turn: entry s is draw s // present of class s % present."""
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
    return KeySample(
        index=torch.where(mask, order.gather(1, position), 0),
        mask=mask,
        weight=torch.where(mask, available / taken, 0),
    )


def take_keys(voxels: Tensor, keys: KeySample) -> Tensor:
    """Values at the keys: (K, C) or (N, K, C) of floats (N, C, *space); integers (N, *space) have no C.

    Entries of `keys` that are not real have the values of voxel 0. Differentiable in `voxels`.

    >>> prob = torch.tensor([[[0.9, 0.2], [0.1, 0.8]]])
    >>> take_keys(prob, KeySample(torch.tensor([1]), torch.tensor([True]), torch.tensor([1.0])))
    tensor([[0.2000, 0.8000]])
    """
    check_tensor("voxels", voxels)
    if not isinstance(keys, KeySample):
        raise ValueError(f"keys must come from sample_keys; got {describe(keys)}")
    flat = voxels.reshape(*voxels.shape[: 2 if voxels.is_floating_point() else 1], -1)
    if keys.index.ndim == 2:
        image, voxel = torch.arange(len(flat), device=flat.device).unsqueeze(1), keys.index
    else:
        image, voxel = keys.index // flat.shape[-1], keys.index % flat.shape[-1]
    return flat[image, :, voxel] if voxels.is_floating_point() else flat[image, voxel]


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
    target, valid = check_target(prob, target, valid=valid, has_ignore_index=False)
    class_map = _class_map(target)
    region = (prob.argmax(1) != class_map) | boundary_band(class_map, width=width)
    return region if valid is None else region & valid
