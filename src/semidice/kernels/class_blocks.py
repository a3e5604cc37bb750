"""Kernels for more classes than registers hold: they see one block of classes at a time.

A softmax needs all classes. So `norms_kernel` first finds the largest logit and log2 Σ 2^t of every voxel,
with t = log2 e (x - largest). The other two kernels then need no more than their block.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .gradient import store_chunk, tile_from_end, weighted_chunk
from .sums import add_chunk, store_sums, zero_sum
from .tile import (
    FAR_BELOW,
    LOG2_E,
    SOFTMAX,
    Source,
    add_steps,
    addresses,
    load_chunk,
    load_labels,
    mask_logits,
    mask_target,
    tiles_of,
    valid_labels,
    voxels_of,
)


@triton.jit
def norms_kernel(
    logits_ptr,  # (N, C, V)
    norms_ptr,  # (N, 2, V): largest logit, log2 Σ 2^t
    num_voxels, logits_stride_n, logits_stride_c, logits_stride_v,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Norms of one tile. Every step-th class has a largest logit and a sum of its own, joined at the end."""
    STEP: tl.constexpr = SPEC.step
    VOXEL_BLOCK: tl.constexpr = SPEC.voxel_block
    n = tl.program_id(1).to(tl.int64)
    voxels = voxels_of(n, tl.program_id(0), num_voxels, SPEC=SPEC)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    # finite, so that rows that only pad, whose logit is -inf, add 0
    largest = tl.full([STEP, VOXEL_BLOCK], FAR_BELOW, tl.float32)
    total = tl.zeros([STEP, VOXEL_BLOCK], tl.float32)
    for first in tl.range(0, SPEC.num_classes, SPEC.class_block, num_stages=SPEC.num_stages):
        place, inside = addresses(logits, voxels, SPEC=SPEC, FIRST=first, ROWS=SPEC.class_block)
        x = tl.load(place, mask=inside, other=float("-inf"))
        x = tl.reshape(x.to(tl.float32), [x.shape[0] // STEP, STEP, VOXEL_BLOCK])
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        # The difference first: a rounded multiple of `largest` would differ between steps, and not cancel.
        power = tl.exp2((x - tl.reshape(largest, [1, STEP, VOXEL_BLOCK])) * LOG2_E)
        total = total * tl.exp2((before - largest) * LOG2_E) + tl.sum(power, 0)
    voxel_largest = tl.max(largest, 0)
    voxel_total = tl.sum(total * tl.exp2((largest - voxel_largest[None, :]) * LOG2_E), 0)
    place = norms_ptr + 2 * voxels.before + voxels.index
    tl.store(place, voxel_largest, mask=voxels.inside)
    log_total = tl.log2(tl.where(voxels.inside, voxel_total, 1.0))
    tl.store(place + num_voxels, log_total, mask=voxels.inside)


class Tile(NamedTuple):
    """The voxels of one tile, and the tensors from which blocks of its classes are read."""

    logits: Any
    target: Any
    # (N, V), or None
    valid_ptr: Any
    # (N, 2, V), or None without a softmax
    norms_ptr: Any
    voxels: Any
    # (V,): whether each voxel counts, and its class index
    counted: Any
    index: Any


@triton.jit
def _read_block(tile, num_voxels, SPEC: tl.constexpr, FIRST):
    """Logits, for a softmax t, and target of a block of classes; log2 Σ 2^t of every voxel."""
    x = load_chunk(tile.logits, tile.voxels, SPEC=SPEC, FIRST=FIRST, ROWS=SPEC.class_block)
    y = x
    if not SPEC.hard:
        y = load_chunk(tile.target, tile.voxels, SPEC=SPEC, FIRST=FIRST, ROWS=SPEC.class_block)
    x = mask_logits(x, tile.counted, tile.valid_ptr, SPEC=SPEC, FIRST=FIRST)
    y = mask_target(y, tile.index, tile.counted, tile.valid_ptr, SPEC=SPEC, FIRST=FIRST)
    log_total = tl.zeros(tile.index.shape, tl.float32)
    if SPEC.activation == SOFTMAX:
        # norms of a voxel that does not count may be anything, even NaN
        place = tile.norms_ptr + 2 * tile.voxels.before + tile.voxels.index
        largest = tl.load(place, mask=tile.counted, other=0.0)
        log_total = tl.load(place + num_voxels, mask=tile.counted, other=0.0)
        x = (x - largest[None, :]) * LOG2_E
    return x, y, log_total


@triton.jit
def block_sums_kernel(
    logits_ptr,  # (N, C, V)
    target_ptr,  # (N, C, V), or class indices (N, V)
    valid_ptr,  # (N, V), or None
    partials_ptr,  # (N, T, 5, C) from element `partials_start` on, for T programs per image and block
    norms_ptr,  # (N, 2, V), or None without a softmax
    partials_start, num_voxels,
    logits_stride_n, logits_stride_c, logits_stride_v, target_stride_n, target_stride_c, target_stride_v,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Sums of one program: some tiles of one image, one block of classes."""
    # programs for the same voxels run side by side
    num_blocks: tl.constexpr = (SPEC.num_classes + SPEC.class_block - 1) // SPEC.class_block
    program, n = tl.program_id(0) // num_blocks, tl.program_id(1).to(tl.int64)
    num_programs = tl.num_programs(0) // num_blocks
    first_class = tl.program_id(0) % num_blocks * SPEC.class_block
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    first_tile, end_tile = tiles_of(program, num_programs, num_voxels, SPEC=SPEC)
    zero = zero_sum(ROWS=SPEC.class_block, SPEC=SPEC)
    sums = (zero, zero, zero, zero, zero)
    for i in tl.range(first_tile, end_tile, num_stages=SPEC.num_stages):
        voxels = voxels_of(n, i, num_voxels, SPEC=SPEC)
        counted, index = valid_labels(valid_ptr, load_labels(target, voxels, SPEC=SPEC), voxels)
        tile = Tile(logits, target, valid_ptr, norms_ptr, voxels, counted, index)
        x, y, log_total = _read_block(tile, num_voxels, SPEC=SPEC, FIRST=first_class)
        sums = add_chunk(sums, x, y, None, None, log_total, counted, SPEC=SPEC, FIRST=first_class)
    row_ptr = partials_ptr + partials_start + (n * num_programs + program) * 5 * SPEC.num_classes
    store_sums(row_ptr, sums, SPEC=SPEC, FIRST=first_class)


@triton.jit
def _weighted_block(tile, grad_sums_ptr, scale, num_voxels, SPEC: tl.constexpr, FIRST):
    """`weighted_chunk` of a block of classes."""
    x, y, log_total = _read_block(tile, num_voxels, SPEC=SPEC, FIRST=FIRST)
    return weighted_chunk(
        grad_sums_ptr, x, y, None, None, log_total, tile.counted, scale, SPEC=SPEC, FIRST=FIRST
    )


@triton.jit
def block_gradient_kernel(
    logits_ptr,  # (N, C, V)
    target_ptr,  # (N, C, V), or class indices (N, V)
    valid_ptr,  # (N, V), or None
    grad_sums_ptr,  # (N, 4, C): dL/dtp, dL/dfp, dL/dfn, dL/dentropy
    scale_ptr,  # (): factor of grad_sums
    gradient_ptr,  # (N, C, V)
    norms_ptr,  # (N, 2, V), or None without a softmax
    num_voxels,
    logits_stride_n, logits_stride_c, logits_stride_v, target_stride_n, target_stride_c, target_stride_v,
    gradient_stride_n, gradient_stride_c, gradient_stride_v,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile, block by block. A softmax goes over the classes twice: first for Σ w."""
    n, tile_index = tile_from_end()
    voxels = voxels_of(n, tile_index, num_voxels, SPEC=SPEC)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    gradient = Source(gradient_ptr + n * gradient_stride_n, gradient_stride_c, gradient_stride_v)
    grad_sums_ptr += n * 4 * SPEC.num_classes
    scale = tl.load(scale_ptr)
    counted, index = valid_labels(valid_ptr, load_labels(target, voxels, SPEC=SPEC), voxels)
    tile = Tile(logits, target, valid_ptr, norms_ptr, voxels, counted, index)
    STEP: tl.constexpr = SPEC.step
    total = tl.zeros([STEP, counted.shape[0]], tl.float32)
    if SPEC.activation == SOFTMAX:
        for first in tl.range(0, SPEC.num_classes, SPEC.class_block, num_stages=SPEC.num_stages):
            _, w = _weighted_block(tile, grad_sums_ptr, scale, num_voxels, SPEC=SPEC, FIRST=first)
            total = add_steps(total, w, SPEC=SPEC)
    total = tl.sum(total, 0)[None, :]
    for first in tl.range(0, SPEC.num_classes, SPEC.class_block, num_stages=SPEC.num_stages):
        prob, result = _weighted_block(tile, grad_sums_ptr, scale, num_voxels, SPEC=SPEC, FIRST=first)
        if SPEC.activation == SOFTMAX:
            result -= prob * total
        store_chunk(gradient, voxels, result, SPEC=SPEC, FIRST=first)
