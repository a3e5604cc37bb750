"""Calibrators: fitted to one or more batches, then applied, and saved to a file.

Both have fit(prediction, target), or partial_fit for each batch; calibrate(prediction) -> probabilities; save
and load, as a safetensors file. Predictions are (N, C, *space), targets follow the contract in `arrays`.
activation="none" means that predictions are probabilities, else they are logits. One channel is [1 - p, p].
Left out: the kernel (`kde`), and key points of one batch (`keypoints`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import (
    Activation,
    check_choice,
    check_number,
    check_prediction,
    check_target,
    check_whole_number,
    describe,
    one_hot,
)
from ..paths import atomic_write
from .kde import MIN_PROB
from .recalibration import check_distribution, choose_bandwidth_of_points, kde_recalibrate

# elements of one (temperature, voxel, class) block, 8 MB of float64
_BLOCK = 2**20


class KDECalibrator:
    """Recalibration by kernel density, from key points of the data it was fitted to.

    Stores ceil(num_keys / classes seen) voxels of each class: a uniform sample without replacement of all
    valid voxels of all batches. Their weights restore the class frequencies of the data. Without a bandwidth,
    one is chosen by leave-one-out label likelihood. The same seed gives the same keys.

    >>> prob = torch.tensor([[0.3, 0.7], [0.4, 0.6], [0.4, 0.6], [0.3, 0.7]])
    >>> calibrator = KDECalibrator(bandwidth=0.1).fit(prob, torch.tensor([0, 1, 0, 1]))
    >>> calibrator.calibrate(torch.tensor([[0.35, 0.65]])).round(decimals=2)
    tensor([[0.5000, 0.5000]])
    """

    _TENSORS = ("prob", "label", "class_of", "draw", "seen", "generator", "chosen_bandwidth")

    def __init__(
        self,
        *,
        num_keys: int = 4096,
        bandwidth: float | None = None,
        activation: Activation = "none",
        seed: int = 0,
    ) -> None:
        check_choice("activation", activation, Activation)
        check_whole_number(num_keys=num_keys, seed=seed)
        if bandwidth is not None:
            check_number(bandwidth=bandwidth)
        if num_keys < 1:
            raise ValueError(f"num_keys must be 1 or more; got {num_keys}")
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0; got {bandwidth}: omit it to have it chosen")
        self.num_keys = num_keys
        self.activation: Activation = activation
        self.seed = seed
        self._given_bandwidth = bandwidth
        self._reset()

    def _reset(self) -> None:
        self._chosen_bandwidth: float | None = None
        self._generator = torch.Generator().manual_seed(self.seed)
        self._keys: dict[str, Tensor] = {}

    def fit(self, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None) -> "KDECalibrator":
        """Forget earlier batches, and learn from these voxels."""
        self._reset()
        return self.partial_fit(prediction, target, valid=valid)

    def partial_fit(
        self, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None
    ) -> "KDECalibrator":
        """Learn from one more batch. Needs the time and memory of one sort of its voxels."""
        prob, label = _labelled_rows(prediction, target, valid, self.activation)
        prob = self._distribution(prob)
        label = torch.cat([1 - label, label], dim=1) if label.shape[1] == 1 else label
        if self._keys and self._keys["prob"].shape[1] != prob.shape[1]:
            raise ValueError(
                f"this KDECalibrator was fitted to {self._keys['prob'].shape[1]} classes; "
                f"got {describe(prediction)}: call fit to start again"
            )
        class_of = label.argmax(1)
        # drawn on the CPU, so that a seed gives the same keys on every device
        draw = torch.randint(2**32, (len(prob),), generator=self._generator).to(prob.device)
        batch = {"prob": prob, "label": label, "class_of": class_of, "draw": draw}
        old = self._keys or {name: part[:0] for name, part in batch.items()}
        seen = class_of.bincount(minlength=prob.shape[1]) + old.get("seen", 0)
        share = -(-self.num_keys // int((seen > 0).sum()))
        # The `share` smallest draws of a class are a uniform sample of it. The share only shrinks when new
        # classes appear, so a voxel that was dropped is never needed again.
        classes = torch.cat([old["class_of"], class_of])
        order = ((classes << 32) + torch.cat([old["draw"], draw])).argsort()
        run = classes[order]
        rank = torch.arange(len(run), device=run.device) - torch.searchsorted(run, run)
        chosen, num_old = order[rank < share], len(old["draw"])
        from_old, from_new = chosen[chosen < num_old], chosen[chosen >= num_old] - num_old
        self._keys = {name: torch.cat([old[name][from_old], part[from_new]]) for name, part in batch.items()}
        self._keys["seen"] = seen
        self._chosen_bandwidth = None
        return self

    @property
    def key_weight(self) -> Float[Tensor, " K"]:
        """The number of voxels that each key represents."""
        keys = self._fitted()
        return (keys["seen"] / keys["class_of"].bincount(minlength=len(keys["seen"])))[keys["class_of"]]

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the constructor, or one chosen by leave-one-out on up to 2048 keys."""
        if self._given_bandwidth is not None:
            return self._given_bandwidth
        if self._chosen_bandwidth is None:
            keys, weight = self._fitted(), self.key_weight
            sample = keys["draw"].argsort()[:2048]
            choice = choose_bandwidth_of_points(keys["prob"][sample], keys["label"][sample], weight[sample])
            self._chosen_bandwidth = choice.bandwidth
        return self._chosen_bandwidth

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Recalibrated probabilities in the shape of `prediction`, differentiable; at least float32."""
        keys, weight = self._fitted(), self.key_weight
        check_prediction(prediction, self.activation)
        prob = self._distribution(prediction)
        mean = kde_recalibrate(
            prob,
            keys["prob"].to(prob),
            keys["label"].to(prob),
            bandwidth=self.bandwidth,
            key_weight=weight.to(prob.device),
        )
        return mean[:, 1:] if prediction.shape[1] == 1 else mean

    def _distribution(self, prediction: Tensor) -> Tensor:
        """Probabilities of all classes; one channel becomes [1 - p, p]."""
        if self.activation == "softmax":
            return prediction.softmax(1)
        prob = prediction.sigmoid() if self.activation == "sigmoid" else prediction
        return torch.cat([1 - prob, prob], dim=1) if prob.shape[1] == 1 else prob

    def _fitted(self) -> dict[str, Tensor]:
        if not self._keys:
            raise ValueError("this KDECalibrator has seen no data: call fit or partial_fit first")
        return self._keys

    def save(self, path: str | Path) -> None:
        """Write keys, bandwidth and random state: a loaded calibrator continues like this one."""
        settings: dict[str, Any] = {name: getattr(self, name) for name in ("num_keys", "activation", "seed")}
        if self._given_bandwidth is not None:
            settings["bandwidth"] = self._given_bandwidth
        tensors = {**self._fitted(), "generator": self._generator.get_state()}
        tensors["chosen_bandwidth"] = torch.tensor(self.bandwidth, dtype=torch.float64)
        _save(path, self, tensors, settings)

    @classmethod
    def load(cls, path: str | Path) -> "KDECalibrator":
        """The calibrator that `save` wrote, on the CPU."""
        tensors, settings = _load(path, cls, cls._TENSORS, ("num_keys", "activation", "seed"))
        given = settings.get("bandwidth")
        calibrator = cls(
            num_keys=int(settings["num_keys"]),
            bandwidth=None if given is None else float(given),
            activation=settings["activation"],
            seed=int(settings["seed"]),
        )
        calibrator._generator.set_state(tensors.pop("generator"))
        calibrator._chosen_bandwidth = float(tensors.pop("chosen_bandwidth"))
        calibrator._keys = tensors
        return calibrator


class TemperatureScaling:
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

    smallest, largest, num_temperatures = 0.05, 20.0, 41
    _TENSORS = ("slope", "curvature", "num_voxels", "temperature")

    def __init__(self, *, activation: Activation = "none") -> None:
        check_choice("activation", activation, Activation)
        self.activation: Activation = activation
        self._reset()

    def _reset(self) -> None:
        zeros = torch.zeros(self.num_temperatures, dtype=torch.float64)
        self._sums = {"slope": zeros, "curvature": zeros.clone(), "num_voxels": zeros.new_zeros(())}
        self._temperature: float | None = None

    def _inverse_temperatures(self) -> Float[Tensor, " T"]:
        ends = -math.log(self.largest), -math.log(self.smallest)
        return torch.linspace(*ends, self.num_temperatures, dtype=torch.float64).exp()

    def fit(self, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None) -> "TemperatureScaling":
        """Forget earlier batches, and learn from these voxels."""
        self._reset()
        return self.partial_fit(prediction, target, valid=valid)

    @torch.no_grad()
    def partial_fit(
        self, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None
    ) -> "TemperatureScaling":
        """Learn from one more batch, in blocks of 8 MB; the order of batches does not matter."""
        rows, label = _labelled_rows(prediction, target, valid, self.activation)
        beta = self._inverse_temperatures().to(rows.device)
        size = max(1, _BLOCK // (len(beta) * max(2, rows.shape[1])))
        for start in range(0, len(rows), size):
            block = slice(start, start + size)
            logits, block_label = self._logits(rows[block].double()), label[block].double()
            if self._is_binary(prediction):
                logits = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(0, 1)
                block_label = torch.stack([1 - block_label, block_label], dim=-1).flatten(0, 1)
            slope, curvature = _likelihood_terms(logits, block_label, beta)
            self._sums["slope"] = self._sums["slope"].to(beta.device) + slope
            self._sums["curvature"] = self._sums["curvature"].to(beta.device) + curvature
        self._sums["num_voxels"] = self._sums["num_voxels"] + len(rows)
        self._temperature = None
        return self

    @property
    def temperature(self) -> float:
        """The temperature with the highest likelihood of all voxels so far; 1 if all are equally likely."""
        if self._temperature is None:
            if not int(self._sums["num_voxels"]):
                raise ValueError("this TemperatureScaling has seen no data: call fit or partial_fit first")
            slope, curvature = (self._sums[name].tolist() for name in ("slope", "curvature"))
            best = _best_temperature(self._inverse_temperatures().tolist(), slope, curvature)
            self._temperature = min(max(best, self.smallest), self.largest)
        return self._temperature

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Probabilities of the logits divided by the temperature, differentiable; at least float32."""
        check_prediction(prediction, self.activation)
        logits = self._logits(prediction.to(torch.promote_types(prediction.dtype, torch.float32)))
        logits = logits / self.temperature
        return logits.sigmoid() if self._is_binary(prediction) else logits.softmax(1)

    def _is_binary(self, prediction: Tensor) -> bool:
        return self.activation == "sigmoid" or prediction.shape[1] == 1

    def _logits(self, prediction: Tensor) -> Tensor:
        if self.activation != "none":
            return prediction
        if prediction.shape[1] == 1:
            return prediction.logit(MIN_PROB)
        return prediction.clamp(min=MIN_PROB).log()

    def save(self, path: str | Path) -> None:
        """Write the temperature and its sums: a loaded calibrator can continue with partial_fit."""
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        _save(path, self, {**self._sums, "temperature": temperature}, {"activation": self.activation})

    @classmethod
    def load(cls, path: str | Path) -> "TemperatureScaling":
        """The calibrator that `save` wrote, on the CPU."""
        tensors, settings = _load(path, cls, cls._TENSORS, ("activation",))
        scaling = cls(activation=settings["activation"])
        scaling._temperature = float(tensors.pop("temperature"))
        scaling._sums = tensors
        return scaling


