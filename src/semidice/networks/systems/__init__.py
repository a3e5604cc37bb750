"""Systems for several raters, trained and scored like all other networks.

    system       the interface: a network with its own losses and its own probability
    mc_dropout   Gal & Ghahramani, ICML 2016
    softseg      Gros et al., Med Image Anal 2021
    mrnet        Ji et al., CVPR 2021
    per_rater    a head for each rater (after Guan et al., AAAI 2018), or a confusion matrix for each (after
                 Tanno et al., CVPR 2019)

The paper compares with mc_dropout, multi_head, softseg and mrnet on QUBIQ. All are written from the
descriptions in their papers. Each module says what is published and what was decided here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from ...errors import UserError
from ...options import Bounds, Count, Weight
from ..build import ModelOptions, Task, build_model
from .mc_dropout import MCDropout
from .mrnet import MRNet
from .per_rater import LearnedReliability, MultiHead, rater_confusion
from .softseg import SoftSeg
from .system import DTYPES, System, TrainingLabels

__all__ = ["DTYPES", "System", "SystemOptions", "TrainingLabels", "build_network", "rater_confusion"]


@dataclass(frozen=True)
class SystemOptions:
    """The system to train: a plain network, or one for several raters; see systems.md."""

    name: Literal["standard", "mc_dropout", "multi_head", "softseg", "mrnet", "learned_reliability"] = (
        "standard"
    )
    """Standard is a plain network; the others are explained in systems.md."""
    dropout: Annotated[float, Bounds(above=0, below=1)] = 0.5
    """Of mc_dropout: probability to drop a channel in the two deepest levels."""
    num_samples: Count = 20
    """Of mc_dropout: number of predictions that are averaged."""
    trace_weight: Weight = 0.01
    """Of learned_reliability: weight of the mean trace of the confusion matrices."""

    @property
    def learns_each_rater(self) -> bool:
        """Whether the system learns from the mask of every rater, and not from `label`."""
        return self.name in ("multi_head", "mrnet", "learned_reliability")


def build_network(model: ModelOptions, system: SystemOptions, task: Task, *, seed: int) -> nn.Module:
    """The system, in training mode, on the CPU; `standard` is the network of `build_model` alone.

    seed: of the channels that mc_dropout drops at prediction; initial values come from torch's default
    generator, as in `build_model`.
    """
    if system.name in ("mrnet", "learned_reliability") and task.raters < 2:
        raise UserError(
            f"system {system.name} learns from differences between raters: "
            "it needs a dataset with two or more"
        )
    # the heads are channels of one convolution
    heads = task.raters if system.name == "multi_head" else 1
    network = build_model(model, task._replace(classes=heads * task.classes))
    match system.name:
        case "mc_dropout":
            return MCDropout(network, dropout=system.dropout, num_samples=system.num_samples, seed=seed)
        case "multi_head":
            return MultiHead(network, num_raters=task.raters)
        case "softseg":
            return SoftSeg(network, num_classes=task.classes)
        case "mrnet":
            return MRNet(network, task)
        case "learned_reliability":
            return LearnedReliability(network, task, trace_weight=system.trace_weight)
    return network
