"""Calibrators with few parameters for each class: vector scaling and beta calibration.

Both work on probabilities; `activation` only says how a prediction becomes probabilities. A probability below
half a unit, 8e-6, counts as half a unit (`curves`), when a calibrator is fitted and when it is applied.
With one or two classes, the mean of the calibrated probabilities over the fitted voxels is the mean of their
labels: the expected volume has no bias over these data.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_prediction
from .calibrator import StoredCalibrator
from .curves import CurveCalibrator, stored_log
from .newton import fit_logistic, fit_vector
from .voxel_sample import VoxelSample


class BetaCalibrator(CurveCalibrator):
    """sigmoid(a log p - b log(1 - p) + c) with a, b >= 0 (Kull, Silva Filho, Flach, 2017).

    It is exact where the probabilities of both labels have beta distributions. Its curves include the
    identity (1, 1, 0), temperatures (a = b, c = 0) and Platt scaling (a = b), and can be asymmetric. Three or
    more classes: each against the rest, then divided by the sum; see `curves`.

    >>> prob = torch.linspace(0.05, 0.95, 19).unsqueeze(1)
    >>> calibrator = BetaCalibrator().fit(prob, (2 * prob.logit()).sigmoid())
    >>> calibrator.parameters.round(decimals=2).abs()
    tensor([[2., 2., 0.]], dtype=torch.float64)
    """

    num_parameters = 3

    @staticmethod
    def _fit_curve(
        prob: Float[Tensor, " n"], label: Float[Tensor, " n"], count: Float[Tensor, " n"]
    ) -> Float[Tensor, " numbers"]:
        features = torch.stack([stored_log(prob), -stored_log(1 - prob), torch.ones_like(prob)], 1)
        identity = features.new_tensor([1.0, 1.0, 0.0])
        theta, _ = fit_logistic(features, label, count, identity)
        if theta[:2].min() >= 0:
            return theta
        # the function is convex: where the free minimum is outside, the best one is on an edge
        fits = []
        for free in ([0, 2], [1, 2], [2]):
            edge, value = fit_logistic(features[:, free], label, count, identity[free])
            if bool((edge[:-1] >= 0).all()):
                fits.append((value, torch.zeros_like(theta).index_copy(0, torch.tensor(free), edge)))
        return min(fits, key=lambda fit: fit[0])[1]

    @staticmethod
    def _curve(prob: Tensor, parameters: Float[Tensor, " numbers"]) -> Tensor:
        a, b, c = parameters
        calibrated: Tensor = (a * stored_log(prob) - b * stored_log(1 - prob) + c).sigmoid()
        return calibrated

    @classmethod
    def _check_parameters(cls, stored: StoredCalibrator, parameters: Tensor) -> None:
        if parameters[:, :2].min() < 0:
            raise stored.error("a and b must be 0 or more")


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

    num_parameters = 2
    num_voxels = 2**16

    def _is_multiclass(self, num_classes: int) -> bool:
        return num_classes > 2 and self.activation != "sigmoid"

    def _new_statistics(self, num_classes: int) -> Any:
        if self._is_multiclass(num_classes):
            return VoxelSample(self.num_voxels, num_classes)
        return super()._new_statistics(num_classes)

    def _fit_parameters(self, statistics: Any) -> Tensor:
        if isinstance(statistics, VoxelSample):
            prob, label = (statistics.rows[name].double().cpu() for name in ("prob", "label"))
            return fit_vector(stored_log(prob), label, statistics.weight.double().cpu())
        return super()._fit_parameters(statistics)

    @staticmethod
    def _fit_curve(
        prob: Float[Tensor, " n"], label: Float[Tensor, " n"], count: Float[Tensor, " n"]
    ) -> Float[Tensor, " numbers"]:
        features = torch.stack([_logit(prob), torch.ones_like(prob)], 1)
        return fit_logistic(features, label, count, features.new_tensor([1.0, 0.0]))[0]

    @staticmethod
    def _curve(prob: Tensor, parameters: Float[Tensor, " numbers"]) -> Tensor:
        scale, bias = parameters
        calibrated: Tensor = (scale * _logit(prob) + bias).sigmoid()
        return calibrated

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Calibrated probabilities in the shape of `prediction`, differentiable; at least float32."""
        if not self._is_multiclass(prediction.shape[1]):
            return super().calibrate(prediction)
        check_prediction(prediction, self.activation)
        self._check_classes(prediction, self._fitted())
        log_prob = stored_log(self._probabilities(prediction))
        scale, bias = self.parameters.to(log_prob).t().view(2, -1, *[1] * (prediction.ndim - 2))
        calibrated: Tensor = (scale * log_prob + bias).softmax(1)
        return calibrated

    @classmethod
    def from_stored(cls, stored: StoredCalibrator) -> "VectorScaling":
        num_classes = stored.number("num_classes", int, at_least=1)
        scaling = cls(activation=stored.activation)
        if not scaling._is_multiclass(num_classes):
            return super().from_stored(stored)
        sample = VoxelSample.from_stored(stored, cls.num_voxels)
        if sample.num_classes != num_classes:
            raise stored.error(f"it must have voxels of {num_classes} classes; got {sample.num_classes}")
        scaling._statistics = sample
        scaling._parameters = stored.tensor("parameters", torch.float64, (num_classes, 2))
        return scaling


def _logit(prob: Tensor) -> Tensor:
    return stored_log(prob) - stored_log(1 - prob)
