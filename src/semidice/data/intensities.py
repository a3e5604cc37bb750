"""Intensities, from raw values to the input of a network: the rule of `prepare`, `predict` and training.

    raw x    -> (x - low) / (high - low), clipped to [0, 1]. low and high are the window, or else percentiles
                of the channel over the whole scan; if these are equal, its smallest and largest value.
    [0, 1]   -> resized, and rounded to int16: 0 .. 32767. Without a window, 8-bit images are stored as they
                are (uint8): resized, and rounded.
    stored   -> (intensity - mean) / std, with the mean and std of the dataset's channel

Values are clipped before they are resized, so that values outside the window do not leak into it.
"""

import numpy as np
from jaxtyping import Float32
from torch import Tensor

from .manifest import PrepareOptions
from .resample import resize_image

# the intensity in [0, 1] is the stored value times this unit
INTENSITY_UNITS = {"uint8": 1 / 255, "int16": 1 / 32767}

Limits = tuple[float, float]


def levels_of(dtype: np.dtype[np.generic]) -> int:
    """The stored value of intensity 1."""
    return round(1 / INTENSITY_UNITS[dtype.name])


def intensity_limits(image: np.ndarray, options: PrepareOptions) -> list[Limits] | None:
    """The raw values of each channel that become 0 and 1; None if the image is stored with its 8 bits.

    image: (channels, *space), of the whole scan.
    """
    keeps_bytes = options.window is None and image.dtype == np.uint8
    limits = []
    for number, channel in enumerate(image, 1):
        lowest, highest = float(channel.min()), float(channel.max())
        # both are NaN if any value is NaN
        if not (np.isfinite(lowest) and np.isfinite(highest)):
            raise ValueError(f"channel {number} holds values that are not finite: repair the image")
        if lowest == highest:
            raise ValueError(f"channel {number} is {lowest:g} everywhere: the image has no contrast")
        if options.window is not None:
            low, high = options.window
            if lowest >= high or highest <= low:
                raise ValueError(
                    f"channel {number} holds values from {lowest:g} to {highest:g}, none of them in the "
                    f"window ({low:g}, {high:g}): choose another --window"
                )
            limits.append((low, high))
        elif not keeps_bytes:
            low, high = map(float, np.percentile(channel, options.percentiles))
            limits.append((low, high) if low < high else (lowest, highest))
    return None if keeps_bytes else limits


def stored_image(image: np.ndarray, limits: list[Limits] | None, size: tuple[int, int] | None) -> np.ndarray:
    """The image of one case (channels, *space) as it is stored, with the limits of its scan.

    size: of the result; None keeps the size.
    """
    if limits is None:
        # float32 holds all 256 values exactly
        resized = image if size is None else np.rint(resize_image(image.astype(np.float32), size))
        return resized.astype(np.uint8, copy=False)
    scaled = np.empty(image.shape, dtype=np.float32)
    for channel, (low, high), out in zip(image, limits, scaled, strict=True):
        np.clip((channel.astype(np.float32) - low) / (high - low), 0, 1, out=out)
    if size is not None:
        scaled = resize_image(scaled, size)
    return np.rint(scaled * levels_of(np.dtype(np.int16))).astype(np.int16)


def scale_and_shift(
    unit: float | Tensor, mean: Float32[Tensor, "*any"], std: Float32[Tensor, "*any"]
) -> tuple[Tensor, Tensor]:
    """Factors a and b with a * stored + b = (intensity - mean) / std; intensity = unit * stored."""
    return unit / std, -mean / std
