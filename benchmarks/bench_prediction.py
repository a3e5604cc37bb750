"""What the mean of the folds and the mean over mirrored images gain, on patients that no fold was trained on.

    python benchmarks/bench_prediction.py DATASET [RECIPE] [--set schedule.epochs=30] [--out FOLDER]

One fifth of the patients are the test set. The folds of the recipe are trained on the others, and every fold
predicts the test set with and without flips. Four predictions are compared: of a single fold (its scores are
means over the folds) and of the mean of the folds, each with and without flips. Gains are paired by case, or
by patient where a patient has several cases, with 95 % intervals over the test set; the networks are fixed.
A second call with the same folder continues the training.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doc_tables import write_between_markers

from semidice.data.dataset import Dataset
from semidice.data.folds import fold_cases, split_dataset
from semidice.data.manifest import manifest_text
from semidice.paths import DatasetFolder, FoldFolder, RunFolder, write_text
from semidice.recipes import read_recipe
from semidice.runs.predictions import stored_cases, write_prediction
from semidice.runs.run import FoldRun, TrainedRun, mirrored_axes
from semidice.runs.scoring import ScoreOptions, score_cases
from semidice.runs.start import start_run
from semidice.statistics.cases import CaseTable, concatenate
from semidice.statistics.compare import Comparison, compare_scores
from semidice.statistics.pairing import paired
from semidice.training.context import Context
from semidice.training.folds import finish_run
from semidice.training.processes import Processes, chosen_device

METRICS = {"dice_score": "Dice ↑ %", "calibration_error": "ECE ↓ %"}
KINDS = ("single fold", "single fold, flips", "mean of folds", "mean of folds, flips")
# a name of each gain, and the two predictions: with and without
GAINS = {
    "flips, of a single fold": (1, 0),
    "mean of folds": (2, 0),
    "flips, of the mean of folds": (3, 2),
    "both": (3, 0),
}


def held_out_cases(dataset: Dataset, seed: int) -> list[int]:
    """Numbers of the cases of one fifth of the patients."""
    folds = split_dataset(dataset, num_folds=5, seed=seed)
    return fold_cases(folds, 0)[1]


def write_without(dataset: Dataset, left_out: Sequence[int], path: Path) -> None:
    """A dataset folder without the scans of some cases; its arrays are links to those of `dataset`."""
    names = {dataset.cases[number].scan.name for number in left_out}
    scans = tuple(scan for scan in dataset.manifest.scans if scan.name not in names)
    folder = DatasetFolder(path)
    for scan in scans:
        for kind in scan.arrays:
            link = folder.array(kind, scan.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.abspath(dataset.folder.array(kind, scan.name)))
    write_text(folder.manifest, manifest_text(dataset.manifest.model_copy(update={"scans": scans})))


def score_test_set(
    run: TrainedRun, dataset: Dataset, cases: Sequence[int], *, device: torch.device, out: Path
) -> CaseTable:
    """Scores of every fold, and of the mean of the folds, with and without flips."""
    tables = []
    for flips in (False, True):
        suffix = ", flips" if flips else ""
        sums: dict[int, torch.Tensor] = {}
        for fold in run.finished_folds:
            of_fold = FoldRun(run, dataset, fold, ())
            predictor = of_fold.predictor(run.network(fold, device=device), flips=flips)
            predicted = (prob.cpu() for prob in of_fold.predicted(cases, predictor, device))
            probs = dict(zip(cases, predicted, strict=True))
            sums = {number: sums[number] + prob if sums else prob for number, prob in probs.items()}
            tables.append(_scores(dataset, probs, f"fold {fold}{suffix}", out))
        means = {number: total / len(run.finished_folds) for number, total in sums.items()}
        tables.append(_scores(dataset, means, f"mean of folds{suffix}", out))
    return concatenate(tables)


def _scores(dataset: Dataset, probs: Mapping[int, torch.Tensor], method: str, out: Path) -> CaseTable:
    """The scores of stored predictions, as those of a run."""
    folder = FoldFolder(out / method.replace(", ", "_").replace(" ", "_"))
    for number, prob in probs.items():
        write_prediction(folder.prediction(dataset.cases[number].name), prob)
    read = stored_cases(folder, dataset)
    return score_cases(dataset, list(probs), read, ScoreOptions(tuple(METRICS)), method=method)


def compare_kinds(table: CaseTable, metric: str, folds: Sequence[int]) -> Comparison:
    """The four predictions of `KINDS` compared by case; the score of a single fold is the mean over folds."""
    suffixes = ("", ", flips")
    single = [f"fold {fold}{suffix}" for suffix in suffixes for fold in folds]
    means = [f"mean of folds{suffix}" for suffix in suffixes]
    scores = paired(table, metric, methods=[*single, *means], drop=True)
    of_single = scores.values[:, : len(single)].reshape(-1, 2, len(folds)).mean(2)
    values = np.concatenate([of_single, scores.values[:, len(single) :]], 1)
    return compare_scores(replace(scores, methods=KINDS, values=values))


def record_of(comparison: Comparison) -> dict[str, Any]:
    """Means of the four predictions, and the gains with interval and p, in percent."""
    gains = {
        name: {
            "gain": 100 * float(pair.difference),
            "low": 100 * float(pair.low_single),
            "high": 100 * float(pair.high_single),
            "p": float(pair.p_single),
        }
        for name, (better, worse) in GAINS.items()
        for pair in [comparison.pairs.loc[(KINDS[better], KINDS[worse])]]
    }
    return {
        "means": (100 * comparison.means["mean"]).to_dict(),
        "gains": gains,
        "unit": "patient" if comparison.by_patient else "case",
        "num_dropped": comparison.num_dropped,
    }


def table_of(row: Mapping[str, Any]) -> str:
    """Markdown: the four predictions, then the gains."""
    scores = row["scores"]
    heads = [METRICS[metric] for metric in scores]
    lines = [
        f"{row['num_folds']} folds, {row['epochs']} epochs, tested on {row['num_cases']} cases of "
        f"{row['num_patients']} other patients, 95 % intervals; `{row['command']}`.",
        "",
        f"| prediction | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
    ]
    for kind in KINDS:
        cells = [f"{score['means'][kind]:.2f}" for score in scores.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", f"| change by | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name in GAINS:
        cells = []
        for score in scores.values():
            gain = score["gains"][name]
            cells.append(f"{gain['gain']:+.2f} ({gain['low']:+.2f} to {gain['high']:+.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, help="folder written by semidice prepare")
    parser.add_argument("recipe", nargs="?", default="quick")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--test-seed", type=int, default=0, help="of the choice of test patients")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("bench_out/prediction"))
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    options = parser.parse_args(arguments)
    dataset, rest = Dataset(options.dataset), options.out / "training_data"
    cases = held_out_cases(dataset, options.test_seed)
    write_without(dataset, cases, rest)
    recipe = read_recipe(options.recipe, [*options.overrides, f"data.dataset={rest}"])
    # an error now, and not after the training
    mirrored_axes(recipe, len(dataset.cases[0].shape), flips=True)
    context = Context(Processes(chosen_device(options.accelerator)))
    out = options.out / "run"
    run = start_run(recipe, out, resume=RunFolder(out).recipe.exists())
    finish_run(run, context)
    run.gather()
    table = score_test_set(run, dataset, cases, device=context.processes.device, out=options.out / "test")
    row = {
        "command": " ".join(
            [
                "python benchmarks/bench_prediction.py",
                options.dataset.resolve().name,
                options.recipe,
                *(f"--set {override}" for override in options.overrides),
            ]
        ),
        "epochs": recipe.schedule.epochs,
        "num_folds": len(run.finished_folds),
        "num_cases": len(cases),
        "num_patients": len({dataset.cases[number].patient for number in cases}),
        "scores": {metric: record_of(compare_kinds(table, metric, run.finished_folds)) for metric in METRICS},
    }
    write_text(options.out / "prediction.json", json.dumps(row, indent=1) + "\n")
    write_text(options.out / "prediction.md", table_of(row))
    print(table_of(row))
    if options.docs:
        write_between_markers(options.docs, "prediction", table_of(row))


if __name__ == "__main__":
    main()
