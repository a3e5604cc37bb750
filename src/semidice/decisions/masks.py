"""From probabilities to masks, or to a class map, by any rule.

p(x) is the share of raters who include voxel x. For one class, every rule takes the voxels with p above a
limit: among all sets of k voxels the likeliest ones have the best expected score, for independent voxels and
for nested raters (`expected` defines both). `thresholds` finds the limit of each image, `exclusive` assigns
voxels that several classes want. Half precision is computed in float32; sums are float64.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import check_prob, one_hot
from .decision import PLAIN, Decision
from .exclusive import exclusive_masks, likeliest_class
from .thresholds import MAX_EXACT_VOXELS, thresholds


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
    rule = Decision.parse(decision)
    prob = _read(prob, valid, exclusive)
    masks = decided(prob, rule, exclusive=exclusive)
    return masks if valid is None else masks & valid.unsqueeze(1)


def decide_classes(
    prob: Tensor,
    decision: Decision | str = "argmax",
    *,
    valid: Bool[Tensor, "N *space"] | None = None,
) -> Integer[Tensor, "N *space"]:
    """The class of each voxel by a rule as in `decide`, uint8 up to 256 classes; 0 where it is not valid.

    One channel: class 1 is the foreground.

    >>> prob = torch.tensor([[[0.5, 0.6, 0.2], [0.1, 0.1, 0.5], [0.4, 0.3, 0.3]]])
    >>> decide_classes(prob), decide_classes(prob, "threshold:0.45")
    (tensor([[0, 0, 1]], dtype=torch.uint8), tensor([[2, 0, 1]], dtype=torch.uint8))
    """
    rule = Decision.parse(decision)
    prob = _read(prob, valid, exclusive=True)
    classes = decided(prob, rule)[:, 0].to(torch.uint8) if prob.shape[1] == 1 else _classes(prob, rule)
    return classes if valid is None else classes.masked_fill(~valid, 0)


def decided(
    prob: Float[Tensor, "N C *space"], rule: Decision, *, exclusive: bool = True
) -> Bool[Tensor, "N C *space"]:
    """`decide` of checked probabilities that are all valid."""
    if prob.shape[1] > 1 and exclusive:
        return one_hot(_classes(prob, rule), prob.shape[1]).bool()
    flat = prob.reshape(prob.shape[0] * prob.shape[1], -1)
    return (flat > limits(flat, [rule])).view(prob.shape)


@torch.no_grad()
def limits(p: Float[Tensor, "R n"], rules: Sequence[Decision]) -> Float[Tensor, "R D"]:
    """The limit of each row and rule: the mask is {p > limit}."""
    optimal = [rule for rule in rules if rule.rule not in PLAIN]
    found = dict(zip(optimal, thresholds(p, optimal).unbind(1), strict=True)) if optimal else {}
    for rule in rules:
        if rule.rule in PLAIN:
            found[rule] = p.new_full((len(p),), 0.5 if rule.parameter is None else rule.parameter)
    return torch.stack([found[rule] for rule in rules], 1)


@torch.no_grad()
def _classes(prob: Float[Tensor, "N C *space"], rule: Decision) -> Integer[Tensor, "N *space"]:
    """The class map of two or more exclusive classes."""
    if rule.rule in PLAIN:
        return likeliest_class(prob, rule.parameter)
    flat = prob.reshape(*prob.shape[:2], -1)
    foreground = flat[:, 1:]
    cuts = limits(foreground.reshape(-1, flat.shape[2]), [rule]).view(*foreground.shape[:2], 1)
    if flat.shape[1] == 2:
        masks = foreground > cuts
    else:
        masks = exclusive_masks(flat, cuts, rule, exact=flat.shape[2] <= MAX_EXACT_VOXELS)
    dtype = torch.uint8 if flat.shape[1] <= 256 else torch.int64
    numbers = torch.arange(1, flat.shape[1], device=prob.device, dtype=dtype).view(1, -1, 1)
    return (masks * numbers).amax(1).view(len(prob), *prob.shape[2:])


def _read(prob: Tensor, valid: Tensor | None, exclusive: bool) -> Tensor:
    """`prob` in float32 or float64, with 0 at voxels that are not valid; an error if it is wrong."""
    check_prob(prob, valid, exclusive=exclusive)
    if prob.dtype == torch.bool:
        raise ValueError("prob are masks, which are decided already; pass probabilities")
    prob = prob if valid is None else torch.where(valid.unsqueeze(1), prob, 0)
    return prob.to(torch.promote_types(prob.dtype, torch.float32))
