"""Jobs as tasks of Ray, on one machine or a cluster. All nodes must see the folders of runs and datasets.

A task sends its events as it goes (a generator of Ray). A task whose worker or node dies is started again by
the schedule and continues from the checkpoint of its fold. On GPUs a job has one of its own, or a share.
"""

import inspect
import os
import queue
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from threading import Thread
from types import TracebackType
from typing import Any

from ..extras import need
from .context import Context, Event
from .jobs import Job, WorkerOptions, work

# processor threads of a job that has a GPU or a share of one
_GPU_THREADS = 4


class RayPool:
    """address: of a cluster; None takes the cluster that Ray finds, or starts one on this machine.

    per_gpu: jobs that run on a GPU at the same time.
    """

    def __init__(self, address: str | None, *, accelerator: str = "auto", per_gpu: int = 1) -> None:
        need("ray", "--on ray")
        import ray

        self.ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        has_gpus = accelerator != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        self.options = WorkerOptions(accelerator)
        if has_gpus:
            self.options = replace(self.options, num_threads=_GPU_THREADS)
        # a type checker may have wrapped it, and Ray must see that it is a generator
        remote = ray.remote(inspect.unwrap(_task))
        # the schedule starts a lost job again
        self._remote = remote.options(
            num_cpus=1, num_gpus=1 / per_gpu if has_gpus else 0, max_retries=0, num_returns="streaming"
        )
        self._running: dict[Any, Job] = {}

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

    def start(self, job: Job) -> None:
        self._running[self._remote.remote(job, self.options)] = job

    def wait(self, seconds: float) -> list[tuple[Job, Event]]:
        ready, _ = self.ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [(self._running[task], self._next_event(task)) for task in ready]

    def _next_event(self, task: Any) -> Event:
        try:
            event: Event = self.ray.get(next(task))
        # a task catches errors of its job: it could not be started, such as on a node without semidice
        except self.ray.exceptions.RayTaskError as error:
            event = Event("failed", f"Ray could not start it: {str(error).strip().splitlines()[-1]}")
        # its worker or its node died, or the generator ended without the event of its end
        except (self.ray.exceptions.RayError, StopIteration) as error:
            event = Event("lost", type(error).__name__)
        if event.kind in ("finished", "failed", "lost"):
            self._running.pop(task)
        return event


@lru_cache(maxsize=1)
def _context(options: WorkerOptions) -> tuple[Context, queue.SimpleQueue[Event]]:
    """What this process trains with, which Ray uses for many tasks, and what it says."""
    events = queue.SimpleQueue[Event]()
    return options.context(events.put), events


def _task(job: Job, options: WorkerOptions) -> Iterator[Event]:
    """The events of a job, which runs in a thread. Ray shows a task only its own GPU, as number 0."""
    context, events = _context(options)
    # a daemon: Ray ends the process if the driver is gone
    Thread(target=lambda: events.put(work(job, context)), name="job", daemon=True).start()
    while True:
        event = events.get()
        yield event
        if event.kind == "lost":
            # Ray would use this process again; if the event is lost as well, Ray reports a dead worker
            os._exit(1)
        if event.kind in ("finished", "failed"):
            return
