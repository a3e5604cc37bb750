"""Masks with the best expected score, from calibrated probabilities, and the two plain rules.

p(x) is the share of raters who include voxel x. For one class, every rule takes the voxels with p above a
threshold: among all sets of k voxels the likeliest ones have the best expected score, for independent voxels
and for nested raters (`expected` defines both). `thresholds` finds the threshold of each image, `exclusive`
assigns voxels that several classes want. Half precision is computed in float32; sums are float64.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import check_prediction, check_valid, one_hot
from .exclusive import exclusive_masks
from .masks import decided_classes
from .objective import Objective
from .thresholds import MAX_EXACT_VOXELS, thresholds


def argmax_mask(
    prob: Float[Tensor, "N C *space"],
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """Masks of the most probable class, the lowest one at a tie; one channel: prob > 1/2.

    exclusive: False compares each of several channels with 1/2 on its own. Voxels that are not valid are in
    no mask.

    >>> argmax_mask(torch.tensor([[[0.2, 0.5], [0.3, 0.1], [0.5, 0.4]]])).int()
    tensor([[[0, 1],
             [0, 0],
             [1, 0]]], dtype=torch.int32)
    """
    prob = _checked(prob, valid)
    if prob.shape[1] == 1 or not exclusive:
        return prob > 0.5
    return _in_valid(one_hot(decided_classes(prob), prob.shape[1]).bool(), valid)


def threshold_mask(
    prob: Float[Tensor, "N C *space"],
    threshold: float = 0.5,
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """Masks of the voxels whose foreground probability exceeds the threshold.

    exclusive: the foreground classes together are compared with the threshold, and the most probable of them
    has the voxel. False compares each channel on its own.

    >>> threshold_mask(torch.tensor([[[0.2, 0.5, 0.3]]]), 0.3)
    tensor([[[False,  True, False]]])
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie in [0, 1]; got {threshold}")
    prob = _checked(prob, valid)
    if prob.shape[1] == 1 or not exclusive:
        return prob > threshold
    classes = decided_classes(prob, threshold=threshold)
    return _in_valid(one_hot(classes, prob.shape[1]).bool(), valid)


def dice_optimal_mask(
    prob: Float[Tensor, "N C *space"],
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """Masks with the best expected Dice if the voxels of a rater are independent.

    One channel, or exclusive=False: each channel on its own, the best of all sets {p > t} and the empty set.
    Several channels: exclusive classes, channel 0 the background; the mean over the foreground classes is
    never below that of `argmax_mask` (`exclusive` has the rule). `thresholds` has the size of the error in
    sets of more than MAX_EXACT_VOXELS voxels.

    >>> dice_optimal_mask(torch.tensor([[[0.9, 0.45, 0.1]]]))
    tensor([[[ True,  True, False]]])
    """
    return _optimal(prob, valid, exclusive, Objective("dice"))


def jaccard_optimal_mask(
    prob: Float[Tensor, "N C *space"],
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """Masks with the best expected Jaccard if the voxels of a rater are independent; else as Dice.

    >>> jaccard_optimal_mask(torch.tensor([[[0.9, 0.45, 0.1]]]))
    tensor([[[ True, False, False]]])
    """
    return _optimal(prob, valid, exclusive, Objective("jaccard"))


def nested_optimal_mask(
    prob: Float[Tensor, "N C *space"],
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """Masks with the best expected Dice if raters differ by one offset: masks {p >= t}, t ~ U(0, 1).

    A rater with t above the largest p is empty. Channels as in `dice_optimal_mask`.

    >>> nested_optimal_mask(torch.tensor([[[0.9, 0.45, 0.1]]]))
    tensor([[[ True, False, False]]])
    """
    return _optimal(prob, valid, exclusive, Objective("nested"))


def mix_optimal_mask(
    prob: Float[Tensor, "N C *space"],
    weight: float,
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """Masks with the best (1 - weight) * independent + weight * nested expected Dice.

    >>> prob = torch.tensor([[[0.9, 0.45, 0.1]]])
    >>> mix_optimal_mask(prob, 0.1).sum(), mix_optimal_mask(prob, 0.9).sum()
    (tensor(2), tensor(1))
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must lie in [0, 1], 0 for independent and 1 for nested; got {weight}")
    return _optimal(prob, valid, exclusive, Objective("mix", weight))


def _checked(prob: Tensor, valid: Tensor | None) -> Tensor:
    """`prob` in float32 or float64, with 0 at voxels that are not valid; an error if it is wrong."""
    if valid is not None and isinstance(prob, Tensor) and prob.ndim >= 2:
        check_valid(prob, valid)
        prob = torch.where(valid.unsqueeze(1), prob, 0)
    check_prediction(prob)
    return prob.to(torch.promote_types(prob.dtype, torch.float32))


def _in_valid(masks: Tensor, valid: Tensor | None) -> Tensor:
    return masks if valid is None else masks & valid.unsqueeze(1)


@torch.no_grad()
def _optimal(prob: Tensor, valid: Tensor | None, exclusive: bool, objective: Objective) -> Tensor:
    prob = _checked(prob, valid)
    flat = prob.flatten(2) if prob.ndim > 2 else prob.unsqueeze(2)
    if flat.shape[1] == 1 or not exclusive:
        masks = flat > thresholds(flat.flatten(0, 1), [objective]).view(*flat.shape[:2], 1)
        return masks.view(prob.shape)
    foreground = flat[:, 1:]
    limits = thresholds(foreground.reshape(-1, flat.shape[2]), [objective]).view(*foreground.shape[:2], 1)
    if flat.shape[1] == 2:
        masks = foreground > limits
    else:
        exact = flat.shape[2] <= MAX_EXACT_VOXELS
        masks = exclusive_masks(flat, limits, objective, exact=exact)
    masks = torch.cat([~masks.any(1, keepdim=True), masks], 1).view(prob.shape)
    return _in_valid(masks, valid)
