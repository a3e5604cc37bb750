"""The demonstration: the paper's point on phantoms, whose raters disagree by a probability that is known.

Four recipes that differ in label and loss alone train a small UNet over the same folds; what they predict
for cases they never saw is compared case by case. Run again, it goes on where it was stopped.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from .compare import CompareError, comparisons_of, run_variants
from .console import say
from .data.dataset import Dataset
from .data.folds import read_folds
from .data.phantom import PhantomOptions
from .data.prepare import prepare_dataset
from .data.sources import find_datasets
from .labels.raters import read_raters
from .metrics.bins import CalibrationBins, calibration_bins
from .metrics.cases import write_cases
from .metrics.registry import display_scale
from .metrics.statistics import Comparison
from .metrics.tables import means_table, p_text
from .paths import DatasetFolder, DemoFolder
from .recipes import Recipe
from .recipes.grid import Variant, folder_name
from .report.case_figures import CaseOverlay, draw_overlays, draw_reliability
from .report.figures import save_figure
from .report.page import build_page
from .runs.predictions import read_prediction
from .runs.run import TrainedRun
from .training.command import start_fabric

# label maker and form of the Dice loss
METHODS: Mapping[str, tuple[str, str]] = {
    "majority + SDL": ("majority", "relaxed"),
    "uniform + SDL": ("mean", "relaxed"),
    "uniform + DML1": ("mean", "min"),
    "Dice-weighted + DML1": ("dice_weighted", "min"),
}
BASELINE, OURS = "majority + SDL", "uniform + DML1"
METRICS = (
    "dice_score",
    "binarized_dice_score",
    "calibration_error",
    "rater_calibration_error",
    "truth_error",
)
# Three raters, as in the smaller tasks of QUBIQ, who differ more from case to case than by habit: what most
# of them say cannot be foreseen, and a network that is sure of it is wrong (docs/metrics.md, "against whom").
PHANTOM = PhantomOptions(num_raters=3, bias=0.6, offset=1.6, wobble=1.2, miss=0.02)


def demo_recipe(name: str, dataset: Path, *, epochs: int, num_folds: int) -> Recipe:
    """The recipe of one method; all else is the same for the four."""
    maker, form = METHODS[name]
    return Recipe.model_validate(
        {
            "name": name,
            "data": {"dataset": dataset, "num_folds": num_folds},
            "label": {"maker": maker},
            "augment": {"scale": (0.8, 1.25)},
            "model": {
                "architecture": "small_unet",
                "encoder": "none",
                "weights": "none",
                "options": {"channels": [8, 16, 32, 64, 128]},
            },
            "loss": {"form": form},
            "optimiser": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4},
            "schedule": {"epochs": epochs},
            "precision": {"channels_last": True},
            "validation": {"every": max(1, epochs // 4), "metrics": METRICS[:-1]},
            "workers": 0,
        }
    )


def run_demo(out: Path, console: Console, *, num_cases: int, epochs: int, num_folds: int) -> None:
    """Prepare, train, compare, draw; every step is skipped where its result is there already."""
    # on images this small a second thread gains little, and where cores are shared it waits for the first
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    folder = DemoFolder(out)
    data = folder.dataset
    prepare_phantom(data, num_cases)
    dataset = Dataset(data)
    say(
        console,
        f"{len(dataset)} phantom slices, {len(dataset.manifest.raters)} raters each; "
        f"{len(METHODS)} recipes x {num_folds} folds x {epochs} epochs of a small UNet",
    )
    variants = [
        Variant(demo_recipe(name, data, epochs=epochs, num_folds=num_folds), folder.runs / folder_name(name))
        for name in METHODS
    ]
    outcome = run_variants(variants, start_fabric(), console)
    if outcome.failed:
        raise CompareError("\n".join(f"{name}: {why}" for name, why in outcome.failed.items()))
    write_cases(outcome.table(), folder.cases)
    comparisons = comparisons_of(outcome.table(), METRICS)
    title = f"Mean over {len(dataset)} cases, each predicted by a network that never saw it"
    console.print(means_table(list(comparisons.values()), intervals=False, title=title).rich())
    for metric in METRICS:
        say(console, _margin(comparisons[metric]))
    save_figure(draw_overlays(_overlays(dataset, outcome.runs)), folder.overlays)
    save_figure(draw_reliability(_reliability(dataset, outcome.runs)), folder.reliability)
    with console.status("writing the report page"):
        folders = {name: run.folder for name, run in outcome.runs.items()}
        build_page(folders, dataset, folder.report, read_prediction=read_prediction, figures=False)
    _say_where(folder, console)


def prepare_phantom(data: Path, num_cases: int) -> None:
    """The phantom dataset in `data`, unless it is there."""
    if DatasetFolder(data).manifest.exists():
        return
    (raw,) = find_datasets("phantom", data.parent, phantom=replace(PHANTOM, num_cases=num_cases))
    prepare_dataset(raw, data, workers=1)


def _margin(comparison: Comparison) -> str:
    """Ours against the baseline in one line."""
    ours, base = (comparison.methods.index(name) for name in (OURS, BASELINE))
    scale = display_scale(comparison.metric)
    difference, low, high = (
        scale * float(part[ours, base]) for part in (comparison.difference, comparison.low, comparison.high)
    )
    p = p_text(float(comparison.p_holm[ours, base]))
    return (
        f"{OURS} against {BASELINE}, {comparison.metric}: {difference:+.2f} [{low:+.2f}, {high:+.2f}], p {p}"
    )


def _predicted(run: TrainedRun, dataset: Dataset, number: int) -> np.ndarray:
    fold = read_folds(run.folder.folds, dataset)[number]
    return run.prediction(dataset.cases[number].name, fold=fold)


def _overlays(dataset: Dataset, runs: Mapping[str, TrainedRun], num_cases: int = 4) -> list[CaseOverlay]:
    """The cases on which the raters disagree most."""
    means = {number: dataset.masks(number).mean(0) for number in range(len(dataset))}
    doubt = {number: float((mean * (1 - mean)).sum()) for number, mean in means.items()}
    chosen = sorted(doubt, key=lambda number: -doubt[number])[:num_cases]
    overlays = []
    for number in chosen:
        truth = dataset.truth(number)
        known = {} if truth is None else {"true probability": truth[1]}
        predicted = {name: _predicted(run, dataset, number)[1] for name, run in runs.items()}
        overlays.append(
            CaseOverlay(
                dataset.cases[number].name,
                dataset.image(number)[0],
                dataset.masks(number) > 0,
                {**known, "mean of raters": means[number].astype(np.float32), **predicted},
            )
        )
    return overlays


def _reliability(dataset: Dataset, runs: Mapping[str, TrainedRun]) -> dict[str, CalibrationBins]:
    """Bins over all voxels of the dataset, against the majority, as the paper's ECE."""
    masks = torch.stack([torch.from_numpy(dataset.masks(number)) for number in range(len(dataset))])
    reference = read_raters(masks, dataset.num_classes, torch.from_numpy(dataset.present), batched=True)
    bins = {}
    for name, run in runs.items():
        prob = torch.stack(
            [torch.from_numpy(_predicted(run, dataset, number)) for number in range(len(dataset))]
        )
        bins[name] = calibration_bins(prob, reference.majority()).over_cases()
    return bins


def _say_where(folder: DemoFolder, console: Console) -> None:
    for path, text in {
        folder.report: "everything on one page: open it in a browser",
        folder.overlays: "the cases on which raters disagree most, and what each method predicts",
        folder.reliability: "confidence against accuracy",
        folder.cases: "every score of every case",
        folder.runs: "recipes, logs, weights and predictions; tensorboard --logdir shows the curves",
        folder.dataset: "the dataset, as semidice prepare writes it",
    }.items():
        say(console, f"{path}  {text}")
    say(
        console,
        "next, with data of your own:\n"
        "  semidice prepare folder RAW_DIR data    # RAW_DIR/images and RAW_DIR/raters/NAME\n"
        "  semidice check data\n"
        "  semidice train quick --set data.dataset=data -o runs/first",
    )
