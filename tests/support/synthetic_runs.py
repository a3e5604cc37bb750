"""Run folders made without training: the predictions are distorted truth, scored as in a real run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

from semidice.data.dataset import Dataset
from semidice.data.folds import split_folds, write_folds
from semidice.paths import RunFolder
from semidice.recipes import Recipe, write_recipe
from semidice.runs.predictions import stored_cases, write_prediction
from semidice.runs.run import open_run, write_dataset_facts
from semidice.runs.scoring import ScoreOptions, score_cases
from semidice.statistics import concatenate, write_cases

METRICS = ("dice_score", "binarized_dice_score", "calibration_error", "brier_error")
# sharpness of the probabilities, shift of the outline and noise, in logits; label and loss of the recipe
METHODS: Mapping[str, tuple[float, float, float, str, str]] = {
    "majority + SDL": (3.0, 1.6, 0.9, "majority", "relaxed"),
    "uniform + SDL": (2.0, 1.2, 0.8, "mean", "relaxed"),
    "uniform + DML1": (1.0, 0.0, 0.3, "mean", "min"),
    "Dice-weighted + DML1": (1.05, 0.05, 0.32, "dice_weighted", "min"),
}


def write_runs(
    dataset: Dataset,
    path: Path,
    *,
    methods: Mapping[str, tuple[float, float, float, str, str]] | Sequence[str] = METHODS,
    metrics: Sequence[str] = METRICS,
    num_folds: int = 2,
    fold_seed: int = 0,
    epochs: int = 40,
    seed: int = 0,
) -> dict[str, RunFolder]:
    """Write finished runs with the same folds to `path`/method0, method1, ...; the dataset needs truth."""
    chosen = {name: METHODS[name] for name in methods} if not isinstance(methods, Mapping) else methods
    folds = split_folds([case.patient for case in dataset.cases], num_folds=num_folds, seed=fold_seed)
    runs = {}
    for number, (name, (sharpness, shift, noise, maker, form)) in enumerate(chosen.items()):
        run = runs[name] = RunFolder(path / f"method{number}")
        run.path.mkdir(parents=True)
        write_folds(run.folds, dataset, folds)
        write_dataset_facts(run, dataset, folds)
        recipe = Recipe(
            name=name,
            data={"dataset": dataset.folder.path, "num_folds": num_folds, "fold_seed": fold_seed},
            label={"maker": maker},
            loss={"form": form},
            schedule={"epochs": epochs},
        )
        write_recipe(recipe, run.recipe)
        rng = np.random.default_rng([seed, number])
        tables = []
        for fold in range(num_folds):
            cases = [case for case, case_fold in enumerate(folds) if case_fold == fold]
            for case in cases:
                prob = distorted(dataset.truth(case), rng, sharpness=sharpness, shift=shift, noise=noise)
                write_prediction(run.fold(fold).prediction(dataset.cases[case].name), prob)
            open_run(run).write_stamp(fold)
            read = stored_cases(run.fold(fold), dataset)
            tables.append(score_cases(dataset, cases, read, ScoreOptions(metrics), method=name, fold=fold))
            write_cases(tables[-1], run.fold(fold).cases)
            write_log(
                run.fold(fold).log, rng, epochs=epochs, steps_per_epoch=10 + fold, floor=0.1 * (1 + number)
            )
        write_cases(concatenate(tables), run.cases)
    return runs


def distorted(truth, rng, *, sharpness, shift, noise):
    """Probabilities from the logits of the truth, scaled, shifted and with smooth noise."""
    logits = np.log(truth.clip(1e-4, 1)) * sharpness
    logits[1:] += shift + rng.normal(0, 0.3)
    width = [0, *[4.0 * truth.shape[-1] / 64] * (truth.ndim - 1)]
    smooth = gaussian_filter(rng.standard_normal(truth.shape), width)
    logits += smooth / max(smooth.std(), 1e-6) * noise
    prob = np.exp(logits - logits.max(0))
    return (prob / prob.sum(0)).astype(np.float32)


def write_log(path, rng, *, epochs, steps_per_epoch, floor):
    """Write a log like training: one line every ten steps, one validation every ten epochs."""
    lines = []
    for step in range(10, epochs * steps_per_epoch + 1, 10):
        share = step / (epochs * steps_per_epoch)
        region = float(floor + 0.6 * np.exp(-6 * share) + rng.normal(0, 0.02))
        entropy = float(0.5 * floor + 0.3 * np.exp(-5 * share) + rng.normal(0, 0.01))
        loss = 0.25 * entropy + 0.75 * region
        lines.append(
            {
                "step": step,
                "lr": 0.01 * (1 - share) ** 0.9,
                "loss": loss,
                "cross_entropy": entropy,
                "region": region,
            }
        )
    for epoch in range(10, epochs + 1, 10):
        score = float(0.9 - floor - 0.4 * np.exp(-4 * epoch / epochs) + rng.normal(0, 0.01))
        lines.append({"step": epoch * steps_per_epoch, "epoch": epoch, "val_dice_score": score})
    lines.sort(key=lambda line: line["step"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
