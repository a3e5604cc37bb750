"""A calibrator by kernel density: key points of the data it was fitted to, and their labels.

Left out: the kernel (`kde`), and key points of one batch (`keypoints`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, check_prediction
from ..options import check_value
from .calibrator import Calibrator
from .kde import Keys
from .recalibration import bandwidth_of_keys, check_bandwidth, kde_recalibrate
from .streams import VoxelSample, with_background

# points of the keys that a bandwidth is chosen by
_MAX_JUDGED = 2048


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
        check_value(int, num_keys=num_keys, seed=seed)
        if num_keys < 1:
            raise ValueError(f"num_keys must be 1 or more; got {num_keys}")
        if bandwidth is not None:
            check_bandwidth(bandwidth)
        self.num_keys, self.seed = num_keys, seed
        self._given_bandwidth = bandwidth
        super().__init__(activation=activation)

    def _new_stream(self, num_classes: int) -> VoxelSample:
        return VoxelSample(self.num_keys, seed=self.seed)

    @property
    def keys(self) -> Keys:
        """The keys, with the number of voxels that each of them stands for."""
        fitted = self._fitted()
        return Keys(*(fitted[name].unsqueeze(0) for name in ("prob", "label", "weight")))

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the constructor, or one chosen by leave-one-out on up to 2048 keys."""
        return float(self._fitted()["bandwidth"])

    def _fit_parameters(self, stream: VoxelSample) -> Mapping[str, Tensor]:
        parts = {"prob": stream.rows["prob"], "label": stream.rows["label"], "weight": stream.weight}
        bandwidth = self._given_bandwidth
        if bandwidth is None:
            judged = stream.rows["draw"].argsort()[:_MAX_JUDGED]
            some = Keys(*(part[judged].unsqueeze(0) for part in parts.values()))
            bandwidth = bandwidth_of_keys(some).bandwidth
        return parts | {"bandwidth": torch.tensor(bandwidth, dtype=torch.float64)}

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Recalibrated probabilities in the shape of `prediction`, differentiable; at least float32."""
        check_prediction(prediction, self.activation)
        self._check_classes(prediction)
        prob = with_background(self._probabilities(prediction))
        key_prob, label, weight = self.keys
        assert weight is not None
        keys = Keys(key_prob.to(prob), label.to(prob), weight.to(prob.device))
        mean = kde_recalibrate(prob, keys, bandwidth=self.bandwidth)
        return mean[:, 1:] if prediction.shape[1] == 1 else mean

    def _check_classes(self, prediction: Tensor) -> None:
        # one channel and its two classes have the same keys
        if max(2, prediction.shape[1]) != max(2, self._fitted_classes()):
            super()._check_classes(prediction)

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in ("num_keys", "activation", "seed")}
        return settings | {"bandwidth": self._given_bandwidth}
