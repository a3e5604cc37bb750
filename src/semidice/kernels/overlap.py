"""`reference_sums` and the loss of them on a GPU: the logits are read once forward and once backward.

    sums       one pass: probabilities in registers, partial sums of each program   (N, T, 5, C)
    loss       one program: totals, cross entropy, region loss, and d loss / d sums  (N, 4, C)
    gradient   one pass: probabilities again, and the gradient, the only tensor of the logits' size

Rows of the tile are all classes (padded to a power of two), columns voxels. Every sum has a fixed order, so
results are the same in every run. Offsets are 64 bit. The formulas are those of `forms`, `blocked`, `losses`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arrays import Activation
from ..forms import Form

NUM_SUMS = 5
LARGEST_NUM_CLASSES = 1024
_ACTIVATIONS = {"softmax": 0, "sigmoid": 1, "none": 2}
_FORMS = {None: -1, "min": 0, "product": 1, "squared": 2, "relaxed": 3}
_OVERS = {"batch": 0, "image": 1, "class": 2}
SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1)
NO_FORM, MIN, PRODUCT, SQUARED = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BATCH, IMAGE = tl.constexpr(0), tl.constexpr(1)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


class Tiling(NamedTuple):
    """How the voxels of an image are dealt out: programs of `num_tiles` tiles of classes x voxels."""

    class_block: int
    voxel_block: int
    num_tiles: int
    num_warps: int


def choose_tiling(num_images: int, num_classes: int, num_voxels: int) -> Tiling:
    """About 1024 elements a tile, rows of at least 16 voxels, and enough programs to fill the device."""
    class_block = triton.next_power_of_2(num_classes)
    voxel_block = min(1024, max(16, 1024 // class_block))
    num_warps = max(2, min(16, class_block * voxel_block // 1024))
    tiles = triton.cdiv(num_voxels, voxel_block)
    num_tiles = max(1, min(16, tiles * num_images // 2048))
    return Tiling(class_block, voxel_block, num_tiles, num_warps)


@triton.jit
def _load_tile(
    logits,
    target,
    valid,
    n,
    v,
    num_voxels,
    num_classes,
    logits_n,
    logits_c,
    logits_v,
    target_n,
    target_c,
    target_v,
    ACTIVATION: tl.constexpr,
    HARD: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CLASS_BLOCK: tl.constexpr,
):
    """Logits, probabilities, logarithm of their total, soft target, and which entries count."""
    c = tl.arange(0, CLASS_BLOCK)[:, None]
    inside = (c < num_classes) & (v < num_voxels)[None, :]
    c64, v64 = c.to(tl.int64), v.to(tl.int64)[None, :]
    x = tl.load(logits + n * logits_n + c64 * logits_c + v64 * logits_v, mask=inside, other=0.0)
    x = x.to(tl.float32)
    counted = inside
    if HAS_VALID:
        flag = tl.load(valid + n * num_voxels + v.to(tl.int64), mask=v < num_voxels, other=0)
        counted = counted & (flag != 0)[None, :]
    if HARD:
        index = tl.load(target + n * target_n + v.to(tl.int64) * target_v, mask=v < num_voxels, other=0)
        y = (index.to(tl.int32)[None, :] == c).to(tl.float32)
    else:
        y = tl.load(target + n * target_n + c64 * target_c + v64 * target_v, mask=inside, other=0.0)
        y = y.to(tl.float32)
    y = tl.where(counted, y, 0.0)
    if ACTIVATION == SOFTMAX:
        # a class that only pads the tile has probability 0; its x stays 0, and 0 times it too
        padded = tl.where(c < num_classes, x, float("-inf"))
        largest = tl.max(padded, 0)[None, :]
        power = tl.exp(padded - largest)
        total = tl.sum(power, 0)[None, :]
        prob = power / total
        log_total = largest + tl.log(total)
    elif ACTIVATION == SIGMOID:
        prob = 1.0 / (1.0 + tl.exp(-x))
        log_total = x
    else:
        prob = x
        log_total = x
    return x, prob, log_total, y, counted


@triton.jit
def _sums_kernel(
    logits,
    target,
    valid,
    partials,
    num_voxels,
    num_classes,
    logits_n,
    logits_c,
    logits_v,
    target_n,
    target_c,
    target_v,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
    HARD: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CLASS_BLOCK: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    program, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tp = tl.zeros([CLASS_BLOCK, VOXEL_BLOCK], tl.float32)
    fp = tl.zeros([CLASS_BLOCK, VOXEL_BLOCK], tl.float32)
    fn = tl.zeros([CLASS_BLOCK, VOXEL_BLOCK], tl.float32)
    entropy = tl.zeros([CLASS_BLOCK, VOXEL_BLOCK], tl.float32)
    mass = tl.zeros([CLASS_BLOCK, VOXEL_BLOCK], tl.float32)
    for tile in range(NUM_TILES):
        v = (program * NUM_TILES + tile) * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK)
        x, prob, log_total, y, counted = _load_tile(
            logits, target, valid, n, v, num_voxels, num_classes,
            logits_n, logits_c, logits_v, target_n, target_c, target_v,
            ACTIVATION, HARD, HAS_VALID, CLASS_BLOCK,
        )  # fmt: skip
        if FORM != NO_FORM:
            p = tl.where(counted, prob, 0.0)
            if FORM == MIN:
                both = tl.minimum(p, y)
                tp += both
                fp += p - both
                fn += y - both
            elif FORM == PRODUCT:
                tp += p * y
                fp += tl.maximum(p - y, 0.0)
                fn += tl.maximum(y - p, 0.0)
            elif FORM == SQUARED:
                tp += p * y
                fp += p * (p - y)
                fn += y * (y - p)
            else:
                tp += p * y
                fp += p * (1.0 - y)
                fn += y * (1.0 - p)
        if ENTROPY:
            if ACTIVATION == SOFTMAX:
                each = y * (log_total - x)
            elif ACTIVATION == SIGMOID:
                each = tl.maximum(x, 0.0) - x * y + tl.log(1.0 + tl.exp(-tl.abs(x)))
            else:
                each = -y * tl.log(tl.maximum(prob, SMALLEST_NORMAL))
            entropy += tl.where(counted, each, 0.0)
            if ACTIVATION == SIGMOID:
                mass += counted.to(tl.float32)
            else:
                mass += y
    c = tl.arange(0, CLASS_BLOCK)
    row = partials + (n * tl.num_programs(0) + program) * 5 * num_classes + c
    inside = c < num_classes
    if FORM != NO_FORM:
        tl.store(row, tl.sum(tp, 1), mask=inside)
        tl.store(row + num_classes, tl.sum(fp, 1), mask=inside)
        tl.store(row + 2 * num_classes, tl.sum(fn, 1), mask=inside)
    if ENTROPY:
        tl.store(row + 3 * num_classes, tl.sum(entropy, 1), mask=inside)
        tl.store(row + 4 * num_classes, tl.sum(mass, 1), mask=inside)


@triton.jit
def _gradient_kernel(
    logits,
    target,
    valid,
    to_sums,
    scale,
    gradient,
    num_voxels,
    num_classes,
    logits_n,
    logits_c,
    logits_v,
    target_n,
    target_c,
    target_v,
    gradient_n,
    gradient_c,
    gradient_v,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
    HARD: tl.constexpr,
    HAS_VALID: tl.constexpr,
    CLASS_BLOCK: tl.constexpr,
    VOXEL_BLOCK: tl.constexpr,
):
    n = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VOXEL_BLOCK + tl.arange(0, VOXEL_BLOCK)
    _, prob, _, y, counted = _load_tile(
        logits, target, valid, n, v, num_voxels, num_classes,
        logits_n, logits_c, logits_v, target_n, target_c, target_v,
        ACTIVATION, HARD, HAS_VALID, CLASS_BLOCK,
    )  # fmt: skip
    c = tl.arange(0, CLASS_BLOCK)[:, None]
    row = to_sums + n * 4 * num_classes + c
    inside = c < num_classes
    factor = tl.load(scale)
    to_prob = tl.zeros_like(prob)
    if FORM != NO_FORM:
        to_tp = tl.load(row, mask=inside, other=0.0) * factor
        to_fp = tl.load(row + num_classes, mask=inside, other=0.0) * factor
        to_fn = tl.load(row + 2 * num_classes, mask=inside, other=0.0) * factor
        if FORM == MIN:
            to_prob = tl.where(prob < y, to_tp - to_fn, tl.where(prob > y, to_fp, 0.0))
        elif FORM == PRODUCT:
            to_prob = tl.where(prob < y, -to_fn, tl.where(prob > y, to_fp, 0.0)) + to_tp * y
        elif FORM == SQUARED:
            to_prob = (to_tp - to_fp - to_fn) * y + 2.0 * to_fp * prob
        else:
            to_prob = to_fp + (to_tp - to_fp - to_fn) * y
    to_entropy = tl.zeros_like(prob)
    if ENTROPY:
        to_entropy = tl.load(row + 3 * num_classes, mask=inside, other=0.0) * factor
    if ACTIVATION == SOFTMAX:
        weighted = prob * to_prob - to_entropy * y
        result = weighted - prob * tl.sum(weighted, 0)[None, :]
    elif ACTIVATION == SIGMOID:
        result = prob * (1.0 - prob) * to_prob + to_entropy * (prob - y)
    else:
        held = prob < SMALLEST_NORMAL
        result = to_prob - tl.where(held, 0.0, to_entropy * y / tl.where(held, 1.0, prob))
    result = tl.where(counted, result, 0.0)
    place = gradient + n * gradient_n + c.to(tl.int64) * gradient_c + v.to(tl.int64)[None, :] * gradient_v
    tl.store(place, result.to(gradient.dtype.element_ty), mask=inside & (v < num_voxels)[None, :])


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
    to_tp = tl.where(something, -slope * errors, 0.0)
    to_fp = tl.where(something, slope * alpha * (tp + smooth), slope * alpha)
    to_fn = tl.where(something, slope * beta * (tp + smooth), slope * beta)
    counted = tl.full(tp.shape, 1.0, tl.float32)
    if PRESENT:
        counted = (tp + fn > 0.0).to(tl.float32)
    return loss, to_tp, to_fp, to_fn, counted


@triton.jit
def _loss_kernel(
    partials,
    class_weight,
    sums,
    to_sums,
    total_loss,
    entropy_loss,
    region_loss,
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
    CLASS_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PROGRAM_BLOCK: tl.constexpr,
):
    """Total, cross entropy and region loss, and the derivative of the total in every sum; one program."""
    row = tl.arange(0, ROW_BLOCK)
    in_row = row < 5 * num_classes
    for n in range(num_images):
        total = tl.zeros([ROW_BLOCK], tl.float32)
        for first in range(0, num_programs, PROGRAM_BLOCK):
            program = first + tl.arange(0, PROGRAM_BLOCK)
            place = (n * num_programs + program)[:, None] * 5 * num_classes + row[None, :]
            mask = (program < num_programs)[:, None] & in_row[None, :]
            total += tl.sum(tl.load(partials + place, mask=mask, other=0.0), 0)
        tl.store(sums + n * 5 * num_classes + row, total, mask=in_row)
    tl.debug_barrier()
    c = tl.arange(0, CLASS_BLOCK)
    inside = c < num_classes
    weight = inside.to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(class_weight + c, mask=inside, other=0.0)
    cross_entropy = 0.0
    if ENTROPY:
        entropy = tl.zeros([CLASS_BLOCK], tl.float32)
        mass = tl.zeros([CLASS_BLOCK], tl.float32)
        for n in range(num_images):
            entropy += tl.load(sums + (n * 5 + 3) * num_classes + c, mask=inside, other=0.0)
            mass += tl.load(sums + (n * 5 + 4) * num_classes + c, mask=inside, other=0.0)
        weighted_mass = tl.sum(mass * weight, 0)
        weighted_mass = tl.where(weighted_mass > 0.0, weighted_mass, 1.0)
        cross_entropy = tl.sum(entropy * weight, 0) / weighted_mass
        for n in range(num_images):
            tl.store(
                to_sums + (n * 4 + 3) * num_classes + c, entropy_weight * weight / weighted_mass, mask=inside
            )
    region = 0.0
    if FORM != NO_FORM:
        if not BACKGROUND:
            weight = tl.where(c > 0, weight, 0.0)
        tp = tl.zeros([CLASS_BLOCK], tl.float32)
        fp = tl.zeros([CLASS_BLOCK], tl.float32)
        fn = tl.zeros([CLASS_BLOCK], tl.float32)
        # over classes: how many images count, and their mean loss; over images: how many have a class
        num_counted = tl.zeros([CLASS_BLOCK], tl.float32)
        class_loss = tl.zeros([CLASS_BLOCK], tl.float32)
        num_with_class = 0.0
        image_loss = 0.0
        for n in range(num_images):
            tp_n = tl.load(sums + n * 5 * num_classes + c, mask=inside, other=0.0)
            fp_n = tl.load(sums + (n * 5 + 1) * num_classes + c, mask=inside, other=0.0)
            fn_n = tl.load(sums + (n * 5 + 2) * num_classes + c, mask=inside, other=0.0)
            if OVER == BATCH:
                tp += tp_n
                fp += fp_n
                fn += fn_n
            else:
                loss, _, _, _, counted = _region_terms(
                    tp_n, fp_n, fn_n, alpha, beta, gamma, smooth, LOG, FOCAL, PRESENT
                )
                num_counted += counted
                class_loss += loss * counted
                mass_n = tl.sum(counted * weight, 0)
                image_loss += tl.sum(loss * counted * weight, 0) / tl.where(mass_n > 0.0, mass_n, 1.0)
                num_with_class += (mass_n > 0.0).to(tl.float32)
        # what each image and class contributes to the mean: share[c] for batch and class
        share = weight
        num_images_meant = tl.where(num_with_class > 0.0, num_with_class, 1.0)
        if OVER == BATCH:
            loss, to_tp, to_fp, to_fn, counted = _region_terms(
                tp, fp, fn, alpha, beta, gamma, smooth, LOG, FOCAL, PRESENT
            )
            share = counted * weight
            total_share = tl.sum(share, 0)
            share = share / tl.where(total_share > 0.0, total_share, 1.0)
            region = tl.sum(loss * share, 0)
        elif OVER == IMAGE:
            region = image_loss / num_images_meant
        else:
            share = tl.where(num_counted > 0.0, weight, 0.0)
            total_share = tl.sum(share, 0)
            share = share / tl.where(total_share > 0.0, total_share, 1.0)
            share = share / tl.where(num_counted > 0.0, num_counted, 1.0)
            region = tl.sum(class_loss * share, 0)
        for n in range(num_images):
            if OVER == BATCH:
                part = region_weight * share
            else:
                tp_n = tl.load(sums + n * 5 * num_classes + c, mask=inside, other=0.0)
                fp_n = tl.load(sums + (n * 5 + 1) * num_classes + c, mask=inside, other=0.0)
                fn_n = tl.load(sums + (n * 5 + 2) * num_classes + c, mask=inside, other=0.0)
                loss, to_tp, to_fp, to_fn, counted = _region_terms(
                    tp_n, fp_n, fn_n, alpha, beta, gamma, smooth, LOG, FOCAL, PRESENT
                )
                part = region_weight * counted * share
                if OVER == IMAGE:
                    mass_n = tl.sum(counted * weight, 0)
                    part = part / (tl.where(mass_n > 0.0, mass_n, 1.0) * num_images_meant)
            tl.store(to_sums + n * 4 * num_classes + c, part * to_tp, mask=inside)
            tl.store(to_sums + (n * 4 + 1) * num_classes + c, part * to_fp, mask=inside)
            tl.store(to_sums + (n * 4 + 2) * num_classes + c, part * to_fn, mask=inside)
    tl.store(total_loss, entropy_weight * cross_entropy + region_weight * region)
    tl.store(entropy_loss, cross_entropy)
    tl.store(region_loss, region)


class Inputs(NamedTuple):
    """Logits (N, C, V), target (N, V) or (N, C, V), valid (N, V) or None, and what is asked of them."""

    logits: Tensor
    target: Tensor
    valid: Tensor | None
    activation: Activation
    form: Form | None
    entropy: bool

    @property
    def hard(self) -> bool:
        return not self.target.is_floating_point()

    def strides(self) -> tuple[int, ...]:
        target_strides = self.target.stride()
        if self.hard:
            target_strides = (target_strides[0], 0, target_strides[1])
        return (*self.logits.stride(), *target_strides)

    def constants(self) -> dict[str, Any]:
        return {
            "ACTIVATION": _ACTIVATIONS[self.activation],
            "FORM": _FORMS[self.form],
            "ENTROPY": self.entropy,
            "HARD": self.hard,
            "HAS_VALID": self.valid is not None,
        }


def flat_inputs(
    logits: Tensor,
    target: Tensor,
    valid: Tensor | None,
    *,
    activation: Activation,
    form: Form | None,
    entropy: bool,
) -> Inputs:
    """`Inputs` with one axis of space; copies only what has no single stride along it."""
    hard = not target.is_floating_point()
    return Inputs(
        _flat(logits, 2),
        _flat(target, 1 if hard else 2),
        None if valid is None else _flat(valid, 1).contiguous(),
        activation,
        form,
        entropy,
    )


def _flat(tensor: Tensor, num_leading: int) -> Tensor:
    if tensor.ndim == num_leading:
        return tensor.unsqueeze(-1)
    # flatten merges axes that have one stride, as those of channels-last do, and copies others
    return tensor.flatten(num_leading)


def partial_sums(inputs: Inputs) -> Tensor:
    """Sums (N, T, 5, C) of T programs an image; those that were not asked for hold anything."""
    num_images, num_classes, num_voxels = inputs.logits.shape
    tiling = choose_tiling(num_images, num_classes, num_voxels)
    num_programs = triton.cdiv(num_voxels, tiling.voxel_block * tiling.num_tiles)
    shape = num_images, num_programs, NUM_SUMS, num_classes
    partials = torch.empty(shape, device=inputs.logits.device, dtype=torch.float32)
    _sums_kernel[(num_programs, num_images)](
        inputs.logits,
        inputs.target,
        inputs.valid,
        partials,
        num_voxels,
        num_classes,
        *inputs.strides(),
        **inputs.constants(),
        CLASS_BLOCK=tiling.class_block,
        VOXEL_BLOCK=tiling.voxel_block,
        NUM_TILES=tiling.num_tiles,
        num_warps=tiling.num_warps,
    )
    return partials


def logits_gradient(inputs: Inputs, to_sums: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Gradient in the logits, in the shape and layout of `like`, of to_sums (N, 4, C) times `scale`."""
    num_images, num_classes, num_voxels = inputs.logits.shape
    tiling = choose_tiling(num_images, num_classes, num_voxels)
    gradient = torch.empty_like(like)
    flat = _flat(gradient, 2)
    if flat.data_ptr() != gradient.data_ptr():
        gradient = torch.empty_like(like, memory_format=torch.contiguous_format)
        flat = _flat(gradient, 2)
    _gradient_kernel[(triton.cdiv(num_voxels, tiling.voxel_block), num_images)](
        inputs.logits,
        inputs.target,
        inputs.valid,
        to_sums,
        scale,
        flat,
        num_voxels,
        num_classes,
        *inputs.strides(),
        *flat.stride(),
        **inputs.constants(),
        CLASS_BLOCK=tiling.class_block,
        VOXEL_BLOCK=tiling.voxel_block,
        num_warps=tiling.num_warps,
    )
    return gradient


