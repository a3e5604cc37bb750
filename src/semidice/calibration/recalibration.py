"""The label to expect at a prediction f(x), E[y | f(x)], and the distance of f from it.

    recalibration       E[y | f_j] = Σ_i k(f_j, f_i) w_i y_i / Σ_i k(f_j, f_i) w_i        over key points i
    calibration error   mean over j of |E[y | f_j] - f_j|^p
    bandwidth           the one with the highest likelihood of points that are left out of the sums

with the Dirichlet kernel k of bandwidth h of `kde` (paper, appendix E; Popordanoska et al., NeurIPS 2022).
Left out: the choice of key points (`keypoints`), and fitted calibrators (`calibrators`).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import (
    check_choice,
    check_number,
    check_prediction,
    check_target,
    check_tensor,
    check_unit_range,
    describe,
    one_hot,
    values_are_readable,
)
from .kde import MIN_PROB, Method, kernel_mean, key_terms, score_chunks
from .keypoints import sample_keys, take_keys

Kind = Literal["canonical", "marginal", "top_label"]
Likelihood = Literal["label", "density"]

# 5e-5 to 0.11; with wider kernels the likelihood of saturated predictions has a second, worse maximum
DEFAULT_BANDWIDTHS = tuple(5e-5 * 10 ** (step / 3) for step in range(11))


class BandwidthChoice(NamedTuple):
    """The best bandwidth, all that were tried, and the mean log-likelihood of a point under each."""

    bandwidth: float
    bandwidths: tuple[float, ...]
    log_likelihood: tuple[float, ...]


def kde_recalibrate(
    prob: Tensor,
    key_prob: Tensor,
    key_target: Tensor,
    *,
    bandwidth: float,
    key_weight: Tensor | None = None,
    region: Tensor | None = None,
    leave_one_out: bool = False,
    method: Method = "auto",
) -> Float[Tensor, "N C *space"]:
    """E[y | f] at every probability of `prob`, in its shape; at least float32, rows sum to one.

    prob is (N, C, *space), or points (n, C). Keys are shared, key_prob (K, C), or each image has its own,
    (N, K, C); key_target is soft in the same shape, or class indices (K,) or (N, K). key_weight (K,) or
    (N, K) is a bool mask of real keys or a weight per key, 0 or more. With the weights of `sample_keys` the
    estimate is consistent under the class frequencies of the data; without them (as in the paper) under those
    of the keys. region: bool (N, *space) or (n,); outside it the result is `prob`, and the Triton kernel, or
    any method on a CPU, computes nothing there. leave_one_out: point j is key j, and is left out of its own
    estimate. Where no key counts, the result is `prob`. Differentiable in prob and key_prob, with gradient 0
    below 1e-7. Memory, forward and backward, is bounded by a chunk of the (points, keys) matrix.

    method "reference" has an error below 1e-6 for every bandwidth. "attention" is PyTorch's fused attention
    in float32, "triton" a kernel for CUDA. "auto" takes triton on a CUDA device for up to 64 classes, else
    attention if bandwidth >= 0.005 sqrt(C), with errors below 1e-4; but reference if a point is left out, a
    gradient is needed, or prob is float64.

    >>> keys, labels = torch.tensor([[0.1, 0.9], [0.3, 0.7]]), torch.tensor([1, 0])
    >>> kde_recalibrate(torch.tensor([[0.2, 0.8]]), keys, labels, bandwidth=0.05).round(decimals=2)
    tensor([[0.4400, 0.5600]])
    """
    check_choice("method", method, Method)
    _check_bandwidth(bandwidth)
    check_distribution("prob", prob)
    key_prob, label = _checked_keys(prob, key_prob, key_target, key_weight)
    shared = key_prob.ndim == 2
    if shared:
        points = prob.t().unsqueeze(0) if prob.ndim == 2 else prob.flatten(2)
        key_prob, label = key_prob.unsqueeze(0), label.unsqueeze(0)
        key_weight = None if key_weight is None else key_weight.unsqueeze(0)
    else:
        points = prob.reshape(*prob.shape[:2], -1)
    if leave_one_out and (points.shape[0] != key_prob.shape[0] or points.shape[2] != key_prob.shape[1]):
        raise ValueError(
            "leave_one_out needs as many points as keys, because point j is key j; got prob "
            f"{describe(prob)} for {key_prob.shape[1]} keys: pass points (n, C) for shared keys"
        )
    mean = kernel_mean(
        points,
        key_prob,
        label,
        bandwidth=bandwidth,
        weight=key_weight,
        leave_one_out=leave_one_out,
        region=None if region is None else _flat_region(prob, region, points),
        method=method,
    )
    return mean.squeeze(0).t().contiguous() if shared and prob.ndim == 2 else mean.reshape(prob.shape)


def _flat_region(prob: Tensor, region: Tensor, points: Tensor) -> Tensor:
    expected = prob.shape[:1] + prob.shape[2:]
    if region.dtype != torch.bool or region.shape != expected or region.device != prob.device:
        raise ValueError(
            f"region must be bool {tuple(expected)} on {prob.device}, one flag per point of prob; "
            f"got {describe(region)} on {region.device}"
        )
    return region.reshape(points.shape[0], points.shape[2])


def check_distribution(name: str, prob: Tensor) -> None:
    """Raise unless `prob` (N, C, *space) has two or more classes and, if readable, sums to one over them."""
    check_tensor(name, prob)
    if not prob.is_floating_point() or prob.ndim < 2:
        raise ValueError(
            f"{name} must be a float tensor with a class axis, (N, C, *space); got {describe(prob)}"
        )
    if prob.numel() == 0:
        raise ValueError(f"{name} is empty: {describe(prob)}")
    if prob.shape[1] == 1:
        raise ValueError(
            f"{name} has one channel, and a kernel density needs all classes; got {describe(prob)}: "
            "pass torch.cat([1 - prob, prob], dim=1)"
        )
    check_unit_range(name, prob)
    _check_sums(name, prob, dim=1)


def _check_sums(name: str, prob: Tensor, dim: int) -> None:
    if not values_are_readable(prob):
        return
    total = prob.detach().sum(dim, dtype=torch.promote_types(prob.dtype, torch.float32))
    low, high = total.aminmax()
    # bfloat16 rounds each probability by up to 0.4 %
    if not (low > 0.99 and high < 1.01):
        raise ValueError(
            f"{name} must sum to one over its {prob.shape[dim]} classes; got sums {low:.4g} to {high:.4g}: "
            "apply softmax to logits"
        )


def _check_bandwidth(bandwidth: float) -> None:
    check_number(bandwidth=bandwidth)
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be above 0; got {bandwidth}: try choose_bandwidth")


def _checked_keys(
    prob: Tensor, key_prob: Tensor, key_target: Tensor, key_weight: Tensor | None, *, sums: bool = True
) -> tuple[Tensor, Tensor]:
    """Checked probabilities and soft labels of the keys; equal probabilities where the weight is 0."""
    num_classes = prob.shape[1]
    got = f"got key_prob {describe(key_prob)} for prob {describe(prob)}"
    check_tensor("key_target", key_target)
    if not isinstance(key_prob, Tensor) or not key_prob.is_floating_point() or key_prob.ndim not in (2, 3):
        raise ValueError(f"key_prob must be floats (K, C), or (N, K, C) for keys per image; {got}")
    if key_prob.shape[-1] != num_classes or (key_prob.ndim == 3 and key_prob.shape[0] != prob.shape[0]):
        raise ValueError(
            f"key_prob must have the classes of prob (N, C, *space), and if per image its images; {got}"
        )
    if key_prob.numel() == 0:
        raise ValueError(f"key_prob needs at least one key; {got}")
    if key_prob.device != prob.device or key_target.device != prob.device:
        raise ValueError(f"prob, key_prob and key_target must be on one device; prob is on {prob.device}")
    shape = tuple(key_prob.shape[:-1])
    if key_weight is not None and tuple(key_weight.shape) != shape:
        raise ValueError(f"key_weight must be one number per key, {shape}; got {describe(key_weight)}")
    if key_weight is not None and values_are_readable(key_weight) and not bool((key_weight >= 0).all()):
        raise ValueError(f"key_weight must be 0 or more; got a minimum of {float(key_weight.min()):.4g}")
    if not key_target.is_floating_point():
        if tuple(key_target.shape) != shape or key_target.dtype == torch.bool:
            raise ValueError(f"key_target must be class indices {shape} or soft; got {describe(key_target)}")
        label = _one_hot_keys(key_target, key_weight, num_classes)
    elif key_target.shape == key_prob.shape:
        label = key_target
    else:
        raise ValueError(
            f"a soft key_target has the shape {tuple(key_prob.shape)} of key_prob; got {describe(key_target)}"
        )
    if key_weight is not None:
        # the values of a key that is not real, such as NaN, must not reach a sum
        real = (key_weight > 0).unsqueeze(-1)
        key_prob, label = (torch.where(real, part, 1 / num_classes) for part in (key_prob, label))
    for name, part in (("key_prob", key_prob), ("key_target", label)):
        check_unit_range(name, part)
        if sums and part.is_floating_point():
            _check_sums(name, part, dim=-1)
    return key_prob, label


def _one_hot_keys(key_target: Tensor, key_weight: Tensor | None, num_classes: int) -> Tensor:
    counted = key_target if key_weight is None else key_target.masked_fill(key_weight == 0, 0)
    if values_are_readable(counted):
        low, high = (int(bound) for bound in counted.aminmax())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"key_target holds class indices {low} to {high}, but prob has {num_classes} classes"
            )
    return one_hot(key_target, num_classes).movedim(1, -1)


def choose_bandwidth(
    prob: Tensor,
    target: Tensor,
    *,
    bandwidths: Sequence[float] = DEFAULT_BANDWIDTHS,
    likelihood: Likelihood = "label",
    valid: Tensor | None = None,
    num_points: int = 2048,
    generator: torch.Generator | None = None,
) -> BandwidthChoice:
    """The bandwidth with the highest leave-one-out likelihood, and the likelihoods of all that were tried.

    likelihood "label" is the mean of Σ_c y_jc log E[y_c | f_j] with point j left out, the aim of
    recalibration. "density" is the mean log density of the points f_j (Popordanoska et al. 2022); it prefers
    ever smaller bandwidths where many probabilities are equal, as those of a confident network are.

    If there are more than `num_points` voxels, `sample_keys` draws that many, with weights. A label estimated
    as 0 counts as 1e-7. Time num_points² x bandwidths, memory one chunk. Reads values.

    >>> prob = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0, -1.0]])
    >>> prob = prob + torch.tensor([[0.0, 1.0]])
    >>> choose_bandwidth(prob, (prob[:, 1] > 0.5).long(), bandwidths=(1e-3, 1e-2, 1e-1)).bandwidth
    0.001
    """
    check_choice("likelihood", likelihood, Likelihood)
    if not bandwidths:
        raise ValueError("bandwidths is empty: name one or more")
    for bandwidth in bandwidths:
        _check_bandwidth(bandwidth)
    check_distribution("prob", prob)
    target, valid = check_target(prob, target, valid=valid, has_ignore_index=False)
    num_voxels = prob.numel() // prob.shape[1]
    if num_voxels <= num_points:
        points, label, counted = _rows(prob.detach(), target, valid)
        points, label, weight = points[counted], label[counted], torch.ones_like(points[counted][:, 0])
    else:
        keys = sample_keys(target, num_points, valid=valid, generator=generator)
        points, label = (take_keys(voxels, keys)[keys.mask] for voxels in (prob.detach(), target))
        label = label if label.is_floating_point() else one_hot(label, prob.shape[1]).to(prob.dtype)
        weight = keys.weight[keys.mask]
    return choose_bandwidth_of_points(points, label, weight, bandwidths=bandwidths, likelihood=likelihood)


@torch.no_grad()
def choose_bandwidth_of_points(
    prob: Float[Tensor, "n C"],
    label: Float[Tensor, "n C"],
    weight: Float[Tensor, " n"],
    *,
    bandwidths: Sequence[float] = DEFAULT_BANDWIDTHS,
    likelihood: Likelihood = "label",
) -> BandwidthChoice:
    """`choose_bandwidth` of checked points, each with a soft label and a weight; at least two points."""
    if len(prob) < 2:
        raise ValueError(f"leave-one-out needs two points or more; got {len(prob)} valid")
    prob = prob.double().clamp(min=MIN_PROB)
    points = (prob / prob.sum(-1, keepdim=True)).t().unsqueeze(0)
    share = weight.double() / weight.double().sum()
    table = []
    for bandwidth in bandwidths:
        if likelihood == "density":
            alpha, bias = key_terms(points.transpose(1, 2), bandwidth, weight.unsqueeze(0))
            log_normaliser = math.lgamma(1 / bandwidth + prob.shape[1])
            chunks = score_chunks(points, alpha, bias, leave_one_out=True)
            log_sum = torch.cat([scores.logsumexp(-1) for *_, scores in chunks])
            each = log_sum + log_normaliser - (weight.double().sum() - weight.double()).log()
        else:
            mean = kernel_mean(
                points,
                points.transpose(1, 2),
                label.unsqueeze(0),
                bandwidth=bandwidth,
                weight=weight.unsqueeze(0),
                leave_one_out=True,
            )
            each = (label * mean[0].t().clamp(min=MIN_PROB).log()).sum(-1)
        table.append(float((share * each).sum()))
    best = max(range(len(table)), key=table.__getitem__)
    return BandwidthChoice(float(bandwidths[best]), tuple(map(float, bandwidths)), tuple(table))


def kde_calibration_error(
    prob: Tensor,
    target: Tensor,
    *,
    bandwidth: float,
    kind: Kind = "canonical",
    p: int = 1,
    valid: Tensor | None = None,
    key_prob: Tensor | None = None,
    key_target: Tensor | None = None,
    key_weight: Tensor | None = None,
) -> Float[Tensor, ""]:
    """Calibration error, 0 if E[y | f] = f: the mean over valid voxels of |E[y | f] - f|^p, p = 1 or 2.

    kind "canonical" sums over the classes of the probability vector. "marginal" is the mean over classes of
    each class against the rest, and also takes channels of a sigmoid network. "top_label" compares the
    confidence of the argmax with its being right (for a soft target: with its share).
    E[y | f] comes from keys (K, C) as in `kde_recalibrate`; without keys from all other valid voxels,
    leave-one-out, in time quadratic in the voxels. The estimator is that of Popordanoska et al. (NeurIPS
    2022), who sum marginal errors over classes. p = 2 is the squared error, without a root and without a
    correction of its bias. Differentiable in prob and key_prob; at least float32. Without a valid voxel: 0,
    or a ValueError on the CPU.

    >>> prob = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    >>> kde_calibration_error(prob, torch.tensor([0, 0, 0, 0]), bandwidth=0.1)
    tensor(1.)
    """
    check_choice("kind", kind, Kind)
    _check_bandwidth(bandwidth)
    if p not in (1, 2):
        raise ValueError(f"p must be 1 or 2; got {p}")
    if kind != "marginal":
        check_distribution("prob", prob)
    points, label, counted = _rows(prob, target, valid)
    query, query_label = _sub_problems(kind, points, label)
    if key_prob is None and key_target is None:
        key, key_label, key_weight = query, query_label, counted
    elif key_prob is None or key_target is None or key_prob.ndim != 2:
        raise ValueError(
            "keys need both key_prob (K, C) and key_target, or neither; "
            f"got {describe(key_prob)} and {describe(key_target)}"
        )
    else:
        keys = _checked_keys(prob, key_prob, key_target, key_weight, sums=kind != "marginal")
        key, key_label = _sub_problems(kind, keys[0], keys[1].to(label.dtype))
    mean = kernel_mean(
        query,
        key.transpose(1, 2),
        key_label,
        bandwidth=bandwidth,
        weight=None if key_weight is None else key_weight.expand(len(query), -1),
        leave_one_out=key_prob is None,
    )
    gap = (mean - query).abs().pow(p)
    each = gap.sum(1) if kind == "canonical" else gap[:, 1]
    return torch.where(counted, each.mean(0), 0).sum() / counted.sum().clamp(min=1)


def _rows(prob: Tensor, target: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Points (n, C), their soft labels, and which count; the others have equal probabilities."""
    check_prediction(prob)
    target, valid = check_target(prob, target, valid=valid, has_ignore_index=False)
    num_classes = prob.shape[1]
    counted = torch.ones_like(prob[:, 0], dtype=torch.bool) if valid is None else valid
    if values_are_readable(counted) and not bool(counted.any()):
        raise ValueError(f"there is no valid voxel in prob {describe(prob)}")
    soft = target if target.is_floating_point() else one_hot(target, num_classes)
    rows = (torch.where(counted.unsqueeze(1), part, 1 / num_classes) for part in (prob, soft))
    points, label = (part.movedim(1, -1).reshape(-1, num_classes) for part in rows)
    return points, label, counted.flatten()


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
