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
    x, y, power, inverse, counted, scale,
    SPEC: tl.constexpr, FIRST,
):  # fmt: skip
    """Probabilities, and for a softmax w; for other activations the gradient itself."""
    prob = probability(x, power, inverse, None, counted, SPEC=SPEC)
    # Loaded as a row, then turned: otherwise the compiler lays out the tile for these few numbers.
    c = FIRST + tl.arange(0, x.shape[0])
    place, inside = grad_sums_ptr + c, c < SPEC.num_classes
    grad_prob = tl.zeros(x.shape, tl.float32)
    if SPEC.form != NO_FORM:
        grad_tp = (tl.load(place, mask=inside, other=0.0) * scale)[:, None]
        grad_fp = (tl.load(place + SPEC.num_classes, mask=inside, other=0.0) * scale)[:, None]
        grad_fn = (tl.load(place + 2 * SPEC.num_classes, mask=inside, other=0.0) * scale)[:, None]
        if SPEC.form == MIN:
            grad_prob = tl.where(prob < y, grad_tp - grad_fn, tl.where(prob > y, grad_fp, 0.0))
        elif SPEC.form == PRODUCT:
            grad_prob = tl.where(prob < y, -grad_fn, tl.where(prob > y, grad_fp, 0.0)) + grad_tp * y
        elif SPEC.form == SQUARED:
            grad_prob = (grad_tp - grad_fp - grad_fn) * y + 2.0 * grad_fp * prob
        else:
            grad_prob = grad_fp + (grad_tp - grad_fp - grad_fn) * y
    grad_entropy = tl.zeros([1, 1], tl.float32)
    if SPEC.entropy:
        grad_entropy = (tl.load(place + 3 * SPEC.num_classes, mask=inside, other=0.0) * scale)[:, None]
    if SPEC.activation == SOFTMAX:
        # where a voxel does not count, p and y are 0
        result = prob * grad_prob - grad_entropy * y
    elif SPEC.activation == SIGMOID:
        result = prob * (1.0 - prob) * grad_prob + grad_entropy * (prob - y)
        result = tl.where(counted[None, :], result, 0.0)
    else:
        clamped = prob < SMALLEST_NORMAL
        result = grad_prob - tl.where(clamped, 0.0, grad_entropy * y / tl.where(clamped, 1.0, prob))
        result = tl.where(counted[None, :], result, 0.0)
    return prob, result


@triton.jit
def _dense_gradient(grad_sums_ptr, xs, ys, powers, inverse, counted, scale, SPEC: tl.constexpr):
    """Gradient of every chunk, from a target of every class."""
    probs, weighted, total = (), (), None
    for i in tl.static_range(len(SPEC.chunks)):
        prob, w = weighted_chunk(
            grad_sums_ptr,
            xs[i],
            ys[i],
            powers[i],
            inverse,
            counted,
            scale,
            SPEC=SPEC,
            FIRST=SPEC.chunks[i][0],
        )
        probs += (prob,)
        weighted += (w,)
        total = add_steps(total, w, SPEC=SPEC)
    gradients = weighted
    if SPEC.activation == SOFTMAX:
        total = tl.sum(total, 0)[None, :]
        gradients = ()
        for i in tl.static_range(len(SPEC.chunks)):
            gradients += (weighted[i] - probs[i] * total,)
    return gradients


@triton.jit
def _own_values(logits, grad_sums_ptr, index, voxels, SPEC: tl.constexpr):
    """Of the voxel's own class: logit, dL/dp beyond that of other classes, and dL/dentropy.

    All are 0 for a voxel without a class. The logit is loaded again, which is less work than to find it in
    the tile.
    """
    has_class = (index >= 0) & (index < SPEC.num_classes)
    x = tl.zeros(index.shape, tl.float32)
    slope, grad_entropy = x, x
    if SPEC.form != NO_FORM:
        x = own_logits(logits, index, voxels, SPEC=SPEC).to(tl.float32)
        grad_tp = tl.load(grad_sums_ptr + index, mask=has_class, other=0.0)
        grad_fp = tl.load(grad_sums_ptr + SPEC.num_classes + index, mask=has_class, other=0.0)
        grad_fn = tl.load(grad_sums_ptr + 2 * SPEC.num_classes + index, mask=has_class, other=0.0)
        slope = grad_tp - grad_fp - grad_fn
    if SPEC.entropy:
        grad_entropy = tl.load(grad_sums_ptr + 3 * SPEC.num_classes + index, mask=has_class, other=0.0)
    return x, slope, grad_entropy


