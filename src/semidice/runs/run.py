"""A run folder, opened: its recipe, the facts of its dataset, and its networks.

    run = open_run(path)
    run.network(0, device="cpu")    the trained network of fold 0

`dataset.json` of a run holds the facts of the manifest without its scans: classes, channels, and the options
of `prepare`; and the mean and standard deviation of each fold's training cases, which images are normalised
with. With these facts a run can predict on a machine that does not have the dataset.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from ..data.dataset import Dataset, Unit
from ..data.folds import fold_cases, read_folds
from ..data.intensities import MeanStd
from ..data.manifest import Manifest, PrepareOptions
from ..data.storage import Storage, shared_storage
from ..decisions.decision import Decision
from ..limits import MAX_RATERS, read_bytes
from ..networks.checkpoint import Checkpoint
from ..networks.systems import build_network
from ..paths import FoldFolder, RunFolder, write_text
from ..recipes import Recipe, read_recipe
from ..recipes.options import FITTED, flattened

# options that may change when a run is resumed: which folds to run, where the data is, how it is loaded
MAY_DIFFER = ("data.folds", "data.dataset", "workers")


class DatasetFacts(BaseModel):
    """The facts of the training dataset that a prediction needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    source: str
    class_names: tuple[str, ...] = Field(min_length=2, description="class 0, the background, first")
    channels: tuple[str, ...] = Field(min_length=1)
    mean: tuple[float, ...] = Field(description="of each channel's intensity in [0, 1] over the dataset")
    std: tuple[float, ...]
    fold_mean: tuple[tuple[float, ...], ...] | None = Field(
        default=None,
        description="over the training cases of each fold; None in runs of an older semidice: there, `mean`",
    )
    fold_std: tuple[tuple[float, ...], ...] | None = None
    num_raters: int | None = Field(
        default=None, ge=1, le=MAX_RATERS, description="None in runs of an older semidice"
    )
    options: dict[str, Any] = Field(description="of `semidice prepare`")
    manifest_sha256: str = Field(description="of the manifest: shows whether the dataset has changed")

    @model_validator(mode="after")
    def _can_normalise(self) -> "DatasetFacts":
        means, stds = (self.mean, *(self.fold_mean or ())), (self.std, *(self.fold_std or ()))
        if len(means) != len(stds) or any(len(part) != len(self.channels) for part in (*means, *stds)):
            raise ValueError(
                f"mean and std need one number for each of {len(self.channels)} channels and fold"
            )
        for mean, std in zip(means, stds, strict=True):
            if not all(map(math.isfinite, mean)) or not all(0 < number < math.inf for number in std):
                raise ValueError(f"mean must be finite and std above 0; got {mean} and {std}")
        return self

    @property
    def prepare_options(self) -> PrepareOptions:
        known = {name: self.options[name] for name in PrepareOptions.model_fields if name in self.options}
        return PrepareOptions.model_validate(known)

    def mean_std(self, fold: int) -> MeanStd:
        """Mean and standard deviation that the network of a fold needs its images normalised with."""
        if self.fold_mean is None or self.fold_std is None:
            return MeanStd(self.mean, self.std)
        return MeanStd(self.fold_mean[fold], self.fold_std[fold])


