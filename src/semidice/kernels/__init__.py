"""The sums of `sums`, computed with less memory traffic; a kernel imitates the definition and never is one.

    blocked   CPU: a few hundred kilobytes of voxels at a time, so that temporaries stay in the cache

They are used by themselves where they apply: `use_kernels(False)` keeps this process to the definition.
"""

from torch import Tensor

from ..arrays import Activation, values_are_readable
from ..forms import Form
from ..sums import SegmentationSums, reference_sums
from .blocked import SMALLEST_SIZE, blocked_sums

_enabled = True


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
    # Readable: on the CPU, neither compiled nor under vmap, which want plain operations to look into.
    blocks = values_are_readable(prediction) and not target.requires_grad
    if _enabled and blocks and prediction.numel() >= SMALLEST_SIZE:
        return blocked_sums(
            prediction, target, activation=activation, valid=valid, form=form, entropy=entropy
        )
    return reference_sums(prediction, target, activation=activation, valid=valid, form=form, entropy=entropy)
