"""What must be run: which datasets exist, which trainings the tables need on them, and how long these take.

The estimated time is the number of steps, times the time of a step measured on this device:

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..arrays import SIZE_MULTIPLE
from ..data.manifest import Manifest, read_manifest
from ..errors import UserError
from ..losses.segmentation import SegmentationLoss
from ..networks.build import Task, build_model
from ..paths import DatasetFolder, ReproductionFolder, RunFolder
from ..recipes import Recipe
from ..recipes.grid import Variant, read_variants
from .paper import QUBIQ, TUMOURS, PaperTable, grid_of, paper_tables
from .protocols import authors_recipe

_MAX_CPU_SIZE, _MAX_CPU_BATCH = 128, 2
_MAX_TIMED_STEPS, _MAX_SECONDS = 5, 2.0


@dataclass(frozen=True)
class Plan:
    """The trainings of the chosen tables.

    variants: by dataset, teachers before students, also for datasets that do not exist yet. datasets: those
    that exist. missing: one message for each dataset that does not exist.
    """

    tables: tuple[PaperTable, ...]
    variants: Mapping[str, tuple[Variant, ...]]
    datasets: Mapping[str, Manifest]
    missing: tuple[str, ...]

    def runnable(self) -> dict[str, tuple[Variant, ...]]:
        """Trainings on the datasets that exist."""
        return {name: self.variants[name] for name in self.datasets if self.variants[name]}

    def of_table(self, table: PaperTable) -> dict[str, list[Variant]]:
        """The trainings of one table by dataset, with the teachers of its students."""
        chosen = {}
        for dataset, variants in self.variants.items():
            if dataset in table.datasets:
                methods = table.methods(dataset)
                teachers = {variant.teacher for variant in variants if variant.name in methods}
                chosen[dataset] = [variant for variant in variants if variant.name in methods | teachers]
        return chosen


def chosen_tables(table: str) -> tuple[PaperTable, ...]:
    """The table with that name, or all tables for "all"."""
    tables = paper_tables()
    if table == "all":
        return tuple(tables.values())
    if table not in tables:
        raise UserError(f"the paper has no table {table!r}; choose one of {', '.join(tables)}, or all")
    return (tables[table],)


def make_plan(
    tables: Sequence[PaperTable],
    *,
    data: Path,
    out: Path,
    tasks: Sequence[str] = (),
    overrides: Sequence[str] = (),
    protocol: str = "text",
) -> Plan:
    """All trainings that the tables need on their datasets, or on those named in `tasks`.

    overrides: KEY=VALUE for every recipe; they also replace options of the protocol.
    """
    variants, datasets, missing = {}, {}, []
    for name in _wanted_datasets(tables, tasks):
        try:
            datasets[name] = read_manifest(data / name)
        except UserError as error:
            missing.append(_missing_message(name, data, str(error)))
        methods = {method for table in tables for method in table.methods(name)}
        of_dataset = read_variants(
            [grid_of(name)],
            dataset=data / name,
            out=ReproductionFolder(out).runs(name),
            overrides=overrides,
            only=methods,
        )
        if protocol == "authors":
            of_dataset = [_of_authors(variant, name, datasets.get(name), overrides) for variant in of_dataset]
        variants[name] = tuple(of_dataset)
    return Plan(tuple(tables), variants, datasets, tuple(missing))


def _of_authors(
    variant: Variant, dataset: str, manifest: Manifest | None, overrides: Sequence[str]
) -> Variant:
    steps = None if manifest is None else num_steps(variant.recipe, manifest)
    is_tumour = dataset in TUMOURS
    recipe = authors_recipe(variant.recipe, is_tumour=is_tumour, num_steps=steps, overrides=overrides)
    return replace(variant, recipe=recipe)


def _wanted_datasets(tables: Sequence[PaperTable], tasks: Sequence[str]) -> list[str]:
    known = (*QUBIQ, *TUMOURS)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise UserError(f"unknown task {', '.join(unknown)}; choose from {', '.join(known)}")
    used = [name for name in known if any(name in table.datasets for table in tables)]
    wanted = [name for name in used if name in tasks or not tasks]
    if not wanted:
        asked = " and ".join(table.name for table in tables)
        raise UserError(f"{asked} has no rows for {', '.join(tasks)}; choose from {', '.join(used)}")
    return wanted


def _missing_message(name: str, data: Path, error: str) -> str:
    if name in QUBIQ:
        command = f"semidice prepare qubiq QUBIQ_DIR {data} --task {name}"
    else:
        command = f"semidice prepare {name} {name.upper()}_DIR {data / name}"
    manifest = DatasetFolder(data / name).manifest
    problem = f"{manifest} cannot be used: {error}" if manifest.exists() else f"{manifest} does not exist"
    return f"no dataset {name}: {problem}; make it with: {command}"


def setting_text(variants: Mapping[str, Iterable[Variant]]) -> str:
    """Networks, epochs and folds of trainings in words, such as "unet-resnet50, 150 epochs, 5 folds"."""
    recipes = [variant.recipe for of_dataset in variants.values() for variant in of_dataset]
    # smp's prefix of encoders from timm says nothing about the network
    networks = dict.fromkeys(
        recipe.model.architecture
        if recipe.model.encoder == "none"
        else f"{recipe.model.architecture}-{recipe.model.encoder.removeprefix('tu-')}"
        for recipe in recipes
    )
    epochs = sorted({recipe.schedule.epochs for recipe in recipes})
    folds = sorted({(len(recipe.data.fold_numbers), recipe.data.num_folds) for recipe in recipes})
    return ", ".join(
        (
            *networks,
            f"{' or '.join(map(str, epochs))} epoch{'' if epochs == [1] else 's'}",
            " or ".join(
                f"{run} folds" if run == total else f"{run} of {total} folds" for run, total in folds
            ),
        )
    )


def folds_left(variant: Variant) -> int:
    """How many folds of the variant are not finished."""
    folds = variant.recipe.data.fold_numbers
    return len(folds) - len(RunFolder(variant.folder).finished_folds(folds))


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
        task = Task(len(manifest.channels), len(manifest.class_names))
        # building the network must not change the random numbers of a training
        with torch.random.fork_rng(devices=[]):
            network = build_model(replace(recipe.model, weights="none"), task).to(self.device)
        image = torch.zeros(batch, len(manifest.channels), *size, device=self.device)
        target = torch.zeros(batch, *size, dtype=torch.long, device=self.device)
        loss = SegmentationLoss(**asdict(recipe.loss)).to(self.device)
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
