"""The loss from the sums, in one program: cross entropy, region loss, their mixture, and its derivatives.

The formulas are those of `losses`; derivatives are written out. Several images are processed at once, because
a load takes about a microsecond, however much it brings.
"""

import triton
import triton.language as tl

from .sums import add_programs
from .tile import NO_FORM

# what the constant OVER means
OVERS = {"batch": 0, "image": 1, "class": 2}
BATCH, IMAGE = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _shaped_error(error, gamma, LOG: tl.constexpr, FOCAL: tl.constexpr):
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
    """Loss, its derivatives in tp, fp and fn, and 1 if the class counts, else 0."""
    errors = alpha * fp + beta * fn
    denominator = tp + errors + smooth
    positive = denominator > 0.0
    safe = tl.where(positive, denominator, 1.0)
    loss, slope = _shaped_error(errors / safe, gamma, LOG=LOG, FOCAL=FOCAL)
    slope = tl.where(positive, slope / (safe * safe), slope)
    grad_tp = tl.where(positive, -slope * errors, 0.0)
    grad_fp = tl.where(positive, slope * alpha * (tp + smooth), slope * alpha)
    grad_fn = tl.where(positive, slope * beta * (tp + smooth), slope * beta)
    counted = tl.full(tp.shape, 1.0, tl.float32)
    if PRESENT:
        counted = (tp + fn > 0.0).to(tl.float32)
    return loss, grad_tp, grad_fp, grad_fn, counted


@triton.jit
def _offsets(
    first_image, num_images, num_classes, num_sums, CLASS_BLOCK: tl.constexpr, IMAGE_BLOCK: tl.constexpr
):
    """Offsets of the first of `num_sums` sums of a block of images and all classes; whether it exists."""
    n = (first_image + tl.arange(0, IMAGE_BLOCK))[:, None]
    c = tl.arange(0, CLASS_BLOCK)[None, :]
    return n * num_sums * num_classes + c, (n < num_images) & (c < num_classes)


@triton.jit
def _load_overlap(place, inside, num_classes):
    """tp, fp and fn."""
    tp = tl.load(place, mask=inside, other=0.0)
    fp = tl.load(place + num_classes, mask=inside, other=0.0)
    return tp, fp, tl.load(place + 2 * num_classes, mask=inside, other=0.0)


@triton.jit
def _or_one(x):
    """x, or 1 where it is not positive: a safe denominator."""
    return tl.where(x > 0.0, x, 1.0)


