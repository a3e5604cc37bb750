"""Time and memory of 0.25 cross entropy + 0.75 Dice against peers and against the limit of the memory.

    python benchmarks/bench_loss.py [--device cuda] [--out bench_out] [--docs docs/performance.md]

The limit is the time a device copy takes to move as many bytes as the work must: logits and target once for
the forward pass, both again and the gradient once for the backward pass; the copy is timed in the same run.
Times are medians. On a CPU, where machines are noisy, read the ratios. The tests of the kernels run first,
and a red one stops the benchmark. Writes loss_DEVICE.jsonl, and with --docs the
table between its markers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from pages import write_between_markers
from torch import Tensor

import semidice
from semidice.cross_entropy import cross_entropy_of
from semidice.region import region_loss_of
from semidice.sums import reference_sums

Loss = Callable[[Tensor, Tensor], Tensor]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "cuda": [
        (8, 2, 256, 256),
        (8, 2, 512, 512),
        (8, 3, 512, 512),
        (2, 14, 128, 128, 128),
        (8, 19, 512, 1024),
        (4, 150, 512, 512),
    ],
    "cpu": [(8, 2, 256, 256), (8, 3, 512, 512), (1, 14, 96, 96, 96), (1, 150, 128, 128)],
}
KINDS = {
    "fp32, soft": (torch.float32, torch.float32),
    "bf16, soft": (torch.bfloat16, torch.float32),
    "fp32, hard": (torch.float32, torch.uint8),
    "bf16, hard": (torch.bfloat16, torch.uint8),
}


def contenders(hard: bool, compiled: bool) -> dict[str, Loss]:
    """The losses by name; those whose library is missing are left out."""
    mixture = semidice.SegmentationLoss()

    def reference(logits: Tensor, target: Tensor) -> Tensor:
        semidice.use_kernels(False)
        try:
            total: Tensor = mixture(logits, target)
        finally:
            semidice.use_kernels(True)
        return total

    found: dict[str, Loss] = {"semidice": mixture, "definition": reference}
    if compiled:
        found["definition, compiled"] = torch.compile(plain_definition, dynamic=False)
    for name, build in {"MONAI": _monai, "smp": _smp, "nnU-Net": _nnunet}.items():
        try:
            loss = build(hard)
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
            continue
        if loss is not None:
            found[name] = loss
    return found


def plain_definition(logits: Tensor, target: Tensor) -> Tensor:
    """The mixture from its parts, so that the compiler sees plain operations and no kernel."""
    sums = reference_sums(logits, target, activation="softmax", valid=None, form="min", entropy=True)
    weight = torch.ones(logits.shape[1], device=logits.device)
    return 0.25 * cross_entropy_of(sums, weight, False) + 0.75 * region_loss_of(sums, weight, 0.5, 0.5)


def _monai(hard: bool) -> Loss:
    from monai.losses.dice import DiceLoss

    dice = DiceLoss(softmax=True, soft_label=not hard, to_onehot_y=hard, batch=True)
    if hard:
        return lambda x, y: 0.25 * F.cross_entropy(x, y.long()) + 0.75 * dice(x, y.unsqueeze(1))
    return lambda x, y: 0.25 * F.cross_entropy(x, y) + 0.75 * dice(x, y)


def _smp(hard: bool) -> Loss | None:
    from segmentation_models_pytorch.losses import DiceLoss

    dice = DiceLoss("multiclass")
    return (lambda x, y: 0.25 * F.cross_entropy(x, y.long()) + 0.75 * dice(x, y.long())) if hard else None


def _nnunet(hard: bool) -> Loss | None:
    from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

    dice = MemoryEfficientSoftDiceLoss(
        apply_nonlin=lambda x: x.softmax(1), batch_dice=True, do_bg=True, smooth=1e-5, ddp=False
    )
    if not hard:
        return None
    return lambda x, y: 0.25 * F.cross_entropy(x, y.long()) + 0.75 * (1 + dice(x, y.long().unsqueeze(1)))


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Median time of `work`, after a warm-up."""
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


def bandwidth_of(device: str) -> float:
    """Bytes a second that a copy moves, read and written."""
    size = 2**30 if device == "cuda" else 2**27
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def measure(
    name: str, loss: Loss, logits: Tensor, target: Tensor, bandwidth: float, device: str
) -> dict[str, Any]:
    """Times of the passes, the limit of both, and on a GPU the peak memory beyond the gradient."""
    size = logits.numel() * logits.element_size()
    target_size = target.numel() * target.element_size()
    limit = (2 * (size + target_size) + size) / bandwidth

    def both() -> None:
        logits.grad = None
        loss(logits, target).backward()

    both()
    extra = None
    if device == "cuda":
        logits.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        extra = torch.cuda.max_memory_allocated() - before - size
    total = loss(logits, target)

    def backward() -> None:
        logits.grad = None
        total.backward(retain_graph=True)

    return {
        "loss": name,
        "shape": list(logits.shape),
        "forward_ms": 1e3 * seconds_of(lambda: loss(logits, target), device),
        "backward_ms": 1e3 * seconds_of(backward, device),
        "both_ms": 1e3 * seconds_of(both, device),
        "limit_ms": 1e3 * limit,
        "extra_mb": None if extra is None else extra / 1e6,
    }


