"""Resizes images, probabilities and class maps by one rule, so that they stay aligned.

A pixel is a square, and the image keeps its corners: the centre of pixel i of n is at (i + 1/2) / n, before
and after (align_corners=False). Along each axis, n pixels become m:
    m < n   a new pixel is the mean over the area it covers, which includes parts of pixels. So there is no
            aliasing, and a total (of a probability, or the area of a lesion) is kept exactly.
    m > n   linear interpolation between centres; beyond the outermost centres the outermost value
If m = n, no bit changes. Weights are 0 or more and sum to one: a probability stays a probability.

Left out: resizing across slices, and nearest neighbours, which would move a boundary by half a pixel.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8


@dataclass(frozen=True)
class _Taps:
    """New pixel i is the sum over k of weight[k, i] times pixel index[k, i], divided by `total`.

    Weights are whole numbers, so that probabilities of classes are compared without rounding.
    """

    index: Int[np.ndarray, "taps new"]
    weight: Int[np.ndarray, "taps new"]
    total: int


def resize_image(
    image: Float[np.ndarray, "*leading H W"], size: tuple[int, int]
) -> Float32[np.ndarray, "..."]:
    """Intensities (*leading, *size), within the range of the input.

    >>> resize_image(np.array([[0.0, 1.0, 2.0, 3.0]]), (1, 2))
    array([[0.5, 2.5]], dtype=float32)
    """
    resized = image.astype(np.float32)
    for axis, length in zip((-2, -1), size, strict=True):
        taps = _taps(image.shape[axis], length)
        share = (taps.weight / taps.total).astype(np.float32)
        resized = _gathered(resized, axis, taps.index, share)
    # shares are rounded, so their sum may be slightly more than 1
    clipped: np.ndarray = np.clip(resized, image.min(), image.max(), dtype=np.float32)
    return clipped


def resize_probability(
    prob: Float[np.ndarray, "*leading C H W"], size: tuple[int, int]
) -> Float32[np.ndarray, "..."]:
    """Class probabilities (*leading, C, *size) that sum to one over the classes.

    >>> resize_probability(np.array([[[1.0, 0.5, 0.0, 0.0]], [[0.0, 0.5, 1.0, 1.0]]]), (1, 2))[1]
    array([[0.25, 1.  ]], dtype=float32)
    """
    resized: np.ndarray = resize_image(prob, size)
    resized /= resized.sum(axis=-3, keepdims=True)
    return resized


def resize_classes(
    classes: UInt8[np.ndarray, "*leading H W"], size: tuple[int, int], *, num_classes: int
) -> UInt8[np.ndarray, "..."]:
    """The most probable class at each new pixel; at a tie the lowest class.

    With two classes, foreground must cover strictly more than half of a pixel.

    >>> resize_classes(np.array([[0, 1, 1, 1, 0, 0]], dtype=np.uint8), (1, 3), num_classes=2)
    array([[0, 1, 0]], dtype=uint8)
    """
    if classes.shape[-2:] == size:
        return classes.copy()
    chosen = np.zeros((*classes.shape[:-2], *size), dtype=np.uint8)
    highest = _score(classes == 0, size)
    for label in range(1, num_classes):
        drawn = classes == label
        if not drawn.any():
            continue
        score = _score(drawn, size)
        chosen[score > highest] = label
        np.maximum(highest, score, out=highest)
    return chosen


def _score(drawn: np.ndarray, size: tuple[int, int]) -> Float[np.ndarray, "..."]:
    """Probability of a mask times a constant of all masks: whole numbers, hence exact."""
    score = drawn.astype(np.float64)
    for axis, length in zip((-2, -1), size, strict=True):
        taps = _taps(drawn.shape[axis], length)
        score = _gathered(score, axis, taps.index, taps.weight.astype(np.float64))
    return score


def _gathered(
    values: np.ndarray, axis: int, index: Int[np.ndarray, "taps new"], weight: Float[np.ndarray, "taps new"]
) -> np.ndarray:
    """Weighted sums along the axis -1 or -2, added tap by tap in a fixed order.

    The rounding of a matrix product would depend on threads and on memory addresses.
    """
    if index.shape == (1, values.shape[axis]):
        return values
    weight = weight if axis == -1 else weight[:, :, None]
    total: np.ndarray = values.take(index[0], axis) * weight[0]
    for tap in range(1, len(index)):
        total += values.take(index[tap], axis) * weight[tap]
    return total


def _taps(length: int, new: int) -> _Taps:
    """The weights of `length` pixels in `new` pixels, as whole numbers."""
    position = np.arange(new)
    if new == length:
        return _Taps(position[None], np.ones((1, new), dtype=np.int64), 1)
    if new < length:
        # in units of 1/new of a pixel: new pixel i covers [i, i+1] * length, pixel j covers [j, j+1] * new
        start, stop = position * length, (position + 1) * length
        first = start // new
        num_taps = int((-(-stop // new) - first).max())
        index = first + np.arange(num_taps)[:, None]
        weight = np.minimum(stop, (index + 1) * new) - np.maximum(start, index * new)
        return _Taps(index.clip(max=length - 1), weight.clip(min=0), length)
    # in units of 1/(2 new) of a pixel, from the centre of pixel 0
    centre = ((2 * position + 1) * length - new).clip(0, 2 * new * (length - 1))
    first, rest = centre // (2 * new), centre % (2 * new)
    index = np.stack([first, (first + 1).clip(max=length - 1)])
    return _Taps(index, np.stack([2 * new - rest, rest]), 2 * new)
