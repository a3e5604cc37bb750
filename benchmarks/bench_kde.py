"""Time, memory and error of kernel density recalibration: direct formula, float64, Triton.

    python benchmarks/bench_kde.py [--device cuda] [--out bench_out] [--docs docs/performance.md]

E[y | f] at the pixels of an image from 1024 keys with hard labels. The direct formula is that of the paper:
the (pixels, keys) matrix of Dirichlet densities in float32, in log space, in chunks of at most 8 GB.
"reference" is the definition in float64, "triton" the kernel that replaces it on a GPU; "triton, a tenth"
computes only the tenth of the pixels that lie in a band. The error is the largest
distance from the reference in float64. Times are medians of the whole call. The tests of the kernel run
first, and a failed one stops the benchmark. Writes kde_DEVICE.jsonl, and with --docs the table between its
markers.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from doc_tables import write_between_markers
from timing import seconds_of
from torch import Tensor

from semidice import use_kernels
from semidice.calibration.kde import MIN_PROB, Keys, kernel_mean

Mean = Callable[[Tensor, Tensor, Tensor, float], Tensor]
NUM_KEYS = 1024
SIZES = {"cuda": 512 * 512, "cpu": 32 * 32}
CLASSES = (2, 3, 4, 14, 64, 200)
BANDWIDTHS = (5e-5, 1e-3, 1e-2, 1e-1)
TIMED_BANDWIDTH = 1e-3
# bytes of one float32 matrix of the direct formula
DIRECT_BYTES = 8 * 2**30


def direct(points: Tensor, keys: Tensor, label: Tensor, bandwidth: float) -> Tensor:
    """The formula: log densities minus their maximum, exponentials, two sums."""
    alpha = keys[0].clamp(min=MIN_PROB) / bandwidth
    log_normaliser = torch.lgamma(alpha.sum(1) + alpha.shape[1]) - torch.lgamma(alpha + 1).sum(1)
    means = []
    for part in points[0].t().split(max(1, DIRECT_BYTES // (4 * len(alpha)))):
        log_density = part.clamp(min=MIN_PROB).log() @ alpha.t() + log_normaliser
        density = (log_density - log_density.amax(1, keepdim=True)).exp()
        means.append(density @ label[0] / density.sum(1, keepdim=True))
    return torch.cat(means).t().unsqueeze(0)


def reference(points: Tensor, keys: Tensor, label: Tensor, bandwidth: float) -> Tensor:
    """The definition, on every device."""
    use_kernels(False)
    try:
        return kernel_mean(points, Keys(keys, label), bandwidth=bandwidth)
    finally:
        use_kernels(True)


def with_kernels(region: Tensor | None = None) -> Mean:
    """By the kernel, only for the pixels of a region if there is one."""
    return lambda points, keys, label, bandwidth: kernel_mean(
        points, Keys(keys, label), bandwidth=bandwidth, region=region
    )


def contenders(device: str) -> dict[str, Mean]:
    """The functions to compare, by name."""
    functions: dict[str, Mean] = {"direct": direct, "reference": reference}
    if device == "cuda":
        # 50 consecutive pixels of every 500, similar to a band around a boundary
        band = torch.arange(SIZES[device], device=device).unsqueeze(0) % 500 < 50
        functions |= {"triton": with_kernels(), "triton, a tenth": with_kernels(band)}
    return functions


def problem(num_points: int, num_classes: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels (1, C, n), keys (1, K, C) and labels; one probability vector of seven is saturated."""
    torch.manual_seed(0)
    prob = torch.randn(num_points + NUM_KEYS, num_classes, device=device)
    prob = torch.softmax(8 * torch.rand(len(prob), 1, device=device) * prob, dim=1)
    prob[::7] = torch.eye(num_classes, device=device)[prob[::7].argmax(1)]
    label = torch.eye(num_classes, device=device)[torch.randint(num_classes, (NUM_KEYS,), device=device)]
    points, keys = prob[NUM_KEYS:].t().contiguous(), prob[:NUM_KEYS]
    return points.unsqueeze(0), keys.unsqueeze(0), label.unsqueeze(0)


def measure(
    name: str, mean: Mean, points: Tensor, keys: Tensor, label: Tensor, device: str
) -> dict[str, Any]:
    """Time and peak memory beyond the result at one bandwidth, and the error at every bandwidth."""
    extra = None
    if device == "cuda":
        mean(points, keys, label, TIMED_BANDWIDTH)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = mean(points, keys, label, TIMED_BANDWIDTH)
        size = result.numel() * result.element_size()
        extra = (torch.cuda.max_memory_allocated() - before - size) / 1e6
        del result
    errors = {}
    if "tenth" not in name:
        for bandwidth in BANDWIDTHS:
            exact = reference(points.double(), keys, label, bandwidth)
            errors[str(bandwidth)] = float((mean(points, keys, label, bandwidth) - exact).abs().max())
    return {
        "method": name,
        "num_points": points.shape[2],
        "num_keys": NUM_KEYS,
        "num_classes": points.shape[1],
        "bandwidth": TIMED_BANDWIDTH,
        "ms": 1e3 * seconds_of(lambda: mean(points, keys, label, TIMED_BANDWIDTH), device),
        "extra_mb": extra,
        "error": errors,
    }


def table_of(rows: list[dict[str, Any]], device: str) -> str:
    """Markdown: one row per number of classes and method."""
    first = rows[0]
    lines = [
        f"{first['device']}, torch {first['torch']}; `python benchmarks/bench_kde.py --device {device}`. "
        f"{first['num_points']} pixels, {NUM_KEYS} keys; error to float64 by bandwidth.",
        "",
        "| classes | method | ms | extra MB | " + " | ".join(f"h = {h:g}" for h in BANDWIDTHS) + " |",
        "|---:|---|---:|---:|" + "---:|" * len(BANDWIDTHS),
    ]
    for row in rows:
        extra = "" if row["extra_mb"] is None else f"{row['extra_mb']:.1f}"
        errors = " | ".join(f"{row['error'][str(h)]:.0e}" if row["error"] else "" for h in BANDWIDTHS)
        lines.append(f"| {row['num_classes']} | {row['method']} | {row['ms']:.3f} | {extra} | {errors} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the tests of the kernel")
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    arguments = parser.parse_args()
    device: str = arguments.device
    if not arguments.skip_tests:
        marks = ["-m", "gpu"] if device == "cuda" else []
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *marks, "tests/kernels/test_kde_kernel.py"], check=True
        )
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    for num_classes in arguments.classes:
        inputs = problem(SIZES[device], num_classes, device)
        for contender, mean in contenders(device).items():
            print(f"{num_classes} classes, {contender}", file=sys.stderr, flush=True)
            row = measure(contender, mean, *inputs, device)
            rows.append(row | {"device": name, "torch": torch.__version__})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"kde_{device}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = table_of(rows, device)
    print(table)
    if arguments.docs:
        write_between_markers(arguments.docs, f"kde {device}", table)


if __name__ == "__main__":
    main()
