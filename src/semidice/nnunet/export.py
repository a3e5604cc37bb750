"""A prepared dataset as a raw dataset of nnU-Net, with the masks of every rater beside its label.

An image becomes one PNG per channel, a volume one NIfTI per channel with the affine of the scan. Intensities
are the stored ones, and nnU-Net normalises each image by its mean and standard deviation: its rule for CT
needs Hounsfield units, which a prepared image has lost. The label of nnU-Net is the majority of the raters.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from PIL import Image

from ..data.dataset import Case, Dataset
from ..labels.raters import read_raters
from ..paths import atomic_write, check_name, write_text
from ..runs.run import manifest_digest
from .folders import ExportRecord, NnunetDataset


def export_dataset(
    dataset: Dataset, target: NnunetDataset, *, on_case: Callable[[], object] = lambda: None
) -> None:
    """Write imagesTr, labelsTr, ratersTr and dataset.json; a ValueError if the folder is not empty.

    A dataset whose export was interrupted is written again. semidice.json is written last.
    """
    if target.record.is_file():
        raise ValueError(f"{target.raw} is already exported: choose another name, or remove the folder")
    is_volume = len(dataset.cases[0].shape) == 3
    if dataset.has_slices:
        raise ValueError(
            f"{dataset.folder.path} has volumes that were cut into slices, but nnU-Net needs them whole: "
            "prepare it again with --slices none"
        )
    raters = [check_name(rater) for rater in dataset.manifest.raters]
    for folder in ("imagesTr", "labelsTr", *(f"ratersTr/{rater}" for rater in raters)):
        (target.raw / folder).mkdir(parents=True, exist_ok=True)
    write = _write_volume if is_volume else _write_picture
    ending = ".nii.gz" if is_volume else ".png"
    for number, case in enumerate(dataset.cases):
        for channel, image in enumerate(dataset.stored("images", number)):
            # stored values are not negative, and PNG has no int16
            pixels = image.astype(np.uint16) if image.dtype == np.int16 else np.array(image)
            write(target.raw / "imagesTr" / f"{case.name}_{channel:04d}{ending}", pixels, case)
        masks = dataset.masks(number)
        present = dataset.present[number]
        votes = read_raters(
            torch.from_numpy(masks)[None],
            dataset.num_classes,
            torch.from_numpy(present)[None],
            batched=True,
        )
        label = votes.majority()[0].numpy().astype(np.uint8)
        write(target.raw / "labelsTr" / f"{case.name}{ending}", label, case)
        for rater, mask, looked in zip(raters, masks, present, strict=True):
            if looked:
                write(target.raters / rater / f"{case.name}{ending}", mask, case)
        on_case()
    manifest = dataset.manifest
    description: dict[str, Any] = {
        # z-score of each image, whatever the modality
        "channel_names": {str(number): f"zscore_{name}" for number, name in enumerate(manifest.channels)},
        "labels": {name: number for number, name in enumerate(_class_names(manifest.class_names))},
        "numTraining": len(dataset),
        "file_ending": ending,
    }
    if is_volume:
        # reads every affine; nnU-Net's default refuses those whose axes are not orthogonal
        description["overwrite_image_reader_writer"] = "NibabelIO"
    write_text(target.raw / "dataset.json", json.dumps(description, indent=1) + "\n")
    target.write_record(
        ExportRecord(
            dataset=str(dataset.folder.path.absolute()),
            manifest_sha256=manifest_digest(manifest),
            raters=tuple(raters),
            patients={case.name: case.patient for case in dataset.cases},
        )
    )


def _class_names(names: tuple[str, ...]) -> list[str]:
    """nnU-Net insists on the name background for class 0, and gives the name ignore a meaning."""
    return [
        "background",
        *(f"class {name}" if name in ("background", "ignore") else name for name in names[1:]),
    ]


def _write_picture(path: Path, values: np.ndarray, _: Case) -> None:
    with atomic_write(path) as temp_path:
        Image.fromarray(values).save(temp_path, format="PNG")


def _write_volume(path: Path, values: np.ndarray, case: Case) -> None:
    affine = np.eye(4) if case.scan.affine is None else np.array(case.scan.affine)
    image: Any = nibabel.Nifti1Image(values, affine)  # type: ignore[no-untyped-call]
    with atomic_write(path) as temp_path:
        # mtime 0: the same volume gives the same bytes
        temp_path.write_bytes(gzip.compress(image.to_bytes(), compresslevel=1, mtime=0))
