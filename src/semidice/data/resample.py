"""Images, probabilities and class maps at another size, all by one rule, so that they stay on each other.

A pixel is a square, and the image keeps its corners: (i + 1/2) / n is where the centre of pixel i of n lies,
before and after (align_corners=False). Along each axis, n pixels become m:
    fewer   a new pixel is the mean over the area it covers, parts of pixels counted as parts; so nothing
            aliases, and a total (the mass of a probability, a lesion's area) is kept exactly
    more    linear interpolation between centres, and the outermost value beyond the outermost centres
Where n = m nothing changes by a bit. Weights are 0 or more and sum to one: a probability stays one.

Left out: volumes along their slices, and nearest neighbours, which would move a boundary by half a pixel.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8


@dataclass(frozen=True)
class _Taps:
    """New pixel i is the sum over k of weight[k, i] times pixel index[k, i], divided by `total`.

    Weights are whole numbers: class maps are compared without rounding, so a tie is a tie.
    """

    index: Int[np.ndarray, "taps new"]
    weight: Int[np.ndarray, "taps new"]
    total: int


def resize_image(
    image: Float[np.ndarray, "*leading H W"], size: tuple[int, int]
) -> Float32[np.ndarray, "..."]:
    """Intensities (*leading, *size); none is beyond the smallest and largest that came.

    >>> resize_image(np.array([[0.0, 1.0, 2.0, 3.0]]), (1, 2))
    array([[0.5, 2.5]], dtype=float32)
    """
    resized = image.astype(np.float32)
    for axis, length in zip((-2, -1), size, strict=True):
        taps = _taps(image.shape[axis], length)
        share = (taps.weight / taps.total).astype(np.float32)
        resized = _gathered(resized, axis, taps.index, share)
    # shares are rounded, so their sum may be one and a bit
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
    """The class of the highest probability at each new pixel; between equals the lowest class.

    So of two classes, foreground is what covers strictly more than half.

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
    """Probability of a mask, times a number that is the same for all masks; whole numbers, hence exact."""
    score = drawn.astype(np.float64)
    for axis, length in zip((-2, -1), size, strict=True):
        taps = _taps(drawn.shape[axis], length)
        score = _gathered(score, axis, taps.index, taps.weight.astype(np.float64))
    return score


def _gathered(
    values: np.ndarray, axis: int, index: Int[np.ndarray, "taps new"], weight: Float[np.ndarray, "taps new"]
) -> np.ndarray:
    """Weighted sums along the axis -1 or -2; one tap after the other, so in the same order everywhere.

    Not as a product with a matrix: its rounding depends on threads and on where arrays lie in memory.
    """
    if index.shape == (1, values.shape[axis]):
        return values
    weight = weight if axis == -1 else weight[:, :, None]
    total: np.ndarray = values.take(index[0], axis) * weight[0]
    for tap in range(1, len(index)):
        total += values.take(index[tap], axis) * weight[tap]
    return total


def _taps(length: int, new: int) -> _Taps:
    """What `length` pixels in a row give to `new` ones, in whole numbers of a pixel's parts."""
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
