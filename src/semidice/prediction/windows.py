"""Probabilities of images of any size from a network that needs multiples of 32.

An image of up to `window` pixels per side is padded on all sides with zeros (the mean intensity), predicted
as a whole, and cropped. A larger image is predicted in overlapping windows. Along each
axis, pixel i of a window of n pixels has the weight sin^2(pi (i + 1/2) / n), divided by the sum over all
windows at that pixel. So the weights at a pixel sum to one, and a network that sees single pixels gives the
same result as on the whole image. The device holds one batch of windows at a time; the image and the result
stay on the CPU.
"""

import math
from collections.abc import Callable
from itertools import product

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ..arrays import SIZE_MULTIPLE
from ..data.storage import centred, common_space


def windowed_probability(
    predictor: Callable[[Tensor], Tensor],
    image: Float[Tensor, "N channels H W"],
    *,
    device: torch.device | str,
    window: int | None = 1024,
    overlap: float = 0.25,
    batch_size: int = 1,
    on_batch: Callable[[float], object] = lambda _: None,
) -> Float32[Tensor, "N C H W"]:
    """Probabilities of normalised images, on the CPU.

    predictor: returns the probabilities of a batch on the device. window: an image with more pixels per side
    is predicted in windows of this size, a multiple of 32; None predicts it as a whole.
    overlap: the smallest share of a window that the next one covers too, in [0, 1).
    batch_size: images or windows per batch. on_batch(share) is called after each share of the work.
    """
    if window is not None and (window < SIZE_MULTIPLE or window % SIZE_MULTIPLE):
        raise ValueError(f"window must be a multiple of {SIZE_MULTIPLE} pixels; got {window}")
    if not 0 <= overlap < 1:
        raise ValueError(f"window overlap must lie in [0, 1); got {overlap}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more; got {batch_size}")
    rows, columns = (_windows_along(length, window or length, overlap) for length in image.shape[-2:])
    windows = list(product(range(len(image)), rows, columns))
    result: Tensor | None = None
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        images = torch.stack([image[number, :, row, column] for number, (row, _), (column, _) in batch])
        space = common_space([images.shape[2:]])
        rows_used, columns_used = centred(images.shape[2:], space)
        padded = torch.zeros(*images.shape[:2], *space, device=device)
        padded[:, :, rows_used, columns_used] = images.to(device)
        probs = predictor(padded)[:, :, rows_used, columns_used].float().cpu()
        if result is None:
            result = torch.zeros(len(image), probs.shape[1], *image.shape[-2:])
        for prob, (number, (row, row_weight), (column, column_weight)) in zip(probs, batch, strict=True):
            result[number, :, row, column] += prob * (row_weight[:, None] * column_weight)
        on_batch(len(batch) / len(windows))
    assert result is not None
    return result if len(windows) == len(image) else result / result.sum(1, keepdim=True)


def _windows_along(length: int, window: int, overlap: float) -> list[tuple[slice, Float32[Tensor, " size"]]]:
    """Pixels and weights of the windows along an axis, evenly spaced, the first and last at the borders."""
    size = min(length, window)
    stride = max(1, math.floor(window * (1 - overlap)))
    count = 1 + math.ceil((length - size) / stride)
    starts = [round(number * (length - size) / max(1, count - 1)) for number in range(count)]
    intervals = [slice(start, start + size) for start in starts]
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    weight = torch.sin(math.pi * centre).square()
    total = torch.zeros(length, dtype=torch.float64)
    for pixels in intervals:
        total[pixels] += weight
    return [(pixels, (weight / total[pixels]).float()) for pixels in intervals]
