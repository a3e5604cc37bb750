"""The label to expect at a prediction f(x), E[y | f(x)], and the distance of f from it.

    recalibration       E[y | f_j] = Σ_i k(f_j, f_i) w_i y_i / Σ_i k(f_j, f_i) w_i        over key points i
    calibration error   mean over j of |E[y | f_j] - f_j|^p
    bandwidth           the one with the highest likelihood of points that are left out of the sums

with the Dirichlet kernel k of bandwidth h of `kde` (paper, appendix E; Popordanoska et al., NeurIPS 2022).
Left out: the choice of key points (`keypoints`), and fitted calibrators (`calibrators`).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import (
    Activation,
    check_distribution,
    check_prediction,
    check_tensor,
    check_unit_range,
    describe,
    one_hot,
    read_target,
    values_are_readable,
)
from ..options import check_value
from .kde import MIN_PROB, Keys, kernel_mean
from .keypoints import draw_keys

Kind = Literal["canonical", "marginal", "top_label"]

# 5e-5 to 0.11; with wider kernels the likelihood of saturated predictions has a second, worse maximum
DEFAULT_BANDWIDTHS = tuple(5e-5 * 10 ** (step / 3) for step in range(11))


class BandwidthChoice(NamedTuple):
    """The best bandwidth, all that were tried, and the mean log-likelihood of a point under each."""

    bandwidth: float
    bandwidths: tuple[float, ...]
    log_likelihood: tuple[float, ...]


def kde_recalibrate(
    prob: Tensor,
    keys: Keys,
    *,
    bandwidth: float,
    region: Tensor | None = None,
    leave_one_out: bool = False,
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
    check_bandwidth(bandwidth)
    check_classes("prob", prob)
    points = prob.t().unsqueeze(0) if prob.ndim == 2 else prob.flatten(2)
    keys = _checked_keys(points, keys)
    per_set = points.shape[0] * points.shape[2] // len(keys.prob)
    if leave_one_out and per_set != keys.prob.shape[1]:
        raise ValueError(
            "leave_one_out needs as many points as keys, because point j is key j; got prob "
            f"{describe(prob)} for {keys.prob.shape[1]} keys"
        )
    expected = prob.shape[:1] + prob.shape[2:]
    if region is not None and (
        region.dtype != torch.bool or region.shape != expected or region.device != prob.device
    ):
        raise ValueError(
            f"region must be bool {tuple(expected)} on {prob.device}, one flag per point of prob; "
            f"got {describe(region)} on {region.device}"
        )
    mean = kernel_mean(
        points,
        keys,
        bandwidth=bandwidth,
        region=None if region is None else region.reshape(points.shape[0], points.shape[2]),
        leave_one_out=leave_one_out,
    )
    return mean[0].t().contiguous() if prob.ndim == 2 else mean.reshape(prob.shape)


def check_classes(name: str, prob: Tensor) -> None:
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
    check_distribution(name, prob)


def check_bandwidth(bandwidth: float) -> None:
    check_value(float, bandwidth=bandwidth)
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be above 0; got {bandwidth}: choose_bandwidth finds one")


def _checked_keys(points: Float[Tensor, "N C n"], keys: Keys, *, sums: bool = True) -> Keys:
    """The keys, checked; one that does not count gets equal probabilities.

    sums: whether the classes exclude each other.
    """
    if not isinstance(keys, Keys):
        raise ValueError(f"keys must be Keys, as from draw_keys; got {describe(keys)}")
    num_images, num_classes = points.shape[:2]
    for name, part in (("keys.prob", keys.prob), ("keys.label", keys.label)):
        check_tensor(name, part)
        shape = (len(part) if len(part) in (1, num_images) else "N", keys.prob.shape[-2], num_classes)
        if (
            not part.is_floating_point()
            or part.shape != shape
            or not part.numel()
            or part.device != points.device
        ):
            raise ValueError(
                f"{name} must be floats (1, K, {num_classes}), or ({num_images}, K, {num_classes}) for keys "
                f"per image, on {points.device}; got {describe(part)} on {part.device}: draw_keys makes them"
            )
    prob, label, weight = keys
    if weight is not None:
        if weight.shape != prob.shape[:2]:
            raise ValueError(
                f"keys.weight must be one number per key, {tuple(prob.shape[:2])}; got {describe(weight)}"
            )
        if values_are_readable(weight) and not bool((weight >= 0).all()):
            raise ValueError(f"keys.weight must be 0 or more; got a minimum of {float(weight.min()):.4g}")
        # the values of a key that does not count, such as NaN, must not reach a sum
        counts = (weight > 0).unsqueeze(-1)
        prob, label = (torch.where(counts, part, 1 / num_classes) for part in (prob, label))
    for name, part in (("keys.prob", prob), ("keys.label", label)):
        check_unit_range(name, part)
        if sums:
            check_distribution(name, part.movedim(-1, 1))
    return Keys(prob, label, weight)


def choose_bandwidth(
    prob: Tensor,
    target: Tensor,
    *,
    bandwidths: Sequence[float] = DEFAULT_BANDWIDTHS,
    valid: Tensor | None = None,
    num_points: int = 2048,
    generator: torch.Generator | None = None,
) -> BandwidthChoice:
    """The bandwidth with the highest leave-one-out likelihood, and the likelihoods of all that were tried.

    The likelihood is the mean of Σ_c y_jc log E[y_c | f_j] with point j left out, the aim of recalibration.
    (The density of the points would prefer ever smaller bandwidths where many probabilities are equal.)

    If there are more than `num_points` voxels, `draw_keys` draws that many, with weights. A label estimated
    as 0 counts as 1e-7. Time num_points² x bandwidths, memory one chunk. Reads values.

    >>> prob = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0, -1.0]])
    >>> prob = prob + torch.tensor([[0.0, 1.0]])
    >>> choose_bandwidth(prob, (prob[:, 1] > 0.5).long(), bandwidths=(1e-3, 1e-2, 1e-1)).bandwidth
    0.001
    """
    if not bandwidths:
        raise ValueError("bandwidths is empty: name one or more")
    for bandwidth in bandwidths:
        check_bandwidth(bandwidth)
    check_classes("prob", prob)
    if prob.numel() // prob.shape[1] > num_points:
        keys = draw_keys(prob.detach(), target, num_points, valid=valid, generator=generator)
    else:
        rows = flat_rows(prob.detach(), target, valid)
        keys = Keys(*(part.unsqueeze(0) for part in rows))
    return bandwidth_of_keys(keys, bandwidths=bandwidths)


@torch.no_grad()
def bandwidth_of_keys(keys: Keys, *, bandwidths: Sequence[float] = DEFAULT_BANDWIDTHS) -> BandwidthChoice:
    """`choose_bandwidth` of one set of checked keys with weights, of which two or more count."""
    assert keys.weight is not None
    counts = keys.weight[0] > 0
    prob, label, weight = (part[0, counts] for part in (keys.prob, keys.label, keys.weight))
    if len(prob) < 2:
        raise ValueError(f"leave-one-out needs two points or more; got {len(prob)} valid")
    prob = prob.double().clamp(min=MIN_PROB)
    prob = (prob / prob.sum(-1, keepdim=True)).unsqueeze(0)
    points, share = prob.transpose(1, 2), weight.double() / weight.double().sum()
    counted = Keys(prob, label.unsqueeze(0), weight.unsqueeze(0))
    table = []
    for bandwidth in bandwidths:
        mean = kernel_mean(points, counted, bandwidth=bandwidth, leave_one_out=True)
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
    keys: Keys | None = None,
) -> Float[Tensor, ""]:
    """Calibration error, 0 if E[y | f] = f: the mean over valid voxels of |E[y | f] - f|^p, p = 1 or 2.

    kind "canonical" sums over the classes of the probability vector. "marginal" is the mean over classes of
    each class against the rest, and also takes channels of a sigmoid network. "top_label" compares the
    confidence of the argmax with its being right (for a soft target: with its share).
    E[y | f] comes from one set of keys, as in `kde_recalibrate`; without keys from all other valid voxels,
    leave-one-out, in time quadratic in the voxels. The estimator is that of Popordanoska et al. (NeurIPS
    2022), who sum marginal errors over classes. p = 2 is the squared error, without a root and without a
    correction of its bias. Differentiable in prob and keys; at least float32. Without a valid voxel: 0, or a
    ValueError on the CPU.

    >>> prob = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    >>> kde_calibration_error(prob, torch.tensor([0, 0, 0, 0]), bandwidth=0.1)
    tensor(1.)
    """
    check_value(Kind, kind=kind)
    check_bandwidth(bandwidth)
    if p not in (1, 2):
        raise ValueError(f"p must be 1 or 2; got {p}")
    if kind != "marginal":
        check_classes("prob", prob)
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
    gap = (mean - query).abs().pow(p)
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
