"""Masks of exclusive classes with a good expected mean score of the foreground classes.

No fast algorithm finds the best masks without overlaps. The rule here:
  1. Each class has the threshold t_c of its own rule. A voxel above several thresholds goes to the class with
     the largest p_c / t_c; a voxel above none is background.
  2. Independent voxels: a voxel goes to the class with the largest first-order gain (p_c - t_c) g_c, where
     t_c = D_c / 2, g_c = 2 / (k_c + mu_c) and D_c = 2 S_c / (k_c + mu_c) are those of the current masks.
     Repeated while the expected score rises.
  3. A case whose expected score is higher with the most probable class has that.
So the expected mean score over the foreground classes is never below that of argmax. It is exact in images of
up to `thresholds.MAX_EXACT_VOXELS` voxels, and of first order in larger ones.
"""

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from .decision import Decision
from .expected import expected_score

_MAX_ROUNDS = 10


def likeliest_class(
    prob: Float[Tensor, "N C *space"], threshold: float | None = None
) -> Integer[Tensor, "N *space"]:
    """The most probable class of each voxel, the lowest one at a tie; uint8 up to 256 classes.

    With a threshold, a voxel is foreground if its foreground classes together have a higher probability; it
    gets the most probable of them. For two classes, no threshold equals 0.5.
    """
    num_classes = prob.shape[1]
    first = 0 if threshold is None else 1
    highest = prob[:, first]
    dtype = torch.uint8 if num_classes <= 256 else torch.int64
    classes = torch.full_like(highest, first, dtype=dtype)
    # comparisons one class after the other are several times faster than argmax on a CPU
    for number in range(first + 1, num_classes):
        higher = prob[:, number] > highest
        classes.masked_fill_(higher, number)
        highest = torch.where(higher, prob[:, number], highest)
    if threshold is None:
        return classes
    foreground = prob[:, 1]
    for number in range(2, num_classes):
        foreground = foreground + prob[:, number]
    return torch.where(foreground > threshold, classes, 0)


def exclusive_masks(
    prob: Float[Tensor, "N C n"], limits: Float[Tensor, "N F 1"], rule: Decision, *, exact: bool
) -> Bool[Tensor, "N F n"]:
    """Masks of the F = C - 1 foreground classes; `limits`: the threshold of each, 1 for an empty class."""
    foreground = prob[:, 1:]
    ratio = torch.where(foreground > limits, foreground / limits.clamp_min(torch.finfo(prob.dtype).eps), 0)
    masks = _of_largest(ratio)
    score = _mean_score(foreground, masks, rule, exact)
    may_be_chosen = limits < 1
    if rule.rule in ("dice", "jaccard"):
        for _ in range(_MAX_ROUNDS):
            tried = _of_largest(_gains(foreground, masks, rule).masked_fill_(~may_be_chosen, 0))
            masks, score, improved = _better(masks, score, tried, foreground, rule, exact)
            if not improved:
                break
    classes = likeliest_class(prob)
    plain = torch.stack([classes == number for number in range(1, prob.shape[1])], 1)
    return _better(masks, score, plain, foreground, rule, exact)[0]


def _of_largest(merit: Float[Tensor, "N F n"]) -> Bool[Tensor, "N F n"]:
    """Each voxel to the class with the largest merit above 0, the lowest one at a tie."""
    largest, number = merit.max(1, keepdim=True)
    numbers = torch.arange(merit.shape[1], device=merit.device).view(1, -1, 1)
    return (number == numbers) & (largest > 0)


def _gains(
    foreground: Float[Tensor, "N F n"], masks: Bool[Tensor, "N F n"], rule: Decision
) -> Float[Tensor, "N F n"]:
    """First-order change of the score of each class if a voxel joins its mask."""
    size = masks.sum(2, keepdim=True)
    overlap = torch.where(masks, foreground, 0).sum(2, keepdim=True, dtype=torch.float64)
    total = size + foreground.sum(2, keepdim=True, dtype=torch.float64)
    total = total.clamp_min(torch.finfo(torch.float64).tiny)
    slope = 2 / total
    if rule.rule == "jaccard":
        # the derivative of J = D / (2 - D)
        slope = slope * 2 / (2 - 2 * overlap / total).square()
    return (foreground - (overlap / total).to(foreground.dtype)) * slope.to(foreground.dtype)


def _mean_score(foreground: Tensor, masks: Tensor, rule: Decision, exact: bool) -> Tensor:
    scores = expected_score(rule, foreground.flatten(0, 1), masks.flatten(0, 1), exact=exact)
    return scores.view(foreground.shape[:2]).mean(1)


def _better(
    masks: Tensor, score: Tensor, tried: Tensor, foreground: Tensor, rule: Decision, exact: bool
) -> tuple[Tensor, Tensor, bool]:
    """The masks with the higher expected score of each case, that score, and whether any case has changed."""
    new_score = _mean_score(foreground, tried, rule, exact)
    higher = new_score > score
    masks = torch.where(higher.view(-1, 1, 1), tried, masks)
    return masks, torch.where(higher, new_score, score), bool(higher.any())
