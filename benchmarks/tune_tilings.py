"""Which tiles are best for a number of classes, on a GPU: how `kernels/tiling_tables.py` is made.

    python benchmarks/tune_tilings.py --classes 64 100 [--kinds "bf16, hard"] [--passes backward] [--write]

The kernel of a pass is timed alone, on the batch of `bench_classes`, with every tiling that its registers and
shared memory may hold. The best are printed, with the one of the table, as multiples of the time that a copy
takes for the bytes of the pass. Many processes compile all kernels first.

With --write the tables are written. The bounds of their rows stay; change them by hand. A tiling is replaced
if another one is faster by more than 1 %, in the mean over the numbers of classes of its row that were tried.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from bench_classes import batch
from bench_loss import KINDS, copy_bandwidth
from gpu import compile_all, need_gpu
from timing import seconds_of

from semidice.kernels import MAX_FUSED_CLASSES, plans, tiling_tables
from semidice.kernels.layout import Inputs, Layout, flat_inputs
from semidice.kernels.tilings import BLOCK_GRADIENT, BLOCK_SUMS, Row, Tiling, Tilings
from semidice.overlap.options import SumsOptions

PASSES = ("forward", "backward")
# shared memory of one program that every GPU since 2020 has
MAX_SHARED_BYTES = 98_000
# relative gain in time at which a tiling replaces the one in the table
MIN_GAIN = 0.01
# names of the tables by pass and kind of target
TABLES = {
    ("forward", "soft"): "FORWARD",
    ("backward", "soft"): "BACKWARD",
    ("forward", "hard"): "HARD_FORWARD",
    ("backward", "hard"): "HARD_BACKWARD",
}
TABLES_HEADER = '''"""Tilings by number of classes, from trials on an H200. A program writes this file:

    python benchmarks/tune_tilings.py --write --classes
        2 3 8 11 14 19 24 32 40 50 64 80 100 130 150 200 300 400 600 1000 2000

