"""The public challenges QUBIQ, LiTS and KiTS19 in their published layouts.

The folders around the cases differ between copies, so cases are found at any depth, by their names.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..manifest import PrepareOptions
from .raw import RawDataset, RawScan, distinct_scans, natural_order, walk

# Soft tissue of the abdomen, level 40 and width 400 HU. Fat around a kidney (-100) is dark. Kidney tissue
# (30 without contrast agent, up to about 200 with it) is in the middle. Bone and air are clipped.
_ABDOMEN = (-160.0, 240.0)
_SIZE = (256, 256)


@dataclass(frozen=True)
class _QubiqFolder:
    """One folder of QUBIQ, and the name of its dataset, which gets a number if there are several tasks."""

    name: str
    num_tasks: int = 1
    channels: tuple[str, ...] = ("MR",)
    window: tuple[float, float] | None = None
    volumes: bool = False


# In the order of the paper's tables. The release does not say which sequence each channel of brain-tumor is,
# nor whether the values of volumes are HU, so these have no window. Volumes have their slices first.
_QUBIQ = {
    "prostate": _QubiqFolder("prostate", num_tasks=2),
    "brain-growth": _QubiqFolder("brain_growth"),
    "brain-tumor": _QubiqFolder("brain_tumor", num_tasks=3, channels=("MR1", "MR2", "MR3", "MR4")),
    "kidney": _QubiqFolder("kidney", channels=("CT",), window=_ABDOMEN),
    "pancreas": _QubiqFolder("pancreas", channels=("CT",), volumes=True),
    "pancreatic-lesion": _QubiqFolder("pancreatic_lesion", channels=("CT",), volumes=True),
}
_QUBIQ_CASE = re.compile(r"(case[_ ]?\d+)(?:-\d+)*", re.IGNORECASE)
_QUBIQ_IMAGE = re.compile(r"(?:case[\d_-]+_)?image\.nii(?:\.gz)?", re.IGNORECASE)
_QUBIQ_MASK = re.compile(r"(?:task(\d+)_|case[\d_-]+_)?seg(\d+)\.nii(?:\.gz)?", re.IGNORECASE)
_SPLITS = {"train": "training", "val": "validation", "test": "test"}
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)", re.IGNORECASE)


@dataclass
class _Collected:
    """Scans and problems of one dataset, collected while walking through the folders."""

    scans: list[RawScan] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_skipped: int = 0


def find_qubiq(raw: Path) -> list[RawDataset]:
    """One dataset per task: prostate_task1, prostate_task2, brain_growth, brain_tumor_task1 to 3, kidney.

    Also pancreas and pancreatic_lesion of the release of 2021, if they are present. Cases of Training and
    Validation are merged; the split becomes part of their name, because both count from 1. A rater without
    a file did not look at the case.
    """
    cases = [case for folder, files in walk(raw) if (case := _qubiq_case(raw, folder, files)) is not None]
    datasets = []
    for folder in _QUBIQ:
        of_folder = [case for case in cases if case.dataset == folder]
        tasks = {task for case in of_folder for task in case.masks or {1}}
        datasets += [_qubiq_dataset(raw, folder, task, of_folder) for task in sorted(tasks)]
    return datasets


@dataclass(frozen=True)
class _QubiqCase:
    """One case folder: its image files (there should be one), and its mask files by task and rater."""

    dataset: str
    name: str
    patient: str
    folder: Path
    images: Sequence[Path]
    masks: dict[int, dict[str, list[Path]]]
    is_test: bool


def _qubiq_case(raw: Path, folder: Path, files: Sequence[Path]) -> _QubiqCase | None:
    match = _QUBIQ_CASE.fullmatch(folder.name)
    images = [path for path in files if _QUBIQ_IMAGE.fullmatch(path.name)]
    masks: dict[int, dict[str, list[Path]]] = {}
    for path in files:
        if seg := _QUBIQ_MASK.fullmatch(path.name):
            by_rater = masks.setdefault(int(seg[1] or 1), {})
            by_rater.setdefault(f"seg{int(seg[2]):02d}", []).append(path)
    if match is None or not (images or masks):
        return None
    below = folder.relative_to(raw).parts[:-1]
    # raw may be the folder of the dataset, or Training in it
    above = raw.absolute().parts[-2:]
    outer = [re.sub("[_ ]", "-", part.lower()) for part in reversed([*above, *below])]
    dataset = next((part for part in outer if part in _QUBIQ), None)
    if dataset is None:
        return None
    splits = [_SPLITS[word[1].lower()] for part in reversed(below) if (word := _SPLIT.search(part))]
    prefix = f"{splits[0]}_" if splits else ""
    # pancreas has folders such as case3-2: the second scan of patient 3
    name, patient = f"{prefix}{folder.name}", f"{prefix}{match[1]}"
    is_test = bool(splits) and splits[0] == "test"
    return _QubiqCase(dataset, name, patient, folder, images, masks, is_test)


def _add_qubiq_case(collected: _Collected, case: _QubiqCase, task: int) -> None:
    by_rater = case.masks.get(task, {})
    masks = {rater: paths[0] for rater, paths in by_rater.items()}
    repeated = [paths for paths in [case.images, *by_rater.values()] if len(paths) > 1]
    if repeated:
        files = " and ".join(path.name for path in repeated[0])
        collected.problems.append(f"{case.folder} holds both {files}: keep one")
    elif not case.images and masks:
        collected.problems.append(
            f"{case.folder} holds masks but no image.nii.gz: add it, or remove the folder"
        )
    elif not masks and case.is_test:
        collected.num_skipped += 1
    elif not masks:
        expected = f"task{task:02d}_segNN.nii.gz"
        collected.problems.append(
            f"{case.folder} holds no mask {expected} of any rater: add one, or remove the folder"
        )
    else:
        collected.scans.append(RawScan(case.name, case.patient, (case.images[0],), masks))


def _qubiq_dataset(raw: Path, folder: str, task: int, cases: Sequence[_QubiqCase]) -> RawDataset:
    entry = _QUBIQ[folder]
    name = entry.name if entry.num_tasks == task == 1 else f"{entry.name}_task{task}"
    collected = _Collected()
    for case in cases:
        _add_qubiq_case(collected, case, task)
    scans, problems = distinct_scans(collected.scans, collected.problems)
    raters = {rater for scan in scans for rater in scan.masks}
    slicing: dict[str, Any] = {"slices": "all", "slice_axis": 0} if entry.volumes else {}
    return RawDataset(
        name=name,
        source="qubiq",
        root=raw,
        class_names=("background", name),
        raters=tuple(sorted(raters, key=natural_order)),
        channels=entry.channels,
        scans=scans,
        options=PrepareOptions(size=_SIZE, window=entry.window, **slicing),
        problems=problems,
        num_skipped=collected.num_skipped,
        num_axes=3 if entry.volumes else 2,
    )


def find_lits(raw: Path) -> list[RawDataset]:
    """volume-N.nii and segmentation-N.nii, or .nii.gz: tumour (2) against liver (1) and the rest (0)."""
    files: dict[str, dict[int, list[Path]]] = {"volume": {}, "segmentation": {}}
    for _, paths in walk(raw):
        for path in paths:
            if match := re.fullmatch(r"(volume|segmentation)-(\d+)\.nii(?:\.gz)?", path.name, re.IGNORECASE):
                files[match[1].lower()].setdefault(int(match[2]), []).append(path)
    collected = _Collected()
    for number in sorted(files["volume"].keys() | files["segmentation"].keys()):
        images, masks = files["volume"].get(number, []), files["segmentation"].get(number, [])
        _add_volume(collected, f"volume-{number}", images, masks, expected=("volume", "segmentation"))
    return _tumour_dataset("lits", raw, collected, window=(-60.0, 140.0), slice_axis=2)


def find_kits(raw: Path) -> list[RawDataset]:
    """case_NNNNN/imaging.nii.gz and segmentation.nii.gz: tumour (2) against kidney (1) and the rest (0).

    Cases without a segmentation, of which the release has 90, are counted and skipped.
    """
    collected = _Collected()
    for folder, paths in walk(raw):
        if not re.fullmatch(r"case_\d+", folder.name, re.IGNORECASE):
            continue
        images, masks = (
            [path for path in paths if re.fullmatch(rf"{kind}\.nii(?:\.gz)?", path.name, re.IGNORECASE)]
            for kind in ("imaging", "segmentation")
        )
        if images and not masks:
            collected.num_skipped += 1
        elif images or masks:
            _add_volume(collected, folder.name.lower(), images, masks, expected=("imaging", "segmentation"))
    return _tumour_dataset("kits", raw, collected, window=(-200.0, 300.0), slice_axis=0)


def _add_volume(
    collected: _Collected,
    name: str,
    images: Sequence[Path],
    masks: Sequence[Path],
    *,
    expected: tuple[str, str],
) -> None:
    for paths in (images, masks):
        if len(paths) > 1:
            files = " and ".join(str(path) for path in paths)
            collected.problems.append(f"{name} occurs twice, as {files}: keep one")
            return
    if images and masks:
        collected.scans.append(RawScan(name, name, (images[0],), {"reference": masks[0]}))
        return
    path, missing = (images[0], expected[1]) if images else (masks[0], expected[0])
    collected.problems.append(f"{path} has no {missing} next to it: add it, or remove the file")


def _tumour_dataset(
    source: str, raw: Path, collected: _Collected, *, window: tuple[float, float], slice_axis: int
) -> list[RawDataset]:
    scans, problems = distinct_scans(collected.scans, collected.problems)
    return [
        RawDataset(
            source=source,
            root=raw,
            class_names=("background", "tumour"),
            channels=("CT",),
            scans=scans,
            options=PrepareOptions(
                size=(512, 512), window=window, slices="foreground", slice_axis=slice_axis
            ),
            class_of_value={0: 0, 1: 0, 2: 1},
            problems=problems,
            num_skipped=collected.num_skipped,
            num_axes=3,
        )
    ]
