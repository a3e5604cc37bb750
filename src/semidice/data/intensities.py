"""Intensities, from raw values to the input of a network: the rule of `prepare`, `predict` and training.

    raw x    -> (x - low) / (high - low), clipped to [0, 1]. low and high are the window, or else percentiles
                of the channel over the whole scan; if these are equal, its smallest and largest value.
    [0, 1]   -> resized, and rounded to int16: 0 .. 32767
    0 .. 255 -> resized, and rounded to uint8, if all raw images of the dataset are 8-bit pictures and there
                is no window (`keep_bytes`)
    stored   -> (intensity - mean) / std, with the mean and std of the channel over the training cases

`prepare` chooses one rule for a dataset, and `predict` follows it for files of any type. A NIfTI always has
its percentiles: programs store it as uint8 if its values happen to be small.
Values are clipped before they are resized, so that values outside the window do not leak into it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor

from ..errors import UserError
from .manifest import PrepareOptions, Scan
from .resample import resize_image

# the intensity in [0, 1] is the stored value times this unit
INTENSITY_UNITS = {"uint8": 1 / 255, "int16": 1 / 32767}

_PERCENTILES = (0.5, 99.5)
_BYTES = (0.0, 255.0)

# raw values of a channel that become 0 and 1
Limits = tuple[float, float]

# values that are added at once; their squares fit into int64
_NUM_ADDED = 1 << 20


class MeanStd(NamedTuple):
    """Mean and standard deviation of each channel's intensity in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def levels_of(dtype: np.dtype[np.generic]) -> int:
    """The stored value of intensity 1."""
    return round(1 / INTENSITY_UNITS[dtype.name])


def intensity_limits(image: np.ndarray, options: PrepareOptions) -> list[Limits]:
    """The raw values of each channel of a whole scan (channels, *space) that become 0 and 1."""
    limits = []
    for number, channel in enumerate(image, 1):
        lowest, highest = float(channel.min()), float(channel.max())
        holds = f"channel {number} holds values from {lowest:g} to {highest:g}"
        # both are NaN if any value is NaN
        if not (np.isfinite(lowest) and np.isfinite(highest)):
            raise UserError(f"channel {number} holds values that are not finite: repair the image")
        if lowest == highest:
            raise UserError(f"channel {number} is {lowest:g} everywhere: the image has no contrast")
        if options.keep_bytes:
            is_share = channel.dtype != np.uint8 and highest <= 1 and (channel != np.rint(channel)).any()
            if lowest < 0 or highest > 255 or is_share:
                raise UserError(
                    f"{holds}, but the dataset has 8-bit pictures with values from 0 to 255: save the image "
                    "with 8 bits"
                )
            limits.append(_BYTES)
        elif options.window is not None:
            low, high = options.window
            if lowest >= high or highest <= low:
                raise UserError(
                    f"{holds}, none of them in the window ({low:g}, {high:g}): choose another --window"
                )
            limits.append((low, high))
        else:
            # the same type for every file, so that a copy of another type has the same percentiles
            low, high = map(float, np.percentile(channel.astype(np.float32, copy=False), _PERCENTILES))
            limits.append((low, high) if low < high else (lowest, highest))
    return limits


def stored_image(
    image: np.ndarray, limits: Sequence[Limits], size: tuple[int, int] | None, *, keep_bytes: bool
) -> np.ndarray:
    """The image of one case (channels, *space) as it is stored, with the limits of its scan.

    size: of the result; None keeps the size.
    """
    if keep_bytes:
        # float32 holds all 256 values exactly
        resized = image if size is None else np.rint(resize_image(image.astype(np.float32), size))
        return resized.astype(np.uint8, copy=False)
    scaled = np.empty(image.shape, dtype=np.float32)
    for channel, (low, high), out in zip(image, limits, scaled, strict=True):
        np.clip((channel.astype(np.float32) - low) / (high - low), 0, 1, out=out)
    if size is not None:
        scaled = resize_image(scaled, size)
    return np.rint(scaled * levels_of(np.dtype(np.int16))).astype(np.int16)


def stored_mean_std(images: Iterable[np.ndarray]) -> MeanStd:
    """Mean and standard deviation of stored cases, each (channels, *space).

    Whole numbers are added, so the order does not matter.
    """
    count, total, squares = 0, Counter[int](), Counter[int]()
    for image in images:
        levels = levels_of(image.dtype)
        count += image[0].size
        for number, channel in enumerate(image):
            values = channel.reshape(-1)
            # some values at a time: an int64 copy of a volume may not fit into memory
            for start in range(0, len(values), _NUM_ADDED):
                part = values[start : start + _NUM_ADDED].astype(np.int64)
                total[number] += int(part.sum())
                squares[number] += int(np.square(part).sum())
    mean = tuple(total[number] / (count * levels) for number in total)
    variances = ((squares[number] * count - total[number] ** 2) / (count * levels) ** 2 for number in total)
    return MeanStd(mean, tuple(map(math.sqrt, variances)))


def pooled_mean_std(scans: Sequence[Scan]) -> MeanStd:
    """Mean and standard deviation over the voxels of scans that have their own; rounded only at the end.

    A ValueError if a channel is constant.
    """
    count = sum(scan.num_voxels for scan in scans)
    sums: list[tuple[Fraction, Fraction]] = []
    for scan in scans:
        sums = sums or [(Fraction(0), Fraction(0))] * len(scan.mean)
        # fractions are exact: the order of the scans does not matter
        moments = [(Fraction(mean), Fraction(std)) for mean, std in zip(scan.mean, scan.std, strict=True)]
        sums = [
            (total + scan.num_voxels * mean, squares + scan.num_voxels * (std * std + mean * mean))
            for (total, squares), (mean, std) in zip(sums, moments, strict=True)
        ]
    means, deviations = [], []
    for channel, (total, squares) in enumerate(sums, 1):
        variance = squares / count - (total / count) ** 2
        if not variance:
            raise UserError(f"channel {channel} has the same value in all cases: it has no contrast")
        means.append(float(total / count))
        deviations.append(math.sqrt(variance))
    return MeanStd(tuple(means), tuple(deviations))


class Normaliser:
    """(intensity - mean) / std of stored images: the same bits in training and in every prediction.

    mean, std: of each channel, on the device.
    """

    def __init__(
        self, mean_std: MeanStd, dtype: np.dtype[Any], num_axes: int, device: torch.device | str
    ) -> None:
        self.mean, self.std = (
            torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in mean_std
        )
        # a tensor: torch divides a number by a tensor in two steps, which can change the last bit
        unit = torch.tensor(INTENSITY_UNITS[dtype.name], device=device)
        factors = unit / self.std, -self.mean / self.std
        self._scale, self._shift = (factor.view(-1, *[1] * num_axes) for factor in factors)

    def __call__(self, stored: Shaped[Tensor, "N channels *space"]) -> Float32[Tensor, "N channels *space"]:
        """Outside of a case, the result has no meaning."""
        return stored.float().mul_(self._scale).add_(self._shift)