@triton.jit
def _cross_entropy(
    grad_sums_ptr, sums_ptr, weight, entropy_weight, num_images, num_classes,
    CLASS_BLOCK: tl.constexpr, IMAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The cross entropy; its derivatives are stored."""
    entropy = tl.zeros([CLASS_BLOCK], tl.float32)
    mass = tl.zeros([CLASS_BLOCK], tl.float32)
    for first in range(0, num_images, IMAGE_BLOCK):
        offset, inside = _offsets(
            first, num_images, num_classes, 5, CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK
        )
        entropy += tl.sum(tl.load(sums_ptr + offset + 3 * num_classes, mask=inside, other=0.0), 0)
        mass += tl.sum(tl.load(sums_ptr + offset + 4 * num_classes, mask=inside, other=0.0), 0)
    weighted_mass = _or_one(tl.sum(mass * weight, 0))
    cross_entropy = tl.sum(entropy * weight, 0) / weighted_mass
    grad_entropy = entropy_weight * weight / weighted_mass
    for first in range(0, num_images, IMAGE_BLOCK):
        offset, inside = _offsets(
            first, num_images, num_classes, 4, CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK
        )
        of_images = tl.broadcast_to(grad_entropy[None, :], [IMAGE_BLOCK, CLASS_BLOCK])
        tl.store(grad_sums_ptr + offset + 3 * num_classes, of_images, mask=inside)
    return cross_entropy


@triton.jit
def _region_loss(
    grad_sums_ptr, sums_ptr, weight, region_weight, alpha, beta, gamma, smooth, num_images, num_classes,
    LOG: tl.constexpr, FOCAL: tl.constexpr, PRESENT: tl.constexpr, OVER: tl.constexpr,
    CLASS_BLOCK: tl.constexpr, IMAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The region loss; its derivatives are stored."""
    tp = tl.zeros([1, CLASS_BLOCK], tl.float32)
    fp, fn = tp, tp
    # over classes: number of images in which a class counts, and the sum of their losses
    num_counted = tl.zeros([CLASS_BLOCK], tl.float32)
    class_loss = num_counted
    # over images: number of images with a class that counts, and the sum of their losses
    num_with_class = 0.0
    image_loss = 0.0
    for first in range(0, num_images, IMAGE_BLOCK):
        offset, inside = _offsets(
            first, num_images, num_classes, 5, CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK
        )
        tp_n, fp_n, fn_n = _load_overlap(sums_ptr + offset, inside, num_classes)
        if OVER == BATCH:
            tp += tl.sum(tp_n, 0)[None, :]
            fp += tl.sum(fp_n, 0)[None, :]
            fn += tl.sum(fn_n, 0)[None, :]
        else:
            loss, _, _, _, counted = _region_terms(
                tp_n, fp_n, fn_n, alpha, beta, gamma, smooth, LOG=LOG, FOCAL=FOCAL, PRESENT=PRESENT
            )
            counted = tl.where(inside, counted, 0.0)
            num_counted += tl.sum(counted, 0)
            class_loss += tl.sum(loss * counted, 0)
            weight_n = tl.sum(counted * weight[None, :], 1)
            image_loss += tl.sum(tl.sum(loss * counted * weight[None, :], 1) / _or_one(weight_n), 0)
            num_with_class += tl.sum((weight_n > 0.0).to(tl.float32), 0)
    # share of a class, for batch and class also of each of its images, in the mean
    share = weight
    if OVER == BATCH:
        loss, grad_tp, grad_fp, grad_fn, counted = _region_terms(
            tp, fp, fn, alpha, beta, gamma, smooth, LOG=LOG, FOCAL=FOCAL, PRESENT=PRESENT
        )
        share = tl.sum(counted, 0) * weight
        share = share / _or_one(tl.sum(share, 0))
        region = tl.sum(tl.sum(loss, 0) * share, 0)
    elif OVER == IMAGE:
        region = image_loss / _or_one(num_with_class)
    else:
        share = tl.where(num_counted > 0.0, weight, 0.0)
        share = share / _or_one(tl.sum(share, 0))
        share = share / _or_one(num_counted)
        region = tl.sum(class_loss * share, 0)
    for first in range(0, num_images, IMAGE_BLOCK):
        factor = tl.broadcast_to((region_weight * share)[None, :], [IMAGE_BLOCK, CLASS_BLOCK])
        if OVER != BATCH:
            offset, inside = _offsets(
                first, num_images, num_classes, 5, CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK
            )
            tp_n, fp_n, fn_n = _load_overlap(sums_ptr + offset, inside, num_classes)
            loss, grad_tp, grad_fp, grad_fn, counted = _region_terms(
                tp_n, fp_n, fn_n, alpha, beta, gamma, smooth, LOG=LOG, FOCAL=FOCAL, PRESENT=PRESENT
            )
            factor *= counted
            if OVER == IMAGE:
                weight_n = tl.sum(counted * weight[None, :], 1)
                factor = factor / (_or_one(weight_n) * _or_one(num_with_class))[:, None]
        offset, inside = _offsets(
            first, num_images, num_classes, 4, CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK
        )
        tl.store(grad_sums_ptr + offset, factor * grad_tp, mask=inside)
        tl.store(grad_sums_ptr + offset + num_classes, factor * grad_fp, mask=inside)
        tl.store(grad_sums_ptr + offset + 2 * num_classes, factor * grad_fn, mask=inside)
    return region


@triton.jit
def loss_kernel(
    workspace_ptr,  # derivatives (N, 4, C), sums (N, 5, C), and partial sums (N, T, 5, C) unless ADDED_UP
    class_weight_ptr,  # (C,), or None
    total_ptr,  # ()
    terms_ptr,  # (2,): cross entropy and region loss; or None
    num_images, num_programs, num_classes, alpha, beta, gamma, smooth, entropy_weight, region_weight,
    FORM: tl.constexpr, ENTROPY: tl.constexpr, LOG: tl.constexpr, FOCAL: tl.constexpr,
    PRESENT: tl.constexpr, OVER: tl.constexpr, BACKGROUND: tl.constexpr, ADDED_UP: tl.constexpr,
    CLASS_BLOCK: tl.constexpr, IMAGE_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr, PROGRAM_BLOCK: tl.constexpr,
):  # fmt: skip
    """The mixture and its two terms, and the derivative of the mixture in every sum; a single program."""
    grad_sums_ptr, sums_ptr = workspace_ptr, workspace_ptr + 4 * num_images * num_classes
    if not ADDED_UP:
        partials_ptr = workspace_ptr + 9 * num_images * num_classes
        for first in range(0, 5 * num_images * num_classes, COLUMN_BLOCK):
            add_programs(
                partials_ptr, sums_ptr, first, num_images, num_programs, num_classes,
                COLUMN_BLOCK=COLUMN_BLOCK, PROGRAM_BLOCK=PROGRAM_BLOCK,
            )  # fmt: skip
        tl.debug_barrier()
    c = tl.arange(0, CLASS_BLOCK)
    weight = (c < num_classes).to(tl.float32)
    if class_weight_ptr is not None:
        weight = tl.load(class_weight_ptr + c, mask=c < num_classes, other=0.0)
    cross_entropy = 0.0
    if ENTROPY:
        cross_entropy = _cross_entropy(
            grad_sums_ptr, sums_ptr, weight, entropy_weight, num_images, num_classes,
            CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK,
        )  # fmt: skip
    region = 0.0
    if FORM != NO_FORM:
        if not BACKGROUND:
            weight = tl.where(c > 0, weight, 0.0)
        region = _region_loss(
            grad_sums_ptr, sums_ptr, weight, region_weight, alpha, beta, gamma, smooth,
            num_images, num_classes,
            LOG=LOG, FOCAL=FOCAL, PRESENT=PRESENT, OVER=OVER,
            CLASS_BLOCK=CLASS_BLOCK, IMAGE_BLOCK=IMAGE_BLOCK,
        )  # fmt: skip
    tl.store(total_ptr, entropy_weight * cross_entropy + region_weight * region)
    if terms_ptr is not None:
        tl.store(terms_ptr, cross_entropy)
        tl.store(terms_ptr + 1, region)