@triton.jit
def _other_slope(grad_sums_ptr, power, inverse, scale, SPEC: tl.constexpr, FIRST: tl.constexpr):
    """dL/dp of a chunk for voxels of another class."""
    c = FIRST + tl.arange(0, power.shape[0])
    slope = tl.zeros([power.shape[0], 1], tl.float32)
    if SPEC.form != NO_FORM:
        grad_fp = tl.load(grad_sums_ptr + SPEC.num_classes + c, mask=c < SPEC.num_classes, other=0.0)
        slope = (grad_fp * scale)[:, None]
    if SPEC.form == SQUARED:
        slope = 2.0 * slope * (power * inverse[None, :])
    return slope


@triton.jit
def _index_chunk(index, power, slope, inverse, total, own, FIRST: tl.constexpr):
    """Gradient of a chunk, p (dL/dp - Σ w), and what the voxel's own class has beyond it."""
    row = FIRST + tl.arange(0, power.shape[0])[:, None]
    result = power * (slope * inverse[None, :] - (total * inverse)[None, :])
    return result + tl.where(row == index[None, :], own[None, :], 0.0)


@triton.jit
def _index_gradient(grad_sums_ptr, powers, own_values, index, largest, inverse, scale, SPEC: tl.constexpr):
    """Gradient of every chunk, for a softmax and class indices."""
    own_x, own_slope, grad_entropy = own_values
    own_p = tl.exp2((own_x - largest) * LOG2_E) * inverse
    own = scale * (own_p * own_slope - grad_entropy)
    slopes, total = (), None
    for i in tl.static_range(len(SPEC.chunks)):
        slope = _other_slope(grad_sums_ptr, powers[i], inverse, scale, SPEC=SPEC, FIRST=SPEC.chunks[i][0])
        slopes += (slope,)
        total = add_steps(total, powers[i] * slope, SPEC=SPEC)
    total = tl.sum(total, 0) * inverse + own
    gradients = ()
    for i in tl.static_range(len(SPEC.chunks)):
        chunk = _index_chunk(index, powers[i], slopes[i], inverse, total, own, FIRST=SPEC.chunks[i][0])
        gradients += (chunk,)
    return gradients


@triton.jit
def store_chunk(gradient, voxels, result, SPEC: tl.constexpr, FIRST):
    """Store a chunk (ROWS, V) of the gradient."""
    place, inside = addresses(gradient, voxels, SPEC=SPEC, FIRST=FIRST, ROWS=result.shape[0])
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
    SPEC: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile."""
    BY_INDEX: tl.constexpr = (SPEC.activation == SOFTMAX) & SPEC.hard & (SPEC.num_classes > MAX_COMPARED)
    n, tile = tile_from_end()
    voxels = voxels_of(n, tile, num_voxels, SPEC=SPEC)
    logits = Source(logits_ptr + n * logits_stride_n, logits_stride_c, logits_stride_v)
    target = Source(target_ptr + n * target_stride_n, target_stride_c, target_stride_v)
    gradient = Source(gradient_ptr + n * gradient_stride_n, gradient_stride_c, gradient_stride_v)
    grad_sums_ptr += n * 4 * SPEC.num_classes
    scale = tl.load(scale_ptr)
    counted, index, xs, ys = read_tile(logits, target, valid_ptr, None, voxels, SPEC=SPEC)
    if BY_INDEX:
        # Loaded together with the logits, before warps wait for each other.
        own_values = _own_values(logits, grad_sums_ptr, index, voxels, SPEC=SPEC)
    powers = xs
    inverse = tl.zeros(counted.shape, tl.float32)
    if SPEC.activation == SOFTMAX:
        _, powers, largest, inverse, _ = softmax_powers(xs, counted, SPEC=SPEC)
    if BY_INDEX:
        gradients = _index_gradient(
            grad_sums_ptr, powers, own_values, index, largest, inverse, scale, SPEC=SPEC
        )
    else:
        gradients = _dense_gradient(grad_sums_ptr, xs, ys, powers, inverse, counted, scale, SPEC=SPEC)
    for i in tl.static_range(len(SPEC.chunks)):
        store_chunk(gradient, voxels, gradients[i], SPEC=SPEC, FIRST=SPEC.chunks[i][0])
