"""Kernel means for up to 256 classes: energies are a float64 product.

Tensor cores compute it from compute capability 8 on. A program goes over blocks of keys. It rescales its
sums whenever the least energy falls.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
HALF_LOG_2_PI = tl.constexpr(0.9189385332046727)
# energy of a key that does not count, exact in float32 and float64; no other energy is above half of it
ABSENT, HALF_ABSENT = tl.constexpr(2.0**100), tl.constexpr(2.0**99)


@triton.jit
def _log_factorial(a):
    """lgamma(a + 1) for a >= 0 in float64: Stirling's series at a + 8, minus the logarithm of the product."""
    product = (a + 1) * (a + 2) * (a + 3) * (a + 4) * (a + 5) * (a + 6) * (a + 7)
    z = a + 8
    r = 1 / z
    r2 = r * r
    series = r * (1 / 12 - r2 * (1 / 360 - r2 * (1 / 1260 - r2 * (1 / 1680 - r2 * (1 / 1188 - r2 * 0.0019)))))
    return (z - 0.5) * tl.log(z) - z + HALF_LOG_2_PI + series - tl.log(product)


@triton.jit
def key_terms(
    row_ptr,  # (KEY_BLOCK,): first probability of each key
    weight_ptr,  # (KEY_BLOCK,): weight of each key, or None
    inside, prob_stride_c, inverse_bandwidth, inverse_bandwidth_rest, energy_offset,
    MIN_PROB: tl.constexpr, NUM_CLASSES: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each key: the factor that makes α log2 e of its probabilities, its energy, and whether it counts.

    The energy is Σ_c log2 Γ(α_c + 1) - log2 w, which does not depend on the point.
    """
    min_prob = tl.full([KEY_BLOCK], MIN_PROB, tl.float64)
    total = tl.zeros([KEY_BLOCK], tl.float64)
    for c in range(NUM_CLASSES):
        prob = tl.load(row_ptr + c * prob_stride_c, mask=inside, other=1.0).to(tl.float64)
        total += tl.maximum(prob, min_prob)
    factor = (tl.zeros([KEY_BLOCK], tl.float64) + inverse_bandwidth + inverse_bandwidth_rest) / total
    energy = tl.zeros([KEY_BLOCK], tl.float64) - energy_offset
    for c in range(NUM_CLASSES):
        prob = tl.load(row_ptr + c * prob_stride_c, mask=inside, other=1.0).to(tl.float64)
        energy += _log_factorial(tl.maximum(prob, min_prob) * factor)
    if weight_ptr is not None:
        w = tl.load(weight_ptr, mask=inside, other=0).to(tl.float64)
        energy -= tl.log(tl.where(w > 0, w, 1.0))
        inside = inside & (w > 0)
    return factor * LOG2_E, energy * LOG2_E, inside


@triton.jit
def exact_keys_kernel(
    key_prob_ptr,  # (B2, K, C)
    label_ptr,  # (B2, K, C)
    weight_ptr,  # (B2, K), or None
    alpha_ptr,  # (B2, C, K padded), float64: -α log2 e
    energy_ptr,  # (B2, K padded), float64: the energy that does not depend on the point
    float_label_ptr,  # (B2, C, K padded), float32: the label
    num_keys, num_padded,
    prob_stride_b, prob_stride_k, prob_stride_c, label_stride_b, label_stride_k, label_stride_c,
    weight_stride_b, weight_stride_k, inverse_bandwidth, inverse_bandwidth_rest, energy_offset,
    MIN_PROB: tl.constexpr, NUM_CLASSES: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """What `many_classes_kernel` needs of a block of keys."""
    b = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    prob_row_ptr = key_prob_ptr + b * prob_stride_b + k * prob_stride_k
    if weight_ptr is not None:
        weight_ptr += b * weight_stride_b + k * weight_stride_k
    factor, energy, counted = key_terms(
        prob_row_ptr, weight_ptr, k < num_keys, prob_stride_c,
        inverse_bandwidth, inverse_bandwidth_rest, energy_offset,
        MIN_PROB=MIN_PROB, NUM_CLASSES=NUM_CLASSES, KEY_BLOCK=KEY_BLOCK,
    )  # fmt: skip
    min_prob = tl.full([KEY_BLOCK], MIN_PROB, tl.float64)
    label_row_ptr = label_ptr + b * label_stride_b + k * label_stride_k
    offset = b * NUM_CLASSES * num_padded + k
    for c in range(NUM_CLASSES):
        prob = tl.load(prob_row_ptr + c * prob_stride_c, mask=counted, other=0.0).to(tl.float64)
        label = tl.load(label_row_ptr + c * label_stride_c, mask=counted, other=0)
        tl.store(alpha_ptr + offset + c * num_padded, -(tl.maximum(prob, min_prob) * factor))
        tl.store(float_label_ptr + offset + c * num_padded, label.to(tl.float32))
    tl.store(energy_ptr + b * num_padded + k, tl.where(counted, energy, ABSENT))


@triton.jit
def many_classes_kernel(
    points_ptr,  # (C, n): one image, or a part of it
    region_ptr,  # (n,), or None
    log_prob_ptr,  # (C, n), float64: log of the points
    alpha_ptr,  # (B2, C, K padded), float64
    energy_ptr,  # (B2, K padded), float64
    label_ptr,  # (B2, C, K padded), float32
    mean_ptr,  # (C, n)
    num_points, num_padded, key_set, mean_stride_c, points_stride_c, points_stride_n,
    NUM_CLASSES: tl.constexpr, CLASS_BLOCK: tl.constexpr,
    POINT_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, CLASS_PART: tl.constexpr,
):  # fmt: skip
    """Means of a block of points: energies of a block of keys, then sums over them as a product."""
    n = tl.program_id(0) * POINT_BLOCK + tl.arange(0, POINT_BLOCK)
    inside = n < num_points
    in_region = inside
    if region_ptr is not None:
        in_region = tl.load(region_ptr + n, mask=inside, other=0) != 0
    # a block without a point of the region goes over no keys
    end_key = tl.where(tl.max(in_region.to(tl.int32), 0) > 0, num_padded, 0)
    first_key = tl.cast(key_set, tl.int64) * num_padded
    first_alpha = first_key * NUM_CLASSES
    c = tl.arange(0, CLASS_BLOCK)
    least = tl.full([POINT_BLOCK], float("inf"), tl.float32)
    total = tl.zeros([POINT_BLOCK], tl.float32)
    sums = tl.zeros([POINT_BLOCK, CLASS_BLOCK], tl.float32)
    for start in range(0, end_key, KEY_BLOCK):
        k = start + tl.arange(0, KEY_BLOCK)
        energy = tl.load(energy_ptr + first_key + k)[None, :] + tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float64)
        for first_class in range(0, NUM_CLASSES, CLASS_PART):
            part = first_class + tl.arange(0, CLASS_PART)
            mask = (part < NUM_CLASSES)[None, :] & inside[:, None]
            x = tl.load(log_prob_ptr + part[None, :] * num_points + n[:, None], mask=mask, other=0.0)
            # The result gets its NaN below. Here a NaN would hide the least energy.
            x = tl.where(x == x, x, 0.0)
            mask = (part < NUM_CLASSES)[:, None]
            place = alpha_ptr + first_alpha + part[:, None] * num_padded + k[None, :]
            alpha = tl.load(place, mask=mask, other=0.0)
            energy = tl.dot(x, alpha, energy, input_precision="ieee", out_dtype=tl.float64)
        new_least = tl.minimum(least, tl.min(energy.to(tl.float32), 1))
        weight = tl.exp2((new_least.to(tl.float64)[:, None] - energy).to(tl.float32))
        mask = (c < NUM_CLASSES)[None, :]
        label = tl.load(label_ptr + first_alpha + c[None, :] * num_padded + k[:, None], mask=mask, other=0.0)
        scale = tl.exp2(new_least - least)
        total = total * scale + tl.sum(weight, 1)
        sums = tl.dot(weight, label, sums * scale[:, None], input_precision="tf32x3")
        least = new_least
    n = n.to(tl.int64)[:, None]
    mask = (c < NUM_CLASSES)[None, :] & inside[:, None]
    c = c.to(tl.int64)[None, :]
    point = tl.load(points_ptr + c * points_stride_c + n * points_stride_n, mask=mask, other=0.0)
    point = point.to(tl.float32)
    keeps_point = ((least > HALF_ABSENT) | (in_region == 0))[:, None]
    # 0 times the sum of a point is NaN if a probability is
    result = sums / tl.where(keeps_point, 1.0, total[:, None]) + 0.0 * tl.sum(point, 1)[:, None]
    tl.store(mean_ptr + c * mean_stride_c + n, tl.where(keeps_point, point, result), mask=mask)
