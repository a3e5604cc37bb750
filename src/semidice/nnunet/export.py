"""A prepared dataset as a raw dataset of nnU-Net, with the masks of every rater beside its label.

An image becomes one PNG per channel, a volume one NIfTI per channel with the affine of the scan. Intensities
are the stored ones, and nnU-Net normalises each image by its mean and standard deviation: its rule for CT
needs Hounsfield units, which a prepared image has lost. The label of nnU-Net is the majority of the raters.
"""

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from PIL import Image
from rich.console import Console

from ..console import progress_bar, say
from ..data.dataset import Case, Dataset
from ..errors import UserError
from ..labels.raters import read_raters
from ..paths import atomic_write, check_name, write_text
from ..runs.run import manifest_digest
from .folders import Export, NnunetDataset


def export(data: Path, target: NnunetDataset, console: Console) -> None:
    """Write imagesTr, labelsTr, ratersTr and dataset.json of a prepared dataset.

    An export that was interrupted is written again, a finished one is not: dataset.json is written last.
    """
    dataset, header = Dataset(data), target.raw / "dataset.json"
    if header.is_file():
        raise UserError(f"{target.raw} is already exported: choose another name, or remove the folder")
    if dataset.has_slices:
        raise UserError(
            f"{data} has volumes that were cut into slices, but nnU-Net needs them whole: prepare it again "
            "with --slices none"
        )
    manifest = dataset.manifest
    raters = [check_name(rater) for rater in manifest.raters]
    for folder in ("imagesTr", "labelsTr", *(f"ratersTr/{rater}" for rater in raters)):
        (target.raw / folder).mkdir(parents=True, exist_ok=True)
    is_volume = len(dataset.cases[0].shape) == 3
    ending = ".nii.gz" if is_volume else ".png"
    with progress_bar(console, "exporting", "cases", total=len(dataset)) as bar:
        for number in range(len(dataset)):
            _write_case(dataset, number, target, ending)
            bar.advance()
    # nnU-Net insists on the name background for class 0, and gives the name ignore a meaning
    classes = [f"class {name}" if name in ("background", "ignore") else name for name in manifest.class_names]
    patients = {case.name: case.patient for case in dataset.cases}
    exported = Export(str(dataset.folder.path.absolute()), manifest_digest(manifest), patients)
    description: dict[str, Any] = {
        # z-score of each image, whatever the modality
        "channel_names": {str(number): f"zscore_{name}" for number, name in enumerate(manifest.channels)},
        "labels": {name: number for number, name in enumerate(["background", *classes[1:]])},
        "numTraining": len(dataset),
        "file_ending": ending,
        "semidice": asdict(exported),
    }
    if is_volume:
        # reads every affine; nnU-Net's default refuses those whose axes are not orthogonal
        description["overwrite_image_reader_writer"] = "NibabelIO"
    write_text(header, json.dumps(description, indent=1) + "\n")
    say(console, f"wrote {len(dataset)} cases of {len(raters)} raters to {target.raw}")
    say(console, f"next: {target.command('preprocess')}")


def _write_case(dataset: Dataset, number: int, target: NnunetDataset, ending: str) -> None:
    """Images, the majority as nnU-Net's label, and the masks of the raters who looked at the case."""
    case, masks, present = dataset.cases[number], dataset.masks(number), dataset.present[number]
    write = _write_volume if ending == ".nii.gz" else _write_picture
    for channel, image in enumerate(dataset.stored("images", number)):
        # stored values are not negative, and PNG has no int16
        pixels = image.astype(np.uint16) if image.dtype == np.int16 else np.array(image)
        write(target.raw / "imagesTr" / f"{case.name}_{channel:04d}{ending}", pixels, case)
    votes = read_raters(
        torch.from_numpy(masks), dataset.num_classes, torch.from_numpy(present), batched=False
    )
    label = votes.majority()[0].numpy().astype(np.uint8)
    write(target.raw / "labelsTr" / f"{case.name}{ending}", label, case)
    for rater, mask, looked in zip(dataset.manifest.raters, masks, present, strict=True):
        if looked:
            write(target.raters / rater / f"{case.name}{ending}", mask, case)


def _write_picture(path: Path, values: np.ndarray, _: Case) -> None:
    with atomic_write(path) as temp_path:
        Image.fromarray(values).save(temp_path, format="PNG")


def _write_volume(path: Path, values: np.ndarray, case: Case) -> None:
    affine = np.eye(4) if case.scan.affine is None else np.array(case.scan.affine)
    image: Any = nibabel.Nifti1Image(values, affine)  # type: ignore[no-untyped-call]
    with atomic_write(path) as temp_path:
        # mtime 0: the same volume gives the same bytes
        temp_path.write_bytes(gzip.compress(image.to_bytes(), compresslevel=1, mtime=0))