def table_of(rows: list[dict[str, Any]], device: str) -> str:
    """Markdown: one line a shape, kind and loss; on a CPU ratios only, since machines are noisy."""
    first = rows[0]
    command = f"`python benchmarks/bench_loss.py --device {device}`"
    where = f"{first['device']}, torch {first['torch']}"
    if device == "cpu":
        lines = [
            f"{where}; {command}. Times as multiples of MONAI's in the same run: below 1 is faster.",
            "",
            "| logits | kind | loss | forward | backward | both |",
            "|---|---|---|---:|---:|---:|",
        ]
    else:
        lines = [
            f"{where}, copy {first['bandwidth'] / 1e12:.2f} TB/s; {command}. Times in ms; ratio to the "
            "memory limit; speed against MONAI; memory beyond logits, target and gradient.",
            "",
            "| logits | kind | loss | forward | backward | both | / limit | MONAI / it | extra MB |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|",
        ]
    for row in rows:
        same = [r for r in rows if (r["shape"], r["kind"]) == (row["shape"], row["kind"])]
        monai = next((r for r in same if r["loss"] == "MONAI"), None)
        cells = ["x".join(map(str, row["shape"])), row["kind"], row["loss"]]
        times = [row[f"{passes}_ms"] for passes in ("forward", "backward", "both")]
        if device == "cpu":
            peers = [monai and monai[f"{passes}_ms"] for passes in ("forward", "backward", "both")]
            cells += [f"{ours / peer:.2f}" if peer else "" for ours, peer in zip(times, peers, strict=True)]
        else:
            cells += [f"{ours:.3f}" for ours in times]
            cells.append(f"{row['both_ms'] / row['limit_ms']:.2f}")
            cells.append(f"{monai['both_ms'] / row['both_ms']:.1f}" if monai else "")
            cells.append(f"{row['extra_mb']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    parser.add_argument("--compiled", action="store_true", help="also the definition under torch.compile")
    parser.add_argument("--skip-tests", action="store_true", help="the tests of the kernels have just run")
    arguments = parser.parse_args()
    device: str = arguments.device
    if not arguments.skip_tests:
        marks = ["-m", "gpu"] if device == "cuda" else []
        tests = ["tests/test_fused.py"] if device == "cuda" else ["tests/test_blocked.py"]
        subprocess.run([sys.executable, "-m", "pytest", "-q", *marks, *tests], check=True)
    # a compiled backward pass that reuses its buffers cannot be timed by itself
    torch._functorch.config.donated_buffer = False
    bandwidth = bandwidth_of(device)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = (arguments.out / f"loss_{device}.jsonl").open("w")
    for shape in SHAPES[device]:
        for kind, (dtype, target_dtype) in KINDS.items():
            if device == "cpu" and "bf16" in kind:
                continue
            torch.manual_seed(0)
            logits = torch.randn(shape, device=device).to(dtype).requires_grad_()
            hard = not target_dtype.is_floating_point
            space = (shape[0], *shape[2:])
            target = (
                torch.randint(0, shape[1], space, device=device).to(target_dtype)
                if hard
                else torch.randn(shape, device=device).softmax(1)
            )
            # compiling takes ten seconds a case: one kind is enough to compare
            for contender, loss in contenders(hard, kind == "fp32, soft" and arguments.compiled).items():
                print(f"{shape} {kind} {contender}", file=sys.stderr, flush=True)
                try:
                    row = measure(contender, loss, logits, target, bandwidth, device)
                except RuntimeError as error:
                    # a peer that runs out of memory, or a compiler that gives up, is left out and said
                    print(f"  failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                    continue
                row |= {"kind": kind, "device": name, "torch": torch.__version__, "bandwidth": bandwidth}
                rows.append(row)
                # at once, so that nothing measured is lost when the run is stopped
                print(json.dumps(row), file=results, flush=True)
                torch.compiler.reset()
    table = table_of(rows, device)
    print(table)
    if arguments.docs:
        write_between_markers(arguments.docs, f"loss {device}", table)


if __name__ == "__main__":
    main()
