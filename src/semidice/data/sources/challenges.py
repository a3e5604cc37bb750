"""The public challenges QUBIQ, LiTS and KiTS19 in their published layouts.

The folders around the cases differ between copies, so cases are found at any depth, by their names.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..manifest import PrepareOptions
from .raw import ALL_CHANNELS, CaseFiles, RawDataset, match, natural_order, walk
from .scan import read_scan

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
_NIFTI = r"\.nii(?:\.gz)?"
_QUBIQ_CASE = re.compile(r"(case[_ ]?\d+)(?:-\d+)*", re.IGNORECASE)
_QUBIQ_IMAGE = re.compile(rf"(?:case[\d_-]+_)?image{_NIFTI}", re.IGNORECASE)
_QUBIQ_MASK = re.compile(rf"(?:task(\d+)_|case[\d_-]+_)?seg(\d+){_NIFTI}", re.IGNORECASE)
_SPLITS = {"train": "training", "val": "validation", "test": "test"}
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)", re.IGNORECASE)


class _QubiqCase(NamedTuple):
    """One case folder of a dataset: its images (there should be one), and its masks by task and rater."""

    dataset: str
    files: CaseFiles
    masks: dict[int, dict[str, list[Path]]]


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


def _qubiq_case(raw: Path, folder: Path, files: Sequence[Path]) -> _QubiqCase | None:
    named = _QUBIQ_CASE.fullmatch(folder.name)
    images = [path for path in files if _QUBIQ_IMAGE.fullmatch(path.name)]
    masks: dict[int, dict[str, list[Path]]] = {}
    for path in files:
        if seg := _QUBIQ_MASK.fullmatch(path.name):
            by_rater = masks.setdefault(int(seg[1] or 1), {})
            by_rater.setdefault(f"seg{int(seg[2]):02d}", []).append(path)
    if named is None or not (images or masks):
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
    channels = {ALL_CHANNELS: images} if images else {}
    name, patient = f"{prefix}{folder.name}", f"{prefix}{named[1]}"
    found = CaseFiles(name, patient, f"{folder}/image.nii.gz", "", channels)
    found.may_lack_mask = splits[:1] == ["test"]
    return _QubiqCase(dataset, found, masks)


def _qubiq_dataset(raw: Path, folder: str, task: int, cases: Sequence[_QubiqCase]) -> RawDataset:
    entry = _QUBIQ[folder]
    slicing: dict[str, Any] = {"slices": "all", "slice_axis": 0} if entry.volumes else {}
    name = entry.name if entry.num_tasks == task == 1 else f"{entry.name}_task{task}"
    expected = f"task{task:02d}_segNN.nii.gz of any rater"
    found = [replace(case.files, masks=case.masks.get(task, {}), mask_at=expected) for case in cases]
    return _dataset(
        raw,
        # a case with neither image nor masks of this task belongs to another task
        [case for case in found if case.channels or case.masks],
        name=name,
        source="qubiq",
        class_names=("background", name),
        channels=entry.channels,
        options=PrepareOptions(size=_SIZE, window=entry.window, **slicing),
        num_axes=3 if entry.volumes else 2,
    )


def find_lits(raw: Path) -> list[RawDataset]:
    """volume-N.nii and segmentation-N.nii, or .nii.gz: tumour (2) against liver (1) and the rest (0)."""
    cases: dict[int, CaseFiles] = {}
    for _, paths in walk(raw):
        for path in paths:
            named = re.fullmatch(rf"(volume|segmentation)-(\d+){_NIFTI}", path.name, re.IGNORECASE)
            if named is None:
                continue
            name, number = f"volume-{int(named[2])}", int(named[2])
            files = CaseFiles(name, name, f"{name}.nii", f"segmentation-{number}.nii next to it")
            files = cases.setdefault(number, files)
            _add(files, path, is_image=named[1].lower() == "volume")
    return [_tumours("lits", raw, cases.values(), window=(-60.0, 140.0), slice_axis=2)]


def find_kits(raw: Path) -> list[RawDataset]:
    """case_NNNNN/imaging.nii.gz and segmentation.nii.gz: tumour (2) against kidney (1) and the rest (0).

    Cases without a segmentation, of which the release has 90, are counted and skipped.
    """
    cases: dict[str, CaseFiles] = {}
    for folder, paths in walk(raw):
        for path in paths if re.fullmatch(r"case_\d+", folder.name, re.IGNORECASE) else ():
            named = re.fullmatch(rf"(imaging|segmentation){_NIFTI}", path.name, re.IGNORECASE)
            if named is not None:
                name = folder.name.lower()
                files = CaseFiles(name, name, f"{folder}/imaging.nii.gz", f"{folder}/segmentation.nii.gz")
                _add(cases.setdefault(name, files), path, is_image=named[1].lower() == "imaging")
                cases[name].may_lack_mask = True
    return [_tumours("kits", raw, cases.values(), window=(-200.0, 300.0), slice_axis=0)]


def _add(files: CaseFiles, path: Path, *, is_image: bool) -> None:
    if is_image:
        files.channels.setdefault(ALL_CHANNELS, []).append(path)
    else:
        files.masks.setdefault("reference", []).append(path)


def _tumours(
    source: str,
    raw: Path,
    cases: Iterable[CaseFiles],
    *,
    window: tuple[float, float],
    slice_axis: int,
) -> RawDataset:
    options = PrepareOptions(size=(512, 512), window=window, slices="foreground", slice_axis=slice_axis)
    return _dataset(
        raw,
        cases,
        source=source,
        class_names=("background", "tumour"),
        channels=("CT",),
        options=options,
        class_of={0: 0, 1: 0, 2: 1},
        num_axes=3,
    )


def _dataset(raw: Path, cases: Iterable[CaseFiles], **facts: Any) -> RawDataset:
    scans, problems, num_unlabelled = match(cases)
    raters = sorted({rater for scan in scans for rater in scan.masks}, key=natural_order)
    return RawDataset(
        root=raw,
        read=read_scan,
        raters=tuple(raters) or ("reference",),
        scans=scans,
        problems=problems,
        num_unlabelled=num_unlabelled,
        **facts,
    )
