"""The systems that the paper compares with on QUBIQ, trained and scored like all other networks.

    system       the interface: a network with its own losses and its own probability
    trunk        a network split into encoder, decoder and last layer
    mc_dropout   Gal & Ghahramani, ICML 2016
    multi_head   after Guan et al., AAAI 2018: a head for each rater
    softseg      Gros et al., Med Image Anal 2021
    mrnet        Ji et al., CVPR 2021
    build        a system, or a plain network, by name

All are written from the descriptions in their papers. Each module says what is published and what was decided
here.
"""

from .build import build_network
from .system import DTYPES, System, TrainingLabels, network_probability

__all__ = ["DTYPES", "System", "TrainingLabels", "build_network", "network_probability"]
