"""A calibrator by kernel density: key points of the data it was fitted to, and their labels.

Left out: the kernel (`kde`), and key points of one batch (`keypoints`).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, check_number, check_prediction, check_whole_number
from .calibrator import Calibrator, Statistics, StoredCalibrator
from .recalibration import choose_bandwidth_of_points, kde_recalibrate
from .voxel_sample import VoxelSample, with_background

_MIN_BANDWIDTH = 1e-12


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

    parameter_name = "chosen_bandwidth"

    def __init__(
        self,
        *,
        num_keys: int = 4096,
        bandwidth: float | None = None,
        activation: Activation = "none",
        seed: int = 0,
    ) -> None:
        check_whole_number(num_keys=num_keys, seed=seed)
        if bandwidth is not None:
            check_number(bandwidth=bandwidth)
        if num_keys < 1:
            raise ValueError(f"num_keys must be 1 or more; got {num_keys}")
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0; got {bandwidth}: omit it to have it chosen")
        self.num_keys = num_keys
        self.seed = seed
        self._given_bandwidth = bandwidth
        super().__init__(activation=activation)

    def _new_statistics(self, num_classes: int) -> VoxelSample:
        return VoxelSample(self.num_keys, max(2, num_classes), seed=self.seed)

    def _check_classes(self, prediction: Tensor, statistics: Statistics) -> None:
        # one channel and its two classes have the same keys
        if max(2, prediction.shape[1]) != statistics.num_classes:
            super()._check_classes(prediction, statistics)

    @property
    def key_weight(self) -> Float[Tensor, " K"]:
        """The number of voxels that each key represents."""
        keys: VoxelSample = self._fitted()
        return keys.weight

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the constructor, or one chosen by leave-one-out on up to 2048 keys."""
        return float(self.parameters)

    def _fit_parameters(self, statistics: VoxelSample) -> Tensor:
        if self._given_bandwidth is not None:
            return torch.tensor(self._given_bandwidth, dtype=torch.float64)
        keys, weight = statistics.rows, statistics.weight
        sample = keys["draw"].argsort()[:2048]
        choice = choose_bandwidth_of_points(keys["prob"][sample], keys["label"][sample], weight[sample])
        return torch.tensor(choice.bandwidth, dtype=torch.float64)

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Recalibrated probabilities in the shape of `prediction`, differentiable; at least float32."""
        keys: VoxelSample = self._fitted()
        check_prediction(prediction, self.activation)
        self._check_classes(prediction, keys)
        prob = with_background(self._probabilities(prediction))
        mean = kde_recalibrate(
            prob,
            keys.rows["prob"].to(prob),
            keys.rows["label"].to(prob),
            bandwidth=self.bandwidth,
            key_weight=self.key_weight.to(prob.device),
        )
        return mean[:, 1:] if prediction.shape[1] == 1 else mean

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in ("num_keys", "activation", "seed")}
        return settings if self._given_bandwidth is None else settings | {"bandwidth": self._given_bandwidth}

    @classmethod
    def from_stored(cls, stored: StoredCalibrator) -> "KDECalibrator":
        given = stored.settings.get("bandwidth")
        calibrator = cls(
            num_keys=stored.number("num_keys", int, at_least=1),
            bandwidth=None if given is None else stored.number("bandwidth", float, at_least=_MIN_BANDWIDTH),
            activation=stored.activation,
            seed=stored.number("seed", int, at_least=-(2**63)),
        )
        calibrator._statistics = VoxelSample.from_stored(stored, calibrator.num_keys)
        calibrator._parameters = stored.tensor("chosen_bandwidth", torch.float64, ())
        if not calibrator._parameters >= _MIN_BANDWIDTH:
            raise stored.error("chosen_bandwidth must be above 0")
        return calibrator
