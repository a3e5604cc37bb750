"""A run folder, opened: its recipe, the facts of its dataset, and its networks.

    run = open_run(path)
    run.network(0, device="cpu")    the trained network of fold 0

`dataset.json` of a run holds the facts of the manifest without its scans: classes, channels, and the options
of `prepare`; and the mean and standard deviation of each fold's training cases, which images are normalised
with. With these facts a run can predict on a machine that does not have the dataset.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ..data.batches.feed import whole_cases
from ..data.batches.storage import Storage, shared_storage
from ..data.dataset import Dataset, Unit
from ..data.folds import fold_cases, read_folds
from ..data.intensities import MeanStd
from ..data.manifest import PrepareOptions, manifest_digest
from ..errors import UserError, read_json, read_record
from ..networks.build import Task
from ..networks.checkpoint import Checkpoint
from ..networks.predictor import Predictor
from ..networks.systems import build_network
from ..paths import FoldFolder, RunFolder, find_run, write_text
from ..recipes import Recipe, read_recipe
from ..recipes.options import flattened
from ..statistics.cases import CaseTable, concatenate, in_order, read_cases, write_cases
from .stamp import RETRAIN, FoldStamp

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
    fold_mean: tuple[tuple[float, ...], ...] = Field(description="over the training cases of each fold")
    fold_std: tuple[tuple[float, ...], ...]
    num_raters: int = Field(ge=1)
    options: PrepareOptions = Field(description="of `semidice prepare`")
    num_axes: int = Field(default=2, description="of space, of a case")
    orientations: tuple[str, ...] = Field(
        default=(), description="of the scans, such as RAS; empty for a picture"
    )
    manifest_sha256: str = Field(description="of the manifest: shows whether the dataset has changed")

    def mean_std(self, fold: int) -> MeanStd:
        """Mean and standard deviation that the network of a fold needs its images normalised with."""
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

    @cached_property
    def identity(self) -> str:
        """SHA-256 of all that the weights depend on: recipe, folds and dataset.

        Checkpoints and stamps carry it. It holds no path, so that a run may be moved.
        """
        options = self.recipe.model_dump(mode="json", exclude={"auto", "reasons"})
        left_out = {*MAY_DIFFER, "teacher.run"}
        used = {key: value for key, value in flattened(options) if key not in left_out}
        folds = read_json(self.folder.folds)
        parts = [sorted(used.items()), folds, self.facts.manifest_sha256]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def check_dataset(self, dataset: Dataset, option: str = "--dataset") -> None:
        """A UserError if the dataset is not the one that the run was started with, although names may agree.

        option: names the right one, for the message.
        """
        if dataset.manifest_sha256 != self.facts.manifest_sha256:
            raise UserError(
                f"{dataset.folder.path} is not the dataset that {self.folder.path} was started with, or it "
                f"was prepared again since: name the right one with {option}, or train a new run on it"
            )

    def write_stamp(self, fold: int) -> None:
        """Say of which run and fold the stored predictions are; see `stamp`."""
        folder = self.folder.fold(fold)
        FoldStamp.of(folder, self.identity, fold).write(folder)

    def stamps(self, *, whole: bool = False) -> list[FoldStamp]:
        """Those of the finished folds; a UserError names a fold, or a prediction, of another run or case.

        whole: whether all stored predictions are compared, and not the stamps alone.
        """
        stamps = []
        for fold in self.finished_folds:
            folder = self.folder.fold(fold)
            stamp = FoldStamp.read(folder)
            if (stamp.identity, stamp.fold) != (self.identity, fold):
                raise UserError(
                    f"{folder.path} is fold {stamp.fold} of another run: its recipe, folds or dataset "
                    f"differ; put the right folder back, or {RETRAIN}"
                )
            if whole:
                stamp.check(folder)
            stamps.append(stamp)
        return stamps

    def gather(self) -> CaseTable:
        """The case table of the finished folds, which is also written."""
        self.stamps()
        table = in_order(concatenate(read_cases(self.folder.fold(n).cases) for n in self.finished_folds))
        write_cases(table, self.folder.cases)
        return table

    def num_predicted(self, dataset: Dataset, unit: Unit = "slice") -> int:
        """The number of cases, or of scans, of the finished folds."""
        finished, folds = self.finished_folds, read_folds(self.folder.folds, dataset)
        return len(dataset.units([n for n in range(len(dataset)) if folds[n] in finished], unit))

    def checkpoint_path(self, fold: int) -> Path:
        """The last checkpoint of a fold; a UserError if there is none."""
        num_folds = self.recipe.data.num_folds
        if fold not in range(num_folds):
            folds = ", ".join(map(str, range(num_folds)))
            raise UserError(f"{self.folder.path} has no fold {fold}; its folds are {folds}")
        if self.recipe.model.architecture == "nnunet":
            options = self.recipe.model.options
            raise UserError(
                f"{self.folder.path} was collected from nnU-Net, which has its networks: predict with "
                f"nnUNetv2_predict -tr {options.get('trainer')} -c {options.get('configuration')}, see "
                "docs/nnunet.md"
            )
        path = self.folder.fold(fold).last
        if not path.is_file():
            raise UserError(
                f"fold {fold} of {self.folder.path} has no checkpoint yet: train it first, with "
                "`semidice train --resume`"
            )
        return path

    def new_network(self, **changes: Any) -> nn.Module:
        """The network of the recipe with initial values; changes: of the options in `recipe.model`."""
        recipe = self.recipe
        task = Task(len(self.facts.channels), len(self.facts.class_names), self.facts.num_raters)
        network = build_network(replace(recipe.model, **changes), recipe.system, task, seed=recipe.seed)
        return network.to(memory_format=torch.channels_last) if recipe.precision.channels_last else network

    def network(self, fold: int, *, device: torch.device | str) -> nn.Module:
        """The network of a fold with the weights of `checkpoint_path`, in eval mode and without gradients."""
        checkpoint = Checkpoint(self.checkpoint_path(fold))
        checkpoint.check_origin(run=self.identity, fold=fold)
        network = self.new_network(weights="none")
        checkpoint.load_model(network)
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
    def training_cases(self) -> list[int]:
        return fold_cases(self.fold_of_case, self.fold)[0]

    @property
    def validation_cases(self) -> list[int]:
        return fold_cases(self.fold_of_case, self.fold)[1]

    def storage(self, device: torch.device | str, *, load: bool = True) -> Storage:
        """All cases of the dataset, as they are stored."""
        return shared_storage(self.dataset, device, load=load)

    @property
    def mean_std(self) -> MeanStd:
        """Of the training cases; images are normalised with them."""
        return self.run.facts.mean_std(self.fold)

    def predictor(self, network: nn.Module, *, flips: bool | None = None) -> Predictor:
        """What predicts images with the network of this fold. flips: see `mirrored_axes`."""
        axes = mirrored_axes(self.recipe, len(self.dataset.cases[0].shape), flips=flips)
        return Predictor(network, dtype=self.recipe.precision.dtype, flips=axes)

    def predicted(
        self, cases: Sequence[int], predictor: Predictor, device: torch.device | str
    ) -> Iterator[Tensor]:
        """Class probabilities (C, *space) of the cases, in their order, on the device."""
        storage = self.storage(device, load=False)
        batches = whole_cases(storage, cases, self.mean_std, batch_size=self.recipe.batch_size)
        return (prob for _, prob in predictor.cases(batches))


def mirrored_axes(recipe: Recipe, num_axes: int, *, flips: bool | None = None) -> tuple[int, ...]:
    """The spatial axes that a prediction mirrors, of `num_axes`: those of the training, or none.

    flips: whether to mirror; None takes `validation.flips`. A ValueError if the training mirrors no axis.
    """
    if not (recipe.validation.flips if flips is None else flips):
        return ()
    axes = recipe.augment.flip_axes(num_axes)
    if not axes:
        raise UserError(
            f"the mean over mirrored images needs a network that was trained with them, but {recipe.name} "
            "has augment.flip false: predict without flips, or train with augment.flip"
        )
    return axes


def open_run(run: Path | RunFolder) -> TrainedRun:
    """The run in a folder, see `find_run`; a UserError names the file that is missing or wrong."""
    folder = run if isinstance(run, RunFolder) else find_run(Path(run))
    for path in (folder.recipe, folder.dataset):
        if not path.is_file():
            reason = f"it has no {path.name}" if folder.path.is_dir() else "there is no such folder"
            raise UserError(f"{folder.path} is not a run folder of `semidice train`: {reason}")
    folder.check_links()
    return TrainedRun(folder, read_recipe(folder.recipe, accelerator=None), read_dataset_facts(folder))


def write_dataset_facts(run: RunFolder, dataset: Dataset, fold_of_case: Sequence[int]) -> None:
    """Write the facts of the dataset into the run folder. fold_of_case: see `FoldRun`."""
    manifest, folds = dataset.manifest, range(max(fold_of_case) + 1)
    numbers = [dataset.mean_std(fold_cases(fold_of_case, fold)[0]) for fold in folds]
    facts = DatasetFacts(
        **manifest.model_dump(include={"source", "class_names", "channels", "mean", "std", "options"}),
        fold_mean=tuple(each.mean for each in numbers),
        fold_std=tuple(each.std for each in numbers),
        num_raters=len(manifest.raters),
        num_axes=dataset.num_axes,
        orientations=tuple(sorted({scan.orientation for scan in manifest.scans}))
        if manifest.raw_folder
        else (),
        manifest_sha256=manifest_digest(manifest),
    )
    write_text(run.dataset, json.dumps(facts.model_dump(mode="json"), indent=1) + "\n")


def read_dataset_facts(run: RunFolder) -> DatasetFacts:
    """The facts of the dataset in a run folder; a ValueError names the option that is wrong."""
    return read_record(run.dataset, DatasetFacts)
