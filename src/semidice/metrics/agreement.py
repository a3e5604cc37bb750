"""Agreement of raters over many cases: `labels.rater_agreement` of each case, as scores or as a case table.

`raters_own_scores` scores the raters like methods: how well a method can be expected to do.

Voxels that nobody drew change no Dice score. So a case is reduced to the voxels that somebody drew, and
cases of different sizes are compared together after padding with background.
"""

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float32, Shaped
from torch import Tensor

from ..arrays import one_hot
from ..labels.makers import RaterAgreement, rater_agreement
from ..labels.raters import read_raters
from .cases import CaseRow, CaseTable
from .registry import SCORES, ScoredBatch
from .scores import foreground_mean

# scores of overlap that raters can have too; voxels that nobody drew change none of them
OVERLAP_SCORES = ("dice_score", "iou_score", "binarized_dice_score", "soft_dice_score", "rater_dice_score")
# Voxels of all raters and foreground classes that are compared at once: about 100 MB of intermediate copies.
BATCH_SIZE = 2**22


def drawn_voxels(masks: Shaped[np.ndarray, "R *space"]) -> Shaped[np.ndarray, "R V"]:
    """The values of all raters at the voxels that any of them drew.

    >>> drawn_voxels(np.array([[[0, 2], [0, 1]], [[0, 2], [0, 0]]]))
    array([[2, 1],
           [2, 0]])
    """
    drawn: np.ndarray = masks[:, masks.any(axis=0)]
    return drawn


class AgreementBatches:
    """Collects masks case by case; `finish` returns the scores of all cases.

    The scores are those of `RaterAgreement` with a case axis in front. They are NaN for an absent rater, and
    for a case that was not added.
    """

    def __init__(self, num_cases: int, num_raters: int, *, num_classes: int = 2) -> None:
        self._majority: Float32[Tensor, "N R"] = torch.full((num_cases, num_raters), torch.nan)
        self._pairwise: Float32[Tensor, "N R R"] = torch.full((num_cases, num_raters, num_raters), torch.nan)
        self._num_classes = num_classes
        self._waiting: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # not 0: comparing two empty masks needs a voxel
        self._longest = 1

    def add(self, number: int, drawn: Shaped[np.ndarray, "R V"], *, present: Bool[np.ndarray, " R"]) -> None:
        """Add case `number`: `drawn_voxels` of bool masks or class maps, and which raters looked at it."""
        # every case of a batch is padded to the longest, so a large case must not join many small ones
        longest = max(self._longest, drawn.shape[1])
        if (len(self._waiting) + 1) * len(drawn) * (self._num_classes - 1) * longest > BATCH_SIZE:
            self._compare()
        self._waiting[number] = (drawn, present)
        self._longest = max(self._longest, drawn.shape[1])

    def finish(self) -> RaterAgreement[Tensor]:
        """The scores of all cases."""
        self._compare()
        return RaterAgreement(self._majority, self._pairwise)

    def _compare(self) -> None:
        if not self._waiting:
            return
        masks = np.zeros((len(self._waiting), self._majority.shape[1], self._longest), dtype=np.uint8)
        for row, (drawn, _) in zip(masks, self._waiting.values(), strict=True):
            row[:, : drawn.shape[1]] = drawn
        present = np.stack([flags for _, flags in self._waiting.values()])
        scores: RaterAgreement[Tensor] = rater_agreement(
            torch.from_numpy(masks),
            num_classes=self._num_classes,
            present=torch.from_numpy(present),
            batched=True,
        )
        numbers = list(self._waiting)
        self._majority[numbers], self._pairwise[numbers] = scores.majority, scores.pairwise
        self._waiting.clear()
        self._longest = 1


def rater_agreement_table(
    cases: Iterable[tuple[str, str, Tensor | Sequence[Tensor | None]]],
    *,
    num_classes: int | None = None,
    rater_names: Iterable[str] | None = None,
) -> CaseTable:
    """Dice of each rater against the majority, one row per case and rater: the paper's Table "ratio".

    cases: (case, patient, masks (R, *space)) one after the other. In a list of masks, None stands for a rater
    who did not look at the case. The paper's figure is the mean of the column `value`.

    >>> masks = torch.tensor([[True, True, False], [True, True, False], [False, True, True]])
    >>> rater_agreement_table([("case1", "patient1", masks)]).columns["value"].tolist()
    [1.0, 1.0, 0.5]
    """
    names = None if rater_names is None else tuple(rater_names)
    rows: list[CaseRow] = []
    for case, patient, masks in cases:
        drawn = {number: mask for number, mask in enumerate(masks) if mask is not None}
        agreement: RaterAgreement[Tensor] = rater_agreement(list(drawn.values()), num_classes=num_classes)
        raters = [f"rater {number + 1}" if names is None else names[number] for number in drawn]
        rows += agreement_rows(case, patient, raters, agreement.majority)
    return CaseTable.from_rows(rows)


def agreement_rows(
    case: str, patient: str, raters: Sequence[str], dice: Float32[Tensor, " R"]
) -> list[CaseRow]:
    """Rows of the case table for the raters of one case; a rater with NaN has no row."""
    return [
        CaseRow(case, patient, -1, rater, "mean", "dice_score", value)
        for rater, value in zip(raters, dice.tolist(), strict=True)
        if not math.isnan(value)
    ]


def raters_own_scores(
    cases: Iterable[np.ndarray], *, class_names: Sequence[str], metrics: Collection[str]
) -> dict[tuple[str, str], float]:
    """Mean score of a rater over raters and cases, by metric and class as in a case table.

    Each rater is scored as if it were a prediction: by `dice_score` against the majority of all raters, by
    `binarized_dice_score` against their mean, by `rater_dice_score` against the other raters. cases: class
    maps (R, *space) of the raters who looked at a case; a case with one rater is left out. metrics: those
    that are not in `OVERLAP_SCORES` are left out.

    >>> masks = np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]])
    >>> raters_own_scores([masks], class_names=["background", "lesion"], metrics=["dice_score"])
    {('dice_score', 'lesion'): 0.833..., ('dice_score', 'mean'): 0.833...}
    """
    scores: dict[tuple[str, str], list[float]] = {}
    for masks in cases:
        if len(masks) < 2:
            continue
        # one voxel of background, because a case may be empty
        drawn = torch.from_numpy(np.pad(drawn_voxels(masks), ((0, 0), (0, 1)))).long()
        raters = read_raters(drawn, len(class_names), None, batched=False)
        prob = one_hot(drawn, len(class_names)).float()
        majority, soft = raters.majority().expand_as(drawn), raters.mean().expand_as(prob)
        for name in OVERLAP_SCORES:
            if name not in metrics:
                continue
            if name == "rater_dice_score":
                pairwise: Tensor = rater_agreement(drawn, num_classes=len(class_names)).pairwise
                others = pairwise[~torch.eye(len(drawn), dtype=torch.bool)]
                scores.setdefault((name, "all"), []).append(float(others.mean()))
                continue
            of_raters = SCORES[name](ScoredBatch(prob, majority, soft)).double()
            for class_name, value in zip(class_names[1:], of_raters[:, 1:].mean(0).tolist(), strict=True):
                scores.setdefault((name, class_name), []).append(value)
            scores.setdefault((name, "mean"), []).append(float(foreground_mean(of_raters).mean()))
    return {key: math.fsum(values) / len(values) for key, values in scores.items()}
