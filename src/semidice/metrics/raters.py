"""Scores against raters: the distance of sampled masks to those of the raters, and the Dice to each rater.

    GED^2 = 2 E d(S, Y) - E d(S, S') - E d(Y, Y'),      d = 1 - IoU, S, S' samples, Y, Y' raters

(Kohl et al., 2018.) The means are over all pairs and include each mask with itself. So the distance is never
negative, and 0 exactly when samples and raters are the same masks with the same frequencies.
Masks are bool (N, R, *space), or class maps of integers with `num_classes`; d is then the mean over the
foreground classes, without those that are not `drawn` (`scores.foreground_mean`). `present`, bool (N, R), is
False for a rater who did not look at the case.
Left out: agreement of the raters with each other (`agreement`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import check_tensor, check_valid, describe, nan_without_voxels
from ..options import Count, check_value
from ..overlap import OverlapStats, tversky_index
from .checks import check_prob
from .scores import counted_classes, dice_score, foreground_mean

# voxels of a chunk: small enough that products of float32 masks are exact and copies are small
_CHUNK = 1 << 16


def generalised_energy_distance(
    samples: Tensor,
    masks: Tensor,
    *,
    num_classes: int | None = None,
    present: Tensor | None = None,
    valid: Tensor | None = None,
    drawn: Sequence[bool] | None = None,
) -> Float[Tensor, " N"]:
    """Squared generalised energy distance of each case's sampled masks (N, S, *space) to the raters' masks.

    In [0, 2]; lower is better. Two empty masks have distance 0. A case without a valid voxel has NaN.
    `level_masks` makes samples from probabilities; one decided mask is one sample.

    >>> raters = torch.tensor([[[True, True], [True, False]]])
    >>> generalised_energy_distance(raters, raters), generalised_energy_distance(raters[:, :1], raters)
    (tensor([0.]), tensor([0.2500]))
    """
    check_masks("samples", samples, num_classes)
    check_masks("masks", masks, num_classes)
    if samples.shape[:1] + samples.shape[2:] != masks.shape[:1] + masks.shape[2:]:
        raise ValueError(
            f"samples (N, S, *space) and masks (N, R, *space) differ in cases or space: "
            f"got {describe(samples)} and {describe(masks)}"
        )
    present = check_present(masks, present)
    if valid is not None:
        check_valid(masks, valid)
    classes = counted_classes(2 if num_classes is None else num_classes, drawn)
    distances = []
    for case in range(len(masks)):
        sampled = samples[case].flatten(1)
        of_raters = masks[case][present[case]].flatten(1)
        if valid is not None:
            counted = valid[case].flatten()
            sampled, of_raters = sampled[:, counted], of_raters[:, counted]
        cross, within_samples, within_raters = (
            _mean_distance(first, second, classes)
            for first, second in ((sampled, of_raters), (sampled, sampled), (of_raters, of_raters))
        )
        distances.append(2 * cross - within_samples - within_raters)
    distance = torch.stack(distances)
    # rounding leaves up to 1e-16 of either sign where the distance is 0
    distance = torch.where(distance < 1e-12, 0, distance).float()
    return nan_without_voxels(distance, valid)


def level_masks(
    prob: Float[Tensor, "N C *space"], *, num_samples: int, valid: Bool[Tensor, "N *space"] | None = None
) -> Bool[Tensor, "N S *space"] | Integer[Tensor, "N S *space"]:
    """Sampled masks whose mean is prob, for a network that predicts probabilities and not samples.

    Sample s takes at every voxel the class at which the cumulative probability exceeds (s + 1/2) / S. All
    voxels share this level, so with two classes the samples are nested level sets of prob. One or two
    channels give bool masks of the foreground; more give class maps, nested in the order of the classes.

    >>> level_masks(torch.tensor([[[0.1, 0.4, 0.9]]]), num_samples=2)
    tensor([[[False, False,  True],
             [False,  True,  True]]])
    """
    check_prob(prob, valid)
    check_value(Count, num_samples=num_samples)
    channels = torch.cat([1 - prob, prob], 1) if prob.shape[1] == 1 else prob
    cumulative = channels.cumsum(1)[:, :-1]
    levels = [(sample + 0.5) / num_samples for sample in range(num_samples)]
    class_maps = torch.stack([(cumulative <= level).sum(1) for level in levels], 1)
    return class_maps.bool() if channels.shape[1] == 2 else class_maps


def rater_dice_score(
    prob: Tensor,
    masks: Tensor,
    *,
    present: Tensor | None = None,
    valid: Tensor | None = None,
    drawn: Sequence[bool] | None = None,
) -> Float[Tensor, "N R"]:
    """Dice of the decided prediction against each rater, mean over the foreground; NaN for an absent rater.

    prob has one or two channels for bool masks, and one per class for class maps; see `dice_score`.

    >>> raters = torch.tensor([[[True, True], [True, False]]])
    >>> rater_dice_score(torch.tensor([[[0.9, 0.7]]]), raters)
    tensor([[1.0000, 0.6667]])
    """
    check_tensor("prediction", prob)
    check_masks("masks", masks, max(2, prob.shape[1]))
    present = check_present(masks, present)
    scores = []
    for mask in masks.unbind(1):
        target = mask.unsqueeze(1).float() if prob.shape[1] == 1 else mask.long()
        scores.append(foreground_mean(dice_score(prob, target, valid=valid), drawn))
    return torch.stack(scores, 1).masked_fill(~present, torch.nan)


def _mean_distance(first: Tensor, second: Tensor, classes: Sequence[int]) -> Float[Tensor, ""]:
    """Mean of 1 - IoU over all pairs of the rows of `first` (S, V) and `second` (R, V), and over classes."""
    distances = []
    for number in classes:
        tp = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
        sizes = [torch.zeros(len(part), dtype=torch.float64, device=first.device) for part in (first, second)]
        for start in range(0, first.shape[1], _CHUNK):
            chunk = slice(start, start + _CHUNK)
            pair = [(part[:, chunk] == number).float() for part in (first, second)]
            tp += pair[0] @ pair[1].T
            sizes = [size + part.sum(1) for size, part in zip(sizes, pair, strict=True)]
        stats = OverlapStats(tp, sizes[0].unsqueeze(1) - tp, sizes[1].unsqueeze(0) - tp)
        distances.append(1 - tversky_index(stats, alpha=1.0, beta=1.0))
    return torch.stack(distances).mean()


def check_masks(name: str, masks: Tensor, num_classes: int | None) -> None:
    """Raise unless masks are bool, or class maps of `num_classes` classes."""
    check_tensor(name, masks)
    if masks.is_floating_point() or masks.ndim < 2 or masks.numel() == 0:
        raise ValueError(
            f"{name} must be bool or integers (N, R, *space) with a voxel; got {describe(masks)}"
        )
    if masks.dtype == torch.bool:
        return
    low, high = int(masks.min()), int(masks.max())
    if num_classes is None or low < 0 or high >= num_classes:
        raise ValueError(
            f"{name} that are not bool hold indices of num_classes={num_classes} classes; got "
            f"{describe(masks)} with values from {low} to {high}: pass num_classes=..., or masks > 0"
        )


def check_present(masks: Tensor, present: Tensor | None) -> Bool[Tensor, "N R"]:
    """`present`, all True for None; raise unless it fits the masks and each case has a rater."""
    if present is None:
        return torch.ones(masks.shape[:2], dtype=torch.bool, device=masks.device)
    if present.dtype != torch.bool or present.shape != masks.shape[:2]:
        raise ValueError(f"present must be bool {tuple(masks.shape[:2])}; got {describe(present)}")
    if not bool(present.any(1).all()):
        raise ValueError("present has a case without a rater: leave out cases that nobody looked at")
    return present
