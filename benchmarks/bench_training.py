"""A whole training step on a GPU: ours, batches and augmentation included, against a plain fp32 loop.

    python benchmarks/bench_training.py [--steps 200] [--out bench_out] [--docs docs/performance.md]

UNet on ResNet50, batches of 8 at 256 x 256, four raters, 0.25 cross entropy + 0.75 DML1, SGD. The plain loop
is float32 and eager with the loss in plain operations, and is given batches that are ready on the device.
Ours is `training.step`, the very object that `semidice train` runs, from case numbers on. Blocks of steps of
all contenders take turns, and medians of the blocks are given. Then the share of data and loss in a step,
each as a graph of its own, and trainings that are saved and validated far more often than by default.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from doc_tables import write_between_markers
from timing import seconds_of

import semidice
from semidice.data.batches.feed import Batches, BatchOptions
from semidice.data.batches.storage import Storage
from semidice.data.dataset import Dataset
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.networks.build import Task, build_model
from semidice.recipes import Recipe
from semidice.runs.run import FoldRun
from semidice.runs.start import start_run
from semidice.training.context import Context, Event
from semidice.training.engine import train_fold
from semidice.training.processes import Processes, chosen_device
from semidice.training.step import TrainingStep, build_optimiser

SIZE, BATCH, NUM_CASES = 256, 8, 64
PRECISIONS: dict[str, dict[str, Any]] = {
    "semidice, fp32, eager": {"dtype": "fp32", "graph": False},
    "semidice, bf16, graph": {"dtype": "bf16", "channels_last": True},
    "semidice, bf16, compiled, graph": {"dtype": "bf16", "channels_last": True, "compile": True},
}


def make_dataset(folder: Path, num_cases: int, size: int) -> Dataset:
    """Phantom slices, prepared as by `semidice prepare`."""
    options = PhantomOptions(num_cases=num_cases, size=(size, size))
    (raw,) = find_datasets("phantom", options)
    prepare_dataset(raw, folder / "data", workers=1)
    return Dataset(folder / "data")


def recipe_of(dataset: Dataset, architecture: str, encoder: str, **changes: Any) -> Recipe:
    """The paper's protocol on these data, without pretrained weights."""
    return Recipe.model_validate(
        {
            "name": "bench",
            "data": {"dataset": dataset.folder.path},
            "model": {"architecture": architecture, "encoder": encoder, "weights": "none"},
            "batch_size": BATCH,
            "validation": {"every": 1000, "metrics": ["dice_score"]},
            "workers": 0,
        }
        | changes
    )


class Ours:
    """Steps of `training.step` with feeds that were drawn in advance."""

    def __init__(self, recipe: Recipe, dataset: Dataset, processes: Processes) -> None:
        torch.manual_seed(0)
        model = build_model(recipe.model, Task(1, dataset.num_classes)).to(processes.device)
        if recipe.precision.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.batches = Batches(
            Storage(dataset, processes.device),
            range(len(dataset)),
            dataset.mean_std(range(len(dataset))),
            BatchOptions(recipe.batch_size, recipe.label, recipe.augment),
        )
        optimiser = build_optimiser(recipe, model, processes.device)
        self.step = TrainingStep(recipe, processes, model, optimiser, self.batches)
        # more than any measurement has
        self.step.num_steps = 10**6
        self.number = 0

    def __call__(self, num_steps: int) -> None:
        feeds = self.batches.feeds(self.number, self.number + num_steps)
        for feed in feeds:
            self.step(feed, self.number)
            self.number += 1


