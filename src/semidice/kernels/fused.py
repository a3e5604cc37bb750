"""The Triton kernels as functions with a gradient: the sums of a batch, and the whole mixture of losses.

Eagerly the kernels are launched directly. In a compiled graph they are operators of `torch.library`,
`semidice::overlap_sums` and `semidice::overlap_gradient`, which the compiler leaves alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arrays import Activation
from ..overlap.forms import Form
from ..overlap.stats import OverlapStats
from ..overlap.sums import SegmentationSums, reference_gradient
from .plans import MixtureOptions, MixturePlan, flat_inputs, logits_gradient, total_sums


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


class _Tensors(NamedTuple):
    prediction: Tensor
    target: Tensor
    valid: Tensor | None


class _Mixture(NamedTuple):
    """What is known of tensors of one kind: their plan, and how they are copied where they must be."""

    plan: MixturePlan
    copied: _Options | None


# by shapes, strides, types and devices of the tensors, and all options but the numbers
_mixtures: dict[tuple[Any, ...], _Mixture] = {}
_MAX_MIXTURES = 256


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
    validate_once: Callable[[], bool] | None = None,
) -> tuple[Tensor, ...] | None:
    """Total, and with `parts` cross entropy and region loss, in few launches, its gradient included.

    The total alone has a gradient. Not to ask for the parts saves the time of two views. `validate_once` is
    called when tensors of such shapes, types and places come for the first time, and no more if it says that
    the kernels can take them; if not, the answer is None.
    """
    key = (
        prediction.shape,
        prediction.stride(),
        prediction.dtype,
        prediction.device,
        target.shape,
        target.stride(),
        target.dtype,
        target.device,
        None if valid is None else (valid.shape, valid.stride(), valid.dtype, valid.device),
        activation,
        form,
        entropy,
        class_weight is None,
        parts,
        options.gamma != 1,
        options.log,
        options.over,
        options.classes,
        options.background,
    )
    mixture = _mixtures.get(key)
    if mixture is None:
        if validate_once is not None and not validate_once():
            return None
        which = _Options(activation, form, entropy)
        inputs = flat_inputs(prediction, target, valid, **which._asdict())
        kept = inputs.logits is prediction and inputs.target is target and inputs.valid is valid
        has_weight = class_weight is not None
        plan = MixturePlan(inputs.layout, prediction, options, has_weight=has_weight, parts=parts)
        if len(_mixtures) >= _MAX_MIXTURES:
            _mixtures.clear()
        mixture = _mixtures[key] = _Mixture(plan, None if kept else which)
    total, (terms,) = _FusedMixture.apply(prediction, target, valid, class_weight, mixture, options)
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
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor, None, None, None]:
        prediction, target, valid = ctx.saved_tensors
        options = ctx.options
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = reference_gradient(
                prediction, target, grad_sums.unbind(1), valid=valid, **options._asdict()
            )
            return again, None, None, None
        gradient = torch.ops.semidice.overlap_gradient if torch.compiler.is_compiling() else _gradient
        result = gradient(
            prediction, target, valid, grad_sums, options.activation, options.form or "", options.entropy
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
        mixture: _Mixture,
        options: MixtureOptions,
    ) -> tuple[Tensor, tuple[Tensor | None]]:
        plan, copied = mixture
        tensors = _Tensors(prediction, target, valid)
        given = tensors if copied is None else _copies(tensors, copied)
        total, terms, kept = plan.losses(*given, class_weight, options)
        ctx.save_for_backward(*tensors, *kept)
        ctx.mixture = mixture
        # in a tuple of their own autograd leaves them alone: else it makes zeros for their gradient
        return total, (terms,)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # with gradients off there is nothing to refuse, and `once_differentiable` takes a few microseconds
        return (_once_gradient if torch.is_grad_enabled() else _mixture_gradient)(ctx, grad_total)


def _copies(tensors: _Tensors, which: _Options) -> _Tensors:
    """As the kernels take them; made again for the gradient rather than kept."""
    return _Tensors(*flat_inputs(*tensors, **which._asdict())[:3])


def _mixture_gradient(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
    prediction, target, valid, *kept = ctx.saved_tensors
    plan, copied = ctx.mixture
    tensors = _Tensors(prediction, target, valid)
    given = tensors if copied is None else _copies(tensors, copied)
    gradient = plan.gradient(*given, kept, grad_total, prediction)
    return gradient, None, None, None, None, None


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
    grad_sums: Tensor,
    activation: str,
    form: str,
    entropy: bool,
) -> Tensor:
    inputs = _inputs(prediction, target, valid, activation, form, entropy)
    four = grad_sums[:, :4].to(torch.float32).contiguous()
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
    grad_sums: Tensor,
    activation: str,
    form: str,
    entropy: bool,
) -> Tensor:
    return torch.empty_like(prediction)
