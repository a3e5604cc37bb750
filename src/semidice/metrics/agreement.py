"""Agreement of raters over many cases of any size: `labels.rater_agreement`, in batches of bounded memory.

Voxels that nobody drew change no Dice score. So a case comes down to the voxels that somebody drew, and
cases of different sizes are compared together, the shorter ones filled up with background.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float32, Shaped
from torch import Tensor

from ..labels.makers import RaterAgreement, rater_agreement

# Voxels of all raters and foreground classes that are compared at once: about 100 MB of intermediate copies.
BATCH_SIZE = 2**22


def drawn_voxels(masks: Shaped[np.ndarray, "R *space"]) -> Shaped[np.ndarray, "R V"]:
    """What each rater says of the voxels that any of them drew.

    >>> drawn_voxels(np.array([[[0, 2], [0, 1]], [[0, 2], [0, 0]]]))
    array([[2, 1],
           [2, 0]])
    """
    drawn: np.ndarray = masks[:, masks.any(axis=0)]
    return drawn


class AgreementBatches:
    """Collects masks case by case; the scores stand in `majority` and `pairwise` after `finish`.

    majority, pairwise: Dice as in `RaterAgreement` with a case axis in front; NaN for an absent rater, and
    for a case that was not added. batch_size: voxels of a batch of several cases.
    """

    def __init__(
        self, num_cases: int, num_raters: int, *, num_classes: int = 2, batch_size: int = BATCH_SIZE
    ) -> None:
        self.majority: Float32[Tensor, "N R"] = torch.full((num_cases, num_raters), torch.nan)
        self.pairwise: Float32[Tensor, "N R R"] = torch.full((num_cases, num_raters, num_raters), torch.nan)
        self._num_classes = num_classes
        self._batch_size = batch_size
        self._waiting: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # not 0: empty against empty is a question too, and needs a voxel to be asked of
        self._longest = 1

    def add(self, number: int, drawn: Shaped[np.ndarray, "R V"], *, present: Bool[np.ndarray, " R"]) -> None:
        """Take in case `number`: `drawn_voxels` of bool masks or class maps, and who looked at it."""
        # all are filled up to the longest, so one large case must not join many small ones
        longest = max(self._longest, drawn.shape[1])
        if (len(self._waiting) + 1) * len(drawn) * (self._num_classes - 1) * longest > self._batch_size:
            self._compare()
        self._waiting[number] = (drawn, present)
        self._longest = max(self._longest, drawn.shape[1])

    def finish(self) -> RaterAgreement[Tensor]:
        """The scores of all cases."""
        self._compare()
        return RaterAgreement(self.majority, self.pairwise)

    def _compare(self) -> None:
        if not self._waiting:
            return
        masks = np.zeros((len(self._waiting), self.majority.shape[1], self._longest), dtype=np.uint8)
        for row, (drawn, _) in zip(masks, self._waiting.values(), strict=True):
            row[:, : drawn.shape[1]] = drawn
        present = np.stack([there for _, there in self._waiting.values()])
        scores: RaterAgreement[Tensor] = rater_agreement(
            torch.from_numpy(masks),
            num_classes=self._num_classes,
            present=torch.from_numpy(present),
            batched=True,
        )
        numbers = list(self._waiting)
        self.majority[numbers], self.pairwise[numbers] = scores.majority, scores.pairwise
        self._waiting.clear()
        self._longest = 1
