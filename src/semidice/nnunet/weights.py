"""Weights of a network that nnU-Net trained, read without running code.

nnU-Net's checkpoints are pickles that hold numbers of numpy next to tensors. Only these are allowed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError

# numpy 1 and 2 have different names for the function that makes a number
_MAKE_NUMBER = np.float64(0).__reduce__()[0]
_ALLOWED: list[Any] = [
    np.dtype,
    *(type(np.dtype(name)) for name in ("bool", "float32", "float64", "int64")),
    (_MAKE_NUMBER, "numpy._core.multiarray.scalar"),
    (_MAKE_NUMBER, "numpy.core.multiarray.scalar"),
]


def read_nnunet_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The state dict of the network in nnU-Net's checkpoint; a ValueError if the file holds anything else."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            weights: dict[str, Tensor] = torch.load(path, map_location=device, weights_only=True)[
                "network_weights"
            ]
    # unpickling raises errors of many kinds
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path} is not a checkpoint of nnU-Net with plain weights ({reason}): name a training that "
            "nnU-Net finished on this machine, or train the teacher again"
        ) from error
    return weights
