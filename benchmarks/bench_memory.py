"""Peak memory of 0.25 cross entropy + 0.75 soft-label Dice, forward and backward, against peers.

    python benchmarks/bench_memory.py [--device cuda] [--out bench_out] [--docs docs/performance.md]

Memory means what a step needs in addition to logits, target and gradient, in units of the size of the logits.
On the CPU it is the growth of the resident set of a new process (its high-water mark), on a GPU the growth of
the allocator's peak. Writes memory.jsonl, and with --docs the table between its markers.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from doc_tables import write_between_markers
from torch import Tensor

import semidice

Loss = Callable[[Tensor, Tensor], Tensor]
SHAPES = {"cpu": [(1, 14, 96, 96, 96), (8, 3, 512, 512)], "cuda": [(2, 14, 128, 128, 128), (8, 2, 512, 512)]}
CONTENDERS = ("semidice", "MONAI", "smp")


def build(name: str, target_kind: str) -> Loss:
    """The loss of a contender on logits and a soft label (N, C, *space) or class indices (N, *space)."""
    if name == "semidice":
        return semidice.SegmentationLoss()
    if name == "MONAI":
        from monai.losses.dice import DiceLoss as MonaiDice

        dice = MonaiDice(softmax=True, soft_label=target_kind == "soft", batch=True)
        hard = MonaiDice(softmax=True, to_onehot_y=True, batch=True)
        if target_kind == "soft":
            return lambda logits, target: 0.25 * F.cross_entropy(logits, target) + 0.75 * dice(logits, target)
        return lambda logits, target: (
            0.25 * F.cross_entropy(logits, target) + 0.75 * hard(logits, target.unsqueeze(1))
        )
    import segmentation_models_pytorch as smp

    if target_kind == "soft":
        raise ValueError("smp's multiclass losses take class indices only")
    dice = smp.losses.DiceLoss("multiclass")
    return lambda logits, target: 0.25 * F.cross_entropy(logits, target) + 0.75 * dice(logits, target)


def make_case(shape: tuple[int, ...], target_kind: str, device: str) -> tuple[Tensor, Tensor]:
    """Random logits that require a gradient, and a target."""
    torch.manual_seed(0)
    logits = torch.randn(shape, device=device).requires_grad_()
    if target_kind == "soft":
        return logits, torch.randn(shape, device=device).softmax(1)
    return logits, torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)


def status_bytes(field: str) -> int:
    """A memory figure of this process from the kernel, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no field {field}")


def step(loss: Loss, logits: Tensor, target: Tensor) -> None:
    """One forward and backward pass into a new gradient."""
    logits.grad = None
    loss(logits, target).backward()


def measure(name: str, shape: tuple[int, ...], target_kind: str, device: str) -> dict[str, object]:
    """Extra peak memory of a step in units of the logits, measured in this process."""
    loss = build(name, target_kind)
    # the first call loads code and starts threads, which is not memory of the step
    small = (shape[0], shape[1], *[8] * (len(shape) - 2))
    step(loss, *make_case(small, target_kind, device))
    logits, target = make_case(shape, target_kind, device)
    size = logits.numel() * logits.element_size()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(loss, logits, target)
        peak = torch.cuda.max_memory_allocated()
    else:
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step(loss, logits, target)
        peak = status_bytes("VmHWM")
    return {
        "contender": name,
        "shape": shape,
        "target": target_kind,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "extra_over_logits": (peak - before - size) / size,
    }


def measure_in_process(name: str, shape: tuple[int, ...], target_kind: str, device: str) -> dict[str, object]:
    """`measure` in a new process, so that no loss reuses memory of another."""
    command = [sys.executable, __file__, "--one", name, target_kind, device, *map(str, shape)]
    # malloc takes blocks above 64 KiB directly from the system, so that free() shrinks the resident set
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {name} on {shape} failed:\n{done.stderr}")
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def as_markdown(rows: list[dict[str, object]], device: str) -> str:
    """The table of the results, one line per contender and case."""
    lines = [
        "Forward and backward of 0.25 cross entropy + 0.75 Dice, "
        f"{rows[0]['device']}, torch {rows[0]['torch']}.",
        f"Made by `python benchmarks/bench_memory.py --device {device}`.",
        "",
        "| logits | target | loss | extra memory / logits |",
        "|---|---|---|---:|",
    ]
    for row in rows:
        shape = "x".join(map(str, row["shape"]))  # type: ignore[call-overload]
        extra = f"{row['extra_over_logits']:.2f}"
        lines.append(f"| {shape} | {row['target']} | {row['contender']} | {extra} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, target_kind, device, *shape = arguments.one
        print(json.dumps(measure(name, tuple(map(int, shape)), target_kind, device)))
        return
    rows = []
    cases = [(shape, kind) for shape in SHAPES[arguments.device] for kind in ("soft", "hard")]
    for shape, kind in cases:
        for name in CONTENDERS:
            if (name, kind) == ("smp", "soft"):
                continue
            print(f"measuring {name} on {shape}, {kind} target", file=sys.stderr, flush=True)
            rows.append(measure_in_process(name, shape, kind, arguments.device))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = as_markdown(rows, arguments.device)
    print(table)
    if arguments.docs:
        write_between_markers(arguments.docs, f"memory {arguments.device}", table)


if __name__ == "__main__":
    main()
