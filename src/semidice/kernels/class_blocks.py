"""Kernels for more classes than registers hold: they see one block of classes at a time.

A softmax needs all classes. So `norms_kernel` first finds the largest logit and log2 Σ 2^t of every voxel,
with t = log2 e (x - largest). The other two kernels then need no more than their block.
"""

import triton
import triton.language as tl

from .gradient import store_chunk, tile_from_end, weighted_chunk
from .sums import add_chunk, store_sums, zero_sums
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
    WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr, STEP: tl.constexpr, CLASS_BLOCK: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Norms of one tile. Every STEP-th class has a largest logit and a sum of its own, joined at the end."""
    n = tl.program_id(1).to(tl.int64)
    voxels = voxels_of(
        n, tl.program_id(0), num_voxels, VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR, EVEN=EVEN, WIDE=WIDE
    )
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    # finite, so that rows that only pad, whose logit is -inf, add 0
    largest = tl.full([STEP, VOXEL_BLOCK], FAR_BELOW, tl.float32)
    total = tl.zeros([STEP, VOXEL_BLOCK], tl.float32)
    for first in tl.range(0, NUM_CLASSES, CLASS_BLOCK, num_stages=NUM_STAGES):
        place, inside = addresses(logits, voxels, NUM_CLASSES=NUM_CLASSES, FIRST=first, ROWS=CLASS_BLOCK)
        x = tl.load(place, mask=inside, other=float("-inf"))
        x = tl.reshape(x.to(tl.float32), [CLASS_BLOCK // STEP, STEP, VOXEL_BLOCK])
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


@triton.jit
def _read_block(
    logits, target, valid_ptr,
    norms_ptr,  # (N, 2, V), or None
    index, voxels, counted, num_voxels,
    ACTIVATION: tl.constexpr, HARD: tl.constexpr, NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """Logits, for a softmax t, and target of a block of classes; log2 Σ 2^t of every voxel."""
    x = load_chunk(logits, voxels, NUM_CLASSES=NUM_CLASSES, FIRST=FIRST, ROWS=ROWS)
    y = x
    if not HARD:
        y = load_chunk(target, voxels, NUM_CLASSES=NUM_CLASSES, FIRST=FIRST, ROWS=ROWS)
    x = mask_logits(
        x, counted, valid_ptr, ACTIVATION=ACTIVATION, NUM_CLASSES=NUM_CLASSES, FIRST=FIRST, ROWS=ROWS
    )
    y = mask_target(y, index, counted, valid_ptr, HARD=HARD, FIRST=FIRST, ROWS=ROWS)
    log_total = tl.zeros(index.shape, tl.float32)
    if ACTIVATION == SOFTMAX:
        # norms of a voxel that does not count may be anything, even NaN
        place = norms_ptr + 2 * voxels.before + voxels.index
        largest = tl.load(place, mask=counted, other=0.0)
        log_total = tl.load(place + num_voxels, mask=counted, other=0.0)
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
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    CLASS_BLOCK: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of one program: some tiles of one image, one block of classes."""
    # programs for the same voxels run side by side
    num_blocks: tl.constexpr = (NUM_CLASSES + CLASS_BLOCK - 1) // CLASS_BLOCK
    program, n = tl.program_id(0) // num_blocks, tl.program_id(1).to(tl.int64)
    num_programs = tl.num_programs(0) // num_blocks
    first_class = tl.program_id(0) % num_blocks * CLASS_BLOCK
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    first_tile, end_tile = tiles_of(program, num_programs, num_voxels, VOXEL_BLOCK=VOXEL_BLOCK)
    sums = zero_sums(ROWS=CLASS_BLOCK, VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR)
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        voxels = voxels_of(
            n, tile, num_voxels, VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR, EVEN=EVEN, WIDE=WIDE
        )  # fmt: skip
        counted, index = valid_labels(valid_ptr, load_labels(target, voxels, HARD=HARD), voxels)
        x, y, log_total = _read_block(
            logits, target, valid_ptr, norms_ptr, index, voxels, counted, num_voxels,
            ACTIVATION=ACTIVATION, HARD=HARD, NUM_CLASSES=NUM_CLASSES, FIRST=first_class, ROWS=CLASS_BLOCK,
        )  # fmt: skip
        sums = add_chunk(
            sums, x, y, None, None, log_total, counted,
            ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES,
            FIRST=first_class, ROWS=CLASS_BLOCK, VECTOR=VECTOR,
        )  # fmt: skip
    row_ptr = partials_ptr + partials_start + (n * num_programs + program) * 5 * NUM_CLASSES
    store_sums(
        row_ptr, sums, ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES,
        FIRST=first_class, ROWS=CLASS_BLOCK,
    )  # fmt: skip


@triton.jit
def _weighted_block(
    logits, target, valid_ptr, grad_sums_ptr, norms_ptr, index, voxels, counted, scale, num_voxels,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr, HARD: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """`weighted_chunk` of a block of classes."""
    x, y, log_total = _read_block(
        logits, target, valid_ptr, norms_ptr, index, voxels, counted, num_voxels,
        ACTIVATION=ACTIVATION, HARD=HARD, NUM_CLASSES=NUM_CLASSES, FIRST=FIRST, ROWS=ROWS,
    )  # fmt: skip
    return weighted_chunk(
        grad_sums_ptr, x, y, None, None, log_total, counted, scale,
        ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES, FIRST=FIRST, ROWS=ROWS,
    )  # fmt: skip


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
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    STEP: tl.constexpr, CLASS_BLOCK: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile, block by block. A softmax goes over the classes twice: first for Σ w."""
    n, tile = tile_from_end()
    voxels = voxels_of(n, tile, num_voxels, VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR, EVEN=EVEN, WIDE=WIDE)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    gradient = Source(gradient_ptr + n * gradient_stride_n, gradient_stride_c, gradient_stride_v)
    grad_sums_ptr += n * 4 * NUM_CLASSES
    scale = tl.load(scale_ptr)
    counted, index = valid_labels(valid_ptr, load_labels(target, voxels, HARD=HARD), voxels)
    total = tl.zeros([STEP, VOXEL_BLOCK], tl.float32)
    if ACTIVATION == SOFTMAX:
        for first in tl.range(0, NUM_CLASSES, CLASS_BLOCK, num_stages=NUM_STAGES):
            _, w = _weighted_block(
                logits, target, valid_ptr, grad_sums_ptr, norms_ptr, index, voxels, counted, scale,
                num_voxels,
                ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, HARD=HARD,
                NUM_CLASSES=NUM_CLASSES, FIRST=first, ROWS=CLASS_BLOCK,
            )  # fmt: skip
            total = add_steps(total, w, STEP=STEP)
    total = tl.sum(total, 0)[None, :]
    for first in tl.range(0, NUM_CLASSES, CLASS_BLOCK, num_stages=NUM_STAGES):
        prob, result = _weighted_block(
            logits, target, valid_ptr, grad_sums_ptr, norms_ptr, index, voxels, counted, scale, num_voxels,
            ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, HARD=HARD,
            NUM_CLASSES=NUM_CLASSES, FIRST=first, ROWS=CLASS_BLOCK,
        )  # fmt: skip
        if ACTIVATION == SOFTMAX:
            result -= prob * total
        store_chunk(gradient, voxels, result, NUM_CLASSES=NUM_CLASSES, FIRST=first, ROWS=CLASS_BLOCK)