A row holds the most classes, the tiling of logits of two bytes, and that of four bytes if it differs. The
numbers of a tiling are voxels, warps, neighbouring voxels per thread, and tiles per program. HARD tables are
for class indices and a softmax: they take fewer registers, and so tiles have more voxels.
"""

from . import MAX_FUSED_CLASSES
from .tilings import BLOCK_GRADIENT, BLOCK_SUMS, Tiling, Tilings

'''


class Trial(NamedTuple):
    """One pass over a batch with a tiling; None means the tiling in the table."""

    num_classes: int
    kind: str
    pass_name: str
    tiling: Tiling | None


class Result(NamedTuple):
    """The tiling of a trial, and its time as a multiple of the time of a copy."""

    ratio: float
    tiling: Tiling
    is_current: bool


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
        # also try fewer registers than the compiler chooses, if the logits leave some free
        for registers in (None, 128, 168) if 30 < per_thread <= 100 else (None,):
            limited = tiling._replace(registers=registers)
            if pass_name == "backward":
                yield limited
                continue
            for num_tiles, num_stages in product((4, 16) if num_classes <= 4 else (16,), (1, 2, 3)):
                if num_stages == 1 or num_stages * voxel_block * voxel_bytes < MAX_SHARED_BYTES:
                    yield limited._replace(num_tiles=num_tiles, num_stages=num_stages)


def inputs_of(num_classes: int, kind: str) -> Inputs:
    logits, target = batch(num_classes, kind)
    return flat_inputs(logits.detach(), target, None, SumsOptions("softmax", "min", entropy=True))


def prepared(inputs: Inputs, pass_name: str, tiling: Tiling | None) -> Callable[[], None]:
    """A launch of the kernel of a pass."""
    layout = inputs.layout
    num_images, num_classes, _ = layout.shape
    tensors = inputs.logits, inputs.target, inputs.valid
    tiling = tiling or getattr(layout, pass_name)
    with patch.object(Layout, pass_name, tiling):
        norms = plans.Norms(layout, tiling)(inputs.logits)
        if pass_name == "forward":
            sums = plans.sums_launch(layout, 0)
            partials = torch.empty(num_images * layout.num_programs * 5 * num_classes, device="cuda")
            return lambda: sums(*tensors, partials, *norms)
        gradient_launch = plans.gradient_launch(layout, layout.logits_stride)
    gradient, scale = torch.empty_like(inputs.logits), torch.ones((), device="cuda")
    grad_sums = torch.randn(num_images * 4 * num_classes, device="cuda")
    return lambda: gradient_launch(*tensors, grad_sums, scale, gradient, *norms)


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
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (inputs.logits, inputs.target))
    if pass_name == "backward":
        num_bytes += inputs.logits.numel() * inputs.logits.element_size()
    results = []
    for trial in trials:
        seconds = seconds_of(prepared(inputs, pass_name, trial.tiling), "cuda")
        tiling = trial.tiling or getattr(inputs.layout, pass_name)
        results.append(Result(seconds * bandwidth / num_bytes, tiling, trial.tiling is None))
    return sorted(results)


def current_tables() -> dict[str, Tilings]:
    return {name: getattr(tiling_tables, name) for name in TABLES.values()}


# ratios of one tiling, by the number of classes at which it was tried
Ratios = dict[int, float]


def best_tiling(current: Tiling, ratios: dict[Tiling, Ratios]) -> Tiling:
    """The tiling to write for one row: the current one unless another is clearly faster.

    Only tilings that ran at every number of classes at which the current one did are compared.
    """
    if current not in ratios:
        return current
    tried = ratios[current].keys()
    means = {tiling: statistics.mean(of.values()) for tiling, of in ratios.items() if of.keys() >= tried}
    best = min(means, key=lambda tiling: means[tiling])
    return best if means[best] < (1 - MIN_GAIN) * means[current] else current


def updated_table(table: Tilings, results: dict[tuple[int, int], list[Result]]) -> Tilings:
    """A table with the best tilings; `results` are by number of classes and bytes of a logit."""
    rows: list[Row] = []
    min_classes = 0
    for max_classes, *tilings_of_row in table:
        best = []
        for num_bytes in (2, 4):
            ratios: dict[Tiling, Ratios] = defaultdict(dict)
            for (num_classes, logit_bytes), of_trial in results.items():
                if min_classes < num_classes <= max_classes and logit_bytes == num_bytes:
                    for result in of_trial:
                        ratios[result.tiling][num_classes] = result.ratio
            best.append(best_tiling(tilings_of_row[0 if num_bytes == 2 else -1], ratios))
        rows.append((max_classes, best[0]) if best[0] == best[1] else (max_classes, best[0], best[1]))
        min_classes = max_classes
    return tuple(rows)


def _tiling_source(tiling: Tiling) -> str:
    named = {BLOCK_SUMS: "BLOCK_SUMS", BLOCK_GRADIENT: "BLOCK_GRADIENT"}
    if tiling in named:
        return named[tiling]
    arguments = [str(number) for number in tiling[:3]]
    if tiling.num_tiles != 1:
        arguments.append(str(tiling.num_tiles))
    if tiling.num_stages != 1:
        arguments.append(f"num_stages={tiling.num_stages}")
    if tiling.registers is not None:
        arguments.append(f"registers={tiling.registers}")
    return f"Tiling({', '.join(arguments)})"


def tables_source(tables: dict[str, Tilings]) -> str:
    """The text of `kernels/tiling_tables.py`."""
    text = TABLES_HEADER
    for name, table in tables.items():
        text += f"{name}: Tilings = (\n"
        for max_classes, *tilings_of_row in table:
            bound = "MAX_FUSED_CLASSES" if max_classes == MAX_FUSED_CLASSES else str(max_classes)
            text += f"    ({', '.join([bound, *map(_tiling_source, tilings_of_row)])}),\n"
        text += ")\n"
    return text


def write_tables(all_results: dict[tuple[int, str, str], list[Result]]) -> None:
    tables = current_tables()
    for (pass_name, target), name in TABLES.items():
        results = {
            (num_classes, KINDS[kind][0].itemsize): of_trial
            for (num_classes, kind, of_pass), of_trial in all_results.items()
            if of_pass == pass_name and kind.endswith(target)
        }
        tables[name] = updated_table(tables[name], results)
    Path(tiling_tables.__file__).write_text(tables_source(tables))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", required=True, help="numbers of classes to try")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--best", type=int, default=6, help="how many tilings to print")
    parser.add_argument("--write", action="store_true", help="write kernels/tiling_tables.py")
    arguments = parser.parse_args()
    need_gpu()
    groups = list(product(arguments.classes, arguments.kinds, arguments.passes))
    trials = [Trial(*group, tiling) for group in groups for tiling in (None, *tilings(*group))]
    faults = dict(zip(trials, compile_all(compile_one, trials), strict=True))
    bandwidth = copy_bandwidth()
    all_results = {}
    for group in groups:
        of_group = [trial for trial in trials if trial[:3] == group]
        sound = [trial for trial in of_group if faults[trial] is None]
        results = all_results[group] = measure(sound, bandwidth)
        current = next(result for result in results if result.is_current)
        num_classes, kind, pass_name = group
        print(f"\n{num_classes} classes, {kind}, {pass_name}: {current.ratio:.3f} with {current.tiling}")
        print(f"{len(sound)} tilings tried, {len(of_group) - len(sound)} failed")
        for result in results[: arguments.best]:
            print(f"    {result.ratio:.3f} {'current' if result.is_current else result.tiling}", flush=True)
    if arguments.write:
        write_tables(all_results)


if __name__ == "__main__":
    main()
