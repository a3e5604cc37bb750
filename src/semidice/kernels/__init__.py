"""The numbers of `overlap.sums` and `overlap.mixture` with less memory traffic; a kernel never defines one.

    blocked   CPU: a few megabytes of voxels at a time, so that temporary values stay in the cache
    fused     GPU (Triton): reads the logits once forward and once backward

This module alone decides between the definition and a kernel. A loss on a GPU takes four steps from
`losses.SegmentationLoss.forward` to the launch:

    1. `segmentation_losses` (here)    asks `fused_applies`; if not, it computes the definition
    2. `fused.fused_mixture`           finds the plan for tensors of this kind, or checks them and makes one
    3. `plans.MixturePlan.losses`      allocates the results and runs its launches in order
    4. `launch.Launch.__call__`        finds the compiled kernel and launches it

`use_kernels(False)` makes this process use the definition only.
"""

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arrays import check_result, checks_all_values, class_weights, values_are_readable
from ..overlap.mixture import Losses, check_batch, losses_of
from ..overlap.options import MixtureOptions, SumsOptions
from ..overlap.sums import SegmentationSums, reference_sums
from .blocked import MIN_SIZE, blocked_sums

__all__ = ["use_kernels"]

# older versions do not compile the kernels
MIN_TRITON = (3, 5)


def _triton_version() -> tuple[int, ...]:
    """The version of Triton, from its source: to import it takes long. Empty if it is not installed."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ()
    version = re.search(r"__version__ = ['\"](\d+)\.(\d+)", Path(spec.origin).read_text(encoding="utf-8"))
    return tuple(map(int, version.groups())) if version else ()


_enabled = True
_has_triton = _triton_version() >= MIN_TRITON
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# one program computes the loss from the sums, and holds the sums of all classes at once
MAX_FUSED_CLASSES = 8192
# images are the second axis of a CUDA grid
MAX_FUSED_IMAGES = 65535


def use_kernels(enabled: bool) -> None:
    """Turn the kernels on (the default) or off, for this process."""
    if not isinstance(enabled, bool):
        raise ValueError(f"use_kernels takes True or False; got {enabled!r}")
    global _enabled
    _enabled = enabled


def segmentation_losses(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    options: MixtureOptions,
    *,
    class_weight: Sequence[float] | Tensor | None,
    parts: bool,
) -> Losses:
    """Check one output of a network and return its losses; ignored voxels must be in `valid` already."""
    # A compiled graph takes the sums as an operator, and `sync` needs the sums of the other processes.
    if not options.region.sync and fused_applies(prediction, target) and not torch.compiler.is_compiling():
        if checks_all_values():
            target = check_batch(prediction, target, valid, options)
        weight = None if class_weight is None else class_weights(class_weight, prediction)
        losses: Losses = _fused().fused_mixture(prediction, target, valid, options, weight, parts=parts)
        if checks_all_values():
            check_result(losses.total, prediction)
        return losses
    target = check_batch(prediction, target, valid, options)
    sums = segmentation_sums(prediction, target, valid, options.sums)
    losses = losses_of(sums, class_weights(class_weight, prediction), options, parts=parts)
    check_result(losses.total, prediction)
    return losses


def segmentation_sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
) -> SegmentationSums:
    """`reference_sums`, by a kernel where one applies: the same numbers to rounding, and gradients too."""
    sums = reference_sums
    if fused_applies(prediction, target):
        # not `_fused()`: the compiler cannot look into a cached function
        from .fused import fused_sums

        sums = fused_sums
    elif (
        _enabled
        and prediction.numel() >= MIN_SIZE
        and not target.requires_grad
        and prediction.device.type == "cpu"
        # neither compiled nor under vmap: both need plain operations
        and values_are_readable(prediction)
    ):
        sums = blocked_sums
    return sums(prediction, target, valid, options)


def fused_applies(prediction: Tensor, target: Tensor) -> bool:
    """Whether the Triton kernels can compute this: on a GPU, not float64, no gradient in the target."""
    if not (_enabled and _has_triton and isinstance(prediction, Tensor) and prediction.is_cuda):
        return False
    if not isinstance(target, Tensor) or target.requires_grad:
        return False
    if prediction.dtype not in _FUSED_DTYPES or prediction.ndim < 2:
        return False
    if prediction.layout is not torch.strided or target.layout is not torch.strided:
        return False
    if prediction.size(0) > MAX_FUSED_IMAGES or prediction.size(1) > MAX_FUSED_CLASSES:
        return False
    if torch.compiler.is_compiling():
        return True
    # vmap needs plain operations
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(prediction)
    return not is_wrapped and _triton_compiles_for(prediction.get_device())


@cache
def _triton_compiles_for(device: int) -> bool:
    """Whether a CUDA device has compute capability 8 or more."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _fused() -> Any:
    """The module of the Triton kernels; imported when first needed, because Triton takes long to import."""
    from . import fused

    return fused
