"""Temperature scaling: the logits of all classes divided by one number (Guo et al., 2017)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import check_prediction
from .calibrator import Calibrator, Statistics, StoredCalibrator
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

    parameter_name = "temperature"

    def _new_statistics(self, num_classes: int) -> "_Derivatives":
        return _Derivatives(num_classes, _inverse_temperatures(), is_binary=self._is_binary(num_classes))

    def _inputs(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        return self._logits(rows)

    @property
    def temperature(self) -> float:
        """The temperature with the highest likelihood of all voxels so far; 1 if all are equally likely."""
        return float(self.parameters)

    def _fit_parameters(self, statistics: "_Derivatives") -> Tensor:
        slope, curvature = (statistics.sums[name].tolist() for name in ("slope", "curvature"))
        best = _best_temperature(_inverse_temperatures().tolist(), slope, curvature)
        return torch.tensor(min(max(best, SMALLEST), LARGEST), dtype=torch.float64)

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

    @classmethod
    def from_stored(cls, stored: StoredCalibrator) -> "TemperatureScaling":
        scaling = cls(activation=stored.activation)
        derivatives = scaling._new_statistics(stored.number("num_classes", int, at_least=1))
        derivatives.sums = {
            name: stored.tensor(name, torch.float64, sums.shape) for name, sums in derivatives.sums.items()
        }
        scaling._statistics = derivatives
        scaling._parameters = stored.tensor("temperature", torch.float64, ())
        if not SMALLEST <= scaling.temperature <= LARGEST:
            raise stored.error(f"temperature must lie in {SMALLEST} to {LARGEST}")
        return scaling


class _Derivatives(Statistics):
    """Derivatives of the log-likelihood, summed over all voxels, at each inverse temperature."""

    def __init__(self, num_classes: int, beta: Float[Tensor, " T"], *, is_binary: bool) -> None:
        self.num_classes, self._beta, self._is_binary = num_classes, beta, is_binary
        zeros = torch.zeros_like(beta)
        self.sums = {"slope": zeros, "curvature": zeros.clone(), "num_voxels": zeros.new_zeros(())}

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Add the voxels with these logits, in blocks of 8 MB."""
        beta = self._beta.to(rows.device)
        size = max(1, _BLOCK // (len(beta) * max(2, rows.shape[1])))
        for start in range(0, len(rows), size):
            logits, block_label = (part[start : start + size].double() for part in (rows, label))
            if self._is_binary:
                logits = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(0, 1)
                block_label = torch.stack([1 - block_label, block_label], dim=-1).flatten(0, 1)
            slope, curvature = _likelihood_terms(logits, block_label, beta)
            self.sums["slope"] = self.sums["slope"].to(beta.device) + slope
            self.sums["curvature"] = self.sums["curvature"].to(beta.device) + curvature
        self.sums["num_voxels"] = self.sums["num_voxels"] + len(rows)

    def merge(self, other: "_Derivatives") -> None:
        self.sums = {name: total + other.sums[name].to(total.device) for name, total in self.sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        return self.sums


def _inverse_temperatures() -> Float[Tensor, " T"]:
    ends = -math.log(LARGEST), -math.log(SMALLEST)
    return torch.linspace(*ends, NUM_TEMPERATURES, dtype=torch.float64).exp()


def _likelihood_terms(
    logits: Float[Tensor, "n C"], label: Float[Tensor, "n C"], beta: Float[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """First and second derivative in β of Σ_j logsumexp(β z_j) - β y_j·z_j, at each inverse temperature β."""
    # a shift of the logits changes neither derivative; with the largest logit at 0, exp cannot overflow
    logits = (logits - logits.amax(-1, keepdim=True)).t().contiguous()
    weight = (beta.view(-1, 1, 1) * logits).exp_()
    total = weight.sum(1)
    mean = weight.mul_(logits).sum(1) / total
    square = weight.mul_(logits).sum(1) / total
    return (mean - (label.t() * logits).sum(0)).sum(-1), (square - mean.square()).sum(-1)


def _best_temperature(beta: list[float], slope: list[float], curvature: list[float]) -> float:
    """1/β at the zero of the slope, from the cubic in log β through two neighbours and their derivatives."""
    if not any(slope):
        return 1.0
    right = next((k for k, value in enumerate(slope) if value >= 0), len(beta))
    if right in (0, len(beta)):
        return 1 / beta[min(right, len(beta) - 1)]
    ends = (right - 1, right)
    step = math.log(beta[right] / beta[right - 1])
    value_a, value_b = (beta[k] * slope[k] for k in ends)
    rise_a, rise_b = (step * (beta[k] * slope[k] + beta[k] ** 2 * curvature[k]) for k in ends)
    low, high = 0.0, 1.0
    for _ in range(50):
        t = (low + high) / 2
        value = (1 + 2 * t) * (1 - t) ** 2 * value_a + t * (1 - t) ** 2 * rise_a
        value += t**2 * (3 - 2 * t) * value_b + t**2 * (t - 1) * rise_b
        low, high = (low, t) if value >= 0 else (t, high)
    return 1 / (beta[right - 1] * math.exp(step * (low + high) / 2))
