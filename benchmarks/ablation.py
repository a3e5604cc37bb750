"""What each choice of `auto` is worth: Dice with one choice changed, over the same folds.

    python benchmarks/ablation.py PREPARED... --weights tf_efficientnet_lite0.safetensors -o ablation_out
    python benchmarks/ablation.py --docs docs/training.md -o ablation_out        # the tables alone

On a CPU: --epochs 5 --folds 0 --processes 1. Each fold of each variant is one training by semidice's own
code, so a second call continues. Several processes share a GPU. `--beside FILE` adds a row for the result of
plain_loop.py or baseline_nnunet.py, on the cases they have in common.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from doc_tables import write_between_markers

from semidice.data.dataset import Dataset
from semidice.paths import RunFolder, write_text
from semidice.statistics import case_table, compare_cases, read_cases

SCORE = "dice_score"
PAPER = ["augment.crop=null", "validation.every=1000"]
TEN = "optimiser.decoder_lr_factor=10"
HALF = "augment.shift=0.5"
SGD = ["optimiser.name=sgd", "optimiser.lr=0.01", "optimiser.weight_decay=5e-4"]
WINDOW = ["augment.crop=[64, 64]", "augment.shift=1"]
INTENSITY = ["augment.gamma=0.2", "augment.contrast=0.1", "augment.brightness=0.1", "augment.noise=0.05"]
# name: the recipe it starts from, and what differs
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "auto": ("auto", []),
    "auto, majority label": ("auto", ["label.maker=majority"]),
    "auto, the other network": ("auto", ["OTHER_NETWORK"]),
    "auto, SGD 0.01": ("auto", SGD),
    "auto, SGD 0.01, decoder 10x": ("auto", [*SGD, TEN]),
    "auto, centred": ("auto", ["augment.shift=0"]),
    "auto, half shift": ("auto", [HALF]),
    "auto, full shift": ("auto", ["augment.shift=1"]),
    "auto, scale 0.5 to 2": ("auto", ["augment.scale=[0.5, 2.0]"]),
    "auto, no rotation": ("auto", ["augment.rotate_degrees=0"]),
    "auto, flips of both axes": ("auto", ["augment.flip=true"]),
    "auto, no flips": ("auto", ["augment.flip=false"]),
    "auto, intensities": ("auto", INTENSITY),
    "auto, Dice over the batch": ("auto", ["loss.over=batch", "loss.smooth=0"]),
    "auto, windows of 64": ("auto", [*WINDOW, "augment.foreground=0"]),
    "auto, windows of 64, half on foreground": ("auto", [*WINDOW, "augment.foreground=0.5"]),
    "auto, predicted with flips": ("auto", ["validation.flips=true"]),
    "paper": ("qubiq_labels", PAPER),
    "paper, decoder 10x": ("qubiq_labels", [*PAPER, TEN]),
    "paper, half shift": ("qubiq_labels", [*PAPER, HALF]),
    "paper, decoder 10x, half shift": ("qubiq_labels", [*PAPER, TEN, HALF]),
    "quick": ("quick", []),
}


def overrides(variant: str, dataset: Path, fold: int, chosen: argparse.Namespace) -> list[str]:
    """All options of one training, as for --set."""
    recipe, changes = VARIANTS[variant]
    size = min(Dataset(dataset).cases[0].shape)
    # pretraining helps from about 96 pixels on: what `auto` does where it can reach the weights
    pretrained = chosen.weights is not None and size >= 96
    if "OTHER_NETWORK" in changes:
        pretrained, changes = not pretrained, changes[1:]
    network = []
    if recipe == "qubiq_labels" or (recipe == "auto" and pretrained):
        weights = str(chosen.weights.resolve()) if chosen.weights is not None else "none"
        network = ["model.encoder=tf_efficientnet_lite0", f"model.weights={weights}"]
    # the baselines are scored slice by slice
    common = [f"data.dataset={dataset.resolve()}", f"data.folds=[{fold}]", "data.num_folds=5"]
    common.append("validation.unit=slice")
    fast = ["precision.dtype=bf16", "precision.channels_last=true"] if chosen.device == "cuda" else []
    epochs = chosen.epochs.get(dataset.name, chosen.epochs[""])
    return [*common, f"schedule.epochs={epochs}", f"name={variant}", *network, *fast, *changes]


def trainings(chosen: argparse.Namespace) -> Iterator[tuple[str, Path, int]]:
    for dataset in chosen.datasets:
        for variant in chosen.variants or VARIANTS:
            if "windows of 64" in variant and min(Dataset(dataset).cases[0].shape) <= 64:
                continue
            # auto is what all others are compared with
            folds = range(5) if variant in ("auto", "quick") and not chosen.same_folds else chosen.folds
            for fold in folds:
                yield variant, dataset, fold


def train(chosen: argparse.Namespace, jobs: Any) -> None:
    """Train the folds in the queue, one after the other; an error does not stop the others."""
    import torch

    from semidice.recipes import read_recipe
    from semidice.runs.start import start_run
    from semidice.training.context import Context
    from semidice.training.folds import finish_run
    from semidice.training.processes import Processes, chosen_device

    if chosen.processes > 1:
        torch.set_num_threads(1)
    context = Context(Processes(chosen_device(chosen.device)))
    while (job := jobs.get()) is not None:
        variant, dataset, fold = job
        out = run_folder(chosen.out, dataset.name, variant, fold)
        if (out / "seconds.json").is_file():
            continue
        start = time.perf_counter()
        try:
            options = overrides(variant, dataset, fold, chosen)
            recipe = read_recipe(VARIANTS[variant][0], options, accelerator=chosen.device)
            run = start_run(recipe, out, resume=True)
            finish_run(run, context)
            run.gather()
        except Exception as error:
            print(f"{out}: {error}", flush=True)
            continue
        seconds = time.perf_counter() - start
        write_text(out / "seconds.json", json.dumps(seconds))
        print(f"{dataset.name}, {variant}, fold {fold}: {seconds:.0f} s", flush=True)


def run_folder(out: Path, dataset: str, variant: str, fold: int) -> Path:
    return out / dataset / variant.replace(" ", "_").replace(",", "") / str(fold)


def collect(out: Path) -> dict[str, dict[str, Any]]:
    """Per dataset and variant: Dice by case, patient and fold of a case, seconds per fold."""
    results: dict[str, dict[str, Any]] = {}
    for dataset in sorted(path.name for path in out.iterdir() if path.is_dir()):
        for variant in VARIANTS:
            folders = [run_folder(out, dataset, variant, fold) for fold in range(5)]
            done = [folder for folder in folders if (folder / "seconds.json").is_file()]
            if not done:
                continue
            rows = []
            for folder in done:
                table = read_cases(RunFolder(folder).cases)
                chosen = table[(table["class"] == "mean") & (table["metric"] == SCORE)]
                rows += chosen[["case", "patient", "fold", "value"]].to_numpy(object).tolist()
            seconds = [json.loads((folder / "seconds.json").read_text()) for folder in done]
            results.setdefault(dataset, {})[variant] = {"cases": rows, "seconds": seconds}
    return results


def table(dataset: str, results: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one row per variant with its Dice and its difference to auto on the same cases."""
    auto = {case: (patient, fold, value) for case, patient, fold, value in results["auto"]["cases"]}
    rows: dict[str, tuple[dict[str, float], float]] = {}
    for variant, result in results.items():
        values = {case: value for case, _, _, value in result["cases"]}
        rows[variant] = values, sum(result["seconds"]) / len(result["seconds"])
    for other in beside:
        if other["dataset"] == dataset:
            schedule = f"{other['settings']['epochs']} epochs"
            if "iterations_per_epoch" in other["settings"]:
                schedule += f" of {other['settings']['iterations_per_epoch']} steps"
            name = f"{other['method']}, {schedule}"
            rows[name] = other["dice_of_case"], other["seconds"] / len(other["folds"])
    lines = [
        f"{dataset}: {len(auto)} cases",
        "",
        "| variant | cases | Dice | against auto on these cases | seconds per fold |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, (values, seconds) in rows.items():
        shared = [case for case in values if case in auto]
        mean = 100 * sum(values[case] for case in shared) / len(shared)
        difference = ""
        if name != "auto":
            pairs = [("auto", {case: auto[case][2] for case in shared}), (name, values)]
            table_rows = [
                {"case": case, "patient": str(auto[case][0]), "method": method, "value": of_case[case]}
                for method, of_case in pairs
                for case in shared
            ]
            table = case_table([row | {"metric": SCORE} for row in table_rows])
            pair = compare_cases(table, SCORE, methods=[name, "auto"]).pairs.loc[(name, "auto")]
            low, high = 100 * pair.low, 100 * pair.high
            difference = f"{100 * pair.difference:+.1f} ({low:+.1f} to {high:+.1f})"
        lines.append(f"| {name} | {len(shared)} | {mean:.1f} | {difference} | {seconds:.0f} |")
    return "\n".join(lines) + "\n\n"


def main() -> None:
    """Train what is missing, then print and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("datasets", type=Path, nargs="*", help="folders made by `semidice prepare`")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--weights", type=Path, help="of tf_efficientnet_lite0, .safetensors")
    parser.add_argument("--folds", type=int, nargs="+", default=[0, 1, 2], help="of all but auto and quick")
    parser.add_argument("--same-folds", action="store_true", help="auto and quick train these folds too")
    parser.add_argument("--epochs", nargs="+", default=["30"], help="30, or DATASET=4 for one of them")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--processes", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="JSON files of the baselines")
    parser.add_argument("--docs", type=Path, help="page whose table is replaced")
    chosen = parser.parse_args()
    chosen.epochs = {
        name: int(number) for name, _, number in (text.rpartition("=") for text in chosen.epochs)
    }
    chosen.epochs.setdefault("", 30)
    spawn = multiprocessing.get_context("spawn")
    jobs = spawn.Queue()
    for job in [*trainings(chosen), *[None] * chosen.processes]:
        jobs.put(job)
    if chosen.datasets:
        workers = [spawn.Process(target=train, args=(chosen, jobs)) for _ in range(chosen.processes)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(path.is_dir() for path in chosen.out.iterdir()):
        write_text(chosen.out / "ablation.json", json.dumps(collect(chosen.out)))
    results = json.loads((chosen.out / "ablation.json").read_text())
    beside = [json.loads(path.read_text()) for path in chosen.beside]
    text = "".join(table(dataset, results[dataset], beside) for dataset in results)
    print(text)
    if chosen.docs is not None:
        write_between_markers(chosen.docs, "ablation", text)


if __name__ == "__main__":
    main()
