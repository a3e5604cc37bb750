"""`reference_sums` and the loss of them on a GPU: the logits are read once forward and once backward.

    sums       one pass: probabilities in registers, partial sums of each program   (N, T, 5, C)
    totals     of the partial sums, unless they are few                              (N, 5, C)
    loss       one program: cross entropy, region loss, and d loss / d sums          (N, 4, C)
    gradient   one pass: probabilities again, and the gradient, the only tensor of the logits' size

Rows of a tile are all classes (in chunks of powers of two), columns voxels. Of more classes than registers
hold, `norms` first finds what a softmax has of all of them (N, 2, V); sums and gradient then see a block of
classes at a time. Every sum has a fixed order or is of whole numbers, so results are the same in every run.
Offsets are 64 bit. The formulas are those of `forms`, `blocked`, `losses`. `plans` launches all this.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# what the constants of a kernel mean
ACTIVATIONS = {"softmax": 0, "sigmoid": 1, "none": 2}
FORMS = {None: -1, "min": 0, "product": 1, "squared": 2, "relaxed": 3}
OVERS = {"batch": 0, "image": 1, "class": 2}
SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1)
NO_FORM, MIN, PRODUCT = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)
SQUARED, RELAXED = tl.constexpr(2), tl.constexpr(3)
BATCH, IMAGE = tl.constexpr(0), tl.constexpr(1)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# Units of the whole numbers that probabilities and entropies, in bits, are added up as. A voxel counts beyond
# all of the former; more entropy than any logits have is cut off.
PROB_UNITS, COUNT = tl.constexpr(2.0**38), tl.constexpr(2**50)
BIT_UNITS, MAX_BIT_UNITS = tl.constexpr(2.0**24), tl.constexpr(2.0**52)
# classes up to which the powers of a softmax are kept; with more registers are short, and they are made again
MAX_KEPT = tl.constexpr(160)
# class indices of as few are compared with every class in the gradient: less work than to look up their own
MAX_COMPARED = tl.constexpr(7)
# a logit whose exponential is 0 and whose product with 0 is one
FAR_BELOW = tl.constexpr(-1e30)


@triton.jit
def _tiles_of(program, num_programs, num_voxels, VOXEL_BLOCK: tl.constexpr):
    """Where the tiles of a program begin and end: all programs have as many, or one more."""
    num_tiles = tl.cdiv(num_voxels, VOXEL_BLOCK).to(tl.int64)
    first = program * num_tiles // num_programs
    return first.to(tl.int32), ((program + 1) * num_tiles // num_programs).to(tl.int32)


@triton.jit
def _inside(v, num_voxels, EVEN: tl.constexpr):
    """Whether each voxel is there."""
    return tl.full(v.shape, True, tl.int1) if EVEN else v < num_voxels


@triton.jit
def _loaded_labels(target, v, inside, target_v, HARD: tl.constexpr, WIDE: tl.constexpr):
    """Class indices as they are, and nothing of a soft target."""
    labels = tl.zeros(v.shape, tl.int32)
    if HARD:
        column = v.to(tl.int64) if WIDE else v
        labels = tl.load(target + column * target_v, mask=inside, other=0)
    return labels


@triton.jit
def _counted(valid, labels, n, v, inside, num_voxels, HAS_VALID: tl.constexpr, WIDE: tl.constexpr):
    """Whether each voxel counts, and its class: -1, which is none, where it does not."""
    counted = inside
    if HAS_VALID:
        column = v.to(tl.int64) if WIDE else v
        counted = inside & (tl.load(valid + n * num_voxels + column, mask=inside, other=0) != 0)
    return counted, tl.where(counted, labels.to(tl.int32), -1)


@triton.jit
def _loaded(
    tensor, v, inside_v, stride_c, stride_v,
    WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """A chunk of classes as float32, 0 where there is nothing."""
    row, column = FIRST + tl.arange(0, ROWS)[:, None], v[None, :]
    inside = (row < NUM_CLASSES) & inside_v[None, :]
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    return tl.load(tensor + row * stride_c + column * stride_v, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _counted_logits(
    x, counted_v,
    ACTIVATION: tl.constexpr, HAS_VALID: tl.constexpr, NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """Logits of a chunk: 0 where they do not count, but far below in rows that only pad a softmax."""
    if HAS_VALID:
        # whatever is there, even NaN
        x = tl.where(counted_v[None, :], x, 0.0)
    if ACTIVATION == SOFTMAX:
        x = tl.where(FIRST + tl.arange(0, ROWS)[:, None] < NUM_CLASSES, x, FAR_BELOW)
    return x


@triton.jit
def _counted_target(
    y, index, counted_v, HARD: tl.constexpr, HAS_VALID: tl.constexpr, FIRST, ROWS: tl.constexpr
):
    """Target of a chunk, as it was loaded if it is soft: 0 where it does not count."""
    if HARD:
        y = (index[None, :] == FIRST + tl.arange(0, ROWS)[:, None]).to(tl.float32)
    elif HAS_VALID:
        y = tl.where(counted_v[None, :], y, 0.0)
    return y


@triton.jit
def _rows_of_chunk(
    logits, target, index, v, inside_v, counted_v, logits_c, logits_v, target_c, target_v,
    ACTIVATION: tl.constexpr, HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """Logits and target of a chunk."""
    x = _loaded(logits, v, inside_v, logits_c, logits_v, WIDE, NUM_CLASSES, FIRST, ROWS)
    y = x
    if not HARD:
        y = _loaded(target, v, inside_v, target_c, target_v, WIDE, NUM_CLASSES, FIRST, ROWS)
    x = _counted_logits(x, counted_v, ACTIVATION, HAS_VALID, NUM_CLASSES, FIRST, ROWS)
    return x, _counted_target(y, index, counted_v, HARD, HAS_VALID, FIRST, ROWS)


@triton.jit
def _loaded_tile(
    tensor, v, inside_v, stride_c, stride_v,
    WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, ROWS_C: tl.constexpr,
):  # fmt: skip
    """Three chunks; in the place of one of no rows stands the first."""
    a = _loaded(tensor, v, inside_v, stride_c, stride_v, WIDE, NUM_CLASSES, 0, ROWS_A)
    b, c = a, a
    if ROWS_B > 0:
        b = _loaded(tensor, v, inside_v, stride_c, stride_v, WIDE, NUM_CLASSES, ROWS_A, ROWS_B)
    if ROWS_C > 0:
        c = _loaded(tensor, v, inside_v, stride_c, stride_v, WIDE, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C)
    return a, b, c


@triton.jit
def _rows_of_tile(
    logits, target, valid, labels, n, v, inside_v, num_voxels, logits_c, logits_v, target_c, target_v,
    ACTIVATION: tl.constexpr, HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr,
    NUM_CLASSES: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, ROWS_C: tl.constexpr,
):  # fmt: skip
    """Whether voxels count, and their class; logits and target of three chunks.

    Labels are those of the voxels, or None: then they are loaded here.
    """
    x_a, x_b, x_c = _loaded_tile(
        logits, v, inside_v, logits_c, logits_v, WIDE, NUM_CLASSES, ROWS_A, ROWS_B, ROWS_C
    )
    y_a, y_b, y_c = x_a, x_b, x_c
    if not HARD:
        y_a, y_b, y_c = _loaded_tile(
            target, v, inside_v, target_c, target_v, WIDE, NUM_CLASSES, ROWS_A, ROWS_B, ROWS_C
        )
    if labels is None:
        # only now: threads hand them on to each other and wait for them, while logits are on their way
        labels = _loaded_labels(target, v, inside_v, target_v, HARD, WIDE)
    counted_v, index = _counted(valid, labels, n, v, inside_v, num_voxels, HAS_VALID, WIDE)
    x_a = _counted_logits(x_a, counted_v, ACTIVATION, HAS_VALID, NUM_CLASSES, 0, ROWS_A)
    y_a = _counted_target(y_a, index, counted_v, HARD, HAS_VALID, 0, ROWS_A)
    if ROWS_B > 0:
        x_b = _counted_logits(x_b, counted_v, ACTIVATION, HAS_VALID, NUM_CLASSES, ROWS_A, ROWS_B)
        y_b = _counted_target(y_b, index, counted_v, HARD, HAS_VALID, ROWS_A, ROWS_B)
    if ROWS_C > 0:
        x_c = _counted_logits(x_c, counted_v, ACTIVATION, HAS_VALID, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C)
        y_c = _counted_target(y_c, index, counted_v, HARD, HAS_VALID, ROWS_A + ROWS_B, ROWS_C)
    return counted_v, index, x_a, y_a, x_b, y_b, x_c, y_c


@triton.jit
def _largest(x, ROWS: tl.constexpr, STEP: tl.constexpr, VOXEL_BLOCK: tl.constexpr):
    """Largest of every STEP-th row, which a thread has in its registers."""
    return tl.max(tl.reshape(x, [ROWS // STEP, STEP, VOXEL_BLOCK]), 0)


@triton.jit
def _summed(x, ROWS: tl.constexpr, STEP: tl.constexpr, VOXEL_BLOCK: tl.constexpr):
    return tl.sum(tl.reshape(x, [ROWS // STEP, STEP, VOXEL_BLOCK]), 0)


# functions of a device are there for what is compiled, and this one on NVIDIA
HAS_FAST_LOG = tl.constexpr(isinstance(_summed, triton.JITFunction) and torch.version.hip is None)


@triton.jit
def _log2(x):
    """Within 4e-7: as near as the exponentials are, in one instruction where the exact one takes twenty."""
    return libdevice.fast_log2f(x) if HAS_FAST_LOG else tl.log2(x)


@triton.jit
def _powers(
    x_a, x_b, x_c, counted_v,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, ROWS_C: tl.constexpr, STEP: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a softmax t = log2 e (x - largest), 2^t, and of each voxel largest, 1 / Σ 2^t and log2 Σ 2^t.

    The second is 0 where the voxel does not count. Chunks of no rows are not looked at. They are put
    together before threads exchange anything.
    """
    largest = _largest(x_a, ROWS_A, STEP, VOXEL_BLOCK)
    if ROWS_B > 0:
        largest = tl.maximum(largest, _largest(x_b, ROWS_B, STEP, VOXEL_BLOCK))
    if ROWS_C > 0:
        largest = tl.maximum(largest, _largest(x_c, ROWS_C, STEP, VOXEL_BLOCK))
    # its rounding is the same for all classes, and cancels
    largest_v = tl.max(largest, 0)
    shift = -LOG2_E * largest_v[None, :]
    t_a = tl.fma(x_a, LOG2_E, shift)
    e_a = tl.exp2(t_a)
    total = _summed(e_a, ROWS_A, STEP, VOXEL_BLOCK)
    t_b, e_b, t_c, e_c = t_a, e_a, t_a, e_a
    if ROWS_B > 0:
        t_b = tl.fma(x_b, LOG2_E, shift)
        e_b = tl.exp2(t_b)
        total += _summed(e_b, ROWS_B, STEP, VOXEL_BLOCK)
    if ROWS_C > 0:
        t_c = tl.fma(x_c, LOG2_E, shift)
        e_c = tl.exp2(t_c)
        total += _summed(e_c, ROWS_C, STEP, VOXEL_BLOCK)
    total_v = tl.sum(total, 0)
    log_total = _log2(total_v)
    inverse = tl.where(counted_v, tl.exp2(-log_total), 0.0)
    return t_a, e_a, t_b, e_b, t_c, e_c, largest_v, inverse, log_total


