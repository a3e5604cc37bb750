"""Slabs: cases cut into pieces of bounded size, so that a metric of a volume needs no copy of the volume.

A slab is several complete cases, or a part of one case. Metrics sum over the voxels of each slab, and then
over slabs. Values that do not lie in a row, such as those of channels-last tensors, are copied once.
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
    rows = prob.reshape(*prob.shape[:2], -1)
    labels = target.reshape(*target.shape[: 2 if target.is_floating_point() else 1], -1)
    counted = None if valid is None else valid.reshape(len(valid), -1)
    num_cases, num_channels, num_voxels = rows.shape
    length = max(1, size // num_channels)
    step = max(1, length // num_voxels)
    for first in range(0, num_cases, step):
        cases = slice(first, first + step)
        for start in range(0, num_voxels, length):
            voxels = slice(start, start + length)
            part = rows[cases, :, voxels]
            if part.dtype != torch.bool:
                part = part.to(torch.promote_types(part.dtype, torch.float32))
            valid_part = None if counted is None else counted[cases, voxels]
            yield Slab(first, part, labels[cases, ..., voxels], valid_part)
