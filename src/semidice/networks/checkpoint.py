"""Checkpoints: weights, the optimiser's state and the progress of a fold, in one .safetensors file.

    model/NAME           parameters and buffers
    optimiser/K/NAME     state of parameter K, such as its momentum
    metadata "progress"  JSON: the step, the best score so far

Nothing is pickled, so a file from a stranger can be opened. A file is written whole under another name and
renamed: killed at any moment, the last good one is still there. There is no state of random generators,
since every draw of the engine is a function of the seed and the step.
"""

import json
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..paths import atomic_write


def checkpoint_tensors(model: nn.Module, optimiser: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies of all that a checkpoint holds, on the device where it is: a GPU has made them in a moment."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if optimiser is not None:
        for number, parameter in enumerate(_parameters(optimiser)):
            for name, value in optimiser.state[parameter].items():
                if value is not None:
                    tensors[f"optimiser/{number}/{name}"] = value
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Write copies from `checkpoint_tensors` with the progress they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path:
        on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
        save_file(on_cpu, temp_path, metadata={"progress": json.dumps(dict(progress))})


class Checkpoint:
    """A checkpoint file: its progress is read at once, its tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                self.progress: dict[str, Any] = json.loads((file.metadata() or {})["progress"])
                names = file.keys()
                self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
        except FileNotFoundError:
            raise ValueError(f"there is no checkpoint {path}") from None
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no checkpoint of semidice, or not a whole one: {error}") from error

    def load_model(self, model: nn.Module) -> None:
        """Put the weights into a model of the same make; a ValueError says where they differ."""
        weights = {
            name.removeprefix("model/"): tensor
            for name, tensor in self.tensors.items()
            if name.startswith("model/")
        }
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{self.path} holds the weights of another model: {error}") from error

    def load_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Put the optimiser's state back; its options come from the recipe."""
        for number, parameter in enumerate(_parameters(optimiser)):
            prefix = f"optimiser/{number}/"
            state = {
                name.removeprefix(prefix): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(prefix)
            }
            # a scalar such as Adam's count of steps stays where the optimiser keeps it
            optimiser.state[parameter] = {
                name: _like(tensor, parameter)
                if tensor.ndim
                else tensor.to(_home_of_scalars(optimiser, parameter))
                for name, tensor in state.items()
            }


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor on the parameter's device and in its memory format, which decides the order of sums."""
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def _home_of_scalars(optimiser: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    group = next(group for group in optimiser.param_groups if any(parameter is p for p in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return parameter.device if on_device else torch.device("cpu")


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


class CheckpointWriter:
    """Writes checkpoints in a thread, one after the other, while training goes on.

    `put` copies and returns; the copies leave a GPU on a stream of their own. `close` waits for what is under
    way. An error of the thread, such as a full disk, is raised by the next `put` or `close`.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(2)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def put(
        self,
        path: Path,
        model: nn.Module,
        optimiser: torch.optim.Optimizer | None,
        progress: Mapping[str, Any],
    ) -> None:
        """Copy the state of now, and have it written."""
        self._raise()
        tensors = checkpoint_tensors(model, optimiser)
        device = next(iter(tensors.values())).device
        if device.type != "cuda":
            self._jobs.put(partial(write_checkpoint, path, tensors, dict(progress)))
            return
        copied = torch.cuda.Event()
        copied.record()

        def write() -> None:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                copied.wait()
                write_checkpoint(path, tensors, progress)

        self._jobs.put(write)

    def close(self) -> None:
        """Wait until everything is on the disk."""
        self._jobs.put(None)
        self._thread.join()
        self._raise()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            # kept for the thread that trains: nobody sees what is raised here
            except BaseException as error:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
