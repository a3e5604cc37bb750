"""How long trainings take: their number of steps, times the time of a step measured on this device.

    steps   folds that are left x epochs x (training cases // batch size)
    step    forward and backward of the recipe's network on its crop, measured now; a student also waits for
            the forward pass of its teacher, a third of a step of the teacher's network

On a CPU at most two images of 128 x 128 are measured, and the time is scaled by the number of voxels. The
estimate assumes that nothing else runs on the device. It leaves out validation, prediction, start-up, reading
from disk, and what a comparison system adds to the plain network. CUDA graphs are faster than measured.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from ..arrays import SIZE_MULTIPLE
from ..data.manifest import Manifest
from ..networks.build import build_model
from ..recipes import Recipe
from ..recipes.grid import Variant
from .plan import folds_left

_MAX_CPU_SIZE, _MAX_CPU_BATCH = 128, 2
_MAX_TIMED_STEPS, _MAX_SECONDS = 5, 2.0


class StepTimes:
    """Seconds per training step on a device; each network and size is measured once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[str, float | None] = {}

    def seconds(self, recipe: Recipe, manifest: Manifest) -> float | None:
        """None if the network cannot be built or run here; its training will report the reason."""
        crop = recipe.augment.crop or _padded_size(manifest)
        key = repr((recipe.model, recipe.precision, recipe.batch_size, crop, len(manifest.channels)))
        if key not in self._known:
            try:
                self._known[key] = self._measure(recipe, manifest, crop)
            except (ValueError, RuntimeError):
                self._known[key] = None
        return self._known[key]

    def _measure(self, recipe: Recipe, manifest: Manifest, crop: Sequence[int]) -> float:
        size, batch = tuple(crop), recipe.batch_size
        if self.device.type == "cpu":
            size, batch = tuple(min(length, _MAX_CPU_SIZE) for length in crop), min(batch, _MAX_CPU_BATCH)
        options = {**recipe.model.build_options(), "weights": "none"}
        # building the network must not change the random numbers of a training
        with torch.random.fork_rng(devices=[]):
            network = build_model(
                num_channels=len(manifest.channels), num_classes=len(manifest.class_names), **options
            ).to(self.device)
        image = torch.zeros(batch, len(manifest.channels), *size, device=self.device)
        target = torch.zeros(batch, *size, dtype=torch.long, device=self.device)
        loss = recipe.loss.build().to(self.device)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision.dtype)

        def step() -> None:
            with torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext():
                logits = network(image)
            loss(logits, target).backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        # the first step warms up; on a slow machine it is the only one
        seconds: list[float] = []
        while not seconds or (len(seconds) < _MAX_TIMED_STEPS and sum(seconds) < _MAX_SECONDS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return min(seconds) * (recipe.batch_size * math.prod(crop)) / (batch * math.prod(size))


def _padded_size(manifest: Manifest) -> tuple[int, ...]:
    sizes = zip(*(scan.shape for scan in manifest.scans), strict=True)
    return tuple(math.ceil(max(lengths) / SIZE_MULTIPLE) * SIZE_MULTIPLE for lengths in sizes)


def num_steps(recipe: Recipe, manifest: Manifest) -> int:
    """Training steps of one fold."""
    num_cases = sum(len(scan.case_names()) for scan in manifest.scans)
    training = num_cases - num_cases // recipe.data.num_folds
    return recipe.schedule.epochs * max(1, training // recipe.batch_size)


def estimated_seconds(
    variants: Mapping[str, Iterable[Variant]], datasets: Mapping[str, Manifest], times: StepTimes
) -> float | None:
    """Time of all folds that are not finished, by dataset; None if a step cannot be timed."""
    total = 0.0
    for dataset, of_dataset in variants.items():
        by_name = {variant.name: variant for variant in of_dataset}
        for variant in by_name.values():
            left = folds_left(variant)
            if not left:
                continue
            step = times.seconds(variant.recipe, datasets[dataset])
            teacher = by_name.get(variant.teacher or "")
            waiting = 0.0 if teacher is None else times.seconds(teacher.recipe, datasets[dataset])
            if step is None or waiting is None:
                return None
            total += left * num_steps(variant.recipe, datasets[dataset]) * (step + waiting / 3)
    return total


def time_text(seconds: float | None) -> str:
    """A duration in words.

    >>> time_text(42), time_text(5400), time_text(300_000), time_text(None)
    ('1 min', '1.5 h', '3.5 days', 'unknown')
    """
    if seconds is None:
        return "unknown"
    if seconds < 3600:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
