"""Calibrators that map the probability of a class by a curve: vector scaling, isotonic, beta.

A prediction is split into binary problems (`streams`), and each has a curve, fitted to counts at 65536
probabilities. The calibrated probabilities of three or more classes are divided by their sum.
`activation` only says how a prediction becomes probabilities. In curves with few parameters a probability
below half a unit, 8e-6, counts as half a unit, when a calibrator is fitted and when it is applied. With one
or two classes, the mean of the calibrated probabilities over the fitted voxels is the mean of their labels:
the expected volume has no bias over these data.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from .calibrator import Calibrator
from .streams import UNITS, Histogram, VoxelSample, binary_problems

# half a unit: a stored 0 can be any probability below it
MIN_STORED_PROB = 0.5 / UNITS
# in units: the relative precision of float32 times 65535 units, doubled
_ROUNDING = 0.01
# of the squared distance from the identity, against the mean minus log-likelihood of a voxel: it keeps
# parameters finite that the data do not determine (constant or separable predictions)
PENALTY = 1e-8


class CurveCalibrator(Calibrator):
    """A calibrator with one curve for each binary problem; its parameters are (B, numbers of a curve)."""

    def _new_stream(self, num_classes: int) -> Any:
        return Histogram(num_classes, self.activation)

    @property
    def parameters(self) -> Tensor:
        """The numbers of every curve, fitted to all voxels so far."""
        return self._fitted()["parameters"]

    def _fit_parameters(self, stream: Any) -> Mapping[str, Tensor]:
        curves = []
        for count, label in zip(stream.count, stream.label, strict=True):
            seen = count.nonzero().flatten()
            mean = (label[seen] / count[seen]).clamp(0, 1)
            curves.append(self._fit_curve(seen.double() / UNITS, mean, count[seen]))
        return {"parameters": torch.stack(curves)}

    @staticmethod
    @abstractmethod
    def _fit_curve(
        prob: Float[Tensor, " n"], label: Float[Tensor, " n"], count: Float[Tensor, " n"]
    ) -> Float[Tensor, " numbers"]:
        """The curve of a problem; label: mean label of the `count` voxels with probability `prob`."""

    @staticmethod
    @abstractmethod
    def _curve(prob: Tensor, parameters: Float[Tensor, " numbers"]) -> Tensor:
        """The calibrated probabilities of a problem."""

    def _calibrated(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        problems = binary_problems(inputs, self.activation)
        curves = parameters["parameters"].to(inputs)
        prob = torch.stack([self._curve(problems[:, b], curve) for b, curve in enumerate(curves)], 1)
        if self.activation == "sigmoid" or inputs.shape[1] == 1:
            return prob
        if inputs.shape[1] == 2:
            return torch.cat([1 - prob, prob], dim=1)
        # the curves of all classes can be 0
        prob = prob.clamp(min=MIN_STORED_PROB)
        return prob / prob.sum(1, keepdim=True)


class BetaCalibrator(CurveCalibrator):
    """sigmoid(a log p - b log(1 - p) + c) with a, b >= 0 (Kull, Silva Filho, Flach, 2017).

    It is exact where the probabilities of both labels have beta distributions. Its curves include the
    identity (1, 1, 0), temperatures (a = b, c = 0) and Platt scaling (a = b), and can be asymmetric. Three or
    more classes: each against the rest, then divided by the sum.

    >>> prob = torch.linspace(0.05, 0.95, 19).unsqueeze(1)
    >>> calibrator = BetaCalibrator().fit(prob, (2 * prob.logit()).sigmoid())
    >>> calibrator.parameters.round(decimals=2).abs()
    tensor([[2., 2., 0.]], dtype=torch.float64)
    """

    @staticmethod
    def _fit_curve(prob: Tensor, label: Tensor, count: Tensor) -> Tensor:
        features = torch.stack([stored_log(prob), -stored_log(1 - prob), torch.ones_like(prob)], 1)
        return fit_logistic(features, label, count, identity=(1.0, 1.0, 0.0), lowest=(0.0, 0.0, None))

    @staticmethod
    def _curve(prob: Tensor, parameters: Tensor) -> Tensor:
        a, b, c = parameters
        calibrated: Tensor = (a * stored_log(prob) - b * stored_log(1 - prob) + c).sigmoid()
        return calibrated


class IsotonicCalibrator(CurveCalibrator):
    """The increasing function of the probability that is nearest to the labels, without other assumptions.

    The weighted least-squares fit, which is also the most likely one: probabilities whose mean labels
    decrease share their mean. Between the probabilities that occurred it is linear, and outside of them
    constant. Exact for any number of voxels. It needs more data than a curve with few parameters, and joins
    probabilities to steps. Three or more classes: each against the rest, then divided by the sum.

    >>> prob = torch.tensor([[0.2], [0.4], [0.6], [0.8]])
    >>> calibrator = IsotonicCalibrator().fit(prob, torch.tensor([[0.0], [0.5], [0.3], [1.0]]))
    >>> calibrator.calibrate(prob).flatten().round(decimals=2)
    tensor([0.0000, 0.4000, 0.4000, 1.0000])
    """

    @staticmethod
    def _fit_curve(prob: Tensor, label: Tensor, count: Tensor) -> Tensor:
        from scipy.optimize import isotonic_regression

        values = isotonic_regression(label.numpy(), weights=count.numpy()).x
        curve = np.interp(np.arange(UNITS + 1), (prob.numpy() * UNITS).round(), values)
        # interpolation may round up beyond the next value
        return torch.from_numpy(np.maximum.accumulate(curve.clip(0, 1)))

    @staticmethod
    def _curve(prob: Tensor, parameters: Tensor) -> Tensor:
        return interpolated(prob, parameters)


class VectorScaling(CurveCalibrator):
    """Softmax of scale · log p + bias, with one scale and one bias for each class (Guo et al., 2017).

    One channel or two classes: sigmoid(scale · logit p + bias), which is Platt scaling, exact for any number
    of voxels. (Two scales for two classes would be beta calibration.) Three or more classes: fitted to
    `num_voxels` voxels, as many of each class, drawn uniformly from all batches, with weights that restore
    the frequencies; exact if no class has more voxels than its share.

    >>> prob = torch.tensor([[0.2], [0.5], [0.8]])
    >>> scaling = VectorScaling().fit(prob, (prob.logit() + 1).sigmoid())
    >>> scaling.parameters.round(decimals=3)
    tensor([[1., 1.]], dtype=torch.float64)
    """

    num_voxels = 2**16

    def _is_multiclass(self, num_classes: int) -> bool:
        return num_classes > 2 and self.activation != "sigmoid"

    def _new_stream(self, num_classes: int) -> Any:
        if self._is_multiclass(num_classes):
            return VoxelSample(self.num_voxels)
        return super()._new_stream(num_classes)

    def _fit_parameters(self, stream: Any) -> Mapping[str, Tensor]:
        if not isinstance(stream, VoxelSample):
            return super()._fit_parameters(stream)
        prob, label = (stream.rows[name].double().cpu() for name in ("prob", "label"))
        log_prob, weight = stored_log(prob), stream.weight.double().cpu().unsqueeze(1)
        weight = weight / weight.sum()

        def loss(theta: Tensor) -> Tensor:
            scale, bias = theta.view(2, -1)
            likelihood: Tensor = weight * label * (log_prob * scale + bias).log_softmax(1)
            return -likelihood.sum()

        identity = torch.cat([torch.ones_like(log_prob[0]), torch.zeros_like(log_prob[0])])
        return {"parameters": minimise(loss, identity).view(2, -1).t()}

    @staticmethod
    def _fit_curve(prob: Tensor, label: Tensor, count: Tensor) -> Tensor:
        features = torch.stack([stored_log(prob) - stored_log(1 - prob), torch.ones_like(prob)], 1)
        return fit_logistic(features, label, count, identity=(1.0, 0.0))

    @staticmethod
    def _curve(prob: Tensor, parameters: Tensor) -> Tensor:
        scale, bias = parameters
        calibrated: Tensor = (scale * (stored_log(prob) - stored_log(1 - prob)) + bias).sigmoid()
        return calibrated

    def _calibrated(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        if not self._is_multiclass(inputs.shape[1]):
            return super()._calibrated(inputs, parameters)
        scale, bias = parameters["parameters"].to(inputs).t().view(2, -1, *[1] * (inputs.ndim - 2))
        prob: Tensor = (scale * stored_log(inputs) + bias).softmax(1)
        return prob


def fit_logistic(
    features: Float[Tensor, "n k"],
    label: Float[Tensor, " n"],
    count: Float[Tensor, " n"],
    *,
    identity: Sequence[float],
    lowest: Sequence[float | None] | None = None,
) -> Float[Tensor, " k"]:
    """θ with the most likely sigmoid(features · θ)."""
    weight = count / count.sum()

    def loss(theta: Tensor) -> Tensor:
        logits = features @ theta
        return (weight * (softplus(logits) - label * logits)).sum()

    return minimise(loss, features.new_tensor(identity), lowest)


def minimise(
    loss: Callable[[Tensor], Tensor], identity: Tensor, lowest: Sequence[float | None] | None = None
) -> Tensor:
    """The minimum of a convex loss with the penalty, from the identity on; float64."""
    from scipy.optimize import minimize

    def value_and_gradient(theta: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            point = torch.from_numpy(theta.copy()).requires_grad_()
            value = loss(point) + PENALTY / 2 * (point - identity).square().sum()
            (gradient,) = torch.autograd.grad(value, point)
        return value.item(), gradient.numpy()

    bounds = None if lowest is None else [(low, None) for low in lowest]
    options = {"maxiter": 1000, "maxcor": 20, "ftol": 1e-16, "gtol": 1e-10}
    theta, value = identity.numpy(), math.inf
    while True:
        found = minimize(
            value_and_gradient, theta, jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
        # a line search may give up before the minimum; with a new estimate of the curvature it goes on
        if not found.fun < value - 1e-12:
            return torch.from_numpy(found.x)
        theta, value = found.x, found.fun


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
