"""The raters' masks, preprocessed as nnU-Net preprocesses its label, and loaded beside it.

    semidice_raters/CONFIGURATION/CASE_seg.b2nd   integers (1 + R, *space): nnU-Net's label, then each rater;
                                                  -1 everywhere for a rater who did not look at the case
                                  raters.json     names of the raters; written last

nnU-Net's own files stay as they are. Axes, crop and resampling are those that nnU-Net used for the image, as
it stored them with the case.
"""

import json
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
from nnunetv2.training.dataloading.nnunet_dataset import comp_blosc2_params, nnUNetDatasetBlosc2
from nnunetv2.utilities.plans_handling.plans_handler import ConfigurationManager, PlansManager
from rich.console import Console

from ..console import progress_bar, say
from ..errors import UserError, read_json
from ..paths import atomic_write, write_text
from ..processes import end_with_parent
from .folders import NnunetDataset

_NAMES = "raters.json"


def rater_segmentations(preprocessed: Path, data_identifier: str) -> Path:
    """The folder of `CASE_seg.b2nd` with all raters, for one preprocessed configuration."""
    return preprocessed / "semidice_raters" / data_identifier


class RatersDataset(nnUNetDatasetBlosc2):  # type: ignore[misc]
    """nnU-Net's dataset with segmentations of 1 + R channels."""

    def load_case(self, identifier: str) -> tuple[Any, Any, Any, Any]:
        data, _, previous, properties = super().load_case(identifier)
        source = Path(self.source_folder)
        path = rater_segmentations(source.parent, source.name) / f"{identifier}_seg.b2nd"
        both = blosc2.open(urlpath=str(path), mode="r", dparams={"nthreads": 1}, **self.mmap_kwargs)
        return data, both, previous, properties


def read_rater_names(folder: Path) -> tuple[str, ...]:
    """Names of the raters whose preprocessed masks are in the folder; a ValueError if there are none."""
    advice = "run `semidice nnunet preprocess` for this configuration, which preprocesses the raters"
    return tuple(map(str, read_json(folder / _NAMES, advice)))


def preprocess_raters(
    dataset: NnunetDataset,
    plans: str,
    configuration: str,
    num_processes: int,
    console: Console,
) -> None:
    """Preprocess the masks of all raters for one configuration.

    Cases that are finished are skipped, so the work can be continued after an interrupt.
    """
    manager = PlansManager(str(dataset.preprocessed / f"{plans}.json"))
    identifier = manager.get_configuration(configuration).data_identifier
    source = dataset.preprocessed / identifier
    cases = sorted(nnUNetDatasetBlosc2.get_identifiers(str(source))) if source.is_dir() else []
    if not cases:
        raise UserError(
            f"{source} has no cases that nnU-Net 2.8 preprocessed: preprocess {configuration} again"
        )
    raters = sorted(path.name for path in dataset.raters.glob("*") if path.is_dir())
    if not raters:
        raise UserError(
            f"{dataset.raters} has no folders of raters: write the dataset with `semidice nnunet export`, or "
            "put the masks of each rater into ratersTr/RATER, named as in labelsTr"
        )
    target = rater_segmentations(dataset.preprocessed, identifier)
    if (target / _NAMES).is_file() and list(read_rater_names(target)) != raters:
        raise UserError(
            f"{target} was preprocessed for other raters than those in {dataset.raters}: remove it"
        )
    work = partial(_preprocess_case, dataset, plans, configuration, raters, target)
    num_processes = max(1, min(num_processes, len(cases)))
    with (
        progress_bar(console, f"raters, {configuration}", "cases", total=len(cases)) as bar,
        get_context("spawn").Pool(num_processes, initializer=end_with_parent) as pool,
    ):
        for _ in pool.imap_unordered(work, cases):
            bar.advance()
    write_text(target / _NAMES, json.dumps(raters, indent=1) + "\n")
    say(console, f"{configuration}: {len(raters)} raters")


def _preprocess_case(
    dataset: NnunetDataset, plans: str, configuration: str, raters: Sequence[str], target: Path, case: str
) -> None:
    path = target / f"{case}_seg.b2nd"
    if path.is_file():
        return
    manager = PlansManager(str(dataset.preprocessed / f"{plans}.json"))
    options = manager.get_configuration(configuration)
    own = nnUNetDatasetBlosc2(str(dataset.preprocessed / options.data_identifier), [case])
    _, label, _, properties = own.load_case(case)
    both = np.full((1 + len(raters), *label.shape[1:]), -1, dtype=np.int16)
    both[0] = label[0]
    ending = read_json(dataset.preprocessed / "dataset.json")["file_ending"]
    for number, rater in enumerate(raters, start=1):
        file = dataset.raters / rater / f"{case}{ending}"
        if file.is_file():
            both[number] = _on_grid(file, manager, options, properties, label.shape[1:])
    if both[1:].max() < 0:
        raise UserError(f"case {case} has no mask of any rater in {dataset.raters}")
    blocks, chunks = comp_blosc2_params(both.shape, tuple(options.patch_size), both.itemsize)
    with atomic_write(path) as temp_path:
        blosc2.asarray(both, urlpath=str(temp_path), chunks=chunks, blocks=blocks)


def _on_grid(
    path: Path,
    manager: PlansManager,
    options: ConfigurationManager,
    properties: dict[str, Any],
    shape: Sequence[int],
) -> np.ndarray:
    """A rater's mask, read, transposed, cropped and resampled as nnU-Net does it with the label."""
    mask, _ = manager.image_reader_writer_class().read_seg(str(path))
    mask = mask.transpose([0, *(axis + 1 for axis in manager.transpose_forward)])
    expected = tuple(properties["shape_before_cropping"])
    if mask.shape[1:] != expected:
        raise UserError(
            f"{path} has shape {mask.shape[1:]}, but its image {expected} (in nnU-Net's order of the axes)"
        )
    crop = tuple(slice(low, high) for low, high in properties["bbox_used_for_cropping"])
    spacing = [properties["spacing"][axis] for axis in manager.transpose_forward]
    # 2d keeps the distance of the slices
    target = [*spacing[: len(spacing) - len(options.spacing)], *options.spacing]
    mask = mask[(slice(None), *crop)].astype(np.float32)
    resampled: np.ndarray = options.resampling_fn_seg(mask, list(shape), spacing, target)[0]
    return resampled
