"""Probabilities of images of any size from a network that needs multiples of 32.

An image of up to `window` voxels per side is padded on all sides with zeros (the mean intensity), predicted
as a whole, and cropped. A larger image is predicted in overlapping windows. Along each axis, voxel i of a
window of n voxels has the weight sin^2(pi (i + 1/2) / n), divided by the sum over all windows at that voxel.
So the weights at a voxel sum to one, and a network that sees single voxels gives the same result as on the
whole image. The device holds one batch of windows at a time; the image and the result stay on the CPU.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ..arrays import SIZE_MULTIPLE
from ..data.batches.storage import centred, common_space
from ..errors import UserError

# the smallest share of a window that the next one covers too
_OVERLAP = 0.25


def windowed_probability(
    predictor: Callable[[Tensor], Tensor],
    image: Float[Tensor, "N channels *space"],
    *,
    device: torch.device | str,
    window: int | Sequence[int] | None = 1024,
    batch_size: int = 1,
    on_batch: Callable[[float], object] = lambda _: None,
) -> Float32[Tensor, "N C *space"]:
    """Probabilities of normalised images, on the CPU.

    predictor: returns the probabilities of a batch on the device. window: an image with more voxels per side
    is predicted in windows of this size (or of these sizes), multiples of 32; None predicts it as a whole.
    batch_size: images or windows per batch. on_batch(share) is called after each share of the work.
    """
    space = image.shape[2:]
    sizes = [window] * len(space) if isinstance(window, int) else list(space if window is None else window)
    if window is not None and any(size < SIZE_MULTIPLE or size % SIZE_MULTIPLE for size in sizes):
        raise UserError(f"window must be a multiple of {SIZE_MULTIPLE} voxels; got {window}")
    if batch_size < 1:
        raise UserError(f"batch_size must be 1 or more; got {batch_size}")
    along = [_windows_along(length, size) for length, size in zip(space, sizes, strict=True)]
    windows = [
        (number, tuple(voxels for voxels, _ in parts), [weight for _, weight in parts])
        for number, *parts in product(range(len(image)), *along)
    ]
    result: Tensor | None = None
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        images = torch.stack([image[(number, slice(None), *voxels)] for number, voxels, _ in batch])
        padded_space = common_space([images.shape[2:]])
        used = (slice(None), slice(None), *centred(images.shape[2:], padded_space))
        padded = torch.zeros(*images.shape[:2], *padded_space, device=device)
        padded[used] = images.to(device)
        probs = predictor(padded)[used].float().cpu()
        if result is None:
            result = torch.zeros(len(image), probs.shape[1], *space)
        for prob, (number, voxels, (weight, *others)) in zip(probs, batch, strict=True):
            for other in others:
                weight = weight[..., None] * other
            result[(number, slice(None), *voxels)] += prob * weight
        on_batch(len(batch) / len(windows))
    assert result is not None
    return result if len(windows) == len(image) else result / result.sum(1, keepdim=True)


def _windows_along(length: int, window: int) -> list[tuple[slice, Float32[Tensor, " size"]]]:
    """Voxels and weights of the windows along an axis, evenly spaced, the first and last at the borders."""
    size = min(length, window)
    stride = max(1, math.floor(window * (1 - _OVERLAP)))
    count = 1 + math.ceil((length - size) / stride)
    starts = [round(number * (length - size) / max(1, count - 1)) for number in range(count)]
    intervals = [slice(start, start + size) for start in starts]
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    weight = torch.sin(math.pi * centre).square()
    total = torch.zeros(length, dtype=torch.float64)
    for voxels in intervals:
        total[voxels] += weight
    return [(voxels, (weight / total[voxels]).float()) for voxels in intervals]