@triton.jit
def _probability(x, power, inverse, log_total, counted_v, ACTIVATION: tl.constexpr):
    """Of x; for a softmax of t, with its power or, where there is none, by making it again."""
    if ACTIVATION == SOFTMAX and power is None:
        prob = tl.where(counted_v[None, :], tl.exp2(x - log_total[None, :]), 0.0)
    elif ACTIVATION == SOFTMAX:
        prob = power * inverse[None, :]
    elif ACTIVATION == SIGMOID:
        prob = 1.0 / (1.0 + tl.exp(-x))
    else:
        prob = x
    return prob


@triton.jit
def _add_chunk(
    tp_sum, fp_sum, fn_sum, entropy_sum, mass_sum, x, y, power, inverse, log_total, counted_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr, NUM_CLASSES: tl.constexpr,
    FIRST, ROWS: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The sums, and tp, fp, fn, entropy and mass of every voxel of a chunk added to them.

    For a softmax x is its t, and the entropy is in bits. Voxels of one thread are summed at once.
    """
    p = _probability(x, power, inverse, log_total, counted_v, ACTIVATION)
    counted = (FIRST + tl.arange(0, ROWS)[:, None] < NUM_CLASSES) & counted_v[None, :]
    if ACTIVATION == SIGMOID:
        p = tl.where(counted, p, 0.0)
    tp, fp, fn = p, p, p
    # fp and fn as what tp leaves of p and y: with sums of those there is less to do, and mass for nothing
    LEFT: tl.constexpr = (FORM == MIN) | (FORM == RELAXED)
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
    SHAPE: tl.constexpr = [ROWS, VOXEL_BLOCK // VECTOR, VECTOR]
    if FORM != NO_FORM:
        tp_sum += tl.sum(tl.reshape(tp, SHAPE), 2)
        # joined, else the compiler lays labels out in a way of their own and moves them between threads
        fp, fn = tl.split(tl.join(fp, fn))
        fp_sum += tl.sum(tl.reshape(fp, SHAPE), 2)
        fn_sum += tl.sum(tl.reshape(fn, SHAPE), 2)
    if ENTROPY:
        mass = y
        if ACTIVATION == SOFTMAX:
            entropy = y * (log_total[None, :] - x)
        elif ACTIVATION == SIGMOID:
            entropy = tl.maximum(x, 0.0) - x * y + tl.log(1.0 + tl.exp(-tl.abs(x)))
            entropy = tl.where(counted, entropy, 0.0)
            mass = counted.to(tl.float32)
        else:
            entropy = -y * tl.log(tl.maximum(p, SMALLEST_NORMAL))
        entropy_sum += tl.sum(tl.reshape(entropy, SHAPE), 2)
        if ACTIVATION == SIGMOID or not LEFT:
            mass_sum += tl.sum(tl.reshape(mass, SHAPE), 2)
    return tp_sum, fp_sum, fn_sum, entropy_sum, mass_sum


@triton.jit
def _store_sums(
    row, tp, fp, fn, entropy, mass,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    c = FIRST + tl.arange(0, ROWS)
    inside = c < NUM_CLASSES
    LEFT: tl.constexpr = (FORM == MIN) | (FORM == RELAXED)
    if FORM != NO_FORM:
        tp, fp, fn = tl.sum(tp, 1), tl.sum(fp, 1), tl.sum(fn, 1)
        if LEFT:
            # never below 0, as all were summed in the same order
            label = fn
            fp -= tp
            fn -= tp
        tl.store(row + c, tp, mask=inside)
        tl.store(row + NUM_CLASSES + c, fp, mask=inside)
        tl.store(row + 2 * NUM_CLASSES + c, fn, mask=inside)
    if ENTROPY:
        entropy = tl.sum(entropy, 1)
        if ACTIVATION == SOFTMAX:
            entropy *= LN_2
        tl.store(row + 3 * NUM_CLASSES + c, entropy, mask=inside)
        if ACTIVATION != SIGMOID and LEFT:
            tl.store(row + 4 * NUM_CLASSES + c, label, mask=inside)
        else:
            tl.store(row + 4 * NUM_CLASSES + c, tl.sum(mass, 1), mask=inside)


@triton.jit
def sums_kernel(
    logits, target, valid, partials, first, num_voxels,
    logits_n, logits_c, logits_v, target_n, target_c, target_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, ROWS_C: tl.constexpr, STEP: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += n * logits_n
    target += n * target_n
    first_tile, end_tile = _tiles_of(program, tl.num_programs(0), num_voxels, VOXEL_BLOCK)
    # thread by thread, and summed over them only at the end: that takes shuffles
    tp_a = tl.zeros([ROWS_A, VOXEL_BLOCK // VECTOR], tl.float32)
    fp_a, fn_a, entropy_a, mass_a = tp_a, tp_a, tp_a, tp_a
    if ROWS_B > 0:
        tp_b = tl.zeros([ROWS_B, VOXEL_BLOCK // VECTOR], tl.float32)
        fp_b, fn_b, entropy_b, mass_b = tp_b, tp_b, tp_b, tp_b
    if ROWS_C > 0:
        tp_c = tl.zeros([ROWS_C, VOXEL_BLOCK // VECTOR], tl.float32)
        fp_c, fn_c, entropy_c, mass_c = tp_c, tp_c, tp_c, tp_c
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        v = tl.max_contiguous(tile * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK), VECTOR)
        inside_v = _inside(v, num_voxels, EVEN)
        counted_v, _, x_a, y_a, x_b, y_b, x_c, y_c = _rows_of_tile(
            logits, target, valid, None, n, v, inside_v, num_voxels,
            logits_c, logits_v, target_c, target_v,
            ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, ROWS_A, ROWS_B, ROWS_C,
        )  # fmt: skip
        e_a, e_b, e_c = x_a, x_b, x_c
        inverse = tl.zeros([VOXEL_BLOCK], tl.float32)
        log_total = inverse
        if ACTIVATION == SOFTMAX:
            x_a, e_a, x_b, e_b, x_c, e_c, _, inverse, log_total = _powers(
                x_a, x_b, x_c, counted_v, ROWS_A, ROWS_B, ROWS_C, STEP, VOXEL_BLOCK
            )
            if NUM_CLASSES > MAX_KEPT:
                e_a, e_b, e_c = None, None, None
        tp_a, fp_a, fn_a, entropy_a, mass_a = _add_chunk(
            tp_a, fp_a, fn_a, entropy_a, mass_a, x_a, y_a, e_a, inverse, log_total, counted_v,
            ACTIVATION, FORM, ENTROPY, NUM_CLASSES, 0, ROWS_A, VOXEL_BLOCK, VECTOR,
        )  # fmt: skip
        if ROWS_B > 0:
            tp_b, fp_b, fn_b, entropy_b, mass_b = _add_chunk(
                tp_b, fp_b, fn_b, entropy_b, mass_b, x_b, y_b, e_b, inverse, log_total, counted_v,
                ACTIVATION, FORM, ENTROPY, NUM_CLASSES, ROWS_A, ROWS_B, VOXEL_BLOCK, VECTOR,
            )  # fmt: skip
        if ROWS_C > 0:
            tp_c, fp_c, fn_c, entropy_c, mass_c = _add_chunk(
                tp_c, fp_c, fn_c, entropy_c, mass_c, x_c, y_c, e_c, inverse, log_total, counted_v,
                ACTIVATION, FORM, ENTROPY, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C, VOXEL_BLOCK, VECTOR,
            )  # fmt: skip
    row = partials + first + (n * tl.num_programs(0) + program) * 5 * NUM_CLASSES
    _store_sums(row, tp_a, fp_a, fn_a, entropy_a, mass_a, ACTIVATION, FORM, ENTROPY, NUM_CLASSES, 0, ROWS_A)
    if ROWS_B > 0:
        _store_sums(
            row, tp_b, fp_b, fn_b, entropy_b, mass_b,
            ACTIVATION, FORM, ENTROPY, NUM_CLASSES, ROWS_A, ROWS_B,
        )  # fmt: skip
    if ROWS_C > 0:
        _store_sums(
            row, tp_c, fp_c, fn_c, entropy_c, mass_c,
            ACTIVATION, FORM, ENTROPY, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C,
        )  # fmt: skip


@triton.jit
def _added_probabilities(
    sums, power, inverse,
    FORM: tl.constexpr, ROWS: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The sums, and the probabilities of a chunk, or for `squared` their squares, added to them."""
    prob = power * inverse[None, :]
    if FORM == SQUARED:
        prob = prob * prob
    return sums + tl.sum(tl.reshape(prob, [ROWS, VOXEL_BLOCK // VECTOR, VECTOR]), 2)


@triton.jit
def _clear(table, NUM_CLASSES: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr):
    c = FIRST + tl.arange(0, ROWS)
    tl.store(table + c, tl.zeros([ROWS], tl.int64), mask=c < NUM_CLASSES)
    tl.store(table + NUM_CLASSES + c, tl.zeros([ROWS], tl.int64), mask=c < NUM_CLASSES)


@triton.jit
def _own_sums(table, nan_or_0, NUM_CLASSES: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """tp, mass and entropy in bits of a chunk of classes."""
    c = FIRST + tl.arange(0, ROWS)
    # past the first cache, which does not see what was added
    both = tl.load(table + c, mask=c < NUM_CLASSES, other=0, cache_modifier=".cg")
    bits = tl.load(table + NUM_CLASSES + c, mask=c < NUM_CLASSES, other=0, cache_modifier=".cg")
    tp = (both % COUNT).to(tl.float32) / PROB_UNITS + nan_or_0
    return tp, (both // COUNT).to(tl.float32), bits.to(tl.float32) / BIT_UNITS + nan_or_0


@triton.jit
def _store_index_sums(
    row, prob, tp, mass, bits,
    FORM: tl.constexpr, ENTROPY: tl.constexpr, NUM_CLASSES: tl.constexpr,
    FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    c = FIRST + tl.arange(0, ROWS)
    inside = c < NUM_CLASSES
    if FORM != NO_FORM:
        fp = prob - tp
        if FORM != SQUARED:
            fp = tl.maximum(fp, 0.0)
        tl.store(row + c, tp, mask=inside)
        tl.store(row + NUM_CLASSES + c, fp, mask=inside)
        tl.store(row + 2 * NUM_CLASSES + c, tl.maximum(mass - tp, 0.0), mask=inside)
    if ENTROPY:
        tl.store(row + 3 * NUM_CLASSES + c, bits * LN_2, mask=inside)
        tl.store(row + 4 * NUM_CLASSES + c, mass, mask=inside)


@triton.jit
def _own_logits(logits, index, v, logits_c, logits_v, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr):
    """Logits of the voxels' classes, 0 where there is none: an index beyond the classes is no address."""
    row, column = index, v
    if WIDE:
        row, column = index.to(tl.int64), v.to(tl.int64)
    real = (index >= 0) & (index < NUM_CLASSES)
    return tl.load(logits + row * logits_c + column * logits_v, mask=real, other=0.0)


@triton.jit
def sums_of_indices_kernel(
    logits, target, valid, partials, first, num_voxels,
    logits_n, logits_c, logits_v, target_n, target_c, target_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, ROWS_C: tl.constexpr, STEP: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`sums_kernel` for the softmax of many classes, and class indices.

    Of all classes only the probabilities are summed. What a voxel adds to its own class is added to a table
    in memory, which lies where the program's sums go in the end: whole numbers, so that their order is all
    the same.
    """
    program, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += n * logits_n
    target += n * target_n
    first_tile, end_tile = _tiles_of(program, tl.num_programs(0), num_voxels, VOXEL_BLOCK)
    place = first + (n * tl.num_programs(0) + program) * 5 * NUM_CLASSES
    # 16 bytes a class, in the 20 of its sums, at a multiple of 8
    table = partials.to(tl.pointer_type(tl.int64), bitcast=True) + (place + 1) // 2
    _clear(table, NUM_CLASSES, 0, ROWS_A)
    prob_a = tl.zeros([ROWS_A, VOXEL_BLOCK // VECTOR], tl.float32)
    if ROWS_B > 0:
        _clear(table, NUM_CLASSES, ROWS_A, ROWS_B)
        prob_b = tl.zeros([ROWS_B, VOXEL_BLOCK // VECTOR], tl.float32)
    if ROWS_C > 0:
        _clear(table, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C)
        prob_c = tl.zeros([ROWS_C, VOXEL_BLOCK // VECTOR], tl.float32)
    tl.debug_barrier()
    nan = tl.zeros([VOXEL_BLOCK], tl.float32)
    # Labels are too few bytes to be copied past the registers, as logits are: they are loaded a tile ahead.
    v = first_tile * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK)
    labels = _loaded_labels(target, v, v < num_voxels, target_v, HARD, WIDE)
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        v = tl.max_contiguous(tile * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK), VECTOR)
        inside_v = _inside(v, num_voxels, EVEN)
        next_v = v + VOXEL_BLOCK
        next_labels = _loaded_labels(target, next_v, next_v < num_voxels, target_v, HARD, WIDE)
        counted_v, index, x_a, _, x_b, _, x_c, _ = _rows_of_tile(
            logits, target, valid, labels, n, v, inside_v, num_voxels,
            logits_c, logits_v, target_c, target_v,
            ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, ROWS_A, ROWS_B, ROWS_C,
        )  # fmt: skip
        own_x = _own_logits(logits, index, v, logits_c, logits_v, WIDE, NUM_CLASSES)
        real = (index >= 0) & (index < NUM_CLASSES)
        _, e_a, _, e_b, _, e_c, largest, inverse, log_total = _powers(
            x_a, x_b, x_c, counted_v, ROWS_A, ROWS_B, ROWS_C, STEP, VOXEL_BLOCK
        )
        t = (own_x.to(tl.float32) - largest) * LOG2_E
        # whole numbers know no NaN, which these two minima swallow
        nan += 0.0 * (log_total - t)
        own = tl.minimum(tl.exp2(t) * inverse * PROB_UNITS, PROB_UNITS).to(tl.int64) + COUNT
        bits = tl.minimum((log_total - t) * BIT_UNITS, MAX_BIT_UNITS).to(tl.int64)
        tl.atomic_add(table + index, own, mask=real, sem="relaxed")
        tl.atomic_add(table + NUM_CLASSES + index, bits, mask=real, sem="relaxed")
        prob_a = _added_probabilities(prob_a, e_a, inverse, FORM, ROWS_A, VOXEL_BLOCK, VECTOR)
        if ROWS_B > 0:
            prob_b = _added_probabilities(prob_b, e_b, inverse, FORM, ROWS_B, VOXEL_BLOCK, VECTOR)
        if ROWS_C > 0:
            prob_c = _added_probabilities(prob_c, e_c, inverse, FORM, ROWS_C, VOXEL_BLOCK, VECTOR)
        labels = next_labels
    tl.debug_barrier()
    nan_or_0 = tl.sum(nan, 0)
    tp_a, mass_a, bits_a = _own_sums(table, nan_or_0, NUM_CLASSES, 0, ROWS_A)
    if ROWS_B > 0:
        tp_b, mass_b, bits_b = _own_sums(table, nan_or_0, NUM_CLASSES, ROWS_A, ROWS_B)
    if ROWS_C > 0:
        tp_c, mass_c, bits_c = _own_sums(table, nan_or_0, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C)
    tl.debug_barrier()
    row = partials + place
    _store_index_sums(row, tl.sum(prob_a, 1), tp_a, mass_a, bits_a, FORM, ENTROPY, NUM_CLASSES, 0, ROWS_A)
    if ROWS_B > 0:
        _store_index_sums(
            row, tl.sum(prob_b, 1), tp_b, mass_b, bits_b, FORM, ENTROPY, NUM_CLASSES, ROWS_A, ROWS_B
        )
    if ROWS_C > 0:
        _store_index_sums(
            row, tl.sum(prob_c, 1), tp_c, mass_c, bits_c,
            FORM, ENTROPY, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C,
        )  # fmt: skip


@triton.jit
def _weighted_rows(
    grad_sums, x, y, power, inverse, log_total, counted_v, factor,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """Probabilities, and for a softmax w = p dL/dp - e y, else the gradient itself."""
    prob = _probability(x, power, inverse, log_total, counted_v, ACTIVATION)
    # loaded as a row and turned: else the compiler lays the whole tile out along these few numbers
    c = FIRST + tl.arange(0, ROWS)
    place, inside = grad_sums + c, c < NUM_CLASSES
    grad_prob = tl.zeros(x.shape, tl.float32)
    if FORM != NO_FORM:
        grad_tp = (tl.load(place, mask=inside, other=0.0) * factor)[:, None]
        grad_fp = (tl.load(place + NUM_CLASSES, mask=inside, other=0.0) * factor)[:, None]
        grad_fn = (tl.load(place + 2 * NUM_CLASSES, mask=inside, other=0.0) * factor)[:, None]
        if FORM == MIN:
            grad_prob = tl.where(prob < y, grad_tp - grad_fn, tl.where(prob > y, grad_fp, 0.0))
        elif FORM == PRODUCT:
            grad_prob = tl.where(prob < y, -grad_fn, tl.where(prob > y, grad_fp, 0.0)) + grad_tp * y
        elif FORM == SQUARED:
            grad_prob = (grad_tp - grad_fp - grad_fn) * y + 2.0 * grad_fp * prob
        else:
            grad_prob = grad_fp + (grad_tp - grad_fp - grad_fn) * y
    grad_entropy = tl.zeros([1, 1], tl.float32)
    if ENTROPY:
        grad_entropy = (tl.load(place + 3 * NUM_CLASSES, mask=inside, other=0.0) * factor)[:, None]
    if ACTIVATION == SOFTMAX:
        # where a voxel does not count, p and y are 0
        result = prob * grad_prob - grad_entropy * y
    elif ACTIVATION == SIGMOID:
        result = prob * (1.0 - prob) * grad_prob + grad_entropy * (prob - y)
        result = tl.where(counted_v[None, :], result, 0.0)
    else:
        held = prob < SMALLEST_NORMAL
        result = grad_prob - tl.where(held, 0.0, grad_entropy * y / tl.where(held, 1.0, prob))
        result = tl.where(counted_v[None, :], result, 0.0)
    return prob, result


@triton.jit
def _own_values(
    logits, grad_sums, index, v, logits_c, logits_v,
    FORM: tl.constexpr, ENTROPY: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
):  # fmt: skip
    """Of the voxel's own class: its logit, and what dL/dp and w have there beyond those of other classes.

    The logit is read again, which is less work than to look for it among all. Where there is no class all
    are 0.
    """
    real = (index >= 0) & (index < NUM_CLASSES)
    x = tl.zeros(index.shape, tl.float32)
    slope, grad_entropy = x, x
    if FORM != NO_FORM:
        x = _own_logits(logits, index, v, logits_c, logits_v, WIDE, NUM_CLASSES).to(tl.float32)
        grad_tp = tl.load(grad_sums + index, mask=real, other=0.0)
        grad_fp = tl.load(grad_sums + NUM_CLASSES + index, mask=real, other=0.0)
        grad_fn = tl.load(grad_sums + 2 * NUM_CLASSES + index, mask=real, other=0.0)
        slope = grad_tp - grad_fp - grad_fn
    if ENTROPY:
        grad_entropy = tl.load(grad_sums + 3 * NUM_CLASSES + index, mask=real, other=0.0)
    return x, slope, grad_entropy


@triton.jit
def _other_classes(
    grad_sums, power, inverse, factor,
    FORM: tl.constexpr, NUM_CLASSES: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dL/dp where the voxel's label is another class."""
    c = FIRST + tl.arange(0, ROWS)
    slope = tl.zeros([ROWS, 1], tl.float32)
    if FORM != NO_FORM:
        slope = (tl.load(grad_sums + NUM_CLASSES + c, mask=c < NUM_CLASSES, other=0.0) * factor)[:, None]
    if FORM == SQUARED:
        slope = 2.0 * slope * (power * inverse[None, :])
    return slope


@triton.jit
def _hard_rows(index, power, slope, inverse, summed, own, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Gradient p (dL/dp - Σ w), and beyond it that of the voxel's own class."""
    row = FIRST + tl.arange(0, ROWS)[:, None]
    result = power * (slope * inverse[None, :] - (summed * inverse)[None, :])
    return result + tl.where(row == index[None, :], own[None, :], 0.0)


@triton.jit
def _store_rows(
    gradient, v, result, inside_v, gradient_c, gradient_v,
    WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = FIRST + tl.arange(0, ROWS)[:, None], v[None, :]
    mask = (row < NUM_CLASSES) & inside_v[None, :]
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    place = gradient + row * gradient_c + column * gradient_v
    tl.store(place, result.to(gradient.dtype.element_ty), mask=mask)


@triton.jit
def _from_the_end(VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Image and voxels of a program: what the forward pass read last is still cached, and comes first."""
    n = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return n, tl.max_contiguous(program * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK), VECTOR)


@triton.jit
def gradient_kernel(
    logits, target, valid, grad_sums, scale, gradient, num_voxels,
    logits_n, logits_c, logits_v, target_n, target_c, target_v, gradient_n, gradient_c, gradient_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, ROWS_C: tl.constexpr, STEP: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    n, v = _from_the_end(VOXEL_BLOCK, VECTOR)
    logits += n * logits_n
    target += n * target_n
    gradient += n * gradient_n
    grad_sums += n * 4 * NUM_CLASSES
    factor = tl.load(scale)
    inside_v = _inside(v, num_voxels, EVEN)
    counted_v, index, x_a, y_a, x_b, y_b, x_c, y_c = _rows_of_tile(
        logits, target, valid, None, n, v, inside_v, num_voxels,
        logits_c, logits_v, target_c, target_v,
        ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, ROWS_A, ROWS_B, ROWS_C,
    )  # fmt: skip
    if ACTIVATION == SOFTMAX and HARD and NUM_CLASSES > MAX_COMPARED:
        # before warps wait for each other, and so together with the logits
        own_x, own_slope, grad_entropy = _own_values(
            logits, grad_sums, index, v, logits_c, logits_v, FORM, ENTROPY, WIDE, NUM_CLASSES
        )
    e_a, e_b, e_c = x_a, x_b, x_c
    inverse = tl.zeros([VOXEL_BLOCK], tl.float32)
    if ACTIVATION == SOFTMAX:
        _, e_a, _, e_b, _, e_c, largest, inverse, _ = _powers(
            x_a, x_b, x_c, counted_v, ROWS_A, ROWS_B, ROWS_C, STEP, VOXEL_BLOCK
        )
    if ACTIVATION == SOFTMAX and HARD and NUM_CLASSES > MAX_COMPARED:
        own_p = tl.exp2((own_x - largest) * LOG2_E) * inverse
        own = factor * (own_p * own_slope - grad_entropy)
        u_a = _other_classes(grad_sums, e_a, inverse, factor, FORM, NUM_CLASSES, 0, ROWS_A)
        summed = _summed(e_a * u_a, ROWS_A, STEP, VOXEL_BLOCK)
        if ROWS_B > 0:
            u_b = _other_classes(grad_sums, e_b, inverse, factor, FORM, NUM_CLASSES, ROWS_A, ROWS_B)
            summed += _summed(e_b * u_b, ROWS_B, STEP, VOXEL_BLOCK)
        if ROWS_C > 0:
            u_c = _other_classes(grad_sums, e_c, inverse, factor, FORM, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C)
            summed += _summed(e_c * u_c, ROWS_C, STEP, VOXEL_BLOCK)
        summed_v = tl.sum(summed, 0) * inverse + own
        g_a = _hard_rows(index, e_a, u_a, inverse, summed_v, own, 0, ROWS_A)
        if ROWS_B > 0:
            g_b = _hard_rows(index, e_b, u_b, inverse, summed_v, own, ROWS_A, ROWS_B)
        if ROWS_C > 0:
            g_c = _hard_rows(index, e_c, u_c, inverse, summed_v, own, ROWS_A + ROWS_B, ROWS_C)
    else:
        p_a, g_a = _weighted_rows(
            grad_sums, x_a, y_a, e_a, inverse, None, counted_v, factor,
            ACTIVATION, FORM, ENTROPY, NUM_CLASSES, 0, ROWS_A,
        )  # fmt: skip
        summed = _summed(g_a, ROWS_A, STEP, VOXEL_BLOCK)
        if ROWS_B > 0:
            p_b, g_b = _weighted_rows(
                grad_sums, x_b, y_b, e_b, inverse, None, counted_v, factor,
                ACTIVATION, FORM, ENTROPY, NUM_CLASSES, ROWS_A, ROWS_B,
            )  # fmt: skip
            summed += _summed(g_b, ROWS_B, STEP, VOXEL_BLOCK)
        if ROWS_C > 0:
            p_c, g_c = _weighted_rows(
                grad_sums, x_c, y_c, e_c, inverse, None, counted_v, factor,
                ACTIVATION, FORM, ENTROPY, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C,
            )  # fmt: skip
            summed += _summed(g_c, ROWS_C, STEP, VOXEL_BLOCK)
        if ACTIVATION == SOFTMAX:
            summed_row = tl.sum(summed, 0)[None, :]
            g_a -= p_a * summed_row
            if ROWS_B > 0:
                g_b -= p_b * summed_row
            if ROWS_C > 0:
                g_c -= p_c * summed_row
    _store_rows(gradient, v, g_a, inside_v, gradient_c, gradient_v, WIDE, NUM_CLASSES, 0, ROWS_A)
    if ROWS_B > 0:
        _store_rows(gradient, v, g_b, inside_v, gradient_c, gradient_v, WIDE, NUM_CLASSES, ROWS_A, ROWS_B)
    if ROWS_C > 0:
        _store_rows(
            gradient, v, g_c, inside_v, gradient_c, gradient_v, WIDE, NUM_CLASSES, ROWS_A + ROWS_B, ROWS_C
        )


@triton.jit
def norms_kernel(
    logits, norms, num_voxels, logits_n, logits_c, logits_v,
    WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr, STEP: tl.constexpr, CLASS_BLOCK: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Of each voxel the largest logit and log2 Σ 2^t, t = log2 e (x - largest), over classes block by block.

    Every STEP-th class has a largest one and a sum of its own, which are brought together at the end.
    """
    program, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v = tl.max_contiguous(program * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK), VECTOR)
    logits += n * logits_n
    inside_v = _inside(v, num_voxels, EVEN)
    # above what only pads, so that this adds nothing
    largest = tl.full([STEP, VOXEL_BLOCK], FAR_BELOW, tl.float32)
    total = tl.zeros([STEP, VOXEL_BLOCK], tl.float32)
    for first in tl.range(0, NUM_CLASSES, CLASS_BLOCK, num_stages=NUM_STAGES):
        row, column = first + tl.arange(0, CLASS_BLOCK)[:, None], v[None, :]
        inside = (row < NUM_CLASSES) & inside_v[None, :]
        if WIDE:
            row, column = row.to(tl.int64), column.to(tl.int64)
        x = tl.load(logits + row * logits_c + column * logits_v, mask=inside, other=float("-inf"))
        x = tl.reshape(x.to(tl.float32), [CLASS_BLOCK // STEP, STEP, VOXEL_BLOCK])
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        # no rounded multiple of the largest here: of every step, and of all, it would be another
        power = tl.exp2((x - tl.reshape(largest, [1, STEP, VOXEL_BLOCK])) * LOG2_E)
        total = total * tl.exp2((before - largest) * LOG2_E) + tl.sum(power, 0)
    largest_v = tl.max(largest, 0)
    total_v = tl.sum(total * tl.exp2((largest - largest_v[None, :]) * LOG2_E), 0)
    column = v.to(tl.int64) if WIDE else v
    place = norms + 2 * n * num_voxels + column
    tl.store(place, largest_v, mask=inside_v)
    tl.store(place + num_voxels, tl.log2(tl.where(inside_v, total_v, 1.0)), mask=inside_v)


@triton.jit
def _rows_of_block(
    logits, target, norms, n, index, v, inside_v, counted_v, num_voxels,
    logits_c, logits_v, target_c, target_v,
    ACTIVATION: tl.constexpr, HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """`_rows_of_chunk`, but for a softmax t of `norms_kernel`, and log2 Σ 2^t of each voxel."""
    x, y = _rows_of_chunk(
        logits, target, index, v, inside_v, counted_v, logits_c, logits_v, target_c, target_v,
        ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, FIRST, ROWS,
    )  # fmt: skip
    log_total = tl.zeros(v.shape, tl.float32)
    if ACTIVATION == SOFTMAX:
        place = norms + 2 * n * num_voxels + (v.to(tl.int64) if WIDE else v)
        # those of a voxel that does not count may be anything, even NaN
        largest = tl.load(place, mask=counted_v, other=0.0)
        log_total = tl.load(place + num_voxels, mask=counted_v, other=0.0)
        x = (x - largest[None, :]) * LOG2_E
    return x, y, log_total


@triton.jit
def sums_by_class_kernel(
    logits, target, valid, partials, norms, first, num_voxels,
    logits_n, logits_c, logits_v, target_n, target_c, target_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    CLASS_BLOCK: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`sums_kernel` of a block of classes, with what a softmax has of all."""
    # blocks of classes of the same voxels run side by side
    num_blocks: tl.constexpr = (NUM_CLASSES + CLASS_BLOCK - 1) // CLASS_BLOCK
    program, n = tl.program_id(0) // num_blocks, tl.program_id(1).to(tl.int64)
    num_programs = tl.num_programs(0) // num_blocks
    first_class = tl.program_id(0) % num_blocks * CLASS_BLOCK
    logits += n * logits_n
    target += n * target_n
    first_tile, end_tile = _tiles_of(program, num_programs, num_voxels, VOXEL_BLOCK)
    tp = tl.zeros([CLASS_BLOCK, VOXEL_BLOCK // VECTOR], tl.float32)
    fp, fn, entropy, mass = tp, tp, tp, tp
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        v = tl.max_contiguous(tile * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK), VECTOR)
        inside_v = _inside(v, num_voxels, EVEN)
        labels = _loaded_labels(target, v, inside_v, target_v, HARD, WIDE)
        counted_v, index = _counted(valid, labels, n, v, inside_v, num_voxels, HAS_VALID, WIDE)
        x, y, log_total = _rows_of_block(
            logits, target, norms, n, index, v, inside_v, counted_v, num_voxels,
            logits_c, logits_v, target_c, target_v,
            ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, first_class, CLASS_BLOCK,
        )  # fmt: skip
        tp, fp, fn, entropy, mass = _add_chunk(
            tp, fp, fn, entropy, mass, x, y, None, None, log_total, counted_v,
            ACTIVATION, FORM, ENTROPY, NUM_CLASSES, first_class, CLASS_BLOCK, VOXEL_BLOCK, VECTOR,
        )  # fmt: skip
    row = partials + first + (n * num_programs + program) * 5 * NUM_CLASSES
    _store_sums(
        row, tp, fp, fn, entropy, mass, ACTIVATION, FORM, ENTROPY, NUM_CLASSES, first_class, CLASS_BLOCK
    )


@triton.jit
def gradient_by_class_kernel(
    logits, target, valid, grad_sums, scale, gradient, norms, num_voxels,
    logits_n, logits_c, logits_v, target_n, target_c, target_v, gradient_n, gradient_c, gradient_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, HAS_VALID: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    STEP: tl.constexpr, CLASS_BLOCK: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`gradient_kernel` over classes block by block, twice for a softmax: first Σ w, then the gradient."""
    n, v = _from_the_end(VOXEL_BLOCK, VECTOR)
    logits += n * logits_n
    target += n * target_n
    gradient += n * gradient_n
    grad_sums += n * 4 * NUM_CLASSES
    factor = tl.load(scale)
    inside_v = _inside(v, num_voxels, EVEN)
    labels = _loaded_labels(target, v, inside_v, target_v, HARD, WIDE)
    counted_v, index = _counted(valid, labels, n, v, inside_v, num_voxels, HAS_VALID, WIDE)
    summed = tl.zeros([STEP, VOXEL_BLOCK], tl.float32)
    if ACTIVATION == SOFTMAX:
        for first in tl.range(0, NUM_CLASSES, CLASS_BLOCK, num_stages=NUM_STAGES):
            x, y, log_total = _rows_of_block(
                logits, target, norms, n, index, v, inside_v, counted_v, num_voxels,
                logits_c, logits_v, target_c, target_v,
                ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, first, CLASS_BLOCK,
            )  # fmt: skip
            _, w = _weighted_rows(
                grad_sums, x, y, None, None, log_total, counted_v, factor,
                ACTIVATION, FORM, ENTROPY, NUM_CLASSES, first, CLASS_BLOCK,
            )  # fmt: skip
            summed += _summed(w, CLASS_BLOCK, STEP, VOXEL_BLOCK)
    summed_row = tl.sum(summed, 0)[None, :]
    for first in tl.range(0, NUM_CLASSES, CLASS_BLOCK, num_stages=NUM_STAGES):
        x, y, log_total = _rows_of_block(
            logits, target, norms, n, index, v, inside_v, counted_v, num_voxels,
            logits_c, logits_v, target_c, target_v,
            ACTIVATION, HARD, HAS_VALID, WIDE, NUM_CLASSES, first, CLASS_BLOCK,
        )  # fmt: skip
        p, g = _weighted_rows(
            grad_sums, x, y, None, None, log_total, counted_v, factor,
            ACTIVATION, FORM, ENTROPY, NUM_CLASSES, first, CLASS_BLOCK,
        )  # fmt: skip
        if ACTIVATION == SOFTMAX:
            g -= p * summed_row
        _store_rows(gradient, v, g, inside_v, gradient_c, gradient_v, WIDE, NUM_CLASSES, first, CLASS_BLOCK)


@triton.jit
def _shaped(error, gamma, LOG: tl.constexpr, FOCAL: tl.constexpr):
    """Loss of a class from its Tversky error, and the derivative in the error."""
    loss = error
    slope = tl.full(error.shape, 1.0, tl.float32)
    if LOG:
        limit = 1.0 - 1e-7
        index = 1.0 - tl.minimum(error, limit)
        loss = -tl.log(index)
        slope = tl.where(error <= limit, 1.0 / index, 0.0)
    if FOCAL:
        positive = loss > 0.0
        logarithm = tl.log(tl.where(positive, loss, 1.0))
        slope = tl.where(positive, slope * gamma * tl.exp((gamma - 1.0) * logarithm), 0.0)
        loss = tl.where(positive, tl.exp(gamma * logarithm), 0.0)
    return loss, slope


@triton.jit
def _region_terms(
    tp, fp, fn, alpha, beta, gamma, smooth, LOG: tl.constexpr, FOCAL: tl.constexpr, PRESENT: tl.constexpr
):
    """Loss, its derivatives in tp, fp and fn, and whether the class counts."""
    errors = alpha * fp + beta * fn
    denominator = tp + errors + smooth
    something = denominator > 0.0
    safe = tl.where(something, denominator, 1.0)
    loss, slope = _shaped(errors / safe, gamma, LOG, FOCAL)
    slope = tl.where(something, slope / (safe * safe), slope)
    grad_tp = tl.where(something, -slope * errors, 0.0)
    grad_fp = tl.where(something, slope * alpha * (tp + smooth), slope * alpha)
    grad_fn = tl.where(something, slope * beta * (tp + smooth), slope * beta)
    counted = tl.full(tp.shape, 1.0, tl.float32)
    if PRESENT:
        counted = (tp + fn > 0.0).to(tl.float32)
    return loss, grad_tp, grad_fp, grad_fn, counted


@triton.jit
def _add_up(
    partials, sums, first_column, num_images, num_programs, num_classes,
    COLUMN_BLOCK: tl.constexpr, PROGRAM_BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the sums (N, 5, C), from those of all programs (N, T, 5, C)."""
    row_length = 5 * num_classes
    column = first_column + tl.arange(0, COLUMN_BLOCK)
    real = column < num_images * row_length
    image = (column // row_length).to(tl.int64)
    place = partials + image * num_programs * row_length + column % row_length
    total = tl.zeros([PROGRAM_BLOCK, COLUMN_BLOCK], tl.float32)
    for first in range(0, num_programs, PROGRAM_BLOCK):
        program = (first + tl.arange(0, PROGRAM_BLOCK))[:, None]
        mask = (program < num_programs) & real[None, :]
        total += tl.load(place[None, :] + program.to(tl.int64) * row_length, mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=real)


@triton.jit
def totals_kernel(
    partials, room, first, num_images, num_programs, num_classes,
    COLUMN_BLOCK: tl.constexpr, PROGRAM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of all programs, into the room from `first` on."""
    column = tl.program_id(0) * COLUMN_BLOCK
    _add_up(
        partials, room + first, column, num_images, num_programs, num_classes, COLUMN_BLOCK, PROGRAM_BLOCK
    )


@triton.jit
def _images(first, num_images, num_classes, num_sums, CLASS_BLOCK: tl.constexpr, IMAGE_BLOCK: tl.constexpr):
    """Places of the first sum of a block of images and all classes, and which of them there are."""
    n = (first + tl.arange(0, IMAGE_BLOCK))[:, None]
    c = tl.arange(0, CLASS_BLOCK)[None, :]
    return n * num_sums * num_classes + c, (n < num_images) & (c < num_classes)


@triton.jit
def _three(place, real, num_classes):
    """tp, fp and fn."""
    tp = tl.load(place, mask=real, other=0.0)
    fp = tl.load(place + num_classes, mask=real, other=0.0)
    return tp, fp, tl.load(place + 2 * num_classes, mask=real, other=0.0)


@triton.jit
def loss_kernel(
    room,
    class_weight,
    total_loss,
    terms,
    num_images,
    num_programs,
    num_classes,
    alpha,
    beta,
    gamma,
    smooth,
    entropy_weight,
    region_weight,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    LOG: tl.constexpr,
    FOCAL: tl.constexpr,
    PRESENT: tl.constexpr,
    OVER: tl.constexpr,
    BACKGROUND: tl.constexpr,
    TERMS: tl.constexpr,
    ADDED_UP: tl.constexpr,
    CLASS_BLOCK: tl.constexpr,
    IMAGE_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    PROGRAM_BLOCK: tl.constexpr,
):
    """Total, cross entropy and region loss, and the derivative of the total in every sum; one program.

    In the room lie the derivatives, behind them the totals of the sums and, unless they are added up already,
    behind those the partial sums. Images are taken many at a time: a load takes a microsecond, however much
    it brings.
    """
    grad_sums, sums = room, room + 4 * num_images * num_classes
    if not ADDED_UP:
        partials = room + 9 * num_images * num_classes
        for first in range(0, 5 * num_images * num_classes, COLUMN_BLOCK):
            _add_up(partials, sums, first, num_images, num_programs, num_classes, COLUMN_BLOCK, PROGRAM_BLOCK)
        tl.debug_barrier()
    c = tl.arange(0, CLASS_BLOCK)
    weight = (c < num_classes).to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(class_weight + c, mask=c < num_classes, other=0.0)
    cross_entropy = 0.0
    if ENTROPY:
        entropy = tl.zeros([CLASS_BLOCK], tl.float32)
        mass = tl.zeros([CLASS_BLOCK], tl.float32)
        for first in range(0, num_images, IMAGE_BLOCK):
            at, real = _images(first, num_images, num_classes, 5, CLASS_BLOCK, IMAGE_BLOCK)
            entropy += tl.sum(tl.load(sums + at + 3 * num_classes, mask=real, other=0.0), 0)
            mass += tl.sum(tl.load(sums + at + 4 * num_classes, mask=real, other=0.0), 0)
        weighted_mass = tl.sum(mass * weight, 0)
        weighted_mass = tl.where(weighted_mass > 0.0, weighted_mass, 1.0)
        cross_entropy = tl.sum(entropy * weight, 0) / weighted_mass
        grad_entropy = entropy_weight * weight / weighted_mass
        for first in range(0, num_images, IMAGE_BLOCK):
            at, real = _images(first, num_images, num_classes, 4, CLASS_BLOCK, IMAGE_BLOCK)
            both = tl.broadcast_to(grad_entropy[None, :], [IMAGE_BLOCK, CLASS_BLOCK])
            tl.store(grad_sums + at + 3 * num_classes, both, mask=real)
    region = 0.0
    if FORM != NO_FORM:
        if not BACKGROUND:
            weight = tl.where(c > 0, weight, 0.0)
        tp = tl.zeros([1, CLASS_BLOCK], tl.float32)
        fp, fn = tp, tp
        # over classes: how many images count, and their mean loss; over images: how many have a class
        num_counted = tl.zeros([CLASS_BLOCK], tl.float32)
        class_loss = num_counted
        num_with_class = 0.0
        image_loss = 0.0
        for first in range(0, num_images, IMAGE_BLOCK):
            at, real = _images(first, num_images, num_classes, 5, CLASS_BLOCK, IMAGE_BLOCK)
            tp_n, fp_n, fn_n = _three(sums + at, real, num_classes)
            if OVER == BATCH:
                tp += tl.sum(tp_n, 0)[None, :]
                fp += tl.sum(fp_n, 0)[None, :]
                fn += tl.sum(fn_n, 0)[None, :]
            else:
                loss, _, _, _, counted = _region_terms(
                    tp_n, fp_n, fn_n, alpha, beta, gamma, smooth, LOG, FOCAL, PRESENT
                )
                counted = tl.where(real, counted, 0.0)
                num_counted += tl.sum(counted, 0)
                class_loss += tl.sum(loss * counted, 0)
                mass_n = tl.sum(counted * weight[None, :], 1)
                of_image = tl.sum(loss * counted * weight[None, :], 1) / tl.where(mass_n > 0.0, mass_n, 1.0)
                image_loss += tl.sum(of_image, 0)
                num_with_class += tl.sum((mass_n > 0.0).to(tl.float32), 0)
        # what each image and class contributes to the mean: share[c] for batch and class
        share = weight
        num_images_meant = tl.where(num_with_class > 0.0, num_with_class, 1.0)
        if OVER == BATCH:
            loss, grad_tp, grad_fp, grad_fn, counted = _region_terms(
                tp, fp, fn, alpha, beta, gamma, smooth, LOG, FOCAL, PRESENT
            )
            share = tl.sum(counted, 0) * weight
            total_share = tl.sum(share, 0)
            share = share / tl.where(total_share > 0.0, total_share, 1.0)
            region = tl.sum(tl.sum(loss, 0) * share, 0)
        elif OVER == IMAGE:
            region = image_loss / num_images_meant
        else:
            share = tl.where(num_counted > 0.0, weight, 0.0)
            total_share = tl.sum(share, 0)
            share = share / tl.where(total_share > 0.0, total_share, 1.0)
            share = share / tl.where(num_counted > 0.0, num_counted, 1.0)
            region = tl.sum(class_loss * share, 0)
        for first in range(0, num_images, IMAGE_BLOCK):
            part = tl.broadcast_to((region_weight * share)[None, :], [IMAGE_BLOCK, CLASS_BLOCK])
            if OVER != BATCH:
                at, real = _images(first, num_images, num_classes, 5, CLASS_BLOCK, IMAGE_BLOCK)
                tp_n, fp_n, fn_n = _three(sums + at, real, num_classes)
                loss, grad_tp, grad_fp, grad_fn, counted = _region_terms(
                    tp_n, fp_n, fn_n, alpha, beta, gamma, smooth, LOG, FOCAL, PRESENT
                )
                part *= counted
                if OVER == IMAGE:
                    mass_n = tl.sum(counted * weight[None, :], 1)
                    part = part / (tl.where(mass_n > 0.0, mass_n, 1.0) * num_images_meant)[:, None]
            at, real = _images(first, num_images, num_classes, 4, CLASS_BLOCK, IMAGE_BLOCK)
            tl.store(grad_sums + at, part * grad_tp, mask=real)
            tl.store(grad_sums + at + num_classes, part * grad_fp, mask=real)
            tl.store(grad_sums + at + 2 * num_classes, part * grad_fn, mask=real)
    tl.store(total_loss, entropy_weight * cross_entropy + region_weight * region)
    if TERMS:
        tl.store(terms, cross_entropy)
        tl.store(terms + 1, region)
