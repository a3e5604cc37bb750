"""Seconds of `semidice compare --decide fitted` over finished runs, written without training.

    python benchmarks/bench_grid_rules.py --runs 24 --cases 116 --on local:16
    python benchmarks/bench_grid_rules.py --runs 4 --cases 24 --size 128 --on local:2      on two cores

The phantoms have ten raters and two classes; a prediction is the true probability, sharpened and shifted.
Every call fits and scores the rules anew.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.recipes.grid import Variant, read_variants
from semidice.runs.predictions import stored_cases, write_prediction
from semidice.runs.scoring import ScoreOptions, score_cases
from semidice.runs.start import start_run
from semidice.statistics.cases import write_cases

METRICS = ("dice_score", "iou_score")


def make_dataset(folder: Path, *, num_cases: int, size: int) -> Dataset:
    options = PhantomOptions(num_cases=num_cases, size=(size, size), num_raters=10)
    if not (folder / "phantom").is_dir():
        (raw,) = find_datasets("phantom", options)
        prepare_dataset(raw, folder / "phantom", workers=1)
    return Dataset(folder / "phantom")


def make_grid(folder: Path, *, num_runs: int) -> Path:
    """Recipes that differ in a number, so that each has a run of its own."""
    names = [f"  method{number}: {{loss.alpha: {0.3 + number / 100}}}" for number in range(num_runs)]
    sets = f"{{data.num_folds: 5, validation.metrics: [{', '.join(METRICS)}]}}"
    path = folder / "grid.yaml"
    path.write_text("\n".join(["recipe: quick", f"set: {sets}", "variants:", *names]) + "\n")
    return path


def write_run(variant: Variant, dataset: Dataset, seed: int) -> None:
    """A finished run, as `train` would have left it, without checkpoints."""
    run = start_run(variant.recipe, variant.folder, resume=True)
    if not run.missing_folds:
        return
    rng = np.random.default_rng(seed)
    for fold in range(5):
        folder = run.folder.fold(fold)
        folds = read_folds(run.folder.folds, dataset)
        cases = [number for number, of_case in enumerate(folds) if of_case == fold]
        for number in cases:
            truth = dataset.truth(number)
            assert truth is not None
            logits = np.log(truth.clip(1e-4, 1)) * 1.5 + rng.normal(0, 0.5, truth.shape)
            logits[1:] += 0.5
            prob = np.exp(logits - logits.max(0))
            write_prediction(folder.prediction(dataset.cases[number].name), prob / prob.sum(0))
        run.write_stamp(fold)
        read, options = stored_cases(folder, dataset), ScoreOptions(METRICS)
        table = score_cases(dataset, cases, read, options, method=variant.method, fold=fold)
        write_cases(table, folder.cases)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--cases", type=int, default=116)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--on", help="engine, such as local:16; this process without it")
    parser.add_argument("--out", type=Path, default=Path("bench_out/grid_rules"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    dataset = make_dataset(chosen.out, num_cases=chosen.cases, size=chosen.size)
    grid, runs = make_grid(chosen.out, num_runs=chosen.runs), chosen.out / "runs"
    for number, variant in enumerate(
        read_variants([str(grid)], dataset=dataset.folder.path, out=runs, accelerator="cpu")
    ):
        write_run(variant, dataset, number)
        # nothing that an earlier call has fitted
        (variant.folder / "fits.json").unlink(missing_ok=True)
    command = ["compare", dataset.folder.path, grid, "-o", runs, "--decide", "fitted", "--accelerator", "cpu"]
    command += ["--on", chosen.on] if chosen.on else []
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "semidice", *map(str, command)], check=True)
    print(f"{chosen.runs} runs of {chosen.cases} cases: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
