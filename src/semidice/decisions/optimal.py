"""Masks with the best expected score, from calibrated probabilities.

p(x) is the share of raters who include voxel x. Every rule for one class takes the voxels with p above a
threshold, which it finds in each image: among all sets of k voxels the likeliest ones have the best expected
score, for independent voxels and for nested raters (`expected` defines both).

Up to MAX_EXACT_VOXELS voxels with p above 0 the expected score of each k is exact, to about 1e-13. In larger
sets, with mu = sum p, S = the sum of p in the set, and v = p (1 - p):
  independent   the best first-order score 2S / (k + mu), or S / (k + mu - S) for Jaccard. Both choose the
                voxels with p above half the best first-order Dice. The exact score minus its first-order form
                is, for Dice, from -2 V_in / ((k+1)(k+mu)) to V_out / ((k+1)(k+mu)), and for Jaccard from 0 to
                S V_out / (k(k+1)(k+mu-S)); V_in and V_out are the sums of v in the set and outside.
  nested        the best of 2^14 thresholds; its expected Dice is at most 4 / 2^14 below the best one.
Half precision is computed in float32. Sums are float64.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..arrays import check_prediction, check_valid, one_hot
from .exclusive import exclusive_masks
from .expected import (
    NUM_LEVELS,
    dice_of_likeliest,
    empty_probability,
    jaccard_of_likeliest,
    level_counts,
    level_weights,
    nested_dice_of_likeliest,
    nested_dice_of_volumes,
)
from .masks import decided_classes
from .objective import Objective

MAX_EXACT_VOXELS = 4096
# Voxels below this total probability change an expected score by less than it.
_NEGLIGIBLE_MASS = 1e-13
# expected scores are sums of many terms in float64
_ROUNDING = 1e-12
# exp(-50) is below the expected score of any other set of 2^32 voxels or fewer
_MAX_MEAN_OF_EMPTY = 50.0


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
    never below that of `argmax_mask` (`exclusive` has the rule). The module has the size of the error in sets
    of more than MAX_EXACT_VOXELS voxels.

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
        masks = flat > thresholds(flat.flatten(0, 1), objective).view(*flat.shape[:2], 1)
        return masks.view(prob.shape)
    foreground = flat[:, 1:]
    limits = thresholds(foreground.reshape(-1, flat.shape[2]), objective).view(*foreground.shape[:2], 1)
    if flat.shape[1] == 2:
        masks = foreground > limits
    else:
        exact = flat.shape[2] <= MAX_EXACT_VOXELS
        masks = exclusive_masks(flat, limits, objective, exact=exact)
    masks = torch.cat([~masks.any(1, keepdim=True), masks], 1).view(prob.shape)
    return _in_valid(masks, valid)


def thresholds(p: Float[Tensor, "R n"], objective: Objective) -> Float[Tensor, " R"]:
    """The threshold t of each row, in its dtype: its best set is {p > t}, and 1 stands for the empty set."""
    if p.shape[1] <= MAX_EXACT_VOXELS:
        return _exact_thresholds(p, objective)
    negligible = _NEGLIGIBLE_MASS / p.shape[1]
    of_large = _LARGE[objective.name]
    found = []
    # rows are long here: one after the other needs less memory, and takes no longer
    for row in p:
        likely = row > negligible
        small = int(likely.sum()) <= MAX_EXACT_VOXELS
        found.append(
            _exact_thresholds(row[likely][None], objective)[0] if small else of_large(row, objective)
        )
    return torch.stack(found)


def _exact_thresholds(p: Float[Tensor, "R m"], objective: Objective) -> Float[Tensor, " R"]:
    if p.shape[1] == 0:
        return p.new_ones(len(p))
    ordered = p.sort(1, descending=True).values
    scores = _exact_scores(ordered.double(), objective)
    below = torch.nn.functional.pad(ordered[:, 1:], (0, 1))
    # voxels with the same p are in the set together, and those with p = 0 are not
    scores[:, 1:].masked_fill_(ordered <= below, -1)
    limits = torch.cat([torch.ones_like(ordered[:, :1]), below], 1)
    return limits.gather(1, _smallest_best(scores).unsqueeze(1))[:, 0]


def _exact_scores(ordered: Float[Tensor, "R m"], objective: Objective) -> Float[Tensor, "R m+1"]:
    if objective.name == "jaccard":
        return jaccard_of_likeliest(ordered)
    return objective.mixture(lambda: dice_of_likeliest(ordered), lambda: nested_dice_of_likeliest(ordered))


def _smallest_best(scores: Float[Tensor, "R m"]) -> Int64[Tensor, " R"]:
    """Number of the first score that equals the best one up to rounding; larger sets come later."""
    return (scores >= scores.amax(1, keepdim=True) - _ROUNDING).int().argmax(1)


def _first_order_threshold(p: Float[Tensor, " n"], objective: Objective) -> Float[Tensor, ""]:
    """Half the best first-order Dice, or 1 if the empty set is better.

    Dinkelbach's iteration: the set {p > t} has the first-order Dice 2 t' with t' >= t until t is the best. So
    t only rises, and voxels that are once out stay out.
    """
    mean = p.sum(dtype=torch.float64)
    # a sample gives a threshold slightly below the best, so that the first set is small and complete
    start = 0.45 * _best_ratio(p[:: max(1, len(p) >> 15)], 0.0)
    best = _best_ratio(p, start, mean)
    if mean < _MAX_MEAN_OF_EMPTY:
        score = best if objective.name == "dice" else best / (2 - best)
        if empty_probability(p[None])[0] >= score:
            return p.new_ones(())
    return _round_down(best / 2, p.dtype)


def _best_ratio(p: Tensor, start: float | Tensor, mean: Tensor | None = None) -> Tensor:
    """Largest 2S / (k + mean) over the sets {p > t}; `start` is any threshold."""
    mean = p.sum(dtype=torch.float64) if mean is None else mean
    tiny = torch.finfo(torch.float64).tiny
    inside = p[p > start]
    best = 2 * inside.sum(dtype=torch.float64) / (len(inside) + mean).clamp_min(tiny)
    if best / 2 < start:
        inside = p[p > best / 2]
    while True:
        ratio = 2 * inside.sum(dtype=torch.float64) / (len(inside) + mean).clamp_min(tiny)
        smaller = inside[inside > ratio / 2]
        if len(smaller) == len(inside):
            return ratio
        inside = smaller


def _round_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` up to `value`: p > it means p > value for each p of that type."""
    rounded = value.to(dtype)
    return torch.where(rounded.double() > value, torch.nextafter(rounded, rounded.new_zeros(())), rounded)


