"""Reading a tile: logits, target and validity of a block of voxels, and the activation of the logits.

A tile has one row per class and one column per voxel. Its rows come in chunks of a power of two, because a
Triton tensor has such a size: 150 classes are 128 + 16 + 8 rows rather than 256. Values of a tile are tuples
with one tensor per chunk, such as logits `xs`.

`Spec` holds all constants of a kernel. Pointers have the suffix `_ptr`; a tensor that is None is a constant.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# what the constants of a kernel mean
ACTIVATIONS = {"softmax": 0, "sigmoid": 1, "none": 2}
FORMS = {None: -1, "min": 0, "product": 1, "squared": 2, "relaxed": 3}
SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1)
NO_FORM, MIN, PRODUCT = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)
SQUARED, RELAXED = tl.constexpr(2), tl.constexpr(3)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# the logit of a row that only pads a softmax: 2^t is 0, and t is finite, so that 0 · t is 0
FAR_BELOW = tl.constexpr(-1e30)


class Spec(NamedTuple):
    """What a kernel is compiled for."""

    # values of ACTIVATIONS and FORMS
    activation: int
    form: int
    # whether the cross entropy is needed
    entropy: bool
    # whether the target has class indices
    hard: bool
    # whether offsets within an image need 64 bit; offsets of images always have them
    wide: bool
    num_classes: int
    # whether all tiles are full, and need no mask
    even: bool
    # (first class, number of rows) of every chunk of a tile with all classes
    chunks: tuple[tuple[int, int], ...]
    # a thread has every step-th row
    step: int
    voxel_block: int
    # voxels side by side in one thread
    vector: int
    # tiles that are loaded at once
    num_stages: int
    num_warps: int


class Source(NamedTuple):
    """One image of a tensor (N, C, V)."""

    # of class 0 and voxel 0
    ptr: Any
    stride_c: Any
    stride_v: Any


class Voxels(NamedTuple):
    """A block of voxels of one image."""

    # in the image; 64 bit if the image is so large that offsets need it
    index: Any
    # False beyond the last voxel of the image
    inside: Any
    # number of voxels of all images before this one
    before: Any


@triton.jit
def tiles_of(program, num_programs, num_voxels, SPEC: tl.constexpr):
    """First tile of a program, and the first of the next one. Programs differ by at most one tile."""
    num_tiles = tl.cdiv(num_voxels, SPEC.voxel_block).to(tl.int64)
    first = program * num_tiles // num_programs
    return first.to(tl.int32), ((program + 1) * num_tiles // num_programs).to(tl.int32)


@triton.jit
def voxels_of(n, tile, num_voxels, SPEC: tl.constexpr):
    """The voxels of a tile of image n."""
    VECTOR: tl.constexpr = SPEC.vector
    index = tl.max_contiguous(tile * SPEC.voxel_block + tl.arange(0, SPEC.voxel_block), VECTOR)
    inside = tl.full(index.shape, True, tl.int1) if SPEC.even else index < num_voxels
    if SPEC.wide:
        index = index.to(tl.int64)
    return Voxels(index=index, inside=inside, before=n * num_voxels)


@triton.jit
def load_labels(target, voxels, SPEC: tl.constexpr):
    """Class indices (V,) of a hard target; zeros for a soft one."""
    labels = tl.zeros(voxels.index.shape, tl.int32)
    if SPEC.hard:
        labels = tl.load(target.ptr + voxels.index * target.stride_v, mask=voxels.inside, other=0)
    return labels


@triton.jit
def valid_labels(valid_ptr, labels, voxels):
    """Whether each voxel counts, and its class index: -1, which is no class, if it does not."""
    counted = voxels.inside
    if valid_ptr is not None:
        place = valid_ptr + voxels.before + voxels.index
        counted = counted & (tl.load(place, mask=voxels.inside, other=0) != 0)
    return counted, tl.where(counted, labels.to(tl.int32), -1)


@triton.jit
def addresses(tensor, voxels, SPEC: tl.constexpr, FIRST, ROWS: tl.constexpr):
    """Pointers (ROWS, V) to a chunk of classes, and whether there is an element."""
    row = FIRST + tl.arange(0, ROWS)[:, None]
    inside = (row < SPEC.num_classes) & voxels.inside[None, :]
    row = row.to(voxels.index.dtype)
    return tensor.ptr + row * tensor.stride_c + voxels.index[None, :] * tensor.stride_v, inside


@triton.jit
def load_chunk(tensor, voxels, SPEC: tl.constexpr, FIRST, ROWS: tl.constexpr):
    """A chunk (ROWS, V) as float32, 0 where there is no element."""
    place, inside = addresses(tensor, voxels, SPEC=SPEC, FIRST=FIRST, ROWS=ROWS)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def mask_logits(x, counted, valid_ptr, SPEC: tl.constexpr, FIRST):
    """Logits of a chunk: 0 where a voxel does not count, FAR_BELOW in rows that only pad a softmax."""
    if valid_ptr is not None:
        # whatever the memory holds, even NaN
        x = tl.where(counted[None, :], x, 0.0)
    if SPEC.activation == SOFTMAX:
        x = tl.where(FIRST + tl.arange(0, x.shape[0])[:, None] < SPEC.num_classes, x, FAR_BELOW)
    return x


@triton.jit
def mask_target(y, index, counted, valid_ptr, SPEC: tl.constexpr, FIRST):
    """Target of a chunk, `y` if it is soft and one-hot if it is hard: 0 where a voxel does not count."""
    if SPEC.hard:
        y = (index[None, :] == FIRST + tl.arange(0, y.shape[0])[:, None]).to(tl.float32)
    elif valid_ptr is not None:
        y = tl.where(counted[None, :], y, 0.0)
    return y


@triton.jit
def _load_tile(tensor, voxels, SPEC: tl.constexpr):
    chunks = ()
    for i in tl.static_range(len(SPEC.chunks)):
        chunks += (load_chunk(tensor, voxels, SPEC=SPEC, FIRST=SPEC.chunks[i][0], ROWS=SPEC.chunks[i][1]),)
    return chunks


@triton.jit
def read_tile(logits, target, valid_ptr, labels, voxels, SPEC: tl.constexpr):
    """Whether voxels count, their class indices, and logits and target of all chunks.

    `labels` are the class indices in the target, or None: then they are loaded here.
    """
    loaded_xs = _load_tile(logits, voxels, SPEC=SPEC)
    loaded_ys = loaded_xs
    if not SPEC.hard:
        loaded_ys = _load_tile(target, voxels, SPEC=SPEC)
    if labels is None:
        # After the logits: threads exchange labels and wait for them, while logits are on their way.
        labels = load_labels(target, voxels, SPEC=SPEC)
    counted, index = valid_labels(valid_ptr, labels, voxels)
    xs, ys = (), ()
    for i in tl.static_range(len(SPEC.chunks)):
        xs += (mask_logits(loaded_xs[i], counted, valid_ptr, SPEC=SPEC, FIRST=SPEC.chunks[i][0]),)
        ys += (mask_target(loaded_ys[i], index, counted, valid_ptr, SPEC=SPEC, FIRST=SPEC.chunks[i][0]),)
    return counted, index, xs, ys


@triton.jit
def own_logits(logits, index, voxels, SPEC: tl.constexpr):
    """Logits (V,) of the voxels' own classes, 0 for an index beyond the classes."""
    has_class = (index >= 0) & (index < SPEC.num_classes)
    row = index.to(voxels.index.dtype)
    place = logits.ptr + row * logits.stride_c + voxels.index * logits.stride_v
    return tl.load(place, mask=has_class, other=0.0)


