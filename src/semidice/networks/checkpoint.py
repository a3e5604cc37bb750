"""Checkpoints: weights, the optimiser's state and the progress of a fold, in one .safetensors file.

    model/NAME           parameters and buffers
    optimiser/K/NAME     state of parameter K, such as its momentum
    metadata "progress"  JSON: the run, the fold and the step that the checkpoint is of, the best score so
                         far, and the digest: SHA-256 of the others and of all tensors

Nothing is pickled, so a file from a stranger can be opened. A file is written under a temporary name and then
renamed: if the process is killed, the previous checkpoint is still complete. States of random generators are
not stored, because every random draw of a training is a function of the seed and the step.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..limits import check_file, parse_json
from ..paths import write_bytes

# checkpoints in memory that are not written yet; beyond that, training waits
_MAX_WAITING = 2


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
    path.parent.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    text = json.dumps({**progress, "digest": _digest(progress, on_cpu)})
    # not save_file, which has temporary files of its own, and leaves them when it is killed
    # one entry: the order of several is random, and equal trainings write equal bytes
    write_bytes(path, save(on_cpu, metadata={"progress": text}))


class Checkpoint:
    """The content of a checkpoint file: progress and tensors, on the CPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_file(path)
        try:
            with safe_open(path, framework="pt") as file:
                self.progress: dict[str, Any] = parse_json((file.metadata() or {})["progress"])
                names = file.keys()
                self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
        except FileNotFoundError:
            raise ValueError(f"there is no checkpoint {path}") from None
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a complete checkpoint of semidice: {error}") from error
        if not isinstance(self.progress, dict):
            raise ValueError(f"{path} is not a checkpoint of semidice: its progress is {self.progress!r}")
        # an older semidice wrote no digest
        digest = self.progress.pop("digest", None)
        if digest not in (None, _digest(self.progress, self.tensors)):
            raise ValueError(f"{path} was damaged after it was written: its content has another SHA-256")

    def check_origin(self, *, run: str | None = None, fold: int | None = None) -> None:
        """A ValueError if the checkpoint is of another run or another fold; an older one does not say."""
        of_fold, of_run = self.progress.get("fold"), self.progress.get("run")
        if None not in (fold, of_fold) and fold != of_fold:
            raise ValueError(
                f"{self.path} is the checkpoint of fold {of_fold}, not of fold {fold}: its network was "
                "trained on cases that it would be scored by; put the right file back, or train the fold "
                "again"
            )
        if None not in (run, of_run) and run != of_run:
            raise ValueError(
                f"{self.path} is the checkpoint of another run: its recipe, folds or dataset differ; put the "
                "right file back, or train the fold again"
            )

    def load_model(self, model: nn.Module) -> None:
        """Load the weights into a model of the same architecture; a ValueError names the differences."""
        try:
            model.load_state_dict(self._tensors("model/"))
        except RuntimeError as error:
            raise ValueError(f"{self.path} holds the weights of another model: {error}") from error

    def load_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Load the state of the optimiser; its options come from the recipe."""
        self._check_optimiser(optimiser)
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

    def _check_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """A ValueError if the state is of another optimiser, or of another network."""
        parameters = [parameter for _, parameter in _parameters(optimiser)]
        names = [name for name in self.tensors if name.startswith("optimiser/")]
        kinds = {name.split("/", 2)[2] for name in names}
        expected = _state_names(optimiser)
        if kinds != expected:
            raise ValueError(
                f"{self.path} has the state {', '.join(sorted(kinds)) or 'of no optimiser'}, but "
                f"{type(optimiser).__name__} needs {', '.join(sorted(expected)) or 'none'}: it is of another "
                "training; remove the fold to train it again"
            )
        for name in names:
            number, shape = int(name.split("/")[1]), tuple(self.tensors[name].shape)
            # a scalar is the number of steps
            wanted = tuple(parameters[number].shape) if number < len(parameters) else None
            if shape and shape != wanted:
                raise ValueError(
                    f"{self.path} is of another network: {name} has shape {shape}, and the parameter {wanted}"
                )

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        names = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensors[name] for name in names}


def _digest(progress: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the progress and of name, type, shape and values of every tensor."""
    digest = hashlib.sha256(json.dumps(dict(progress)).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        # the bytes as they are: numpy has no bfloat16
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _state_names(optimiser: torch.optim.Optimizer) -> set[str]:
    """Names of the tensors that an optimiser keeps for a parameter after a step."""
    if isinstance(optimiser, torch.optim.AdamW):
        return {"step", "exp_avg", "exp_avg_sq"}
    return {"momentum_buffer"} if any(group.get("momentum") for group in optimiser.param_groups) else set()


def _parameters(optimiser: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """Every parameter, with the options of its group."""
    return [(group, parameter) for group in optimiser.param_groups for parameter in group["params"]]


class CheckpointWriter:
    """Writes checkpoints one after the other in a thread, while training continues.

    `put` copies the tensors and returns; a separate stream moves the copies off a GPU. `close` waits for the
    thread. An error of the thread, such as a full disk, is raised by a later `put`, or by `close`. Nothing is
    written after an error: the last checkpoint must not tell of a best one that was not written.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._jobs: list[Future[None]] = []
        self._failed = False

    def put(
        self,
        path: Path,
        model: nn.Module,
        optimiser: torch.optim.Optimizer | None,
        progress: Mapping[str, Any],
    ) -> Future[None]:
        """Copy the current state and write it in the thread; the result is done when it is on the disk."""
        self._wait(_MAX_WAITING)
        tensors = checkpoint_tensors(model, optimiser)
        device = next(iter(tensors.values())).device
        copied = torch.cuda.Event() if device.type == "cuda" else None
        if copied is not None:
            copied.record()
        job = self._thread.submit(self._write, path, tensors, dict(progress), copied)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Wait until all checkpoints are on the disk."""
        try:
            self._wait(0)
        finally:
            self._thread.shutdown()

    def _wait(self, max_waiting: int) -> None:
        """Wait until at most so many jobs are not finished; raise the error of a finished one."""
        while self._jobs and (len(self._jobs) > max_waiting or self._jobs[0].done()):
            self._jobs.pop(0).result()

    def _write(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        progress: Mapping[str, Any],
        copied: torch.cuda.Event | None,
    ) -> None:
        if self._failed:
            return
        try:
            _write_copies(path, tensors, progress, copied)
        except BaseException:
            self._failed = True
            raise


def _write_copies(
    path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any], copied: torch.cuda.Event | None
) -> None:
    if copied is None:
        write_checkpoint(path, tensors, progress)
        return
    with torch.cuda.stream(_copy_stream(next(iter(tensors.values())).device)):
        copied.wait()
        write_checkpoint(path, tensors, progress)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies. PyTorch has 32 and gives them out in turns: a new one for each checkpoint
    would at times be that on which another thread records a graph, which makes both fail."""
    return torch.cuda.Stream(device)
