"""Small raw file trees in the layouts of `data.sources`: seeded, with a bright blob inside each mask.

They have the irregularities of the published files: singleton axes, channels as a third axis, masks of 255,
a missing file of a rater, an empty mask, volumes in batch folders, both .nii and .nii.gz. Helpers for the
datasets found in them are at the end.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

from semidice.data.sources import find_datasets
from semidice.data.sources.raw import RawDataset, RawScan, ScanArrays

# real data and the paper's figures, if they are present
SHARED = Path(__file__).parents[3] / "shared"
AFFINE = np.diag([0.7, 0.8, 2.5, 1.0])
SIZE = (40, 36)
# number of slices of a volume; a blob covers the middle ones
DEPTH = 6
QUBIQ_RATERS = {"brain-growth": 7, "brain-tumor": 3, "kidney": 3, "prostate": 6}
QUBIQ_TASKS = {"brain-growth": 1, "brain-tumor": 3, "kidney": 1, "prostate": 2}


def ellipsoids(
    seed: int, space: Sequence[int], *, num_raters: int = 1, num_classes: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Intensities (*space) float32 in about [0, 1], and class maps (R, *space) uint8 that hold all classes.

    Classes are nested, class 1 outermost, and each is brighter than the one around it. Raters draw areas of
    different size.
    """
    rng = np.random.default_rng([seed, len(space)])
    grid = np.stack(np.meshgrid(*(np.arange(length) for length in space), indexing="ij"), axis=-1)
    centre = (np.array(space) - 1) / 2 + rng.uniform(-0.08, 0.08, len(space)) * space
    distance = np.sqrt((((grid - centre) / (np.array(space) * 0.38)) ** 2).sum(-1))
    image = 0.2 + rng.normal(0, 0.02, tuple(space))
    masks = np.zeros((num_raters, *space), dtype=np.uint8)
    for label in range(1, num_classes):
        radius = 1 - (label - 1) / num_classes
        image[distance < radius] += 0.6 / (num_classes - 1)
        for rater in range(num_raters):
            masks[rater][distance < radius * (1 + 0.06 * (rater - (num_raters - 1) / 2))] = label
    return image.astype(np.float32), masks


def write_nifti(path: Path, array: np.ndarray, affine: np.ndarray | None = AFFINE) -> Path:
    """Write the array as NIfTI in its own dtype and make the folders; None declares no affine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(array, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)
    return path


def write_picture(path: Path, array: np.ndarray) -> Path:
    """Write the array as PNG or TIFF by the path's suffix; a TIFF of three axes has one page per slice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if array.ndim == 3 and path.suffix.lower() in (".tif", ".tiff"):
        first, *others = (Image.fromarray(page) for page in array)
        first.save(path, save_all=True, append_images=others)
    else:
        Image.fromarray(array).save(path)
    return path


def make_qubiq(
    root: Path,
    *,
    datasets: Sequence[str] = tuple(QUBIQ_RATERS),
    num_cases: int = 6,
    layout: str = "outer",
    size: tuple[int, int] = SIZE,
) -> Path:
    """QUBIQ 2020; the last two cases are for validation and are numbered from 1 again.

    layout: "outer" (training_data_v3_QC/brain-growth/Training/case01), "inner" (brain-growth/Training/case01)
    or "flat" (brain-growth/case01, numbered continuously).
    brain-tumor has 4 channels last; images of kidney and masks of brain-growth have a singleton axis;
    prostate's masks hold 255, and its cases differ in size. In the first case of brain-tumor, rater 2 has no
    file for task 1 and an empty mask for task 2.
    """
    for dataset_number, dataset in enumerate(datasets):
        for number in range(num_cases):
            validation = number >= num_cases - 2
            folder = {
                "outer": root
                / ("validation_data_qubiq2021_QC" if validation else "training_data_v3_QC")
                / dataset
                / ("Validation" if validation else "Training"),
                "inner": root / dataset / ("Validation" if validation else "Training"),
                "flat": root / dataset,
            }[layout]
            number_in_split = number - (num_cases - 2) if validation and layout != "flat" else number
            seed = 100 * dataset_number + number
            _write_qubiq_case(folder / f"case{number_in_split + 1:02d}", dataset, number, seed, size)
    return root