class MixtureOptions(NamedTuple):
    """Numbers and choices of `losses.region_loss_of` and of the mixture."""

    alpha: float
    beta: float
    entropy_weight: float
    region_weight: float
    gamma: float = 1.0
    log: bool = False
    smooth: float = 0.0
    over: str = "batch"
    classes: str = "all"
    background: bool = True


def mixture_losses(
    inputs: Inputs, class_weight: Tensor | None, options: MixtureOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total, cross entropy and region loss, and d total / d sums (N, 4, C)."""
    num_images, num_classes, _ = inputs.logits.shape
    partials = partial_sums(inputs)
    # one program adds up a few hundred kilobytes in no time; more is work for the whole device
    if partials.numel() > 2**18:
        partials = partials.sum(1, keepdim=True)
    row_block = triton.next_power_of_2(NUM_SUMS * num_classes)
    device = partials.device
    sums = torch.empty(num_images, NUM_SUMS, num_classes, device=device)
    to_sums = torch.empty(num_images, 4, num_classes, device=device)
    total, cross_entropy, region = (torch.empty((), device=device) for _ in range(3))
    _loss_kernel[(1,)](
        partials,
        class_weight,
        sums,
        to_sums,
        total,
        cross_entropy,
        region,
        num_images,
        partials.shape[1],
        num_classes,
        float(options.alpha),
        float(options.beta),
        float(options.gamma),
        float(options.smooth),
        float(options.entropy_weight),
        float(options.region_weight),
        FORM=_FORMS[inputs.form],
        ENTROPY=inputs.entropy,
        HAS_WEIGHT=class_weight is not None,
        LOG=options.log,
        FOCAL=options.gamma != 1,
        PRESENT=options.classes == "present",
        OVER=_OVERS[options.over],
        BACKGROUND=options.background,
        CLASS_BLOCK=triton.next_power_of_2(num_classes),
        ROW_BLOCK=row_block,
        PROGRAM_BLOCK=max(1, min(triton.next_power_of_2(partials.shape[1]), 4096 // row_block)),
        num_warps=8,
    )
    return total, cross_entropy, region, to_sums
