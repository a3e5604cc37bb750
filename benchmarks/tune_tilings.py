"""Which tiles are best for a number of classes, on a GPU: how the tables of `kernels/tilings.py` are made.

    python benchmarks/tune_tilings.py --classes 64 100 [--kinds "bf16, hard"] [--passes backward]

The kernel of a pass is timed alone, on the batch of `bench_classes`, with every tiling that its registers and
shared memory may hold. The best are printed, with the one of the table, as multiples of the time that a copy
takes for the bytes of the pass. Many processes compile all kernels first. Write the tables by hand: one row
should serve many numbers of classes and both types of logits.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from bench_classes import batch
from bench_loss import KINDS, copy_bandwidth
from gpu import compile_all, need_gpu
from timing import seconds_of

from semidice.kernels import plans
from semidice.kernels.tilings import Tiling
from semidice.overlap import SumsOptions

PASSES = ("forward", "backward")
OPTIONS = SumsOptions("softmax", "min", entropy=True)
# shared memory of one program that every GPU since 2020 has
MAX_SHARED_BYTES = 98_000


class Trial(NamedTuple):
    """One pass over a batch with a tiling; None means the tiling in the table."""

    num_classes: int
    kind: str
    pass_name: str
    tiling: Tiling | None


class Result(NamedTuple):
    """Time of a trial as a multiple of that of a copy, and its tiling; None for that of the table."""

    ratio: float
    tiling: Tiling | None


def tilings(num_classes: int, kind: str, pass_name: str) -> Iterator[Tiling]:
    """All candidate tilings: a thread holds 8 to 160 logits, and no logit twice."""
    logit_dtype, target_dtype = KINDS[kind]
    voxel_bytes = num_classes * logit_dtype.itemsize
    if target_dtype.is_floating_point:
        voxel_bytes += num_classes * target_dtype.itemsize
    for log_block, num_warps, vector in product(range(4, 11), (1, 2, 4, 8, 16), (4, 8)):
        voxel_block = 2**log_block
        tiling = Tiling(voxel_block, num_warps, vector)
        per_thread = num_classes * voxel_block / (32 * num_warps)
        if not 8 <= per_thread <= 160 or tiling.step > num_classes or voxel_block < 4 * vector:
            continue
        if pass_name == "backward":
            yield tiling
            continue
        for num_tiles, num_stages in product((4, 16) if num_classes <= 4 else (16,), (1, 2, 3)):
            if num_stages == 1 or num_stages * voxel_block * voxel_bytes < MAX_SHARED_BYTES:
                yield tiling._replace(num_tiles=num_tiles, num_stages=num_stages)


def inputs_of(num_classes: int, kind: str) -> plans.Batch:
    logits, target = batch(num_classes, kind)
    return logits.detach(), target, None


def prepared(inputs: plans.Batch, pass_name: str, tiling: Tiling | None) -> Callable[[], object]:
    """A launch of the kernel of a pass."""
    plan = plans.plan_of(*inputs, OPTIONS, None if tiling is None else (tiling, tiling))
    if pass_name == "forward":
        partials = torch.empty(plan.num_partials, device="cuda")
        return lambda: plans.launch_sums(plan, inputs, partials, 0)
    scale = torch.ones((), device="cuda")
    grad_sums = torch.randn(plan.shape[0] * 4 * plan.shape[1], device="cuda")
    return lambda: plans.launch_gradient(plan, inputs, grad_sums, scale, inputs[0])


def compile_one(trial: Trial) -> str | None:
    """The error raised when the tiling is compiled and run, or None."""
    num_classes, kind, pass_name, tiling = trial
    try:
        prepared(inputs_of(num_classes, kind), pass_name, tiling)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def measure(trials: list[Trial], bandwidth: float) -> list[Result]:
    """Results of trials of one pass over one kind of batch, the fastest first."""
    num_classes, kind, pass_name, _ = trials[0]
    inputs = inputs_of(num_classes, kind)
    logits, target, _ = inputs
    num_bytes = target.numel() * target.element_size()
    num_bytes += logits.numel() * logits.element_size() * (2 if pass_name == "backward" else 1)
    results = []
    for trial in trials:
        seconds = seconds_of(prepared(inputs, pass_name, trial.tiling), "cuda")
        results.append(Result(seconds * bandwidth / num_bytes, trial.tiling))
    return sorted(results, key=lambda result: result.ratio)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", required=True, help="numbers of classes to try")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--best", type=int, default=6, help="how many tilings to print")
    arguments = parser.parse_args()
    need_gpu()
    groups = list(product(arguments.classes, arguments.kinds, arguments.passes))
    trials = [Trial(*group, tiling) for group in groups for tiling in (None, *tilings(*group))]
    faults = dict(zip(trials, compile_all(compile_one, trials), strict=True))
    bandwidth = copy_bandwidth()
    for group in groups:
        of_group = [trial for trial in trials if trial[:3] == group]
        sound = [trial for trial in of_group if faults[trial] is None]
        results = measure(sound, bandwidth)
        current = next(result for result in results if result.tiling is None)
        num_classes, kind, pass_name = group
        print(f"\n{num_classes} classes, {kind}, {pass_name}: {current.ratio:.3f} by the table")
        print(f"{len(sound)} tilings tried, {len(of_group) - len(sound)} failed")
        for result in results[: arguments.best]:
            print(f"    {result.ratio:.3f} {result.tiling or 'by the table'}", flush=True)


if __name__ == "__main__":
    main()
