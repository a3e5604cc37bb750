"""Cross entropy of hard and soft targets in one definition, exact over ignored voxels and over processes.

    -sum_c w_c y_c log p_c  /  sum_c w_c y_c      both sums over the valid voxels as well

Left out: label smoothing and other changes of the target (`labels`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .arrays import Activation, check_prediction, check_result, check_target, class_weights, describe
from .overlap import sum_across_processes


def soft_cross_entropy(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation = "none",
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    class_weight: Sequence[float] | Tensor | None = None,
    sync: bool = False,
) -> Float[Tensor, ""]:
    """Mean cross entropy over the valid voxels, of hard or soft targets alike, in nats.

    softmax and none: -sum_c w_c y_c log p_c, divided by sum_c w_c y_c summed over voxels, so that class
    indices and their one-hot label give the same number. sigmoid: the binary cross entropy of each
    channel, averaged over channels with weights w_c. Without a valid voxel it is 0.

    >>> round(float(soft_cross_entropy(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))), 4)
    0.6931
    """
    check_prediction(prediction, activation)
    valid = check_target(prediction, target, activation=activation, valid=valid, ignore_index=ignore_index)
    if valid is not None:
        # An ignored voxel may hold NaN, or an index that is no class, such as 255.
        target = torch.where(valid.unsqueeze(1) if target.is_floating_point() else valid, target, 0)
    if activation == "sigmoid":
        entropy, mass = _binary_entropy(prediction, target, class_weight)
    else:
        entropy, mass = _categorical_entropy(prediction, target, activation, class_weight)
    mass = mass.expand_as(entropy)
    if valid is not None:
        entropy, mass = torch.where(valid, entropy, 0), torch.where(valid, mass, 0)
    sums = torch.stack([entropy.sum(), mass.sum()])
    if sync:
        sums = sum_across_processes(sums)
    return check_result(sums[0] / torch.where(sums[1] > 0, sums[1], 1), prediction)


def _binary_entropy(
    logits: Tensor, target: Tensor, class_weight: Sequence[float] | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weighted binary cross entropy summed over channels, a voxel, and the weight it stands for."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    entropy = F.binary_cross_entropy_with_logits(logits.to(dtype), target.to(dtype), reduction="none")
    if class_weight is None:
        return entropy.sum(1), entropy.new_full((), logits.shape[1])
    weight = class_weights(class_weight, logits).to(dtype)
    return (entropy * _along_classes(weight, entropy)).sum(1), weight.sum()


def _categorical_entropy(
    prediction: Tensor,
    target: Tensor,
    activation: Activation,
    class_weight: Sequence[float] | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of each voxel, and the weight it stands for."""
    if prediction.shape[1] == 1:
        raise ValueError(
            f"cross entropy of one channel needs logits and activation='sigmoid'; got {describe(prediction)}"
        )
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    if activation == "softmax":
        log_prob = prediction.log_softmax(1, dtype=dtype)
    else:
        log_prob = prediction.to(dtype).clamp_min(torch.finfo(dtype).tiny).log()
    weight = class_weights(class_weight, prediction).to(dtype)
    if not target.is_floating_point():
        index = target.long()
        mass = log_prob.new_ones(()) if class_weight is None else weight[index]
        return -log_prob.gather(1, index.unsqueeze(1)).squeeze(1) * mass, mass
    soft = target.to(dtype)
    if class_weight is None:
        return -(soft * log_prob).sum(1), log_prob.new_ones(())
    weighted = soft * _along_classes(weight, soft)
    return -(weighted * log_prob).sum(1), weighted.sum(1)


def _along_classes(weight: Tensor, like: Tensor) -> Tensor:
    return weight.view(1, -1, *[1] * (like.ndim - 2))
