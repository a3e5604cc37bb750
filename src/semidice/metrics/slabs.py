"""Slabs: a case cut into pieces of bounded size, so that a metric of a volume needs no copy of it.

A slab is some whole cases, or a part of one case. Every metric that sums over voxels goes through here; the
sum over slabs is the sum over voxels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import describe

# Floats of a slab, all channels together. On the CPU the most that torch handles without waking its threads:
# the slab stays in cache, and on a busy machine no operation waits for a thread that was put to sleep.
SLAB_SIZE = 1 << 15
SLAB_SIZE_GPU = 1 << 21

# prob, target and valid with their axes of space
Piece = tuple[Tensor, Tensor, Tensor | None]


class Slab(NamedTuple):
    """The voxels of some cases as rows: the first case's index, prob and target, and which voxels count."""

    first_case: int
    prob: Float[Tensor, "n C v"]
    # class indices, or a label a channel
    target: Integer[Tensor, "n v"] | Float[Tensor, "n C v"]
    valid: Bool[Tensor, "n v"] | None


def slabs(
    prob: Float[Tensor, "N C *space"], target: Tensor, valid: Tensor | None, *, size: int | None = None
) -> Iterator[Slab]:
    """Slabs that together hold every voxel once, of at most `size` floats (or one voxel's channels).

    Half precision becomes float32 slab by slab. The contract of `arrays` must have been checked.

    >>> [tuple(slab.prob.shape) for slab in slabs(torch.rand(3, 1, 4), torch.rand(3, 1, 4), None, size=8)]
    [(2, 1, 4), (1, 1, 4)]
    """
    size = size or (SLAB_SIZE if prob.device.type == "cpu" else SLAB_SIZE_GPU)
    num_cases, num_channels, *space = prob.shape
    step = max(1, size // (num_channels * torch.Size(space).numel()))
    for first in range(0, num_cases, step):
        cases = slice(first, first + step)
        whole = prob[cases], target[cases], None if valid is None else valid[cases]
        for piece in _cut(whole, len(space), size):
            yield _slab(first, *piece)


def _cut(piece: Piece, num_axes: int, size: int) -> Iterator[Piece]:
    """The piece, or what is left of it after cutting its longest axis of space again and again."""
    prob, target, valid = piece
    # counted from the back, an axis of space has the same number with and without a channel axis
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


def _slab(first_case: int, prob: Tensor, target: Tensor, valid: Tensor | None) -> Slab:
    num_cases, num_channels = prob.shape[:2]
    prob = prob.to(torch.promote_types(prob.dtype, torch.float32)).reshape(num_cases, num_channels, -1)
    shape = (num_cases, num_channels, -1) if target.is_floating_point() else (num_cases, -1)
    return Slab(
        first_case, prob, target.reshape(shape), None if valid is None else valid.reshape(num_cases, -1)
    )


def check_sums_to_one(prob: Float[Tensor, "n C v"], valid: Bool[Tensor, "n v"] | None) -> None:
    """Raise unless the channels of a several-channel slab are probabilities of classes that exclude."""
    if prob.shape[1] == 1:
        return
    # bfloat16 keeps 8 bits, so softmax of many classes may be off by a percent
    off = (prob.sum(1) - 1).abs() > 2e-2
    if valid is not None:
        off &= valid
    if bool(off.any()):
        came = float(prob.sum(1)[off][0])
        raise ValueError(
            f"probabilities of classes must sum to one over the channels; got {describe(prob)} with a sum of "
            f"{came:.4g}: apply softmax, or score each sigmoid channel on its own, prob[:, c : c + 1]"
        )
