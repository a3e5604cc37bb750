"""Gradient in the logits: probabilities are computed again, and the only tensor written has the logits' size.

For a softmax the gradient is w - p Σ w, with w = p dL/dp - dL/dentropy y and the sum over classes. For class
indices and more than a few classes, dL/dp is computed as for a voxel of another class, and what the
voxel's own class has beyond that is added: much less work.
"""

import triton
import triton.language as tl

from .tile import (
    LOG2_E,
    MIN,
    NO_FORM,
    PRODUCT,
    SIGMOID,
    SMALLEST_NORMAL,
    SOFTMAX,
    SQUARED,
    Source,
    add_steps,
    addresses,
    own_logits,
    probability,
    read_tile,
    softmax_powers,
    voxels_of,
)

# up to so many classes it is less work to compare an index with every class than to load its own values
MAX_COMPARED = tl.constexpr(7)


@triton.jit
def weighted_chunk(
    grad_sums_ptr,  # (4, C): the derivatives of one image
    x, y, power, inverse, log_total, counted, scale,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr,
):  # fmt: skip
    """Probabilities, and for a softmax w; for other activations the gradient itself."""
    prob = probability(x, power, inverse, log_total, counted, ACTIVATION=ACTIVATION)
    # Loaded as a row, then turned: otherwise the compiler lays out the tile for these few numbers.
    c = FIRST + tl.arange(0, ROWS)
    place, inside = grad_sums_ptr + c, c < NUM_CLASSES
    grad_prob = tl.zeros(x.shape, tl.float32)
    if FORM != NO_FORM:
        grad_tp = (tl.load(place, mask=inside, other=0.0) * scale)[:, None]
        grad_fp = (tl.load(place + NUM_CLASSES, mask=inside, other=0.0) * scale)[:, None]
        grad_fn = (tl.load(place + 2 * NUM_CLASSES, mask=inside, other=0.0) * scale)[:, None]
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
        grad_entropy = (tl.load(place + 3 * NUM_CLASSES, mask=inside, other=0.0) * scale)[:, None]
    if ACTIVATION == SOFTMAX:
        # where a voxel does not count, p and y are 0
        result = prob * grad_prob - grad_entropy * y
    elif ACTIVATION == SIGMOID:
        result = prob * (1.0 - prob) * grad_prob + grad_entropy * (prob - y)
        result = tl.where(counted[None, :], result, 0.0)
    else:
        clamped = prob < SMALLEST_NORMAL
        result = grad_prob - tl.where(clamped, 0.0, grad_entropy * y / tl.where(clamped, 1.0, prob))
        result = tl.where(counted[None, :], result, 0.0)
    return prob, result


