"""Temperature scaling and kernel density; all calibrators by name, and a saved one of any kind.

Left out: calibration by curves (`curves`), the kernel (`kde`), and key points of one batch (`keypoints`).
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation
from ..options import Count, Positive, check_value
from .calibrator import Calibrator
from .curves import BetaCalibrator, IsotonicCalibrator, VectorScaling
from .kde import MIN_PROB, Keys, kde_recalibrate
from .keypoints import bandwidth_of_keys
from .streams import VoxelSample, with_background

SMALLEST, LARGEST, NUM_TEMPERATURES = 0.05, 20.0, 61
# elements of one (temperature, voxel, class) block, 8 MB of float64
_BLOCK = 2**20
# points of the keys that a bandwidth is chosen by
_MAX_JUDGED = 2048


class TemperatureScaling(Calibrator):
    """Softmax (or sigmoid) of logits / T, one temperature for all classes, fitted to soft or hard targets.

    The derivative of the log-likelihood is summed, in float64, at 61 temperatures, evenly spaced in log T
    over [0.05, 20]. So any number of voxels in any batches needs one pass and a kilobyte. The likelihood is
    concave in 1/T; a cubic spline gives its maximum, with a relative error below 1e-4. Without a maximum
    inside (perfectly separable data) T is at the bound. With activation "none" the logits are the logarithms
    of the probabilities (for one channel: the logit).

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> scaling = TemperatureScaling(activation="softmax").fit(logits, torch.tensor([0, 0, 0, 1]))
    >>> round(scaling.temperature, 3), scaling.calibrate(logits[:1]).round(decimals=2)
    (3.641, tensor([[0.7500, 0.2500]]))
    """

    parameter_names = ("temperature",)

    def _new_stream(self, num_classes: int) -> "_Slopes":
        return _Slopes(is_binary=self._is_binary(num_classes))

    @property
    def temperature(self) -> float:
        """The temperature with the highest likelihood of all voxels so far; 1 if all are equally likely."""
        return float(self._fitted()["temperature"])

    def _fit_parameters(self, stream: "_Slopes") -> Mapping[str, Tensor]:
        from scipy.interpolate import CubicSpline
        from scipy.optimize import brentq

        # the slope rises with the inverse temperature β
        beta, slope = stream.beta.numpy(), stream.slope.numpy()
        if not slope.any():
            best = 1.0
        elif slope[0] >= 0 or slope[-1] < 0:
            best = LARGEST if slope[0] >= 0 else SMALLEST
        else:
            right, log_beta = int((slope >= 0).argmax()), np.log(beta)
            zero = CubicSpline(log_beta, beta * slope)
            best = math.exp(-brentq(zero, log_beta[right - 1], log_beta[right], xtol=1e-15))
        return {"temperature": torch.tensor(best, dtype=torch.float64)}

    def _calibrated(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        logits = inputs / parameters["temperature"].item()
        return logits.sigmoid() if self._is_binary(inputs.shape[1]) else logits.softmax(1)

    def _is_binary(self, num_classes: int) -> bool:
        return self.activation == "sigmoid" or num_classes == 1

    def _inputs(self, prediction: Float[Tensor, "N C *space"]) -> Float[Tensor, "N C *space"]:
        """The logits."""
        if self.activation != "none":
            return prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        prob = super()._inputs(prediction)
        return prob.logit(MIN_PROB) if prob.shape[1] == 1 else prob.clamp(min=MIN_PROB).log()


class _Slopes:
    """The derivative in β of Σ_j logsumexp(β z_j) - β y_j·z_j over voxels j, at inverse temperatures β."""

    def __init__(self, *, is_binary: bool) -> None:
        self._is_binary = is_binary
        ends = -math.log(LARGEST), -math.log(SMALLEST)
        self.beta = torch.linspace(*ends, NUM_TEMPERATURES, dtype=torch.float64).exp()
        self.slope = torch.zeros_like(self.beta)

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Add the voxels with these logits, in blocks of 8 MB."""
        beta = self.beta.to(rows.device).view(-1, 1, 1)
        size = max(1, _BLOCK // (len(beta) * max(2, rows.shape[1])))
        for part, part_label in zip(rows.split(size), label.split(size), strict=True):
            z, y = part.double(), part_label.double()
            if self._is_binary:
                z = torch.stack([torch.zeros_like(z), z], dim=-1).flatten(0, 1)
                y = torch.stack([1 - y, y], dim=-1).flatten(0, 1)
            # a shift of the logits does not change the derivative
            z = z - z.amax(-1, keepdim=True)
            mean = ((beta * z).softmax(-1) * z).sum(-1)
            self.slope += (mean - (y * z).sum(-1)).sum(-1).cpu()

    def merge(self, other: "_Slopes") -> None:
        self.slope += other.slope


class KDECalibrator(Calibrator):
    """Recalibration by kernel density, from key points of the data it was fitted to.

    Stores ceil(num_keys / classes seen) voxels of each class: a uniform sample without replacement of all
    valid voxels of all batches. Their weights restore the class frequencies of the data. Without a bandwidth,
    one is chosen by leave-one-out label likelihood. The same seed gives the same keys. One channel is
    [1 - p, p]. The cost of `calibrate` is voxels times keys.

    >>> prob = torch.tensor([[0.3, 0.7], [0.4, 0.6], [0.4, 0.6], [0.3, 0.7]])
    >>> calibrator = KDECalibrator(bandwidth=0.1).fit(prob, torch.tensor([0, 1, 0, 1]))
    >>> calibrator.calibrate(torch.tensor([[0.35, 0.65]])).round(decimals=2)
    tensor([[0.5000, 0.5000]])
    """

    parameter_names = ("prob", "label", "weight", "bandwidth")

    def __init__(
        self,
        *,
        num_keys: int = 4096,
        bandwidth: float | None = None,
        activation: Activation = "none",
        seed: int = 0,
    ) -> None:
        check_value(Count, num_keys=num_keys)
        check_value(int, seed=seed)
        check_value(Positive | None, bandwidth=bandwidth)
        super().__init__(activation=activation, num_keys=num_keys, bandwidth=bandwidth, seed=seed)

    def _new_stream(self, num_classes: int) -> VoxelSample:
        return VoxelSample(self.settings["num_keys"], seed=self.settings["seed"])

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the constructor, or one chosen by leave-one-out on up to 2048 keys."""
        return float(self._fitted()["bandwidth"])

    def _fit_parameters(self, stream: VoxelSample) -> Mapping[str, Tensor]:
        parts = {"prob": stream.rows["prob"], "label": stream.rows["label"], "weight": stream.weight}
        bandwidth = self.settings["bandwidth"]
        if bandwidth is None:
            judged = stream.rows["draw"].argsort()[:_MAX_JUDGED]
            some = Keys(*(part[judged].unsqueeze(0) for part in parts.values()))
            bandwidth = bandwidth_of_keys(some).bandwidth
        return parts | {"bandwidth": torch.tensor(bandwidth, dtype=torch.float64)}

    def _calibrated(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        prob = with_background(inputs)
        key_prob, label = (parameters[name].to(prob).unsqueeze(0) for name in ("prob", "label"))
        weight = parameters["weight"].to(prob.device).unsqueeze(0)
        mean = kde_recalibrate(prob, Keys(key_prob, label, weight), bandwidth=self.bandwidth)
        return mean[:, 1:] if inputs.shape[1] == 1 else mean


CALIBRATORS: Mapping[str, type[Calibrator]] = {
    "temperature": TemperatureScaling,
    "vector": VectorScaling,
    "isotonic": IsotonicCalibrator,
    "beta": BetaCalibrator,
    "kde": KDECalibrator,
}


def load_calibrator(path: str | Path) -> Calibrator:
    """The calibrator that `save` wrote, of whichever kind; a ValueError names what is wrong in the file.

    Nothing is unpickled: a file of a stranger can give wrong probabilities, but runs no code.
    """
    return Calibrator.load(path)
