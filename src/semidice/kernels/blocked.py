"""`reference_sums` on the CPU in blocks that fit the cache; only the gradient has the size of the logits.

The forward pass applies the definition block by block and keeps only the inputs; the backward pass makes
each block's probabilities p again. With e the gradient of the entropy sums and w = p dL/dp - e y,

    softmax   dL/dlogits = w - p sum_c w_c
    sigmoid   dL/dlogits = p (1 - p) dL/dp + e (p - y)
    none      dL/dp - e y / p

Totals over blocks are float64. A gradient of the gradient goes through the definition.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import Activation, one_hot
from ..forms import Form, form_gradient
from ..overlap import OverlapStats
from ..sums import SegmentationSums, probability, reference_gradient, reference_sums

# In elements of the prediction: one MiB of float32. Smaller blocks stay nearer in the cache, but with two
# threads the start of an operation costs more than that gives.
BLOCK_SIZE = 2**18
# below this the whole is no more than a few blocks, and plain operations are as good
SMALLEST_SIZE = 2 * BLOCK_SIZE


class _Options(NamedTuple):
    activation: Activation
    form: Form | None
    entropy: bool


class _Block(NamedTuple):
    """Some voxels of one image, or all of several small ones, as views."""

    images: slice
    part: slice
    prediction: Tensor
    target: Tensor
    valid: Tensor | None


def blocked_sums(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation,
    valid: Tensor | None,
    form: Form | None,
    entropy: bool,
) -> SegmentationSums:
    """See `reference_sums`; differentiable in the prediction, not in the target."""
    tp, fp, fn, entropies, mass = _BlockedSums.apply(
        prediction, target, valid, _Options(activation, form, entropy)
    )
    overlap = None if form is None else OverlapStats(tp, fp, fn)
    return SegmentationSums(overlap, *((entropies, mass) if entropy else (None, None)))


class _BlockedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, C) each; zeros for those that were not asked for."""

    @staticmethod
    def forward(
        ctx: Any, prediction: Tensor, target: Tensor, valid: Tensor | None, options: _Options
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(prediction, target, valid)
        ctx.options = options
        totals = torch.zeros(5, *prediction.shape[:2], dtype=torch.float64)
        for block in _blocks(prediction, target, valid):
            soft = _soft_target(block)
            sums = reference_sums(block.prediction, soft, valid=block.valid, **options._asdict())
            if sums.overlap is not None:
                totals[:3, block.images] += torch.stack(sums.overlap)
            if sums.entropy is not None and sums.mass is not None:
                totals[3:, block.images] += torch.stack((sums.entropy, sums.mass))
        return tuple(totals.to(torch.promote_types(prediction.dtype, torch.float32)).unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        prediction, target, valid = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = reference_gradient(prediction, target, gradients, valid=valid, **ctx.options._asdict())
            return again, None, None, None
        gradient = torch.empty_like(prediction)
        # cut as the prediction is, so that a block's gradient has its place
        out = _with_space(gradient, 2, flat=_can_be_flat(prediction, target, valid))
        for block in _blocks(prediction, target, valid):
            to_sums = [_along_space(g[block.images], out.ndim) for g in gradients]
            out[block.images, :, block.part] = _block_gradient(block, ctx.options, *to_sums)
        return gradient, None, None, None


def _block_gradient(
    block: _Block,
    options: _Options,
    to_tp: Tensor,
    to_fp: Tensor,
    to_fn: Tensor,
    to_entropy: Tensor,
    _: Tensor,
) -> Tensor:
    prediction, soft = block.prediction.to(to_tp.dtype), _soft_target(block)
    prob = probability(prediction, options.activation)
    gradient = torch.zeros_like(prob)
    if options.form is not None:
        gradient = form_gradient(prob, soft, options.form, to_tp, to_fp, to_fn)
    if options.activation == "softmax":
        weighted = gradient.mul_(prob)
        if options.entropy:
            weighted.addcmul_(soft, to_entropy, value=-1)
        gradient = weighted.addcmul_(prob, weighted.sum(1, keepdim=True), value=-1)
    elif options.activation == "sigmoid":
        gradient.mul_(prob).mul_(1 - prob)
        if options.entropy:
            gradient.addcmul_(prob - soft, to_entropy)
    elif options.entropy:
        held = prob.clamp_min(torch.finfo(prob.dtype).tiny)
        gradient.sub_(torch.where(prob >= held, soft * to_entropy / held, 0))
    return gradient if block.valid is None else gradient.masked_fill_(~block.valid.unsqueeze(1), 0)


def _soft_target(block: _Block) -> Tensor:
    """Class indices as a float label, once for all that is done with it: bytes and floats mix slowly."""
    dtype = torch.promote_types(block.prediction.dtype, torch.float32)
    soft = block.target
    if not soft.is_floating_point():
        soft = one_hot(soft, block.prediction.shape[1])
    return soft.to(dtype)


def _blocks(prediction: Tensor, target: Tensor, valid: Tensor | None) -> Iterator[_Block]:
    """Everything once, in views of about BLOCK_SIZE elements of the prediction."""
    flat = _can_be_flat(prediction, target, valid)
    prediction = _with_space(prediction, 2, flat=flat)
    target = _with_space(target, 2 if target.is_floating_point() else 1, flat=flat)
    valid = None if valid is None else _with_space(valid, 1, flat=flat)
    num_images, _, length = prediction.shape[:3]
    row = prediction[0, :, 0].numel()
    step = max(1, min(length, BLOCK_SIZE // row))
    num_together = max(1, BLOCK_SIZE // (row * length))
    for first in range(0, num_images, num_together):
        images = slice(first, first + num_together)
        for start in range(0, length, step):
            part = slice(start, start + step)
            yield _Block(
                images,
                part,
                prediction[images, :, part],
                target[images, :, part] if target.is_floating_point() else target[images, part],
                None if valid is None else valid[images, part],
            )


def _can_be_flat(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _with_space(tensor: Tensor, num_leading: int, *, flat: bool) -> Tensor:
    """A view with at least one axis of space, and with only one if `flat`: it can be cut anywhere."""
    if tensor.ndim == num_leading:
        return tensor.unsqueeze(-1)
    return tensor.flatten(num_leading) if flat else tensor


def _along_space(sums: Tensor, ndim: int) -> Tensor:
    return sums.reshape(*sums.shape, *[1] * (ndim - 2))
