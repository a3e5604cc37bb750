"""The numbers of `overlap` with less memory traffic; a kernel never defines one.

    blocked   CPU: a few megabytes of voxels at a time, so that temporary values stay in the cache
    fused     GPU (Triton): reads the logits once forward and once backward

This module alone decides between the definition and a kernel. A loss on a GPU takes three steps from
`losses.SegmentationLoss.forward` to the launch:

    1. `segmentation_total` (here)     asks `fused_applies`; if not, it computes the definition
    2. `fused.fused_total`             finds the plan for tensors of this kind, or makes one
    3. `plans.launch_loss`             allocates the results and launches the kernels in order

`use_kernels(False)` makes this process use the definition only.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, class_weights, values_are_readable
from ..losses.options import LossOptions
from ..overlap import (
    SumsOptions,
    VoxelSums,
    reference_sums,
    sums_options,
    terms_of,
    total_of,
)
from .blocked import blocked_applies, blocked_sums

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
# a program holds all classes of its voxels in registers
MAX_FUSED_CLASSES = 256
# images are the second axis of a CUDA grid
MAX_FUSED_IMAGES = 65535


def use_kernels(enabled: bool) -> None:
    """Turn the kernels on (the default) or off, for this process."""
    if not isinstance(enabled, bool):
        raise ValueError(f"use_kernels takes True or False; got {enabled!r}")
    global _enabled
    _enabled = enabled


def segmentation_total(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
    sync: bool,
) -> Float[Tensor, ""]:
    """Cross entropy and region loss of checked inputs, each times its weight, summed."""
    if _fuses(prediction, target, sync=sync):
        total: Tensor = _fused().fused_total(prediction, target, valid, weight, options, activation)
        return total
    return total_of(segmentation_terms(prediction, target, valid, weight, options, activation, sync), options)


def segmentation_terms(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    activation: Activation,
    sync: bool,
) -> dict[str, Tensor]:
    """Cross entropy and region loss of checked inputs by name, unweighted, each with a gradient."""
    if _fuses(prediction, target, sync=sync):
        terms: dict[str, Tensor] = _fused().fused_terms(
            prediction, target, valid, weight, options, activation
        )
        return terms
    sums = segmentation_sums(prediction, target, valid, sums_options(options, activation))
    return terms_of(sums, class_weights(weight, prediction), options, sync=sync)


def _fuses(prediction: Tensor, target: Tensor, *, sync: bool) -> bool:
    """Whether one kernel computes the loss as well as the sums.

    A compiled graph takes the sums as an operator, and `sync` needs the sums of the other processes.
    """
    return not sync and not torch.compiler.is_compiling() and fused_applies(prediction, target)


def segmentation_sums(
    prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions
) -> VoxelSums:
    """`reference_sums`, by a kernel where one applies: the same numbers to rounding, and gradients too."""
    sums = reference_sums
    if fused_applies(prediction, target):
        # not `_fused()`: the compiler cannot look into a cached function
        from .fused import fused_sums

        sums = fused_sums
    # neither compiled nor under vmap: both need plain operations
    elif _enabled and values_are_readable(prediction) and blocked_applies(prediction, target, valid):
        sums = blocked_sums
    return sums(prediction, target, valid, options)


def fused_applies(prediction: Tensor, target: Tensor) -> bool:
    """Whether the Triton kernels apply: on a GPU, up to 256 classes, not float64, no gradient in a target."""
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
