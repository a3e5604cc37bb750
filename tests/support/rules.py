"""All decision rules, and oracles that enumerate every set of voxels and every rater."""

from itertools import product

import numpy as np
import torch

from semidice.decisions import decide

RULES = ("argmax", "threshold:0.3", "dice", "jaccard", "nested", "mix:0.4")
OPTIMAL = RULES[2:]


def masks_of(text: str, prob, valid=None):
    return decide(prob, text, valid=valid)


def all_sets(num: int) -> np.ndarray:
    """Every subset of `num` voxels, (2^num, num) bool, the empty one first."""
    return (np.arange(2**num)[:, None] >> np.arange(num) & 1).astype(bool)


def dice_table(sets, raters):
    """Dice of each set against each rater; two empty ones have 1."""
    total = sets.sum(1)[:, None] + raters.sum(1)[None]
    return np.where(total > 0, 2 * (sets.astype(float) @ raters.T.astype(float)) / np.maximum(total, 1), 1.0)


def jaccard_table(sets, raters):
    dice = dice_table(sets, raters)
    return dice / (2 - dice)


def expected_scores(text: str, p: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Expected score of each set, by enumeration of all raters with their probabilities."""
    rule, _, weight = text.partition(":")
    raters = all_sets(len(p))
    independent = np.where(raters, p, 1 - p).prod(1)
    if rule in ("dice", "jaccard"):
        return {"dice": dice_table, "jaccard": jaccard_table}[rule](sets, raters) @ independent
    # a rater of each interval between two neighbouring probabilities
    edges = np.unique(np.concatenate([[0.0], p, [1.0]]))
    nested_raters = p[None] >= edges[1:, None]
    nested = dice_table(sets, nested_raters) @ np.diff(edges)
    if rule == "nested":
        return nested
    share = float(weight)
    return (1 - share) * (dice_table(sets, raters) @ independent) + share * nested


def random_prob(*shape: int, seed: int = 0, num_levels: int | None = None, power: float = 2.0):
    """Random probabilities; with `num_levels`, multiples of 1 / num_levels, so that ties occur."""
    prob = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(power)
    return prob if num_levels is None else (prob * num_levels).round() / num_levels


def patterns(num: int, values=(0.0, 0.3, 1.0)):
    """Every vector of `num` entries with these values."""
    return product(values, repeat=num)
