"""What a loss needs of a batch: soft overlap, cross entropy and label mass, and the Tversky index of overlap.

For prob x and target y in [0, 1]:

    form      tp          fp           fn           in the paper
    min       min(x, y)   relu(x-y)    relu(y-x)    JML1, DML1, CTL, CFTL: best index exactly at x = y
    product   x y         relu(x-y)    relu(y-x)    JML2, DML2: best index exactly at x = y
    squared   x y         x (x-y)      y (y-x)      the squared L2 forms
    relaxed   x y         x (1-y)      y (1-x)      SDL, SJL, STL: right only for hard labels, for comparison

    index = (tp + s) / (tp + alpha fp + beta fn + s)        Dice: alpha = beta = 1/2; Jaccard: 1

All sums run over the valid voxels of one image and class, (N, C). Ties: at x = y, the derivatives of the
three terms of `min` and of fp and fn of `product` are defined as 0, which lies between the one-sided
derivatives of the index. So the gradient at prob = target is exactly 0, for every alpha and beta. This is the
definition, in plain operations; `kernels` compute the same numbers with less memory traffic.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from .arrays import Activation, check_prediction, one_hot, read_target
from .losses.options import Form, LossOptions, Over
from .options import Weight, check_value

__all__ = ["OverlapStats", "overlap_stats", "tversky_index"]

# -log of the index stops here: a class that is missed completely costs 16, not infinity
MIN_INDEX = 1e-7


class OverlapStats(NamedTuple):
    """Soft counts of voxels, one number per image and class (N, C)."""

    tp: Float[Tensor, "N C"]
    fp: Float[Tensor, "N C"]
    fn: Float[Tensor, "N C"]


class SumsOptions(NamedTuple):
    """Which sums over the voxels are needed: overlap unless `form` is None; entropy and mass if `entropy`."""

    activation: Activation
    form: Form | None
    entropy: bool


class VoxelSums(NamedTuple):
    """All that a loss needs of a batch, (N, C) each; a sum that was not asked for has no meaning."""

    tp: Float[Tensor, "N C"]
    fp: Float[Tensor, "N C"]
    fn: Float[Tensor, "N C"]
    entropy: Float[Tensor, "N C"]
    mass: Float[Tensor, "N C"]

    @property
    def overlap(self) -> OverlapStats:
        """The first three."""
        return OverlapStats(*self[:3])


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
    has zeros. See the top of this page for the definitions and for ties (paper, eqs. 1-6).

    >>> stats = overlap_stats(torch.tensor([[0.2, 0.8]]), torch.tensor([[0.5, 0.5]]))
    >>> [round(float(s[0, 1]), 2) for s in stats]
    [0.5, 0.3, 0.0]
    """
    check_value(Form, form=form)
    check_prediction(prob)
    target, valid = read_target(prob, target, valid=valid, ignore_index=ignore_index)
    return reference_sums(prob, target, valid, SumsOptions("none", form, entropy=False)).overlap


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
    check_value(Weight, alpha=alpha, beta=beta, smooth=smooth)
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


def reference_sums(
    prediction: Float[Tensor, "N C *space"], target: Tensor, valid: Tensor | None, options: SumsOptions
) -> VoxelSums:
    """The sums of checked inputs; ignored voxels must be in `valid` already."""
    activation, form, entropy = options
    prediction, soft = cleared(prediction, target, valid)
    tp = fp = fn = cross_entropy = mass = prediction.new_zeros(prediction.shape[:2])
    if form is not None:
        prob = probability(prediction, activation)
        tp, fp, fn = _OverlapSums.apply(clear_ignored(prob, valid), soft, form)
    if entropy and activation == "sigmoid":
        each = F.binary_cross_entropy_with_logits(prediction, soft, reduction="none")
        cross_entropy = sum_voxels(clear_ignored(each, valid))
        mass = sum_voxels(clear_ignored(torch.ones_like(soft), valid))
    elif entropy:
        if activation == "softmax":
            log_prob = prediction.log_softmax(1)
        else:
            # a probability below the smallest normal number counts as that
            log_prob = prediction.clamp_min(torch.finfo(prediction.dtype).tiny).log()
        cross_entropy = sum_voxels(-soft * log_prob)
        mass = sum_voxels(soft)
    return VoxelSums(tp, fp, fn, cross_entropy, mass)


