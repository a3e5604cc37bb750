"""Time and memory of 0.25 cross entropy + 0.75 Dice against peers and against the limit of the memory.

    python benchmarks/bench_loss.py [--device cuda] [--out bench_out] [--docs docs/performance.md]

The limit is the time a device copy needs to move as many bytes as the loss must: logits and target once for
the forward pass, both again and the gradient once for the backward pass. The copy is timed in the same run.
On a GPU both passes are timed in three ways:

    eager        called from Python
    one thread   the same under torch.autograd.set_multithreading_enabled(False): the backward pass runs in
                 the calling thread and not in a thread of autograd
    graphed      replayed from a CUDA graph

Eager times of small batches measure Python: the host needs much longer to start the work than the device
needs to do it. "autograd alone", a loss that computes nothing, shows the share of the host. The graph shows
the work itself, which is all that a captured training step pays. A loss that waits for the device cannot be
captured and has no such time. Times are medians. Eager times are noisy, so the losses take ten turns of six
calls, and the time is the median of the fastest turn. On a CPU only ratios are given. The tests of the
kernels run first, and a failing test stops the benchmark. Writes loss_DEVICE.jsonl, and with --docs the table
between its markers.
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
from doc_tables import write_between_markers
from gpu import need_gpu
from timing import seconds_in_turns, seconds_of, seconds_of_graph
from torch import Tensor

import semidice
from semidice.losses.options import LossOptions
from semidice.overlap import reference_sums, sums_options, terms_of, total_of

Loss = Callable[[Tensor, Tensor], Tensor]
Rows = list[dict[str, Any]]
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


class _Nothing(torch.autograd.Function):
    """The cost of any loss on the host: it allocates a loss and a gradient and computes neither."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        logits, _ = ctx.saved_tensors
        return torch.empty_like(logits), None


def contenders(hard: bool, compiled: bool, *, alone: bool = False) -> dict[str, Loss]:
    """The losses by name, without those whose library is missing; `alone` adds one that computes nothing."""
    mixture = semidice.SegmentationLoss()

    def reference(logits: Tensor, target: Tensor) -> Tensor:
        semidice.use_kernels(False)
        try:
            total: Tensor = mixture(logits, target)
        finally:
            semidice.use_kernels(True)
        return total

    losses: dict[str, Loss] = {"semidice": mixture, "definition": reference}
    if alone:
        losses["autograd alone"] = _Nothing.apply
    if compiled:
        losses["definition, compiled"] = torch.compile(plain_definition, dynamic=False)
    for name, build in {"MONAI": _monai, "smp": _smp, "nnU-Net": _nnunet}.items():
        try:
            loss = build(hard)
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
            continue
        if loss is not None:
            losses[name] = loss
    return losses


def plain_definition(logits: Tensor, target: Tensor) -> Tensor:
    """The mixture by plain operations, so that the compiler sees no kernel."""
    options = LossOptions()
    sums = reference_sums(logits, target, None, sums_options(options, "softmax"))
    weight = torch.ones(logits.shape[1], device=logits.device)
    return total_of(terms_of(sums, weight, options), options)


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


PASSES = ("forward", "backward", "both")


