"""`reference_sums` of a softmax on the CPU, in blocks that fit the cache; no large tensor but the gradient.

The forward pass sums block by block and saves only its inputs. The backward pass computes the probabilities
p of each block again: with w = p dL/dp - y dL/dentropy the gradient is w - p sum_c w_c. With many classes,
class indices are not expanded to one-hot labels: for every other class a voxel has tp = fn = 0 and fp = p, so
only its value at the label is gathered. Totals are float64. A gradient of the gradient goes through the
definition.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..overlap import (
    SumsOptions,
    VoxelSums,
    form_gradient,
    form_sums,
    reference_gradient,
)

# Elements of the prediction in a block: 2 MiB of float32. Large predictions have blocks of up to 4 MiB.
# Smaller blocks would use the cache better, but starting the threads would then cost more than that saves.
BLOCK_SIZE = 2**19
# below this size plain operations are as fast
MIN_SIZE = BLOCK_SIZE
# with fewer classes one-hot labels are faster than gathering, which reads one voxel at a time
MIN_GATHERED_CLASSES = 12


class _Block(NamedTuple):
    """Some voxels of one image, or all voxels of several small images, with one axis of space."""

    images: slice
    voxels: slice
    # at least float32
    logits: Tensor
    target: Tensor
    # None if all voxels are valid
    valid: Tensor | None


def blocked_applies(prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions) -> bool:
    """Whether blocks save time: a softmax of a large tensor on a CPU; all tensors must be contiguous."""
    tensors = (prediction, target) if valid is None else (prediction, target, valid)
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    large = prediction.device.type == "cpu" and prediction.numel() >= MIN_SIZE
    return large and contiguous and options.activation == "softmax" and not target.requires_grad


def blocked_sums(prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions) -> VoxelSums:
    """See `reference_sums`; where `blocked_applies`, differentiable in the logits."""
    return VoxelSums(*_BlockedSums.apply(prediction, target, valid, options))


class _BlockedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, C) each; a sum that was not asked for is undefined."""

    @staticmethod
    def forward(
        ctx: Any, prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(prediction, target, valid)
        ctx.options = options
        sums_of = _gathered_sums if _gathers(prediction, target, options) else _softmax_sums
        totals = torch.zeros(5, *prediction.shape[:2], dtype=torch.float64)
        for block in _blocks(prediction, target, valid):
            for total, part in zip(totals, sums_of(block, options), strict=True):
                total[block.images] += part
        return tuple(totals.to(torch.promote_types(prediction.dtype, torch.float32)).unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        prediction, target, valid = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradient = reference_gradient(prediction, target, valid, ctx.options, gradients)
            return gradient, None, None, None
        gathers = _gathers(prediction, target, ctx.options)
        gradient_of = _gathered_gradient if gathers else _softmax_gradient
        gradient = torch.empty_like(prediction)
        flat = gradient.view(*prediction.shape[:2], -1)
        for block in _blocks(prediction, target, valid):
            prob = block.logits.softmax(1)
            _clear_ignored(prob, block.valid)
            w = gradient_of(block, prob, ctx.options, [g[block.images, :, None] for g in gradients[:4]])
            total = w.sum(1, keepdim=True)
            flat[block.images, :, block.voxels] = w.addcmul_(prob, total, value=-1)
        return gradient, None, None, None


def _gathers(prediction: Tensor, target: Tensor, options: SumsOptions) -> bool:
    # for class indices the other three forms differ only at ties
    hard = not target.is_floating_point() and options.form != "squared"
    return hard and prediction.shape[1] >= MIN_GATHERED_CLASSES


def _softmax_sums(block: _Block, options: SumsOptions) -> tuple[Tensor | float, ...]:
    """Sums against a soft or one-hot label, with one exponential per element."""
    soft = _soft_target(block)
    # The softmax subtracts the maximum anyway, so the probabilities stay the same to the bit.
    logits = block.logits - block.logits.amax(1, keepdim=True)
    prob = logits.softmax(1)
    errors: tuple[Tensor | float, ...] = (0.0, 0.0, 0.0)
    entropies: tuple[Tensor | float, ...] = (0.0, 0.0)
    if options.entropy:
        # the largest logit is 0 now, so its probability is the factor between every p and exp(logit)
        log_prob = logits.add_(prob.amax(1, keepdim=True).log_())
        _clear_ignored(log_prob, block.valid)
        entropies = log_prob.mul_(soft).sum(2).neg_(), soft.sum(2)
    if options.form == "min":
        _clear_ignored(prob, block.valid)
        # in place; relu(x - y) is x - min(x, y), to the bit
        both = torch.minimum(prob, soft, out=logits)
        errors = both.sum(2), prob.sub_(both).sum(2), torch.sub(soft, both, out=prob).sum(2)
    elif options.form is not None:
        _clear_ignored(prob, block.valid)
        errors = form_sums(prob, soft, options.form)
    return *errors, *entropies


def _softmax_gradient(block: _Block, prob: Tensor, options: SumsOptions, grad_sums: list[Tensor]) -> Tensor:
    """w of a soft or one-hot label."""
    soft = _soft_target(block)
    grad_tp, grad_fp, grad_fn, grad_entropy = grad_sums
    if options.form is None:
        w = torch.zeros_like(prob)
    elif options.form == "min":
        # Comparisons that write floats; at a tie both are 0.
        w = torch.gt(prob, soft, out=torch.empty_like(prob)).mul_(grad_fp)
        below = torch.lt(prob, soft, out=torch.empty_like(prob))
        w.addcmul_(below, grad_tp - grad_fn).mul_(prob)
    else:
        w = form_gradient(prob, soft, options.form, grad_tp, grad_fp, grad_fn).mul_(prob)
    return w.addcmul_(soft, grad_entropy, value=-1) if options.entropy else w


def _gathered_sums(block: _Block, options: SumsOptions) -> tuple[Tensor | float, ...]:
    """Sums against class indices, from the probability of each voxel's label."""
    prob, index = block.logits.softmax(1), _class_indices(block)
    num_images, num_classes, _ = prob.shape
    at_label = prob.gather(1, index)
    # ignored voxels are counted as one more class, which is then left out
    bins = index if block.valid is None else index.masked_fill(~block.valid.unsqueeze(1), num_classes)
    bins = (bins + (num_classes + 1) * torch.arange(num_images).view(-1, 1, 1)).flatten()

    def by_class(values: Tensor) -> Tensor:
        # float64: bincount adds one number at a time, and fn may be a small rest of a large count
        counts = torch.bincount(bins, values.flatten().double(), minlength=num_images * (num_classes + 1))
        return counts.view(num_images, -1)[:, :num_classes]

    tp, mass = by_class(at_label), by_class(torch.ones_like(at_label))
    log_prob = at_label.log()
    # A p too small to have all its digits. NaN, for example of an ignored voxel, fails the comparison.
    if not bool(at_label.amin() >= torch.finfo(at_label.dtype).tiny):
        log_prob = block.logits.log_softmax(1).gather(1, index)
    # fp is not computed as sum - tp, which would lose digits
    prob.scatter_(1, index, 0.0)
    _clear_ignored(prob, block.valid)
    return tp, prob.sum(2), mass - tp, by_class(log_prob).neg_(), mass


def _gathered_gradient(block: _Block, prob: Tensor, options: SumsOptions, grad_sums: list[Tensor]) -> Tensor:
    """w of class indices."""
    index = _class_indices(block)
    grad_tp, grad_fp, grad_fn, grad_entropy = grad_sums
    at_label = prob.gather(1, index)
    own_tp, own_fn, own_entropy = (
        grad.squeeze(2).gather(1, index.squeeze(1)).unsqueeze(1) for grad in (grad_tp, grad_fn, grad_entropy)
    )
    pull = own_tp - own_fn
    if options.form != "relaxed" and bool(at_label.amax() >= 1):
        # a tie: there the derivative of `min` is 0, and that of `product` has only the term of tp
        pull = torch.where(at_label < 1, pull, own_tp if options.form == "product" else 0)
    pull.mul_(at_label)
    if options.entropy:
        pull.sub_(own_entropy)
    _clear_ignored(pull, block.valid)
    return torch.mul(prob, grad_fp).scatter_(1, index, pull)


def _soft_target(block: _Block) -> Tensor:
    """The label as floats, 0 at ignored voxels."""
    if block.target.is_floating_point():
        soft = block.target.to(block.logits.dtype, copy=block.valid is not None)
    else:
        # the comparison writes floats: operations on mixed bytes and floats are slow
        classes = torch.arange(block.logits.shape[1], dtype=block.target.dtype).view(-1, 1)
        soft = torch.eq(block.target.unsqueeze(1), classes, out=torch.empty_like(block.logits))
    _clear_ignored(soft, block.valid)
    return soft


def _class_indices(block: _Block) -> Tensor:
    """Indices (N, 1, V) as int64; an ignored voxel may hold an index that is no class, and gets class 0."""
    index = block.target if block.valid is None else block.target * block.valid
    return index.long().unsqueeze(1)


def _clear_ignored(tensor: Tensor, valid: Tensor | None) -> None:
    """Set ignored voxels of (N, C, V) to 0 in place, also if they hold NaN."""
    if valid is not None:
        # A mask over the bits is six times as fast as masked_fill_.
        bits = tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
        bits.bitwise_and_(valid.to(bits.dtype).neg_().unsqueeze(1))


def _blocks(prediction: Tensor, target: Tensor, valid: Tensor | None) -> Iterator[_Block]:
    """All voxels once, in blocks of about one size."""
    num_images, num_classes, *_ = prediction.shape
    prediction = prediction.view(num_images, num_classes, -1)
    length = prediction.shape[2]
    soft = target.is_floating_point()
    target = target.view_as(prediction) if soft else target.view(num_images, length)
    valid = None if valid is None else valid.view(num_images, length)
    block_size = max(BLOCK_SIZE, min(2 * BLOCK_SIZE, prediction.numel() // 6))
    # half precision ends here, before the exponential
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    step = max(1, min(length, block_size // num_classes))
    if 16 < step < length:
        # a multiple of the vector length: the rest of a row is computed one number at a time
        step -= step % 16
    num_together = max(1, block_size // (num_classes * length))
    for first in range(0, num_images, num_together):
        images = slice(first, first + num_together)
        for start in range(0, length, step):
            voxels = slice(start, start + step)
            label = target[images, :, voxels] if soft else target[images, voxels]
            counted = None if valid is None else valid[images, voxels]
            if counted is not None and bool(counted.all()):
                counted = None
            yield _Block(images, voxels, prediction[images, :, voxels].to(dtype), label, counted)
