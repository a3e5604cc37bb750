"""Dice and GPU minutes of nnU-Net 2d, from PyPI, on a prepared dataset and the folds of `semidice train`.

    pip install nnunetv2
    python benchmarks/baseline_nnunet.py WORK --dataset PREPARED --epochs 100 --out nnunet.json

or in two stages, of which only the second needs a GPU and neither a network connection:

    python benchmarks/baseline_nnunet.py WORK --dataset PREPARED --stage prepare
    python benchmarks/baseline_nnunet.py WORK --stage train --epochs 100 --folds 0 --out nnunet.json

The second stage reads WORK/preprocessed alone. Every case, an image or a slice, becomes one PNG per channel
with the stored intensities and one with the majority of the raters. Spacings are not passed on: both methods
see the same grid. Fingerprint, plans, preprocessing, training and prediction (sliding window, mirroring) are
nnU-Net's own, with its defaults, but for the schedule: --epochs instead of 1000 and --iterations instead of
250 per epoch are set as in its nnUNetTrainer_100epochs, and a fifth as many iterations of its online
validation, which is nnU-Net's ratio. GPU minutes are those of training: start of the workers, torch.compile,
online validation and checkpoints included, preprocessing and the prediction of held-out cases excluded.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baseline_scores import FoldResult, case_dice, majority, report
from PIL import Image

from semidice.data.dataset import Dataset
from semidice.data.folds import fold_cases, split_dataset

DATASET_ID = 1
# what this script adds to nnU-Net's preprocessed folder
ABOUT = "semidice_baseline.json"


def export_raw(dataset: Dataset, folder: Path) -> None:
    """Write nnU-Net's raw layout: imagesTr/CASE_000C.png, labelsTr/CASE.png and dataset.json."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    for number, case in enumerate(dataset.cases):
        if len(case.shape) != 2:
            raise ValueError(
                f"case {case.name} has shape {case.shape}; this baseline needs images: prepare the dataset "
                "again with --slices all or --slices foreground"
            )
        for channel, image in enumerate(dataset.stored("images", number)):
            # stored values are not negative, and PNG has no int16
            pixels = image.astype(np.uint16) if image.dtype == np.int16 else np.array(image)
            Image.fromarray(pixels).save(folder / "imagesTr" / f"{case.name}_{channel:04d}.png")
        label = majority(dataset, number).numpy().astype(np.uint8)
        Image.fromarray(label).save(folder / "labelsTr" / f"{case.name}.png")
    description = {
        # z-score of each image; nnU-Net's rule for CT needs Hounsfield units, which a prepared image has lost
        "channel_names": {str(channel): "zscore" for channel in range(dataset.num_channels)},
        "labels": {name: number for number, name in enumerate(dataset.manifest.class_names)},
        "numTraining": len(dataset),
        "file_ending": ".png",
    }
    (folder / "dataset.json").write_text(json.dumps(description, indent=1))


def make_splits(dataset: Dataset, num_folds: int) -> list[dict[str, list[str]]]:
    """The content of splits_final.json: training and held-out cases of each fold."""
    fold_of_case = split_dataset(dataset, num_folds=num_folds)
    splits = []
    for fold in range(num_folds):
        train, held_out = fold_cases(fold_of_case, fold)
        splits.append(
            {
                "train": [dataset.cases[number].name for number in train],
                "val": [dataset.cases[number].name for number in held_out],
            }
        )
    return splits


def use_nnunet(work: Path, raw: Path | None, num_workers: int, *, compiled: bool = True) -> None:
    """Set nnU-Net's environment variables; some are read when it is imported."""
    if importlib.util.find_spec("nnunetv2") is None:
        raise SystemExit("this baseline is nnU-Net itself, which is not installed: pip install nnunetv2")
    os.environ.update(
        nnUNet_preprocessed=str(work / "preprocessed"),
        nnUNet_results=str(work / "results"),
        nnUNet_n_proc_DA=str(num_workers),
        nnUNet_def_n_proc=str(num_workers),
        nnUNet_compile=str(compiled),
    )
    if raw is not None:
        os.environ.update(nnUNet_raw=str(raw))


def prepare(dataset: Dataset, work: Path, num_folds: int, num_workers: int) -> None:
    """Export, fingerprint, plans and preprocessing, into WORK/preprocessed."""
    if (work / "preprocessed").exists():
        raise SystemExit(f"{work} is already prepared: run --stage train, or choose a new folder")
    name = f"Dataset{DATASET_ID:03d}_{dataset.folder.path.resolve().name}"
    with tempfile.TemporaryDirectory() as raw:
        use_nnunet(work, Path(raw), num_workers)
        from nnunetv2.experiment_planning.plan_and_preprocess_api import (
            extract_fingerprint_dataset,
            plan_experiments,
            preprocess_dataset,
        )

        export_raw(dataset, Path(raw, name))
        start = time.perf_counter()
        extract_fingerprint_dataset(DATASET_ID, num_processes=num_workers, check_dataset_integrity=True)
        plan_experiments([DATASET_ID])
        preprocess_dataset(DATASET_ID, configurations=["2d"], num_processes=[num_workers])
        seconds = time.perf_counter() - start
    folder = work / "preprocessed" / name
    (folder / "splits_final.json").write_text(json.dumps(make_splits(dataset, num_folds), indent=1))
    about = {"dataset": dataset.folder.path.resolve().name, "preprocess_seconds": round(seconds, 1)}
    (folder / ABOUT).write_text(json.dumps(about))


