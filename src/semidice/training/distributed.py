"""Batch normalisation over the batches of all processes, also on a CPU, so that two processes equal one.

On a GPU, torch's own synchronised layers are used. They do not support a CPU; there, the layer below uses the
differentiable sum of the losses: first the mean, then the mean square about it, as in one process.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..overlap.stats import sum_across_processes


class _SynchronisedNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm whose training statistics are taken over all processes."""

    def forward(self, batch: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                batch, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        axes = [0, *range(2, batch.ndim)]
        shape = (1, -1, *[1] * (batch.ndim - 2))
        count = batch.numel() / batch.shape[1]
        sums = sum_across_processes(torch.cat([batch.sum(axes), batch.new_tensor([count])]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = batch - mean.view(shape)
        variance = sum_across_processes(centred.square().sum(axes)) / total
        if self.track_running_stats:
            with torch.no_grad():
                assert self.running_mean is not None
                assert self.running_var is not None
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * total / (total - 1), share)
        normalised = centred * torch.rsqrt(variance + self.eps).view(shape)
        if not self.affine:
            return normalised
        return normalised * self.weight.view(shape) + self.bias.view(shape)

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with synchronised batch norms; weights and names stay the same."""
    from timm.layers.norm_act import BatchNormAct2d, convert_sync_batchnorm

    if device.type == "cuda":
        synchronised: nn.Module = convert_sync_batchnorm(model)
        return synchronised
    for name, child in model.named_children():
        setattr(model, name, synchronise_norms(child, device))
    if isinstance(model, BatchNormAct2d):
        raise ValueError(
            "this encoder cannot be trained in several processes on a CPU, because its batch norm and "
            "activation are one layer; use a GPU, one process, or an encoder of smp such as resnet50"
        )
    if not isinstance(model, nn.modules.batchnorm._BatchNorm):
        return model
    layer = _SynchronisedNorm(
        model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats
    )
    layer.load_state_dict(model.state_dict())
    return layer
