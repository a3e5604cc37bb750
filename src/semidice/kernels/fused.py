"""The Triton kernels as functions with a gradient: the sums of a batch, and the whole mixture of losses.

Eagerly the kernels are launched directly. In a compiled graph they are operators of `torch.library`,
`semidice::overlap_sums` and `semidice::overlap_gradient`, which the compiler leaves alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arrays import Activation
from ..forms import Form
from ..overlap import OverlapStats
from ..sums import SegmentationSums, reference_gradient
from .overlap import MixtureOptions, flat_inputs, logits_gradient, mixture_losses, total_sums


class _Options(NamedTuple):
    activation: Activation
    form: Form | None
    entropy: bool


def fused_sums(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation,
    valid: Tensor | None,
    form: Form | None,
    entropy: bool,
) -> SegmentationSums:
    """See `reference_sums`; differentiable in the prediction, not in the target."""
    sums = _FusedSums.apply(prediction, target, valid, _Options(activation, form, entropy))
    tp, fp, fn, entropies, mass = sums.unbind(1)
    overlap = None if form is None else OverlapStats(tp, fp, fn)
    return SegmentationSums(overlap, *((entropies, mass) if entropy else (None, None)))


def fused_mixture(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation,
    valid: Tensor | None,
    form: Form | None,
    entropy: bool,
    class_weight: Tensor | None,
    options: MixtureOptions,
    parts: bool = True,
) -> tuple[Tensor, ...]:
    """Total, and with `parts` cross entropy and region loss, in three launches, its gradient included.

    The total alone has a gradient. Not to ask for the parts saves the time of two views.
    """
    which = _Options(activation, form, entropy)
    total, (terms,) = _FusedMixture.apply(prediction, target, valid, class_weight, which, options, parts)
    return (total,) if terms is None else (total, *terms.unbind())


class _FusedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, 5, C); those that were not asked for hold anything."""

    @staticmethod
    def forward(
        ctx: Any, prediction: Tensor, target: Tensor, valid: Tensor | None, options: _Options
    ) -> Tensor:
        ctx.save_for_backward(prediction, target, valid)
        ctx.options = options
        sums = torch.ops.semidice.overlap_sums if torch.compiler.is_compiling() else _sums
        return sums(prediction, target, valid, options.activation, options.form or "", options.entropy)

    @staticmethod
    def backward(ctx: Any, to_sums: Tensor) -> tuple[Tensor, None, None, None]:
        prediction, target, valid = ctx.saved_tensors
        options = ctx.options
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = reference_gradient(
                prediction, target, to_sums.unbind(1), valid=valid, **options._asdict()
            )
            return again, None, None, None
        gradient = torch.ops.semidice.overlap_gradient if torch.compiler.is_compiling() else _gradient
        result = gradient(
            prediction, target, valid, to_sums, options.activation, options.form or "", options.entropy
        )
        return result, None, None, None


class _FusedMixture(torch.autograd.Function):
    """Total, and if asked for the two terms; those are for a log and carry no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        prediction: Tensor,
        target: Tensor,
        valid: Tensor | None,
        class_weight: Tensor | None,
        which: _Options,
        options: MixtureOptions,
        parts: bool,
    ) -> tuple[Tensor, tuple[Tensor | None]]:
        activation, form, entropy = which
        inputs = flat_inputs(prediction, target, valid, activation=activation, form=form, entropy=entropy)
        total, terms, room = mixture_losses(inputs, class_weight, options, parts=parts)
        ctx.save_for_backward(prediction, target, valid, room)
        ctx.which = which
        # in a tuple of their own autograd leaves them alone: else it makes zeros for their gradient
        return total, (terms,)

    @staticmethod
    def backward(ctx: Any, to_total: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # with gradients off there is nothing to refuse, and `once_differentiable` takes a few microseconds
        return (_once_gradient if torch.is_grad_enabled() else _mixture_gradient)(ctx, to_total)


def _mixture_gradient(ctx: Any, to_total: Tensor) -> tuple[Tensor | None, ...]:
    prediction, target, valid, room = ctx.saved_tensors
    activation, form, entropy = ctx.which
    inputs = flat_inputs(prediction, target, valid, activation=activation, form=form, entropy=entropy)
    gradient = logits_gradient(inputs, room, to_total, like=prediction)
    return gradient, None, None, None, None, None, None


# an error where a derivative of the gradient is asked for
_once_gradient = once_differentiable(_mixture_gradient)


def _sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: str, form: str, entropy: bool
) -> Tensor:
    inputs = _inputs(prediction, target, valid, activation, form, entropy)
    return total_sums(inputs)


def _gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    to_sums: Tensor,
    activation: str,
    form: str,
    entropy: bool,
) -> Tensor:
    inputs = _inputs(prediction, target, valid, activation, form, entropy)
    four = to_sums[:, :4].to(torch.float32).contiguous()
    return logits_gradient(inputs, four, torch.ones((), device=four.device), like=prediction)


def _inputs(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: Any, form: Any, entropy: bool
) -> Any:
    # operators of torch.library have no optional strings: an empty one is no form
    return flat_inputs(prediction, target, valid, activation=activation, form=form or None, entropy=entropy)


_sums_operator = torch.library.custom_op("semidice::overlap_sums", _sums, mutates_args=())
_gradient_operator = torch.library.custom_op("semidice::overlap_gradient", _gradient, mutates_args=())


@_sums_operator.register_fake
def _(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: str, form: str, entropy: bool
) -> Tensor:
    return prediction.new_empty((prediction.shape[0], 5, prediction.shape[1]), dtype=torch.float32)


@_gradient_operator.register_fake
def _(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    to_sums: Tensor,
    activation: str,
    form: str,
    entropy: bool,
) -> Tensor:
    return torch.empty_like(prediction)
