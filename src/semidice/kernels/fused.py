"""The Triton kernels as functions with a gradient: the sums of a batch, and the mixture of losses.

A plan says what to launch for tensors of one kind. It is made once per kind and kept in `_plans`, the only
cache. Eager code launches the kernels directly. In a compiled graph the sums are operators of
`torch.library`, `semidice::overlap_sums` and `semidice::overlap_gradient`, which the compiler calls as they
are. A gradient of the gradient goes through the definition.
"""

from typing import Any

import torch
from torch import Tensor

from ..arrays import Activation, class_weights
from ..losses.options import LossOptions
from ..overlap import (
    SumsOptions,
    VoxelSums,
    reference_gradient,
    reference_sums,
    sums_options,
    terms_of,
    total_of,
)
from .mixture import LossSpec
from .plans import (
    NUM_SUMS,
    Batch,
    Plan,
    flat_tensors,
    launch_gradient,
    launch_loss,
    launch_sums,
    launch_totals,
    loss_spec,
    plan_of,
)

# by shapes, strides, types and devices of the tensors, and by all options that kernels are compiled for
_plans: dict[tuple[Any, ...], tuple[Plan, LossSpec | None]] = {}
MAX_PLANS = 256


def _kind(prediction: Tensor, target: Tensor, valid: Tensor | None) -> tuple[Any, ...]:
    tensors = (prediction, target) if valid is None else (prediction, target, valid)
    return tuple((each.shape, each.stride(), each.dtype, each.device) for each in tensors)


def _remember(key: tuple[Any, ...], plan: Plan, spec: LossSpec | None) -> tuple[Plan, LossSpec | None]:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = (plan, spec)
    return plan, spec


def _batch(plan: Plan, prediction: Tensor, target: Tensor, valid: Tensor | None) -> Batch:
    return flat_tensors(prediction, target, valid) if plan.copies else (prediction, target, valid)


def fused_total(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
) -> Tensor:
    """The weighted sum of the losses and its gradient, in a few launches."""
    return _fused(prediction, target, valid, class_weight, options, activation, parts=False)


def fused_terms(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
) -> dict[str, Tensor]:
    """The losses by name, without their weights, and the gradient of each."""
    terms = _fused(prediction, target, valid, class_weight, options, activation, parts=True)
    weights = {"cross_entropy": options.cross_entropy_weight, "region": options.region_weight}
    return {name: term for (name, weight), term in zip(weights.items(), terms, strict=True) if weight > 0}


def _fused(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
    *,
    parts: bool,
) -> Tensor:
    weights = (options.cross_entropy_weight > 0, options.region_weight > 0)
    choices = (options.form, options.gamma != 1, options.log, options.over, options.classes)
    key = (_kind(prediction, target, valid), activation, *choices, options.background, weights)
    planned = _plans.get(key)
    if planned is None:
        plan = plan_of(prediction, target, valid, sums_options(options, activation))
        planned = _remember(key, plan, loss_spec(plan, options))
    result: Tensor = _FusedMixture.apply(
        prediction, target, valid, class_weight, planned, options, activation, parts
    )
    return result


