"""Isotonic calibration: the increasing function of the probability that is nearest to the labels.

The weighted least-squares fit, which is also the most likely one, by pooling adjacent violators:
probabilities whose mean labels decrease share their mean. Between the probabilities that occurred the
function is linear, and outside of them constant.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .calibrator import StoredCalibrator
from .curves import UNITS, CurveCalibrator, interpolated


class IsotonicCalibrator(CurveCalibrator):
    """An increasing function of the probability, without any other assumption.

    Exact for any number of voxels, from counts at 65536 probabilities. It needs more data than a curve with
    few parameters, and joins probabilities to steps. Three or more classes: each against the rest, then
    divided by the sum; see `curves`.

    >>> prob = torch.tensor([[0.2], [0.4], [0.6], [0.8]])
    >>> calibrator = IsotonicCalibrator().fit(prob, torch.tensor([[0.0], [0.5], [0.3], [1.0]]))
    >>> calibrator.calibrate(prob).flatten().round(decimals=2)
    tensor([0.0000, 0.4000, 0.4000, 1.0000])
    """

    num_parameters = UNITS + 1

    @staticmethod
    def _fit_curve(
        prob: Float[Tensor, " n"], label: Float[Tensor, " n"], count: Float[Tensor, " n"]
    ) -> Float[Tensor, " numbers"]:
        values = pool_adjacent_violators(label.numpy(), count.numpy())
        curve = np.interp(np.arange(UNITS + 1), (prob.numpy() * UNITS).round(), values)
        # interpolation may round up beyond the next value
        return torch.from_numpy(np.maximum.accumulate(curve.clip(0, 1)))

    @staticmethod
    def _curve(prob: Tensor, parameters: Float[Tensor, " numbers"]) -> Tensor:
        return interpolated(prob, parameters)

    @classmethod
    def _check_parameters(cls, stored: StoredCalibrator, parameters: Tensor) -> None:
        if parameters.min() < 0 or parameters.max() > 1 or bool((parameters.diff() < 0).any()):
            raise stored.error("parameters must increase from 0 or more to 1 or less")


def pool_adjacent_violators(
    values: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """The increasing sequence with the least weighted squared distance from `values`; weights above 0.

    >>> pool_adjacent_violators(np.array([1.0, 3.0, 2.0]), np.array([1.0, 1.0, 3.0]))
    array([1.  , 2.25, 2.25])
    """
    means: list[float] = []
    sizes: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while means and means[-1] >= value:
            size = sizes.pop()
            value = (means.pop() * size + value * weight) / (size + weight)
            weight += size
            length += lengths.pop()
        means.append(value)
        sizes.append(weight)
        lengths.append(length)
    return np.repeat(means, lengths)
