"""Systems for several raters, trained and scored like all other networks.

    system                the interface: a network with its own losses and its own probability
    mc_dropout            Gal & Ghahramani, ICML 2016
    multi_head            after Guan et al., AAAI 2018: a head for each rater
    softseg               Gros et al., Med Image Anal 2021
    mrnet                 Ji et al., CVPR 2021
    learned_reliability   after Tanno et al., CVPR 2019: a confusion matrix for each rater

The paper compares with the first four on QUBIQ. All are written from the descriptions in their papers. Each
module says what is published and what was decided here. `build_network` makes a system, or a plain network,
by name.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import UserError
from ..build import build_model
from .learned_reliability import LearnedReliability, rater_confusion
from .mc_dropout import MCDropout
from .mrnet import MRNet
from .multi_head import MultiHead
from .softseg import SoftSeg
from .system import DTYPES, System, TrainingLabels

__all__ = ["DTYPES", "System", "TrainingLabels", "build_network", "rater_confusion"]


def build_network(
    model: Mapping[str, Any],
    *,
    name: str,
    dropout: float,
    num_samples: int,
    trace_weight: float,
    num_channels: int,
    num_classes: int,
    num_raters: int | None,
    seed: int,
) -> nn.Module:
    """The system `name`, in training mode, on the CPU; `standard` is the network of `build_model` alone.

    model: the other arguments of `build_model`. dropout, num_samples: of mc_dropout. trace_weight: of
    learned_reliability. num_raters: of the dataset, for systems with a part for each rater. seed: of the
    channels that mc_dropout drops at prediction; initial values come from torch's default generator, as in
    `build_model`.
    """
    raters = num_raters or 1
    if name in ("multi_head", "mrnet", "learned_reliability") and num_raters is None:
        raise UserError(f"system {name} needs the number of raters of the dataset, which is unknown")
    if name in ("mrnet", "learned_reliability") and raters < 2:
        raise UserError(
            f"system {name} learns from differences between raters: it needs a dataset with two or more"
        )
    # the heads are channels of one convolution
    num_outputs = num_classes * raters if name == "multi_head" else num_classes
    network = build_model(num_channels=num_channels, num_classes=num_outputs, **model)
    if name == "mc_dropout":
        return MCDropout(network, dropout=dropout, num_samples=num_samples, seed=seed)
    if name == "multi_head":
        return MultiHead(network, num_raters=raters)
    if name == "softseg":
        return SoftSeg(network, num_classes=num_classes)
    if name == "mrnet":
        return MRNet(network, num_channels=num_channels, num_classes=num_classes, num_raters=raters)
    if name == "learned_reliability":
        return LearnedReliability(
            network, num_classes=num_classes, num_raters=raters, trace_weight=trace_weight
        )
    return network