class _FusedMixture(torch.autograd.Function):
    """The total, (); or, if `parts`, cross entropy and region loss without their weights, (2,)."""

    @staticmethod
    def forward(
        ctx: Any,
        prediction: Tensor,
        target: Tensor,
        valid: Tensor | None,
        class_weight: Tensor | None,
        planned: tuple[Plan, LossSpec],
        options: LossOptions,
        activation: Activation,
        parts: bool,
    ) -> Tensor:
        plan, spec = planned
        weights = (1.0, 1.0) if parts else (options.cross_entropy_weight, options.region_weight)
        floats = (options.alpha, options.beta, options.gamma, options.smooth, *weights)
        batch = _batch(plan, prediction, target, valid)
        # Triton launches on the current device, which need not be that of the tensors
        with torch.cuda.device_of(prediction):
            total, terms, workspace = launch_loss(plan, spec, batch, class_weight, floats, parts=parts)
        # copies are made again in the backward pass: they would take memory until then
        ctx.save_for_backward(prediction, target, valid, class_weight, workspace)
        ctx.plan, ctx.options, ctx.activation, ctx.parts = plan, options, activation, parts
        return total if terms is None else terms

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        prediction, target, valid, class_weight, workspace = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = prediction, target, valid, class_weight
            gradient = _differentiable_gradient(*inputs, ctx.options, ctx.activation, grad)
            return gradient, *7 * [None]
        if ctx.parts:
            # the workspace begins with the derivatives in tp, fp, fn, and in the entropy
            num_images, num_classes = prediction.shape[:2]
            of_sums = workspace[: 4 * num_images * num_classes].view(num_images, 4, num_classes)
            workspace = of_sums * torch.cat([grad[1:].expand(3), grad[:1]]).view(1, 4, 1)
            grad = torch.ones((), device=grad.device)
        batch = _batch(ctx.plan, prediction, target, valid)
        with torch.cuda.device_of(prediction):
            gradient = launch_gradient(ctx.plan, batch, workspace, grad, prediction)
        return gradient, *7 * [None]


def _differentiable_gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
    grad: Tensor,
) -> Tensor:
    """The gradient of the mixture, or of its terms, by the definition, for `create_graph=True`."""
    sums = reference_sums(prediction, target, valid, sums_options(options, activation))
    terms = terms_of(sums, class_weights(class_weight, prediction), options)
    if grad.ndim == 0:
        losses, grads = [total_of(terms, options)], [grad]
    else:
        of_terms = dict(zip(("cross_entropy", "region"), grad, strict=True))
        losses, grads = list(terms.values()), [of_terms[name] for name in terms]
    (gradient,) = torch.autograd.grad(losses, prediction, grads, create_graph=True)
    return gradient


def fused_sums(prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions) -> VoxelSums:
    """See `reference_sums`; differentiable in the prediction, not in the target."""
    return VoxelSums(*_FusedSums.apply(prediction, target, valid, options).unbind(1))


class _FusedSums(torch.autograd.Function):
    """tp, fp, fn, entropy and mass, (N, 5, C); what was not asked for is undefined."""

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
    plan = _sums_plan(prediction, target, valid, activation, form, entropy)
    num_images, num_classes, _ = plan.shape
    batch = _batch(plan, prediction, target, valid)
    shape = (num_images, plan.num_programs, NUM_SUMS, num_classes)
    partials = prediction.new_empty(shape, dtype=torch.float32)
    with torch.cuda.device_of(prediction):
        launch_sums(plan, batch, partials, 0)
        if plan.num_programs == 1:
            return partials[:, 0]
        totals = prediction.new_empty((num_images, NUM_SUMS, num_classes), dtype=torch.float32)
        launch_totals(plan, partials, totals, 0)
    return totals


def _gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    grad_sums: Tensor,
    activation: str,
    form: str,
    entropy: bool,
) -> Tensor:
    plan = _sums_plan(prediction, target, valid, activation, form, entropy)
    batch = _batch(plan, prediction, target, valid)
    # the fifth sum, the mass, does not depend on the prediction
    grad_sums = grad_sums[:, :4].to(torch.float32).contiguous()
    scale = torch.ones((), device=prediction.device)
    with torch.cuda.device_of(prediction):
        return launch_gradient(plan, batch, grad_sums, scale, prediction)


def _sums_plan(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: Any, form: Any, entropy: bool
) -> Plan:
    key = (_kind(prediction, target, valid), activation, form, entropy)
    planned = _plans.get(key)
    if planned is None:
        options = SumsOptions(activation, form or None, entropy)
        planned = _remember(key, plan_of(prediction, target, valid, options), None)
    return planned[0]


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
