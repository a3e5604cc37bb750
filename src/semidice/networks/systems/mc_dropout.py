"""MC dropout (Gal & Ghahramani, ICML 2016): the mean probability of networks with different channels dropped.

    prob = 1/T sum_t softmax(network with dropout t)

Published: dropout in training and also at prediction. Each draw at prediction is a network from an
approximate posterior; the predictions of the draws are averaged. All other layers are in eval mode. Dropout
is applied as in Bayesian SegNet (Kendall et al., BMVC 2017): in the deepest layers, with probability 1/2.
Decided here: whole channels of the two deepest levels of the encoder are dropped. A draw drops the same
channels of all images; they are drawn on the CPU from the seed of the recipe. So a prediction does not depend
on batch, device or process, all windows of an image see the same networks, and the encoder runs once.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ...losses.segmentation import SegmentationLoss
from .system import System, TrainingLabels, Trunk

_NUM_LEVELS = 2


class MCDropout(System):
    """A network with dropout in its deepest levels, and the mean of `num_samples` draws as probability."""

    def __init__(self, network: nn.Module, *, dropout: float, num_samples: int, seed: int) -> None:
        super().__init__()
        self.trunk = Trunk(network)
        self.dropout, self.num_samples = dropout, num_samples
        generator = torch.Generator().manual_seed(seed)
        for level, channels in enumerate(self.trunk.level_channels[-_NUM_LEVELS:]):
            kept = torch.rand(num_samples, channels, generator=generator) >= dropout
            # not in checkpoints: they follow from the recipe
            self.register_buffer(f"scale{level}", kept.float() / (1 - dropout), persistent=False)

    def forward(self, image: Float[Tensor, "N channels H W"]) -> Float[Tensor, "N C H W"]:
        """Logits; in training, each image has its own dropped channels."""
        levels = self.trunk.encode(image)
        deepest = [F.dropout2d(level, self.dropout, self.training) for level in levels[-_NUM_LEVELS:]]
        return self.trunk.predict(self.trunk.decode([*levels[:-_NUM_LEVELS], *deepest]))

    def losses(
        self, output: Tensor, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        terms = loss.terms(output, labels.target, labels.valid)
        return loss.total(terms), {name: term.detach() for name, term in terms.items()}

    def probability(self, image: Float[Tensor, "N channels H W"]) -> Float32[Tensor, "N C H W"]:
        levels = self.trunk.encode(image)
        finer, deepest = levels[:-_NUM_LEVELS], levels[-_NUM_LEVELS:]
        probs = []
        for sample in range(self.num_samples):
            scales = [self.get_buffer(f"scale{number}")[sample] for number in range(len(deepest))]
            dropped = [
                level * scale.view(1, -1, 1, 1).to(level.dtype)
                for level, scale in zip(deepest, scales, strict=True)
            ]
            probs.append(self.trunk.predict(self.trunk.decode([*finer, *dropped])).float().softmax(1))
        return torch.stack(probs).mean(0)
