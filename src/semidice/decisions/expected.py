"""Expected Dice and Jaccard of sets of voxels, if p is the share of raters who include each; the best set.

Two couplings of the voxels of a rater have a closed form. Z is the number of voxels of the rater, I of those
in the set, k the size of the set, R = Z - I:
  independent   each voxel Y_i ~ Bernoulli(p_i) on its own: E[2I / (k + Z)] and E[I / (k + R)]
  nested        one offset t ~ U(0, 1) for all voxels, the rater's mask is M_t = {p >= t}
A set and a rater that are both empty have the score 1, so the empty set scores P(the rater is empty).

Independent voxels need no table of Poisson-binomial probabilities. With 1/x = sum_q w_q exp(-s_q x),

    E[1 / (k + Z)] = sum_q w_q exp(-s_q k) prod_i (1 - p_i + p_i exp(-s_q)),

a sum of positive terms, so nothing cancels. The same sum makes the kernel k / (k + j) of nested raters
separable. Everything is float64.

The best sets are {p > t}. Up to MAX_EXACT_VOXELS voxels with p above 0, the expected score of every set is
exact, to about 1e-13. Voxels with the same p are in a set together. In larger sets, with k voxels in the set,
S the sum of p in it, mu the sum of p everywhere:
  independent   the best first-order score 2S / (k + mu), or S / (k + mu - S) for Jaccard. Both have the
                threshold D / 2, half the best first-order Dice.
  nested        the best of NUM_LEVELS thresholds: its expected Dice is at most 4 / NUM_LEVELS below the best.
  mix           the best of NUM_LEVELS thresholds, with the first-order Dice for independent voxels.
docs/theory.md, section 7, has the derivation and the error bounds. On a GPU the number of voxels that remain
is read a few times per image.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from .decision import Decision

# The trapezoidal rule with this step has a relative error of 2 |Γ(1 + 2πi / step)| < 2e-14.
_STEP = 0.28
# exp(-36) is the rounding error of 1: larger nodes add nothing, and 1 - p + p exp(-s) would be 0 at p = 1
_LARGEST_NODE = 36.0
# elements of one temporary array
_BLOCK_ELEMENTS = 2**21
# Thresholds that are compared in large sets: multiples of 1 / NUM_LEVELS. A power of two keeps them exact.
NUM_LEVELS = 2**12
MAX_EXACT_VOXELS = 4096
# Voxels below this total probability change an expected score by less than it.
_NEGLIGIBLE_MASS = 1e-13
# expected scores are sums of many terms in float64
_ROUNDING = 1e-12


@lru_cache(maxsize=32)
def reciprocal_nodes(max_log2: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes s and weights w with sum_q w_q exp(-s_q x) = 1/x to a relative 5e-14, for x from 1 to 2^max_log2.

    The trapezoidal rule of 1/x = ∫ exp(u - x e^u) du. Below the lowest node, where x e^u < 1e-5, the infinite
    rest of the sum is a geometric series: one node with its weight and mean replaces it.
    """
    num = math.ceil((math.log(1e5 * _LARGEST_NODE) + max_log2 * math.log(2)) / _STEP) + 1
    nodes = [_LARGEST_NODE * math.exp(-_STEP * number) for number in range(num)]
    weights = [_STEP * node for node in nodes]
    rest = nodes[-1] / (math.exp(_STEP) + 1)
    return (*nodes, rest), (*weights, weights[-1] / math.expm1(_STEP))


