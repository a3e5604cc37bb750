"""`reference_sums` on the CPU in blocks that fit the cache; only the gradient has the size of the logits.

The forward pass sums block by block and saves only its inputs. The backward pass computes the probabilities
p of each block again. Let e be the gradient of the entropy sums and w = p dL/dp - e y:

    softmax   dL/dlogits = w - p sum_c w_c
    sigmoid   dL/dlogits = p (1 - p) dL/dp + e (p - y)
    none      dL/dp - e y / p

For class indices all forms but `squared` agree, and need no comparison of p with y. With many classes they
are not expanded to one-hot labels: for every other class a voxel has tp = fn = 0 and fp = p, so only its
value at the label is gathered. Totals over blocks are float64. A gradient of the gradient goes through the
definition.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..overlap.forms import form_gradient, form_sums
from ..overlap.options import SumsOptions
from ..overlap.stats import OverlapStats
from ..overlap.sums import SegmentationSums, probability, reference_gradient, reference_sums, requested_sums

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
    prediction: Tensor
    target: Tensor
    # None if all voxels are valid
    valid: Tensor | None


class _Buffers:
    """Named buffers that all blocks share: allocating new memory costs more than writing to it."""

    def __init__(self, dtype: torch.dtype) -> None:
        # half precision ends here, before the exponential
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size) -> Tensor:
        """Contiguous memory of `shape` with undefined values."""
        buffer = self._memory.get(name)
        if buffer is None or buffer.numel() < shape.numel():
            buffer = self._memory[name] = torch.empty(shape, dtype=self.dtype)
        return buffer if buffer.shape == shape else buffer.flatten()[: shape.numel()].view(shape)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        return self.take(name, tensor.shape).copy_(tensor)


def blocked_sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
) -> SegmentationSums:
    """See `reference_sums`; differentiable in the prediction, not in the target."""
    return requested_sums(_BlockedSums.apply(prediction, target, valid, options), options)


class _BlockedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, C) each; a sum that was not asked for is 0."""

    @staticmethod
    def forward(
        ctx: Any, prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(prediction, target, valid)
        ctx.options = options
        sums_of = _kernels_for(prediction, target, options).sums
        buffers = _Buffers(prediction.dtype)
        totals = torch.zeros(5, *prediction.shape[:2], dtype=torch.float64)
        for block in _blocks(prediction, target, valid):
            sums = sums_of(block, options, buffers)
            if sums.overlap is not None:
                totals[:3, block.images] += torch.stack(sums.overlap)
            if sums.entropy is not None and sums.mass is not None:
                totals[3:, block.images] += torch.stack((sums.entropy, sums.mass))
        return tuple(totals.to(buffers.dtype).unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        prediction, target, valid = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradient = reference_gradient(prediction, target, valid, ctx.options, gradients)
            return gradient, None, None, None
        gradient_of = _kernels_for(prediction, target, ctx.options).gradient
        buffers = _Buffers(prediction.dtype)
        gradient = torch.empty_like(prediction)
        # the same axes as those of the prediction in `_blocks`, so that slices of a block fit
        flat_gradient = _with_space(gradient, 2, flat=_can_be_flat(prediction, target, valid))
        for block in _blocks(prediction, target, valid):
            grad_sums = [g[block.images] for g in gradients[:4]]
            view = flat_gradient[block.images, :, block.voxels]
            direct = view.ndim == 3 and view.dtype == buffers.dtype
            out = view if direct else buffers.take("gradient", block.prediction.shape)
            gradient_of(block, ctx.options, buffers, grad_sums, out)
            if not direct:
                view.copy_(out.view(view.shape))
        return gradient, None, None, None


class _BlockKernels(NamedTuple):
    """The functions for one block: its sums, and its gradient from those of tp, fp, fn and entropy."""

    sums: Callable[[_Block, SumsOptions, _Buffers], SegmentationSums]
    # writes into the last argument, (N, C, V)
    gradient: Callable[[_Block, SumsOptions, _Buffers, Sequence[Tensor], Tensor], None]


def _kernels_for(prediction: Tensor, target: Tensor, options: SumsOptions) -> _BlockKernels:
    if options.activation != "softmax":
        return _BlockKernels(_plain_sums, _plain_gradient)
    # for class indices the other three forms differ only at ties
    if target.is_floating_point() or options.form == "squared":
        return _BlockKernels(_softmax_sums, _softmax_gradient)
    if prediction.shape[1] < MIN_GATHERED_CLASSES:
        return _BlockKernels(_one_hot_sums, _one_hot_gradient)
    return _BlockKernels(_gathered_sums, _gathered_gradient)


def _softmax_sums(block: _Block, options: SumsOptions, buffers: _Buffers) -> SegmentationSums:
    """Sums of a softmax against a soft label, with one exponential per element."""
    logits, soft = block.prediction.to(buffers.dtype), _soft_target(block, buffers)
    # The softmax subtracts the maximum anyway, so the probabilities stay the same to the bit.
    logits = torch.sub(logits, logits.amax(1, keepdim=True), out=buffers.take("logits", logits.shape))
    prob = torch.softmax(logits, 1, out=buffers.take("prob", logits.shape))
    entropy = mass = overlap = None
    if options.entropy:
        # the largest logit is 0 now, so its probability is the factor between every p and exp(logit)
        log_prob = logits.add_(prob.amax(1, keepdim=True).log_())
        _clear_ignored(log_prob, block.valid)
        entropy, mass = log_prob.mul_(soft).sum(2).neg_(), soft.sum(2)
    if options.form is not None:
        _clear_ignored(prob, block.valid)
        overlap = (
            _min_sums(prob, soft, logits) if options.form == "min" else form_sums(prob, soft, options.form)
        )
    return SegmentationSums(None if overlap is None else OverlapStats(*overlap), entropy, mass)


def _min_sums(prob: Tensor, soft: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`form_sums` of `min` in place of `prob`: relu(x - y) is x - min(x, y), to the bit."""
    both = torch.minimum(prob, soft, out=scratch)
    return both.sum(2), prob.sub_(both).sum(2), torch.sub(soft, both, out=prob).sum(2)


def _softmax_gradient(
    block: _Block, options: SumsOptions, buffers: _Buffers, grad_sums: Sequence[Tensor], out: Tensor
) -> None:
    soft = _soft_target(block, buffers)
    prob = _softmax(block, buffers)
    _clear_ignored(prob, block.valid)
    grad_tp, grad_fp, grad_fn, grad_entropy = (g.unsqueeze(-1) for g in grad_sums)
    if options.form is None:
        out.zero_()
    elif options.form == "min":
        # Comparisons that write floats; at a tie both are 0.
        torch.gt(prob, soft, out=out).mul_(grad_fp)
        below = torch.lt(prob, soft, out=buffers.take("logits", prob.shape))
        out.addcmul_(below, grad_tp - grad_fn).mul_(prob)
    else:
        torch.mul(form_gradient(prob, soft, options.form, grad_tp, grad_fp, grad_fn), prob, out=out)
    if options.entropy:
        out.addcmul_(soft, grad_entropy, value=-1)
    out.addcmul_(prob, out.sum(1, keepdim=True), value=-1)


def _one_hot_sums(block: _Block, options: SumsOptions, buffers: _Buffers) -> SegmentationSums:
    """Sums of a softmax against class indices of few classes, with one logarithm per voxel."""
    hot, prob = _soft_target(block, buffers), _softmax(block, buffers)
    _clear_ignored(prob, block.valid)
    both = torch.mul(prob, hot, out=buffers.take("logits", prob.shape))
    at_label = both.sum(1)
    overlap = None
    if options.form is not None:
        overlap = OverlapStats(both.sum(2), prob.sub_(both).sum(2), torch.sub(hot, both, out=prob).sum(2))
    if not options.entropy:
        return SegmentationSums(overlap, None, None)
    if block.valid is not None:
        # 1 at ignored voxels, which have no label: the logarithm must be finite
        at_label += ~block.valid
    log_prob = _log_at_label(block, at_label).unsqueeze(1)
    return SegmentationSums(overlap, torch.mul(log_prob, hot, out=both).sum(2).neg_(), hot.sum(2))


def _one_hot_gradient(
    block: _Block, options: SumsOptions, buffers: _Buffers, grad_sums: Sequence[Tensor], out: Tensor
) -> None:
    """Gradient of the form `relaxed`, which needs no comparisons; the other forms differ only at ties."""
    hot, prob = _soft_target(block, buffers), _softmax(block, buffers)
    if options.form != "relaxed" and not bool(prob.amax() < 1):
        _softmax_gradient(block, options, buffers, grad_sums, out)
        return
    _clear_ignored(prob, block.valid)
    grad_tp, grad_fp, grad_fn, grad_entropy = (g.unsqueeze(-1) for g in grad_sums)
    torch.mul(hot, grad_tp - grad_fp - grad_fn, out=out).add_(grad_fp).mul_(prob)
    if options.entropy:
        out.addcmul_(hot, grad_entropy, value=-1)
    out.addcmul_(prob, out.sum(1, keepdim=True), value=-1)


def _gathered_sums(block: _Block, options: SumsOptions, buffers: _Buffers) -> SegmentationSums:
    """Sums of a softmax against class indices, from the probability of each voxel's label."""
    prob, (num_images, num_classes) = _softmax(block, buffers), block.prediction.shape[:2]
    index = _class_indices(block)
    at_label = prob.gather(1, index.unsqueeze(1)).squeeze(1)
    bins = block.target
    if num_images > 1 or block.valid is not None:
        # ignored voxels are counted as one more class, which is then left out
        bins = index if block.valid is None else index.masked_fill(~block.valid, num_classes)
        bins = bins + (num_classes + 1) * torch.arange(num_images).unsqueeze(1)

    def by_class(values: Tensor | None) -> Tensor:
        # float64: bincount adds one number at a time, and fn may be a small rest of a large count
        weights = None if values is None else values.flatten().double()
        counts = torch.bincount(bins.flatten(), weights, minlength=num_images * (num_classes + 1))
        return counts.view(num_images, -1)[:, :num_classes]

    mass = by_class(None)
    entropy = by_class(_log_at_label(block, at_label)).neg_() if options.entropy else None
    if options.form is None:
        return SegmentationSums(None, entropy, mass)
    tp = by_class(at_label)
    # fp is not computed as sum - tp, which would lose digits
    prob.scatter_(1, index.unsqueeze(1), torch.zeros_like(at_label).unsqueeze(1))
    _clear_ignored(prob, block.valid)
    return SegmentationSums(OverlapStats(tp, prob.sum(2), mass - tp), entropy, mass)


def _log_at_label(block: _Block, at_label: Tensor) -> Tensor:
    """log p of the labels; computed from the logits if a p is too small to have all its digits."""
    # NaN, for example of an ignored voxel, fails this comparison
    if bool(at_label.amin() >= torch.finfo(at_label.dtype).tiny):
        return at_label.log()
    logits = block.prediction.to(at_label.dtype)
    return logits.log_softmax(1).gather(1, _class_indices(block).unsqueeze(1)).squeeze(1)


def _gathered_gradient(
    block: _Block, options: SumsOptions, buffers: _Buffers, grad_sums: Sequence[Tensor], out: Tensor
) -> None:
    prob, index = _softmax(block, buffers), _class_indices(block)
    _clear_ignored(prob, block.valid)
    grad_tp, grad_fp, grad_fn, grad_entropy = grad_sums
    torch.mul(prob, grad_fp.unsqueeze(-1), out=out)
    at_label = prob.gather(1, index.unsqueeze(1)).squeeze(1)
    pull = (grad_tp - grad_fn).gather(1, index)
    if options.form != "relaxed" and bool(at_label.amax() >= 1):
        # a tie: there the derivative of `min` is 0, and that of `product` has only the term of tp
        at_tie = grad_tp.gather(1, index) if options.form == "product" else 0
        pull = torch.where(at_label < 1, pull, at_tie)
    pull.mul_(at_label)
    if options.entropy:
        pull.sub_(grad_entropy.gather(1, index))
    _clear_ignored(pull, block.valid)
    out.scatter_(1, index.unsqueeze(1), pull.unsqueeze(1))
    out.addcmul_(prob, out.sum(1, keepdim=True), value=-1)


def _plain_sums(block: _Block, options: SumsOptions, buffers: _Buffers) -> SegmentationSums:
    soft = _soft_target(block, buffers)
    return reference_sums(block.prediction, soft, block.valid, options)


def _plain_gradient(
    block: _Block, options: SumsOptions, buffers: _Buffers, grad_sums: Sequence[Tensor], out: Tensor
) -> None:
    """Gradient in the logits of a sigmoid, or in probabilities."""
    soft = _soft_target(block, buffers)
    prob = probability(block.prediction.to(buffers.dtype), options.activation)
    grad_tp, grad_fp, grad_fn, grad_entropy = (g.unsqueeze(-1) for g in grad_sums)
    gradient = torch.zeros_like(prob)
    if options.form is not None:
        gradient = form_gradient(prob, soft, options.form, grad_tp, grad_fp, grad_fn)
    if options.activation == "sigmoid":
        gradient.mul_(prob).mul_(1 - prob)
        if options.entropy:
            gradient.addcmul_(prob - soft, grad_entropy)
    elif options.entropy:
        clamped = prob.clamp_min(torch.finfo(prob.dtype).tiny)
        gradient.sub_(torch.where(prob >= clamped, soft * grad_entropy / clamped, 0))
    _clear_ignored(gradient, block.valid)
    out.copy_(gradient)


def _softmax(block: _Block, buffers: _Buffers) -> Tensor:
    logits = buffers.copy("logits", block.prediction)
    return torch.softmax(logits, 1, out=buffers.take("prob", logits.shape))


def _soft_target(block: _Block, buffers: _Buffers) -> Tensor:
    """The label as floats, 0 at ignored voxels."""
    if not block.target.is_floating_point():
        # the comparison writes floats: operations on mixed bytes and floats are slow
        shape = block.prediction.shape
        classes = torch.arange(shape[1], dtype=block.target.dtype).view(-1, 1)
        soft = torch.eq(block.target.unsqueeze(1), classes, out=buffers.take("soft", shape))
    elif block.valid is None and block.target.dtype == buffers.dtype:
        return block.target
    else:
        soft = buffers.copy("soft", block.target)
    _clear_ignored(soft, block.valid)
    return soft


def _class_indices(block: _Block) -> Tensor:
    """Indices as int64; an ignored voxel may hold an index that is not a class, and gets class 0."""
    index = block.target.long()
    return index if block.valid is None else index * block.valid


def _clear_ignored(tensor: Tensor, valid: Tensor | None) -> None:
    """Set ignored voxels of (N, C, V) or (N, V) to 0 in place, also if they hold NaN."""
    if valid is None:
        return
    # A mask over the bits is six times as fast as masked_fill_.
    bits = tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
    keep = valid.to(bits.dtype).neg_()
    bits.bitwise_and_(keep if tensor.ndim == 2 else keep.unsqueeze(1))


def _blocks(prediction: Tensor, target: Tensor, valid: Tensor | None) -> Iterator[_Block]:
    """All voxels once, in blocks of about one size; a block of contiguous memory is a view."""
    block_size = max(BLOCK_SIZE, min(2 * BLOCK_SIZE, prediction.numel() // 6))
    flat = _can_be_flat(prediction, target, valid)
    prediction = _with_space(prediction, 2, flat=flat)
    target = _with_space(target, 2 if target.is_floating_point() else 1, flat=flat)
    valid = None if valid is None else _with_space(valid, 1, flat=flat)
    num_images, _, length = prediction.shape[:3]
    row = prediction[0, :, 0].numel()
    step = max(1, min(length, block_size // row))
    if 16 < step < length:
        # a multiple of the vector length: the rest of a row is computed one number at a time
        step -= step % 16
    num_together = max(1, block_size // (row * length))
    for first in range(0, num_images, num_together):
        images = slice(first, first + num_together)
        for start in range(0, length, step):
            voxels = slice(start, start + step)
            counted = None if valid is None else valid[images, voxels].flatten(1)
            if target.is_floating_point():
                label = target[images, :, voxels].flatten(2)
            else:
                label = target[images, voxels].flatten(1)
            yield _Block(
                images,
                voxels,
                prediction[images, :, voxels].flatten(2),
                label,
                None if counted is None or bool(counted.all()) else counted,
            )


def _can_be_flat(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _with_space(tensor: Tensor, num_leading: int, *, flat: bool) -> Tensor:
    """A view with at least one axis of space; with exactly one if `flat`, so that it can be cut anywhere."""
    if tensor.ndim == num_leading:
        return tensor.unsqueeze(-1)
    return tensor.flatten(num_leading) if flat else tensor
