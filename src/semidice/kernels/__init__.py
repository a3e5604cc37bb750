"""The sums of `sums`, computed with less memory traffic; a kernel imitates the definition and never is one.

    blocked   CPU: a few megabytes of voxels at a time, so that temporaries stay in the cache
    overlap   GPU (Triton): logits are read once forward and once backward. How they are gone through stands
              in `tilings`, what is launched in `plans`; `fused` gives it a gradient

They are used by themselves where they apply: `use_kernels(False)` keeps this process to the definition.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..arrays import Activation, values_are_readable
from ..overlap.forms import Form
from ..overlap.sums import SegmentationSums, reference_sums
from .blocked import MIN_SIZE, blocked_sums

_enabled = True
_has_triton = find_spec("triton") is not None
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# as many as the one program that makes a loss of the sums can hold at once
MAX_FUSED_CLASSES = 8192


def use_kernels(enabled: bool) -> None:
    """Turn the kernels on, as they are at the start, or off, for this process."""
    global _enabled
    _enabled = enabled


def segmentation_sums(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation,
    valid: Tensor | None,
    form: Form | None,
    entropy: bool,
) -> SegmentationSums:
    """`reference_sums`, by a kernel where one applies: the same numbers to rounding, and gradients too."""
    sums = reference_sums
    if fused_applies(prediction, target):
        from .fused import fused_sums

        sums = fused_sums
    elif _enabled and values_are_readable(prediction) and prediction.numel() >= MIN_SIZE:
        # Readable: neither compiled nor under vmap, which want plain operations to look into.
        sums = reference_sums if target.requires_grad else blocked_sums
    return sums(prediction, target, activation=activation, valid=valid, form=form, entropy=entropy)


def fused_applies(prediction: Tensor, target: Tensor) -> bool:
    """Whether the Triton kernels can take these: on a CUDA device, not float64, no gradient in the target."""
    if not fused_may_apply(prediction, target) or prediction.dtype not in _FUSED_DTYPES:
        return False
    # images are the second axis of a CUDA grid, which ends at 65535
    if prediction.size(0) > 65535 or prediction.size(1) > MAX_FUSED_CLASSES:
        return False
    return torch.compiler.is_compiling() or _triton_compiles_for(prediction.get_device())


def fused_may_apply(prediction: Tensor, target: Tensor) -> bool:
    """Of `fused_applies`, all that tensors of the same shapes, types and places may differ in."""
    if not (_enabled and _has_triton and isinstance(prediction, Tensor) and prediction.is_cuda):
        return False
    if not isinstance(target, Tensor) or target.requires_grad:
        return False
    # vmap wants plain operations
    return torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(prediction)


@cache
def _triton_compiles_for(device: int) -> bool:
    """Whether a CUDA device has compute capability 8 or more."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
