"""Time of some work: by events on a GPU, there also from a CUDA graph, and by the clock on a CPU."""

import statistics
import time
import warnings
from collections.abc import Callable

import torch


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


def seconds_in_turns(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Time of each on a GPU where the host decides: the median of a turn, in the quietest of ten turns.

    A host that does something else besides only ever adds to it, and does so for longer than a turn takes.
    """
    # as in `do_bench`, so that nothing is found in the cache, and the host is a little ahead
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    medians: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(11):
        for name, work in works.items():
            pairs = []
            for _ in range(6):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                cache.zero_()
                start.record()
                work()
                end.record()
                pairs.append((start, end))
            torch.cuda.synchronize()
            medians[name].append(statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000)
    # the first turn warms up
    return {name: min(turns[1:]) for name, turns in medians.items()}


def seconds_of_graph(work: Callable[[], object]) -> float | None:
    """Median time of `work` replayed from a CUDA graph; None where it cannot be captured.

    Tensors that are waiting for a gradient must be of its own: autograd goes back to the stream where others
    used them, which a capture refuses.
    """
    if _waits_for_the_device(work):
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return None
    return seconds_of(graph.replay, "cuda")


def _waits_for_the_device(work: Callable[[], object]) -> bool:
    """Found out beforehand, for a capture that fails leaves the allocator of memory in disorder."""
    before = torch.cuda.get_sync_debug_mode()
    # away from the default stream, as in a capture; it is also the warm-up that a capture needs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        # torch says that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                work()
            return False
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.synchronize()