def _write_qubiq_case(folder: Path, dataset: str, number: int, seed: int, size: tuple[int, int]) -> None:
    num_tasks, num_raters = QUBIQ_TASKS[dataset], QUBIQ_RATERS[dataset]
    if dataset == "prostate" and number % 2:
        size = (size[0] + 8, size[1] + 4)
    image, masks = ellipsoids(seed, size, num_raters=num_raters, num_classes=num_tasks + 1)
    image = (image * 400 - 150).astype(np.int16)[..., None] if dataset == "kidney" else image * 1000
    if dataset == "brain-tumor":
        image = np.stack([image, image * 0.5, 900 - image, image + 10], axis=-1)
    write_nifti(folder / "image.nii.gz", image)
    for task in range(1, num_tasks + 1):
        for rater in range(1, num_raters + 1):
            mask = (masks[rater - 1] >= task).astype(np.uint8)
            if dataset == "prostate":
                mask = mask * np.uint8(255)
            if dataset == "brain-growth":
                mask = mask[..., None]
            if dataset == "brain-tumor" and number == 0 and rater == 2:
                if task == 1:
                    continue
                if task == 2:
                    mask = np.zeros_like(mask)
            write_nifti(folder / f"task{task:02d}_seg{rater:02d}.nii.gz", mask)


def make_lits(root: Path, *, num_cases: int = 5, size: tuple[int, int] = SIZE) -> Path:
    """LiTS in two batch folders, liver 1 and tumour 2; the last number is 10, even ones are .nii.gz."""
    for case in range(num_cases):
        number = 10 if case == num_cases - 1 else case
        image, masks = ellipsoids(1000 + case, (*size, DEPTH), num_classes=3)
        folder = root / f"Training Batch {1 + case % 2}"
        suffix = ".nii.gz" if number % 2 == 0 else ".nii"
        write_nifti(folder / f"volume-{number}{suffix}", (image * 300 - 100).astype(np.int16))
        write_nifti(folder / f"segmentation-{number}{suffix}", masks[0])
    return root


def make_kits(
    root: Path, *, num_cases: int = 5, num_unlabelled: int = 1, size: tuple[int, int] = SIZE
) -> Path:
    """KiTS19, slices along the first axis; kidney 1 and tumour 2; the last cases have no segmentation."""
    for number in range(num_cases + num_unlabelled):
        image, masks = ellipsoids(2000 + number, (DEPTH, *size), num_classes=3)
        folder = root / f"case_{number:05d}"
        write_nifti(
            folder / "imaging.nii.gz", (image * 400 - 150).astype(np.int16), np.diag([2.5, 0.7, 0.8, 1])
        )
        if number < num_cases:
            write_nifti(folder / "segmentation.nii.gz", masks[0], np.diag([2.5, 0.7, 0.8, 1]))
    return root


def make_folder(
    root: Path,
    *,
    num_cases: int = 6,
    num_raters: int = 3,
    num_classes: int = 2,
    suffix: str = ".png",
    size: tuple[int, int] = SIZE,
    volumes: bool = False,
    high: int = 255,
    patients: bool = False,
    masks_folder: bool = False,
) -> Path:
    """A user's folder: images/caseN and raters/NAME/caseN, or masks/caseN for one rater; raters are a, b, ...

    high: the foreground value in masks of two classes. patients: write a cases.csv in which each patient
    has two cases. Volumes have their slices last as NIfTI and first as TIFF. With two raters or more
    and three cases or more, the last rater has no file for case 2 and an empty mask for case 3.
    """
    is_nifti = suffix.startswith(".nii")
    space = size
    if volumes:
        space = (*size, DEPTH) if is_nifti else (DEPTH, *size)
    for number in range(1, num_cases + 1):
        image, masks = ellipsoids(3000 + number, space, num_raters=num_raters, num_classes=num_classes)
        if num_classes == 2:
            masks = masks * np.uint8(high)
        write = write_nifti if is_nifti else write_picture
        pixels = image * 1000 if is_nifti else np.clip(image * 255, 0, 255).astype(np.uint8)
        write(root / "images" / f"case{number}{suffix}", pixels)
        for rater in range(num_raters):
            last = num_raters > 1 and rater == num_raters - 1
            if last and number == 2 and num_cases > 2:
                continue
            mask = np.zeros_like(masks[rater]) if last and number == 3 else masks[rater]
            folder = root / "masks" if masks_folder else root / "raters" / chr(ord("a") + rater)
            write(folder / f"case{number}{suffix}", mask)
    if patients:
        rows = [f"case{number},patient{(number + 1) // 2}" for number in range(1, num_cases + 1)]
        (root / "cases.csv").write_text("\n".join(["case,patient", *rows]) + "\n")
    return root


