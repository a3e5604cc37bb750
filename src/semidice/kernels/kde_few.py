"""Kernel means for up to four classes: tensor cores compute exact energies from float16 numbers.

α log2 e and log f are split into three numbers of 11 bits: high, middle and low. Products of high numbers,
and their sums, are exact in float32. A first pass over the keys finds the least energy roughly. Minus that,
exact sums are small, and the products of the other numbers are added to them without loss. Sums over keys
are products as well, of weights and labels in two float16 numbers each.

Classes are relative to the last one: Σ_c α_ic is the same for all keys, so that log f of the last cancels.
"""

import triton
import triton.language as tl

from .kde_many import key_terms

# from one number of 11 bits and a sign to the next
BASE, INVERSE_BASE = tl.constexpr(4096), tl.constexpr(1 / 4096)


@triton.jit
def _split(x, unit, per_unit):
    """A float64 as three float16: units, units / BASE, and the rest times BASE."""
    high = tl.floor(x * per_unit + 0.5) * unit
    rest = x - high
    middle = tl.floor(rest * (per_unit * BASE) + 0.5) * (unit * INVERSE_BASE)
    low = (rest - middle) * BASE
    return (
        high.to(tl.float32).to(tl.float16),
        middle.to(tl.float32).to(tl.float16),
        low.to(tl.float32).to(tl.float16),
    )


