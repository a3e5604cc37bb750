"""A network split into three parts: image --encode--> levels --decode--> features --predict--> logits.

Works with small_unet and with every architecture of smp that consists of an encoder, a decoder and a last
layer. Other architectures, such as dpt, are refused by name. Level 0 of an encoder of smp is the image
itself.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ..small_unet import SmallUNet


class Trunk(nn.Module):
    """The parts of a network. level_channels: of each level. num_features: inputs of the last layer."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        if isinstance(network, SmallUNet):
            self.level_channels: tuple[int, ...] = network.level_channels
        else:
            _check_parts(network)
            self.level_channels = tuple(network.encoder.out_channels)
        head: nn.Module = network.segmentation_head
        self.num_features = next(part.in_channels for part in head.modules() if isinstance(part, nn.Conv2d))

    def encode(self, image: Float[Tensor, "N channels H W"]) -> list[Tensor]:
        """Features of every level, the finest first."""
        network = self.network
        return list(network.encode(image) if isinstance(network, SmallUNet) else network.encoder(image))

    def decode(self, levels: Sequence[Tensor]) -> Float[Tensor, "N features h w"]:
        """The input of the last layer; in some architectures smaller than the image."""
        network, levels = self.network, list(levels)
        features: Tensor = (
            network.decode(levels) if isinstance(network, SmallUNet) else network.decoder(levels)
        )
        return features

    def predict(self, features: Float[Tensor, "N features h w"]) -> Float[Tensor, "N C H W"]:
        """Logits in the size of the image."""
        logits: Tensor = self.network.segmentation_head(features)
        return logits


def _check_parts(network: nn.Module) -> None:
    from segmentation_models_pytorch.base import SegmentationModel

    if not isinstance(network, SegmentationModel) or type(network).forward is not SegmentationModel.forward:
        raise ValueError(
            "this system needs an architecture with an encoder, a decoder and a last layer that can be run "
            f"one by one, such as unet; got {type(network).__name__}"
        )
