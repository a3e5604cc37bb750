"""A trained run, opened: its recipe, what it must know of its dataset, its networks and their probabilities.

`dataset.json` of a run holds the manifest's facts without its scans: classes, channels, intensities, and the
options of `prepare`. With it a run can predict where its dataset is no longer at hand.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from ..data.manifest import Manifest
from ..data.options import PrepareOptions
from ..networks.checkpoint import Checkpoint
from ..networks.systems import System, build_network
from ..paths import RunFolder, atomic_write
from ..recipes import Recipe, read_recipe

CheckpointKind = Literal["last", "best"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DatasetFacts(BaseModel):
    """What a prediction needs of the dataset that a run was trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    source: str
    class_names: tuple[str, ...] = Field(min_length=2, description="class 0, the background, first")
    channels: tuple[str, ...] = Field(min_length=1)
    mean: tuple[float, ...] = Field(description="of each channel's intensity in [0, 1]")
    std: tuple[float, ...]
    num_raters: int | None = Field(default=None, ge=1, description="None in runs of an older semidice")
    options: dict[str, Any] = Field(description="of `semidice prepare`")
    manifest_sha256: str = Field(description="of the manifest, to tell whether the dataset is still the same")

    @property
    def prepare_options(self) -> PrepareOptions:
        known = {name: self.options[name] for name in PrepareOptions.model_fields if name in self.options}
        return PrepareOptions.model_validate(known)


@dataclass(frozen=True)
class TrainedRun:
    """A run folder with its recipe and the facts of its dataset."""

    folder: RunFolder
    recipe: Recipe
    facts: DatasetFacts

    @property
    def folds(self) -> tuple[int, ...]:
        """The folds that the recipe asks for."""
        data = self.recipe.data
        return tuple(range(data.num_folds)) if data.folds is None else tuple(sorted(data.folds))

    @property
    def finished_folds(self) -> tuple[int, ...]:
        """Those that are trained, predicted and scored."""
        return tuple(fold for fold in self.folds if self.folder.fold(fold).cases.exists())


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 of what the manifest says, however its file is laid out."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def write_dataset_facts(run: RunFolder, manifest: Manifest) -> None:
    """Put the facts of the dataset into the run folder."""
    facts = DatasetFacts(
        source=manifest.source,
        class_names=manifest.class_names,
        channels=manifest.channels,
        mean=manifest.mean,
        std=manifest.std,
        num_raters=len(manifest.raters),
        options=manifest.options,
        manifest_sha256=manifest_digest(manifest),
    )
    with atomic_write(run.dataset) as temp_path:
        temp_path.write_text(json.dumps(facts.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")


def read_run(run: Path | RunFolder) -> TrainedRun:
    """The run in a folder; a ValueError names the file that is missing or wrong."""
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    for path in (folder.recipe, folder.dataset):
        if not path.is_file():
            what = f"it has no {path.name}" if folder.path.is_dir() else "there is no such folder"
            raise ValueError(f"{folder.path} is no run folder of `semidice train`: {what}")
    try:
        facts = DatasetFacts.model_validate_json(folder.dataset.read_bytes())
        _ = facts.prepare_options
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "as a whole"
        raise ValueError(f"{folder.dataset} is not of this semidice: {where}: {first['msg']}") from error
    return TrainedRun(folder, read_recipe(folder.recipe), facts)


def load_network(
    run: Path | RunFolder,
    fold: int,
    *,
    which: CheckpointKind | None = None,
    device: torch.device | str,
) -> nn.Module:
    """The network of a fold with its trained weights, on the device, in eval mode and without gradients.

    which: the last or the best checkpoint; None takes the one that the recipe has scored.
    """
    return load_fold(read_run(run), fold, which=which, device=device)


def load_fold(
    run: TrainedRun, fold: int, *, which: CheckpointKind | None = None, device: torch.device | str
) -> nn.Module:
    """`load_network` of a run that is open."""
    path = checkpoint_path(run, fold, which=which)
    options = run.recipe.model.build_options() | {"weights": "none"}
    network = build_network(
        options,
        **run.recipe.system.model_dump(),
        num_channels=len(run.facts.channels),
        num_classes=len(run.facts.class_names),
        num_raters=run.facts.num_raters,
        seed=run.recipe.seed,
    )
    Checkpoint(path).load_model(network)
    network = network.to(device)
    if run.recipe.precision.channels_last:
        network = network.to(memory_format=torch.channels_last)
    return network.eval().requires_grad_(False)


def checkpoint_path(run: TrainedRun, fold: int, *, which: CheckpointKind | None = None) -> Path:
    """The file of a fold's weights; a ValueError names run, fold and what is missing."""
    if fold not in run.folds:
        folds = ", ".join(map(str, run.folds))
        raise ValueError(f"{run.folder.path} has no fold {fold}; its folds are {folds}")
    which = which or run.recipe.validation.checkpoint
    folder = run.folder.fold(fold)
    path = folder.last if which == "last" else folder.best
    if not path.is_file():
        raise ValueError(
            f"fold {fold} of {run.folder.path} has no {which} checkpoint yet: train it first, "
            "with `semidice train --resume`"
        )
    return path


def network_probability(
    network: nn.Module, image: Float[Tensor, "N channels *space"], *, dtype: str
) -> Float32[Tensor, "N C *space"]:
    """Class probabilities of normalised images, of the first output if there are several.

    A system of `systems` has its own way to them; of other networks it is the softmax.
    dtype: fp32, bf16 or fp16, of the network; softmax is in float32. The network is left in eval mode.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    network.eval()
    precision = _DTYPES[dtype]
    with torch.no_grad(), torch.autocast(image.device.type, precision, enabled=precision != torch.float32):
        if isinstance(network, System):
            return network.probability(image)
        logits = network(image)
    if isinstance(logits, Mapping):
        logits = next(iter(logits.values()))
    elif isinstance(logits, (list, tuple)):
        logits = logits[0]
    prob: Tensor = logits.float().softmax(1)
    return prob
