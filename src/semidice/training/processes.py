"""The processes that train together: one, copies of it on this machine, or those that torchrun started.

    run_processes(work, of_copy, number=2)    calls work(processes) here, and of_copy(processes) in a copy

Each takes its share of a batch and of the held-out cases. On GPUs, batch norms are computed over all of them;
torch has no such layer for a CPU, where several processes equal one only with `model.options.norm: group`.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UserError, described
from ..processes import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

# for the first process to raise its own error, after a copy has failed
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Processes:
    """This process among those that train together. number: of all of them."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    number: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.number > 1:
            dist.barrier()

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items that this process works on."""
        return items[self.rank :: self.number]

    def placed(self, network: nn.Module) -> nn.Module:
        """The network on the device; on several GPUs with common batch norms, under the same names."""
        if self.number > 1 and self.device.type == "cuda":
            from timm.layers.norm_act import convert_sync_batchnorm

            network = convert_sync_batchnorm(network)
        return network.to(self.device)

    def wrapped(self, network: nn.Module) -> nn.Module:
        """The network with gradients that are averaged over all processes."""
        if self.number == 1:
            return network
        on_gpu = self.device.type == "cuda"
        return DistributedDataParallel(network, device_ids=[self.device] if on_gpu else None)


def chosen_device(accelerator: str = "auto", index: int = 0) -> torch.device:
    """The CPU, or the GPU of this number; a UserError if this machine does not have it."""
    if accelerator not in ("auto", "cpu", "cuda", "gpu"):
        raise UserError(f"--accelerator {accelerator}: expected auto, cpu or cuda")
    if accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(
            f"--accelerator {accelerator}: GPU {index} is asked for, but PyTorch finds {found}: use fewer "
            "--devices, or --accelerator cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def run_processes(
    work: Callable[[Processes], Result],
    of_copy: Callable[[Processes], object],
    *,
    accelerator: str = "auto",
    number: int = 1,
) -> Result:
    """What `work` returns in this process. of_copy: is sent to copies of it, and called there."""
    if dist.is_torchelastic_launched():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        rank, of_all, index = (int(os.environ[name]) for name in names)
        processes = Processes(chosen_device(accelerator, index), rank, of_all)
        return _together(work, processes, "env://")
    device = chosen_device(accelerator)
    if number == 1:
        return work(Processes(device))
    if device.type == "cuda":
        # named before the copies start
        chosen_device(accelerator, number - 1)
        device = chosen_device(accelerator)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // number))
    with TemporaryDirectory(prefix="semidice_") as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        options: Any = (accelerator, number, meeting, torch.get_num_threads())
        # a copy of a process that has used a GPU cannot use it
        spawn = multiprocessing.get_context("spawn")
        copies = [spawn.Process(target=_copy, args=(of_copy, rank, *options)) for rank in range(1, number)]
        for copy in copies:
            copy.start()
        is_over = Event()
        Thread(target=_watch, args=(copies, is_over), daemon=True).start()
        try:
            result = _together(work, Processes(device, 0, number), meeting)
            for copy in copies:
                copy.join()
            return result
        # a copy that has ended breaks the exchange with it
        except RuntimeError as error:
            wait([copy.sentinel for copy in copies], timeout=1.0)
            if any(copy.exitcode for copy in copies):
                raise UserError("a process of this training has ended; its message is above") from error
            raise
        finally:
            is_over.set()
            for copy in copies:
                copy.kill()
                copy.join()


def _together(work: Callable[[Processes], Result], processes: Processes, meeting: str) -> Result:
    backend = "nccl" if processes.device.type == "cuda" else "gloo"
    of_all: Any = {"rank": processes.rank, "world_size": processes.number}
    dist.init_process_group(backend, init_method=meeting, **of_all)
    try:
        return work(processes)
    finally:
        dist.destroy_process_group()


def _copy(
    work: Callable[[Processes], object],
    rank: int,
    accelerator: str,
    number: int,
    meeting: str,
    num_threads: int,
) -> None:
    """The main function of a copy."""
    # an interrupt from the terminal is for the first process, which ends its copies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(num_threads)
    try:
        device = chosen_device(accelerator, rank if torch.cuda.is_available() else 0)
        _together(work, Processes(device, rank, number), meeting)
    except Exception as error:
        with suppress(OSError):
            print(f"process {rank} of {number}: {described(error)}", file=sys.stderr, flush=True)
        os._exit(1)


def _watch(copies: Sequence[Any], is_over: Event) -> None:
    """End this process if a copy has failed and it waits for that copy."""
    running = list(copies)
    while running and not is_over.is_set():
        ended = wait([copy.sentinel for copy in running])
        failed = [copy for copy in running if copy.sentinel in ended and copy.exitcode]
        running = [copy for copy in running if copy.sentinel not in ended]
        if failed and not is_over.wait(_PATIENCE_S):
            os._exit(1)
