"""The sums of `sums.py` for the softmax of many classes and class indices as target.

Only probabilities are summed for all classes. A voxel adds to tp, mass and entropy of its own class alone, in
a table in memory. The table holds integers: the order of additions does not change them, and so results are
the same in every run. It lies where the sums of the program are stored at the end.
"""

import triton
import triton.language as tl

from .sums import sum_vectors, zero_sum
from .tile import (
    LN_2,
    LOG2_E,
    NO_FORM,
    SQUARED,
    Source,
    Voxels,
    load_labels,
    own_logits,
    read_tile,
    softmax_powers,
    tiles_of,
    voxels_of,
)

# One integer holds the probabilities of a class, in units of 2^-38, and above them the number of its voxels.
PROB_UNITS, COUNT = tl.constexpr(2.0**38), tl.constexpr(2**50)
# A second one holds the entropy in units of 2^-24 bit. A voxel adds at most 2^28 bit, more than logits give.
BIT_UNITS, MAX_BIT_UNITS = tl.constexpr(2.0**24), tl.constexpr(2.0**52)


@triton.jit
def _labels_at(target, index, num_voxels, SPEC: tl.constexpr):
    """Class indices of voxels, 0 beyond the last voxel of the image."""
    inside = index < num_voxels
    if SPEC.wide:
        index = index.to(tl.int64)
    return load_labels(target, Voxels(index=index, inside=inside, before=0), SPEC=SPEC)


@triton.jit
def _clear(table_ptr, SPEC: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr):
    c = FIRST + tl.arange(0, ROWS)
    tl.store(table_ptr + c, tl.zeros([ROWS], tl.int64), mask=c < SPEC.num_classes)
    tl.store(table_ptr + SPEC.num_classes + c, tl.zeros([ROWS], tl.int64), mask=c < SPEC.num_classes)


@triton.jit
def _add_probabilities(prob_sum, power, inverse, SPEC: tl.constexpr):
    """`prob_sum` with the probabilities of a chunk added, or for `squared` with their squares."""
    prob = power * inverse[None, :]
    if SPEC.form == SQUARED:
        prob = prob * prob
    return prob_sum + sum_vectors(prob, VECTOR=SPEC.vector)


@triton.jit
def _table_sums(table_ptr, nan_or_0, SPEC: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """tp, mass and entropy in bits of a chunk of classes."""
    c = FIRST + tl.arange(0, ROWS)
    # not from the first-level cache, which does not see atomic additions
    prob_and_count = tl.load(table_ptr + c, mask=c < SPEC.num_classes, other=0, cache_modifier=".cg")
    bits = tl.load(table_ptr + SPEC.num_classes + c, mask=c < SPEC.num_classes, other=0, cache_modifier=".cg")
    tp = (prob_and_count % COUNT).to(tl.float32) / PROB_UNITS + nan_or_0
    mass = (prob_and_count // COUNT).to(tl.float32)
    return tp, mass, bits.to(tl.float32) / BIT_UNITS + nan_or_0


@triton.jit
def _store_index_sums(
    row_ptr,  # (5, C): the sums of one program
    prob, own_sums,
    SPEC: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    tp, mass, bits = own_sums
    c = FIRST + tl.arange(0, tp.shape[0])
    inside = c < SPEC.num_classes
    if SPEC.form != NO_FORM:
        fp = prob - tp
        if SPEC.form != SQUARED:
            fp = tl.maximum(fp, 0.0)
        tl.store(row_ptr + c, tp, mask=inside)
        tl.store(row_ptr + SPEC.num_classes + c, fp, mask=inside)
        tl.store(row_ptr + 2 * SPEC.num_classes + c, tl.maximum(mass - tp, 0.0), mask=inside)
    if SPEC.entropy:
        tl.store(row_ptr + 3 * SPEC.num_classes + c, bits * LN_2, mask=inside)
        tl.store(row_ptr + 4 * SPEC.num_classes + c, mass, mask=inside)


@triton.jit
def index_sums_kernel(
    logits_ptr,  # (N, C, V)
    target_ptr,  # class indices (N, V)
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
    start = partials_start + (n * tl.num_programs(0) + program) * 5 * SPEC.num_classes
    # The table has 16 bytes per class, the sums have 20. It starts at the next multiple of 8 bytes.
    table_ptr = partials_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + (start + 1) // 2
    prob_sums = ()
    for i in tl.static_range(len(SPEC.chunks)):
        _clear(table_ptr, SPEC=SPEC, FIRST=SPEC.chunks[i][0], ROWS=SPEC.chunks[i][1])
        prob_sums += (zero_sum(ROWS=SPEC.chunks[i][1], SPEC=SPEC),)
    tl.debug_barrier()
    # Labels are loaded one tile ahead. They are too few bytes for the asynchronous copy that logits take.
    first_index = first_tile * SPEC.voxel_block + tl.arange(0, SPEC.voxel_block)
    labels = _labels_at(target, first_index, num_voxels, SPEC=SPEC)
    nan = tl.zeros(first_index.shape, tl.float32)
    for tile in tl.range(first_tile, end_tile, num_stages=SPEC.num_stages):
        voxels = voxels_of(n, tile, num_voxels, SPEC=SPEC)
        next_labels = _labels_at(target, voxels.index + SPEC.voxel_block, num_voxels, SPEC=SPEC)
        counted, index, xs, _ = read_tile(logits, target, valid_ptr, labels, voxels, SPEC=SPEC)
        own_x = own_logits(logits, index, voxels, SPEC=SPEC)
        has_class = (index >= 0) & (index < SPEC.num_classes)
        _, powers, largest, inverse, log_total = softmax_powers(xs, counted, SPEC=SPEC)
        t = (own_x.to(tl.float32) - largest) * LOG2_E
        # An integer cannot be NaN, and the two minima below drop it: it is kept here.
        nan += 0.0 * (log_total - t)
        prob_and_count = tl.minimum(tl.exp2(t) * inverse * PROB_UNITS, PROB_UNITS).to(tl.int64) + COUNT
        bits = tl.minimum((log_total - t) * BIT_UNITS, MAX_BIT_UNITS).to(tl.int64)
        tl.atomic_add(table_ptr + index, prob_and_count, mask=has_class, sem="relaxed")
        tl.atomic_add(table_ptr + SPEC.num_classes + index, bits, mask=has_class, sem="relaxed")
        new_sums = ()
        for i in tl.static_range(len(SPEC.chunks)):
            new_sums += (_add_probabilities(prob_sums[i], powers[i], inverse, SPEC=SPEC),)
        prob_sums = new_sums
        labels = next_labels
    tl.debug_barrier()
    nan_or_0 = tl.sum(nan, 0)
    own_sums = ()
    for i in tl.static_range(len(SPEC.chunks)):
        chunk_sums = _table_sums(
            table_ptr, nan_or_0, SPEC=SPEC, FIRST=SPEC.chunks[i][0], ROWS=SPEC.chunks[i][1]
        )
        own_sums += (chunk_sums,)
    # All of the table has been read before sums overwrite it.
    tl.debug_barrier()
    for i in tl.static_range(len(SPEC.chunks)):
        _store_index_sums(
            partials_ptr + start, tl.sum(prob_sums[i], 1), own_sums[i], SPEC=SPEC, FIRST=SPEC.chunks[i][0]
        )
