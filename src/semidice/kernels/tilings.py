"""How the kernels of `overlap` go through a batch, by number of classes: tables from trials on an H200.

The trials are like those of `benchmarks/tune_tilings.py`, with 2, 3, 8, 11, 14, 19, 24, 32, 40, 50, 64, 80,
100, 130, 150, 200, 300, 400, 600, 1000 and 2000 classes.
"""

from typing import NamedTuple

import triton

from . import MAX_FUSED_CLASSES

# What a multiprocessor of an H200 has: registers, bytes of shared memory, and room for programs. A thread has
# at most so many registers, and a program takes so many bytes beyond its own.
_REGISTERS = 2**16
_SHARED_BYTES = 228 * 2**10
_PROGRAMS = 32
_MAX_REGISTERS = 256
_RESERVED_BYTES = 2**10


class Tiling(NamedTuple):
    """A tile of all classes, or a block of them, by `voxel_block` voxels; how programs go through tiles."""

    voxel_block: int
    num_warps: int
    # voxels side by side in one thread
    vector: int
    # the most tiles that a program adds up, and how many of them are in flight
    num_tiles: int = 1
    num_stages: int = 1
    # that a thread may have, so that more of them run at once; else as many as the compiler likes
    registers: int | None = None
    # classes at a time, where all would not fit the registers; else all
    class_block: int | None = None

    @property
    def step(self) -> int:
        """Rows that all threads together hold at a time: a thread has every step-th row."""
        return max(1, 32 * self.num_warps * self.vector // self.voxel_block)

    def at_once(self, voxel_bytes: int) -> int:
        """Programs that a multiprocessor runs at once, if tiles in flight have so many bytes a voxel."""
        num_registers = 32 * self.num_warps * (self.registers or _MAX_REGISTERS)
        num_bytes = _RESERVED_BYTES
        if self.num_stages > 1:
            # the last of them is in registers
            num_bytes += (self.num_stages - 1) * self.voxel_block * voxel_bytes
        return max(1, min(_REGISTERS // num_registers, _SHARED_BYTES // num_bytes, _PROGRAMS))


def split_classes(num_classes: int, step: int) -> tuple[int, int, int]:
    """Powers of two, `step` or more, that add up to the classes or little more: 150 alone would be 256."""
    single = triton.next_power_of_2(num_classes)
    if single <= step:
        return single, 0, 0
    first = single // 2
    second = max(step, triton.next_power_of_2(max(1, num_classes - first)))
    half = max(step, second // 2)
    third = max(step, triton.next_power_of_2(max(1, num_classes - first - half)))
    # the fewest rows, and of those the fewest chunks
    return min((single, 0, 0), (first, second, 0), (first, half, third), key=sum)


# Up to how many classes, of logits of two bytes, and of four if that differs: voxels, warps, vector, tiles.
Tilings = tuple[tuple[int, Tiling] | tuple[int, Tiling, Tiling], ...]
# of more classes than registers hold
BY_CLASS = Tiling(128, 1, 8, 16, num_stages=3, class_block=8)
NORMS = Tiling(256, 4, 4, num_stages=3, class_block=16)
GRADIENT_BY_CLASS = Tiling(128, 8, 4, class_block=32)
# Tiles in flight lie in shared memory: with 160 classes 82 KB, and some GPUs have 99.
FORWARD: Tilings = (
    (4, Tiling(1024, 4, 4, 4)),
    (10, Tiling(128, 1, 4, 16, num_stages=3), Tiling(64, 1, 4, 16, num_stages=3)),
    (28, Tiling(64, 1, 4, 16, num_stages=3)),
    (32, Tiling(64, 1, 8, 16, num_stages=3), Tiling(32, 1, 4, 16, num_stages=3)),
    (48, Tiling(64, 2, 4, 16, num_stages=3)),
    (80, Tiling(32, 2, 4, 16, num_stages=3)),
    (102, Tiling(32, 2, 4, 16, num_stages=3), Tiling(32, 4, 4, 16, num_stages=3)),
    (160, Tiling(32, 4, 4, 16, num_stages=3)),
    (320, Tiling(32, 8, 4, 16, registers=128)),
    (MAX_FUSED_CLASSES, BY_CLASS),
)
BACKWARD: Tilings = (
    (4, Tiling(1024, 4, 4)),
    (28, Tiling(64, 1, 4)),
    (32, Tiling(64, 1, 8)),
    (48, Tiling(64, 2, 4)),
    (64, Tiling(32, 2, 4), Tiling(64, 2, 4)),
    (102, Tiling(64, 4, 4)),
    (160, Tiling(32, 4, 4), Tiling(64, 4, 8)),
    (320, Tiling(32, 4, 4)),
    (1024, Tiling(16, 8, 4)),
    (MAX_FUSED_CLASSES, GRADIENT_BY_CLASS),
)
# of class indices: there is less to hold, and so more voxels at once
HARD_FORWARD: Tilings = (
    (4, Tiling(1024, 2, 8, 16, num_stages=3, registers=128), Tiling(1024, 4, 4, 4)),
    (10, Tiling(128, 1, 4, 16, num_stages=3)),
    (16, Tiling(128, 1, 4, 16, num_stages=3), Tiling(64, 1, 4, 16, num_stages=3)),
    (24, Tiling(128, 1, 8, 16, num_stages=3), Tiling(64, 1, 4, 16, num_stages=3)),
    (32, Tiling(64, 1, 8, 16, num_stages=3, registers=168), Tiling(64, 1, 4, 16, num_stages=3)),
    # a table from here on
    (56, Tiling(64, 1, 4, 16, num_stages=3), Tiling(32, 1, 4, 16, num_stages=3)),
    (64, Tiling(64, 1, 8, 16, num_stages=3), Tiling(64, 2, 4, 16, registers=128)),
    (102, Tiling(64, 2, 4, 16, num_stages=3), Tiling(64, 2, 4, 16)),
    (160, Tiling(64, 2, 8, 16, num_stages=3), Tiling(32, 2, 4, 16, num_stages=3)),
    (210, Tiling(64, 4, 4, 16), Tiling(32, 4, 4, 16, registers=168)),
    (320, Tiling(32, 4, 4, 16, registers=168)),
    (512, Tiling(32, 4, 4, 16)),
    (768, BY_CLASS, Tiling(32, 8, 4, 16, registers=128)),
    (1024, BY_CLASS, Tiling(32, 16, 4, 16)),
    (MAX_FUSED_CLASSES, BY_CLASS),
)
HARD_BACKWARD: Tilings = (
    (4, Tiling(1024, 4, 4)),
    (16, Tiling(128, 1, 4)),
    (24, Tiling(128, 1, 4, registers=168)),
    (44, Tiling(64, 1, 4, registers=128), Tiling(64, 1, 4, registers=168)),
    (64, Tiling(64, 2, 4, registers=128)),
    (102, Tiling(64, 2, 4, registers=168), Tiling(64, 4, 8)),
    (160, Tiling(64, 4, 4, registers=128), Tiling(64, 4, 8)),
    (210, Tiling(64, 4, 4, registers=168), Tiling(32, 4, 4)),
    (320, Tiling(32, 4, 4, registers=128), Tiling(32, 4, 4)),
    (440, Tiling(32, 4, 4, registers=168), Tiling(32, 4, 4)),
    (512, Tiling(32, 4, 4)),
    (768, Tiling(32, 8, 4, registers=128), Tiling(16, 8, 4)),
    (1024, Tiling(16, 8, 4), Tiling(32, 16, 4, registers=128)),
    (MAX_FUSED_CLASSES, GRADIENT_BY_CLASS),
)


def tiling_of(tilings: Tilings, num_classes: int, logit_bytes: int) -> Tiling:
    """The row of a table for this many classes."""
    of_two_bytes, *of_four = next(row[1:] for row in tilings if num_classes <= row[0])
    return of_four[0] if of_four and logit_bytes > 2 else of_two_bytes
