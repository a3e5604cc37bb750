"""Checkpoints: weights, the optimiser's state and the progress of a fold, in one .safetensors file.

    model/NAME           parameters and buffers
    optimiser/K/NAME     state of parameter K, such as its momentum
    metadata "progress"  JSON: the run, the fold and the step that the checkpoint is of

Nothing is pickled, so a file from a stranger can be opened. A file is written under a temporary name and then
renamed: if the process is killed, the previous checkpoint is still complete. States of random generators are
not stored, because every random draw of a training is a function of the seed and the step.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import UserError, reading
from ..paths import write_bytes


def checkpoint_tensors(model: nn.Module, optimiser: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies of all tensors of a checkpoint, on their own device: on a GPU, copying them is fast."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if optimiser is not None:
        for number, (_, parameter) in enumerate(_parameters(optimiser)):
            for name, value in optimiser.state[parameter].items():
                if value is not None:
                    tensors[f"optimiser/{number}/{name}"] = value
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Write the tensors of `checkpoint_tensors` and the progress of the training."""
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    # not save_file, which has temporary files of its own, and leaves them when it is killed
    # one entry: the order of several is random, and equal trainings write equal bytes
    write_bytes(path, save(on_cpu, metadata={"progress": json.dumps(progress)}))


class Checkpoint:
    """The content of a checkpoint file: progress and tensors, on the CPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        advice = "put a complete checkpoint back, or train the fold again"
        with reading(path, advice), safe_open(path, framework="pt") as file:
            names = file.keys()
            self.progress: dict[str, Any] = json.loads((file.metadata() or {})["progress"])
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}

    def check_origin(self, *, fold: int, run: str | None = None) -> None:
        """A UserError if the checkpoint is of another fold, or run: its network saw other cases."""
        of_fold = self.progress.get("fold")
        if of_fold != fold:
            raise UserError(
                f"{self.path} is the checkpoint of fold {of_fold}, not of fold {fold}: its network was "
                "trained on cases that it would be scored by; put the right file back, or train the fold "
                "again"
            )
        if run is not None and self.progress.get("run") != run:
            raise UserError(
                f"{self.path} is the checkpoint of another run: its recipe, folds or dataset differ; put the "
                "right file back, or train the fold again"
            )

    def load_model(self, model: nn.Module) -> None:
        """Load the weights into a model of the same architecture; a ValueError names the differences."""
        try:
            model.load_state_dict(self._tensors("model/"))
        except RuntimeError as error:
            raise UserError(f"{self.path} holds the weights of another model: {error}") from error

    def load_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Load the state of the optimiser; its options come from the recipe."""
        for number, (group, parameter) in enumerate(_parameters(optimiser)):
            state = optimiser.state[parameter] = {}
            for name, tensor in self._tensors(f"optimiser/{number}/").items():
                if tensor.ndim:
                    # the memory format of the parameter, on which the order of sums depends
                    state[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
                else:
                    # a scalar, such as Adam's number of steps, is on the CPU unless the optimiser is fused
                    on_device = group.get("fused") or group.get("capturable")
                    state[name] = tensor.to(parameter.device if on_device else "cpu")

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        names = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensors[name] for name in names}


def _parameters(optimiser: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """Every parameter, with the options of its group."""
    return [(group, parameter) for group in optimiser.param_groups for parameter in group["params"]]
