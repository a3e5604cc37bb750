"""Worker processes on this machine: each imports once, keeps the dataset, and works on one job after another.

A worker that dies is replaced. A worker ends with its parent, so that a second call does not find it at work.
Workers share a GPU (`gpu_sharing`).
"""

import multiprocessing
import os
import signal
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch

from ..processes import end_with_parent
from .gpu_sharing import shared_gpu, stop_service
from .jobs import Job, Report, Worker, WorkerOptions

# share of a GPU's memory that workers may need together
_MAX_SHARE = 0.9
MAX_AUTO_WORKERS = 8


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

    def can_start(self, job: Job) -> bool:
        return True

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

    def wait(self, seconds: float) -> list[tuple[Job, Report]]:
        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        reports = []
        for connection in wait(list(busy), seconds):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            job = worker.job
            assert job is not None
            try:
                report: Report = connection.recv()
            # the process was killed, maybe while it was sending
            except (EOFError, OSError):
                worker.stop()
                self._workers.remove(worker)
                reports.append((job, Report("lost", f"exit code {worker.process.exitcode}")))
                continue
            reports.append((job, report))
            if report.kind == "lost":
                if "out of memory" in str(report.content):
                    self.num_workers, self.is_auto = max(1, self.num_workers - 1), False
                # an error of the device can leave the process useless
                worker.stop()
                self._workers.remove(worker)
            if report.kind in ("finished", "failed"):
                worker.job = None
            if report.kind in ("finished", "memory"):
                self._measure(report.content)
        return reports

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
    worker = Worker(options, import_seconds=max(0.0, time.time() - started_at))
    worker.send = connection.send
    try:
        while True:
            connection.send(worker.work(connection.recv()))
    # the parent is gone
    except (EOFError, OSError):
        stop_service()
        os._exit(1)
