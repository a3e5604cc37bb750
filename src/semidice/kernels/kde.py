"""`calibration.kde.kernel_mean` on a GPU: one pass over the points, and no (points, keys) matrix in memory.

    energy   E_ji = -Σ_c α_ic log2 f_jc + Σ_c log2 Γ(α_ic + 1) - log2 w_i     of key i at point j
    mean     Σ_i 2^-E_ji y_i / Σ_i 2^-E_ji

Energies reach 5e5 at h = 5e-5, where float32 has an error of 0.03. So logarithms are float64. Up to four
classes `kde_few` computes energies from float16 numbers, exactly; up to 256 classes `kde_many` does in
float64. Either first runs a small kernel over the keys.
"""

import math
import struct
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .kde_few import few_classes_kernel, split_keys_kernel
from .kde_many import exact_keys_kernel, many_classes_kernel

_MAX_FEW_CLASSES = 4
# for `kde_few`: well below it α log2 e is too large for float16
MIN_SPLIT_BANDWIDTH = 5e-5
# Unit of log2 f / f_last in `kde_few`: it has 11 bits in this unit, and α has 11 bits in its own. So their
# products are exact in float32.
_LOG_UNIT = 2.0**-6
# float64 logarithms of one launch of `kde_many`: 32 MB
_MAX_LOGARITHMS = 2**22
# classes that one step of a product takes in `kde_many`
_CLASS_PART = 16


class Tile(NamedTuple):
    """Points and keys of one step of a program, and its warps."""

    point_block: int
    key_block: int
    num_warps: int


FEW_TILE = Tile(128, 32, 4)
MANY_TILE = Tile(64, 32, 4)
# for more than 64 classes
WIDE_TILE = Tile(64, 64, 8)


class _Keys(NamedTuple):
    """The arguments that both kernels of keys begin with; (B2, K, C), with B2 sets of keys."""

    prob: Tensor
    label: Tensor
    # (B2, K), or None
    weight: Tensor | None

    @property
    def strides(self) -> tuple[int, ...]:
        weight_stride = (0, 0) if self.weight is None else self.weight.stride()
        return (*self.prob.stride(), *self.label.stride(), *weight_stride)


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
    """See `kernel_mean`; float32, without a gradient. Outside region (B, n), bool, the point is the result.

    A block of points outside the region takes no time. A point with a NaN becomes NaN, others do not. Up to
    four classes, labels must be within float16's 65504.
    """
    mean = torch.empty(points.shape, dtype=torch.float32, device=points.device)
    if points.numel() == 0:
        return mean
    region = None if region is None else region.contiguous().view(torch.uint8)
    if weight is not None and weight.dtype == torch.bool:
        weight = weight.view(torch.uint8)
    is_few = points.shape[1] <= _MAX_FEW_CLASSES and bandwidth >= MIN_SPLIT_BANDWIDTH
    fill = _fill_few if is_few else _fill_many
    with torch.cuda.device_of(points):
        fill(mean, points, region, _Keys(key_prob, label, weight), bandwidth, smallest_prob)
    return mean


def _bandwidth_numbers(bandwidth: float) -> tuple[float, float, float]:
    """1 / bandwidth as the sum of two numbers that are exact in float32; and an offset of all energies.

    The offset cancels. It makes energies smaller.
    """
    inverse = 1 / bandwidth
    (rounded,) = struct.unpack("f", struct.pack("f", inverse))
    return rounded, inverse - rounded, math.lgamma(inverse + 1)


def _fill_few(
    mean: Tensor, points: Tensor, region: Tensor | None, keys: _Keys, bandwidth: float, min_prob: float
) -> None:
    batch, num_classes, num_points = points.shape
    num_sets, num_keys, _ = keys.prob.shape
    tile = FEW_TILE
    num_padded = triton.cdiv(num_keys, tile.key_block) * tile.key_block
    num_values = triton.next_power_of_2(2 * (num_classes + 1))
    high = mean.new_empty(num_sets, num_padded, 16, dtype=torch.float16)
    rest = torch.empty_like(high)
    values = mean.new_empty(num_sets, num_padded, num_values, dtype=torch.float16)
    # the largest α log2 e has 11 bits; not below 2^-8, because log2 w must fit in 2^23 units of energy
    alpha_unit = 2.0 ** max(-8, math.ceil(math.log2(math.log2(math.e) / bandwidth)) - 11)
    constants = {
        "MIN_PROB": min_prob,
        "NUM_CLASSES": num_classes,
        "NUM_VALUES": num_values,
        "LOG_UNIT": _LOG_UNIT,
        "KEY_BLOCK": tile.key_block,
    }
    split_keys_kernel[(num_padded // tile.key_block, num_sets)](
        *keys, high, rest, values, num_keys, num_padded, *keys.strides, *_bandwidth_numbers(bandwidth),
        alpha_unit, num_warps=1, **constants,
    )  # fmt: skip
    few_classes_kernel[(triton.cdiv(num_points, tile.point_block), batch)](
        points, region, high, rest, values, mean,
        num_points, num_padded, int(num_sets > 1), *points.stride(), alpha_unit,
        POINT_BLOCK=tile.point_block, num_warps=tile.num_warps, **constants,
    )  # fmt: skip


def _fill_many(
    mean: Tensor, points: Tensor, region: Tensor | None, keys: _Keys, bandwidth: float, min_prob: float
) -> None:
    batch, num_classes, num_points = points.shape
    num_sets, num_keys, _ = keys.prob.shape
    tile = MANY_TILE if num_classes <= 64 else WIDE_TILE
    num_padded = triton.cdiv(num_keys, tile.key_block) * tile.key_block
    alpha = mean.new_empty(num_sets, num_classes, num_padded, dtype=torch.float64)
    energy = mean.new_empty(num_sets, num_padded, dtype=torch.float64)
    label = mean.new_empty(num_sets, num_classes, num_padded)
    exact_keys_kernel[(num_padded // tile.key_block, num_sets)](
        *keys, alpha, energy, label, num_keys, num_padded, *keys.strides, *_bandwidth_numbers(bandwidth),
        MIN_PROB=min_prob, NUM_CLASSES=num_classes, KEY_BLOCK=tile.key_block, num_warps=1,
    )  # fmt: skip
    size = max(1024, _MAX_LOGARITHMS // num_classes)
    for image, start in product(range(batch), range(0, num_points, size)):
        part = slice(start, min(start + size, num_points))
        log_prob = points[image, :, part].double().clamp_(min=min_prob).log_().contiguous()
        many_classes_kernel[(triton.cdiv(part.stop - start, tile.point_block),)](
            points[image, :, part], None if region is None else region[image, part],
            log_prob, alpha, energy, label, mean[image, :, part],
            part.stop - start, num_padded, image if num_sets > 1 else 0, num_points, *points.stride()[1:],
            NUM_CLASSES=num_classes, CLASS_BLOCK=max(_CLASS_PART, triton.next_power_of_2(num_classes)),
            CLASS_PART=_CLASS_PART, POINT_BLOCK=tile.point_block, KEY_BLOCK=tile.key_block,
            num_warps=tile.num_warps,
        )  # fmt: skip
