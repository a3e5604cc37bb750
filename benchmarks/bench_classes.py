"""How close the loss comes to the memory limit, by number of classes, on a GPU.

    python benchmarks/bench_classes.py [--classes 2 19 150] [--out bench_out] [--docs docs/performance.md]

The tiling depends on the number of classes (`kernels/tilings.py`). This shows how good the tilings are,
also for numbers of classes at which they were not tuned. A batch has 2^26 logits for any number of classes.
The time of its forward and backward pass, replayed from a CUDA graph, is divided by the limit of
`bench_loss`, with the copy of the same run. Many processes compile all kernels first. Writes
classes_cuda.jsonl, and with --docs the table between its markers.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench_loss import KINDS, copy_bandwidth, limit_in_seconds
from doc_tables import write_between_markers
from gpu import compile_all, need_gpu
from timing import seconds_of_graph
from torch import Tensor

import semidice

CLASSES = (
    2, 3, 5, 8, 11, 14, 19, 24, 32, 40, 50, 64, 80, 100, 130, 150, 200, 256
)  # fmt: skip


def batch(num_classes: int, kind: str) -> tuple[Tensor, Tensor]:
    """Logits that require a gradient, and a target."""
    shape = (4, num_classes, 1024, max(1, 2**14 // num_classes))
    dtype, target_dtype = KINDS[kind]
    torch.manual_seed(0)
    logits = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    if target_dtype.is_floating_point:
        return logits, torch.randn(shape, device="cuda").softmax(1)
    target_dtype = target_dtype if num_classes <= 256 else torch.int16
    return logits, torch.randint(num_classes, (shape[0], *shape[2:]), device="cuda", dtype=target_dtype)


def run_once(case: tuple[int, str]) -> None:
    """Compile all kernels of a case."""
    logits, target = batch(*case)
    semidice.SegmentationLoss()(logits, target).backward()
    torch.cuda.synchronize()


def over_limit(case: tuple[int, str], bandwidth: float) -> float:
    """Time of both passes as a CUDA graph, divided by the limit."""
    logits, target = batch(*case)
    loss = semidice.SegmentationLoss()

    def both() -> None:
        logits.grad = None
        loss(logits, target).backward()

    seconds = seconds_of_graph(both)
    if seconds is None:
        raise RuntimeError(f"the loss of {case[0]} classes, {case[1]}, cannot be captured in a graph")
    return seconds / limit_in_seconds(logits, target, bandwidth)


def table_of(rows: list[dict[str, Any]]) -> str:
    """Markdown: one row per number of classes."""
    first = rows[0]
    lines = [
        f"{first['device']}, torch {first['torch']}, copy {first['bandwidth'] / 1e12:.2f} TB/s; "
        "`python benchmarks/bench_classes.py`. Forward and backward of 2^26 logits, replayed from a CUDA "
        "graph, over the memory limit.",
        "",
        f"| classes | {' | '.join(KINDS)} |",
        f"|---:|{len(KINDS) * '---:|'}",
    ]
    for num_classes in dict.fromkeys(row["classes"] for row in rows):
        cells = {row["kind"]: f"{row['ratio']:.2f}" for row in rows if row["classes"] == num_classes}
        lines.append(f"| {num_classes} | {' | '.join(cells.get(kind, '') for kind in KINDS)} |")
    return "\n".join(lines) + "\n"


def measure(classes: Sequence[int], out: Path) -> list[dict[str, Any]]:
    cases = list(product(classes, KINDS))
    compile_all(run_once, cases)
    bandwidth = copy_bandwidth()
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bandwidth": bandwidth}
    rows: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    with (out / "classes_cuda.jsonl").open("w") as results:
        for case in cases:
            row = {"classes": case[0], "kind": case[1], "ratio": over_limit(case, bandwidth), **common}
            rows.append(row)
            # written immediately, so that no result is lost when the run is stopped
            print(json.dumps(row), file=results, flush=True)
            print(f"{case[0]} classes, {case[1]}: {row['ratio']:.2f}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--classes", type=int, nargs="+", default=CLASSES, help="numbers of classes to measure"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    arguments = parser.parse_args()
    need_gpu()
    table = table_of(measure(arguments.classes, arguments.out))
    print(table)
    if arguments.docs:
        write_between_markers(arguments.docs, "classes cuda", table)


if __name__ == "__main__":
    main()