def _blocks(largest: float, num_elements: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes and weights for x up to `largest`, (q, 1, 1) each, few enough for arrays of `num_elements`."""
    nodes, weights = reciprocal_nodes(max(1, math.ceil(math.log2(largest))))
    size = max(1, _BLOCK_ELEMENTS // num_elements)
    for start in range(0, len(nodes), size):
        yield tuple(  # type: ignore[misc]
            torch.tensor(values[start : start + size], dtype=torch.float64, device=device).view(-1, 1, 1)
            for values in (nodes, weights)
        )


def _generating(p: Tensor, s: Tensor) -> Tensor:
    """E[exp(-s Y)] = 1 - p + p exp(-s) of each voxel, (q, rows, m)."""
    return torch.addcmul(torch.ones_like(s), p, torch.expm1(-s))


def _with_empty(empty: Tensor, scores: Tensor) -> Tensor:
    return torch.cat([empty.unsqueeze(1), scores], 1)


def empty_probability(p: Float[Tensor, "R m"]) -> Float[Tensor, " R"]:
    """Probability that independent voxels are all 0: the expected score of the empty set."""
    return torch.log1p(-p).sum(1, dtype=torch.float64).exp()


def dice_of_first(p: Float[Tensor, "R m"]) -> Float[Tensor, "R m+1"]:
    """Expected Dice of the k first voxels for k = 0 ... m, in any order; independent voxels."""
    k = torch.arange(1, p.shape[1] + 1, dtype=torch.float64, device=p.device)
    scores = torch.zeros_like(p)
    for s, w in _blocks(2 * p.shape[1] + 2, p.numel(), p.device):
        of_voxel = _generating(p, s)
        of_all = of_voxel.log().sum(2, keepdim=True).exp()
        share = (p / of_voxel).cumsum(2)
        scores += (share * torch.exp(-s * (k + 1)) * (2 * w * of_all)).sum(0)
    return _with_empty(empty_probability(p), scores)


def jaccard_of_first(p: Float[Tensor, "R m"]) -> Float[Tensor, "R m+1"]:
    """Expected Jaccard of the k first voxels for k = 0 ... m, in any order; independent voxels.

    The union k + R does not depend on the voxels in the set, so E[I / (k + R)] = E[I] E[1 / (k + R)].
    """
    k = torch.arange(1, p.shape[1] + 1, dtype=torch.float64, device=p.device)
    reciprocal = torch.zeros_like(p)
    for s, w in _blocks(2 * p.shape[1] + 2, p.numel(), p.device):
        logs = _generating(p, s).log().cumsum(2)
        reciprocal += (w * torch.exp(-s * k + logs[..., -1:] - logs)).sum(0)
    return _with_empty(empty_probability(p), p.cumsum(1) * reciprocal)


def nested_dice_of_volumes(
    volumes: Float[Tensor, "R m"], weights: Float[Tensor, "R m"]
) -> Float[Tensor, "R m"]:
    """Expected Dice of each volume against raters with these volumes: sum_j w_j 2 min(v, v_j) / (v + v_j).

    volumes: increasing, 1 or more. weights: the share of raters with each volume.
    """
    scores = torch.zeros_like(volumes)
    largest = 2 * float(volumes.max())
    for s, w in _blocks(largest, volumes.numel(), volumes.device):
        decay = torch.exp(-s * volumes)
        mass = weights * decay
        larger = mass.sum(2, keepdim=True) - mass.cumsum(2)
        up_to = (mass * volumes).cumsum(2)
        scores += (2 * w * decay * (volumes * larger + up_to)).sum(0)
    return scores


def nested_dice_of_likeliest(p: Float[Tensor, "R m"]) -> Float[Tensor, "R m+1"]:
    """Expected Dice of the k first voxels for k = 0 ... m, nested raters; p is sorted, largest first."""
    volumes = torch.arange(1, p.shape[1] + 1, dtype=torch.float64, device=p.device).expand_as(p)
    weights = p - F.pad(p[:, 1:], (0, 1))
    return _with_empty(1 - p[:, 0], nested_dice_of_volumes(volumes, weights))


def level_weights(num_occupied: int, largest: Tensor) -> Float[Tensor, " L"]:
    """Share of the offsets t that belongs to each occupied level b / NUM_LEVELS, by the trapezoidal rule.

    |M_t| falls from the volume of level b to that of level b + 1 while t crosses the bin between them. The
    bin of the largest p ends there; raters with a larger t are empty.
    """
    weights = torch.full((num_occupied,), 1 / NUM_LEVELS, dtype=torch.float64, device=largest.device)
    weights[-1] = largest.double() - (num_occupied - 1) / NUM_LEVELS
    ends = weights.clone()
    # the top bin has the volume of its level throughout: there is no level above
    halves = weights[:-1] / 2
    ends[:-1] -= halves
    ends[1:] += halves
    return ends


def mixture(rule: Decision, independent: Callable[[], Tensor], nested: Callable[[], Tensor]) -> Tensor:
    """What a rule maximises, (1 - W) independent + W nested; a part without weight is not computed."""
    weight = rule.parameter or float(rule.rule == "nested")
    if weight in (0, 1):
        return nested() if weight else independent()
    return (1 - weight) * independent() + weight * nested()


def expected_score(
    rule: Decision, p: Float[Tensor, "R n"], mask: Bool[Tensor, "R n"], *, exact: bool
) -> Float[Tensor, " R"]:
    """What a rule maximises, of any masks, float64; if not `exact`, of first order for independent voxels."""
    return mixture(rule, partial(_independent, rule, p, mask, exact), partial(_nested, p, mask))


def _independent(rule: Decision, p: Tensor, mask: Tensor, exact: bool) -> Float[Tensor, " R"]:
    """Expected Dice or Jaccard; of first order 2 E[I] / (k + E[Z]) and E[I] / (k + E[R])."""
    size = mask.sum(1)
    if exact:
        # the first k voxels of this order are the mask
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        score_of_first = jaccard_of_first if rule.rule == "jaccard" else dice_of_first
        return score_of_first(p.double().gather(1, order)).gather(1, size.unsqueeze(1)).squeeze(1)
    overlap = torch.where(mask, p, 0).sum(1, dtype=torch.float64)
    total = size + p.sum(1, dtype=torch.float64)
    if rule.rule == "jaccard":
        scores = overlap / (total - overlap).clamp_min(1)
    else:
        scores = 2 * overlap / total.clamp_min(1)
    return torch.where(size > 0, scores, empty_probability(p))


def _nested(p: Float[Tensor, "R n"], mask: Bool[Tensor, "R n"]) -> Float[Tensor, " R"]:
    ordered, order = p.double().sort(dim=1, descending=True)
    weights = ordered - F.pad(ordered[:, 1:], (0, 1))
    size, common = mask.sum(1), mask.gather(1, order).cumsum(1)
    volumes = torch.arange(1, p.shape[1] + 1, device=p.device)
    scores = (weights * 2 * common / (size.unsqueeze(1) + volumes)).sum(1)
    return torch.where(size > 0, scores, 1 - ordered[:, 0])


def thresholds(p: Float[Tensor, "R n"], rules: Sequence[Decision]) -> Float[Tensor, "R D"]:
    """The threshold t of each row and rule: the best set is {p > t}, the empty one for t = 1."""
    if p.shape[1] <= MAX_EXACT_VOXELS:
        return _exact_thresholds(p, rules)
    found = []
    # rows are long here: one after the other needs less memory, and takes no longer
    for row in p:
        likely = row[row > _NEGLIGIBLE_MASS / p.shape[1]]
        is_small = len(likely) <= MAX_EXACT_VOXELS
        found.append(_exact_thresholds(likely[None], rules)[0] if is_small else _large(row, rules))
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
    mean = p.sum(dtype=torch.float64)
    empty = empty_probability(p[None])[0]
    first_order = cache(partial(_first_order_dice, p, mean))
    levels = cache(partial(_score_levels, p, mean, empty))
    found = []
    for rule in rules:
        if rule.rule in ("dice", "jaccard"):
            dice = first_order()
            score = dice if rule.rule == "dice" else dice / (2 - dice)
            # the largest number of the type up to dice / 2: p > it means p > dice / 2
            limit = (dice / 2).to(p.dtype)
            limit = torch.where(limit.double() > dice / 2, torch.nextafter(limit, limit.new_zeros(())), limit)
            found.append(torch.where(empty < score, limit, 1))
        else:
            scores = mixture(rule, lambda: levels()[0], lambda: levels()[1])
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
    inside = p[p > 0]
    while True:
        total = (len(inside) + mean).clamp_min(torch.finfo(torch.float64).tiny)
        best = 2 * inside.sum(dtype=torch.float64) / total
        smaller = inside[inside > best / 2]
        if len(smaller) == len(inside):
            return best
        inside = smaller


def _score_levels(
    p: Float[Tensor, " n"], mean: Float[Tensor, ""], empty: Float[Tensor, ""]
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Expected Dice, independent and nested, of {p > b / NUM_LEVELS}, first the empty set, then growing ones.

    mean: the sum of p. empty: the probability that all voxels are 0.
    """
    largest = p.amax()
    # growing sets: the highest occupied level first
    counts = torch.bincount((p * NUM_LEVELS).ceil_().int(), minlength=NUM_LEVELS + 1)[1:].flip(0).cumsum(0)
    volumes = counts[counts > 0].double()
    weights = level_weights(len(volumes), largest).flip(0)
    levels = torch.arange(len(volumes), device=p.device).flip(0) / NUM_LEVELS
    # sum of p above t = t V(t) + the integral of V above t, by the same trapezoidal rule
    half = volumes / (2 * NUM_LEVELS)
    half[-1] = 0
    sums = levels * volumes + (weights * volumes).cumsum(0) - half
    nested = nested_dice_of_volumes(volumes[None], weights[None])[0]
    independent = 2 * sums / (volumes + mean)
    return torch.cat([empty[None], independent]), torch.cat([1 - largest.double()[None], nested])
