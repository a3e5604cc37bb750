"""What all calibrators share: fitting from a stream of batches, and the file that a calibrator is saved to.

    calibrator.fit(prediction, target)      or partial_fit for each batch
    calibrator.calibrate(prediction)        probabilities in the shape of the prediction
    calibrator.save(path)                   one safetensors file; `calibrators.load_calibrator` reads it

Predictions are (N, C, *space), targets follow the contract in `arrays`: hard, or soft such as the mean of the
raters. activation="none" means that predictions are probabilities, else they are logits.
A batch is added to statistics of bounded size, and parameters are fitted to the statistics when they are
needed. So any number of voxels needs one pass, and a loaded calibrator can continue with partial_fit.
A file may come from a stranger: nothing is unpickled, and types, shapes and values are checked.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, check_choice, check_prediction, check_target, describe, one_hot
from ..limits import check_file
from ..paths import write_bytes
from .recalibration import check_distribution

Number = TypeVar("Number", int, float)
# the class of a calibrator: the run-time checks of the tests do not know typing.Self
Kind = TypeVar("Kind", bound="Calibrator")


class Statistics(ABC):
    """Everything that a calibrator keeps of the voxels it has seen: a bounded number of values."""

    num_classes: int

    @abstractmethod
    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Take more voxels; rows: see `Calibrator._inputs`."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Take the voxels of other statistics of this class."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything, for a file."""


