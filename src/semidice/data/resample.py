"""Resizes images, probabilities and class maps by one rule, so that they stay aligned.

A pixel is a square, and the image keeps its corners: the centre of pixel i of n is at (i + 1/2) / n, before
and after (align_corners=False). Along each axis, n pixels become m:
    m < n   a new pixel is the mean over the area it covers, which includes parts of pixels. So there is no
            aliasing, and a total (of a probability, or the area of a lesion) is kept exactly.
    m > n   linear interpolation between centres; beyond the outermost centres the outermost value
If m = n, no bit changes. Weights are 0 or more and sum to one: a probability stays a probability.

Left out: resizing images across slices, and nearest neighbours, which would move a boundary by half a pixel.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8


def resize_image(
    image: Float[np.ndarray, "*leading H W"], size: tuple[int, int]
) -> Float32[np.ndarray, "..."]:
    """Intensities (*leading, *size), within the range of the input.

    >>> resize_image(np.array([[0.0, 1.0, 2.0, 3.0]]), (1, 2))
    array([[0.5, 2.5]], dtype=float32)
    """
    resized = _resized(image.astype(np.float32), size)
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


def resize_soft_label(
    label: Float[np.ndarray, "C *space"],
    size: Sequence[int],
    *,
    valid: Bool[np.ndarray, "*space"] | None = None,
) -> tuple[Float32[np.ndarray, "..."], Bool[np.ndarray, "..."] | None]:
    """A soft label (C, *size) of one to three axes of space, and its valid voxels; sums over C are kept.

    Voxels outside `valid` do not reach the label. A new voxel is valid if half of it is: if its centre is
    inside a straight border, as in augmentation; the others are background, channel 0 of several.

    >>> label, valid = np.array([[0.2, 0.4, 1.0, 1.0]]), np.array([True, True, True, False])
    >>> resize_soft_label(label, (2,), valid=valid)
    (array([[0.3, 1. ]], dtype=float32), array([ True,  True]))
    """
    if valid is None:
        return _resize_axes(label, size), None
    share = _resize_axes(valid[None].astype(np.float32), size)
    mean = _resize_axes(np.where(valid, label, 0), size) / np.where(share > 0, share, 1)
    # shares are rounded
    inside = share[0] > 0.5 - 1e-6
    background = np.zeros((len(label), *[1] * len(size)), dtype=np.float32)
    background[0] = len(label) > 1
    return np.where(inside, mean.clip(0, 1), background).astype(np.float32), inside


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
    # times a constant of all classes, the probabilities are whole numbers, hence compared without rounding
    highest = _resized((classes == 0).astype(np.float64), size, scaled=False)
    for label in range(1, num_classes):
        drawn = classes == label
        if not drawn.any():
            continue
        score = _resized(drawn.astype(np.float64), size, scaled=False)
        chosen[score > highest] = label
        np.maximum(highest, score, out=highest)
    return chosen


def _resize_axes(label: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """`resize_image` along every axis but the first."""
    for axis, length in enumerate(size, 1):
        moved = np.moveaxis(label, axis, -1)
        label = np.moveaxis(resize_image(moved, (moved.shape[-2], length)), -1, axis)
    return label


def _resized(values: np.ndarray, size: tuple[int, int], *, scaled: bool = True) -> np.ndarray:
    """Weighted sums along the last two axes, added tap by tap in a fixed order.

    The rounding of a matrix product would depend on threads and on memory addresses.
    scaled: False takes the weights of `_taps` as whole numbers, without dividing by their total.
    """
    for axis, length in zip((-2, -1), size, strict=True):
        if length == values.shape[axis]:
            continue
        index, weight, total = _taps(values.shape[axis], length)
        share = (weight / total if scaled else weight).astype(values.dtype)
        share = share if axis == -1 else share[:, :, None]
        resized: np.ndarray = values.take(index[0], axis) * share[0]
        for tap in range(1, len(index)):
            resized += values.take(index[tap], axis) * share[tap]
        values = resized
    return values


def _taps(length: int, new: int) -> tuple[Int[np.ndarray, "taps new"], Int[np.ndarray, "taps new"], int]:
    """Index, weight and total of the pixels in each of `new` pixels, for a length that changes.

    New pixel i is the sum over k of weight[k, i] times pixel index[k, i], divided by the total.
    """
    position = np.arange(new)
    if new < length:
        # in units of 1/new of a pixel: new pixel i covers [i, i+1] * length, pixel j covers [j, j+1] * new
        start, stop = position * length, (position + 1) * length
        first = start // new
        num_taps = int((-(-stop // new) - first).max())
        index = first + np.arange(num_taps)[:, None]
        weight = np.minimum(stop, (index + 1) * new) - np.maximum(start, index * new)
        return index.clip(max=length - 1), weight.clip(min=0), length
    # in units of 1/(2 new) of a pixel, from the centre of pixel 0
    centre = ((2 * position + 1) * length - new).clip(0, 2 * new * (length - 1))
    first, rest = centre // (2 * new), centre % (2 * new)
    index = np.stack([first, (first + 1).clip(max=length - 1)])
    return index, np.stack([2 * new - rest, rest]), 2 * new
