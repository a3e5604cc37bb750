"""Helpers of the GPU benchmarks: they require a GPU and compile kernels in parallel processes."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs a CUDA device, and torch finds none: run it on a machine with one"
        )


def compile_all(run: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results of `run` for all items, in parallel. Triton caches the kernels, so later runs are quick."""
    results: list[Result] = []
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for result in pool.map(run, items):
            results.append(result)
            print(f"\rcompiled {len(results)} of {len(items)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results