class Calibrator(ABC):
    """Probabilities corrected by labels that the network was not trained on; see the module docstring.

    A subclass names its statistics (`_new_statistics`) and fits its parameters to them (`_fit_parameters`).
    """

    # of the parameters in a file
    parameter_name: ClassVar = "parameters"

    def __init__(self, *, activation: Activation = "none") -> None:
        check_choice("activation", activation, Activation)
        self.activation: Activation = activation
        self._reset()

    def _reset(self) -> None:
        self._statistics: Statistics | None = None
        self._parameters: Tensor | None = None

    def fit(self: Kind, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None) -> Kind:
        """Forget earlier batches, and learn from these voxels."""
        self._reset()
        return self.partial_fit(prediction, target, valid=valid)

    @torch.no_grad()
    def partial_fit(self: Kind, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None) -> Kind:
        """Learn from one more batch."""
        rows, label = labelled_rows(prediction, target, valid, self.activation)
        if self._statistics is None:
            self._statistics = self._new_statistics(rows.shape[1])
        self._check_classes(prediction, self._statistics)
        self._statistics.add(self._inputs(rows), label)
        self._parameters = None
        return self

    def merge(self: Kind, other: Kind) -> Kind:
        """Learn from the voxels that another calibrator of this kind was fitted to."""
        if type(other) is not type(self) or other.activation != self.activation:
            raise ValueError(
                f"a {type(self).__name__} of activation {self.activation!r} merges with its like; got a "
                f"{type(other).__name__} of activation {other.activation!r}"
            )
        statistics: Statistics = other._fitted()
        if self._statistics is None:
            self._statistics = self._new_statistics(statistics.num_classes)
        if self._statistics.num_classes != statistics.num_classes:
            raise ValueError(
                f"calibrators that are merged need the same classes; got {self._statistics.num_classes} and "
                f"{statistics.num_classes}"
            )
        self._statistics.merge(statistics)
        self._parameters = None
        return self

    @abstractmethod
    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Calibrated probabilities in the shape of `prediction`, differentiable; at least float32."""

    @abstractmethod
    def _new_statistics(self, num_classes: int) -> Any:
        """Empty `Statistics` of a class that `_fit_parameters` takes."""

    @abstractmethod
    def _fit_parameters(self, statistics: Any) -> Tensor:
        """The parameters with the highest likelihood of the voxels in the statistics."""

    def save(self, path: str | Path) -> None:
        """Write statistics and parameters: a loaded calibrator can continue with partial_fit."""
        tensors = {**self._fitted().tensors(), self.parameter_name: self.parameters}
        metadata = {
            "kind": type(self).__name__,
            **{key: str(value) for key, value in self._settings().items()},
        }
        contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        safetensors = _safetensors()
        # not save_file, which has temporary files of its own
        write_bytes(Path(path), safetensors.torch.save(contiguous, metadata=metadata))

    def _settings(self) -> dict[str, Any]:
        return {"activation": self.activation, "num_classes": self._fitted().num_classes}

    @classmethod
    def load(cls: type[Kind], path: str | Path) -> Kind:
        """The calibrator that `save` wrote, on the CPU; a ValueError names what is wrong in the file."""
        stored = StoredCalibrator.read(path)
        if stored.kind != cls.__name__:
            raise ValueError(
                f"{path} must hold a {cls.__name__}; got {stored.kind}: load it with load_calibrator"
            )
        return cls.from_stored(stored)

    @classmethod
    @abstractmethod
    def from_stored(cls: type[Kind], stored: "StoredCalibrator") -> Kind:
        """The calibrator of a file that was read; a ValueError names what is wrong in it."""

    @property
    def parameters(self) -> Tensor:
        """The numbers that `calibrate` needs, fitted to all voxels so far."""
        if self._parameters is None:
            self._parameters = self._fit_parameters(self._fitted())
        return self._parameters

    def _fitted(self) -> Any:
        if self._statistics is None:
            raise ValueError(f"this {type(self).__name__} has seen no data: call fit or partial_fit first")
        return self._statistics

    def _check_classes(self, prediction: Tensor, statistics: Statistics) -> None:
        if prediction.shape[1] != statistics.num_classes:
            raise ValueError(
                f"this {type(self).__name__} was fitted to {statistics.num_classes} classes; "
                f"got {describe(prediction)}: call fit to start again"
            )

    def _inputs(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        """What the statistics are of."""
        return self._probabilities(rows)

    def _probabilities(self, prediction: Tensor) -> Tensor:
        prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        if self.activation == "softmax":
            return prediction.softmax(1)
        return prediction.sigmoid() if self.activation == "sigmoid" else prediction


def labelled_rows(
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


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving a calibrator needs safetensors: pip install 'semidice[train]'") from error
    return safetensors


@dataclass(frozen=True)
class StoredCalibrator:
    """The content of a calibrator's file. All floats are finite; types and shapes are checked when asked."""

    path: Path
    kind: str
    settings: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: str | Path) -> "StoredCalibrator":
        """The content of the file; a ValueError if it is not complete or not a calibrator."""
        safetensors = _safetensors()
        check_file(Path(path))
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                settings = file.metadata() or {}
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
        except FileNotFoundError:
            raise ValueError(f"there is no calibrator {path}") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is not a complete file of a calibrator: {error}; save it again"
            ) from error
        stored = cls(Path(path), settings.get("kind", "no calibrator"), settings, tensors)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise stored.error(f"{name} has values that are not finite")
        return stored

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} is not a valid {self.kind}: {problem}; fit it again")

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
        """The named tensor, if it has this type and shape; None is any length."""
        tensor = self.tensors.get(name)
        expected = f"{name} must be {str(dtype).removeprefix('torch.')} {tuple(shape)}"
        if tensor is None or tensor.dtype != dtype or len(tensor.shape) != len(shape):
            raise self.error(f"{expected}; got {describe(tensor) if tensor is not None else 'none'}")
        if any(size not in (None, length) for size, length in zip(shape, tensor.shape, strict=True)):
            raise self.error(f"{expected}; got {describe(tensor)}")
        return tensor

    def number(self, name: str, kind: type[Number], *, at_least: Number) -> Number:
        """The named setting as a number."""
        try:
            value = kind(self.settings.get(name, "none"))
        except ValueError:
            value = None
        # the condition is also false for NaN
        if value is None or not at_least <= value < 2**63:
            raise self.error(f"{name} must be a number of {at_least} or more; got {self.settings.get(name)}")
        return value

    @property
    def activation(self) -> Activation:
        value, known = self.settings.get("activation"), get_args(Activation)
        if value not in known:
            raise self.error(f"activation must be one of {', '.join(known)}; got {value}")
        return cast(Activation, value)
