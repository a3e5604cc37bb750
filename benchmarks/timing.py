"""Median time of some work, by events on a GPU and by the clock on a CPU."""

import statistics
import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Median time of `work` after a warm-up."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(work, warmup=25, rep=100, return_mode="median")) / 1000
    work()
    times: list[float] = []
    while len(times) < 5 or sum(times) < 0.5:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
