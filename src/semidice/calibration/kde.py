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

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..arrays import values_are_readable
from ..kernels import fused_applies

MIN_PROB = 1e-7
# the score of a key that does not count; finite, so that a row without any key has no NaN
_ABSENT = -1e30
# elements of one chunk of the (points, keys) matrix: on a CPU 2 MB of float64, which fit in the cache
_CPU_CHUNK, _GPU_CHUNK = 2**18, 2**22
# limits of the Triton kernel, within which its error is below 1e-4
_MAX_KERNEL_CLASSES, _MIN_KERNEL_BANDWIDTH = 256, 1e-6


class Keys(NamedTuple):
    """Key points: one set for a whole batch (B = 1), or one for each of its N images (B = N).

    A key of weight 0 does not count, whatever its values are. Weights may be bool; None: all count the same.
    """

    prob: Float[Tensor, "B K C"]
    """What the network predicted."""
    label: Float[Tensor, "B K C"]
    """What was there: hard or soft."""
    weight: Tensor | None = None
    """(B, K): the number of voxels that a key stands for, 0 or more."""

    def unweighted(self) -> "Keys":
        """The same keys, which all count the same; one of weight 0 still does not count."""
        return self if self.weight is None else self._replace(weight=self.weight > 0)


def kernel_mean(
    points: Float[Tensor, "N C n"],
    keys: Keys,
    *,
    bandwidth: float,
    region: Tensor | None = None,
    leave_one_out: bool = False,
) -> Float[Tensor, "N C n"]:
    """E[y | f] of N sets of points, each with its own keys or all with the same; inputs are not checked.

    The result is the point itself where no key counts, and outside region (N, n), bool, where nothing is
    computed if values can be read. At least float32. leave_one_out: point j is key j, and does not count for
    itself. Memory, forward and backward, is bounded by a chunk of the (points, keys) matrix.

    >>> points, keys = torch.tensor([[[0.2], [0.8]]]), torch.tensor([[[0.1, 0.9], [0.3, 0.7]]])
    >>> kernel_mean(points, Keys(keys, torch.eye(2).unsqueeze(0)), bandwidth=0.05).squeeze()
    tensor([0.5565, 0.4435])
    """
    if not leave_one_out and _kernel_applies(points, keys, bandwidth):
        from ..kernels.kde import kernel_mean_triton

        return kernel_mean_triton(
            points, keys.prob, keys.label,
            bandwidth=bandwidth, weight=keys.weight, smallest_prob=MIN_PROB, region=region,
        )  # fmt: skip
    # autocast would round the scores to bfloat16
    with torch.autocast(points.device.type, enabled=False):
        # images with shared keys are one set of points
        rows = points.to(torch.promote_types(points.dtype, torch.float32)).transpose(1, 2)
        sets = rows.reshape(len(keys.prob), -1, points.shape[1])
        inside = [None] * len(sets) if region is None else list(region.reshape(len(sets), -1))
        alpha, bias = key_terms(keys, bandwidth)
        counts = torch.ones_like(bias, dtype=torch.bool) if keys.weight is None else keys.weight > 0
        means = [
            _mean_inside(*of_set, leave_one_out=leave_one_out)
            for of_set in zip(sets, inside, alpha, bias, keys.label.double(), counts, strict=True)
        ]
        return torch.stack(means).reshape(rows.shape).transpose(1, 2).contiguous()


def _kernel_applies(points: Tensor, keys: Keys, bandwidth: float) -> bool:
    """Whether the Triton kernel computes this; the compiler cannot look into its launches."""
    wants_gradient = torch.is_grad_enabled() and (points.requires_grad or keys.prob.requires_grad)
    return (
        not (wants_gradient or torch.compiler.is_compiling())
        and bandwidth >= _MIN_KERNEL_BANDWIDTH
        and points.shape[1] <= _MAX_KERNEL_CLASSES
        and fused_applies(points, keys.label)
    )


def key_terms(keys: Keys, bandwidth: float) -> tuple[Float[Tensor, "B K C"], Float[Tensor, "B K"]]:
    """The terms of a score of each key, float64: α, and the bias log weight - Σ_c lgamma(α_c + 1)."""
    prob = keys.prob.double().clamp(min=MIN_PROB)
    alpha = prob / prob.sum(-1, keepdim=True) / bandwidth
    bias = -torch.lgamma(alpha + 1).sum(-1)
    if keys.weight is not None:
        log_weight = keys.weight.double().clamp(min=1e-300).log()
        bias = torch.where(keys.weight > 0, bias + log_weight, _ABSENT)
    return alpha, bias


def _mean_inside(
    points: Float[Tensor, "n C"],
    region: Tensor | None,
    alpha: Float[Tensor, "K C"],
    bias: Float[Tensor, " K"],
    label: Float[Tensor, "K C"],
    counts: Tensor,
    *,
    leave_one_out: bool,
) -> Float[Tensor, "n C"]:
    """`kernel_mean` of one set of points; those outside the region stay as they are."""
    # a point that is left out must keep its number
    if region is not None and not leave_one_out and values_are_readable(region):
        part = points[region]
        if len(part) == 0:
            return points
        mean = _mean_inside(part, None, alpha, bias, label, counts, leave_one_out=False)
        return points.masked_scatter(region.unsqueeze(1), mean)
    size = max(1, (_CPU_CHUNK if points.device.type == "cpu" else _GPU_CHUNK) // max(alpha.shape))
    needs_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in (points, alpha, bias, label))
    # all chunks use the same memory: to allocate it for each of them costs more than the computation
    buffers = None if needs_gradient else alpha.new_empty(2, min(size, len(points)), len(alpha))
    chunks = []
    for start in range(0, len(points), size):
        chunk = (points[start : start + size], alpha, bias, label, start if leave_one_out else None, buffers)
        if needs_gradient:
            # computed again in the backward pass: autograd would store the (points, keys) matrix
            chunks.append(checkpoint(_chunk_mean, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_chunk_mean(*chunk))
    others = counts.sum() - counts.long() if leave_one_out else counts.any().expand(len(points))
    is_changed = others > 0 if region is None else (others > 0) & region
    return torch.where(is_changed.unsqueeze(1), torch.cat(chunks), points)


def _chunk_mean(
    points: Tensor,
    alpha: Tensor,
    bias: Tensor,
    label: Tensor,
    first_left_out: int | None,
    buffers: Tensor | None,
) -> Float[Tensor, "m C"]:
    """Softmax of the scores over keys, times the labels; point j leaves out key first_left_out + j."""
    of_scores, of_weight = (None, None) if buffers is None else buffers[:, : len(points)].unbind()
    log_prob = points.double().clamp(min=MIN_PROB).log()
    scores = torch.addmm(bias, log_prob, alpha.t(), out=of_scores)
    if first_left_out is not None:
        scores.diagonal(first_left_out).fill_(_ABSENT)
    return (torch.softmax(scores, -1, out=of_weight) @ label).to(points.dtype)
