"""How the kernels go through a batch: a tiling, and the table from which it is taken."""

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


class Tiling(NamedTuple):
    """The size of a tile, and how programs go through tiles."""

    voxel_block: int
    num_warps: int
    # voxels side by side in one thread
    vector: int
    # the most tiles that one program adds up, and how many of them are loaded at once
    num_tiles: int = 1
    num_stages: int = 1
    # the most registers of a thread, so that more threads run at once; None leaves it to the compiler
    registers: int | None = None
    # rows of a tile, if all classes do not fit into the registers; None for all classes
    class_block: int | None = None

    @property
    def step(self) -> int:
        """Rows that all threads together hold at a time: a thread has every step-th row."""
        return max(1, 32 * self.num_warps * self.vector // self.voxel_block)

    def programs_at_once(self, voxel_bytes: int) -> int:
        """Programs that one multiprocessor runs at once, for tiles of so many bytes per voxel."""
        num_registers = 32 * self.num_warps * (self.registers or _MAX_REGISTERS)
        num_bytes = _NUM_RESERVED_BYTES
        if self.num_stages > 1:
            # the last tile is in registers
            num_bytes += (self.num_stages - 1) * self.voxel_block * voxel_bytes
        return max(1, min(_NUM_REGISTERS // num_registers, _NUM_SHARED_BYTES // num_bytes, _MAX_PROGRAMS))


# (the most classes, tiling of logits of two bytes, tiling of four bytes if it differs)
Row = tuple[int, Tiling] | tuple[int, Tiling, Tiling]
Tilings = tuple[Row, ...]
# of the kernels that see one block of classes at a time
BLOCK_SUMS = Tiling(128, 1, 8, 16, num_stages=3, class_block=8)
NORMS = Tiling(256, 4, 4, num_stages=3, class_block=16)
BLOCK_GRADIENT = Tiling(128, 8, 4, class_block=32)


def tiling_of(table: Tilings, num_classes: int, logit_bytes: int) -> Tiling:
    """The tiling of a table for this number of classes."""
    two_bytes, *four_bytes = next(row[1:] for row in table if num_classes <= row[0])
    return four_bytes[0] if four_bytes and logit_bytes > 2 else two_bytes


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
