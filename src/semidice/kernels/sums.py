"""Sums of a batch over its voxels: tp, fp, fn, cross entropy and target mass of every image and class.

`sums_kernel` reads the logits once; probabilities stay in registers. Every program adds up several tiles and
stores sums of its own. `totals_kernel` adds up those of all programs, in a fixed order.
"""

import triton
import triton.language as tl

from .tile import (
    LN_2,
    MIN,
    NO_FORM,
    PRODUCT,
    RELAXED,
    SIGMOID,
    SMALLEST_NORMAL,
    SOFTMAX,
    SQUARED,
    Source,
    probability,
    read_tile,
    softmax_powers,
    tiles_of,
    voxels_of,
)

# the most classes for which 2^t of a softmax stays in registers; with more it is computed again
MAX_KEPT = tl.constexpr(160)


@triton.jit
def zero_sums(ROWS: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """tp, fp, fn, entropy and mass of a chunk, with one number per class and vector of voxels."""
    zero = tl.zeros([ROWS, VOXEL_BLOCK // VECTOR], tl.float32)
    return zero, zero, zero, zero, zero


@triton.jit
def sum_vectors(x, VECTOR: tl.constexpr):
    """Sums of the voxels that lie side by side in one thread, which take no exchange between threads."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // VECTOR, VECTOR]), 2)


@triton.jit
def add_chunk(
    sums, x, y, power, inverse, log_total, counted,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr, NUM_CLASSES: tl.constexpr,
    FIRST, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """`sums` with the voxels of a chunk added. For a softmax x is its t, and the entropy is in bits.

    For the forms min and relaxed fp = p - tp and fn = y - tp. Then `fp` and `fn` sum p and y, and
    `store_sums` subtracts tp: that is less work, and Σ y is the mass as well.
    """
    tp_sum, fp_sum, fn_sum, entropy_sum, mass_sum = sums
    p = probability(x, power, inverse, log_total, counted, ACTIVATION=ACTIVATION)
    is_counted = (FIRST + tl.arange(0, ROWS)[:, None] < NUM_CLASSES) & counted[None, :]
    if ACTIVATION == SIGMOID:
        p = tl.where(is_counted, p, 0.0)
    tp, fp, fn = p, p, p
    SUMS_P_AND_Y: tl.constexpr = (FORM == MIN) | (FORM == RELAXED)
    if FORM == MIN:
        tp, fn = tl.minimum(p, y), y
    elif FORM == PRODUCT:
        tp = p * y
        fp = tl.maximum(p - y, 0.0)
        fn = tl.maximum(y - p, 0.0)
    elif FORM == SQUARED:
        tp = p * y
        fp = p * (p - y)
        fn = y * (y - p)
    elif FORM == RELAXED:
        tp, fn = p * y, y
    if FORM != NO_FORM:
        tp_sum += sum_vectors(tp, VECTOR=VECTOR)
        # Joined: otherwise the compiler gives labels another layout, and moves them between threads.
        fp, fn = tl.split(tl.join(fp, fn))
        fp_sum += sum_vectors(fp, VECTOR=VECTOR)
        fn_sum += sum_vectors(fn, VECTOR=VECTOR)
    if ENTROPY:
        mass = y
        if ACTIVATION == SOFTMAX:
            entropy = y * (log_total[None, :] - x)
        elif ACTIVATION == SIGMOID:
            entropy = tl.maximum(x, 0.0) - x * y + tl.log(1.0 + tl.exp(-tl.abs(x)))
            entropy = tl.where(is_counted, entropy, 0.0)
            mass = is_counted.to(tl.float32)
        else:
            entropy = -y * tl.log(tl.maximum(p, SMALLEST_NORMAL))
        entropy_sum += sum_vectors(entropy, VECTOR=VECTOR)
        if ACTIVATION == SIGMOID or not SUMS_P_AND_Y:
            mass_sum += sum_vectors(mass, VECTOR=VECTOR)
    return tp_sum, fp_sum, fn_sum, entropy_sum, mass_sum


@triton.jit
def store_sums(
    row_ptr,  # (5, C): the sums of one program
    sums,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the sums of a chunk of classes, over all threads."""
    tp, fp, fn, entropy, mass = sums
    c = FIRST + tl.arange(0, ROWS)
    inside = c < NUM_CLASSES
    SUMS_P_AND_Y: tl.constexpr = (FORM == MIN) | (FORM == RELAXED)
    if FORM != NO_FORM:
        tp, fp, fn = tl.sum(tp, 1), tl.sum(fp, 1), tl.sum(fn, 1)
        if SUMS_P_AND_Y:
            # never below 0, because all three were summed in the same order
            label = fn
            fp -= tp
            fn -= tp
        tl.store(row_ptr + c, tp, mask=inside)
        tl.store(row_ptr + NUM_CLASSES + c, fp, mask=inside)
        tl.store(row_ptr + 2 * NUM_CLASSES + c, fn, mask=inside)
    if ENTROPY:
        entropy = tl.sum(entropy, 1)
        if ACTIVATION == SOFTMAX:
            entropy *= LN_2
        tl.store(row_ptr + 3 * NUM_CLASSES + c, entropy, mask=inside)
        if ACTIVATION != SIGMOID and SUMS_P_AND_Y:
            tl.store(row_ptr + 4 * NUM_CLASSES + c, label, mask=inside)
        else:
            tl.store(row_ptr + 4 * NUM_CLASSES + c, tl.sum(mass, 1), mask=inside)


@triton.jit
def sums_kernel(
    logits_ptr,  # (N, C, V)
    target_ptr,  # (N, C, V), or class indices (N, V)
    valid_ptr,  # (N, V), or None
    partials_ptr,  # (N, T, 5, C) from element `partials_start` on, for T programs per image
    partials_start, num_voxels,
    logits_stride_n, logits_stride_c, logits_stride_v, target_stride_n, target_stride_c, target_stride_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    CHUNKS: tl.constexpr, STEP: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of one program: some tiles of one image, all classes."""
    program, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    first_tile, end_tile = tiles_of(program, tl.num_programs(0), num_voxels, VOXEL_BLOCK=VOXEL_BLOCK)
    # Every thread adds for itself. Sums over threads need an exchange, and so come only at the end.
    sums = ()
    for i in tl.static_range(len(CHUNKS)):
        sums += (zero_sums(ROWS=CHUNKS[i][1], VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR),)
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        voxels = voxels_of(
            n, tile, num_voxels, VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR, EVEN=EVEN, WIDE=WIDE
        )  # fmt: skip
        counted, _, xs, ys = read_tile(
            logits, target, valid_ptr, None, voxels,
            ACTIVATION=ACTIVATION, HARD=HARD, NUM_CLASSES=NUM_CLASSES, CHUNKS=CHUNKS,
        )  # fmt: skip
        powers = xs
        inverse = tl.zeros([VOXEL_BLOCK], tl.float32)
        log_total = inverse
        if ACTIVATION == SOFTMAX:
            xs, powers, _, inverse, log_total = softmax_powers(xs, counted, STEP=STEP)
        new_sums = ()
        for i in tl.static_range(len(CHUNKS)):
            chunk_sums = add_chunk(
                sums[i], xs[i], ys[i], powers[i] if NUM_CLASSES <= MAX_KEPT else None,
                inverse, log_total, counted,
                ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES,
                FIRST=CHUNKS[i][0], ROWS=CHUNKS[i][1], VECTOR=VECTOR,
            )  # fmt: skip
            new_sums += (chunk_sums,)
        sums = new_sums
    row_ptr = partials_ptr + partials_start + (n * tl.num_programs(0) + program) * 5 * NUM_CLASSES
    for i in tl.static_range(len(CHUNKS)):
        store_sums(
            row_ptr, sums[i], ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES,
            FIRST=CHUNKS[i][0], ROWS=CHUNKS[i][1],
        )  # fmt: skip


@triton.jit
def add_programs(
    partials_ptr,  # (N, T, 5, C)
    sums_ptr,  # (N, 5, C)
    first_column, num_images, num_programs, num_classes,
    COLUMN_BLOCK: tl.constexpr, PROGRAM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of all programs, for COLUMN_BLOCK of the N * 5 * C sums."""
    row_length = 5 * num_classes
    column = first_column + tl.arange(0, COLUMN_BLOCK)
    inside = column < num_images * row_length
    image = (column // row_length).to(tl.int64)
    place = partials_ptr + image * num_programs * row_length + column % row_length
    total = tl.zeros([PROGRAM_BLOCK, COLUMN_BLOCK], tl.float32)
    for first in range(0, num_programs, PROGRAM_BLOCK):
        program = (first + tl.arange(0, PROGRAM_BLOCK))[:, None]
        mask = (program < num_programs) & inside[None, :]
        total += tl.load(place[None, :] + program.to(tl.int64) * row_length, mask=mask, other=0.0)
    tl.store(sums_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit
def totals_kernel(
    partials_ptr,  # (N, T, 5, C)
    totals_ptr,  # (N, 5, C) from element `totals_start` on
    totals_start, num_images, num_programs, num_classes,
    COLUMN_BLOCK: tl.constexpr, PROGRAM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of all programs."""
    add_programs(
        partials_ptr, totals_ptr + totals_start, tl.program_id(0) * COLUMN_BLOCK,
        num_images, num_programs, num_classes,
        COLUMN_BLOCK=COLUMN_BLOCK, PROGRAM_BLOCK=PROGRAM_BLOCK,
    )  # fmt: skip
