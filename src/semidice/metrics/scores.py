"""Scores of each case against a hard or a soft target: overlap, probabilities and volumes.

prob is (N, C, *space) in [0, 1]; target, `valid` and `ignore_index` follow the contract of `arrays`; one
channel is the foreground, and several sum to one. Overlap scores are per case and class, (N, C);
`foreground_mean` averages over the foreground classes. A case without a valid voxel scores NaN, not 1,
because nothing is known about it. Scores of masks decide: the most probable class, or more than 1/2 of one
channel. For another rule, and for channels that may overlap, give bool masks instead of probabilities.
Left out: calibration (`bins`), raters (`raters`), distances (`distances`), tables of cases (`statistics`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_tensor, describe, nan_without_voxels, one_hot
from ..decisions.masks import likeliest_class
from ..decisions.volumes import sum_voxels, voxel_ml
from ..overlap import OverlapStats, SumsOptions, reference_sums, tversky_index
from .checks import check_empty, check_scored
from .slabs import Slab, slabs

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# 0.3 as a mean of 10 raters has a rounding error, which must not decide on which side of 0.3 it is
_AT_THRESHOLD = 1e-6


def dice_score(
    prob: Tensor,
    target: Tensor,
    *,
    empty: float = 1.0,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Float[Tensor, "N C"]:
    """Dice 2 tp / (2 tp + fp + fn) of each case and class, of decided masks; the paper's Dice column.

    prob: probabilities, or bool masks that are decided already. The target must be hard: class indices, or
    floats of 0 and 1. A soft one is a ValueError. empty: the score where neither prediction nor target has
    the class; NaN leaves it out of means. valid, ignore_index: voxels that do not count; see `arrays`.

    >>> prob = torch.tensor([[[0.9, 0.8, 0.2, 0.1]]])
    >>> round(float(dice_score(prob, torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]))), 4)
    0.6667
    """
    return _decided_index(
        "dice_score", prob, target, 0.5, empty=empty, valid=valid, ignore_index=ignore_index
    )


def iou_score(prob: Tensor, target: Tensor, **options: Any) -> Float[Tensor, "N C"]:
    """Intersection over union tp / (tp + fp + fn) of each case and class; options as in `dice_score`.

    >>> prob = torch.tensor([[[0.9, 0.8, 0.2, 0.1]]])
    >>> float(iou_score(prob, torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])))
    0.5
    """
    return _decided_index("iou_score", prob, target, 1.0, **options)


def binarized_dice_score(
    prob: Tensor, target: Tensor, *, empty: float = 1.0, **options: Any
) -> Float[Tensor, "N C"]:
    """Mean over t = 0.1, ..., 0.9 of the Dice of prob > t and target > t: BDice of QUBIQ (paper, sec. 4).

    Exactly 1 if prob equals the soft label; conversely, 1 means that no threshold separates them. A value
    within 1e-6 of a threshold counts as equal to it, so not above. A threshold that neither passes counts as
    `empty`; NaN leaves it out. The paper's column is the foreground channel.

    >>> soft = torch.tensor([[[0.0, 0.35, 0.65, 1.0]]])
    >>> float(binarized_dice_score(soft, soft)), round(float(binarized_dice_score(soft.round(), soft)), 4)
    (1.0, 0.8222)
    """
    target, valid = check_scored(prob, target, **options)
    levels = [threshold + _AT_THRESHOLD for threshold in THRESHOLDS]

    def above(slab: Slab) -> Iterator[OverlapStats]:
        for level in levels:
            for channel in range(prob.shape[1]):
                target_mask = _channel(slab.target, channel) > level
                yield _stats(slab.prob[:, channel] > level, target_mask, slab.valid)

    index = _index(prob, target, valid, above, alpha=0.5, empty=empty)
    return index.view(len(prob), len(levels), prob.shape[1]).nanmean(1)


def soft_dice_score(
    prob: Tensor, target: Tensor, *, empty: float = 1.0, **options: Any
) -> Float[Tensor, "N C"]:
    """1 - DML1 of each case and class: sum of min(x, y) over the mean of both sums; 1 exactly at x = y.

    For hard prob and target it is their Dice. `empty` is the score where both are 0 everywhere.

    >>> soft = torch.tensor([[[0.2, 0.7]]])
    >>> float(soft_dice_score(soft, soft)), round(float(soft_dice_score(soft, soft.round())), 4)
    (1.0, 0.7368)
    """
    target, valid = check_scored(prob, target, **options)

    def soft(slab: Slab) -> Iterator[OverlapStats]:
        for channel in range(prob.shape[1]):
            yield _stats(slab.prob[:, channel], _channel(slab.target, channel), slab.valid)

    return _index(prob, target, valid, soft, alpha=0.5, empty=empty)


def brier_error(prob: Tensor, target: Tensor, **options: Any) -> Float[Tensor, " N"]:
    """Mean over a case's voxels of sum_c (x_c - y_c)^2 / 2, in [0, 1]; 0 exactly at the (soft) label.

    The factor 1/2 makes one sigmoid channel equal to its two-class softmax, (x - y)^2. Sums are float64.

    >>> float(brier_error(torch.tensor([[[0.75]]]), torch.tensor([[[1.0]]])))
    0.0625
    """
    target, valid = check_scored(prob, target, **options)

    def squares(slab: Slab) -> Tensor:
        soft = slab.target if slab.target.is_floating_point() else one_hot(slab.target, prob.shape[1])
        square = (slab.prob - soft).square().sum(1)
        if slab.valid is not None:
            square = torch.where(slab.valid, square, 0)
        return square.sum(1, dtype=torch.float64)

    return (_voxel_mean(prob, target, valid, squares) / min(2, prob.shape[1])).float()


def negative_log_likelihood(prob: Tensor, target: Tensor, **options: Any) -> Float[Tensor, " N"]:
    """Mean over a case's voxels of -sum_c y_c log x_c, in nats; lower is better.

    Against a soft label the minimum is at x = y, and equals the entropy of the label, not 0. A probability of
    exactly 0 counts as the smallest normal float, so it costs 87 nats and not infinity. For one channel it is
    the binary cross entropy.

    >>> round(float(negative_log_likelihood(torch.tensor([[[0.5]]]), torch.tensor([[[1.0]]]))), 4)
    0.6931
    """
    target, valid = check_scored(prob, target, **options)

    def costs(slab: Slab) -> Tensor:
        prob, soft = slab.prob, slab.target
        if not soft.is_floating_point():
            soft = one_hot(soft, prob.shape[1])
        if prob.shape[1] == 1:
            prob, soft = (torch.cat([1 - channel, channel], 1) for channel in (prob, soft))
        cost = -(soft * prob.clamp_min(torch.finfo(prob.dtype).tiny).log()).sum(1)
        if slab.valid is not None:
            cost = torch.where(slab.valid, cost, 0)
        return cost.sum(1, dtype=torch.float64)

    return _voxel_mean(prob, target, valid, costs).float()


def truth_error(
    prob: Float[Tensor, "N C *space"], truth: Float[Tensor, "N C *space"], *, valid: Tensor | None = None
) -> Float[Tensor, "N C"]:
    """Mean over voxels of |p - p*| of each class, p* the probability that the raters' masks are drawn from.

    >>> truth_error(torch.tensor([[[0.5, 0.0]]]), torch.tensor([[[1.0, 0.0]]]))
    tensor([[0.2500]])
    """
    error = (prob - truth).abs().flatten(2)
    if valid is None:
        return error.mean(2, dtype=torch.float64).float()
    counted = valid.flatten(1).unsqueeze(1)
    # 0/0 is NaN: no valid voxel
    return (torch.where(counted, error, 0).sum(2, dtype=torch.float64) / counted.sum(2)).float()


def volume_error_ml(
    prob: Tensor,
    target: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    **options: Any,
) -> Float[Tensor, "N C"]:
    """Absolute difference in ml between the volumes of the decided mask and of a hard target.

    spacing_mm: the three sides of a voxel, or (N, 3). `volume_ml` has the expected volume of probabilities.

    >>> prob, target = torch.full((1, 1, 10, 10, 10), 0.4), torch.ones(1, 1, 10, 10, 10)
    >>> float(volume_error_ml(prob, target, spacing_mm=(1, 1, 1)))
    1.0
    """
    target, valid = check_scored(prob, target, hard="volume_error_ml", **options)
    per_voxel = voxel_ml(spacing_mm, num_cases=len(prob)).to(prob.device)
    # each volume is rounded to float32 before the difference, as `volume_ml` returns it
    predicted = torch.stack([sum_voxels(mask, valid) for mask in decided_channels(prob)], 1)
    volume = nan_without_voxels((predicted * per_voxel).float(), valid)
    voxels = [sum_voxels(_channel(target, channel), valid) for channel in range(prob.shape[1])]
    return (volume - torch.stack(voxels, 1) * per_voxel).abs().float()


def foreground_mean(scores: Float[Tensor, "N C"], drawn: Sequence[bool] | None = None) -> Float[Tensor, " N"]:
    """Mean of the scores of each case over classes 1, 2, ...; one channel is its own mean. NaN is left out.

    drawn: whether anybody drew each class in any case of the dataset. A class that nobody ever drew is left
    out of the mean, unless there is no other: its two empty masks would count as a perfect score.

    >>> foreground_mean(torch.tensor([[0.9, 0.5, 0.7], [0.9, float("nan"), 0.7]]))
    tensor([0.6000, 0.7000])
    """
    check_tensor("scores", scores)
    if scores.ndim != 2:
        raise ValueError(f"scores must be one row per case and one column per class; got {describe(scores)}")
    if scores.shape[1] == 1:
        return scores[:, 0]
    return scores[:, counted_classes(scores.shape[1], drawn)].nanmean(1)


def counted_classes(num_classes: int, drawn: Sequence[bool] | None) -> list[int]:
    """The foreground classes in a mean over classes; drawn: see `foreground_mean`."""
    foreground = range(1, num_classes)
    return [number for number in foreground if drawn is None or drawn[number]] or list(foreground)


def decided_channels(prob: Tensor) -> Iterator[Tensor]:
    """The mask, bool (N, *space), of each channel: one mask after the other is in memory."""
    if prob.dtype == torch.bool or prob.shape[1] == 1:
        yield from (prob if prob.dtype == torch.bool else prob > 0.5).unbind(1)
        return
    classes = likeliest_class(prob, None)
    for channel in range(prob.shape[1]):
        yield classes == channel


def _decided_index(
    metric: str, prob: Tensor, target: Tensor, alpha: float, *, empty: float = 1.0, **options: Any
) -> Tensor:
    target, valid = check_scored(prob, target, hard=metric, **options)

    def decided(slab: Slab) -> Iterator[OverlapStats]:
        for channel, mask in enumerate(decided_channels(slab.prob)):
            yield _stats(mask, _channel(slab.target, channel), slab.valid)

    return _index(prob, target, valid, decided, alpha=alpha, empty=empty)


def _index(
    prob: Tensor,
    target: Tensor,
    valid: Tensor | None,
    stats_of: Callable[[Slab], Iterator[OverlapStats]],
    *,
    alpha: float,
    empty: float,
) -> Float[Tensor, "N columns"]:
    """Tversky index (alpha = beta) of the sums over all slabs of a case, from the columns (n,) of each slab.

    Float32 counts of a slab are exact; those of a volume with more than 2^24 voxels would not be.
    """
    check_empty(empty)
    # the slabs of a case follow each other
    parts: dict[int, Tensor] = {}
    for slab in slabs(prob, target, valid):
        of_slab = torch.stack([torch.stack(column) for column in stats_of(slab)], -1).double()
        parts[slab.first_case] = parts.get(slab.first_case, 0) + of_slab
    stats = OverlapStats(*torch.cat(list(parts.values()), 1))
    is_empty = stats.tp + stats.fp + stats.fn == 0
    index = torch.where(is_empty, empty, tversky_index(stats, alpha=alpha, beta=alpha)).float()
    return nan_without_voxels(index, valid)


def _voxel_mean(
    prob: Tensor, target: Tensor, valid: Tensor | None, sums_of: Callable[[Slab], Tensor]
) -> Float[Tensor, " N"]:
    """Float64 mean over the valid voxels of each case, from the sums (n,) of each slab; NaN without one."""
    total = torch.zeros(len(prob), dtype=torch.float64, device=prob.device)
    count = torch.zeros_like(total)
    for slab in slabs(prob, target, valid):
        cases = slice(slab.first_case, slab.first_case + len(slab.prob))
        total[cases] += sums_of(slab)
        count[cases] += slab.prob.shape[2] if slab.valid is None else slab.valid.sum(1)
    return total / count


def _stats(prob: Tensor, target: Tensor, valid: Tensor | None) -> OverlapStats:
    """tp, fp and fn (n,) of one channel of a slab; both are masks or probabilities (n, v)."""
    prob, target = (part.float() if part.dtype == torch.bool else part for part in (prob, target))
    options = SumsOptions("none", "min", entropy=False)
    stats = reference_sums(prob.unsqueeze(1), target.unsqueeze(1), valid, options).overlap
    return OverlapStats(*(part.squeeze(1) for part in stats))


def _channel(target: Tensor, channel: int) -> Tensor:
    """One channel of a soft target, or the mask of one class of a class map."""
    return target[:, channel] if target.is_floating_point() else target == channel