def make_lidc(root: Path, *, num_cases: int = 6, size: tuple[int, int] = SIZE) -> Path:
    """LIDC as PNG slices: raters 1 to 4, and a cases.csv in which each patient has two nodules."""
    rows = ["case,patient,nodule,slice"]
    for number in range(num_cases):
        patient = f"LIDC-IDRI-{number // 2 + 1:04d}"
        case = f"{patient}_nodule-{number % 2}"
        image, masks = ellipsoids(4000 + number, size, num_raters=4)
        write_picture(root / "images" / f"{case}.png", np.clip(image * 255, 0, 255).astype(np.uint8))
        for rater in range(4):
            write_picture(root / "raters" / str(rater + 1) / f"{case}.png", masks[rater] > 0)
        rows.append(f"{case},{patient},{number % 2},3")
    (root / "cases.csv").write_text("\n".join(rows) + "\n")
    return root


def make_decathlon(
    root: Path, *, num_cases: int = 5, num_channels: int = 1, size: tuple[int, int] = SIZE
) -> Path:
    """A task of the Medical Segmentation Decathlon with classes 1 and 2; macOS left a file in each folder."""
    channels = ["FLAIR", "T1w", "t1gd", "T2w"][:num_channels] if num_channels > 1 else ["MRI"]
    training = []
    for number in range(1, num_cases + 1):
        image, masks = ellipsoids(5000 + number, (*size, DEPTH), num_classes=3)
        if num_channels > 1:
            image = np.stack([image + channel for channel in range(num_channels)], axis=-1)
        name = f"brain_{number:03d}.nii.gz"
        write_nifti(root / "imagesTr" / name, image * 100)
        write_nifti(root / "labelsTr" / name, masks[0])
        training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    for folder in ("imagesTr", "labelsTr"):
        (root / folder / "._brain_001.nii.gz").write_bytes(b"Mac OS X leftover")
    listing = {
        "name": "Brain",
        "modality": {str(number): name for number, name in enumerate(channels)},
        "labels": {"0": "background", "1": "Anterior", "2": "Posterior"},
        "numTraining": num_cases,
        "training": training,
        "test": [],
    }
    (root / "dataset.json").write_text(json.dumps(listing))
    return root


def make_nnunet(
    root: Path,
    *,
    num_cases: int = 5,
    channels: Sequence[str] = ("T1", "FLAIR"),
    suffix: str = ".nii.gz",
    size: tuple[int, int] = SIZE,
) -> Path:
    """A raw dataset of nnU-Net, version 2: one file per channel, classes 1 and 2, a test image without label.

    NIfTI files are volumes with their slices last, pictures are single images. Channel k mixes 1 - k / 4 of
    the image with k / 4 of its inverse.
    """
    is_nifti = suffix.startswith(".nii")
    write = write_nifti if is_nifti else write_picture
    for number in range(1, num_cases + 2):
        image, masks = ellipsoids(6000 + number, (*size, DEPTH) if is_nifti else size, num_classes=3)
        folder, case = root / ("imagesTr" if number <= num_cases else "imagesTs"), f"brain_{number:03d}"
        for channel in range(len(channels)):
            mixed = image * (1 - channel / 4) + (1 - image) * channel / 4
            values = mixed * 1000 if is_nifti else np.clip(mixed * 255, 0, 255).astype(np.uint8)
            write(folder / f"{case}_{channel:04d}{suffix}", values)
        if number <= num_cases:
            write(root / "labelsTr" / f"{case}{suffix}", masks[0])
    header = {
        "channel_names": {str(number): name for number, name in enumerate(channels)},
        "labels": {"background": 0, "oedema": 1, "core": 2},
        "numTraining": num_cases,
        "file_ending": suffix,
    }
    (root / "dataset.json").write_text(json.dumps(header))
    return root


def read_scan(dataset: RawDataset, scan: RawScan) -> ScanArrays:
    """Read a scan as its source does."""
    return dataset.read(dataset, scan)


def find_only_dataset(source: str, raw: Path, **options: object) -> RawDataset:
    """The only dataset that a source finds; it must have no problems."""
    (dataset,) = find_datasets(source, raw, **options)
    assert dataset.problems == ()
    return dataset


def find_problems(source: str, raw: Path) -> list[str]:
    """The problems of all scans that a source finds."""
    return [problem for dataset in find_datasets(source, raw) for problem in dataset.problems]


def scan_names(dataset: RawDataset) -> list[str]:
    """The names of the scans."""
    return [scan.name for scan in dataset.scans]
