"""The loss from the sums, in one program: cross entropy, region loss, their mixture, and its derivatives.

The formulas are those of `losses`; derivatives are written out. Several images are processed at once, because
a load takes about a microsecond, however much it brings.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .sums import add_programs

# what `LossSpec.over` means
OVERS = {"batch": 0, "image": 1, "class": 2}
BATCH, IMAGE = tl.constexpr(0), tl.constexpr(1)


class LossSpec(NamedTuple):
    """What the kernel of the loss is compiled for."""

    has_region: bool
    entropy: bool
    # options of the region loss; `focal` is whether gamma is not 1, `over` a value of OVERS
    log: bool
    focal: bool
    present: bool
    over: int
    background: bool
    # whether the sums of all programs are added up already
    added_up: bool
    # classes, and images that are processed at once
    class_block: int
    image_block: int
    # sums and programs that are added up at once
    column_block: int
    program_block: int
    num_warps: int


@triton.jit
def _shaped_error(error, gamma, SPEC: tl.constexpr):
    """Loss of a class from its Tversky error, and the derivative in the error."""
    loss = error
    slope = tl.full(error.shape, 1.0, tl.float32)
    if SPEC.log:
        limit = 1.0 - 1e-7
        index = 1.0 - tl.minimum(error, limit)
        loss = -tl.log(index)
        slope = tl.where(error <= limit, 1.0 / index, 0.0)
    if SPEC.focal:
        positive = loss > 0.0
        logarithm = tl.log(tl.where(positive, loss, 1.0))
        slope = tl.where(positive, slope * gamma * tl.exp((gamma - 1.0) * logarithm), 0.0)
        loss = tl.where(positive, tl.exp(gamma * logarithm), 0.0)
    return loss, slope


@triton.jit
def _region_terms(tp, fp, fn, numbers, SPEC: tl.constexpr):
    """Loss, its derivatives in tp, fp and fn, and 1 if the class counts, else 0."""
    alpha, beta, gamma, smooth = numbers
    errors = alpha * fp + beta * fn
    denominator = tp + errors + smooth
    positive = denominator > 0.0
    safe = tl.where(positive, denominator, 1.0)
    loss, slope = _shaped_error(errors / safe, gamma, SPEC=SPEC)
    slope = tl.where(positive, slope / (safe * safe), slope)
    grad_tp = tl.where(positive, -slope * errors, 0.0)
    grad_fp = tl.where(positive, slope * alpha * (tp + smooth), slope * alpha)
    grad_fn = tl.where(positive, slope * beta * (tp + smooth), slope * beta)
    counted = tl.full(tp.shape, 1.0, tl.float32)
    if SPEC.present:
        counted = (tp + fn > 0.0).to(tl.float32)
    return loss, grad_tp, grad_fp, grad_fn, counted


@triton.jit
def _places(ptr, first_image, num_images, num_classes, num_rows, SPEC: tl.constexpr):
    """Pointers to the first of `num_rows` rows of a block of images, and whether there is an element."""
    n = (first_image + tl.arange(0, SPEC.image_block))[:, None]
    c = tl.arange(0, SPEC.class_block)[None, :]
    return ptr + n * num_rows * num_classes + c, (n < num_images) & (c < num_classes)


@triton.jit
def _load_overlap(sums_ptr, first_image, num_images, num_classes, SPEC: tl.constexpr):
    """tp, fp and fn of a block of images, and whether they exist."""
    place, inside = _places(sums_ptr, first_image, num_images, num_classes, 5, SPEC=SPEC)
    tp = tl.load(place, mask=inside, other=0.0)
    fp = tl.load(place + num_classes, mask=inside, other=0.0)
    return tp, fp, tl.load(place + 2 * num_classes, mask=inside, other=0.0), inside


@triton.jit
def _or_one(x):
    """x, or 1 where it is not positive: a safe denominator."""
    return tl.where(x > 0.0, x, 1.0)


@triton.jit
def _cross_entropy(
    grad_sums_ptr, sums_ptr, weight, entropy_weight, num_images, num_classes, SPEC: tl.constexpr
):
    """The cross entropy; its derivatives are stored."""
    CLASS_BLOCK: tl.constexpr = SPEC.class_block
    IMAGE_BLOCK: tl.constexpr = SPEC.image_block
    entropy = tl.zeros([CLASS_BLOCK], tl.float32)
    mass = tl.zeros([CLASS_BLOCK], tl.float32)
    for first in range(0, num_images, SPEC.image_block):
        place, inside = _places(sums_ptr, first, num_images, num_classes, 5, SPEC=SPEC)
        entropy += tl.sum(tl.load(place + 3 * num_classes, mask=inside, other=0.0), 0)
        mass += tl.sum(tl.load(place + 4 * num_classes, mask=inside, other=0.0), 0)
    weighted_mass = _or_one(tl.sum(mass * weight, 0))
    slope = entropy_weight * weight / weighted_mass
    for first in range(0, num_images, SPEC.image_block):
        place, inside = _places(grad_sums_ptr, first, num_images, num_classes, 4, SPEC=SPEC)
        of_images = tl.broadcast_to(slope[None, :], [IMAGE_BLOCK, CLASS_BLOCK])
        tl.store(place + 3 * num_classes, of_images, mask=inside)
    return tl.sum(entropy * weight, 0) / weighted_mass


@triton.jit
def _region_loss(
    grad_sums_ptr, sums_ptr, weight, region_weight, numbers, num_images, num_classes, SPEC: tl.constexpr
):
    """The region loss; its derivatives are stored."""
    CLASS_BLOCK: tl.constexpr = SPEC.class_block
    IMAGE_BLOCK: tl.constexpr = SPEC.image_block
    tp = tl.zeros([1, CLASS_BLOCK], tl.float32)
    fp, fn = tp, tp
    # over classes: number of images in which a class counts, and the sum of their losses
    num_counted = tl.zeros([CLASS_BLOCK], tl.float32)
    class_loss = num_counted
    # over images: number of images with a class that counts, and the sum of their losses
    num_with_class = 0.0
    image_loss = 0.0
    for first in range(0, num_images, SPEC.image_block):
        tp_n, fp_n, fn_n, inside = _load_overlap(sums_ptr, first, num_images, num_classes, SPEC=SPEC)
        if SPEC.over == BATCH:
            tp += tl.sum(tp_n, 0)[None, :]
            fp += tl.sum(fp_n, 0)[None, :]
            fn += tl.sum(fn_n, 0)[None, :]
        else:
            loss, _, _, _, counted = _region_terms(tp_n, fp_n, fn_n, numbers, SPEC=SPEC)
            counted = tl.where(inside, counted, 0.0)
            num_counted += tl.sum(counted, 0)
            class_loss += tl.sum(loss * counted, 0)
            weight_n = tl.sum(counted * weight[None, :], 1)
            image_loss += tl.sum(tl.sum(loss * counted * weight[None, :], 1) / _or_one(weight_n), 0)
            num_with_class += tl.sum((weight_n > 0.0).to(tl.float32), 0)
    # share of a class, for batch and class also of each of its images, in the mean
    share = weight
    if SPEC.over == BATCH:
        loss, grad_tp, grad_fp, grad_fn, counted = _region_terms(tp, fp, fn, numbers, SPEC=SPEC)
        share = tl.sum(counted, 0) * weight
        share = share / _or_one(tl.sum(share, 0))
        region = tl.sum(tl.sum(loss, 0) * share, 0)
    elif SPEC.over == IMAGE:
        region = image_loss / _or_one(num_with_class)
    else:
        share = tl.where(num_counted > 0.0, weight, 0.0)
        share = share / _or_one(tl.sum(share, 0))
        share = share / _or_one(num_counted)
        region = tl.sum(class_loss * share, 0)
    for first in range(0, num_images, SPEC.image_block):
        factor = tl.broadcast_to((region_weight * share)[None, :], [IMAGE_BLOCK, CLASS_BLOCK])
        if SPEC.over != BATCH:
            tp_n, fp_n, fn_n, _ = _load_overlap(sums_ptr, first, num_images, num_classes, SPEC=SPEC)
            _, grad_tp, grad_fp, grad_fn, counted = _region_terms(tp_n, fp_n, fn_n, numbers, SPEC=SPEC)
            factor *= counted
            if SPEC.over == IMAGE:
                weight_n = tl.sum(counted * weight[None, :], 1)
                factor = factor / (_or_one(weight_n) * _or_one(num_with_class))[:, None]
        place, inside = _places(grad_sums_ptr, first, num_images, num_classes, 4, SPEC=SPEC)
        tl.store(place, factor * grad_tp, mask=inside)
        tl.store(place + num_classes, factor * grad_fp, mask=inside)
        tl.store(place + 2 * num_classes, factor * grad_fn, mask=inside)
    return region


@triton.jit
def loss_kernel(
    workspace_ptr,  # derivatives (N, 4, C), sums (N, 5, C), and the partial sums unless they are added up
    class_weight_ptr,  # (C,), or None
    total_ptr,  # ()
    terms_ptr,  # (2,): cross entropy and region loss; or None
    num_images, num_programs, num_classes, alpha, beta, gamma, smooth, entropy_weight, region_weight,
    SPEC: tl.constexpr,
):  # fmt: skip
    """The mixture and its two terms, and the derivative of the mixture in every sum; a single program."""
    grad_sums_ptr, sums_ptr = workspace_ptr, workspace_ptr + 4 * num_images * num_classes
    if not SPEC.added_up:
        partials_ptr = workspace_ptr + 9 * num_images * num_classes
        for first in range(0, 5 * num_images * num_classes, SPEC.column_block):
            add_programs(
                partials_ptr, sums_ptr, first, num_images, num_programs, num_classes,
                COLUMN_BLOCK=SPEC.column_block, PROGRAM_BLOCK=SPEC.program_block,
            )  # fmt: skip
        tl.debug_barrier()
    c = tl.arange(0, SPEC.class_block)
    weight = (c < num_classes).to(tl.float32)
    if class_weight_ptr is not None:
        weight = tl.load(class_weight_ptr + c, mask=c < num_classes, other=0.0)
    cross_entropy = 0.0
    if SPEC.entropy:
        cross_entropy = _cross_entropy(
            grad_sums_ptr, sums_ptr, weight, entropy_weight, num_images, num_classes, SPEC=SPEC
        )
    region = 0.0
    if SPEC.has_region:
        if not SPEC.background:
            weight = tl.where(c > 0, weight, 0.0)
        numbers = (alpha, beta, gamma, smooth)
        region = _region_loss(
            grad_sums_ptr, sums_ptr, weight, region_weight, numbers, num_images, num_classes, SPEC=SPEC
        )
    tl.store(total_ptr, entropy_weight * cross_entropy + region_weight * region)
    if terms_ptr is not None:
        tl.store(terms_ptr, cross_entropy)
        tl.store(terms_ptr + 1, region)
