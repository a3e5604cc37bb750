"""Dice of a plain training loop, as one would write it without semidice, on a prepared dataset and its folds.

    python benchmarks/plain_loop.py PREPARED --weights tf_efficientnet_lite0.safetensors --out plain.json

A UNet of segmentation-models-pytorch with an encoder of timm, AdamW with one cycle, cross entropy plus soft
Dice on the majority of the raters, flips, scale, rotation, shift and brightness. Of semidice it uses the
prepared cases, the folds and the score. The loop is `train` and `augment`; smaller cases are padded.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from baseline_scores import FoldResult, case_dice, majority, report
from torch import Tensor, nn

from semidice.data.dataset import Dataset
from semidice.data.folds import fold_cases, split_dataset


def augment(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Random flips, scale, rotation, shift and brightness of a batch; labels stay hard."""
    num, device = len(images), images.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(num, *shape, device=device).uniform_(low, high)

    angle, scale = uniform(-math.pi / 12, math.pi / 12), uniform(-0.25, 0.25).exp()
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(num, 2, 2)
    flips = uniform(-1, 1, 2, 1).sign()
    theta = torch.cat([flips * rotation * scale.view(num, 1, 1), uniform(-0.2, 0.2, 2, 1)], 2)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)
    labels = F.grid_sample(labels[:, None].float(), grid, mode="nearest", align_corners=False)[:, 0].long()
    gain, bias = uniform(0.85, 1.15, 1, 1, 1), uniform(-0.15, 0.15, 1, 1, 1)
    return images * gain + bias, labels


def dice_and_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    target = F.one_hot(labels, logits.shape[1]).movedim(-1, 1).float()
    prob = logits.softmax(1)
    overlap, total = (x.sum((0, 2, 3))[1:] for x in (prob * target, prob + target))
    return F.cross_entropy(logits, labels) + 1 - ((2 * overlap + 1) / (total + 1)).mean()


def train(
    network: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, batch_size: int, lr: float
) -> None:
    batch_size = min(batch_size, len(images))
    steps = len(images) // batch_size
    optimiser = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, lr, total_steps=max(epochs * steps, 20), pct_start=0.1
    )
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), device=images.device)
        for chosen in order[: steps * batch_size].split(batch_size):
            image, label = augment(images[chosen], labels[chosen])
            with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
                logits = network(image)
            loss = dice_and_cross_entropy(logits.float(), label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


@torch.inference_mode()
def predict(network: nn.Module, images: Tensor) -> Tensor:
    network.eval()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        return torch.cat([network(part).argmax(1) for part in images.split(64)])


def padded(tensors: list[Tensor]) -> Tensor:
    """Stacked, with zeros below and to the right, up to a multiple of 32."""
    height, width = (-(-max(tensor.shape[axis] for tensor in tensors) // 32) * 32 for axis in (-2, -1))
    return torch.stack([F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2])) for x in tensors])


def build(dataset: Dataset, encoder: str, weights: Path | None) -> nn.Module:
    """The network; timm maps the names of a weights file, and adapts its first layer to the channels."""
    file = {"pretrained_cfg_overlay": {"file": str(weights)}} if weights else {}
    network: nn.Module = smp.Unet(
        f"tu-{encoder}",
        encoder_weights=True if weights else None,
        in_channels=dataset.num_channels,
        classes=dataset.num_classes,
        **file,
    )
    return network


def main() -> None:
    """Train and score the chosen folds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, help="folder made by `semidice prepare`")
    parser.add_argument("--num-folds", type=int, default=5, help="data.num_folds of the recipe to compare")
    parser.add_argument("--folds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="folds to train")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--encoder", default="tf_efficientnet_lite0", help="name in timm")
    parser.add_argument("--weights", type=Path, help="file of the encoder; without it, from scratch")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="JSON file of the result, with the Dice of each case")
    chosen = parser.parse_args()
    dataset = Dataset(chosen.dataset)
    numbers = range(len(dataset))
    mean, std = (np.reshape(x, (-1, 1, 1)) for x in (dataset.manifest.mean, dataset.manifest.std))
    images = padded([torch.from_numpy((dataset.image(n) - mean) / std).float() for n in numbers])
    labels = padded([majority(dataset, number) for number in numbers])
    images, labels = images.to(chosen.device), labels.to(chosen.device)
    fold_of_case = split_dataset(dataset, num_folds=chosen.num_folds)
    settings = {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in vars(chosen).items()
        if name in ("epochs", "batch_size", "lr", "encoder", "weights")
    }
    results = []
    for fold in chosen.folds:
        torch.manual_seed(fold)
        train_cases, held_out = fold_cases(fold_of_case, fold)
        start = time.perf_counter()
        network = build(dataset, chosen.encoder, chosen.weights).to(chosen.device)
        train(
            network,
            images[train_cases],
            labels[train_cases],
            epochs=chosen.epochs,
            batch_size=chosen.batch_size,
            lr=chosen.lr,
        )
        if chosen.device == "cuda":
            torch.cuda.synchronize()
        trained = time.perf_counter()
        predicted = predict(network, images[held_out])
        dice = case_dice(predicted, labels[held_out], dataset.num_classes)
        names = [dataset.cases[number].name for number in held_out]
        end = time.perf_counter()
        results.append(FoldResult(fold, dict(zip(names, dice, strict=True)), trained - start, end - trained))
        # after every fold, so that a stopped run leaves what it has
        report("plain_loop", dataset.folder.path.resolve().name, chosen.device, results, settings, chosen.out)


if __name__ == "__main__":
    main()
