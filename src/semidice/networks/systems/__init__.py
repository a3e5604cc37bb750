"""The systems that the paper compares with on QUBIQ, trained and scored by the engine of all others.

    system       what each of them is: a network, its losses, its way to a probability
    trunk        a network of `models` taken apart: levels of the encoder, decoder, last layer
    mc_dropout   Gal & Ghahramani, ICML 2016
    multi_head   after Guan et al., AAAI 2018: a head for each rater
    softseg      Gros et al., Med Image Anal 2021
    mrnet        Ji et al., CVPR 2021
    build        any of them, or the network as it is, from a recipe

All are written from their papers' descriptions; each module says what is as published and what had to be
decided here.
"""

from .build import build_network
from .mc_dropout import MCDropout
from .mrnet import MRNet
from .multi_head import MultiHead
from .softseg import SoftSeg, adaptive_wing_loss, normalised_relu
from .system import DTYPES, System, TrainingLabels, network_probability

__all__ = [
    "DTYPES",
    "MCDropout",
    "MRNet",
    "MultiHead",
    "SoftSeg",
    "System",
    "TrainingLabels",
    "adaptive_wing_loss",
    "build_network",
    "network_probability",
    "normalised_relu",
]
