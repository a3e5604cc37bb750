"""E[y | f] by a kernel density estimate on the probability simplex, which is one attention over key points.

    recalibration       E[y | f_j] = Σ_i k_ji w_i y_i / Σ_i k_ji w_i      over keys i (paper, appendix E)
    calibration error   mean over j of |E[y | f_j] - f_j|                 (Popordanoska et al., NeurIPS 2022)

    log k_ji = Σ_c α_ic log f_jc - Σ_c lgamma(α_ic + 1) + lgamma(1/h + C),        α_i = f_i / h

k is the density at f_j of the Dirichlet distribution around key i (for two classes a Beta), h the bandwidth:
a softmax over keys of a product plus a bias per key, times their labels. Probabilities are clamped to 1e-7 or
more. Those of a key are then scaled to sum to one; the scale of a query cancels.

Scores reach 16/h, too much for float32: its errors are 4e-4 (2 classes) to 1e-2 (64) at h = 2e-4. So scores
are float64 here, in chunks. On a GPU `kernels.kde` computes the same in one pass.
Left out: the choice of key points and of the bandwidth (`keypoints`), and fitted calibrators (`calibrators`).
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..arrays import (
    Activation,
    check_distribution,
    check_prediction,
    check_tensor,
    check_unit_range,
    check_valid,
    describe,
    one_hot,
    read_target,
    values_are_readable,
)
from ..kernels import fused_applies
from ..options import Positive, check_value

Kind = Literal["canonical", "marginal", "top_label"]

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


def kde_recalibrate(
    prob: Tensor, keys: Keys, *, bandwidth: float, region: Tensor | None = None, leave_one_out: bool = False
) -> Float[Tensor, "N C *space"]:
    """E[y | f] at every probability of `prob`, in its shape; at least float32, rows sum to one.

    prob is (N, C, *space), or points (n, C). keys come from `draw_keys`, or are `Keys` of your own. With the
    weights of `draw_keys` the estimate is consistent under the class frequencies of the data; with equal
    weights (as in the paper) under those of the keys. region: bool (N, *space) or (n,); outside it the result
    is `prob`, and little is computed. leave_one_out: point j is key j, and is left out of its own estimate.
    Where no key counts, the result is `prob`. Differentiable in prob and keys, with gradient 0 below 1e-7.
    Memory, forward and backward, is bounded by a chunk of the (points, keys) matrix. The error is below 1e-6,
    with the kernel for a GPU (float32, up to 256 classes, without a gradient) below 1e-4.

    >>> keys = Keys(torch.tensor([[[0.1, 0.9], [0.3, 0.7]]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    >>> kde_recalibrate(torch.tensor([[0.2, 0.8]]), keys, bandwidth=0.05).round(decimals=2)
    tensor([[0.4400, 0.5600]])
    """
    check_value(Positive, bandwidth=bandwidth)
    check_classes(prob)
    points = prob.t().unsqueeze(0) if prob.ndim == 2 else prob.flatten(2)
    keys = _checked_keys(points, keys)
    if leave_one_out and points[:, 0].numel() != keys.prob[..., 0].numel():
        raise ValueError(
            "leave_one_out needs as many points as keys, because point j is key j; got prob "
            f"{describe(prob)} for keys.prob {describe(keys.prob)}"
        )
    if region is not None:
        check_valid(prob, region, name="region")
        region = region.reshape(points.shape[0], points.shape[2])
    mean = kernel_mean(points, keys, bandwidth=bandwidth, region=region, leave_one_out=leave_one_out)
    return mean[0].t().contiguous() if prob.ndim == 2 else mean.reshape(prob.shape)


def check_classes(prob: Tensor) -> None:
    """Raise unless `prob` (N, C, *space) has two or more classes and, if readable, sums to one over them."""
    check_prediction(prob)
    if prob.shape[1] == 1:
        raise ValueError(
            f"prob has one channel, and a kernel density needs all classes; got {describe(prob)}: "
            "pass torch.cat([1 - prob, prob], dim=1)"
        )
    check_distribution("prob", prob)


def _checked_keys(points: Float[Tensor, "N C n"], keys: Keys, *, sums: bool = True) -> Keys:
    """The keys, checked; one that does not count gets equal probabilities.

    sums: whether the classes exclude each other.
    """
    if not isinstance(keys, Keys):
        raise ValueError(f"keys must be Keys, as from draw_keys; got {describe(keys)}")
    prob, label, weight = keys
    num_images, num_classes = points.shape[:2]
    for name, part in (("keys.prob", prob), ("keys.label", label)):
        check_tensor(name, part)
        is_shape = part.ndim == 3 and part.shape == prob.shape and part.shape[2] == num_classes
        if not (is_shape and len(part) in (1, num_images)) or not part.is_floating_point():
            raise ValueError(
                f"{name} must be floats (1, K, {num_classes}), or ({num_images}, K, {num_classes}) for keys "
                f"per image; got {describe(part)}: draw_keys makes them"
            )
    if weight is not None:
        if weight.shape != prob.shape[:2] or (values_are_readable(weight) and not bool((weight >= 0).all())):
            raise ValueError(
                f"keys.weight must be numbers of 0 or more, {tuple(prob.shape[:2])}; got {describe(weight)}"
            )
        # the values of a key that does not count, such as NaN, must not reach a sum
        counts = (weight > 0).unsqueeze(-1)
        prob, label = (torch.where(counts, part, 1 / num_classes) for part in (prob, label))
    for name, part in (("keys.prob", prob), ("keys.label", label)):
        check_unit_range(name, part)
        if sums:
            check_distribution(name, part.movedim(-1, 1))
    return Keys(prob, label, weight)


def kde_calibration_error(
    prob: Tensor,
    target: Tensor,
    *,
    bandwidth: float,
    kind: Kind = "canonical",
    valid: Tensor | None = None,
    keys: Keys | None = None,
) -> Float[Tensor, ""]:
    """Calibration error, 0 if E[y | f] = f: the mean over valid voxels of |E[y | f] - f|.

    kind "canonical" sums over the classes of the probability vector. "marginal" is the mean over classes of
    each class against the rest, and also takes channels of a sigmoid network. "top_label" compares the
    confidence of the argmax with its being right (for a soft target: with its share).
    E[y | f] comes from one set of keys, as in `kde_recalibrate`; without keys from all other valid voxels,
    leave-one-out, in time quadratic in the voxels. The estimator is that of Popordanoska et al. (NeurIPS
    2022), who sum marginal errors over classes. Differentiable in prob and keys; at least float32. Without a
    valid voxel: 0, or a ValueError on the CPU.

    >>> prob = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    >>> kde_calibration_error(prob, torch.tensor([0, 0, 0, 0]), bandwidth=0.1)
    tensor(1.)
    """
    check_value(Kind, kind=kind)
    check_value(Positive, bandwidth=bandwidth)
    if kind != "marginal":
        check_classes(prob)
    points, label, counted = flat_rows(prob, target, valid)
    # the values of a voxel that does not count, such as NaN, must not reach a sum
    points, label = (torch.where(counted.unsqueeze(1), part, 1 / part.shape[1]) for part in (points, label))
    query, query_label = _sub_problems(kind, points, label)
    if keys is None:
        of_problems = Keys(query.transpose(1, 2), query_label, counted.expand(len(query), -1))
    else:
        key, key_label, weight = _checked_keys(points.t().unsqueeze(0), keys, sums=kind != "marginal")
        key, key_label = _sub_problems(kind, key[0], key_label[0].to(label.dtype))
        weight = None if weight is None else weight.expand(len(query), -1)
        of_problems = Keys(key.transpose(1, 2), key_label, weight)
    mean = kernel_mean(query, of_problems, bandwidth=bandwidth, leave_one_out=keys is None)
    gap = (mean - query).abs()
    each = gap.sum(1) if kind == "canonical" else gap[:, 1]
    return torch.where(counted, each.mean(0), 0).sum() / counted.sum().clamp(min=1)


def flat_rows(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: Activation | None = None
) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"], Bool[Tensor, " n"]]:
    """Checked predictions and soft labels, one row per voxel, and which count; a ValueError if none does."""
    check_prediction(prediction, activation)
    target, valid = read_target(prediction, target, activation=activation, valid=valid)
    num_classes = prediction.shape[1]
    counted = torch.ones_like(prediction[:, 0], dtype=torch.bool) if valid is None else valid
    if values_are_readable(counted) and not bool(counted.any()):
        raise ValueError(f"there is no valid voxel in prediction {describe(prediction)}")
    soft = target if target.is_floating_point() else one_hot(target, num_classes).float()
    rows, label = (part.movedim(1, -1).reshape(-1, num_classes) for part in (prediction, soft))
    return rows, label, counted.flatten()


def _sub_problems(
    kind: Kind, prob: Float[Tensor, "n C"], label: Float[Tensor, "n C"]
) -> tuple[Tensor, Tensor]:
    """Points (B, c, n) and labels (B, n, c) of one problem with C classes, or of B with two classes each."""
    if kind == "canonical":
        return prob.t().unsqueeze(0), label.unsqueeze(0)
    if kind == "top_label":
        prob, top = prob.max(1, keepdim=True)
        label = label.gather(1, top)
    prob, label = prob.t(), label.t()
    return torch.stack([1 - prob, prob], dim=1), torch.stack([1 - label, label], dim=-1)


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
        means = [
            _mean_of_set(*of_set, leave_one_out=leave_one_out)
            for of_set in zip(sets, inside, alpha, bias, keys.label.double(), strict=True)
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


def _mean_of_set(
    points: Float[Tensor, "n C"],
    region: Tensor | None,
    alpha: Float[Tensor, "K C"],
    bias: Float[Tensor, " K"],
    label: Float[Tensor, "K C"],
    *,
    leave_one_out: bool,
) -> Float[Tensor, "n C"]:
    """`kernel_mean` of one set of points."""
    counts = bias > _ABSENT
    others = counts.sum() - counts.long() if leave_one_out else counts.sum().expand(len(points))
    is_changed = others > 0 if region is None else (others > 0) & region
    # a point that is left out must keep its number
    is_selected = region is not None and not leave_one_out and values_are_readable(region)
    wanted = points[is_changed] if is_selected else points
    size = max(1, (_CPU_CHUNK if points.device.type == "cpu" else _GPU_CHUNK) // max(alpha.shape))
    needs_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in (points, alpha, bias, label))
    # all chunks use the same memory: to allocate it for each of them costs more than the computation
    buffers = None if needs_gradient else alpha.new_empty(2, min(size, len(wanted)), len(alpha))

    def mean_of_chunk(chunk: Float[Tensor, "m C"], start: int) -> Float[Tensor, "m C"]:
        """Softmax of the scores over keys, times the labels."""
        of_scores, of_weight = (None, None) if buffers is None else buffers[:, : len(chunk)].unbind()
        log_prob = chunk.double().clamp(min=MIN_PROB).log()
        scores = torch.addmm(bias, log_prob, alpha.t(), out=of_scores)
        if leave_one_out:
            scores.diagonal(start).fill_(_ABSENT)
        return (torch.softmax(scores, -1, out=of_weight) @ label).to(points.dtype)

    # computed again in the backward pass: autograd would store the (points, keys) matrix
    again = partial(checkpoint, mean_of_chunk, use_reentrant=False, preserve_rng_state=False)
    compute = again if needs_gradient else mean_of_chunk
    mean = torch.cat([compute(chunk, number * size) for number, chunk in enumerate(wanted.split(size))])
    is_changed = is_changed.unsqueeze(1)
    return points.masked_scatter(is_changed, mean) if is_selected else torch.where(is_changed, mean, points)