@dataclass(frozen=True)
class TrainedRun:
    """A run folder with its recipe and the facts of its dataset; its folds may be finished or not."""

    folder: RunFolder
    recipe: Recipe
    facts: DatasetFacts

    @property
    def finished_folds(self) -> tuple[int, ...]:
        """Folds that are trained, predicted and scored, also those of an earlier `data.folds`."""
        return self.folder.finished_folds(range(self.recipe.data.num_folds))

    @property
    def missing_folds(self) -> tuple[int, ...]:
        """Folds that the recipe asks for and that are not finished."""
        return tuple(fold for fold in self.recipe.data.fold_numbers if fold not in self.finished_folds)

    def num_predicted(self, dataset: Dataset, unit: Unit = "slice") -> int:
        """The number of cases, or of scans, of the finished folds."""
        finished, folds = self.finished_folds, read_folds(self.folder.folds, dataset)
        return len(dataset.units([n for n in range(len(dataset)) if folds[n] in finished], unit))

    @property
    def has_fitted_decision(self) -> bool:
        """Whether the recipe asks for a fitted rule, and the folds to fit it to are finished."""
        return self.recipe.decision == FITTED and not self.missing_folds and len(self.finished_folds) > 1

    @property
    def recipe_decision(self) -> Decision | None:
        """The rule of the recipe for the scores of a fold; None is argmax, also until a rule is fitted."""
        text = self.recipe.decision
        return None if text in (str(Decision()), FITTED) else Decision.parse(text)

    def checkpoint_path(self, fold: int) -> Path:
        """The checkpoint that the recipe scores, `validation.checkpoint`; a ValueError if there is none."""
        num_folds = self.recipe.data.num_folds
        if fold not in range(num_folds):
            folds = ", ".join(map(str, range(num_folds)))
            raise ValueError(f"{self.folder.path} has no fold {fold}; its folds are {folds}")
        if self.recipe.model.architecture == "nnunet":
            options = self.recipe.model.options
            raise ValueError(
                f"{self.folder.path} was collected from nnU-Net, which has its networks: predict with "
                f"nnUNetv2_predict -tr {options.get('trainer')} -c {options.get('configuration')}, see "
                "docs/nnunet.md"
            )
        kind = self.recipe.validation.checkpoint
        path = self.folder.fold(fold).last if kind == "last" else self.folder.fold(fold).best
        if not path.is_file():
            raise ValueError(
                f"fold {fold} of {self.folder.path} has no {kind} checkpoint yet: train it first, "
                "with `semidice train --resume`"
            )
        return path

    def new_network(self, **changes: Any) -> nn.Module:
        """The network of the recipe with initial values; changes: of the options in `recipe.model`."""
        recipe = self.recipe
        network = build_network(
            recipe.model.build_options() | changes,
            **recipe.system.model_dump(),
            num_channels=len(self.facts.channels),
            num_classes=len(self.facts.class_names),
            num_raters=self.facts.num_raters,
            seed=recipe.seed,
        )
        return network.to(memory_format=torch.channels_last) if recipe.precision.channels_last else network

    def network(self, fold: int, *, device: torch.device | str) -> nn.Module:
        """The network of a fold with the weights of `checkpoint_path`, in eval mode and without gradients."""
        checkpoint = Checkpoint(self.checkpoint_path(fold))
        checkpoint.check_origin(fold=fold)
        network = self.new_network(weights="none")
        checkpoint.load_model(network)
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"{checkpoint.path} holds NaN or infinite weights, such as {name}: the training "
                    "diverged; train it again with a lower optimiser.lr"
                )
        return network.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class FoldRun:
    """One fold of a run. fold_of_case: the fold in which each case of the dataset is validated."""

    run: TrainedRun
    dataset: Dataset
    fold: int
    fold_of_case: Sequence[int]

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @property
    def folder(self) -> FoldFolder:
        return self.run.folder.fold(self.fold)

    @property
    def identity(self) -> str:
        """SHA-256 of all that the weights depend on: recipe, folds and dataset. Checkpoints carry it.

        Options with their default are left out, so that a later semidice may have more of them.
        """
        options = self.recipe.model_dump(mode="json", exclude_defaults=True, exclude={"auto", "reasons"})
        # a teacher may have been moved
        left_out = {*MAY_DIFFER, "teacher.run"}
        used = {key: value for key, value in flattened(options) if key not in left_out}
        parts = [sorted(used.items()), list(self.fold_of_case), self.run.facts.manifest_sha256]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def training_cases(self) -> list[int]:
        return fold_cases(self.fold_of_case, self.fold)[0]

    @property
    def validation_cases(self) -> list[int]:
        return fold_cases(self.fold_of_case, self.fold)[1]

    def storage(self, device: torch.device | str, *, load: bool = True) -> Storage:
        """All cases of the dataset, normalised as the network of this fold needs them."""
        return shared_storage(self.dataset, device, self.run.facts.mean_std(self.fold), load=load)


def mirrored_axes(recipe: Recipe, num_axes: int, *, flips: bool | None = None) -> tuple[int, ...]:
    """The spatial axes that a prediction mirrors, of `num_axes`: those of the training, or none.

    flips: whether to mirror; None takes `validation.flips`. A ValueError if the training mirrors no axis.
    """
    if not (recipe.validation.flips if flips is None else flips):
        return ()
    axes = recipe.augment.flip_axes(num_axes)
    if not axes:
        raise ValueError(
            f"the mean over mirrored images needs a network that was trained with them, but {recipe.name} "
            "has augment.flip false: predict without flips, or train with augment.flip"
        )
    return axes


def volume_problem(dataset: Dataset) -> str | None:
    """Why no network can be trained on the dataset: its cases are whole volumes. None if they are not."""
    if len(dataset.manifest.scans[0].shape) < 3:
        return None
    return (
        f"{dataset.folder.path} has whole volumes, but every network is 2D (small_unet and those of "
        "segmentation_models_pytorch): prepare it with --slices all"
    )


def open_run(run: Path | RunFolder) -> TrainedRun:
    """The run in a folder; a ValueError names the file that is missing or wrong."""
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    for path in (folder.recipe, folder.dataset):
        if not path.is_file():
            reason = f"it has no {path.name}" if folder.path.is_dir() else "there is no such folder"
            raise ValueError(f"{folder.path} is not a run folder of `semidice train`: {reason}")
    return TrainedRun(folder, read_recipe(folder.recipe, accelerator=None), read_dataset_facts(folder))


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 of the manifest's content; the layout of its file does not matter."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def write_dataset_facts(run: RunFolder, dataset: Dataset, fold_of_case: Sequence[int]) -> None:
    """Write the facts of the dataset into the run folder. fold_of_case: see `FoldRun`."""
    manifest, folds = dataset.manifest, range(max(fold_of_case) + 1)
    numbers = [dataset.mean_std(fold_cases(fold_of_case, fold)[0]) for fold in folds]
    facts = DatasetFacts(
        **manifest.model_dump(include={"source", "class_names", "channels", "mean", "std", "options"}),
        fold_mean=tuple(each.mean for each in numbers),
        fold_std=tuple(each.std for each in numbers),
        num_raters=len(manifest.raters),
        manifest_sha256=manifest_digest(manifest),
    )
    write_text(run.dataset, json.dumps(facts.model_dump(mode="json"), indent=1) + "\n")


def read_dataset_facts(run: RunFolder) -> DatasetFacts:
    """The facts of the dataset in a run folder; a ValueError names the option that is wrong."""
    try:
        facts = DatasetFacts.model_validate_json(read_bytes(run.dataset))
        _ = facts.prepare_options
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(
            f"{run.dataset} was not written by this version of semidice: {where}: {first['msg']}"
        ) from error
    return facts
