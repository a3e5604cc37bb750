"""The network that a recipe trains: as it is, or inside one of the systems."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..models import build_model
from .mc_dropout import MCDropout
from .mrnet import MRNet
from .multi_head import MultiHead
from .softseg import SoftSeg


def build_network(
    model: Mapping[str, Any],
    *,
    name: str,
    dropout: float,
    num_samples: int,
    num_channels: int,
    num_classes: int,
    num_raters: int | None,
    seed: int,
) -> nn.Module:
    """The network of the system `name`, in training mode, on the CPU; of `standard`, `build_model`'s.

    model: further arguments of `build_model`. num_raters: of the dataset, for multi_head and mrnet. seed: of
    the channels that mc_dropout drops; initial values come from torch's generator, as in `build_model`.
    """
    raters = num_raters or 1
    if name in ("multi_head", "mrnet") and num_raters is None:
        raise ValueError(f"system {name} needs the number of raters of the dataset, which is not known")
    if name == "mrnet" and raters < 2:
        raise ValueError("system mrnet learns from raters who differ: it needs a dataset with two or more")
    # heads of one convolution are channels of it
    num_outputs = num_classes * raters if name == "multi_head" else num_classes
    network = build_model(num_channels=num_channels, num_classes=num_outputs, **model)
    if name == "mc_dropout":
        return MCDropout(network, dropout=dropout, num_samples=num_samples, seed=seed)
    if name == "multi_head":
        return MultiHead(network, num_raters=raters)
    if name == "softseg":
        return SoftSeg(network)
    if name == "mrnet":
        return MRNet(network, num_channels=num_channels, num_classes=num_classes, num_raters=raters)
    return network
