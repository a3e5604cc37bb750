"""Calibrators that map the probability of a class by a curve, fitted to counts at 65536 probabilities.

A prediction is split into binary problems: each channel of a sigmoid network; the foreground of two classes;
each of three or more classes against the rest. Then the calibrated probabilities of the classes are divided
by their sum.

For each problem the number of voxels and the sum of their labels are kept at the multiples of 1/65535, the
probabilities that a run stores. These sums determine the likelihood of every curve exactly. Other
probabilities are rounded to such a multiple when a curve is fitted, but not when it is applied.
"""

from abc import abstractmethod
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, check_prediction
from .calibrator import Calibrator, Statistics, StoredCalibrator

UNITS = 65535
# half a unit: a stored 0 can be any probability below it
MIN_STORED_PROB = 0.5 / UNITS
# a largest number of voxels: sums of float64 are exact up to here
_MAX_COUNT = 2.0**53
# in units: the relative precision of float32 times 65535 units, doubled
_ROUNDING = 0.01


Curve = TypeVar("Curve", bound="CurveCalibrator")


class Histogram(Statistics):
    """Number of voxels and sum of labels (B, 65536) of B binary problems, in float64."""

    def __init__(self, num_classes: int, activation: Activation) -> None:
        self.num_classes, self.activation = num_classes, activation
        num_problems = num_binary_problems(num_classes, activation)
        self.count = torch.zeros(num_problems, UNITS + 1, dtype=torch.float64)
        self.label = torch.zeros_like(self.count)

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Count these voxels too; on the CPU, where the order of a sum is fixed."""
        prob, label = (binary_problems(part, self.activation).cpu() for part in (rows, label))
        units = (prob.double() * UNITS).round().long()
        for problem, of_problem in enumerate(units.t()):
            self.count[problem] += of_problem.bincount(minlength=UNITS + 1)
            weights = label[:, problem].double()
            self.label[problem] += of_problem.bincount(weights, minlength=UNITS + 1)

    def merge(self, other: "Histogram") -> None:
        self.count += other.count
        self.label += other.label

    def tensors(self) -> dict[str, Tensor]:
        """Position, count and label of the probabilities that occurred."""
        place = self.count.flatten().nonzero().flatten()
        sums = {name: getattr(self, name).flatten()[place] for name in ("count", "label")}
        return {"place": place, **sums}

    @classmethod
    def from_stored(cls, stored: StoredCalibrator, num_classes: int) -> "Histogram":
        """The histogram in a file; a ValueError if its values are not sums of labels."""
        place = stored.tensor("place", torch.int64, (None,))
        count, label = (stored.tensor(name, torch.float64, place.shape) for name in ("count", "label"))
        num_places = num_binary_problems(num_classes, stored.activation) * (UNITS + 1)
        if len(place) == 0 or place[0] < 0 or place[-1] >= num_places or bool((place.diff() <= 0).any()):
            raise stored.error(f"place must be increasing numbers from 0 to {num_places - 1}")
        # sums of float32 labels may exceed the count by their rounding
        if not bool(((count > 0) & (count <= _MAX_COUNT) & (label >= 0) & (label <= 1.001 * count)).all()):
            raise stored.error("counts must be above 0, and labels must lie in 0 to their counts")
        histogram = cls(num_classes, stored.activation)
        for name, values in (("count", count), ("label", label)):
            getattr(histogram, name).view(-1)[place] = values
        return histogram


class CurveCalibrator(Calibrator):
    """A calibrator with one curve for each binary problem; its parameters are (B, numbers of a curve)."""

    # numbers of one curve
    num_parameters: int

    def _new_statistics(self, num_classes: int) -> Any:
        return Histogram(num_classes, self.activation)

    def _fit_parameters(self, statistics: Histogram) -> Tensor:
        problems = zip(statistics.count, statistics.label, strict=True)
        return torch.stack([self._fit_curve(*seen_points(*problem)) for problem in problems])

    @staticmethod
    @abstractmethod
    def _fit_curve(
        prob: Float[Tensor, " n"], label: Float[Tensor, " n"], count: Float[Tensor, " n"]
    ) -> Float[Tensor, " numbers"]:
        """The curve of a problem; label: mean label of the `count` voxels with probability `prob`."""

    @staticmethod
    @abstractmethod
    def _curve(prob: Tensor, parameters: Float[Tensor, " numbers"]) -> Tensor: ...

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Calibrated probabilities in the shape of `prediction`, differentiable; at least float32."""
        check_prediction(prediction, self.activation)
        self._check_classes(prediction, self._fitted())
        prob = binary_problems(self._probabilities(prediction), self.activation)
        parameters = self.parameters.to(prob)
        curves = [self._curve(prob[:, number], each) for number, each in enumerate(parameters)]
        return joined_classes(torch.stack(curves, 1), prediction.shape[1], self.activation)

    @classmethod
    def from_stored(cls: type[Curve], stored: StoredCalibrator) -> Curve:
        calibrator = cls(activation=stored.activation)
        num_classes = stored.number("num_classes", int, at_least=1)
        # a stranger's number must not reserve memory
        if num_classes > _MAX_CLASSES:
            raise stored.error(f"num_classes must be at most {_MAX_CLASSES}; got {num_classes}")
        calibrator._statistics = Histogram.from_stored(stored, num_classes)
        num_problems = num_binary_problems(num_classes, stored.activation)
        shape = num_problems, cls.num_parameters
        calibrator._parameters = stored.tensor("parameters", torch.float64, shape)
        cls._check_parameters(stored, calibrator._parameters)
        return calibrator

    @classmethod
    def _check_parameters(cls, stored: StoredCalibrator, parameters: Tensor) -> None:
        """Raise if no fit gives these parameters."""


