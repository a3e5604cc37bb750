"""Runs one task over many items in several processes; after Ctrl-C or a crash no process keeps running.

No more items are submitted than there are workers. So if a process dies, the items that it may have died of
are known. Only this process reacts to Ctrl-C: it waits for the running items and starts no more. If this
process is killed (SIGKILL), its workers end too.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDiedError(RuntimeError, Generic[Item]):
    """A worker process ended without a result; `items` were running."""

    def __init__(self, items: tuple[Item, ...]) -> None:
        super().__init__(f"a worker process died while these were running: {items}")
        self.items = items


class Workers(AbstractContextManager["Workers"]):
    """`number` processes, which start with the first work and end with the `with` block.

    number: None for one per CPU; with 0 or 1 everything runs in this process.
    """

    def __init__(self, number: int | None = None) -> None:
        if number is not None and number < 0:
            raise ValueError(f"workers must be 0 or more; got {number}")
        if number is None:
            # the CPUs of this process, which a scheduler or a container may have limited
            has_affinity = hasattr(os, "sched_getaffinity")
            number = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        self.number = number
        self._executor: ProcessPoolExecutor | None = None

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes; the next work starts new ones."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def each(
        self, task: Callable[[Item], Result], items: Iterable[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        """Pairs of an item and its result, in the order in which they finish; tasks and items must pickle."""
        pending = list(items)
        if min(self.number, len(pending)) <= 1:
            for item in pending:
                yield item, task(item)
            return
        pending.reverse()
        if self._executor is None:
            # spawn, because a fork of a process with torch's threads may hang
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.number, mp_context=context, initializer=_start_worker)
        running: dict[Future[Result], Item] = {}
        try:
            while pending or running:
                while pending and len(running) < self.number:
                    item = pending.pop()
                    running[self._executor.submit(task, item)] = item
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    yield running.pop(future), result
        except BrokenProcessPool as error:
            self.stop()
            died = tuple(item for future, item in running.items() if future.exception() is not None)
            raise WorkerDiedError(died) from error
        finally:
            for future in running:
                future.cancel()
            wait(running)


def _start_worker() -> None:
    # the terminal sends Ctrl-C to all processes of the command; only the main one reacts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
