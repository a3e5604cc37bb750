"""How long trainings will take: their steps, times the time of a step that is measured on this device.

    steps   folds that are left x epochs x (cases of four folds of five // batch size)
    step    forward and backward of the recipe's network on its crop, here and now; a student adds a third of
            a step of its teacher's network, whose forward pass it waits for

On a CPU two images of 128 x 128 at most are measured and scaled by the number of voxels. It assumes that
nothing else runs on the device, and leaves out validation, prediction, starts, batches that must be read from
disk, and what a comparison system adds to the plain network; a CUDA graph makes steps faster than measured.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from ..arrays import SIZE_MULTIPLE
from ..data.manifest import Manifest
from ..networks.models import build_model
from ..recipes import Recipe
from ..recipes.grid import Variant
from .plan import folds_left

_CPU_SIDE, _CPU_BATCH = 128, 2
_NUM_TIMED, _MAX_SECONDS = 5, 2.0


class StepTimes:
    """Seconds a step of recipes on a device, each network and size measured once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[str, float | None] = {}

    def seconds(self, recipe: Recipe, manifest: Manifest) -> float | None:
        """None if the network cannot be built or run here, which its training will tell."""
        crop = recipe.augment.crop or _padded(manifest)
        key = repr((recipe.model, recipe.precision, recipe.batch_size, crop, len(manifest.channels)))
        if key not in self._known:
            try:
                self._known[key] = self._measured(recipe, manifest, crop)
            except (ValueError, RuntimeError):
                self._known[key] = None
        return self._known[key]

    def _measured(self, recipe: Recipe, manifest: Manifest, crop: Sequence[int]) -> float:
        size, batch = tuple(crop), recipe.batch_size
        if self.device.type == "cpu":
            size, batch = tuple(min(side, _CPU_SIDE) for side in crop), min(batch, _CPU_BATCH)
        options = {**recipe.model.build_options(), "weights": "none"}
        # the weights that are drawn here must not change those of a training
        with torch.random.fork_rng(devices=[]):
            network = build_model(
                num_channels=len(manifest.channels), num_classes=len(manifest.class_names), **options
            ).to(self.device)
        image = torch.zeros(batch, len(manifest.channels), *size, device=self.device)
        target = torch.zeros(batch, *size, dtype=torch.long, device=self.device)
        loss = recipe.loss.build().to(self.device)
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision.dtype)

        def step() -> None:
            with torch.autocast(self.device.type, low) if low is not None else nullcontext():
                logits = network(image)
            loss(logits, target).backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        # the first one warms up; on a slow machine it has to do
        taken: list[float] = []
        while not taken or (len(taken) < _NUM_TIMED and sum(taken) < _MAX_SECONDS):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        return min(taken) * (recipe.batch_size * math.prod(crop)) / (batch * math.prod(size))


def _padded(manifest: Manifest) -> tuple[int, ...]:
    sizes = zip(*(scan.shape for scan in manifest.scans), strict=True)
    return tuple(math.ceil(max(sides) / SIZE_MULTIPLE) * SIZE_MULTIPLE for sides in sizes)


def num_steps(recipe: Recipe, manifest: Manifest) -> int:
    """Steps of one fold."""
    num_cases = sum(len(scan.case_names()) for scan in manifest.scans)
    training = num_cases - num_cases // recipe.data.num_folds
    return recipe.schedule.epochs * max(1, training // recipe.batch_size)


def estimated_seconds(
    variants: Mapping[str, Iterable[Variant]], datasets: Mapping[str, Manifest], times: StepTimes
) -> float | None:
    """Of all folds that are left on the datasets that are there; None if a step cannot be timed."""
    total = 0.0
    for dataset, manifest in datasets.items():
        by_name = {variant.name: variant for variant in variants.get(dataset, ())}
        for variant in by_name.values():
            left = folds_left(variant)
            if not left:
                continue
            step = times.seconds(variant.recipe, manifest)
            teacher = by_name.get(variant.teacher or "")
            waiting = 0.0 if teacher is None else times.seconds(teacher.recipe, manifest)
            if step is None or waiting is None:
                return None
            total += left * num_steps(variant.recipe, manifest) * (step + waiting / 3)
    return total


def time_text(seconds: float | None) -> str:
    """A duration as one says it.

    >>> time_text(42), time_text(5400), time_text(300_000), time_text(None)
    ('1 min', '1.5 h', '3.5 days', 'unknown')
    """
    if seconds is None:
        return "unknown"
    if seconds < 3600:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