def _labelled_rows(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: Activation
) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
    """Checked predictions and soft labels, one row per valid voxel; a ValueError if no voxel is valid."""
    check_prediction(prediction, activation)
    if activation == "none" and prediction.shape[1] > 1:
        check_distribution("prediction", prediction)
    target, valid = check_target(
        prediction, target, activation=activation, valid=valid, has_ignore_index=False
    )
    num_classes = prediction.shape[1]
    rows = prediction.detach().movedim(1, -1).reshape(-1, num_classes)
    if target.is_floating_point():
        label = target.movedim(1, -1).reshape(-1, num_classes)
    else:
        label = one_hot(target.flatten(), num_classes)
    if valid is not None:
        rows, label = rows[valid.flatten()], label[valid.flatten()]
    if len(rows) == 0:
        raise ValueError(f"there is no valid voxel in prediction {describe(prediction)}")
    return rows.to(torch.promote_types(rows.dtype, torch.float32)), label.float()


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


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving a calibrator needs safetensors: pip install 'semidice[train]'") from error
    return safetensors


def _save(path: str | Path, owner: object, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    metadata = {"kind": type(owner).__name__, **{name: str(value) for name, value in settings.items()}}
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    safetensors = _safetensors()
    with atomic_write(Path(path)) as temp_path:
        safetensors.torch.save_file(tensors, temp_path, metadata=metadata)


def _load(
    path: str | Path, cls: type, tensors: Sequence[str], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    safetensors = _safetensors()
    try:
        file = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a calibrator, or is damaged: {error}; save it again") from error
    with file:
        settings = file.metadata() or {}
        if settings.get("kind") != cls.__name__:
            raise ValueError(
                f"{path} must hold a {cls.__name__}; got {settings.get('kind', 'no calibrator')}: "
                "load it with the class that saved it"
            )
        found = set(file.keys()) | set(settings)
        if missing := sorted({*tensors, *names} - found):
            raise ValueError(f"{path} lacks {', '.join(missing)}: it is damaged; save the calibrator again")
        return {name: file.get_tensor(name) for name in tensors}, settings
