"""`kde.kernel_mean` on a GPU: one pass over the points, and never a (points, keys) matrix in memory.

    energy   E_ji = -Σ_c α_ic log2 f_jc + Σ_c log2 Γ(α_ic + 1) - log2 w_i     of key i at point j
    mean     Σ_i 2^-E_ji y_i / Σ_i 2^-E_ji

Energies reach 5e5 at h = 5e-5, of which float32 loses 0.03. Logarithms are float64, and then:

    few classes  up to 4: α and log f are sums of float16, so that tensor cores compute energies. Products of
                 the highest 11 bits, and their sums, are exact in float32; less the least energy, which a
                 first, rough round finds, they are small, and the rests add to that.
                 Sums over keys are products too, of weights and labels in two float16 each.
    classes      up to 256: energies are a float64 product (tensor cores from compute capability 8), and
                 sums are rescaled as the least energy falls.
"""

import math
import struct
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_NUM_CLASSES = 256
# well below it α log2 e leaves float16: from there on few classes go the way of many
MIN_SPLIT_BANDWIDTH = 5e-5
_FEW = 4
# log f / f_last in whole units of this has 11 bits, and so has α in its own: their products are exact
_X_UNIT = 2.0**-6
# from one number of 11 bits, and its sign, to the next
STEP, PART = tl.constexpr(4096), tl.constexpr(1 / 4096)
# elements of the logarithms of one launch where they do not stay in registers: 32 MB of float64
_CHUNK = 2**22
LOG2_E = tl.constexpr(1.4426950408889634)
HALF_LOG_2_PI = tl.constexpr(0.9189385332046727)
# energy of a key that is not there, the same in float32 and float64; above half of it there is no key at all
ABSENT, HALF_ABSENT = tl.constexpr(2.0**100), tl.constexpr(2.0**99)


class Tile(NamedTuple):
    """Points and keys of one step of a program, and its warps."""

    point_block: int
    key_block: int
    num_warps: int


FEW_TILE = Tile(128, 32, 4)
MANY_TILE = Tile(64, 32, 4)
WIDE_TILE = Tile(64, 64, 8)


def kernel_mean_triton(
    points: Tensor,
    key_prob: Tensor,
    label: Tensor,
    *,
    bandwidth: float,
    weight: Tensor | None,
    smallest_prob: float,
    region: Tensor | None = None,
) -> Tensor:
    """See `kde.kernel_mean`; float32, without a gradient. Outside region (B, n), bool, the point stays.

    A block of points that all lie outside the region costs nothing. A NaN in a point stays in it. Up to four
    classes, labels have to be within float16's 65504.
    """
    mean = torch.empty(points.shape, dtype=torch.float32, device=points.device)
    if points.numel() == 0:
        return mean
    flags = None if region is None else region.contiguous().view(torch.uint8)
    few = points.shape[1] <= _FEW and bandwidth >= MIN_SPLIT_BANDWIDTH
    fill = _fill_few if few else _fill_many
    with torch.cuda.device_of(points):
        fill(mean, points, flags, _key_arguments(key_prob, label, weight), bandwidth, smallest_prob)
    return mean


class _KeyArguments(NamedTuple):
    tensors: tuple[Tensor, Tensor, Tensor]
    strides: tuple[int, ...]
    has_weight: bool


def _key_arguments(key_prob: Tensor, label: Tensor, weight: Tensor | None) -> _KeyArguments:
    if weight is None:
        return _KeyArguments((key_prob, label, key_prob), (*key_prob.stride(), *label.stride(), 0, 0), False)
    weight = weight.view(torch.uint8) if weight.dtype == torch.bool else weight
    strides = (*key_prob.stride(), *label.stride(), *weight.stride())
    return _KeyArguments((key_prob, label, weight), strides, True)


def _numbers(bandwidth: float) -> tuple[float, float, float]:
    """1 / bandwidth as two numbers, for it reaches a kernel as float32, and a constant that cancels."""
    scale = 1 / bandwidth
    (high,) = struct.unpack("f", struct.pack("f", scale))
    return high, scale - high, math.lgamma(scale + 1)


