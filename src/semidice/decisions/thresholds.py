"""The threshold whose set {p > t} has the best expected score, in each image and class.

Up to MAX_EXACT_VOXELS voxels with p above 0, the expected score of every set is exact, to about 1e-13. Voxels
with the same p are in a set together. In larger sets, with k voxels in the set, S the sum of p in it, mu the
sum of p everywhere, V_in and V_out the sums of p (1 - p) in the set and outside:
  independent   the best first-order score 2S / (k + mu), or S / (k + mu - S) for Jaccard. Both have the
                threshold D / 2, half the best first-order Dice. The exact score minus the first-order one is
                  for Dice      between -2 V_in / ((k+1)(k+mu)) and V_out / ((k+1)(k+mu)),
                  for Jaccard   between 0 and S V_out / (k (k+1) (k+mu-S)).
  nested        the best of NUM_LEVELS thresholds: its expected Dice is at most 4 / NUM_LEVELS below the best.
  mix           the best of NUM_LEVELS thresholds, with the first-order Dice for independent voxels.
docs/theory.md has the proofs. On a GPU the number of voxels that remain is read a few times per image.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from .decision import Decision
from .expected import (
    NUM_LEVELS,
    dice_of_first,
    empty_probability,
    jaccard_of_first,
    level_counts,
    level_weights,
    mixture,
    nested_dice_of_likeliest,
    nested_dice_of_volumes,
)

MAX_EXACT_VOXELS = 4096
# Voxels below this total probability change an expected score by less than it.
_NEGLIGIBLE_MASS = 1e-13
# expected scores are sums of many terms in float64
_ROUNDING = 1e-12
# exp(-50) is below the expected score of any other set of 2^32 voxels or fewer
_MAX_MEAN_OF_EMPTY = 50.0


def thresholds(p: Float[Tensor, "R n"], rules: Sequence[Decision]) -> Float[Tensor, "R D"]:
    """The threshold t of each row and rule: the best set is {p > t}, the empty one for t = 1."""
    if p.shape[1] <= MAX_EXACT_VOXELS:
        return _exact_thresholds(p, rules)
    negligible = _NEGLIGIBLE_MASS / p.shape[1]
    found = []
    # rows are long here: one after the other needs less memory, and takes no longer
    for row in p:
        likely = _sample(row)
        # a sample with too many likely voxels saves the search in the whole row
        if int((likely > negligible).sum()) <= MAX_EXACT_VOXELS:
            likely = row[row > negligible]
        if len(likely) <= MAX_EXACT_VOXELS:
            found.append(_exact_thresholds(likely[None], rules)[0])
        else:
            found.append(_large(row, rules))
    return torch.stack(found)


def _exact_thresholds(p: Float[Tensor, "R m"], rules: Sequence[Decision]) -> Float[Tensor, "R D"]:
    if p.shape[1] == 0:
        return p.new_ones(len(p), len(rules))
    ordered = p.sort(1, descending=True).values
    below = F.pad(ordered[:, 1:], (0, 1))
    # voxels with the same p are in the set together, and those with p = 0 are not
    is_set = F.pad(ordered > below, (1, 0), value=True)
    limits = F.pad(below, (1, 0), value=1.0)
    independent = cache(partial(dice_of_first, ordered.double()))
    nested = cache(partial(nested_dice_of_likeliest, ordered.double()))
    found = []
    for rule in rules:
        if rule.rule == "jaccard":
            scores = jaccard_of_first(ordered.double())
        else:
            scores = mixture(rule, independent, nested)
        best = _smallest_best(torch.where(is_set, scores, -1))
        found.append(limits.gather(1, best.unsqueeze(1)))
    return torch.cat(found, 1)


def _large(p: Float[Tensor, " n"], rules: Sequence[Decision]) -> Float[Tensor, " D"]:
    """Thresholds of one row with many likely voxels: of first order, or from levels."""
    mean = _sum(p)
    is_rare = bool(mean < _MAX_MEAN_OF_EMPTY)
    empty = empty_probability(p[None])[0] if is_rare else mean.new_zeros(())
    first_order = cache(partial(_first_order_dice, p, mean))
    levels = cache(partial(_score_levels, p, mean, empty))
    found = []
    for rule in rules:
        if rule.rule in ("dice", "jaccard"):
            dice = first_order()
            score = dice if rule.rule == "dice" else dice / (2 - dice)
            found.append(torch.where(empty < score, _round_down(dice / 2, p.dtype), 1))
        else:
            scores = mixture(rule, *levels())
            best = _smallest_best(scores[None])[0]
            found.append(torch.where(best > 0, (len(scores) - 1 - best) / NUM_LEVELS, 1).to(p.dtype))
    return torch.stack(found)


def _smallest_best(scores: Float[Tensor, "R m"]) -> Int64[Tensor, " R"]:
    """Number of the first score that equals the best one up to rounding; larger sets come later."""
    return (scores >= scores.amax(1, keepdim=True) - _ROUNDING).int().argmax(1)


def _first_order_dice(p: Float[Tensor, " n"], mean: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The largest 2S / (k + mean) over the sets {p > t}, for the t that is half of it.

    Dinkelbach's iteration: the set {p > t} has the first-order Dice 2 t' with t' >= t until t is the best. So
    t only rises, and voxels that are once out stay out.
    """
    start, sample = p.new_zeros(()), _sample(p)
    if len(sample) < len(p):
        # slightly below the threshold of the sample, so that the first set is small and complete
        start = 0.45 * _first_order_dice(sample, _sum(sample))
    inside = p[p > start]
    best = _ratio(inside, mean)
    if best / 2 < start:
        inside = p[p > best / 2]
        best = _ratio(inside, mean)
    while True:
        smaller = inside[inside > best / 2]
        if len(smaller) == len(inside):
            return best
        inside, best = smaller, _ratio(smaller, mean)


