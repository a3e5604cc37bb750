"""Soft true positives, false positives and false negatives of a prediction, and the Tversky index of them.

    index = (tp + s) / (tp + alpha fp + beta fn + s)        Dice: alpha = beta = 1/2; Jaccard: 1

with tp, fp and fn summed over the valid voxels of one image and class, in one of the four forms of `forms`.
Because ties have derivative 0, the gradient of the index at prob = target is exactly 0 for `min` and
`product`, for every alpha and beta. Left out: the losses made of the index (`mixture`), and thresholds.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_choice, check_non_negative, check_prediction, check_target, one_hot
from .forms import Form, form_gradient, form_sums


class OverlapStats(NamedTuple):
    """Soft counts of voxels, one number per image and class (N, C)."""

    tp: Float[Tensor, "N C"]
    fp: Float[Tensor, "N C"]
    fn: Float[Tensor, "N C"]


def overlap_stats(
    prob: Tensor,
    target: Tensor,
    *,
    form: Form = "min",
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> OverlapStats:
    """Soft tp, fp and fn per image and class, each (N, C), differentiable in `prob` and in a soft `target`.

    prob is (N, C, *space) in [0, 1]; target, valid and ignore_index follow the contract in `arrays`.
    Sums are float32 for inputs of lower precision; float64 stays float64. An image without a valid voxel
    has zeros. See `forms` for the definitions and the convention at ties (paper, eqs. 1-6).

    >>> stats = overlap_stats(torch.tensor([[0.2, 0.8]]), torch.tensor([[0.5, 0.5]]))
    >>> [round(float(s[0, 1]), 2) for s in stats]
    [0.5, 0.3, 0.0]
    """
    check_choice("form", form, Form)
    check_prediction(prob)
    target, valid = check_target(prob, target, valid=valid, ignore_index=ignore_index)
    return unchecked_overlap_stats(prob, target, form=form, valid=valid)


def unchecked_overlap_stats(
    prob: Float[Tensor, "N C *space"], target: Tensor, *, form: Form, valid: Tensor | None
) -> OverlapStats:
    """`overlap_stats` of checked inputs; ignored voxels must be in `valid` already."""
    # float32 before the sum: a bfloat16 total keeps 8 bits, so 100 000 voxels become 99 840
    prob = prob.to(torch.promote_types(prob.dtype, torch.float32))
    soft = target.to(prob.dtype) if target.is_floating_point() else one_hot(target, prob.shape[1])
    if valid is not None:
        # torch.where and not a product: an ignored voxel may hold NaN, and NaN * 0 is NaN
        prob = torch.where(valid.unsqueeze(1), prob, 0)
        soft = torch.where(valid.unsqueeze(1), soft, 0)
    if prob.ndim == 2:
        prob, soft = prob.unsqueeze(-1), soft.unsqueeze(-1)
    return OverlapStats(*_OverlapSums.apply(prob, soft, form))


def tversky_index(
    stats: OverlapStats, *, alpha: float, beta: float, smooth: float = 0.0
) -> Float[Tensor, "N C"]:
    """Tversky index of each entry of `stats`, in [0, 1]; 1 is perfect overlap. (`squared`: if alpha = beta.)

    alpha weighs false positives and beta false negatives. If prediction and target are both empty and
    smooth = 0, the denominator is 0; then the index is 1 and its gradient 0.

    >>> stats = overlap_stats(torch.tensor([[0.2, 0.8]]), torch.tensor([[0.5, 0.5]]))
    >>> round(float(tversky_index(stats, alpha=0.5, beta=0.5)[0, 1]), 4)
    0.7692
    """
    if not isinstance(stats, OverlapStats):
        raise ValueError(f"stats must come from overlap_stats; got {type(stats).__name__}")
    check_non_negative(alpha=alpha, beta=beta, smooth=smooth)
    return 1 - tversky_error(stats, alpha=alpha, beta=beta, smooth=smooth)


def tversky_error(
    stats: OverlapStats, *, alpha: float, beta: float, smooth: float = 0.0
) -> Float[Tensor, "N C"]:
    """1 - index, as (alpha fp + beta fn) / (tp + alpha fp + beta fn + s).

    This formula keeps its digits near 0, and at fp = fn = 0 its derivative in tp is exactly 0.
    """
    errors = alpha * stats.fp + beta * stats.fn
    denominator = stats.tp + errors + smooth
    # a denominator of 1 in place of 0: 0/0 would become NaN in the backward pass
    return errors / torch.where(denominator > 0, denominator, 1)


def sum_over_images(stats: OverlapStats, *, sync: bool = False) -> OverlapStats:
    """Statistics of the whole batch, (1, C); with `sync`, of the batches of all processes."""
    summed = torch.stack([part.sum(0, keepdim=True) for part in stats])
    if sync:
        summed = sum_across_processes(summed)
    return OverlapStats(*summed.unbind(0))


def sum_across_processes(tensor: Tensor) -> Tensor:
    """Differentiable sum of `tensor` over the default process group; without a group, `tensor` itself.

    The backward pass sums the incoming gradients of all processes. After DistributedDataParallel has averaged
    them, the gradient of a parameter equals that of a single process with the whole batch.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    total: Tensor = _AllReduceSum.apply(tensor)
    return total


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return sum_across_processes(gradient)


class _OverlapSums(torch.autograd.Function):
    """The three sums of a form, (N, C) each, from prob and target (N, C, *space).

    A Function rather than plain autograd: it defines the derivative at ties, and it saves only its inputs
    for the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        return form_sums(x, y, form)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, y, ctx.form = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y = ctx.saved_tensors
        grad_tp, grad_fp, grad_fn = (g.view(*g.shape, *[1] * (x.ndim - 2)) for g in gradients)
        grad_x = form_gradient(x, y, ctx.form, grad_tp, grad_fp, grad_fn) if ctx.needs_input_grad[0] else None
        grad_y = form_gradient(y, x, ctx.form, grad_tp, grad_fn, grad_fp) if ctx.needs_input_grad[1] else None
        return grad_x, grad_y, None
