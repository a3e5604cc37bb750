"""E[y | f] by a kernel density estimate on the probability simplex, which is one attention over key points.

    E[y | f_j] = Σ_i k_ji w_i y_i / Σ_i k_ji w_i        over key points i (paper, appendix E)
    log k_ji   = Σ_c α_ic log f_jc - Σ_c lgamma(α_ic + 1) + lgamma(1/h + C),        α_i = f_i / h

k is the density at f_j of the Dirichlet distribution around key i (for two classes a Beta), h the bandwidth:
a softmax over keys of a product plus a bias per key, times their labels.
Probabilities are clamped to 1e-7 or more. Those of a key are then scaled to sum to one; the scale of a query
cancels.

Scores reach 16/h, too much for float32: its errors are 4e-4 (2 classes) to 1e-2 (64) at h = 2e-4. So scores
are float64 here, in chunks. On a GPU `kernels.kde` computes the same in one pass.
Left out: checks of inputs (`recalibration`).
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arrays import values_are_readable
from ..kernels import fused_applies

Method = Literal["auto", "reference", "attention", "triton"]

MIN_PROB = 1e-7
# the score of a key that does not count; finite, so that a row without any key has no NaN
_ABSENT = -1e30
# elements of one chunk of the (points, keys) matrix: on a CPU 2 MB of float64, which fit in the cache
_CPU_CHUNK, _GPU_CHUNK = 2**18, 2**22
# limits of the Triton kernel, within which its error is below 1e-4, and the classes up to which it is fastest
_MAX_TRITON_CLASSES, _MIN_TRITON_BANDWIDTH = 256, 1e-6
_MAX_AUTO_CLASSES = 64


def kernel_mean(
    points: Float[Tensor, "B C n"],
    key_prob: Float[Tensor, "B2 K C"],
    label: Tensor,
    *,
    bandwidth: float,
    weight: Tensor | None,
    leave_one_out: bool = False,
    region: Tensor | None = None,
    method: Method = "auto",
) -> Float[Tensor, "B C n"]:
    """E[y | f] of B sets of points, each with its own keys or all with the same (B2 = 1).

    Inputs are not checked. weight (B2, K) is bool, or 0 or more. The result is the point itself where no key
    counts, and outside region (B, n), bool. Outside the region "triton", and on a CPU every method, computes
    nothing. At least float32. `recalibration.kde_recalibrate` explains method and leave_one_out.

    >>> points, keys = torch.tensor([[[0.2], [0.8]]]), torch.tensor([[[0.1, 0.9], [0.3, 0.7]]])
    >>> kernel_mean(points, keys, torch.eye(2).unsqueeze(0), bandwidth=0.05, weight=None).squeeze()
    tensor([0.5565, 0.4435])
    """
    method = _chosen_method(method, points, key_prob, label, bandwidth, leave_one_out)
    if method == "triton":
        from ..kernels.kde import kernel_mean_triton

        return kernel_mean_triton(
            points, key_prob, label,
            bandwidth=bandwidth, weight=weight, smallest_prob=MIN_PROB, region=region,
        )  # fmt: skip
    precision = torch.promote_types(points.dtype, torch.float32)
    if region is not None and values_are_readable(region) and not leave_one_out:
        return _mean_in_region(
            points.to(precision), key_prob, label, region, bandwidth=bandwidth, weight=weight, method=method
        )
    # autocast would round the scores to bfloat16
    with torch.autocast(points.device.type, enabled=False):
        alpha, bias = key_terms(key_prob, bandwidth, weight)
        if method == "reference":
            mean: Tensor = _KernelMean.apply(points, alpha, bias, label.double(), leave_one_out)
        else:
            # the weights sum to 1 within a few units of the last digit; a loss refuses more than 1
            mean = _fused_attention(points.to(precision), alpha, bias, label).clamp(max=1.0)
    if region is not None:
        mean = torch.where(region.unsqueeze(1), mean, points.to(precision))
    if weight is None and not leave_one_out:
        return mean
    real = torch.ones_like(bias, dtype=torch.bool) if weight is None else weight > 0
    others = real.sum(-1, keepdim=True) - real.long() if leave_one_out else real.sum(-1, keepdim=True)
    return torch.where(others.unsqueeze(1) > 0, mean, points.to(precision))


def _chosen_method(
    method: Method, points: Tensor, key_prob: Tensor, label: Tensor, bandwidth: float, leave_one_out: bool
) -> Method:
    """The method that computes; "auto" takes the fastest one that is exact enough."""
    num_classes = points.shape[1]
    wants_gradient = torch.is_grad_enabled() and (points.requires_grad or key_prob.requires_grad)
    is_float32 = torch.promote_types(points.dtype, torch.float32) == torch.float32
    plain = is_float32 and not (wants_gradient or leave_one_out)
    suits_triton = plain and bandwidth >= _MIN_TRITON_BANDWIDTH and num_classes <= _MAX_TRITON_CLASSES
    if method == "auto":
        if suits_triton and num_classes <= _MAX_AUTO_CLASSES and _has_kernel(points, label):
            return "triton"
        return "attention" if plain and bandwidth >= 0.005 * math.sqrt(num_classes) else "reference"
    if method == "triton" and not suits_triton:
        raise ValueError(
            "method 'triton' is for float32 or less, without a gradient or a point left out, up to "
            f"{_MAX_TRITON_CLASSES} classes, bandwidth {_MIN_TRITON_BANDWIDTH} or more: use 'auto'"
        )
    if method == "attention" and leave_one_out:
        raise ValueError("method 'attention' cannot leave a point out: use 'reference' or 'auto'")
    return method


def _mean_in_region(
    points: Tensor, key_prob: Tensor, label: Tensor, region: Tensor, *, weight: Tensor | None, **options: Any
) -> Tensor:
    """`kernel_mean` of the points in the region; the other points are not changed."""
    mean = points.transpose(1, 2).clone()
    # images with shared keys are one set of points
    shared = len(key_prob) == 1
    for image in [slice(None)] if shared else [slice(i, i + 1) for i in range(len(points))]:
        keys = slice(None) if shared else image
        inside = points[image].transpose(1, 2)[region[image]]
        if len(inside) > 0:
            own_weight = None if weight is None else weight[keys]
            part = kernel_mean(
                inside.t().unsqueeze(0), key_prob[keys], label[keys], weight=own_weight, **options
            )
            mean[image][region[image]] = part.squeeze(0).t()
    return mean.transpose(1, 2).contiguous()


def _has_kernel(points: Tensor, label: Tensor) -> bool:
    """Whether the Triton kernel can run here; the compiler cannot look into its launches."""
    return not torch.compiler.is_compiling() and fused_applies(points, label)


def key_terms(key_prob: Tensor, bandwidth: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The terms of a score of each key, float64: α (B, K, C), and bias log weight - Σ_c lgamma(α_c + 1)."""
    prob = key_prob.double().clamp(min=MIN_PROB)
    alpha = prob / prob.sum(-1, keepdim=True) / bandwidth
    bias = -torch.lgamma(alpha + 1).sum(-1)
    if weight is not None:
        bias = torch.where(weight > 0, bias + weight.double().clamp(min=1e-300).log(), _ABSENT)
    return alpha, bias