_MAX_CLASSES = 4096


def num_binary_problems(num_classes: int, activation: Activation) -> int:
    return 1 if num_classes == 2 and activation != "sigmoid" else num_classes


def binary_problems(
    channels: Float[Tensor, "N C *space"], activation: Activation
) -> Float[Tensor, "N B *space"]:
    """The probability, or label, of each binary problem; see the module docstring."""
    num_classes = channels.shape[1]
    return channels[:, 1:] if num_binary_problems(num_classes, activation) < num_classes else channels


def joined_classes(
    prob: Float[Tensor, "N B *space"], num_classes: int, activation: Activation
) -> Float[Tensor, "N C *space"]:
    """All classes from the calibrated binary problems; they sum to one unless they are sigmoid channels."""
    if activation == "sigmoid" or num_classes == 1:
        return prob
    if num_classes == 2:
        return torch.cat([1 - prob, prob], dim=1)
    # the curves of all classes can be 0
    prob = prob.clamp(min=MIN_STORED_PROB)
    return prob / prob.sum(1, keepdim=True)


def seen_points(
    count: Float[Tensor, " units"], label: Float[Tensor, " units"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Probability, mean label and number of voxels, where there are any."""
    seen = count.nonzero().flatten()
    return seen.double() / UNITS, (label[seen] / count[seen]).clamp(0, 1), count[seen]


def stored_log(prob: Tensor) -> Tensor:
    """log p, where a probability below half a unit, 8e-6, counts as half a unit."""
    return prob.clamp(min=MIN_STORED_PROB).log()


def interpolated(prob: Tensor, curve: Float[Tensor, " units"]) -> Tensor:
    """Values of a curve that is given at the multiples of 1/65535, and linear between them.

    A probability that is stored as 0 or 1, or as a multiple with the rounding of a float32, is that multiple.
    """
    units = prob * UNITS
    nearest = units.detach().round()
    is_stored = (units.detach() - nearest).abs() < _ROUNDING
    is_stored |= (nearest - UNITS / 2).abs() == UNITS / 2
    units = torch.where(is_stored, units + (nearest - units).detach(), units)
    below = units.detach().floor().long().clamp(0, UNITS - 1)
    low, high = curve[below], curve[below + 1]
    return low + (units - below) * (high - low)
