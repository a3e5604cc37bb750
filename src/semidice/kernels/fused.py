"""The Triton kernels as functions with a gradient: the sums of a batch, and the mixture of losses.

A plan says what to launch for tensors of one kind. It is made once per kind and kept in `_plans`, the only
cache. Eager code launches the kernels directly. In a compiled graph the sums are operators of
`torch.library`, `semidice::overlap_sums` and `semidice::overlap_gradient`, which the compiler calls as they
are. A gradient of the gradient goes through the definition.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import class_weights
from ..overlap.mixture import Losses, check_batch, losses_of
from ..overlap.options import MixtureOptions, SumsOptions
from ..overlap.sums import SegmentationSums, reference_gradient, reference_sums, requested_sums
from .layout import flat_inputs, flat_tensors
from .plans import MixturePlan, SumsPlan


class _Planned(NamedTuple):
    """A plan, and whether tensors of its kind must be copied because their voxels have no single stride."""

    plan: Any
    copies: bool


# by shapes, strides, types and devices of the tensors, and by all options that kernels are compiled for
_plans: dict[tuple[Any, ...], _Planned] = {}
MAX_PLANS = 256


def _kind(prediction: Tensor, target: Tensor, valid: Tensor | None) -> tuple[Any, ...]:
    return (
        prediction.shape,
        prediction.stride(),
        prediction.dtype,
        prediction.device,
        target.shape,
        target.stride(),
        target.dtype,
        target.device,
        None if valid is None else (valid.shape, valid.stride(), valid.dtype, valid.device),
    )


def _remember(key: tuple[Any, ...], planned: _Planned) -> _Planned:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = planned
    return planned


def fused_mixture(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    options: MixtureOptions,
    class_weight: Tensor | None,
    *,
    parts: bool,
) -> Losses:
    """The losses and their gradient in a few launches. Only the total has a gradient.

    Shapes and types are checked when tensors of a kind come for the first time.
    """
    activation, region, cross_entropy_weight, region_weight = options
    key = (
        _kind(prediction, target, valid),
        activation,
        region.choices,
        cross_entropy_weight > 0,
        region_weight > 0,
        class_weight is None,
        parts,
    )
    planned = _plans.get(key)
    if planned is None:
        usual_target = check_batch(prediction, target, valid, options)
        if usual_target is not target:
            return fused_mixture(prediction, usual_target, valid, options, class_weight, parts=parts)
        inputs = flat_inputs(prediction, target, valid, options.sums)
        plan = MixturePlan(inputs.layout, prediction, region, parts=parts)
        planned = _remember(key, _Planned(plan, inputs.copied))
    total, (terms,) = _FusedMixture.apply(prediction, target, valid, class_weight, planned, options)
    return Losses(total, () if terms is None else terms.unbind())


class _FusedMixture(torch.autograd.Function):
    """The total, and the two terms or None. The terms are for a log and have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        prediction: Tensor,
        target: Tensor,
        valid: Tensor | None,
        class_weight: Tensor | None,
        planned: _Planned,
        options: MixtureOptions,
    ) -> tuple[Tensor, tuple[Tensor | None]]:
        plan, copies = planned
        tensors = flat_tensors(prediction, target, valid) if copies else (prediction, target, valid)
        _, region, entropy_weight, region_weight = options
        floats = (region.alpha, region.beta, region.gamma, region.smooth, entropy_weight, region_weight)
        total, terms, kept = plan.losses(*tensors, class_weight, floats)
        # copies are made again in the backward pass: they would take memory until then
        ctx.save_for_backward(prediction, target, valid, class_weight, *kept)
        ctx.planned, ctx.options = planned, options
        # autograd makes zeros for the gradient of each output, but does not look into a tuple
        return total, (terms,)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: None) -> tuple[Tensor | None, ...]:
        prediction, target, valid, class_weight, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradient = _differentiable_gradient(
                prediction, target, valid, class_weight, ctx.options, grad_total
            )
            return gradient, None, None, None, None, None
        plan, copies = ctx.planned
        tensors = flat_tensors(prediction, target, valid) if copies else (prediction, target, valid)
        return plan.gradient(*tensors, kept, grad_total, prediction), None, None, None, None, None


def _differentiable_gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    class_weight: Tensor | None,
    options: MixtureOptions,
    grad_total: Tensor,
) -> Tensor:
    """The gradient of the mixture by the definition, for `create_graph=True`."""
    sums = reference_sums(prediction, target, valid, options.sums)
    total = losses_of(sums, class_weights(class_weight, prediction), options, parts=False).total
    (gradient,) = torch.autograd.grad(total, prediction, grad_total, create_graph=True)
    return gradient


def fused_sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
) -> SegmentationSums:
    """See `reference_sums`; differentiable in the prediction, not in the target."""
    return requested_sums(_FusedSums.apply(prediction, target, valid, options).unbind(1), options)


class _FusedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, 5, C); the values that were not asked for are undefined."""

    @staticmethod
    def forward(
        ctx: Any, prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
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
            gradient = reference_gradient(prediction, target, valid, options, grad_sums.unbind(1))
            return gradient, None, None, None
        gradient_of = torch.ops.semidice.overlap_gradient if torch.compiler.is_compiling() else _gradient
        gradient = gradient_of(
            prediction, target, valid, grad_sums, options.activation, options.form or "", options.entropy
        )
        return gradient, None, None, None


# Operators of torch.library have no optional strings: an empty one stands for no form.
def _sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: str, form: str, entropy: bool
) -> Tensor:
    plan, copies = _sums_plan(prediction, target, valid, activation, form, entropy)
    tensors = flat_tensors(prediction, target, valid) if copies else (prediction, target, valid)
    sums: Tensor = plan.sums(*tensors)
    return sums


def _gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    grad_sums: Tensor,
    activation: str,
    form: str,
    entropy: bool,
) -> Tensor:
    plan, copies = _sums_plan(prediction, target, valid, activation, form, entropy)
    tensors = flat_tensors(prediction, target, valid) if copies else (prediction, target, valid)
    # the fifth sum, the mass, does not depend on the prediction
    grad_sums = grad_sums[:, :4].to(torch.float32).contiguous()
    gradient: Tensor = plan.gradient(*tensors, grad_sums, prediction)
    return gradient


def _sums_plan(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: Any, form: Any, entropy: bool
) -> _Planned:
    key = (_kind(prediction, target, valid), activation, form, entropy)
    planned = _plans.get(key)
    if planned is None:
        inputs = flat_inputs(prediction, target, valid, SumsOptions(activation, form or None, entropy))
        planned = _remember(key, _Planned(SumsPlan(inputs.layout, prediction), inputs.copied))
    return planned


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