def passes_of(loss: Loss, logits: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """The forward pass, the backward pass alone, and both into a new gradient."""

    def both() -> None:
        logits.grad = None
        loss(logits, target).backward()

    both()
    total = loss(logits, target)

    def backward() -> None:
        logits.grad = None
        total.backward(retain_graph=True)

    return {"forward": lambda: loss(logits, target), "backward": backward, "both": both}


def ratios_on_cpu(losses: dict[str, Loss], logits: Tensor, target: Tensor) -> Rows:
    """Times divided by MONAI's: medians of rounds in which the losses take turns, as times are noisy."""
    passes = {name: passes_of(loss, logits, target) for name, loss in losses.items()}
    rounds: list[dict[tuple[str, str], float]] = []
    for _ in range(15):
        seconds = {}
        for which in PASSES:
            for name in losses:
                start = time.perf_counter()
                passes[name][which]()
                seconds[name, which] = time.perf_counter() - start
        rounds.append(seconds)
    return [
        {
            "loss": name,
            **{
                which: statistics.median(once[name, which] / once["MONAI", which] for once in rounds)
                for which in PASSES
            },
        }
        for name in losses
    ]


def times_on_gpu(losses: dict[str, Loss], logits: Tensor, target: Tensor, bandwidth: float) -> Rows:
    """Milliseconds of the passes, timed in all ways, their limit, and the peak extra memory."""
    limit = limit_in_seconds(logits, target, bandwidth)
    rows: Rows = []
    both: dict[str, Callable[[], object]] = {}
    for name, loss in losses.items():
        try:
            row = _times_of_the_device(loss, logits, target)
            both[name] = passes_of(loss, logits, target)["both"]
        except RuntimeError as error:
            # a peer may run out of memory, or fail to compile: report it and continue
            print(f"{name} failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        rows.append({"loss": name, **row, "limit": 1e3 * limit})
    eager = seconds_in_turns(both)
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = seconds_in_turns(both)
    for row in rows:
        row |= {"both": 1e3 * eager[row["loss"]], "one_thread": 1e3 * one_thread[row["loss"]]}
    torch.compiler.reset()
    return rows


def _times_of_the_device(loss: Loss, logits: Tensor, target: Tensor) -> dict[str, Any]:
    """Milliseconds of each pass, and of both as a graph, and the peak extra memory."""
    passes = passes_of(loss, logits, target)
    logits.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    passes["both"]()
    extra = torch.cuda.max_memory_allocated() - before - logits.numel() * logits.element_size()
    times = {which: 1e3 * seconds_of(passes[which], "cuda") for which in ("forward", "backward")}
    fresh = logits.detach().requires_grad_()

    def both() -> None:
        fresh.grad = None
        loss(fresh, target).backward()

    seconds = seconds_of_graph(both)
    graphed = None if seconds is None else 1e3 * seconds
    return {**times, "graphed": graphed, "extra_mb": extra / 1e6}


def limit_in_seconds(logits: Tensor, target: Tensor, bandwidth: float) -> float:
    """The time to read logits and target twice and to write the gradient."""
    size = logits.numel() * logits.element_size()
    return (2 * (size + target.numel() * target.element_size()) + size) / bandwidth


def copy_bandwidth() -> float:
    """Bytes per second that a copy on the GPU reads and writes."""
    source = torch.empty(2**28, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds_of(lambda: target.copy_(source), "cuda")


def table_of(rows: Rows, device: str) -> str:
    """Markdown: one line per shape, kind and loss; on a CPU only ratios."""
    first = rows[0]
    command = f"`python benchmarks/bench_loss.py --device {device}`"
    where = f"{first['device']}, torch {first['torch']}"
    if device == "cpu":
        lines = [
            f"{where}; {command}. Times as multiples of MONAI's in the same rounds: below 1 is faster.",
            "",
            "| logits | kind | loss | forward | backward | both |",
            "|---|---|---|---:|---:|---:|",
        ]
    else:
        lines = [
            f"{where}, copy {first['bandwidth'] / 1e12:.2f} TB/s; {command}. Forward and backward in ms, "
            "called from Python, the same in one thread (both in the quietest of ten turns), and replayed "
            "from a CUDA graph; the graph over the memory limit; speed against MONAI in these three ways; "
            "memory beyond logits, target, gradient.",
            "",
            "| logits | kind | loss | eager | one thread | graphed | graphed / limit | MONAI / it, eager "
            "| one thread | graphed | extra MB |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
    for row in rows:
        cells = ["x".join(map(str, row["shape"])), row["kind"], row["loss"]]
        if device == "cpu":
            cells += [f"{row[which]:.2f}" for which in PASSES]
        else:
            same = [r for r in rows if (r["shape"], r["kind"]) == (row["shape"], row["kind"])]
            monai: dict[str, Any] = next((r for r in same if r["loss"] == "MONAI"), {})
            ways = ("both", "one_thread", "graphed")
            cells += [_ratio(row[way], 1, digits=3) for way in ways]
            cells.append(_ratio(row["graphed"], row["limit"], digits=2))
            cells += [_ratio(monai.get(way), row[way], digits=1) for way in ways]
            cells.append(f"{row['extra_mb']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(time: float | None, unit: float | None, *, digits: int) -> str:
    """The ratio of two times; empty if one of them was not measured."""
    return "" if time is None or unit is None else f"{time / unit:.{digits}f}"


def rows_of_case(losses: dict[str, Loss], logits: Tensor, target: Tensor, bandwidth: float | None) -> Rows:
    """One row per loss; with the columns of a GPU if its bandwidth is given."""
    if bandwidth is None:
        return ratios_on_cpu(losses, logits, target)
    return times_on_gpu(losses, logits, target, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    parser.add_argument("--compiled", action="store_true", help="also the definition under torch.compile")
    parser.add_argument("--skip-tests", action="store_true", help="the tests of the kernels have just run")
    arguments = parser.parse_args()
    device: str = arguments.device
    if device == "cuda":
        need_gpu()
    if not arguments.skip_tests:
        marks = ["-m", "gpu and not slow"] if device == "cuda" else []
        on_gpu = ["tests/kernels/test_fused.py"]
        tests = on_gpu if device == "cuda" else ["tests/kernels/test_blocked.py"]
        subprocess.run([sys.executable, "-m", "pytest", "-q", *marks, *tests], check=True)
    # a compiled backward pass that reuses its buffers cannot run twice, and so cannot be timed alone
    torch._functorch.config.donated_buffer = False
    bandwidth = copy_bandwidth() if device == "cuda" else None
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    common = {"device": name, "torch": torch.__version__, "bandwidth": bandwidth}
    rows: Rows = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = (arguments.out / f"loss_{device}.jsonl").open("w")
    cases = [(shape, kind) for shape in SHAPES[device] for kind in KINDS]
    for shape, kind in cases:
        dtype, target_dtype = KINDS[kind]
        if device == "cpu" and dtype == torch.bfloat16:
            continue
        print(f"{shape} {kind}", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        logits = torch.randn(shape, device=device).to(dtype).requires_grad_()
        hard = not target_dtype.is_floating_point
        target = torch.randn(shape, device=device).softmax(1)
        if hard:
            target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device).to(target_dtype)
        # compiling takes ten seconds per case, so only one kind is compiled
        compiled = kind == "fp32, soft" and arguments.compiled
        losses = contenders(hard, compiled, alone=device == "cuda")
        for row in rows_of_case(losses, logits, target, bandwidth):
            rows.append({"shape": shape, "kind": kind, **row, **common})
            # written immediately, so that no result is lost when the run is stopped
            print(json.dumps(rows[-1]), file=results, flush=True)
    table = table_of(rows, device)
    print(table)
    if arguments.docs:
        write_between_markers(arguments.docs, f"loss {device}", table)


if __name__ == "__main__":
    main()
