"""Agreement of raters over many cases: `labels.rater_agreement` of each case as rows of a case table.

`raters_own_scores` scores the raters like methods: how well a method can be expected to do.
Voxels that nobody drew change no Dice score, so a case is reduced to the voxels that somebody drew.
"""

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor

from ..arrays import one_hot
from ..labels.raters import read_raters
from ..metrics.registry import SCORES, ScoredBatch
from ..metrics.scores import foreground_mean

# scores of overlap that raters can have too; voxels that nobody drew change none of them
OVERLAP_SCORES = ("dice_score", "iou_score", "binarized_dice_score", "soft_dice_score", "rater_dice_score")


def drawn_voxels(masks: Shaped[np.ndarray, "R *space"]) -> Shaped[np.ndarray, "R V"]:
    """The values of all raters at the voxels that any of them drew.

    >>> drawn_voxels(np.array([[[0, 2], [0, 1]], [[0, 2], [0, 0]]]))
    array([[2, 1],
           [2, 0]])
    """
    drawn: np.ndarray = masks[:, masks.any(axis=0)]
    return drawn


def agreement_rows(
    case: str, patient: str, raters: Sequence[str], dice: Float32[Tensor, " R"]
) -> list[dict[str, object]]:
    """Rows of a case table for the raters of one case, the paper's Table "ratio"; none for a rater with NaN.

    dice: `majority` of `labels.rater_agreement`. The paper's figure is the mean over all rows.

    >>> agreement_rows("case1", "patient1", ["a", "b"], torch.tensor([0.5, torch.nan]))[0]["value"]
    0.5
    """
    return [
        {"case": case, "patient": patient, "method": rater, "metric": "dice_score", "value": value}
        for rater, value in zip(raters, dice.tolist(), strict=True)
        if not math.isnan(value)
    ]


def raters_own_scores(
    cases: Iterable[np.ndarray],
    *,
    class_names: Sequence[str],
    metrics: Collection[str],
    drawn: Sequence[bool] | None = None,
) -> dict[tuple[str, str], float]:
    """Mean score of a rater over raters and cases, by metric and class as in a case table.

    Each rater is scored as if it were a prediction: by `dice_score` against the majority of all raters, by
    `binarized_dice_score` against their mean, by `rater_dice_score` against the other raters. cases: class
    maps (R, *space) of the raters who looked at a case; a case with one rater is left out. metrics: those
    that are not in `OVERLAP_SCORES` are left out. drawn: as in `ScoredBatch`.

    >>> masks = np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]])
    >>> raters_own_scores([masks], class_names=["background", "lesion"], metrics=["dice_score"])
    {('dice_score', 'lesion'): 0.833..., ('dice_score', 'mean'): 0.833...}
    """
    scores: dict[tuple[str, str], list[float]] = {}
    for masks in cases:
        if len(masks) < 2:
            continue
        # one voxel of background, because a case may be empty
        voxels = torch.from_numpy(np.pad(drawn_voxels(masks), ((0, 0), (0, 1)))).long()
        raters = read_raters(voxels, len(class_names), None, batched=False)
        prob = one_hot(voxels, len(class_names)).float()
        batch = ScoredBatch(
            prob,
            raters.majority().expand_as(voxels),
            raters.mean().expand_as(prob),
            # each rater is scored against the others
            voxels.expand(len(voxels), *voxels.shape),
            ~torch.eye(len(voxels), dtype=torch.bool),
            drawn=drawn,
        )
        for name in (name for name in OVERLAP_SCORES if name in metrics):
            of_raters = SCORES[name](batch).double()
            means = {"all": of_raters}
            if of_raters.ndim > 1:
                means = dict(zip(class_names[1:], of_raters[:, 1:].unbind(1), strict=True))
                means["mean"] = foreground_mean(of_raters, drawn)
            for class_name, values in means.items():
                scores.setdefault((name, class_name), []).append(float(values.mean()))
    return {key: math.fsum(values) / len(values) for key, values in scores.items()}
