"""Temperature scaling: the logits of all classes divided by one number (Guo et al., 2017)."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_prediction
from .calibrator import Calibrator
from .kde import MIN_PROB

SMALLEST, LARGEST, NUM_TEMPERATURES = 0.05, 20.0, 41
# elements of one (temperature, voxel, class) block, 8 MB of float64
_BLOCK = 2**20


class TemperatureScaling(Calibrator):
    """Softmax (or sigmoid) of logits / T, one temperature for all classes, fitted to soft or hard targets.

    First and second derivative of the log-likelihood are summed, in float64, at 41 temperatures, evenly
    spaced in log T over [0.05, 20]. So any number of voxels in any batches needs one pass and a kilobyte. The
    likelihood is concave in 1/T; a cubic through two neighbours gives its maximum, with a relative error
    below 1e-4. Without a maximum inside (perfectly separable data) T is at the bound. With activation "none"
    the logits are the logarithms of the probabilities (for one channel: the logit).

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> scaling = TemperatureScaling(activation="softmax").fit(logits, torch.tensor([0, 0, 0, 1]))
    >>> round(scaling.temperature, 3), scaling.calibrate(logits[:1]).round(decimals=2)
    (3.641, tensor([[0.7500, 0.2500]]))
    """

    parameter_names = ("temperature",)

    def _new_stream(self, num_classes: int) -> "_Derivatives":
        return _Derivatives(is_binary=self._is_binary(num_classes))

    def _inputs(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        return self._logits(rows)

    @property
    def temperature(self) -> float:
        """The temperature with the highest likelihood of all voxels so far; 1 if all are equally likely."""
        return float(self._fitted()["temperature"])

    def _fit_parameters(self, stream: "_Derivatives") -> Mapping[str, Tensor]:
        best = _best_temperature(*(part.cpu().numpy() for part in (stream.beta, *stream.sums)))
        return {"temperature": torch.tensor(min(max(best, SMALLEST), LARGEST), dtype=torch.float64)}

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Probabilities of the logits divided by the temperature, differentiable; at least float32."""
        check_prediction(prediction, self.activation)
        logits = self._logits(prediction.to(torch.promote_types(prediction.dtype, torch.float32)))
        logits = logits / self.temperature
        return logits.sigmoid() if self._is_binary(prediction.shape[1]) else logits.softmax(1)

    def _is_binary(self, num_classes: int) -> bool:
        return self.activation == "sigmoid" or num_classes == 1

    def _logits(self, prediction: Tensor) -> Tensor:
        if self.activation != "none":
            return prediction
        if prediction.shape[1] == 1:
            return prediction.logit(MIN_PROB)
        return prediction.clamp(min=MIN_PROB).log()


class _Derivatives:
    """Slope and curvature of the log-likelihood (2, T), over all voxels, at each inverse temperature."""

    def __init__(self, *, is_binary: bool) -> None:
        self._is_binary = is_binary
        ends = -math.log(LARGEST), -math.log(SMALLEST)
        self.beta = torch.linspace(*ends, NUM_TEMPERATURES, dtype=torch.float64).exp()
        self.sums = torch.zeros(2, NUM_TEMPERATURES, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Add the voxels with these logits, in blocks of 8 MB."""
        beta = self.beta.to(rows.device)
        size = max(1, _BLOCK // (len(beta) * max(2, rows.shape[1])))
        for start in range(0, len(rows), size):
            logits, block_label = (part[start : start + size].double() for part in (rows, label))
            if self._is_binary:
                logits = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(0, 1)
                block_label = torch.stack([1 - block_label, block_label], dim=-1).flatten(0, 1)
            self.sums = self.sums.to(beta.device) + _likelihood_terms(logits, block_label, beta)

    def merge(self, other: "_Derivatives") -> None:
        self.sums = self.sums + other.sums.to(self.sums.device)


def _likelihood_terms(
    logits: Float[Tensor, "n C"], label: Float[Tensor, "n C"], beta: Float[Tensor, " T"]
) -> Float[Tensor, "2 T"]:
    """First and second derivative in β of Σ_j logsumexp(β z_j) - β y_j·z_j, at each inverse temperature β."""
    # a shift of the logits changes neither derivative; with the largest logit at 0, exp cannot overflow
    logits = (logits - logits.amax(-1, keepdim=True)).t().contiguous()
    weight = (beta.view(-1, 1, 1) * logits).exp_()
    total = weight.sum(1)
    mean = weight.mul_(logits).sum(1) / total
    square = weight.mul_(logits).sum(1) / total
    return torch.stack([(mean - (label.t() * logits).sum(0)).sum(-1), (square - mean.square()).sum(-1)])


def _best_temperature(
    beta: Float[np.ndarray, " T"], slope: Float[np.ndarray, " T"], curvature: Float[np.ndarray, " T"]
) -> float:
    """1/β at the zero of the slope, from the cubic in log β through two neighbours and their derivatives."""
    from scipy.interpolate import CubicHermiteSpline
    from scipy.optimize import brentq

    if not slope.any():
        return 1.0
    right = int((slope >= 0).argmax()) if (slope >= 0).any() else len(beta)
    if right in (0, len(beta)):
        return float(1 / beta[min(right, len(beta) - 1)])
    ends = slice(right - 1, right + 1)
    log_beta, value = np.log(beta), beta * slope
    rise = value + beta**2 * curvature
    spline = CubicHermiteSpline(log_beta[ends], value[ends], rise[ends])
    return math.exp(-brentq(spline, *log_beta[ends], xtol=1e-15))
