"""A prepared dataset as a raw dataset of nnU-Net, with the masks of every rater beside its label.

An image becomes one PNG per channel, a volume one NIfTI per channel with the affine of the scan. The label of
nnU-Net is the majority of the raters. Intensities are those of the raw files, which are read again, because
nnU-Net predicts raw scans: a prepared image was clipped and scaled. Where that is not possible they are the
stored ones, and a warning says so.
"""

import gzip
import json
from collections.abc import Mapping
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
from ..data.manifest import manifest_digest
from ..data.sources import find_datasets
from ..data.sources.raw import RawDataset, RawScan
from ..errors import UserError
from ..labels.raters import read_raters
from ..paths import atomic_write, check_name, write_text
from .folders import Export, NnunetDataset


def export(data: Path, target: NnunetDataset, console: Console, *, raw: Path | None = None) -> None:
    """Write imagesTr, labelsTr, ratersTr and dataset.json of a prepared dataset.

    raw: its raw folder, if it was moved. A finished export is not written again: dataset.json comes last.
    """
    dataset, header = Dataset(data), target.raw / "dataset.json"
    if header.is_file():
        raise UserError(f"{target.raw} is already exported: choose another name, or remove the folder")
    if dataset.has_slices:
        raise UserError(
            f"{data} has volumes that were cut into slices, but nnU-Net needs them whole: prepare it again "
            "with --slices none"
        )
    is_volume = len(dataset.cases[0].shape) == 3
    scans: dict[str, tuple[RawDataset, RawScan]] = {}
    try:
        scans = _raw_scans(dataset, raw, whole_numbers=not is_volume)
    except UserError as error:
        if raw is not None:
            raise
        say(
            console,
            f"warning: nnU-Net gets the clipped and scaled intensities of {data}, because {error}. "
            "nnUNetv2_predict is right only for new scans with such intensities",
        )
    manifest = dataset.manifest
    raters = [check_name(rater) for rater in manifest.raters]
    for folder in ("imagesTr", "labelsTr", *(f"ratersTr/{rater}" for rater in raters)):
        (target.raw / folder).mkdir(parents=True, exist_ok=True)
    ending = ".nii.gz" if is_volume else ".png"
    with progress_bar(console, "exporting", "cases", total=len(dataset)) as bar:
        for number in range(len(dataset)):
            _write_case(dataset, number, target, ending, scans)
            bar.advance()
    # nnU-Net insists on the name background for class 0, and gives the name ignore a meaning
    classes = [f"class {name}" if name in ("background", "ignore") else name for name in manifest.class_names]
    patients = {case.name: case.patient for case in dataset.cases}
    exported = Export(str(dataset.folder.path.absolute()), manifest_digest(manifest), patients)
    description: dict[str, Any] = {
        # nnU-Net has a rule of its own for CT, which needs Hounsfield units; else z-score of each image
        "channel_names": {
            str(number): "CT" if scans and name.upper() == "CT" else f"zscore_{name}"
            for number, name in enumerate(manifest.channels)
        },
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


def _raw_scans(
    dataset: Dataset, moved: Path | None, *, whole_numbers: bool
) -> dict[str, tuple[RawDataset, RawScan]]:
    """The raw scan of each case, by name; a UserError says why its intensities cannot be read again.

    whole_numbers: a PNG holds nothing else.
    """
    manifest, folder = dataset.manifest, moved or Path(dataset.manifest.raw_folder)
    if any(case.shape != case.scan.raw_shape for case in dataset.cases):
        raise UserError("its images were resized")
    if not manifest.raw_folder:
        raise UserError("it was not made of files")
    if not folder.is_dir():
        raise UserError(f"there is no {folder} (--raw names a raw folder that was moved)")
    found = find_datasets(manifest.source, folder)
    of_name = [raw for raw in found if raw.name in ("", dataset.folder.path.name)] or found[:1]
    scans = {scan.name: (raw, scan) for raw in of_name for scan in raw.scans}
    missing = [case.name for case in dataset.cases if case.name not in scans]
    if missing:
        raise UserError(f"{folder} has no scan {missing[0]}")
    if whole_numbers and not _fits_png(_raw_image(dataset.cases[0], scans)):
        raise UserError(f"{folder} has pictures that are no PNG of whole numbers")
    return scans


def _raw_image(case: Case, scans: Mapping[str, tuple[RawDataset, RawScan]]) -> np.ndarray:
    """Raw intensities (channels, *space); a UserError if a file of the scan has changed."""
    raw, scan = scans[case.name]
    arrays = raw.read(raw, scan)
    if dict(arrays.inputs) != case.scan.inputs:
        raise UserError(f"the files of {case.name} in {raw.root} have changed: prepare the dataset again")
    return arrays.image


def _fits_png(image: np.ndarray) -> bool:
    return bool((image % 1 == 0).all() and image.min() >= 0 and image.max() < 2**16)


def _write_case(
    dataset: Dataset,
    number: int,
    target: NnunetDataset,
    ending: str,
    scans: Mapping[str, tuple[RawDataset, RawScan]],
) -> None:
    """Images, the majority as nnU-Net's label, and the masks of the raters who looked at the case."""
    case, masks, present = dataset.cases[number], dataset.masks(number), dataset.present[number]
    write = _write_volume if ending == ".nii.gz" else _write_picture
    images = _raw_image(case, scans) if scans else dataset.stored("images", number)
    for channel, image in enumerate(images):
        # stored values are not negative, and PNG has neither int16 nor float32
        has_no_png = ending == ".png" and image.dtype != np.uint8
        pixels = image.astype(np.uint16) if has_no_png or image.dtype == np.int16 else np.array(image)
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