def score_chunks(
    points: Tensor, alpha: Tensor, bias: Tensor, *, leave_one_out: bool
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """For each slice of points: its set, its position, log f (C, m), and log k (m, K) up to a constant.

    All log k use the same buffer: allocating memory for each slice costs more than the computation.
    """
    _, num_classes, num_points = points.shape
    num_keys = alpha.shape[1]
    elements = _CPU_CHUNK if points.device.type == "cpu" else _GPU_CHUNK
    size = min(num_points, max(1, elements // max(num_keys, num_classes)))
    buffer = alpha.new_empty(size, num_keys)
    for image, start in product(range(len(points)), range(0, num_points, size)):
        where = slice(start, min(start + size, num_points))
        key = image if len(alpha) > 1 else 0
        log_prob = points[image, :, where].double().clamp(min=MIN_PROB).log_()
        scores = torch.addmm(bias[key], log_prob.t(), alpha[key].t(), out=buffer[: where.stop - start])
        if leave_one_out:
            scores.diagonal(start).fill_(_ABSENT)
        yield image, where, log_prob, scores


class _KernelMean(torch.autograd.Function):
    """Softmax of the scores over keys, times the labels: (B, C, n), in chunks.

    The backward pass computes the chunks again; autograd would store the (points, keys) matrix.
    """

    @staticmethod
    def forward(points: Tensor, alpha: Tensor, bias: Tensor, label: Tensor, leave_one_out: bool) -> Tensor:
        mean = torch.empty_like(points, dtype=torch.promote_types(points.dtype, torch.float32))
        buffer = alpha.new_empty(0)
        for image, where, _, scores in score_chunks(points, alpha, bias, leave_one_out=leave_one_out):
            weight = torch.softmax(scores, dim=-1, out=buffer.resize_(scores.shape))
            mean[image, :, where] = label[image if len(label) > 1 else 0].t() @ weight.t()
        return mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.leave_one_out = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        points, alpha, bias, label = ctx.saved_tensors
        grad_points, grad_bias = torch.zeros_like(points), torch.zeros_like(bias)
        # classes first: sums over points are then several times faster
        grad_alpha, grad_label = (
            torch.zeros_like(tensor.transpose(1, 2)).contiguous() for tensor in (alpha, label)
        )
        first, second = alpha.new_empty(0), alpha.new_empty(0)
        for image, where, log_prob, scores in score_chunks(
            points, alpha, bias, leave_one_out=ctx.leave_one_out
        ):
            key = image if len(alpha) > 1 else 0
            weight = torch.softmax(scores, dim=-1, out=first.resize_(scores.shape))
            incoming = gradient[image, :, where].double()
            grad_score = torch.mm(incoming.t(), label[key].t(), out=second.resize_(scores.shape))
            # through the softmax: weight times (incoming gradient - its mean under the weights)
            grad_score.sub_((incoming * (label[key].t() @ weight.t())).sum(0).unsqueeze(1)).mul_(weight)
            # a clamped probability has gradient 0
            grad_log = alpha[key].t() @ grad_score.t()
            clamped = points[image, :, where] < MIN_PROB
            grad_points[image, :, where] = torch.where(clamped, 0, grad_log * (-log_prob).exp())
            if ctx.needs_input_grad[1]:
                grad_bias[key] += grad_score.sum(0)
                grad_alpha[key].addmm_(log_prob, grad_score)
            if ctx.needs_input_grad[3]:
                grad_label[key].addmm_(incoming, weight)
        return grad_points, grad_alpha.transpose(1, 2), grad_bias, grad_label.transpose(1, 2), None


def _fused_attention(points: Tensor, alpha: Tensor, bias: Tensor, label: Tensor) -> Tensor:
    """The estimate by scaled_dot_product_attention in the dtype of the points; the bias is a channel."""
    batch, num_classes, _ = points.shape
    # the memory-efficient GPU kernel needs a multiple of four channels; otherwise the full matrix is stored
    padding = -(num_classes + 1) % 4
    log_prob = F.pad(points.clamp(min=MIN_PROB).log(), (0, 0, 0, 1), value=1.0)
    query = F.pad(log_prob, (0, 0, 0, padding)).transpose(1, 2).contiguous()
    # a common shift of the biases cancels; subtracted in float64, only differences are rounded to float32
    centred = bias - bias.detach().amax(-1, keepdim=True)
    key = F.pad(torch.cat([alpha, centred.unsqueeze(-1)], dim=-1), (0, padding)).to(points.dtype)
    value = F.pad(label.to(points.dtype), (0, padding + 1))
    key, value = (tensor.expand(batch, -1, -1).unsqueeze(1) for tensor in (key, value))
    mean = F.scaled_dot_product_attention(query.unsqueeze(1), key, value, scale=1.0)
    return mean[:, 0, :, :num_classes].transpose(1, 2).contiguous()
