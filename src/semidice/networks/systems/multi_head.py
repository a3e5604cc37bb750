"""A head for each rater (after Guan et al., AAAI 2018): one network with one last layer per rater.

    loss = mean over raters of loss(head r, mask of rater r)      prob = mean over raters of softmax(head r)

Published: all layers but the last are shared. Each head learns from its own rater alone. A case that a rater
did not annotate does not change the head of this rater. The prediction is the mean of the heads.
Decided here: segmentation in place of classification, so the last layer has (raters x classes) channels; the
recipe's loss for each head; equal weights of the heads, which the authors also learn. `label` of the recipe
is not used.
"""

from typing import ClassVar

from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from ...losses.segmentation import SegmentationLoss
from .system import System, TrainingLabels, rater_losses


class MultiHead(System):
    """network: with `num_raters * num_classes` output channels; the classes of a rater are adjacent."""

    needs_raters: ClassVar[bool] = True

    def __init__(self, network: nn.Module, *, num_raters: int) -> None:
        super().__init__()
        self.network, self.num_raters = network, num_raters

    def forward(
        self, image: Float[Tensor, "N channels *space"], present: Bool[Tensor, "N R"] | None = None
    ) -> Float[Tensor, "N R C *space"]:
        """Logits of each head; `present` is used by the loss alone."""
        return self.network(image).unflatten(1, (self.num_raters, -1))  # type: ignore[no-any-return]

    def losses(
        self, output: Tensor, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raters, present = labels.of_raters()
        return rater_losses(output, raters, present, labels.valid, loss)

    def probability(self, image: Float[Tensor, "N channels *space"]) -> Float32[Tensor, "N C *space"]:
        return self(image).float().softmax(2).mean(1)  # type: ignore[no-any-return]
