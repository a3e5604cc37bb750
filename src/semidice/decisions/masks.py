"""From probabilities to masks, or to a class map, by any rule.

p(x) is the share of raters who include voxel x. For one class, every rule takes the voxels with p above a
limit: among all sets of k voxels the likeliest ones have the best expected score, for independent voxels and
for nested raters. `expected` defines both, and finds the limit of each image. Half precision is computed in
float32; sums are float64.

No fast algorithm finds the best masks of exclusive classes. The rule here:
  1. Each class c has the limit of its own rule. A voxel above several limits goes to the class with the
     largest p / limit; a voxel above none is background.
  2. `dice` and `jaccard`: a voxel goes to the class with the largest first-order gain above 0 (`_gains`).
     Repeated while the expected mean score over the foreground classes of a case rises.
  3. A case whose expected score is higher with the most probable class has that.
So the score is never below that of argmax: exactly in images of up to `expected.MAX_EXACT_VOXELS` voxels, and
to first order in larger ones.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import check_prob, one_hot
from .decision import PLAIN, Decision
from .expected import MAX_EXACT_VOXELS, expected_score, thresholds

_MAX_ROUNDS = 10


def decide(
    prob: Tensor,
    decision: Decision | str = "argmax",
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
    exclusive: bool = True,
) -> Bool[Tensor, "N C *space"]:
    """The mask of each channel, by a rule such as `dice` or `threshold:0.4` (`Decision`).

    prob: (N, C, *space). One channel is the foreground. Several channels are exclusive classes whose
    probabilities sum to one, and channel 0 is the background: each valid voxel is in exactly one mask, and
    the expected mean score of the foreground classes is never below that of argmax. exclusive: False decides
    each channel on its own, for channels that may overlap. Voxels that are not valid are in no mask, and do
    not change the others.

    >>> decide(torch.tensor([[[0.9, 0.45, 0.1]]]), "dice")
    tensor([[[ True,  True, False]]])
    >>> decide(torch.tensor([[0.2, 0.5, 0.3]])), decide(torch.tensor([[0.5]]))
    (tensor([[False,  True, False]]), tensor([[False]]))
    """
    rule, prob = Decision.parse(decision), _read(prob, valid, exclusive)
    if prob.shape[1] > 1 and exclusive:
        masks = one_hot(_classes(prob, rule), prob.shape[1]).bool()
    else:
        masks = _channels(prob, rule)
    return masks if valid is None else masks & valid.unsqueeze(1)


def decide_classes(
    prob: Tensor, decision: Decision | str = "argmax", *, valid: Bool[Tensor, "N *space"] | None = None
) -> Integer[Tensor, "N *space"]:
    """The class of each voxel by a rule as in `decide`, uint8 up to 256 classes; 0 where it is not valid.

    One channel: class 1 is the foreground.

    >>> prob = torch.tensor([[[0.5, 0.6, 0.2], [0.1, 0.1, 0.5], [0.4, 0.3, 0.3]]])
    >>> decide_classes(prob), decide_classes(prob, "threshold:0.45")
    (tensor([[0, 0, 1]], dtype=torch.uint8), tensor([[2, 0, 1]], dtype=torch.uint8))
    """
    rule, prob = Decision.parse(decision), _read(prob, valid, exclusive=True)
    classes = _channels(prob, rule)[:, 0].to(torch.uint8) if prob.shape[1] == 1 else _classes(prob, rule)
    return classes if valid is None else classes.masked_fill(~valid, 0)


def _read(prob: Tensor, valid: Tensor | None, exclusive: bool) -> Tensor:
    """`prob` in float32 or float64, with 0 at voxels that are not valid; an error if it is wrong."""
    check_prob(prob, valid, exclusive=exclusive)
    if prob.dtype == torch.bool:
        raise ValueError("prob are masks, which are decided already; pass probabilities")
    prob = prob if valid is None else torch.where(valid.unsqueeze(1), prob, 0)
    return prob.to(torch.promote_types(prob.dtype, torch.float32))


@torch.no_grad()
def limits(p: Float[Tensor, "R n"], rules: Sequence[Decision]) -> Float[Tensor, "R D"]:
    """The limit of each row and rule: the mask is {p > limit}."""
    optimal = [rule for rule in rules if rule.rule not in PLAIN]
    found = dict(zip(optimal, thresholds(p, optimal).unbind(1), strict=True)) if optimal else {}
    for rule in rules:
        if rule.rule in PLAIN:
            found[rule] = p.new_full((len(p),), 0.5 if rule.parameter is None else rule.parameter)
    return torch.stack([found[rule] for rule in rules], 1)


def _channels(prob: Float[Tensor, "N C *space"], rule: Decision) -> Bool[Tensor, "N C *space"]:
    """The mask of each channel on its own."""
    flat = prob.reshape(prob.shape[0] * prob.shape[1], -1)
    return (flat > limits(flat, [rule])).view(prob.shape)


@torch.no_grad()
def _classes(prob: Float[Tensor, "N C *space"], rule: Decision) -> Integer[Tensor, "N *space"]:
    """The class map of two or more exclusive classes."""
    if rule.rule in PLAIN:
        return likeliest_class(prob, rule.parameter)
    flat = prob.flatten(2) if prob.ndim > 2 else prob.unsqueeze(2)
    foreground = flat[:, 1:]
    cuts = limits(foreground.flatten(0, 1), [rule]).view(*foreground.shape[:2], 1)
    # a cut can be 0
    ratio = torch.where(foreground > cuts, foreground / cuts.clamp_min(torch.finfo(prob.dtype).eps), 0)
    classes = _of_largest(ratio)
    if prob.shape[1] > 2:
        classes = _improved(rule, flat, classes, is_empty=cuts == 1)
    return classes.view(len(prob), *prob.shape[2:])


def _of_largest(merit: Float[Tensor, "N F n"]) -> Integer[Tensor, "N n"]:
    """The foreground class with the largest merit above 0, the lowest one at a tie; 0 where there is none."""
    largest, number = merit.max(1)
    dtype = torch.uint8 if merit.shape[1] < 256 else torch.int64
    return torch.where(largest > 0, number + 1, 0).to(dtype)


def _improved(
    rule: Decision, prob: Float[Tensor, "N C n"], classes: Integer[Tensor, "N n"], *, is_empty: Tensor
) -> Integer[Tensor, "N n"]:
    """The class map of each case after steps 2 and 3; is_empty: (N, F, 1), classes that get no voxel."""
    foreground = prob[:, 1:]
    score = _mean_score(rule, foreground, classes)

    def better(tried: Tensor) -> tuple[Tensor, Tensor, bool]:
        new_score = _mean_score(rule, foreground, tried)
        is_higher = new_score > score
        chosen = torch.where(is_higher.unsqueeze(1), tried, classes)
        return chosen, torch.where(is_higher, new_score, score), bool(is_higher.any())

    for _ in range(_MAX_ROUNDS if rule.rule in ("dice", "jaccard") else 0):
        gains = _gains(rule, foreground, _foreground_masks(classes, prob.shape[1]))
        classes, score, has_risen = better(_of_largest(gains.masked_fill_(is_empty, 0)))
        if not has_risen:
            break
    return better(likeliest_class(prob))[0]


def _gains(
    rule: Decision, foreground: Float[Tensor, "N F n"], masks: Bool[Tensor, "N F n"]
) -> Float[Tensor, "N F n"]:
    """First-order change of the score of each class if a voxel joins its mask.

    With k the size of the mask, S the sum of p in it, mu the sum of p everywhere, and D = 2S / (k + mu), it
    is (p - D / 2) 2 / (k + mu) for Dice. J = D / (2 - D) gives the factor 2 / (2 - D)^2 for Jaccard.
    """
    overlap = torch.where(masks, foreground, 0).sum(2, keepdim=True, dtype=torch.float64)
    total = masks.sum(2, keepdim=True) + foreground.sum(2, keepdim=True, dtype=torch.float64)
    total = total.clamp_min(torch.finfo(torch.float64).tiny)
    slope = 2 / total
    if rule.rule == "jaccard":
        slope = slope * 2 / (2 - 2 * overlap / total).square()
    return (foreground - (overlap / total).to(foreground.dtype)) * slope.to(foreground.dtype)


def _foreground_masks(classes: Integer[Tensor, "N n"], num_classes: int) -> Bool[Tensor, "N F n"]:
    return one_hot(classes, num_classes)[:, 1:].bool()


def _mean_score(
    rule: Decision, foreground: Float[Tensor, "N F n"], classes: Integer[Tensor, "N n"]
) -> Float[Tensor, " N"]:
    """The expected score of a class map, mean over the foreground classes."""
    num_classes, num_voxels = foreground.shape[1:]
    masks = _foreground_masks(classes, num_classes + 1)
    is_exact = num_voxels <= MAX_EXACT_VOXELS
    scores = expected_score(rule, foreground.flatten(0, 1), masks.flatten(0, 1), exact=is_exact)
    return scores.view(-1, num_classes).mean(1)


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
    return classes if threshold is None else torch.where(prob[:, 1:].sum(1) > threshold, classes, 0)
