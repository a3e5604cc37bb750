"""Slabs: cases cut into pieces of bounded size, so that a metric of a volume needs no copy of the volume.

A slab is several complete cases, or a part of one case. Metrics sum over the voxels of each slab, and then
over slabs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

# Floats of a slab, all channels together. On the CPU this is the largest size that torch processes with one
# thread: the slab stays in the cache, and on a busy machine no operation waits for other threads.
SLAB_SIZE = 1 << 15
SLAB_SIZE_GPU = 1 << 21

# prob, target and valid, each with its axes of space
Piece = tuple[Tensor, Tensor, Tensor | None]


class Slab(NamedTuple):
    """The voxels of some cases as rows: the first case's index, prob and target, and which voxels count."""

    first_case: int
    prob: Float[Tensor, "n C v"] | Bool[Tensor, "n C v"]
    # class indices, or one label per channel
    target: Integer[Tensor, "n v"] | Float[Tensor, "n C v"]
    valid: Bool[Tensor, "n v"] | None


def slabs(
    prob: Float[Tensor, "N C *space"] | Bool[Tensor, "N C *space"],
    target: Tensor,
    valid: Tensor | None,
    *,
    size: int | None = None,
) -> Iterator[Slab]:
    """Slabs that together hold every voxel once, of at most `size` floats, but one voxel or more.

    Half precision becomes float32 slab by slab; bool stays. The inputs must already be checked.

    >>> [tuple(slab.prob.shape) for slab in slabs(torch.rand(3, 1, 4), torch.rand(3, 1, 4), None, size=8)]
    [(2, 1, 4), (1, 1, 4)]
    """
    size = size or (SLAB_SIZE if prob.device.type == "cpu" else SLAB_SIZE_GPU)
    num_cases, num_channels, *space = prob.shape
    step = max(1, size // (num_channels * torch.Size(space).numel()))
    for first in range(0, num_cases, step):
        cases = slice(first, first + step)
        complete = prob[cases], target[cases], None if valid is None else valid[cases]
        for part, label, counted in _cut(complete, len(space), size):
            if part.dtype != torch.bool:
                part = part.to(torch.promote_types(part.dtype, torch.float32))
            rows = part.reshape(*part.shape[:2], -1)
            label = label.reshape(*label.shape[: 2 if label.is_floating_point() else 1], -1)
            yield Slab(first, rows, label, None if counted is None else counted.reshape(len(counted), -1))


def _cut(piece: Piece, num_axes: int, size: int) -> Iterator[Piece]:
    """The piece, or smaller ones made by cutting its longest axis of space until each has `size` floats."""
    prob, target, valid = piece
    # a negative index means the same axis of space with and without a channel axis
    axis = max(range(-num_axes, 0), key=lambda number: prob.shape[number], default=0)
    if prob.numel() <= size or axis == 0 or prob.shape[axis] == 1:
        yield piece
        return
    step = max(1, size * prob.shape[axis] // prob.numel())
    for start in range(0, prob.shape[axis], step):
        length = min(step, prob.shape[axis] - start)
        narrow = prob.narrow(axis, start, length), target.narrow(axis, start, length)
        part = None if valid is None else valid.narrow(axis, start, length)
        yield from _cut((*narrow, part), num_axes, size)
