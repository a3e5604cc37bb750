"""Time of a whole table: every method and fold, from the command to the comparison, and where the time goes.

    python benchmarks/bench_table.py lidc DATA [--on local:4] [--epochs 30] [--out bench_table]
    python benchmarks/bench_table.py qubiq [--task kidney] [--on local:4] [--epochs 150] [--out bench_table]

lidc: 7 methods x 5 folds (`semidice compare DATA labels`) with a UNet on tf_efficientnet_lite0. qubiq: the
paper's table of labels, 5 labels x 5 folds per task (`semidice reproduce qubiq_labels`) with its
UNet-ResNet50 at 256 x 256, on phantoms that have the number of cases and raters of the seven tasks of QUBIQ,
and one channel. Networks start from random weights, which takes the same time. Everything counts: imports,
recording of graphs, validation, prediction, scores, statistics. A call that was stopped is continued by the
same command; the times of all calls are added. If only some tasks or fewer epochs were run, the time of the
whole table is estimated, from the time of a step and of what each fold needs besides its steps. Writes
OUT/KIND.json.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from doc_tables import write_between_markers

from semidice.data.folds import fold_cases, split_folds
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.paths import FoldFolder
from semidice.training.context import PHASES, read_seconds

# cases of Training and Validation, and raters, of each task
QUBIQ = {
    "prostate_task1": (55, 6),
    "prostate_task2": (55, 6),
    "brain_growth": (39, 7),
    "brain_tumor_task1": (32, 3),
    "brain_tumor_task2": (32, 3),
    "brain_tumor_task3": (32, 3),
    "kidney": (24, 3),
}
SIZE, BATCH, NUM_FOLDS = 256, 8, 5
EPOCHS = {"lidc": 30, "qubiq": 150}
NUM_METHODS = {"lidc": 7, "qubiq": 5}
FAST = ["precision.dtype=bf16", "precision.channels_last=true"]
LIDC = ["model.architecture=unet", "model.encoder=tf_efficientnet_lite0", "model.weights=none"]
# phases whose time grows with the number of steps
PER_STEP = ("steps", "validation")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("lidc", "qubiq"))
    parser.add_argument("data", nargs="?", type=Path, help="lidc: the prepared dataset")
    parser.add_argument("--on", default="local:auto")
    parser.add_argument("--epochs", type=int)
    parser.add_argument(
        "--task", action="append", choices=list(QUBIQ), help="qubiq: repeatable; default: all"
    )
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every recipe")
    parser.add_argument("--size", type=int, default=SIZE, help="qubiq: side of the images")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--out", type=Path, default=Path("bench_table"))
    parser.add_argument("--docs", type=Path, help="page with a marker table_KIND to write the table to")
    chosen = parser.parse_args()
    if chosen.kind == "lidc" and chosen.data is None:
        parser.error("lidc needs the folder of the prepared dataset")
    epochs = chosen.epochs or EPOCHS[chosen.kind]
    chosen.out.mkdir(parents=True, exist_ok=True)
    # another engine or number of epochs is another measurement
    out = chosen.out / f"{chosen.kind}_{epochs}_{chosen.on.replace(':', '_')}"
    tasks = list(chosen.task or QUBIQ)
    if chosen.kind == "qubiq":
        data = chosen.out / f"phantoms_{chosen.size}"
        for task in tasks:
            make_task(data / task, *QUBIQ[task], size=chosen.size)
        command = ["reproduce", "qubiq_labels", "--data", str(data), "--epochs", str(epochs)]
        command += [part for task in tasks for part in ("--task", task)]
        sets = ["model.weights=none", f"augment.crop=[{chosen.size},{chosen.size}]"]
    else:
        command = ["compare", str(chosen.data), "labels"]
        sets = [*LIDC, f"schedule.epochs={epochs}", f"data.num_folds={NUM_FOLDS}"]
    has_gpu = chosen.accelerator != "cpu" and torch.cuda.is_available()
    sets += [*(FAST if has_gpu else []), *chosen.set]
    command += [part for option in sets for part in ("--set", option)]
    command += ["-o", str(out), "--on", chosen.on, "--accelerator", chosen.accelerator]
    wall_s = timed(command, out.with_name(f"{out.name}_calls.json"))
    folders = [FoldFolder(path.parent) for path in sorted(out.rglob("seconds.json"))]
    rows = [{"run": str(each.path), **entry} for each in folders for entry in read_seconds(each)]
    result = measured(chosen.kind, rows, wall_s, epochs, tasks, chosen.on)
    result |= {
        "command": command,
        "device": torch.cuda.get_device_name() if has_gpu else "a CPU",
    }
    path = chosen.out / f"{chosen.kind}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    table = as_table(result)
    print(table, f"written to {path}", sep="\n")
    if chosen.docs:
        write_between_markers(chosen.docs, f"table_{chosen.kind}", table)


def make_task(path: Path, num_cases: int, num_raters: int, *, size: int) -> None:
    """Phantoms with the numbers of a task, prepared; kept if they exist."""
    if path.is_dir():
        return
    print(f"writing {path}: {num_cases} phantoms of {size} x {size}, {num_raters} raters", flush=True)
    options = PhantomOptions(num_cases=num_cases, size=(size, size), num_raters=num_raters)
    (raw,) = find_datasets("phantom", options)
    path.parent.mkdir(parents=True, exist_ok=True)
    prepare_dataset(raw, path, workers=1)


def timed(command: Sequence[str], calls_path: Path) -> float:
    """Run a command of semidice; seconds of this call and of those before it that were stopped."""
    calls = json.loads(calls_path.read_text()) if calls_path.is_file() else []
    print("semidice", *command, flush=True)
    started = time.perf_counter()
    code: int | str = "interrupted"
    try:
        code = subprocess.run([sys.executable, "-m", "semidice", *command], check=False).returncode
    finally:
        calls.append({"wall_s": round(time.perf_counter() - started, 2), "code": code})
        calls_path.write_text(json.dumps(calls) + "\n")
    if code:
        raise SystemExit(f"semidice ended with code {code}; the same command continues")
    return float(sum(call["wall_s"] for call in calls))


def measured(
    kind: str, rows: Sequence[Mapping[str, Any]], wall_s: float, epochs: int, tasks: Sequence[str], on: str
) -> dict[str, Any]:
    """Time by phase, and the time of the whole table: measured, or estimated if it was not run whole."""
    seconds = {name: sum(float(row[name]) for row in rows) for name in PHASES}
    num_steps = sum(int(row["last_step"]) - int(row["first_step"]) for row in rows)
    busy_s = sum(seconds.values())
    step_s = sum(seconds[name] for name in PER_STEP) / max(num_steps, 1)
    # a worker imports once, however many folds it trains
    fixed_s = (busy_s - seconds["import"] - num_steps * step_s) / max(len(rows), 1)
    is_whole = epochs == EPOCHS[kind] and (kind == "lidc" or len(tasks) == len(QUBIQ))
    result = {
        "kind": kind,
        "on": on,
        "epochs": epochs,
        "tasks": list(tasks) if kind == "qubiq" else [],
        "num_folds_trained": len(rows),
        "num_steps": num_steps,
        "wall_s": round(wall_s, 1),
        "busy_s": round(busy_s, 1),
        "jobs_at_once": round(busy_s / wall_s, 2),
        "steps_per_s": round(num_steps / wall_s, 1),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "overhead_per_fold_s": round(seconds["start"] / max(len(rows), 1), 3),
        "is_whole": is_whole,
        "whole_table_s": round(wall_s, 1),
    }
    if not is_whole:
        num_jobs, whole_steps = whole_table(kind, num_steps / max(len(rows) * epochs, 1))
        whole_s = seconds["import"] + num_jobs * fixed_s + whole_steps * step_s
        # as many jobs at once as were measured
        result["whole_table_s"] = round(whole_s * wall_s / busy_s, 1)
    return result


def whole_table(kind: str, steps_per_epoch: float) -> tuple[int, float]:
    """Number of folds to train for the whole table, and of their steps. steps_per_epoch: as measured."""
    if kind == "lidc":
        num_jobs = NUM_METHODS[kind] * NUM_FOLDS
        return num_jobs, num_jobs * EPOCHS[kind] * steps_per_epoch
    steps = 0
    for num_cases, _ in QUBIQ.values():
        folds = split_folds([str(number) for number in range(num_cases)], num_folds=NUM_FOLDS)
        steps += sum(len(fold_cases(folds, fold)[0]) // BATCH for fold in range(NUM_FOLDS))
    return len(QUBIQ) * NUM_METHODS[kind] * NUM_FOLDS, NUM_METHODS[kind] * EPOCHS[kind] * steps


def as_table(result: Mapping[str, Any]) -> str:
    """Time by phase as Markdown, with the sentence about the whole table."""
    lines = [
        "| phase | seconds, all folds | per fold | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    num_folds = max(result["num_folds_trained"], 1)
    for name, seconds in result["seconds"].items():
        share = seconds / max(result["busy_s"], 1e-9)
        lines.append(f"| {name} | {seconds:.1f} | {seconds / num_folds:.2f} | {share:.0%} |")
    ran = f"{result['num_folds_trained']} folds of {result['epochs']} epochs"
    ran += f" ({', '.join(result['tasks'])})" if result["tasks"] else ""
    minutes = result["wall_s"] / 60
    lines += [
        "",
        f"{ran} on {result['device']} with `--on {result['on']}`: {minutes:.1f} minutes from the command to "
        f"the tables, {result['jobs_at_once']} folds at once on average, {result['steps_per_s']} steps per "
        "second.",
    ]
    whole = result["whole_table_s"] / 60
    if result["is_whole"]:
        lines.append("This is the whole table.")
    else:
        lines.append(f"The whole table was not run; estimated from these times: {whole:.1f} minutes.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
