"""What all calibrators share: fitting from a stream of batches, and the file that a calibrator is saved to.

    calibrator.fit(prediction, target)      or partial_fit for each batch
    calibrator.merge(other)                 what another one has learned, too
    calibrator.calibrate(prediction)        probabilities in the shape of the prediction
    calibrator.save(path)                   one safetensors file; `load_calibrator` reads one of any kind

Predictions are (N, C, *space), targets follow the contract in `arrays`: hard, or soft such as the mean of the
raters. activation="none" means that predictions are probabilities, else they are logits.
A batch is added to a stream of bounded size (`streams`), and parameters are fitted to it when they are
needed. So any number of voxels needs one pass. A file holds the parameters and settings, not the stream: a
loaded calibrator calibrates, and cannot learn on. Nothing in a file is unpickled.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import isabstract
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, check_distribution, check_prediction
from ..errors import reading
from ..options import check_value
from ..paths import write_bytes
from .kde import flat_rows

# the class of a calibrator: the run-time checks of the tests do not know typing.Self
Kind = TypeVar("Kind", bound="Calibrator")


class Calibrator(ABC):
    """Probabilities corrected by labels that the network was not trained on; see the module docstring.

    A subclass names its stream, fits its parameters to it, and applies them.
    """

    # of the parameters that `calibrate` needs, as in a file
    parameter_names: ClassVar[tuple[str, ...]] = ("parameters",)

    def __init__(self, *, activation: Activation = "none", **settings: Any) -> None:
        check_value(Activation, activation=activation)
        self.activation: Activation = activation
        # arguments of the class that make a calibrator like this one
        self.settings = {"activation": activation, **settings}
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
        if self.activation == "none":
            check_distribution("prediction", prediction)
        self._stream_of(rows.shape[1]).add(self._inputs(rows[counted]), label[counted].float())
        return self

    def merge(self: Kind, other: Kind) -> Kind:
        """Learn from the voxels that another calibrator of this kind was fitted to."""
        if type(other) is not type(self) or other.activation != self.activation:
            raise ValueError(
                f"a {type(self).__name__} of activation {self.activation!r} can only be merged with another "
                f"one; got a {type(other).__name__} of activation {other.activation!r}"
            )
        num_classes = other._fitted_classes()
        learned = other._stream_of(num_classes)
        self._stream_of(num_classes).merge(learned)
        return self

    def _stream_of(self, num_classes: int) -> Any:
        """The stream that is to grow, a new one at first."""
        if self._num_classes is None:
            self._num_classes, self._stream = num_classes, self._new_stream(num_classes)
        if self._stream is None:
            raise ValueError(
                f"this {type(self).__name__} was loaded, and a file holds what it has learned but not from "
                "what: fit a new one to all data, or call fit, which forgets the old data"
            )
        self._check_classes(num_classes)
        self._parameters = None
        return self._stream

    def calibrate(self, prediction: Tensor) -> Float[Tensor, "N C *space"]:
        """Calibrated probabilities in the shape of `prediction`, differentiable; at least float32."""
        check_prediction(prediction, self.activation)
        self._check_classes(prediction.shape[1])
        return self._calibrated(self._inputs(prediction), self._fitted())

    @abstractmethod
    def _new_stream(self, num_classes: int) -> Any:
        """An empty stream, of `streams` or like them, that `_fit_parameters` takes."""

    @abstractmethod
    def _fit_parameters(self, stream: Any) -> Mapping[str, Tensor]:
        """The `parameter_names` with the highest likelihood of the voxels in the stream."""

    @abstractmethod
    def _calibrated(self, inputs: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The probabilities of all classes from the `_inputs` of a prediction."""

    def _inputs(self, prediction: Float[Tensor, "N C *space"]) -> Float[Tensor, "N C *space"]:
        """What the stream is of, and what is calibrated: the probabilities, at least float32."""
        prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        if self.activation == "softmax":
            return prediction.softmax(1)
        return prediction.sigmoid() if self.activation == "sigmoid" else prediction

    def save(self, path: str | Path) -> None:
        """Write parameters and settings; equal calibrators write equal bytes."""
        import safetensors.torch

        parameters = {name: tensor.contiguous().cpu() for name, tensor in self._fitted().items()}
        of_file = {"kind": type(self).__name__, "num_classes": self._num_classes, **self.settings}
        # One entry: the order of several would be random. Not save_file, which has own temporary files.
        metadata = {"calibrator": json.dumps(of_file, sort_keys=True)}
        write_bytes(Path(path), safetensors.torch.save(parameters, metadata=metadata))

    @classmethod
    def load(cls: type[Kind], path: str | Path) -> Kind:
        """The calibrator that `save` wrote, on the CPU; a ValueError names what is wrong in the file."""
        import safetensors

        with reading(Path(path), "load another kind with load_calibrator, or fit it again"):
            with safetensors.safe_open(path, framework="pt") as file:
                settings = json.loads(file.metadata()["calibrator"])
                parameters = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            kinds = {each.__name__: each for each in _kinds_of(cls) if not isabstract(each)}
            kind, num_classes = settings.pop("kind"), settings.pop("num_classes")
            if kind not in kinds:
                raise ValueError(f"it must hold a {' or '.join(kinds)}; got {kind}")
            calibrator = kinds[kind](**settings)
            calibrator._num_classes = num_classes
            calibrator._parameters = {name: parameters[name] for name in calibrator.parameter_names}
            for name, tensor in calibrator._parameters.items():
                if not bool(tensor.isfinite().all()):
                    raise ValueError(f"{name} has values that are not finite")
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

    def _check_classes(self, num_classes: int) -> None:
        if num_classes != self._fitted_classes():
            raise ValueError(
                f"this {type(self).__name__} was fitted to {self._num_classes} classes; got {num_classes}: "
                "call fit to start again"
            )


def _kinds_of(kind: type[Kind]) -> list[type[Kind]]:
    return [kind, *(each for derived in kind.__subclasses__() for each in _kinds_of(derived))]
