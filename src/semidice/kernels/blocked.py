"""`reference_sums` on the CPU, in blocks that fit the cache; no large tensor but the gradient.

The forward pass sums block by block and saves only its inputs. The backward pass computes the probabilities
p of each block again. With g = dL/dp and e = dL/dentropy:

    softmax   w = p g - e y,   dL/dlogits = w - p sum_c w_c
    sigmoid   dL/dlogits = p (1 - p) g + e (p - y)
    none      g - e y / p

Class indices of many classes are not expanded to one-hot labels: for every other class, a voxel has
tp = fn = 0 and fp = p, so only its value at the label is gathered. Totals are float64. A gradient of the
gradient goes through the definition.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..overlap import SumsOptions, VoxelSums, form_gradient, form_sums, probability, reference_gradient

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
    # at least float32; 0 at ignored voxels, as the target
    prediction: Tensor
    target: Tensor
    # (N, 1, V), 1 or 0 in the prediction's type; None if all voxels are valid
    valid: Tensor | None


def blocked_applies(prediction: Tensor, target: Tensor, valid: Tensor | None) -> bool:
    """Whether blocks save time: a large tensor on a CPU; all tensors must be contiguous."""
    tensors = (prediction, target) if valid is None else (prediction, target, valid)
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    large = prediction.device.type == "cpu" and prediction.numel() >= MIN_SIZE
    return large and contiguous and not target.requires_grad


def blocked_sums(prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions) -> VoxelSums:
    """See `reference_sums`; where `blocked_applies`, differentiable in the prediction."""
    return VoxelSums(*_BlockedSums.apply(prediction, target, valid, options))


class _BlockedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, C) each; a sum that was not asked for has no meaning."""

    @staticmethod
    def forward(
        ctx: Any, prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(prediction, target, valid)
        ctx.options = options
        sums_of = _gathered_sums if _gathers(prediction, target, options) else _sums
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
        gradient_of = _gathered_gradient if _gathers(prediction, target, ctx.options) else _gradient
        gradient = torch.empty_like(prediction)
        flat = gradient.view(*prediction.shape[:2], -1)
        for block in _blocks(prediction, target, valid):
            grads = [grad[block.images, :, None] for grad in gradients[:4]]
            of_block = gradient_of(block, ctx.options, grads)
            if block.valid is not None:
                of_block *= block.valid
            flat[block.images, :, block.voxels] = of_block
        return gradient, None, None, None


def _sums(block: _Block, options: SumsOptions) -> Sequence[Tensor | float]:
    """Sums against a soft or one-hot label."""
    activation, soft, valid = options.activation, _soft_target(block), block.valid
    # The softmax subtracts the maximum anyway, so the probabilities stay the same to the bit.
    logits = block.prediction
    if activation == "softmax":
        logits = logits - logits.amax(1, keepdim=True)
    prob = probability(logits, activation)
    tp: Tensor | float = 0.0
    fp = fn = entropy = mass = tp
    if options.form is not None:
        tp, fp, fn = form_sums(prob if valid is None else prob * valid, soft, options.form)
    if options.entropy and activation == "sigmoid":
        each = F.binary_cross_entropy_with_logits(logits, soft, weight=valid, reduction="none")
        entropy, mass = each.sum(2), (torch.ones_like(prob[:, :1]) if valid is None else valid).sum(2)
    elif options.entropy:
        if activation == "softmax":
            # the largest logit is 0 now, so its probability is the factor between every p and exp(logit)
            log_prob = logits.add_(prob.amax(1, keepdim=True).log_())
        else:
            log_prob = prob.clamp_min(torch.finfo(prob.dtype).tiny).log_()
        entropy, mass = log_prob.mul_(soft).sum(2).neg_(), soft.sum(2)
    return tp, fp, fn, entropy, mass


def _gradient(block: _Block, options: SumsOptions, grads: Sequence[Tensor]) -> Tensor:
    """The gradient for a soft or one-hot label."""
    soft, (grad_tp, grad_fp, grad_fn, grad_entropy) = _soft_target(block), grads
    prob = probability(block.prediction, options.activation)
    if options.form is None:
        gradient = torch.zeros_like(prob)
    elif options.form == "min":
        # Comparisons that write floats; at a tie both are 0.
        gradient = torch.gt(prob, soft, out=torch.empty_like(prob)).mul_(grad_fp)
        below = torch.lt(prob, soft, out=torch.empty_like(prob))
        gradient.addcmul_(below, grad_tp - grad_fn)
    else:
        gradient = form_gradient(prob, soft, options.form, grad_tp, grad_fp, grad_fn)
    if options.activation == "softmax":
        gradient.mul_(prob)
        if options.entropy:
            gradient.addcmul_(soft, grad_entropy, value=-1)
        return gradient.addcmul_(prob, gradient.sum(1, keepdim=True), value=-1)
    if options.activation == "sigmoid":
        gradient.mul_(torch.addcmul(prob, prob, prob, value=-1))
        return gradient.addcmul_(prob.sub_(soft), grad_entropy) if options.entropy else gradient
    if options.entropy:
        tiny = torch.finfo(prob.dtype).tiny
        gradient.sub_((soft * grad_entropy).div_(prob.clamp_min(tiny)).mul_(prob >= tiny))
    return gradient


def _gathers(prediction: Tensor, target: Tensor, options: SumsOptions) -> bool:
    # for class indices the other three forms differ only at ties
    hard = not target.is_floating_point() and options.form != "squared"
    return hard and options.activation == "softmax" and prediction.shape[1] >= MIN_GATHERED_CLASSES


def _gathered_sums(block: _Block, options: SumsOptions) -> Sequence[Tensor | float]:
    """Sums against class indices, from the probability of each voxel's label."""
    prob, index = block.prediction.softmax(1), block.target.long().unsqueeze(1)
    num_images, num_classes, _ = prob.shape
    at_label = prob.gather(1, index)
    # ignored voxels are counted as one more class, which is then left out
    bins = index if block.valid is None else index.masked_fill(block.valid == 0, num_classes)
    bins = (bins + (num_classes + 1) * torch.arange(num_images).view(-1, 1, 1)).flatten()

    def by_class(values: Tensor) -> Tensor:
        # float64: bincount adds one number at a time, and fn may be a small rest of a large count
        counts = torch.bincount(bins, values.flatten().double(), minlength=num_images * (num_classes + 1))
        return counts.view(num_images, -1)[:, :num_classes]

    tp, mass = by_class(at_label), by_class(torch.ones_like(at_label))
    log_prob = at_label.log()
    # A p too small to have all its digits. NaN fails the comparison.
    if not bool(at_label.amin() >= torch.finfo(at_label.dtype).tiny):
        log_prob = block.prediction.log_softmax(1).gather(1, index)
    # fp is not computed as sum - tp, which would lose digits
    prob.scatter_(1, index, 0.0)
    fp = prob.sum(2) if block.valid is None else prob.mul_(block.valid).sum(2)
    return tp, fp, mass - tp, by_class(log_prob).neg_(), mass


def _gathered_gradient(block: _Block, options: SumsOptions, grads: Sequence[Tensor]) -> Tensor:
    """The gradient for class indices."""
    prob, index = block.prediction.softmax(1), block.target.long().unsqueeze(1)
    at_label = prob.gather(1, index)
    own_tp, _, own_fn, own_entropy = (grad.squeeze(2).gather(1, index[:, 0]).unsqueeze(1) for grad in grads)
    pull = own_tp - own_fn
    if options.form != "relaxed" and bool(at_label.amax() >= 1):
        # a tie: there the derivative of `min` is 0, and that of `product` has only the term of tp
        pull = torch.where(at_label < 1, pull, own_tp if options.form == "product" else 0)
    pull.mul_(at_label)
    if options.entropy:
        pull.sub_(own_entropy)
    w = torch.mul(prob, grads[1]).scatter_(1, index, pull)
    return w.addcmul_(prob, w.sum(1, keepdim=True), value=-1)


def _soft_target(block: _Block) -> Tensor:
    """The label as floats, 0 at ignored voxels."""
    if block.target.is_floating_point():
        return block.target
    # the comparison writes floats: operations on mixed bytes and floats are slow
    classes = torch.arange(block.prediction.shape[1], dtype=block.target.dtype).view(-1, 1)
    soft = torch.eq(block.target.unsqueeze(1), classes, out=torch.empty_like(block.prediction))
    return soft if block.valid is None else soft.mul_(block.valid)


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
            label = label.to(dtype) if soft else label
            piece = prediction[images, :, voxels].to(dtype)
            counted = None if valid is None else valid[images, None, voxels]
            if counted is None or bool(counted.all()):
                yield _Block(images, voxels, piece, label, None)
                continue
            label = _zeroed(label, counted) if soft else label * counted.squeeze(1)
            yield _Block(images, voxels, _zeroed(piece, counted), label, counted.to(dtype))


def _zeroed(tensor: Tensor, valid: Tensor) -> Tensor:
    """`tensor` (N, C, V) with 0 at ignored voxels, which may hold NaN."""
    # A mask over the bits is six times as fast as masked_fill.
    bits = tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
    return bits.bitwise_and(valid.to(bits.dtype).neg_()).view(tensor.dtype)