def train_fold(folder: Path, fold: int, epochs: int, iterations: int, device: str) -> tuple[FoldResult, Any]:
    """Train a fold, predict its held-out cases with nnU-Net's validation and score them; and its trainer."""
    from nnunetv2.run.run_training import get_trainer_from_args

    trainer = get_trainer_from_args(folder.name, "2d", fold, device=torch.device(device))
    trainer.num_epochs = epochs
    trainer.num_iterations_per_epoch = iterations
    trainer.num_val_iterations_per_epoch = max(1, iterations // 5)
    start = time.perf_counter()
    trainer.run_training()
    trained = time.perf_counter()
    trainer.perform_actual_validation()
    end = time.perf_counter()
    predicted = Path(trainer.output_folder, "validation")
    cases = json.loads((folder / "splits_final.json").read_text())[fold]["val"]
    num_classes = len(json.loads((folder / "dataset.json").read_text())["labels"])
    dice = score(predicted, folder / "gt_segmentations", cases, num_classes)
    return FoldResult(fold, dice, trained - start, end - trained), trainer


def score(predicted: Path, labels: Path, cases: list[str], num_classes: int) -> dict[str, float]:
    """Dice of each case between two folders of label images."""
    dice = {}
    for case in cases:
        maps = [torch.from_numpy(np.array(Image.open(path / f"{case}.png"))) for path in (predicted, labels)]
        (dice[case],) = case_dice(maps[0][None], maps[1][None], num_classes)
    return dice


def train(chosen: argparse.Namespace) -> None:
    """Train the chosen folds from WORK/preprocessed, then print and write the result."""
    use_nnunet(chosen.work, None, chosen.workers, compiled=not chosen.no_compile)
    folders = sorted((chosen.work / "preprocessed").glob(f"Dataset*/{ABOUT}"))
    if not folders:
        raise SystemExit(f"{chosen.work} is not prepared: run --stage prepare --dataset PREPARED first")
    folder = folders[0].parent
    about = json.loads((folder / ABOUT).read_text())
    if chosen.device == "cuda":
        # as in nnU-Net's own command
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
    results, epoch_seconds = [], []
    for fold in chosen.folds:
        with contextlib.redirect_stdout(sys.stderr):
            result, trainer = train_fold(folder, fold, chosen.epochs, chosen.iterations, chosen.device)
        results.append(result)
        ends, starts = (
            trainer.logger.get_value(f"epoch_{name}_timestamps", step=None) for name in ("end", "start")
        )
        epoch_seconds += [end - start for end, start in zip(ends, starts, strict=True)]
        settings = {
            "nnunetv2": importlib.metadata.version("nnunetv2"),
            "epochs": chosen.epochs,
            "iterations_per_epoch": chosen.iterations,
            "batch_size": trainer.configuration_manager.batch_size,
            "patch_size": list(trainer.configuration_manager.patch_size),
            "workers": chosen.workers,
            "compiled": chosen.device == "cuda" and not chosen.no_compile,
            "median_epoch_seconds": round(statistics.median(epoch_seconds), 2),
            "preprocess_seconds": about["preprocess_seconds"],
        }
        # after every fold, so that a stopped run leaves what it has
        report("nnunet_2d", about["dataset"], chosen.device, results, settings, chosen.out)


def main() -> None:
    """Run the stages of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, help="folder of nnU-Net's files; one dataset each")
    parser.add_argument("--dataset", type=Path, help="prepared dataset; not needed by --stage train")
    parser.add_argument("--stage", choices=["prepare", "train", "all"], default="all")
    parser.add_argument("--num-folds", type=int, default=5, help="data.num_folds of the recipe to compare")
    parser.add_argument("--folds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="folds to train")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=250, help="training steps of an epoch")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that load data"
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile on a GPU")
    parser.add_argument("--out", type=Path, help="JSON file of the result, with the Dice of each case")
    chosen = parser.parse_args()
    chosen.work = chosen.work.resolve()
    if chosen.stage != "train":
        if chosen.dataset is None:
            parser.error(f"--stage {chosen.stage} needs --dataset, a folder made by `semidice prepare`")
        # nnU-Net prints its progress; only the result goes to stdout
        with contextlib.redirect_stdout(sys.stderr):
            prepare(Dataset(chosen.dataset), chosen.work, chosen.num_folds, chosen.workers)
    if chosen.stage != "prepare":
        train(chosen)


if __name__ == "__main__":
    main()
