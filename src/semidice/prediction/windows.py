"""Probabilities of images of any size from a network that wants multiples of 32.

Up to `window` pixels a side an image is filled up at the bottom and right with zeros, the mean intensity,
predicted whole, and cut back. A larger one is predicted in windows that overlap. Along each axis a window
has the weight sin^2 of the way through it, divided by the sum over windows there, so the weights of all
windows at a pixel sum to one: a network that looks at single pixels gives the same as on the whole image.
On the device there is one batch of windows at a time; the image and the result stay on the CPU.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from ..arrays import SIZE_MULTIPLE

Predictor = Callable[[Tensor], Tensor]


def padded_probability(
    predictor: Predictor, image: Float[Tensor, "N channels H W"], *, multiple: int = SIZE_MULTIPLE
) -> Float[Tensor, "N C H W"]:
    """What the predictor says of images filled up with zeros to multiples, of the images themselves.

    >>> padded_probability(lambda image: image + 1, torch.zeros(1, 1, 3, 5), multiple=4).shape
    torch.Size([1, 1, 3, 5])
    """
    height, width = image.shape[-2:]
    filled = F.pad(image, (0, -width % multiple, 0, -height % multiple))
    return predictor(filled)[..., :height, :width]


def windowed_probability(
    predictor: Predictor,
    image: Float[Tensor, "N channels H W"],
    *,
    device: torch.device | str,
    window: int | None = 1024,
    overlap: float = 0.25,
    batch_size: int = 1,
    multiple: int = SIZE_MULTIPLE,
    on_batch: Callable[[float], object] = lambda _: None,
) -> Float32[Tensor, "N C H W"]:
    """Probabilities of normalised images, on the CPU; predictor: from a batch on the device to its own.

    window: of more pixels a side, an image is predicted in windows of this size, a multiple of `multiple`;
    None predicts it whole.
    overlap: the least share of a window that the next one covers again, in [0, 1).
    batch_size: images, or windows, at once. on_batch(share) is called after that share of the work.
    """
    if window is not None and (window < multiple or window % multiple):
        raise ValueError(f"window must be a multiple of {multiple} pixels; got {window}")
    if not 0 <= overlap < 1:
        raise ValueError(f"window overlap must lie in [0, 1); got {overlap}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more; got {batch_size}")
    rows, columns = (_Axis(length, window or length, overlap) for length in image.shape[-2:])
    places = [
        _Place(number, row, column)
        for number, row, column in product(
            range(len(image)), range(len(rows.starts)), range(len(columns.starts))
        )
    ]
    result: Tensor | None = None
    for first in range(0, len(places), batch_size):
        chosen = places[first : first + batch_size]
        inside = [(at.image, slice(None), rows.inside(at.row), columns.inside(at.column)) for at in chosen]
        cut = torch.stack([image[where] for where in inside])
        prob = padded_probability(predictor, cut.to(device), multiple=multiple).float().cpu()
        if result is None:
            result = torch.zeros(len(image), prob.shape[1], *image.shape[-2:])
        for at, where, part in zip(chosen, inside, prob, strict=True):
            result[where] += part * (rows.weight[at.row][:, None] * columns.weight[at.column])
        on_batch(len(chosen) / len(places))
    assert result is not None
    return result if len(places) == len(image) else result / result.sum(1, keepdim=True)


class _Place(NamedTuple):
    """Which image, and which window of it."""

    image: int
    row: int
    column: int


class _Axis:
    """Where windows start along an axis, and the weight of each: (windows, length of a window)."""

    def __init__(self, length: int, window: int, overlap: float) -> None:
        self.size = min(length, window)
        stride = max(1, math.floor(window * (1 - overlap)))
        count = 1 + math.ceil((length - self.size) / stride)
        # spread evenly, the first and last at the borders
        self.starts = [round(number * (length - self.size) / max(1, count - 1)) for number in range(count)]
        way = (torch.arange(self.size, dtype=torch.float64) + 0.5) / self.size
        weight = torch.sin(math.pi * way).square()
        total = torch.zeros(length, dtype=torch.float64)
        for start in self.starts:
            total[start : start + self.size] += weight
        self.weight = torch.stack(
            [weight / total[start : start + self.size] for start in self.starts]
        ).float()

    def inside(self, number: int) -> slice:
        """Pixels of a window."""
        return slice(self.starts[number], self.starts[number] + self.size)
