"""What all calibrators share: fitting from a stream of batches, and the file that a calibrator is saved to.

    calibrator.fit(prediction, target)      or partial_fit for each batch
    calibrator.merge(other)                 what another one has learned, too
    calibrator.calibrate(prediction)        probabilities in the shape of the prediction
    calibrator.save(path)                   one safetensors file; `calibrators.load_calibrator` reads it

Predictions are (N, C, *space), targets follow the contract in `arrays`: hard, or soft such as the mean of the
raters. activation="none" means that predictions are probabilities, else they are logits.
A batch is added to a stream of bounded size (`streams`), and parameters are fitted to it when they are
needed. So any number of voxels needs one pass. A file holds the parameters and settings, not the stream: a
loaded calibrator calibrates, and cannot learn on. Nothing in a file is unpickled.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, describe
from ..errors import reading
from ..options import check_value
from ..paths import write_bytes
from .recalibration import check_classes, flat_rows

# the class of a calibrator: the run-time checks of the tests do not know typing.Self
Kind = TypeVar("Kind", bound="Calibrator")


class Calibrator(ABC):
    """Probabilities corrected by labels that the network was not trained on; see the module docstring.

    A subclass names its stream (`_new_stream`) and fits its parameters to it (`_fit_parameters`).
    """

    # of the parameters that `calibrate` needs, as in a file
    parameter_names: ClassVar[tuple[str, ...]] = ("parameters",)

    def __init__(self, *, activation: Activation = "none") -> None:
        check_value(Activation, activation=activation)
        self.activation: Activation = activation
        self._reset()

    def _reset(self) -> None:
        self._num_classes: int | None = None
        self._stream: Any = None
        self._parameters: Mapping[str, Tensor] | None = None

    def fit(self: Kind, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None) -> Kind:
        """Forget earlier batches, and learn from these voxels."""
        self._reset()
        return self.partial_fit(prediction, target, valid=valid)

    @torch.no_grad()
    def partial_fit(self: Kind, prediction: Tensor, target: Tensor, *, valid: Tensor | None = None) -> Kind:
        """Learn from one more batch."""
        rows, label, counted = flat_rows(prediction.detach(), target, valid, self.activation)
        if self.activation == "none" and prediction.shape[1] > 1:
            check_classes("prediction", prediction)
        stream = self._stream_of(rows.shape[1])
        self._check_classes(prediction)
        rows = rows[counted].to(torch.promote_types(rows.dtype, torch.float32))
        stream.add(self._inputs(rows), label[counted].float())
        self._parameters = None
        return self

    def merge(self: Kind, other: Kind) -> Kind:
        """Learn from the voxels that another calibrator of this kind was fitted to."""
        if type(other) is not type(self) or other.activation != self.activation:
            raise ValueError(
                f"a {type(self).__name__} of activation {self.activation!r} can only be merged with another "
                f"one; got a {type(other).__name__} of activation {other.activation!r}"
            )
        num_classes = other._fitted_classes()
        stream, others = self._stream_of(num_classes), other._stream_of(num_classes)
        if self._num_classes != num_classes:
            raise ValueError(
                f"calibrators that are merged need the same classes; got {self._num_classes} and "
                f"{num_classes}"
            )
        stream.merge(others)
        self._parameters = None
        return self

    def _stream_of(self, num_classes: int) -> Any:
        """The stream, a new one at first; a ValueError if it is not there, because a file has none."""
        if self._num_classes is None:
            self._num_classes, self._stream = num_classes, self._new_stream(num_classes)
        if self._stream is None:
            raise ValueError(
                f"this {type(self).__name__} was loaded, and a file holds what it has learned but not from "
                "what: fit a new one to all data, or call fit, which forgets the old data"
            )
        return self._stream

    @abstractmethod
    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Calibrated probabilities in the shape of `prediction`, differentiable; at least float32."""

    @abstractmethod
    def _new_stream(self, num_classes: int) -> Any:
        """An empty stream, of `streams` or like them, that `_fit_parameters` takes."""

    @abstractmethod
    def _fit_parameters(self, stream: Any) -> Mapping[str, Tensor]:
        """The `parameter_names` with the highest likelihood of the voxels in the stream."""

    def save(self, path: str | Path) -> None:
        """Write parameters and settings; equal calibrators write equal bytes."""
        import safetensors.torch

        parameters = {name: tensor.contiguous().cpu() for name, tensor in self._fitted().items()}
        of_file = {"kind": type(self).__name__, "num_classes": self._num_classes, **self._settings()}
        # One entry: the order of several would be random. Not save_file, which has own temporary files.
        metadata = {"calibrator": json.dumps(of_file, sort_keys=True)}
        write_bytes(Path(path), safetensors.torch.save(parameters, metadata=metadata))

    def _settings(self) -> dict[str, Any]:
        """Arguments of the class that make a calibrator like this one."""
        return {"activation": self.activation}

    @classmethod
    def load(cls: type[Kind], path: str | Path) -> Kind:
        """The calibrator that `save` wrote, on the CPU; a ValueError names what is wrong in the file."""
        with reading(Path(path), "load another kind with load_calibrator, or fit it again"):
            kind, settings, parameters = read_calibrator(Path(path))
            if kind != cls.__name__:
                raise ValueError(f"it must hold a {cls.__name__}; got {kind}")
            num_classes = settings.pop("num_classes")
            calibrator = cls(**settings)
            calibrator._num_classes = num_classes
            calibrator._parameters = {name: parameters[name] for name in cls.parameter_names}
            return calibrator

    def _fitted(self) -> Mapping[str, Tensor]:
        """The parameters, fitted to all voxels so far."""
        self._fitted_classes()
        if self._parameters is None:
            self._parameters = self._fit_parameters(self._stream)
        return self._parameters

    def _fitted_classes(self) -> int:
        if self._num_classes is None:
            raise ValueError(f"this {type(self).__name__} has seen no data: call fit or partial_fit first")
        return self._num_classes

    def _check_classes(self, prediction: Tensor) -> None:
        num_classes = self._fitted_classes()
        if prediction.shape[1] != num_classes:
            raise ValueError(
                f"this {type(self).__name__} was fitted to {num_classes} classes; "
                f"got {describe(prediction)}: call fit to start again"
            )

    def _inputs(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        """What the stream is of."""
        return self._probabilities(rows)

    def _probabilities(self, prediction: Tensor) -> Tensor:
        prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        if self.activation == "softmax":
            return prediction.softmax(1)
        return prediction.sigmoid() if self.activation == "sigmoid" else prediction


def read_calibrator(path: Path) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """The name of the class, the settings, and the tensors in the file of a calibrator."""
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        settings = json.loads(file.metadata()["calibrator"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite")
    return settings.pop("kind"), settings, tensors
