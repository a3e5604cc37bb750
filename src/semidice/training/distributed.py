"""Batch normalisation over the batches of all processes, on GPUs.

torch has no such layer for a CPU: there, several processes equal one only with `model.options.norm: group`.
"""

import torch
from torch import nn


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with synchronised batch norms on a GPU; weights and names stay the same."""
    if device.type != "cuda":
        return model
    from timm.layers.norm_act import convert_sync_batchnorm

    synchronised: nn.Module = convert_sync_batchnorm(model)
    return synchronised