def _ratio(inside: Float[Tensor, " k"], mean: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """First-order Dice 2S / (k + mean) of a set; 0 if there is nothing."""
    total = (len(inside) + mean).clamp_min(torch.finfo(torch.float64).tiny)
    return 2 * _sum(inside) / total


def _sample(p: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
    """Every q-th value, up to 2^16 of them; all values of a row that is not longer."""
    return p[:: max(1, len(p) >> 15)]


def _sum(p: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Float64 sum; on a CPU in blocks, because a sum with another type than its input is slow there."""
    if p.device.type != "cpu":
        return p.sum(dtype=torch.float64)
    return torch.stack([block.double().sum() for block in p.split(2**15)]).sum()


def _round_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` up to `value`: p > it means p > value for each p of that type."""
    rounded = value.to(dtype)
    return torch.where(rounded.double() > value, torch.nextafter(rounded, rounded.new_zeros(())), rounded)


def _score_levels(
    p: Float[Tensor, " n"], mean: Float[Tensor, ""], empty: Float[Tensor, ""]
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Expected Dice, independent and nested, of {p > b / NUM_LEVELS}, first the empty set, then growing ones.

    mean: the sum of p. empty: the probability that all voxels are 0.
    """
    largest = p.amax()
    counts = level_counts(p)
    # growing sets: the highest occupied level first
    volumes = counts[: int((counts > 0).sum())].flip(0).double()
    weights = level_weights(len(volumes), largest).flip(0)

    def independent() -> Tensor:
        levels = torch.arange(len(volumes), device=p.device).flip(0) / NUM_LEVELS
        # sum of p above t = t V(t) + the integral of V above t, by the same trapezoidal rule
        half = volumes / (2 * NUM_LEVELS)
        half[-1] = 0
        sums = levels * volumes + (weights * volumes).cumsum(0) - half
        return torch.cat([empty[None], 2 * sums / (volumes + mean)])

    def nested() -> Tensor:
        scores = nested_dice_of_volumes(volumes[None], weights[None])[0]
        return torch.cat([1 - largest.double()[None], scores])

    return cache(independent), cache(nested)