class Plain:
    """A float32 eager loop with the loss in plain operations, on batches that are already on the device."""

    def __init__(self, recipe: Recipe, dataset: Dataset, processes: Processes, batches: Batches) -> None:
        torch.manual_seed(0)
        self.model = build_model(recipe.model, Task(1, dataset.num_classes)).to(processes.device)
        options = recipe.optimiser
        self.optimiser = torch.optim.SGD(
            self.model.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
        self.loss = semidice.SegmentationLoss()
        self.batch = batches.make(batches.feed(0).to(processes.device))

    def __call__(self, num_steps: int) -> None:
        semidice.use_kernels(False)
        try:
            for _ in range(num_steps):
                self.optimiser.zero_grad()
                self.loss(self.model(self.batch.image), self.batch.target, self.batch.valid).backward()
                self.optimiser.step()
        finally:
            semidice.use_kernels(True)


def in_turns(
    contenders: dict[str, Callable[[int], None]], device: torch.device, steps: int
) -> dict[str, float]:
    """Seconds per step: the median over five blocks; all contenders take turns after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, run in contenders.items():
        print(f"warming up {name}", file=sys.stderr, flush=True)
        run(6)
    for _ in range(5):
        for name, run in contenders.items():
            _wait(device)
            start = time.perf_counter()
            run(max(1, steps // 5))
            _wait(device)
            times[name].append((time.perf_counter() - start) / max(1, steps // 5))
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def share_of_data_and_loss(ours: Ours, device: torch.device) -> dict[str, float]:
    """Seconds to make a batch, and for both passes of the loss, each replayed from a separate CUDA graph."""
    batches = ours.batches
    feed = batches.feed(0).to(device)
    batch = batches.make(feed)
    logits = torch.randn(batch.target.shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def data() -> None:
        batches.make(feed)

    def loss() -> None:
        logits.grad = None
        ours.step.loss(logits, batch.target, batch.valid).backward()

    times = {}
    for name, work in {"batch": data, "loss": loss}.items():
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        times[name] = seconds_of(graph.replay, "cuda")
    return times


def with_and_without_stops(
    recipe: Recipe, dataset: Dataset, processes: Processes, folder: Path
) -> dict[str, float]:
    """Seconds per step of training without saving, saving every two seconds, and saving with validation."""
    times = {}
    epochs = 120 if processes.device.type == "cuda" else 4
    stops = {
        "never": (10**6, 1e9),
        "saved every 2 s": (10**6, 2.0),
        "and validated every 20 epochs": (20, 2.0),
    }
    for name, (every, seconds) in stops.items():
        changed = recipe.model_copy(
            update={
                "schedule": replace(recipe.schedule, epochs=epochs),
                "validation": replace(recipe.validation, every=every),
            }
        )
        run = start_run(changed, folder / name.replace(" ", "_"), resume=False)
        fold = FoldRun(run, dataset, 0, [1] * (len(dataset) - 8) + [0] * 8)
        marks: dict[int, float] = {}

        def mark(event: Event, marks: dict[int, float] = marks) -> None:
            if event.kind == "step":
                marks.setdefault(event.content.epoch, time.perf_counter())

        train_fold(fold, Context(processes, mark, seconds_between_checkpoints=seconds))
        # only from the second quarter on, because everything is compiled by then
        first, last = epochs // 4, epochs
        steps = (last - first) * (len(fold.training_cases) // recipe.batch_size)
        times[name] = (marks[last] - marks[first]) / steps
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--cases", type=int, default=NUM_CASES)
    parser.add_argument("--architecture", default="unet")
    parser.add_argument("--encoder", default="resnet50")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    parser.add_argument("--only", choices=["steps", "stops"], help="measure a part, beside what --out holds")
    arguments = parser.parse_args()
    processes = Processes(chosen_device(arguments.device))
    results = arguments.out / f"training_{arguments.device}.jsonl"
    row: dict[str, Any] = json.loads(results.read_text()) if arguments.only and results.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        row |= measure(arguments, processes, Path(scratch))
    arguments.out.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(row) + "\n")
    table = table_of(row)
    print(table)
    if arguments.docs:
        write_between_markers(arguments.docs, f"training {arguments.device}", table)


def measure(arguments: argparse.Namespace, processes: Processes, scratch: Path) -> dict[str, Any]:
    """All requested measurements in one record."""
    on_gpu = processes.device.type == "cuda"
    dataset = make_dataset(scratch, arguments.cases, arguments.size)
    plain = recipe_of(dataset, arguments.architecture, arguments.encoder)
    row: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "network": f"{arguments.architecture}-{arguments.encoder}",
        "batch": [BATCH, 1, arguments.size, arguments.size],
    }
    if arguments.only != "stops":
        row |= measure_steps(arguments, plain, dataset, processes)
    if arguments.only != "steps":
        options = PRECISIONS["semidice, bf16, graph"] if on_gpu else {}
        recorded = plain.model_copy(update={"precision": _precision(plain, options)})
        stops = with_and_without_stops(recorded, dataset, processes, scratch)
        row["stops_ms"] = {k: 1e3 * v for k, v in stops.items()}
    return row


def measure_steps(
    arguments: argparse.Namespace, plain: Recipe, dataset: Dataset, processes: Processes
) -> dict[str, Any]:
    """Milliseconds per step of each contender, and on a GPU also of the parts of a step."""
    on_gpu = processes.device.type == "cuda"
    ours = {
        name: Ours(plain.model_copy(update={"precision": _precision(plain, options)}), dataset, processes)
        for name, options in PRECISIONS.items()
        if on_gpu or not options.get("compile")
    }
    contenders: dict[str, Callable[[int], None]] = {
        "plain, fp32, eager": Plain(plain, dataset, processes, next(iter(ours.values())).batches)
    }
    contenders |= ours
    times = in_turns(contenders, processes.device, arguments.steps)
    row: dict[str, Any] = {"ms": {k: 1e3 * v for k, v in times.items()}}
    if on_gpu:
        parts = share_of_data_and_loss(ours["semidice, bf16, graph"], processes.device)
        row["parts_ms"] = {k: 1e3 * v for k, v in parts.items()}
    return row


def _precision(recipe: Recipe, options: dict[str, Any]) -> Any:
    return type(recipe.precision)(**options)


def table_of(row: dict[str, Any]) -> str:
    """Markdown: one line per contender, then the parts of a step and the interruptions."""
    shape = "x".join(map(str, row["batch"]))
    lines = [
        f"{row['device']}, torch {row['torch']}, {row['network']}, batches of {shape}; "
        "`python benchmarks/bench_training.py`.",
    ]
    if "ms" in row:
        plain = row["ms"]["plain, fp32, eager"]
        lines += ["", "| step | ms | plain / it |", "|---|---:|---:|"]
        lines += [f"| {name} | {ms:.2f} | {plain / ms:.2f} |" for name, ms in row["ms"].items()]
    if "parts_ms" in row:
        parts = ", ".join(f"{k} {v:.3f} ms" for k, v in row["parts_ms"].items())
        share = 100 * sum(row["parts_ms"].values()) / min(row["ms"].values())
        lines += ["", f"Of the fastest step: {parts}; together {share:.1f} %."]
    if "stops_ms" in row:
        stops = ", ".join(f"{k} {v:.2f} ms" for k, v in row["stops_ms"].items())
        lines += ["", f"A step of `train_fold` (bf16, graph), by how often it is stopped: {stops}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