@triton.jit
def _join(a, b, c, d):
    """Four vectors as two axes of two, in the order of the vectors."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _columns(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):  # noqa: E741
    """16 vectors as the columns of a matrix."""
    even = tl.join(_join(a, e, i, m), _join(c, g, k, o))
    odd = tl.join(_join(b, f, j, n), _join(d, h, l, p))
    return tl.reshape(tl.join(even, odd), [a.shape[0], 16])


@triton.jit
def _split_alpha(
    prob_ptr, factor, counted, unit,
    CLASS: tl.constexpr, MIN_PROB: tl.constexpr, NUM_CLASSES: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """α log2 e of a class, as three numbers; 0 from the last class on."""
    alpha = tl.zeros([KEY_BLOCK], tl.float64)
    if CLASS < NUM_CLASSES - 1:
        prob = tl.load(prob_ptr, mask=counted, other=0.0).to(tl.float64)
        alpha = tl.maximum(prob, tl.full([KEY_BLOCK], MIN_PROB, tl.float64)) * factor
    return _split(alpha, unit, 1 / unit)


@triton.jit
def split_keys_kernel(
    key_prob_ptr,  # (B2, K, C)
    label_ptr,  # (B2, K, C)
    weight_ptr,  # (B2, K), or None
    high_ptr,  # (B2, K padded, 16), float16: factors of exact products
    rest_ptr,  # (B2, K padded, 16), float16: factors of the other products
    values_ptr,  # (B2, K padded, NUM_VALUES), float16: 1 and the labels, then what float16 rounds off
    num_keys, num_padded,
    prob_stride_b, prob_stride_k, prob_stride_c, label_stride_b, label_stride_k, label_stride_c,
    weight_stride_b, weight_stride_k, inverse_bandwidth, inverse_bandwidth_rest, energy_offset, alpha_unit,
    MIN_PROB: tl.constexpr, NUM_CLASSES: tl.constexpr, NUM_VALUES: tl.constexpr,
    LOG_UNIT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """What `few_classes_kernel` needs of a block of keys: the factors of its columns, and labels."""
    b = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    prob_ptr = key_prob_ptr + b * prob_stride_b + k * prob_stride_k
    if weight_ptr is not None:
        weight_ptr += b * weight_stride_b + k * weight_stride_k
    factor, energy, counted = key_terms(
        prob_ptr, weight_ptr, k < num_keys, prob_stride_c,
        inverse_bandwidth, inverse_bandwidth_rest, energy_offset,
        MIN_PROB=MIN_PROB, NUM_CLASSES=NUM_CLASSES, KEY_BLOCK=KEY_BLOCK,
    )  # fmt: skip
    alphas = ()
    for c in tl.static_range(3):
        alphas += (
            _split_alpha(
                prob_ptr + c * prob_stride_c, factor, counted, alpha_unit,
                CLASS=c, MIN_PROB=MIN_PROB, NUM_CLASSES=NUM_CLASSES, KEY_BLOCK=KEY_BLOCK,
            ),
        )  # fmt: skip
    high0, middle0, low0 = alphas[0]
    high1, middle1, low1 = alphas[1]
    high2, middle2, low2 = alphas[2]
    energy_unit = alpha_unit * LOG_UNIT
    units = tl.floor(energy / energy_unit + 0.5)
    # the rest of the energy is a factor of the values
    factor = tl.where(counted, tl.exp2((units * energy_unit - energy).to(tl.float32)), 0.0)
    bases = tl.floor(units / BASE + 0.5)
    units = tl.where(counted, (bases * BASE - units) * energy_unit, 0.0).to(tl.float32).to(tl.float16)
    # a key that does not count has an energy of 2^28, the largest possible
    bases = tl.where(counted, -bases * energy_unit, -65504.0).to(tl.float32).to(tl.float16)
    zero = tl.zeros([KEY_BLOCK], tl.float16)
    offset = (b * num_padded + k)[:, None] * 16 + tl.arange(0, 16)[None, :]
    columns = _columns(
        high0, high1, high2, high0, high1, high2, middle0, middle1, middle2,
        bases, units, zero - BASE, zero - 1, zero, zero, zero,
    )  # fmt: skip
    tl.store(high_ptr + offset, columns)
    columns = _columns(
        middle0, high0 * INVERSE_BASE, low0, middle0 * INVERSE_BASE, low0,
        middle1, high1 * INVERSE_BASE, low1, middle1 * INVERSE_BASE, low1,
        middle2, high2 * INVERSE_BASE, low2, middle2 * INVERSE_BASE, low2, zero,
    )  # fmt: skip
    tl.store(rest_ptr + offset, columns)
    values_ptr += (b * num_padded + k) * NUM_VALUES
    for c in tl.static_range(NUM_VALUES // 2):
        value = factor
        if c > NUM_CLASSES:
            value = tl.zeros([KEY_BLOCK], tl.float32)
        elif c > 0:
            place = label_ptr + b * label_stride_b + k * label_stride_k + (c - 1) * label_stride_c
            value *= tl.load(place, mask=counted, other=0).to(tl.float32)
        rounded = value.to(tl.float16)
        tl.store(values_ptr + c, rounded)
        tl.store(values_ptr + NUM_VALUES // 2 + c, (value - rounded.to(tl.float32)).to(tl.float16))


@triton.jit
def _log_prob(point, MIN_PROB: tl.constexpr):
    """log of a probability of at least MIN_PROB, in float64."""
    return tl.log(tl.maximum(point.to(tl.float64), tl.full([1], MIN_PROB, tl.float64)))


@triton.jit
def few_classes_kernel(
    points_ptr,  # (B, C, n)
    region_ptr,  # (B, n), or None
    high_ptr,  # (B2, K padded, 16), float16
    rest_ptr,  # (B2, K padded, 16), float16
    values_ptr,  # (B2, K padded, NUM_VALUES), float16
    mean_ptr,  # (B, C, n)
    num_points, num_padded,
    set_step,  # 0 if all images have the same keys, else 1
    points_stride_b, points_stride_c, points_stride_n, alpha_unit,
    MIN_PROB: tl.constexpr, NUM_CLASSES: tl.constexpr, NUM_VALUES: tl.constexpr,
    LOG_UNIT: tl.constexpr, POINT_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Means of a block of points."""
    b = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * POINT_BLOCK + tl.arange(0, POINT_BLOCK)
    inside = n < num_points
    in_region = inside
    if region_ptr is not None:
        in_region = tl.load(region_ptr + b * num_points + n, mask=inside, other=0) != 0
    # a block without a point of the region goes over no keys
    end_key = tl.where(tl.max(in_region.to(tl.int32), 0) > 0, num_padded, 0)
    row_ptr = points_ptr + b * points_stride_b + n * points_stride_n
    points_stride_c = tl.cast(points_stride_c, tl.int64)
    first = tl.load(row_ptr, mask=inside, other=1.0)
    last = tl.load(row_ptr + (NUM_CLASSES - 1) * points_stride_c, mask=inside, other=1.0)
    log_last = _log_prob(last, MIN_PROB=MIN_PROB)
    # NaN if a probability is, else 0
    nan = 0.0 * (first.to(tl.float32) + last.to(tl.float32))
    zero = tl.zeros([POINT_BLOCK], tl.float16)
    logs = (_split(_log_prob(first, MIN_PROB=MIN_PROB) - log_last, LOG_UNIT, 1 / LOG_UNIT),)
    for c in tl.static_range(1, 3):
        log = (zero, zero, zero)
        if c < NUM_CLASSES - 1:
            prob = tl.load(row_ptr + c * points_stride_c, mask=inside, other=1.0)
            log = _split(_log_prob(prob, MIN_PROB=MIN_PROB) - log_last, LOG_UNIT, 1 / LOG_UNIT)
            nan += 0.0 * prob.to(tl.float32)
        logs += (log,)
    high0, middle0, low0 = logs[0]
    high1, middle1, low1 = logs[1]
    high2, middle2, low2 = logs[2]

    # -energies are sums of products of these columns and those of `split_keys_kernel`
    x = _columns(
        high0, high1, high2, middle0, middle1, middle2, high0, high1, high2,
        zero + BASE, zero + 1, zero, zero, zero, zero, zero,
    )  # fmt: skip
    column = tl.arange(0, 16)
    key = tl.arange(0, KEY_BLOCK)
    offset = b * set_step * num_padded * 16 + column[:, None] + key[None, :] * 16
    high_ptr += offset
    rest_ptr += offset
    rough = tl.full([POINT_BLOCK, KEY_BLOCK], float("-inf"), tl.float32)
    for start in range(0, end_key, KEY_BLOCK):
        rough = tl.maximum(rough, tl.dot(x, tl.load(high_ptr + start * 16)))
    largest = tl.max(rough, 1)
    # The largest weight becomes 2^9, so that float16 reaches down to 2^-33 of it.
    energy_unit = alpha_unit * LOG_UNIT
    has_no_key = largest < -(2.0**27)
    units = tl.floor((tl.where(has_no_key, 0.0, largest) - 9) / energy_unit + 0.5)
    bases = tl.floor(units / BASE + 0.5)
    units = ((units - bases * BASE) * energy_unit).to(tl.float16)
    bases = (bases * energy_unit).to(tl.float16)
    # Whole units first: these products and sums are exact, and their results are small.
    column = column[None, :]
    is_middle = (column > 2) & (column < 9)
    middle = tl.where(is_middle, x, 0.0)
    x = tl.where(is_middle, 0.0, x)
    x = tl.where(column == 11, bases[:, None], tl.where(column == 12, units[:, None], x))
    rest = _columns(
        middle0, low0, high0 * INVERSE_BASE, low0, middle0 * INVERSE_BASE,
        middle1, low1, high1 * INVERSE_BASE, low1, middle1 * INVERSE_BASE,
        middle2, low2, high2 * INVERSE_BASE, low2, middle2 * INVERSE_BASE, zero,
    )  # fmt: skip
    v = tl.arange(0, NUM_VALUES)[None, :]
    values_ptr += b * set_step * num_padded * NUM_VALUES + key[:, None] * NUM_VALUES + v
    sums = tl.zeros([POINT_BLOCK, NUM_VALUES], tl.float32)
    for start in range(0, end_key, KEY_BLOCK):
        high = tl.load(high_ptr + start * 16)
        energy = tl.dot(middle, high, tl.dot(x, high))
        energy = tl.dot(rest, tl.load(rest_ptr + start * 16), energy)
        weight = tl.exp2(energy)
        # its highest 11 bits
        weight_high = (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        values = tl.load(values_ptr + start * NUM_VALUES)
        # Added outside of the product: tensor cores truncate instead of rounding, and such errors add up.
        sums += tl.dot(
            weight_high.to(tl.float16), values, tl.dot((weight - weight_high).to(tl.float16), values)
        )
    keeps_point = has_no_key | (in_region == 0)
    v = v % (NUM_VALUES // 2)
    total = tl.where(keeps_point, 1.0, tl.sum(tl.where(v == 0, sums, 0.0), 1))
    for c in tl.static_range(NUM_CLASSES):
        # The maxima above drop a NaN: it is added here.
        result = tl.sum(tl.where(v == c + 1, sums, 0.0), 1) / total + nan
        point = tl.load(row_ptr + c * points_stride_c, mask=inside, other=0.0).to(tl.float32)
        place = mean_ptr + (b * NUM_CLASSES + c) * num_points + n
        tl.store(place, tl.where(keeps_point, point, result), mask=inside)
