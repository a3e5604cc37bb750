"""Worker processes on this machine: each imports once, keeps the dataset, and works on one job after another.

A worker that dies is replaced. A worker ends with its parent, so that a second call does not find it at work.
Workers share a GPU, see `shared_gpu`.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch

from ..errors import UserError
from ..processes import end_with_parent
from .context import Context, Event
from .jobs import Job, WorkerOptions, work

# share of a GPU's memory that workers may need together
_MAX_SHARE = 0.9
MAX_AUTO_WORKERS = 8
_PROGRAM = "nvidia-cuda-mps-control"
_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
# where the service of a user is, unless a variable says otherwise
_USERS_PIPE = Path("/tmp/nvidia-mps/control")
_PREFIX = "semidice_mps_"
_SECONDS = 30.0
# a context on the first GPU, without the time that importing torch takes
_PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(min(255, cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)))
"""


class LocalPool:
    """num_workers: None starts with one and takes as many as the memory of the GPU allows, 1 on a CPU."""

    def __init__(self, num_workers: int | None, *, accelerator: str = "auto") -> None:
        self.is_auto = num_workers is None
        self.num_workers, self.accelerator = num_workers or 1, accelerator
        self.num_gpus = torch.cuda.device_count() if accelerator != "cpu" else 0
        self._context = _context(on_gpu=self.num_gpus > 0)
        self._num_threads = torch.get_num_threads()
        if self.num_gpus:
            # threads of many workers that wait for work would take the processors from each other
            workers = num_workers or MAX_AUTO_WORKERS * self.num_gpus
            self._num_threads = max(1, (os.cpu_count() or 1) // workers)
        self._workers: list[_Process] = []
        self._largest_share = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> "LocalPool":
        if self.num_gpus and (self.is_auto or self.num_workers > self.num_gpus):
            self._stack.enter_context(shared_gpu())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            for worker in self._workers:
                worker.stop()

    def has_room(self) -> bool:
        return sum(worker.job is not None for worker in self._workers) < self.num_workers

    def start(self, job: Job) -> None:
        free = [worker for worker in self._workers if worker.job is None]
        if not free:
            # on several GPUs, the one with the fewest workers
            devices = [worker.device for worker in self._workers]
            device = min(range(max(self.num_gpus, 1)), key=devices.count)
            options = WorkerOptions(self.accelerator, device, self._num_threads)
            free = [_Process(self._context, options)]
            self._workers += free
        free[0].give(job)

    def wait(self, seconds: float) -> list[tuple[Job, Event]]:
        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        events = []
        for connection in wait(list(busy), seconds):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            job = worker.job
            assert job is not None
            try:
                event: Event = connection.recv()
            # the process was killed, maybe while it was sending
            except (EOFError, OSError):
                worker.stop()
                self._workers.remove(worker)
                events.append((job, Event("lost", f"exit code {worker.process.exitcode}")))
                continue
            events.append((job, event))
            if event.kind == "lost":
                if "out of memory" in str(event.content):
                    self.num_workers, self.is_auto = max(1, self.num_workers - 1), False
                # an error of the device can leave the process useless
                worker.stop()
                self._workers.remove(worker)
            if event.kind in ("finished", "failed"):
                worker.job = None
            if event.kind in ("finished", "memory"):
                self._measure(event.content)
        return events

    def _measure(self, share: float) -> None:
        """With `auto`, as many workers as the largest job so far leaves memory for."""
        self._largest_share = max(self._largest_share, share)
        if self.is_auto and self._largest_share:
            per_gpu = max(1, min(int(_MAX_SHARE / self._largest_share), MAX_AUTO_WORKERS))
            self.num_workers = max(1, min(per_gpu * self.num_gpus, os.cpu_count() or 1))


class _Process:
    """A worker process and the job that it works on."""

    def __init__(self, context: BaseContext, options: WorkerOptions) -> None:
        self.device = options.device
        self.job: Job | None = None
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_work, args=(theirs, options, time.time()), name="semidice worker"
        )
        self.process.start()
        # so that the end of the process closes the pipe
        theirs.close()

    def give(self, job: Job) -> None:
        self.job = job
        # if it died while it was idle, the next `wait` finds the pipe closed
        with suppress(OSError):
            self.connection.send(job)

    def stop(self) -> None:
        """End the process now. Its job can be started again: files get their names when they are complete."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _context(*, on_gpu: bool) -> BaseContext:
    """On a CPU, processes are copies of one that has imported everything, where the system can do that."""
    # a copy of a process that has looked for GPUs, as some modules do at import, cannot use them
    if on_gpu or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _work(connection: Connection, options: WorkerOptions, started_at: float) -> None:
    """The main function of a worker process."""
    # an interrupt from the terminal is for the parent, which ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(stop_service)
    imported_for = max(0.0, time.time() - started_at)
    try:
        context: Context | None = None
        while True:
            job = connection.recv()
            try:
                if context is None:
                    context = options.context(connection.send)
                    context.seconds["import"] = imported_for
            except UserError as error:
                connection.send(Event("failed", str(error)))
            else:
                connection.send(work(job, context))
    # the parent is gone
    except (EOFError, OSError):
        stop_service()
        os._exit(1)


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Processes that are started in the block run on a GPU at the same time; False if they take turns.

    By NVIDIA's Multi-Process Service (MPS). Without it, a small network leaves most of a GPU idle, and a
    second process does not fill the gap. The service comes with the driver and needs no rights. It is started
    for the time of a command, unless the user has started one. Where it does not work, processes take turns.
    """
    if os.environ.get(_VARIABLES[0]) or _USERS_PIPE.exists():
        yield True
        return
    if shutil.which(_PROGRAM) is None:
        yield False
        return
    kept = {name: os.environ.get(name) for name in _VARIABLES}
    with TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(_VARIABLES, folder))
        is_shared = _succeeds([_PROGRAM, "-d"]) and _succeeds([sys.executable, "-c", _PROBE])
        try:
            if not is_shared:
                _restore(kept)
            yield is_shared
        finally:
            os.environ.update(dict.fromkeys(_VARIABLES, folder))
            stop_service()
            _restore(kept)


def stop_service() -> None:
    """End the service that `shared_gpu` has started, also if its process was killed; not one of the user."""
    if Path(os.environ.get(_VARIABLES[0], "")).name.startswith(_PREFIX):
        _succeeds([_PROGRAM], text="quit\n")


def _restore(kept: dict[str, str | None]) -> None:
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _succeeds(command: list[str], *, text: str = "") -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(command, input=text, text=True, capture_output=True, timeout=_SECONDS)
        return ended.returncode == 0
    return False
