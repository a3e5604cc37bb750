"""Scores against raters: how near a distribution of predictions is to theirs, and the score to each one.

    GED^2 = 2 E d(S, Y) - E d(S, S') - E d(Y, Y'),      d = 1 - IoU, S, S' samples, Y, Y' raters

(Kohl et al., 2018.) The means are over all pairs, a mask with itself included, so that it is 0 exactly when
samples and raters are the same masks with the same frequencies, and never negative.
Masks are bool (N, R, *space), or class maps of integers with `num_classes`; d is then the mean over the
foreground classes. `present`, bool (N, R), is False for a rater who did not look at the case.
Left out: the label makers and each rater against the majority of one case (`labels.rater_agreement`).
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ..arrays import check_prediction, describe
from ..labels.makers import RaterAgreement, rater_agreement
from ..overlap.stats import OverlapStats, tversky_index
from .cases import CaseRow, CaseTable
from .checks import nan_without_voxels
from .scores import HardOptions, dice_score, foreground_mean

# voxels of a chunk: the products of float32 masks stay exact, and the copies small
_CHUNK = 1 << 16


def generalised_energy_distance(
    samples: Tensor,
    masks: Tensor,
    *,
    num_classes: int | None = None,
    present: Tensor | None = None,
    valid: Tensor | None = None,
) -> Float[Tensor, " N"]:
    """Squared generalised energy distance of each case's sampled masks (N, S, *space) to the raters' masks.

    In [0, 2]; lower is better. Two empty masks are at distance 0. A case without a valid voxel has NaN. For a
    network that gives probabilities, samples are made by `level_masks`; one decided mask is one sample.

    >>> raters = torch.tensor([[[True, True], [True, False]]])
    >>> generalised_energy_distance(raters, raters), generalised_energy_distance(raters[:, :1], raters)
    (tensor([0.]), tensor([0.2500]))
    """
    _check_masks("samples", samples, num_classes)
    _check_masks("masks", masks, num_classes)
    if samples.shape[:1] + samples.shape[2:] != masks.shape[:1] + masks.shape[2:]:
        raise ValueError(
            f"samples (N, S, *space) and masks (N, R, *space) differ in cases or space: "
            f"got {describe(samples)} and {describe(masks)}"
        )
    present = _check_present(masks, present)
    if valid is not None and (valid.dtype != torch.bool or valid.shape != masks.shape[:1] + masks.shape[2:]):
        raise ValueError(
            f"valid must be bool (N, *space) as the masks {describe(masks)}; got {describe(valid)}"
        )
    distances = []
    for case in range(len(masks)):
        ours = samples[case].flatten(1)
        theirs = masks[case][present[case]].flatten(1)
        if valid is not None:
            counted = valid[case].flatten()
            ours, theirs = ours[:, counted], theirs[:, counted]
        cross, within, between = (
            _mean_distance(first, second, num_classes)
            for first, second in ((ours, theirs), (ours, ours), (theirs, theirs))
        )
        distances.append(2 * cross - within - between)
    distance = torch.stack(distances)
    # where the two are the same, rounding leaves 1e-16 of either sign
    distance = torch.where(distance < 1e-12, 0, distance).float()
    return nan_without_voxels(distance, valid)


def level_masks(
    prob: Float[Tensor, "N C *space"], *, num_samples: int
) -> Bool[Tensor, "N S *space"] | Integer[Tensor, "N S *space"]:
    """Sampled masks whose mean is prob, for a network that gives probabilities and no samples.

    Sample s takes at every voxel the class where the cumulative probability passes (s + 1/2) / S: one draw
    shared by all voxels, so with two classes the samples are nested level sets of prob. One channel or two:
    bool masks of the foreground; more: class maps, nested in the order of the classes.

    >>> level_masks(torch.tensor([[[0.1, 0.4, 0.9]]]), num_samples=2)
    tensor([[[False, False,  True],
             [False,  True,  True]]])
    """
    check_prediction(prob, "none")
    if num_samples < 1:
        raise ValueError(f"num_samples must be 1 or more; got {num_samples}")
    channels = torch.cat([1 - prob, prob], 1) if prob.shape[1] == 1 else prob
    passed = channels.cumsum(1)[:, :-1]
    draws = [(passed <= (sample + 0.5) / num_samples).sum(1) for sample in range(num_samples)]
    class_maps = torch.stack(draws, 1)
    return class_maps.bool() if channels.shape[1] == 2 else class_maps


def rater_dice_score(
    prob: Tensor,
    masks: Tensor,
    *,
    num_classes: int | None = None,
    present: Tensor | None = None,
    valid: Tensor | None = None,
) -> Float[Tensor, "N R"]:
    """Dice of the decided prediction against each rater, mean over the foreground; NaN for an absent rater.

    prob has one channel or two for bool masks, and `num_classes` for class maps; see `dice_score`.

    >>> raters = torch.tensor([[[True, True], [True, False]]])
    >>> rater_dice_score(torch.tensor([[[0.9, 0.7]]]), raters)
    tensor([[1.0000, 0.6667]])
    """
    _check_masks("masks", masks, num_classes)
    present = _check_present(masks, present)
    options: HardOptions = {"valid": valid}
    scores = []
    for mask in masks.unbind(1):
        target = mask.unsqueeze(1).float() if prob.shape[1] == 1 else mask.long()
        scores.append(foreground_mean(dice_score(prob, target, **options)))
    return torch.stack(scores, 1).masked_fill(~present, torch.nan)


def rater_agreement_table(
    cases: Iterable[tuple[str, str, Tensor | Sequence[Tensor | None]]],
    *,
    num_classes: int | None = None,
    rater_names: Iterable[str] | None = None,
) -> CaseTable:
    """Dice of each rater against the majority, a row a case and rater: the paper's Table "ratio".

    cases: (case, patient, masks (R, *space)) one after the other, as a prepared dataset gives them; None in
    place of a rater's mask, in a list of masks, is a rater who did not look. The paper's figure is the mean
    of the column `value`.

    >>> masks = torch.tensor([[True, True, False], [True, True, False], [False, True, True]])
    >>> rater_agreement_table([("case1", "patient1", masks)]).columns["value"].tolist()
    [1.0, 1.0, 0.5]
    """
    names = None if rater_names is None else tuple(rater_names)
    rows = []
    for case, patient, masks in cases:
        drawn = {number: mask for number, mask in enumerate(masks) if mask is not None}
        agreement: RaterAgreement[Tensor] = rater_agreement(list(drawn.values()), num_classes=num_classes)
        for number, dice in zip(drawn, agreement.majority.tolist(), strict=True):
            name = f"rater {number + 1}" if names is None else names[number]
            rows.append(CaseRow(case, patient, -1, name, "mean", "dice_score", dice))
    return CaseTable.from_rows(rows)


def _mean_distance(first: Tensor, second: Tensor, num_classes: int | None) -> Float[Tensor, ""]:
    """Mean of 1 - IoU over all pairs of the rows of `first` (S, V) and `second` (R, V)."""
    classes = range(1, 2 if num_classes is None else num_classes)
    distances = []
    for number in classes:
        tp = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
        sizes = [torch.zeros(len(part), dtype=torch.float64, device=first.device) for part in (first, second)]
        for start in range(0, first.shape[1], _CHUNK):
            chunk = slice(start, start + _CHUNK)
            ours, theirs = ((part[:, chunk] == number).float() for part in (first, second))
            tp += ours @ theirs.T
            sizes = [size + part.sum(1) for size, part in zip(sizes, (ours, theirs), strict=True)]
        stats = OverlapStats(tp, sizes[0].unsqueeze(1) - tp, sizes[1].unsqueeze(0) - tp)
        distances.append(1 - tversky_index(stats, alpha=1.0, beta=1.0))
    return torch.stack(distances).mean()


def _check_masks(name: str, masks: Tensor, num_classes: int | None) -> None:
    integers = isinstance(masks, Tensor) and not masks.is_floating_point() and not masks.is_complex()
    if not integers or masks.ndim < 2 or masks.numel() == 0:
        raise ValueError(
            f"{name} must be bool or integers (N, R, *space) with a voxel; got {describe(masks)}"
        )
    if masks.dtype == torch.bool:
        return
    if num_classes is None:
        raise ValueError(
            f"{name} that are no bool need num_classes; got {describe(masks)}: "
            "pass num_classes=..., or masks > 0"
        )
    if int(masks.min()) < 0 or int(masks.max()) >= num_classes:
        raise ValueError(
            f"{name} hold class indices {int(masks.min())} to {int(masks.max())}, "
            f"but there are {num_classes} classes"
        )


def _check_present(masks: Tensor, present: Tensor | None) -> Bool[Tensor, "N R"]:
    if present is None:
        return torch.ones(masks.shape[:2], dtype=torch.bool, device=masks.device)
    if present.dtype != torch.bool or present.shape != masks.shape[:2]:
        raise ValueError(f"present must be bool {tuple(masks.shape[:2])}; got {describe(present)}")
    if not bool(present.any(1).all()):
        raise ValueError("present has a case without a rater: leave out cases that nobody looked at")
    return present
