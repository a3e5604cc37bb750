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
def zero_sum(ROWS: tl.constexpr, SPEC: tl.constexpr):
    """A sum of a chunk, with one number per class and vector of voxels."""
    NUM_VECTORS: tl.constexpr = SPEC.voxel_block // SPEC.vector
    return tl.zeros([ROWS, NUM_VECTORS], tl.float32)


@triton.jit
def sum_vectors(x, VECTOR: tl.constexpr):
    """Sums of the voxels that lie side by side in one thread, which take no exchange between threads."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // VECTOR, VECTOR]), 2)


@triton.jit
def add_chunk(sums, x, y, power, inverse, log_total, counted, SPEC: tl.constexpr, FIRST):
    """`sums` with the voxels of a chunk added. For a softmax x is its t, and the entropy is in bits.

    For the forms min and relaxed fp = p - tp and fn = y - tp. Then `fp` and `fn` sum p and y, and
    `store_sums` subtracts tp: that is less work, and Σ y is the mass as well.
    """
    tp_sum, fp_sum, fn_sum, entropy_sum, mass_sum = sums
    p = probability(x, power, inverse, log_total, counted, SPEC=SPEC)
    is_counted = (FIRST + tl.arange(0, x.shape[0])[:, None] < SPEC.num_classes) & counted[None, :]
    if SPEC.activation == SIGMOID:
        p = tl.where(is_counted, p, 0.0)
    tp, fp, fn = p, p, p
    SUMS_P_AND_Y: tl.constexpr = (SPEC.form == MIN) | (SPEC.form == RELAXED)
    if SPEC.form == MIN:
        tp, fn = tl.minimum(p, y), y
    elif SPEC.form == PRODUCT:
        tp = p * y
        fp = tl.maximum(p - y, 0.0)
        fn = tl.maximum(y - p, 0.0)
    elif SPEC.form == SQUARED:
        tp = p * y
        fp = p * (p - y)
        fn = y * (y - p)
    elif SPEC.form == RELAXED:
        tp, fn = p * y, y
    if SPEC.form != NO_FORM:
        tp_sum += sum_vectors(tp, VECTOR=SPEC.vector)
        # Joined: otherwise the compiler gives labels another layout, and moves them between threads.
        fp, fn = tl.split(tl.join(fp, fn))
        fp_sum += sum_vectors(fp, VECTOR=SPEC.vector)
        fn_sum += sum_vectors(fn, VECTOR=SPEC.vector)
    if SPEC.entropy:
        mass = y
        if SPEC.activation == SOFTMAX:
            entropy = y * (log_total[None, :] - x)
        elif SPEC.activation == SIGMOID:
            entropy = tl.maximum(x, 0.0) - x * y + tl.log(1.0 + tl.exp(-tl.abs(x)))
            entropy = tl.where(is_counted, entropy, 0.0)
            mass = is_counted.to(tl.float32)
        else:
            entropy = -y * tl.log(tl.maximum(p, SMALLEST_NORMAL))
        entropy_sum += sum_vectors(entropy, VECTOR=SPEC.vector)
        if SPEC.activation == SIGMOID or not SUMS_P_AND_Y:
            mass_sum += sum_vectors(mass, VECTOR=SPEC.vector)
    return tp_sum, fp_sum, fn_sum, entropy_sum, mass_sum


@triton.jit
def store_sums(
    row_ptr,  # (5, C): the sums of one program
    sums,
    SPEC: tl.constexpr, FIRST,
):  # fmt: skip
    """Store the sums of a chunk of classes, over all threads."""
    tp, fp, fn, entropy, mass = sums
    c = FIRST + tl.arange(0, tp.shape[0])
    inside = c < SPEC.num_classes
    SUMS_P_AND_Y: tl.constexpr = (SPEC.form == MIN) | (SPEC.form == RELAXED)
    if SPEC.form != NO_FORM:
        tp, fp, fn = tl.sum(tp, 1), tl.sum(fp, 1), tl.sum(fn, 1)
        if SUMS_P_AND_Y:
            # never below 0, because all three were summed in the same order
            label = fn
            fp -= tp
            fn -= tp
        tl.store(row_ptr + c, tp, mask=inside)
        tl.store(row_ptr + SPEC.num_classes + c, fp, mask=inside)
        tl.store(row_ptr + 2 * SPEC.num_classes + c, fn, mask=inside)
    if SPEC.entropy:
        entropy = tl.sum(entropy, 1)
        if SPEC.activation == SOFTMAX:
            entropy *= LN_2
        tl.store(row_ptr + 3 * SPEC.num_classes + c, entropy, mask=inside)
        if SPEC.activation != SIGMOID and SUMS_P_AND_Y:
            tl.store(row_ptr + 4 * SPEC.num_classes + c, label, mask=inside)
        else:
            tl.store(row_ptr + 4 * SPEC.num_classes + c, tl.sum(mass, 1), mask=inside)


@triton.jit
def sums_kernel(
    logits_ptr,  # (N, C, V)
    target_ptr,  # (N, C, V), or class indices (N, V)
    valid_ptr,  # (N, V), or None
    partials_ptr,  # (N, T, 5, C) from element `partials_start` on, for T programs per image
    partials_start, num_voxels,
    logits_stride_n, logits_stride_c, logits_stride_v, target_stride_n, target_stride_c, target_stride_v,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Sums of one program: some tiles of one image, all classes."""
    program, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    first_tile, end_tile = tiles_of(program, tl.num_programs(0), num_voxels, SPEC=SPEC)
    # Every thread adds for itself. Sums over threads need an exchange, and so come only at the end.
    sums = ()
    for i in tl.static_range(len(SPEC.chunks)):
        zero = zero_sum(ROWS=SPEC.chunks[i][1], SPEC=SPEC)
        sums += ((zero, zero, zero, zero, zero),)
    for tile in tl.range(first_tile, end_tile, num_stages=SPEC.num_stages):
        voxels = voxels_of(n, tile, num_voxels, SPEC=SPEC)
        counted, _, xs, ys = read_tile(logits, target, valid_ptr, None, voxels, SPEC=SPEC)
        powers = xs
        inverse = tl.zeros(counted.shape, tl.float32)
        log_total = inverse
        if SPEC.activation == SOFTMAX:
            xs, powers, _, inverse, log_total = softmax_powers(xs, counted, SPEC=SPEC)
        new_sums = ()
        for i in tl.static_range(len(SPEC.chunks)):
            chunk_sums = add_chunk(
                sums[i],
                xs[i],
                ys[i],
                powers[i] if SPEC.num_classes <= MAX_KEPT else None,
                inverse,
                log_total,
                counted,
                SPEC=SPEC,
                FIRST=SPEC.chunks[i][0],
            )
            new_sums += (chunk_sums,)
        sums = new_sums
    row_ptr = partials_ptr + partials_start + (n * tl.num_programs(0) + program) * 5 * SPEC.num_classes
    for i in tl.static_range(len(SPEC.chunks)):
        store_sums(row_ptr, sums[i], SPEC=SPEC, FIRST=SPEC.chunks[i][0])


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
        partials_ptr,
        totals_ptr + totals_start,
        tl.program_id(0) * COLUMN_BLOCK,
        num_images,
        num_programs,
        num_classes,
        COLUMN_BLOCK=COLUMN_BLOCK,
        PROGRAM_BLOCK=PROGRAM_BLOCK,
    )