def _fill_few(
    mean: Tensor, points: Tensor, flags: Tensor | None, keys: _KeyArguments, bandwidth: float, smallest: float
) -> None:
    batch, num_classes, num_points = points.shape
    num_sets, num_keys, _ = keys.tensors[0].shape
    padded = triton.cdiv(num_keys, FEW_TILE.key_block) * FEW_TILE.key_block
    num_values = triton.next_power_of_2(2 * (num_classes + 1))
    high = mean.new_empty(num_sets, padded, 16, dtype=torch.float16)
    rest = torch.empty_like(high)
    value = mean.new_empty(num_sets, padded, num_values, dtype=torch.float16)
    # the largest α log2 e has 11 bits; not below 2^-8, for log2 w has to fit in 2^23 units of energy
    unit = 2.0 ** max(-8, math.ceil(math.log2(math.log2(math.e) / bandwidth)) - 11)
    _split_keys_kernel[(padded // FEW_TILE.key_block, num_sets)](
        *keys.tensors, high, rest, value, num_keys, padded, *keys.strides, *_numbers(bandwidth), unit,
        SMALLEST=smallest, HAS_WEIGHT=keys.has_weight, NUM_CLASSES=num_classes, NUM_VALUES=num_values,
        X_UNIT=_X_UNIT, KEY_BLOCK=FEW_TILE.key_block, num_warps=1,
    )  # fmt: skip
    _few_classes_kernel[(triton.cdiv(num_points, FEW_TILE.point_block), batch)](
        points, points if flags is None else flags, high, rest, value, mean,
        num_points, padded, int(num_sets > 1), *points.stride(), unit,
        SMALLEST=smallest, HAS_REGION=flags is not None, NUM_CLASSES=num_classes, NUM_VALUES=num_values,
        X_UNIT=_X_UNIT, POINT_BLOCK=FEW_TILE.point_block, KEY_BLOCK=FEW_TILE.key_block,
        num_warps=FEW_TILE.num_warps,
    )  # fmt: skip


def _fill_many(
    mean: Tensor, points: Tensor, flags: Tensor | None, keys: _KeyArguments, bandwidth: float, smallest: float
) -> None:
    batch, num_classes, num_points = points.shape
    num_sets, num_keys, _ = keys.tensors[0].shape
    tile = MANY_TILE if num_classes <= 64 else WIDE_TILE
    padded = triton.cdiv(num_keys, tile.key_block) * tile.key_block
    alpha = mean.new_empty(num_sets, num_classes, padded, dtype=torch.float64)
    energy = mean.new_empty(num_sets, padded, dtype=torch.float64)
    label = mean.new_empty(num_sets, num_classes, padded)
    _exact_keys_kernel[(padded // tile.key_block, num_sets)](
        *keys.tensors, alpha, energy, label, num_keys, padded, *keys.strides, *_numbers(bandwidth),
        SMALLEST=smallest, HAS_WEIGHT=keys.has_weight, NUM_CLASSES=num_classes,
        KEY_BLOCK=tile.key_block, num_warps=1,
    )  # fmt: skip
    size = max(1024, _CHUNK // num_classes)
    for image, start in product(range(batch), range(0, num_points, size)):
        where = slice(start, min(start + size, num_points))
        log_prob = points[image, :, where].double().clamp_(min=smallest).log_().contiguous()
        _classes_kernel[(triton.cdiv(where.stop - start, tile.point_block),)](
            points[image, :, where], points if flags is None else flags[image, where],
            log_prob, alpha, energy, label, mean[image, :, where],
            where.stop - start, padded, image if num_sets > 1 else 0, num_points, *points.stride()[1:],
            HAS_REGION=flags is not None, NUM_CLASSES=num_classes,
            CLASS_BLOCK=max(16, triton.next_power_of_2(num_classes)), CLASS_PART=16,
            POINT_BLOCK=tile.point_block, KEY_BLOCK=tile.key_block, num_warps=tile.num_warps,
        )  # fmt: skip


@triton.jit
def _log_factorial(a):
    """lgamma(a + 1) for a >= 0 in float64: Stirling's series at a + 8, less the logarithm of the product."""
    product = (a + 1) * (a + 2) * (a + 3) * (a + 4) * (a + 5) * (a + 6) * (a + 7)
    z = a + 8
    r = 1 / z
    r2 = r * r
    series = r * (1 / 12 - r2 * (1 / 360 - r2 * (1 / 1260 - r2 * (1 / 1680 - r2 * (1 / 1188 - r2 * 0.0019)))))
    return (z - 0.5) * tl.log(z) - z + HALF_LOG_2_PI + series - tl.log(product)


@triton.jit
def _keys_of(
    key_prob, weight, b, k, inside, prob_b, prob_k, prob_c, weight_b, weight_k, scale, scale_rest, centre,
    SMALLEST: tl.constexpr, HAS_WEIGHT: tl.constexpr, NUM_CLASSES: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """What turns a key's probabilities into α log2 e, the energy that is its own, and whether it is there."""
    smallest = tl.full([KEY_BLOCK], SMALLEST, tl.float64)
    row = key_prob + b * prob_b + k * prob_k
    total = tl.zeros([KEY_BLOCK], tl.float64)
    for c in range(NUM_CLASSES):
        total += tl.maximum(tl.load(row + c * prob_c, mask=inside, other=1.0).to(tl.float64), smallest)
    factor = (tl.zeros([KEY_BLOCK], tl.float64) + scale + scale_rest) / total
    own = tl.zeros([KEY_BLOCK], tl.float64) - centre
    for c in range(NUM_CLASSES):
        prob = tl.maximum(tl.load(row + c * prob_c, mask=inside, other=1.0).to(tl.float64), smallest)
        own += _log_factorial(prob * factor)
    if HAS_WEIGHT:
        w = tl.load(weight + b * weight_b + k * weight_k, mask=inside, other=0).to(tl.float64)
        own -= tl.log(tl.where(w > 0, w, 1.0))
        inside = inside & (w > 0)
    return factor * LOG2_E, own * LOG2_E, inside


@triton.jit
def _exact_keys_kernel(
    key_prob, label, weight, alpha, energy, flat_label, num_keys, padded,
    prob_b, prob_k, prob_c, label_b, label_k, label_c, weight_b, weight_k, scale, scale_rest, centre,
    SMALLEST: tl.constexpr, HAS_WEIGHT: tl.constexpr, NUM_CLASSES: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Class by class, -α log2 e in float64 and the label; beside them the energy that is the key's own."""
    b = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    factor, own, real = _keys_of(
        key_prob, weight, b, k, k < num_keys, prob_b, prob_k, prob_c, weight_b, weight_k,
        scale, scale_rest, centre, SMALLEST, HAS_WEIGHT, NUM_CLASSES, KEY_BLOCK,
    )  # fmt: skip
    smallest = tl.full([KEY_BLOCK], SMALLEST, tl.float64)
    row = b * NUM_CLASSES * padded + k
    for c in range(NUM_CLASSES):
        prob = tl.load(key_prob + b * prob_b + k * prob_k + c * prob_c, mask=real, other=0.0).to(tl.float64)
        value = tl.load(label + b * label_b + k * label_k + c * label_c, mask=real, other=0)
        tl.store(alpha + row + c * padded, -(tl.maximum(prob, smallest) * factor))
        tl.store(flat_label + row + c * padded, value.to(tl.float32))
    tl.store(energy + b * padded + k, tl.where(real, own, ABSENT))


@triton.jit
def _split(x, unit, per_unit):
    """A float64 as three numbers of 11 bits: whole units, whole parts of one, and the rest times STEP."""
    high = tl.floor(x * per_unit + 0.5) * unit
    rest = x - high
    middle = tl.floor(rest * (per_unit * STEP) + 0.5) * (unit * PART)
    low = (rest - middle) * STEP
    return (
        high.to(tl.float32).to(tl.float16),
        middle.to(tl.float32).to(tl.float16),
        low.to(tl.float32).to(tl.float16),
    )


@triton.jit
def _join(a, b, c, d):
    """Four vectors as two axes of two, the order of which is that of the vectors."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _columns(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):  # noqa: E741
    """16 vectors as the columns of a matrix."""
    even = tl.join(_join(a, e, i, m), _join(c, g, k, o))
    odd = tl.join(_join(b, f, j, n), _join(d, h, l, p))
    return tl.reshape(tl.join(even, odd), [a.shape[0], 16])


@triton.jit
def _alpha(
    row, c, factor, real, unit, SMALLEST: tl.constexpr, NUM_CLASSES: tl.constexpr, KEY_BLOCK: tl.constexpr
):
    """The parts of α log2 e of class c, zero from the last class on."""
    a = tl.zeros([KEY_BLOCK], tl.float64)
    if c < NUM_CLASSES - 1:
        prob = tl.load(row, mask=real, other=0.0).to(tl.float64)
        a = tl.maximum(prob, tl.full([KEY_BLOCK], SMALLEST, tl.float64)) * factor
    return _split(a, unit, 1 / unit)


@triton.jit
def _split_keys_kernel(
    key_prob, label, weight, high, rest, value, num_keys, padded,
    prob_b, prob_k, prob_c, label_b, label_k, label_c, weight_b, weight_k, scale, scale_rest, centre,
    unit, SMALLEST: tl.constexpr, HAS_WEIGHT: tl.constexpr, NUM_CLASSES: tl.constexpr,
    NUM_VALUES: tl.constexpr, X_UNIT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_few_classes_kernel` multiplies with its columns, those of a key side by side; labels."""
    b = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    factor, own, real = _keys_of(
        key_prob, weight, b, k, k < num_keys, prob_b, prob_k, prob_c, weight_b, weight_k,
        scale, scale_rest, centre, SMALLEST, HAS_WEIGHT, NUM_CLASSES, KEY_BLOCK,
    )  # fmt: skip
    row = key_prob + b * prob_b + k * prob_k
    a0, b0, c0 = _alpha(row, 0, factor, real, unit, SMALLEST, NUM_CLASSES, KEY_BLOCK)
    a1, b1, c1 = _alpha(row + prob_c, 1, factor, real, unit, SMALLEST, NUM_CLASSES, KEY_BLOCK)
    a2, b2, c2 = _alpha(row + 2 * prob_c, 2, factor, real, unit, SMALLEST, NUM_CLASSES, KEY_BLOCK)
    energy_unit = unit * X_UNIT
    units = tl.floor(own / energy_unit + 0.5)
    # the rest of the energy is a factor of the weight
    factor = tl.where(real, tl.exp2((units * energy_unit - own).to(tl.float32)), 0.0)
    steps = tl.floor(units / STEP + 0.5)
    own = tl.where(real, (steps * STEP - units) * energy_unit, 0.0).to(tl.float32).to(tl.float16)
    # a key that is not there has an energy of 2^28, the most there is
    steps = tl.where(real, -steps * energy_unit, -65504.0).to(tl.float32).to(tl.float16)
    zero = tl.zeros([KEY_BLOCK], tl.float16)
    column = tl.arange(0, 16)[None, :]
    row = (b * padded + k)[:, None] * 16 + column
    columns = _columns(
        a0, a1, a2, a0, a1, a2, b0, b1, b2, steps, own, zero - STEP, zero - 1, zero, zero, zero
    )  # fmt: skip
    tl.store(high + row, columns)
    columns = _columns(
        b0, a0 * PART, c0, b0 * PART, c0, b1, a1 * PART, c1, b1 * PART, c1,
        b2, a2 * PART, c2, b2 * PART, c2, zero,
    )  # fmt: skip
    tl.store(rest + row, columns)
    # 1 and the labels, and what float16 leaves of them
    value += (b * padded + k) * NUM_VALUES
    for c in tl.static_range(NUM_VALUES // 2):
        y = factor
        if c > NUM_CLASSES:
            y = tl.zeros([KEY_BLOCK], tl.float32)
        elif c > 0:
            at = label + b * label_b + k * label_k + (c - 1) * label_c
            y *= tl.load(at, mask=real, other=0).to(tl.float32)
        tl.store(value + c, y.to(tl.float16))
        tl.store(value + NUM_VALUES // 2 + c, (y - y.to(tl.float16).to(tl.float32)).to(tl.float16))


@triton.jit
def _log_prob(point, SMALLEST: tl.constexpr):
    """In float64, of a probability that is not below SMALLEST."""
    return tl.log(tl.maximum(point.to(tl.float64), tl.full([1], SMALLEST, tl.float64)))


@triton.jit
def _few_classes_kernel(
    points, region, high, rest, value, mean,
    num_points, padded, key_stride, points_b, points_c, points_n, unit,
    SMALLEST: tl.constexpr, HAS_REGION: tl.constexpr, NUM_CLASSES: tl.constexpr, NUM_VALUES: tl.constexpr,
    X_UNIT: tl.constexpr, POINT_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """All classes relative to the last: Σ_c α_ic is the same for all keys, so that the last cancels."""
    b = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * POINT_BLOCK + tl.arange(0, POINT_BLOCK)
    inside = n < num_points
    wanted = inside
    if HAS_REGION:
        wanted = tl.load(region + b * num_points + n, mask=inside, other=0) != 0
    # a block without any point of the region has no keys to go through
    stop = tl.where(tl.max(wanted.to(tl.int32), 0) > 0, padded, 0)
    row = points + b * points_b + n * points_n
    points_c = tl.cast(points_c, tl.int64)
    f0 = tl.load(row, mask=inside, other=1.0)
    last = tl.load(row + (NUM_CLASSES - 1) * points_c, mask=inside, other=1.0)
    log_last = _log_prob(last, SMALLEST)
    nan = 0.0 * (f0.to(tl.float32) + last.to(tl.float32))
    zero = tl.zeros([POINT_BLOCK], tl.float16)
    h0, l0, r0 = _split(_log_prob(f0, SMALLEST) - log_last, X_UNIT, 1 / X_UNIT)
    h1, l1, r1 = zero, zero, zero
    h2, l2, r2 = zero, zero, zero
    if NUM_CLASSES > 2:
        f1 = tl.load(row + points_c, mask=inside, other=1.0)
        h1, l1, r1 = _split(_log_prob(f1, SMALLEST) - log_last, X_UNIT, 1 / X_UNIT)
        nan += 0.0 * f1.to(tl.float32)
    if NUM_CLASSES > 3:
        f2 = tl.load(row + 2 * points_c, mask=inside, other=1.0)
        h2, l2, r2 = _split(_log_prob(f2, SMALLEST) - log_last, X_UNIT, 1 / X_UNIT)
        nan += 0.0 * f2.to(tl.float32)

    # -energies are sums of products of these columns and those of `_split_keys_kernel`
    x = _columns(
        h0, h1, h2, l0, l1, l2, h0, h1, h2, zero + STEP, zero + 1, zero, zero, zero, zero, zero
    )  # fmt: skip
    column = tl.arange(0, 16)
    key = tl.arange(0, KEY_BLOCK)
    offset = b * key_stride * padded * 16 + column[:, None] + key[None, :] * 16
    high += offset
    rest += offset
    rough = tl.full([POINT_BLOCK, KEY_BLOCK], float("-inf"), tl.float32)
    for start in range(0, stop, KEY_BLOCK):
        rough = tl.maximum(rough, tl.dot(x, tl.load(high + start * 16)))
    most = tl.max(rough, 1)
    # the largest weight is 2^9, so that float16 reaches down to 2^-33 of it
    energy_unit = unit * X_UNIT
    absent = most < -(2.0**27)
    units = tl.floor((tl.where(absent, 0.0, most) - 9) / energy_unit + 0.5)
    steps = tl.floor(units / STEP + 0.5)
    units = ((units - steps * STEP) * energy_unit).to(tl.float16)
    steps = (steps * energy_unit).to(tl.float16)
    # whole units first: these products and sums are exact, and leave little for the rest to add to
    column = column[None, :]
    middle = tl.where((column > 2) & (column < 9), x, 0.0)
    x = tl.where((column > 2) & (column < 9), 0.0, x)
    x = tl.where(column == 11, steps[:, None], tl.where(column == 12, units[:, None], x))
    z = _columns(
        l0, r0, h0 * PART, r0, l0 * PART, l1, r1, h1 * PART, r1, l1 * PART,
        l2, r2, h2 * PART, r2, l2 * PART, zero,
    )  # fmt: skip
    v = tl.arange(0, NUM_VALUES)[None, :]
    value += b * key_stride * padded * NUM_VALUES + key[:, None] * NUM_VALUES + v
    sums = tl.zeros([POINT_BLOCK, NUM_VALUES], tl.float32)
    for start in range(0, stop, KEY_BLOCK):
        a = tl.load(high + start * 16)
        e = tl.dot(middle, a, tl.dot(x, a))
        e = tl.dot(z, tl.load(rest + start * 16), e)
        w = tl.exp2(e)
        # the highest 11 bits
        w_high = (w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        y = tl.load(value + start * NUM_VALUES)
        # added apart, for tensor cores cut off instead of rounding, and that adds up
        sums += tl.dot(w_high.to(tl.float16), y, tl.dot((w - w_high).to(tl.float16), y))
    stays = absent | (wanted == 0)
    v = v % (NUM_VALUES // 2)
    total = tl.where(stays, 1.0, tl.sum(tl.where(v == 0, sums, 0.0), 1))
    for c in tl.static_range(NUM_CLASSES):
        # a NaN, which the maximum above swallows, comes back
        result = tl.sum(tl.where(v == c + 1, sums, 0.0), 1) / total + nan
        point = tl.load(row + c * points_c, mask=inside, other=0.0).to(tl.float32)
        tl.store(mean + (b * NUM_CLASSES + c) * num_points + n, tl.where(stays, point, result), mask=inside)


@triton.jit
def _classes_kernel(
    points, region, log_prob, alpha, energy, label, mean,
    num_points, num_keys, key_set, mean_c, points_c, points_n,
    HAS_REGION: tl.constexpr, NUM_CLASSES: tl.constexpr, CLASS_BLOCK: tl.constexpr,
    POINT_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, CLASS_PART: tl.constexpr,
):  # fmt: skip
    """One image, or a chunk of it: energies of a block of keys, then sums over them as a product."""
    n = tl.program_id(0) * POINT_BLOCK + tl.arange(0, POINT_BLOCK)
    inside = n < num_points
    wanted = inside
    if HAS_REGION:
        wanted = tl.load(region + n, mask=inside, other=0) != 0
    stop = tl.where(tl.max(wanted.to(tl.int32), 0) > 0, num_keys, 0)
    key_row = tl.cast(key_set, tl.int64) * num_keys
    class_row = key_row * NUM_CLASSES
    c = tl.arange(0, CLASS_BLOCK)
    least = tl.full([POINT_BLOCK], float("inf"), tl.float32)
    total = tl.zeros([POINT_BLOCK], tl.float32)
    sums = tl.zeros([POINT_BLOCK, CLASS_BLOCK], tl.float32)
    for start in range(0, stop, KEY_BLOCK):
        k = start + tl.arange(0, KEY_BLOCK)
        e = tl.load(energy + key_row + k)[None, :] + tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float64)
        for first in range(0, NUM_CLASSES, CLASS_PART):
            part = first + tl.arange(0, CLASS_PART)
            held = (part < NUM_CLASSES)[None, :] & inside[:, None]
            x = tl.load(log_prob + part[None, :] * num_points + n[:, None], mask=held, other=0.0)
            # a NaN comes back below; here it would hide the least energy
            x = tl.where(x == x, x, 0.0)
            held = (part < NUM_CLASSES)[:, None]
            a = tl.load(alpha + class_row + part[:, None] * num_keys + k[None, :], mask=held, other=0.0)
            e = tl.dot(x, a, e, input_precision="ieee", out_dtype=tl.float64)
        lower = tl.minimum(least, tl.min(e.to(tl.float32), 1))
        w = tl.exp2((lower.to(tl.float64)[:, None] - e).to(tl.float32))
        held = (c < NUM_CLASSES)[None, :]
        y = tl.load(label + class_row + c[None, :] * num_keys + k[:, None], mask=held, other=0.0)
        scale = tl.exp2(lower - least)
        total = total * scale + tl.sum(w, 1)
        sums = tl.dot(w, y, sums * scale[:, None], input_precision="tf32x3")
        least = lower
    n64 = n.to(tl.int64)[:, None]
    held = (c < NUM_CLASSES)[None, :] & inside[:, None]
    c64 = c.to(tl.int64)[None, :]
    point = tl.load(points + c64 * points_c + n64 * points_n, mask=held, other=0.0).to(tl.float32)
    stays = ((least > HALF_ABSENT) | (wanted == 0))[:, None]
    result = sums / tl.where(stays, 1.0, total[:, None]) + 0.0 * tl.sum(point, 1)[:, None]
    tl.store(mean + c64 * mean_c + n64, tl.where(stays, point, result), mask=held)
