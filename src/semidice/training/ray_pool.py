"""Jobs as tasks of Ray, on one machine or a cluster. All nodes must see the folders of runs and datasets.

A task sends its reports as it goes (a generator of Ray). A task whose worker or node dies is started again by
the schedule and continues from the checkpoint of its fold. The first job of a run has a GPU of its own; the
memory that it needed decides which share of a GPU the other jobs of the run ask for.
"""

import inspect
import math
import os
import queue
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from threading import Thread
from types import TracebackType
from typing import Any

from ..extras import need
from .jobs import Job, Report, Worker, WorkerOptions

# memory that a job asks for, over the memory that another fold needed
_RESERVE = 1.15
# processor threads of a job that has a GPU or a share of one
_GPU_THREADS = 4


class RayPool:
    """address: of a cluster; None takes the cluster that Ray finds, or starts one on this machine."""

    def __init__(self, address: str | None, *, accelerator: str = "auto") -> None:
        need("ray", "--on ray")
        import ray

        self.ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        self.has_gpus = accelerator != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        self.options = WorkerOptions(accelerator)
        if self.has_gpus:
            self.options = replace(self.options, num_threads=_GPU_THREADS)
        # a type checker may have wrapped it, and Ray must see that it is a generator
        self._remote = ray.remote(inspect.unwrap(_task))
        self._running: dict[Any, Job] = {}
        # share of a GPU that a job of a run needs
        self._share: dict[str, float] = {}

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._running:
            self.ray.cancel(task, force=True)
        if self._is_ours:
            self.ray.shutdown()

    def has_room(self) -> bool:
        """Whether Ray has fewer tasks than processors; nodes may come and go."""
        return len(self._running) < max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def can_start(self, job: Job) -> bool:
        """On GPUs, whether the memory of the job is known, or is measured by it."""
        is_measured = any(running.group == job.group for running in self._running.values())
        return not self.has_gpus or job.group in self._share or not is_measured

    def start(self, job: Job) -> None:
        num_gpus = self._share.get(job.group, 1.0) if self.has_gpus else 0
        # the schedule starts a lost job again
        remote = self._remote.options(num_cpus=1, num_gpus=num_gpus, max_retries=0, num_returns="streaming")
        self._running[remote.remote(job, self.options)] = job

    def wait(self, seconds: float) -> list[tuple[Job, Report]]:
        ready, _ = self.ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [(self._running[task], self._next_report(task)) for task in ready]

    def _next_report(self, task: Any) -> Report:
        try:
            report: Report = self.ray.get(next(task))
        # a task catches errors of its job: it could not be started, such as on a node without semidice
        except self.ray.exceptions.RayTaskError as error:
            self._running.pop(task)
            return Report("failed", f"Ray could not start it: {str(error).strip().splitlines()[-1]}")
        # its worker or its node died, or the generator ended without a report
        except (self.ray.exceptions.RayError, StopIteration) as error:
            self._running.pop(task)
            return Report("lost", type(error).__name__)
        if report.kind in ("finished", "failed", "lost"):
            job = self._running.pop(task)
            if report.kind == "finished" and report.content:
                # Ray counts in units of 1/10000
                self._share[job.group] = min(1.0, math.ceil(100 * _RESERVE * report.content) / 100)
        return report


@lru_cache(maxsize=1)
def _worker(options: WorkerOptions) -> Worker:
    """The worker of this process, which Ray uses for many tasks."""
    return Worker(options)


def _task(job: Job, options: WorkerOptions) -> Iterator[Report]:
    """The reports of a job, which runs in a thread. Ray shows a task only its own GPU, as number 0."""
    worker, reports = _worker(options), queue.SimpleQueue[Report]()
    worker.send = reports.put
    # a daemon: Ray ends the process if the driver is gone
    thread = Thread(target=lambda: reports.put(worker.work(job)), name="job", daemon=True)
    thread.start()
    while True:
        report = reports.get()
        yield report
        if report.kind == "lost":
            # Ray would use this process again; if the report is lost as well, Ray reports a dead worker
            os._exit(1)
        if report.kind in ("finished", "failed"):
            return
