"""Times of functions: by events on a GPU, from a CUDA graph, and by the clock on a CPU."""

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
    """Times on a GPU that depend on the host: the smallest of the medians of ten turns.

    Other work on the host can only increase a time, and it usually lasts longer than a turn.
    """
    # as in `do_bench`: filling this tensor clears the cache and lets the host run ahead of the GPU
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
    # the first turn is the warm-up
    return {name: min(turns[1:]) for name, turns in medians.items()}


def seconds_of_graph(work: Callable[[], object]) -> float | None:
    """Median time of `work` replayed from a CUDA graph; None if it cannot be captured.

    `work` must not share tensors that require a gradient with other work: autograd would switch to the
    stream on which they were used before, and the capture would fail.
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
    """Whether `work` synchronises. Tested before capture, because a failed capture corrupts the allocator."""
    before = torch.cuda.get_sync_debug_mode()
    # on another stream than the default one, as in a capture; this is also the warm-up for the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        # torch warns that this mode is a prototype
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