@triton.jit
def _dense_gradient(
    grad_sums_ptr, xs, ys, powers, inverse, counted, scale,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NUM_CLASSES: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradient of every chunk, from a target of every class."""
    probs, weighted, total = (), (), None
    for i in tl.static_range(len(CHUNKS)):
        prob, w = weighted_chunk(
            grad_sums_ptr, xs[i], ys[i], powers[i], inverse, None, counted, scale,
            ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES,
            FIRST=CHUNKS[i][0], ROWS=CHUNKS[i][1],
        )  # fmt: skip
        probs += (prob,)
        weighted += (w,)
        total = add_steps(total, w, STEP=STEP)
    gradients = weighted
    if ACTIVATION == SOFTMAX:
        total = tl.sum(total, 0)[None, :]
        gradients = ()
        for i in tl.static_range(len(CHUNKS)):
            gradients += (weighted[i] - probs[i] * total,)
    return gradients


@triton.jit
def _own_values(
    logits, grad_sums_ptr, index, voxels, FORM: tl.constexpr, ENTROPY: tl.constexpr, NUM_CLASSES: tl.constexpr
):
    """Of the voxel's own class: logit, dL/dp beyond that of other classes, and dL/dentropy.

    All are 0 for a voxel without a class. The logit is loaded again, which is less work than to find it in
    the tile.
    """
    has_class = (index >= 0) & (index < NUM_CLASSES)
    x = tl.zeros(index.shape, tl.float32)
    slope, grad_entropy = x, x
    if FORM != NO_FORM:
        x = own_logits(logits, index, voxels, NUM_CLASSES=NUM_CLASSES).to(tl.float32)
        grad_tp = tl.load(grad_sums_ptr + index, mask=has_class, other=0.0)
        grad_fp = tl.load(grad_sums_ptr + NUM_CLASSES + index, mask=has_class, other=0.0)
        grad_fn = tl.load(grad_sums_ptr + 2 * NUM_CLASSES + index, mask=has_class, other=0.0)
        slope = grad_tp - grad_fp - grad_fn
    if ENTROPY:
        grad_entropy = tl.load(grad_sums_ptr + 3 * NUM_CLASSES + index, mask=has_class, other=0.0)
    return x, slope, grad_entropy


@triton.jit
def _other_slope(
    grad_sums_ptr, power, inverse, scale,
    FORM: tl.constexpr, NUM_CLASSES: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dL/dp of a chunk for voxels of another class."""
    c = FIRST + tl.arange(0, ROWS)
    slope = tl.zeros([ROWS, 1], tl.float32)
    if FORM != NO_FORM:
        slope = (tl.load(grad_sums_ptr + NUM_CLASSES + c, mask=c < NUM_CLASSES, other=0.0) * scale)[:, None]
    if FORM == SQUARED:
        slope = 2.0 * slope * (power * inverse[None, :])
    return slope


@triton.jit
def _index_chunk(index, power, slope, inverse, total, own, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Gradient of a chunk, p (dL/dp - Σ w), and what the voxel's own class has beyond it."""
    row = FIRST + tl.arange(0, ROWS)[:, None]
    result = power * (slope * inverse[None, :] - (total * inverse)[None, :])
    return result + tl.where(row == index[None, :], own[None, :], 0.0)


@triton.jit
def _index_gradient(
    grad_sums_ptr, powers, own_values, index, largest, inverse, scale,
    FORM: tl.constexpr, NUM_CLASSES: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradient of every chunk, for a softmax and class indices."""
    own_x, own_slope, grad_entropy = own_values
    own_p = tl.exp2((own_x - largest) * LOG2_E) * inverse
    own = scale * (own_p * own_slope - grad_entropy)
    slopes, total = (), None
    for i in tl.static_range(len(CHUNKS)):
        slope = _other_slope(
            grad_sums_ptr, powers[i], inverse, scale,
            FORM=FORM, NUM_CLASSES=NUM_CLASSES, FIRST=CHUNKS[i][0], ROWS=CHUNKS[i][1],
        )  # fmt: skip
        slopes += (slope,)
        total = add_steps(total, powers[i] * slope, STEP=STEP)
    total = tl.sum(total, 0) * inverse + own
    gradients = ()
    for i in tl.static_range(len(CHUNKS)):
        chunk = _index_chunk(
            index, powers[i], slopes[i], inverse, total, own, FIRST=CHUNKS[i][0], ROWS=CHUNKS[i][1]
        )
        gradients += (chunk,)
    return gradients


@triton.jit
def store_chunk(gradient, voxels, result, NUM_CLASSES: tl.constexpr, FIRST, ROWS: tl.constexpr):
    """Store a chunk (ROWS, V) of the gradient."""
    place, inside = addresses(gradient, voxels, NUM_CLASSES=NUM_CLASSES, FIRST=FIRST, ROWS=ROWS)
    tl.store(place, result.to(gradient.ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_from_end():
    """Image and tile of a program: the forward pass read the last ones last, and they are still cached."""
    n = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    return n, tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def gradient_kernel(
    logits_ptr,  # (N, C, V)
    target_ptr,  # (N, C, V), or class indices (N, V)
    valid_ptr,  # (N, V), or None
    grad_sums_ptr,  # (N, 4, C): dL/dtp, dL/dfp, dL/dfn, dL/dentropy
    scale_ptr,  # (): factor of grad_sums
    gradient_ptr,  # (N, C, V)
    num_voxels,
    logits_stride_n, logits_stride_c, logits_stride_v, target_stride_n, target_stride_c, target_stride_v,
    gradient_stride_n, gradient_stride_c, gradient_stride_v,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    HARD: tl.constexpr, WIDE: tl.constexpr, NUM_CLASSES: tl.constexpr,
    CHUNKS: tl.constexpr, STEP: tl.constexpr, VOXEL_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile."""
    BY_INDEX: tl.constexpr = (ACTIVATION == SOFTMAX) & HARD & (NUM_CLASSES > MAX_COMPARED)
    n, tile = tile_from_end()
    voxels = voxels_of(n, tile, num_voxels, VOXEL_BLOCK=VOXEL_BLOCK, VECTOR=VECTOR, EVEN=EVEN, WIDE=WIDE)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    gradient = Source(gradient_ptr + n * gradient_stride_n, gradient_stride_c, gradient_stride_v)
    grad_sums_ptr += n * 4 * NUM_CLASSES
    scale = tl.load(scale_ptr)
    counted, index, xs, ys = read_tile(
        logits, target, valid_ptr, None, voxels,
        ACTIVATION=ACTIVATION, HARD=HARD, NUM_CLASSES=NUM_CLASSES, CHUNKS=CHUNKS,
    )  # fmt: skip
    if BY_INDEX:
        # Loaded together with the logits, before warps wait for each other.
        own_values = _own_values(
            logits, grad_sums_ptr, index, voxels, FORM=FORM, ENTROPY=ENTROPY, NUM_CLASSES=NUM_CLASSES
        )
    powers = xs
    inverse = tl.zeros([VOXEL_BLOCK], tl.float32)
    if ACTIVATION == SOFTMAX:
        _, powers, largest, inverse, _ = softmax_powers(xs, counted, STEP=STEP)
    if BY_INDEX:
        gradients = _index_gradient(
            grad_sums_ptr, powers, own_values, index, largest, inverse, scale,
            FORM=FORM, NUM_CLASSES=NUM_CLASSES, CHUNKS=CHUNKS, STEP=STEP,
        )  # fmt: skip
    else:
        gradients = _dense_gradient(
            grad_sums_ptr, xs, ys, powers, inverse, counted, scale,
            ACTIVATION=ACTIVATION, FORM=FORM, ENTROPY=ENTROPY,
            NUM_CLASSES=NUM_CLASSES, CHUNKS=CHUNKS, STEP=STEP,
        )  # fmt: skip
    for i in tl.static_range(len(CHUNKS)):
        store_chunk(
            gradient, voxels, gradients[i], NUM_CLASSES=NUM_CLASSES, FIRST=CHUNKS[i][0], ROWS=CHUNKS[i][1]
        )
