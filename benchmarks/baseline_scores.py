"""Reference labels, Dice and JSON files of the baselines, with the definitions of `semidice evaluate`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semidice.data.dataset import Dataset
from semidice.labels import majority_label
from semidice.metrics import dice_score, foreground_mean


class FoldResult(NamedTuple):
    """A trained fold: Dice of each held-out case, seconds of training and of prediction."""

    fold: int
    dice: dict[str, float]
    seconds: float
    predict_seconds: float


def majority(dataset: Dataset, number: int) -> Tensor:
    """The class of each voxel that most raters of the case chose, int64 (*space)."""
    masks = torch.from_numpy(dataset.masks(number))
    label = majority_label(masks, num_classes=dataset.num_classes, present=dataset.present[number])
    return torch.as_tensor(label).argmax(0)


def case_dice(predicted: Tensor, target: Tensor, num_classes: int) -> list[float]:
    """Dice of each case, mean over the foreground classes; 1 for a class that both maps lack.

    predicted, target: class maps (N, *space).
    """
    prob = torch.nn.functional.one_hot(predicted.long(), num_classes).movedim(-1, 1).float()
    mean: list[float] = foreground_mean(dice_score(prob, target.long())).tolist()
    return mean


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def report(
    method: str,
    dataset: str,
    device: str,
    results: Sequence[FoldResult],
    settings: Mapping[str, Any],
    out: Path | None,
) -> None:
    """Print the summary as JSON and write it to `out`, with the Dice of each case."""
    dice = {case: value for result in results for case, value in result.dice.items()}
    seconds = sum(result.seconds for result in results)
    summary: dict[str, Any] = {
        "method": method,
        "dataset": dataset,
        "device": device_name(device),
        "torch": torch.__version__,
        "num_cases": len(dice),
        "dice": sum(dice.values()) / len(dice),
        "seconds": round(seconds, 1),
        "gpu_minutes": round(seconds / 60, 2) if device == "cuda" else None,
        "predict_seconds": round(sum(result.predict_seconds for result in results), 1),
        "folds": [
            {
                "fold": result.fold,
                "num_cases": len(result.dice),
                "dice": sum(result.dice.values()) / len(result.dice),
                "seconds": round(result.seconds, 1),
                "predict_seconds": round(result.predict_seconds, 1),
            }
            for result in results
        ],
        "settings": dict(settings),
    }
    print(json.dumps(summary, indent=1), flush=True)
    if out is not None:
        out.write_text(json.dumps({**summary, "dice_of_case": dice}, indent=1) + "\n")
