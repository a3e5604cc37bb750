"""The interface of a system: a network that defines its own losses and its own probability.

    output = system(image)  or  system(image, present) if it needs raters     under the recipe's precision
    total, terms = system.losses(output, labels, loss)                        in float32
    prob = system.probability(image)                                          in eval mode, without gradients

The system `standard` is not a `System` but a plain network of `build_model`: its loss is the recipe's, its
probability the softmax. Nothing here waits for the device, so a step can be recorded as a CUDA graph.
Systems that work inside a network take it apart with `Trunk`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from ...errors import UserError
from ...losses.segmentation import SegmentationLoss
from ..small_unet import SmallUNet

# the values of `precision.dtype` in a recipe
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingLabels(NamedTuple):
    """The labels of a batch, as in `data.batches.Batch`; the last two are for systems that need raters."""

    target: Float32[Tensor, "N C *space"]
    valid: Bool[Tensor, "N *space"]
    raters: Float32[Tensor, "N R C *space"] | None = None
    present: Bool[Tensor, "N R"] | None = None

    def of_raters(self) -> tuple[Float32[Tensor, "N R C *space"], Bool[Tensor, "N R"]]:
        """The masks of the raters, and which of them annotated; a ValueError if the batch has no raters."""
        if self.raters is None or self.present is None:
            raise UserError("this system needs the mask of each rater: make batches with with_raters=True")
        return self.raters, self.present


class System(nn.Module, ABC):
    """A network with its own losses and its own probability."""

    needs_raters: ClassVar[bool] = False

    @abstractmethod
    def losses(
        self, output: Any, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss to minimise, and its detached terms by name for the log. loss: the recipe's."""

    @abstractmethod
    def probability(self, image: Float[Tensor, "N channels *space"]) -> Float32[Tensor, "N C *space"]:
        """Class probabilities of normalised images; they depend on weights, seed and image alone."""


class Trunk(nn.Module):
    """A network in three parts: image --encode--> levels --decode--> features --predict--> logits.

    network: small_unet, or an architecture of smp with an encoder, a decoder and a last layer. Others, such
    as dpt, are refused by name. Level 0 of an encoder of smp is the image itself.
    level_channels: of each level. num_features: inputs of the last layer.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        if isinstance(network, SmallUNet):
            self.level_channels: tuple[int, ...] = network.level_channels
        else:
            _check_parts(network)
            self.level_channels = tuple(network.encoder.out_channels)
        layers = network.segmentation_head.modules()
        self.num_features = next(layer.in_channels for layer in layers if isinstance(layer, nn.Conv2d))

    def encode(self, image: Float[Tensor, "N channels H W"]) -> list[Tensor]:
        """Features of every level, the finest first."""
        return list(self.network.encoder(image))

    def decode(self, levels: Sequence[Tensor]) -> Float[Tensor, "N features h w"]:
        """The input of the last layer; in some architectures smaller than the image."""
        return self.network.decoder(list(levels))  # type: ignore[no-any-return]

    def predict(self, features: Float[Tensor, "N features h w"]) -> Float[Tensor, "N C H W"]:
        """Logits in the size of the image."""
        return self.network.segmentation_head(features)  # type: ignore[no-any-return]


def _check_parts(network: nn.Module) -> None:
    from segmentation_models_pytorch.base import SegmentationModel

    if not isinstance(network, SegmentationModel) or type(network).forward is not SegmentationModel.forward:
        raise UserError(
            "this system needs an architecture with an encoder, a decoder and a last layer that can be run "
            f"one by one, such as unet; got {type(network).__name__}"
        )
