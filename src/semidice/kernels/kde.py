"""`kde.kernel_mean` on a GPU: one pass over the points, and never a (points, keys) matrix in memory.

    energy   E_ji = -Σ_c α_ic log2 f_jc + Σ_c log2 Γ(α_ic + 1) - log2 w_i     of key i at point j
    mean     Σ_i 2^-E_ji y_i / Σ_i 2^-E_ji

Energies reach 5e5 at h = 5e-5, of which float32 loses 0.03. Logarithms are float64, and then:

    few classes  up to 4: α and log f are split into 11 bits and a rest. Products of the 11 bits, and their
                 sums, are exact in float32; less the least energy they are small, and the rests add to that.
                 Keys are in the lanes and points in registers; a first, rough round finds the least energy.
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

LARGEST_NUM_CLASSES = 256
# below it the sums of products in float32 lose 1e-4, and few classes go the way of many
SMALLEST_SPLIT_BANDWIDTH = 5e-5
_FEW = 4
# logarithms in whole units of this have 11 bits, and so have the α in their own: their products are exact
_X_UNIT = 2.0**-7
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


FEW_TILE = Tile(32, 16, 2)
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

    A block of points that all lie outside the region costs nothing. A NaN in a point stays in it.
    """
    mean = torch.empty(points.shape, dtype=torch.float32, device=points.device)
    if points.numel() == 0:
        return mean
    flags = None if region is None else region.contiguous().view(torch.uint8)
    few = points.shape[1] <= _FEW and bandwidth >= SMALLEST_SPLIT_BANDWIDTH
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
    num_tiles = triton.cdiv(num_keys, FEW_TILE.key_block)
    tiles = mean.new_empty(num_sets, num_tiles, 4 * num_classes, FEW_TILE.key_block)
    # the largest α log2 e has 11 bits
    unit = 2.0 ** (math.ceil(math.log2(math.log2(math.e) / bandwidth)) - 11)
    _split_keys_kernel[(num_tiles, num_sets)](
        *keys.tensors, tiles, num_keys, num_tiles, *keys.strides, *_numbers(bandwidth), unit,
        SMALLEST=smallest, HAS_WEIGHT=keys.has_weight, NUM_CLASSES=num_classes,
        X_UNIT=_X_UNIT, KEY_BLOCK=FEW_TILE.key_block, num_warps=1,
    )  # fmt: skip
    _few_classes_kernel[(triton.cdiv(num_points, FEW_TILE.point_block), batch)](
        points, points if flags is None else flags, tiles, mean,
        num_points, num_tiles, int(num_sets > 1), *points.stride(), unit,
        SMALLEST=smallest, HAS_REGION=flags is not None, NUM_CLASSES=num_classes, X_UNIT=_X_UNIT,
        POINT_BLOCK=FEW_TILE.point_block, KEY_BLOCK=FEW_TILE.key_block, num_warps=FEW_TILE.num_warps,
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
def _split_keys_kernel(
    key_prob, label, weight, tiles, num_keys, num_tiles,
    prob_b, prob_k, prob_c, label_b, label_k, label_c, weight_b, weight_k, scale, scale_rest, centre,
    unit, SMALLEST: tl.constexpr, HAS_WEIGHT: tl.constexpr, NUM_CLASSES: tl.constexpr,
    X_UNIT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """4 C rows of a tile of keys: rough energy and α; both in units; the rest of α; weight, labels."""
    b = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    factor, own, real = _keys_of(
        key_prob, weight, b, k, k < num_keys, prob_b, prob_k, prob_c, weight_b, weight_k,
        scale, scale_rest, centre, SMALLEST, HAS_WEIGHT, NUM_CLASSES, KEY_BLOCK,
    )  # fmt: skip
    smallest = tl.full([KEY_BLOCK], SMALLEST, tl.float64)
    row = tiles + (b * num_tiles + tl.program_id(0)) * 4 * NUM_CLASSES * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    energy_unit = unit * X_UNIT
    high = tl.floor(own / energy_unit + 0.5) * energy_unit
    # the rest of the energy is a factor of the weight
    rest = tl.where(real, tl.exp2((high - own).to(tl.float32)), 0.0)
    tl.store(row, tl.where(real, own, ABSENT).to(tl.float32))
    tl.store(row + NUM_CLASSES * KEY_BLOCK, tl.where(real, high, ABSENT).to(tl.float32))
    tl.store(row + (3 * NUM_CLASSES - 1) * KEY_BLOCK, rest)
    for c in range(NUM_CLASSES):
        prob = tl.load(key_prob + b * prob_b + k * prob_k + c * prob_c, mask=real, other=0.0).to(tl.float64)
        value = tl.load(label + b * label_b + k * label_k + c * label_c, mask=real, other=0)
        tl.store(row + (3 * NUM_CLASSES + c) * KEY_BLOCK, value.to(tl.float32) * rest)
        if c < NUM_CLASSES - 1:
            a = -(tl.maximum(prob, smallest) * factor)
            high = tl.floor(a / unit + 0.5) * unit
            tl.store(row + (1 + c) * KEY_BLOCK, a.to(tl.float32))
            tl.store(row + (NUM_CLASSES + 1 + c) * KEY_BLOCK, high.to(tl.float32))
            tl.store(row + (2 * NUM_CLASSES + c) * KEY_BLOCK, (a - high).to(tl.float32))


@triton.jit
def _against_last(log_prob, c, which, last):
    """Row `which` less row `last`; a sum, so that each logarithm is one thread's work until here."""
    return tl.sum(tl.where(c == which, log_prob, tl.where(c == last, -log_prob, 0.0)), 0)


@triton.jit
def _split(x, UNIT: tl.constexpr):
    """A float64 as float32 of its own, in whole units, and of the rest, as columns."""
    high = tl.floor(x / UNIT + 0.5) * UNIT
    return x.to(tl.float32)[:, None], high.to(tl.float32)[:, None], (x - high).to(tl.float32)[:, None]


@triton.jit
def _few_classes_kernel(
    points, region, tiles, mean,
    num_points, num_tiles, key_stride, points_b, points_c, points_n, unit,
    SMALLEST: tl.constexpr, HAS_REGION: tl.constexpr, NUM_CLASSES: tl.constexpr, X_UNIT: tl.constexpr,
    POINT_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """All classes relative to the last: Σ_c α_ic is the same for all keys, so that the last cancels."""
    b = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * POINT_BLOCK + tl.arange(0, POINT_BLOCK)
    inside = n < num_points
    wanted = inside
    if HAS_REGION:
        wanted = tl.load(region + b * num_points + n, mask=inside, other=0) != 0
    # a block without any point of the region has no keys to go through
    stop = tl.where(tl.max(wanted.to(tl.int32), 0) > 0, num_tiles, 0)
    c = tl.arange(0, 4).to(tl.int64)[:, None]
    held = (c < NUM_CLASSES) & inside[None, :]
    point = tl.load(points + b * points_b + c * points_c + n[None, :] * points_n, mask=held, other=1.0)
    log_prob = tl.log(tl.maximum(point.to(tl.float64), tl.full([1, 1], SMALLEST, tl.float64)))
    x0, h0, l0 = _split(_against_last(log_prob, c, 0, NUM_CLASSES - 1), X_UNIT)
    x1, h1, l1 = _split(_against_last(log_prob, c, 1, NUM_CLASSES - 1), X_UNIT)
    x2, h2, l2 = _split(_against_last(log_prob, c, 2, NUM_CLASSES - 1), X_UNIT)

    first = tiles + b * key_stride * num_tiles * 4 * NUM_CLASSES * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    rough = tl.full([POINT_BLOCK, KEY_BLOCK], ABSENT, tl.float32)
    for tile in range(stop):
        row = first + tile * (4 * NUM_CLASSES * KEY_BLOCK)
        e = tl.load(row)[None, :] + x0 * tl.load(row + KEY_BLOCK)[None, :]
        if NUM_CLASSES > 2:
            e += x1 * tl.load(row + 2 * KEY_BLOCK)[None, :]
        if NUM_CLASSES > 3:
            e += x2 * tl.load(row + 3 * KEY_BLOCK)[None, :]
        rough = tl.minimum(rough, e)
    least = tl.min(rough, 1)
    shift = (tl.floor(least / (unit * X_UNIT) + 0.5) * (unit * X_UNIT))[:, None]

    total = tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float32)
    m0 = tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float32)
    m1 = tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float32)
    m2 = tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float32)
    m3 = tl.zeros([POINT_BLOCK, KEY_BLOCK], tl.float32)
    for tile in range(stop):
        row = first + tile * (4 * NUM_CLASSES * KEY_BLOCK)
        high = row + NUM_CLASSES * KEY_BLOCK
        low = row + 2 * NUM_CLASSES * KEY_BLOCK
        y = row + 3 * NUM_CLASSES * KEY_BLOCK
        # whole units first: these products and sums are exact, and leave little for the rest to add to
        a0 = tl.load(high + KEY_BLOCK)[None, :]
        e = (tl.load(high)[None, :] - shift) + h0 * a0
        if NUM_CLASSES > 2:
            a1 = tl.load(high + 2 * KEY_BLOCK)[None, :]
            e += h1 * a1
        if NUM_CLASSES > 3:
            a2 = tl.load(high + 3 * KEY_BLOCK)[None, :]
            e += h2 * a2
        e += l0 * a0
        e += x0 * tl.load(low)[None, :]
        if NUM_CLASSES > 2:
            e += l1 * a1
            e += x1 * tl.load(low + KEY_BLOCK)[None, :]
        if NUM_CLASSES > 3:
            e += l2 * a2
            e += x2 * tl.load(low + 2 * KEY_BLOCK)[None, :]
        w = tl.exp2(-e)
        total += w * tl.load(y - KEY_BLOCK)[None, :]
        m0 += w * tl.load(y)[None, :]
        m1 += w * tl.load(y + KEY_BLOCK)[None, :]
        if NUM_CLASSES > 2:
            m2 += w * tl.load(y + 2 * KEY_BLOCK)[None, :]
        if NUM_CLASSES > 3:
            m3 += w * tl.load(y + 3 * KEY_BLOCK)[None, :]
    sums = tl.where(c == 0, tl.sum(m0, 1)[None, :], tl.sum(m1, 1)[None, :])
    if NUM_CLASSES > 2:
        sums = tl.where(c == 2, tl.sum(m2, 1)[None, :], sums)
    if NUM_CLASSES > 3:
        sums = tl.where(c == 3, tl.sum(m3, 1)[None, :], sums)
    stays = ((least > HALF_ABSENT) | (wanted == 0))[None, :]
    point = point.to(tl.float32)
    # a NaN, which the maximum above swallows, comes back
    result = sums / tl.where(stays, 1.0, tl.sum(total, 1)[None, :]) + 0.0 * tl.sum(point, 0)[None, :]
    result = tl.where(stays, point, result)
    tl.store(mean + (b * NUM_CLASSES + c) * num_points + n[None, :], result, mask=held)


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