@triton.jit
def _steps(x, STEP: tl.constexpr):
    return tl.reshape(x, [x.shape[0] // STEP, STEP, x.shape[1]])


@triton.jit
def add_steps(total, x, SPEC: tl.constexpr):
    """`total` (step, V), if there is one, and the sum of every step-th row: one thread holds these rows."""
    summed = tl.sum(_steps(x, STEP=SPEC.step), 0)
    return summed if total is None else total + summed


# The interpreter has no functions of a device, and AMD has others.
HAS_FAST_LOG = tl.constexpr(isinstance(add_steps, triton.JITFunction) and torch.version.hip is None)


@triton.jit
def _log2(x):
    """Within 4e-7, as exact as the exponentials: one instruction, where the exact logarithm takes twenty."""
    return libdevice.fast_log2f(x) if HAS_FAST_LOG else tl.log2(x)


@triton.jit
def softmax_powers(xs, counted, SPEC: tl.constexpr):
    """t = log2 e (x - largest) and 2^t of every chunk; largest, 1 / Σ 2^t and log2 Σ 2^t of every voxel.

    1 / Σ 2^t is 0 where the voxel does not count.
    """
    largest = tl.max(_steps(xs[0], STEP=SPEC.step), 0)
    for i in tl.static_range(1, len(xs)):
        largest = tl.maximum(largest, tl.max(_steps(xs[i], STEP=SPEC.step), 0))
    # Threads exchange nothing until the chunks are joined.
    largest = tl.max(largest, 0)
    # its rounding error is the same for all classes, and cancels
    shift = -LOG2_E * largest[None, :]
    ts, powers, total = (), (), None
    for i in tl.static_range(len(xs)):
        t = tl.fma(xs[i], LOG2_E, shift)
        power = tl.exp2(t)
        total = add_steps(total, power, SPEC=SPEC)
        ts += (t,)
        powers += (power,)
    log_total = _log2(tl.sum(total, 0))
    inverse = tl.where(counted, tl.exp2(-log_total), 0.0)
    return ts, powers, largest, inverse, log_total


@triton.jit
def probability(x, power, inverse, log_total, counted, SPEC: tl.constexpr):
    """Probability of a chunk of logits; for a softmax of t, from 2^t or, if `power` is None, from t."""
    if SPEC.activation == SOFTMAX and power is None:
        prob = tl.where(counted[None, :], tl.exp2(x - log_total[None, :]), 0.0)
    elif SPEC.activation == SOFTMAX:
        prob = power * inverse[None, :]
    elif SPEC.activation == SIGMOID:
        prob = 1.0 / (1.0 + tl.exp(-x))
    else:
        prob = x
    return prob