def _level_threshold(p: Float[Tensor, " n"], objective: Objective) -> Float[Tensor, ""]:
    """The best of the thresholds b / NUM_LEVELS, or 1 if the empty set is better."""
    largest = p.amax()
    counts = level_counts(p)
    num_occupied = int((counts > 0).sum())
    volumes = counts[:num_occupied].double()[None]
    weights = level_weights(num_occupied, largest)
    mean = p.sum(dtype=torch.float64)

    def independent() -> Tensor:
        levels = torch.arange(num_occupied, device=p.device) / NUM_LEVELS
        # sum of p above t = t V(t) + the integral of V above t, by the same trapezoidal rule
        above = (weights * volumes).flip(1).cumsum(1).flip(1)
        half = volumes / (2 * NUM_LEVELS)
        half[:, 0] = 0
        sums = levels * volumes + above - half
        empty = empty_probability(p[None]) if mean < _MAX_MEAN_OF_EMPTY else mean.new_zeros(1)
        return torch.cat([empty[None], 2 * sums / (volumes + mean)], 1)

    def nested() -> Tensor:
        scores = nested_dice_of_volumes(volumes.flip(1), weights.flip(0)[None]).flip(1)
        return torch.cat([(1 - largest.double()).view(1, 1), scores], 1)

    scores = objective.mixture(independent, nested)
    # from here on in the order of growing sets
    best = _smallest_best(torch.cat([scores[:, :1], scores[:, 1:].flip(1)], 1))[0]
    return torch.where(best > 0, (num_occupied - best) / NUM_LEVELS, 1).to(p.dtype)


_LARGE: dict[str, Callable[[Tensor, Objective], Tensor]] = {
    "dice": _first_order_threshold,
    "jaccard": _first_order_threshold,
    "nested": _level_threshold,
    "mix": _level_threshold,
}