def cleared(prediction: Tensor, target: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prediction and label as floats (N, C, *space), 0 at voxels that do not count.

    Before the activation: it would turn a NaN of an ignored voxel into a gradient of NaN. float32 before the
    exponential and the sums: a bfloat16 total of 100 000 voxels becomes 99 840.
    """
    prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
    soft = target if target.is_floating_point() else one_hot(target, prediction.shape[1])
    soft = soft.to(prediction.dtype)
    return clear_ignored(prediction, valid), clear_ignored(soft, valid)


def clear_ignored(values: Tensor, valid: Tensor | None) -> Tensor:
    """`values` (N, C, *space) with 0 where a voxel does not count."""
    # torch.where and not a product: an ignored voxel may hold NaN, and NaN * 0 is NaN
    return values if valid is None else torch.where(valid.unsqueeze(1), values, 0)


def sum_voxels(values: Tensor) -> Tensor:
    """The sum over the axes of space, (N, C); without one, an image is one voxel."""
    return values.sum(tuple(range(2, values.ndim))) if values.ndim > 2 else values


def reference_gradient(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    options: SumsOptions,
    gradients: Sequence[Tensor],
) -> Tensor:
    """Gradient in the prediction from the gradients of tp, fp, fn and entropy; it is differentiable."""
    sums = reference_sums(prediction, target, valid, options)
    # a sum that was not asked for has none
    pairs = [(each, grad) for each, grad in zip(sums[:4], gradients, strict=False) if each.requires_grad]
    asked, incoming = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(asked, prediction, incoming, create_graph=True)
    return gradient


def probability(prediction: Tensor, activation: Activation) -> Tensor:
    """The prediction after `activation`."""
    if activation == "softmax":
        return prediction.softmax(1)
    return prediction.sigmoid() if activation == "sigmoid" else prediction


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


def form_sums(x: Tensor, y: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of tp, fp and fn over all axes after the second, (N, C) each."""
    # Each temporary of the size of x is summed before the next one is computed, to save memory.
    if form == "min":
        both = torch.minimum(x, y)
        # relu(x - y) and relu(y - x), to the bit
        return sum_voxels(both), sum_voxels(x - both), sum_voxels(y - both)
    tp = sum_voxels(x * y)
    if form == "relaxed":
        return tp, sum_voxels(x * (1 - y)), sum_voxels(y * (1 - x))
    if form == "squared":
        return tp, sum_voxels(x * (x - y)), sum_voxels(y * (y - x))
    return tp, sum_voxels((x - y).relu_()), sum_voxels((y - x).relu_())


def form_gradient(
    x: Tensor, y: Tensor, form: Form, grad_tp: Tensor, grad_fp: Tensor, grad_fn: Tensor
) -> Tensor:
    """Gradient in x of grad_tp * tp + grad_fp * fp + grad_fn * fn, by differentiable operations.

    Every form is symmetric: for the gradient in y, exchange x with y, and grad_fp with grad_fn.
    """
    if form in ("squared", "relaxed"):
        through_product = (grad_tp - grad_fp - grad_fn) * y
        return through_product + (grad_fp if form == "relaxed" else 2 * grad_fp * x)
    # Arithmetic on -1, 0 and 1 rather than torch.where, which is ten times slower on a CPU.
    # The sign is constant in x except at ties, so it has no derivative.
    sign = (x.detach() - y.detach()).sign_()
    gradient = sign.relu() * grad_fp
    below = sign.neg_().relu_()
    if form == "min":
        return gradient.add_(below.mul_(grad_tp - grad_fn))
    return gradient.sub_(below.mul_(grad_fn)).add_(grad_tp * y)


def sums_options(options: LossOptions, activation: Activation) -> SumsOptions:
    """The sums that the terms of a loss are made of; a term of weight 0 needs none."""
    return SumsOptions(
        activation, options.form if options.region_weight > 0 else None, options.cross_entropy_weight > 0
    )


def terms_of(
    sums: VoxelSums, weight: Float[Tensor, " C"], options: LossOptions, *, sync: bool = False
) -> dict[str, Float[Tensor, ""]]:
    """Cross entropy and region loss from the sums of a batch; a term of weight 0 is left out.

    sync: of the batches of all processes.
    """
    terms = {}
    if options.cross_entropy_weight > 0:
        terms["cross_entropy"] = cross_entropy_of(sums, weight, sync=sync)
    if options.region_weight > 0:
        terms["region"] = region_loss_of(sums.overlap, weight, options, sync=sync)
    return terms


def total_of(terms: Mapping[str, Tensor], options: LossOptions) -> Float[Tensor, ""]:
    """The sum of the terms by their weights: `cross_entropy` by `cross_entropy_weight`, and so on."""
    weighted = [getattr(options, f"{name}_weight") * term for name, term in terms.items()]
    total: Tensor = reduce(torch.add, weighted)
    return total


def cross_entropy_of(
    sums: VoxelSums, weight: Float[Tensor, " C"], *, sync: bool = False
) -> Float[Tensor, ""]:
    """sum_c w_c entropy_c / sum_c w_c mass_c."""
    weight = weight.to(sums.entropy.dtype)
    totals = torch.stack([(sums.entropy * weight).sum(), (sums.mass * weight).sum()])
    if sync:
        totals = sum_across_processes(totals)
    return totals[0] / torch.where(totals[1] > 0, totals[1], 1)


def region_loss_of(
    stats: OverlapStats, weight: Float[Tensor, " C"], options: LossOptions, *, sync: bool = False
) -> Float[Tensor, ""]:
    """Mean over classes and images of (1 - index)^gamma or (-log index)^gamma."""
    weight = weight.to(stats.tp.dtype)
    if not options.background:
        stats, weight = OverlapStats(*(part[:, 1:] for part in stats)), weight[1:]
    if options.over == "batch":
        summed = torch.stack([part.sum(0, keepdim=True) for part in stats])
        stats = OverlapStats(*(sum_across_processes(summed) if sync else summed).unbind(0))
    loss = tversky_error(stats, alpha=options.alpha, beta=options.beta, smooth=options.smooth)
    if options.log:
        loss = -torch.log1p(-loss.clamp_max(1 - MIN_INDEX))
    if options.gamma != 1:
        # for gamma < 1 the slope at 0 is infinite, but the gradient at the minimum must be 0
        positive = loss > 0
        loss = torch.where(positive, torch.where(positive, loss, 1) ** options.gamma, 0)
    counted = torch.ones_like(loss, dtype=torch.bool)
    if options.classes == "present":
        # In every form, tp + fn is 0 exactly if the target is 0 everywhere.
        counted = stats.tp + stats.fn > 0
    return mean_over_classes_and_images(loss, counted, weight, options.over)


def sum_across_processes(tensor: Tensor) -> Tensor:
    """Differentiable sum of `tensor` over the default process group; without a group, `tensor` itself.

    The backward pass sums the incoming gradients of all processes. After DistributedDataParallel has averaged
    them, the gradient of a parameter equals that of a single process with the whole batch.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    total: Tensor = all_reduce(tensor)
    return total


def mean_over_classes_and_images(
    loss: Float[Tensor, "N C"], counted: Bool[Tensor, "N C"], weight: Float[Tensor, " C"], over: Over
) -> Float[Tensor, ""]:
    """Mean of the counted entries of `loss` (N, C); over="class" averages over images first."""
    weights = counted * weight
    if over == "class":
        per_class = _weighted_mean(loss, counted.to(loss.dtype), dim=0)
        return _weighted_mean(per_class, weights.amax(0), dim=0)
    per_image = _weighted_mean(loss, weights, dim=1)
    return _weighted_mean(per_image, (weights.amax(1) > 0).to(loss.dtype), dim=0)


def _weighted_mean(values: Tensor, weight: Tensor, *, dim: int) -> Tensor:
    total = weight.sum(dim)
    return (values * weight).sum(dim) / torch.where(total > 0, total, 1)
