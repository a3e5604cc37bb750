"""How the kernels go through a batch: a tiling, by number of classes.

The tables are from trials on an H200 (`benchmarks/tune_tilings.py`). A tiling has voxels, warps, neighbouring
voxels per thread, tiles per program and stages. Class indices and a softmax take fewer registers than soft
labels, and so their tiles have more voxels.
"""

from typing import NamedTuple

import triton

# of one multiprocessor of an H200: registers, bytes of shared memory, and the most programs it runs
_NUM_REGISTERS = 2**16
_NUM_SHARED_BYTES = 228 * 2**10
_MAX_PROGRAMS = 32
# the most registers of a thread
_MAX_REGISTERS = 256
# shared memory that a program takes beyond its own
_NUM_RESERVED_BYTES = 2**10
# shared memory of one program that every GPU since 2020 has
_MAX_SHARED_BYTES = 98_000


class Tiling(NamedTuple):
    """The size of a tile, and how programs go through tiles."""

    voxel_block: int
    num_warps: int
    # voxels side by side in one thread
    vector: int
    # the most tiles that one program adds up, and how many of them are loaded at once
    num_tiles: int = 1
    num_stages: int = 1

    @property
    def step(self) -> int:
        """Rows that all threads together hold at a time: a thread has every step-th row."""
        return max(1, 32 * self.num_warps * self.vector // self.voxel_block)

    def programs_at_once(self, voxel_bytes: int) -> int:
        """Programs that one multiprocessor runs at once, for tiles of so many bytes per voxel."""
        num_registers = 32 * self.num_warps * _MAX_REGISTERS
        # the last tile is in registers
        num_bytes = _NUM_RESERVED_BYTES + (self.num_stages - 1) * self.voxel_block * voxel_bytes
        return max(1, min(_NUM_REGISTERS // num_registers, _NUM_SHARED_BYTES // num_bytes, _MAX_PROGRAMS))


# (the most classes, tiling)
Tilings = tuple[tuple[int, Tiling], ...]
FORWARD: Tilings = (
    (4, Tiling(1024, 4, 4, 4)),
    (32, Tiling(64, 1, 4, 16, 3)),
    (80, Tiling(32, 2, 4, 16, 3)),
    (160, Tiling(32, 4, 4, 16, 3)),
    (256, Tiling(32, 8, 4, 16, 3)),
)
BACKWARD: Tilings = (
    (4, Tiling(1024, 4, 4)),
    (32, Tiling(64, 1, 4)),
    (64, Tiling(64, 2, 4)),
    (256, Tiling(32, 4, 4)),
)
HARD_FORWARD: Tilings = (
    (4, Tiling(1024, 4, 4, 4)),
    (32, Tiling(64, 1, 4, 16, 3)),
    (102, Tiling(64, 2, 4, 16, 3)),
    (256, Tiling(32, 4, 4, 16, 3)),
)
HARD_BACKWARD: Tilings = (
    (4, Tiling(1024, 4, 4)),
    (32, Tiling(128, 1, 4)),
    (102, Tiling(64, 2, 4)),
    (256, Tiling(64, 4, 4)),
)


# of the forward and of the backward pass
Tiles = tuple[Tiling, Tiling]


def tiles_of(num_classes: int, voxel_bytes: int, *, by_index: bool) -> Tiles:
    """The tilings of both passes for a number of classes; `by_index` for class indices and a softmax.

    The forward pass has as many stages as shared memory holds tiles of so many bytes per voxel.
    """
    forward, backward = (
        next(tiling for max_classes, tiling in table if num_classes <= max_classes)
        for table in ((HARD_FORWARD, HARD_BACKWARD) if by_index else (FORWARD, BACKWARD))
    )
    num_stages = min(forward.num_stages, 1 + _MAX_SHARED_BYTES // (forward.voxel_block * voxel_bytes))
    return forward._replace(num_stages=num_stages), backward


def class_chunks(num_classes: int, step: int) -> tuple[tuple[int, int], ...]:
    """First class and number of rows of up to three chunks, with as few rows in all as possible.

    Numbers of rows are powers of two and, unless there is one chunk, at least `step`.
    """
    single = triton.next_power_of_2(num_classes)
    if single <= step:
        return ((0, single),)
    first = single // 2
    second = max(step, triton.next_power_of_2(max(1, num_classes - first)))
    half = max(step, second // 2)
    third = max(step, triton.next_power_of_2(max(1, num_classes - first - half)))
    # the fewest rows, and of those the fewest chunks
    sizes: tuple[int, ...] = min((single,), (first, second), (first, half, third), key=sum)
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))
