"""Which tiles are best for a number of classes, on a GPU: how the tables of `kernels/tilings.py` were found.

    python benchmarks/tune_tilings.py --classes 64 100 [--kinds "bf16, hard"] [--passes backward]

The kernel of a pass is timed alone, on the batch of `bench_classes`, with every tiling that its registers and
shared memory may hold; the best are printed, with what the table has, as multiples of the copy's time for
what the pass must move. All are compiled first, by many processes at a time.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import torch
from bench_classes import batch
from bench_loss import KINDS, copy_bandwidth
from gpu import compile_all, need_gpu
from timing import seconds_of

from semidice.kernels import plans
from semidice.kernels.plans import Inputs
from semidice.kernels.tilings import Tiling

PASSES = ("forward", "backward")
# that a program may have on any GPU since 2020
SHARED_BYTES = 98_000


class Trial(NamedTuple):
    """A pass over a batch with some tiling; None is the one of the table."""

    num_classes: int
    kind: str
    which: str
    tiling: Tiling | None


def tilings(num_classes: int, kind: str, which: str) -> Iterator[Tiling]:
    """All that may be good: a thread has 8 to 160 logits, and no two have the same."""
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
        # fewer registers than it wants are worth a try where logits alone do not fill them
        for registers in (None, 128, 168) if 30 < per_thread <= 100 else (None,):
            limited = tiling._replace(registers=registers)
            if which == "backward":
                yield limited
                continue
            for num_tiles, num_stages in product((4, 16) if num_classes <= 4 else (16,), (1, 2, 3)):
                if num_stages == 1 or num_stages * voxel_block * voxel_bytes < SHARED_BYTES:
                    yield limited._replace(num_tiles=num_tiles, num_stages=num_stages)


def inputs_of(num_classes: int, kind: str) -> Inputs:
    logits, target = batch(num_classes, kind)
    return plans.flat_inputs(logits.detach(), target, None, activation="softmax", form="min", entropy=True)


def prepared(inputs: Inputs, which: str, tiling: Tiling | None) -> Callable[[], None]:
    """A launch of the kernel of a pass."""
    layout = inputs.layout
    num_images, num_classes, _ = layout.shape
    tensors = inputs.logits, inputs.target, inputs.valid
    tiling = tiling or getattr(layout, which)
    with patch.object(plans.Layout, which, tiling):
        norms = plans.Norms(layout, tiling)(inputs.logits)
        if which == "forward":
            sums = plans._sums_launch(layout, 0)
            partials = torch.empty(num_images * layout.num_programs * 5 * num_classes, device="cuda")
            return lambda: sums(*tensors, partials, *norms)
        gradient_launch = plans._gradient_launch(layout, layout.logits_stride)
    gradient, scale = torch.empty_like(inputs.logits), torch.ones((), device="cuda")
    grad_sums = torch.randn(num_images * 4 * num_classes, device="cuda")
    return lambda: gradient_launch(*tensors, grad_sums, scale, gradient, *norms)


def compile_one(trial: Trial) -> str | None:
    """What is wrong with a tiling, or None."""
    num_classes, kind, which, tiling = trial
    try:
        prepared(inputs_of(num_classes, kind), which, tiling)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", required=True, help="numbers of them to try")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--best", type=int, default=6, help="how many to print")
    arguments = parser.parse_args()
    need_gpu()
    groups = list(product(arguments.classes, arguments.kinds, arguments.passes))
    trials = [Trial(*group, tiling) for group in groups for tiling in (None, *tilings(*group))]
    faults = dict(zip(trials, compile_all(compile_one, trials), strict=True))
    bandwidth = copy_bandwidth()
    for group in groups:
        num_classes, kind, which = group
        inputs = inputs_of(num_classes, kind)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (inputs.logits, inputs.target))
        if which == "backward":
            num_bytes += inputs.logits.numel() * inputs.logits.element_size()
        found: list[tuple[float, Tiling | None]] = []
        for trial in trials:
            if trial[:3] == group and faults[trial] is None:
                seconds = seconds_of(prepared(inputs, which, trial.tiling), "cuda")
                found.append((seconds * bandwidth / num_bytes, trial.tiling))
        now = next(ratio for ratio, tiling in found if tiling is None)
        num_faulty = sum(trial[:3] == group and faults[trial] is not None for trial in trials)
        print(f"\n{num_classes} classes, {kind}, {which}: {now:.3f} with {getattr(inputs.layout, which)}")
        print(f"{len(found)} tried, {num_faulty} could not be")
        for ratio, tiling in sorted(found, key=lambda pair: pair[0])[: arguments.best]:
            print(f"    {ratio:.3f} {'as in the table' if tiling is None else tiling}", flush=True)


if __name__ == "__main__":
    main()
