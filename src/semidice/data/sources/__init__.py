"""Sources: where raw scans come from. Each source finds its datasets in a folder.

A source looks at file names, and in a user's folder also at the values in the masks. It collects the
problems of single scans, so that one run reports all of them. `RawDataset.read` reads one scan at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from ...errors import UserError, nearest
from ..geometry import Grid
from ..manifest import PrepareOptions
from ..phantom import PhantomOptions
from .challenges import find_kits, find_lits, find_qubiq
from .dicom import find_dicom
from .folder import OnFile, find_folder
from .nnunet import find_nnunet
from .raw import RawDataset, RawScan, ScanArrays, is_folder

Finder = Callable[[Path, OnFile], list[RawDataset]]
# for each source that has files: what finds its datasets, and the files that it looks for in the raw folder
SOURCES: dict[str, tuple[Finder, str]] = {
    "qubiq": (
        lambda raw, _: find_qubiq(raw),
        "DATASET/caseNN/image.nii.gz and taskNN_segNN.nii.gz, such as brain-growth/Training/case01",
    ),
    "lits": (lambda raw, _: find_lits(raw), "volume-N.nii and segmentation-N.nii, or .nii.gz"),
    "kits": (lambda raw, _: find_kits(raw), "case_NNNNN/imaging.nii.gz and segmentation.nii.gz"),
    "nnunet": (
        lambda raw, _: find_nnunet(raw),
        "dataset.json, imagesTr/CASE_0000.nii.gz (one file per channel; in the Decathlon CASE.nii.gz) and "
        "labelsTr/CASE.nii.gz",
    ),
    "folder": (
        find_folder,
        "images/CASE (or one file per channel, images/CASE_0000) and raters/NAME/CASE or masks/CASE, as PNG, "
        "TIFF or NIfTI",
    ),
    "dicom": (
        find_dicom,
        "DICOM files of CT or MR series, and a DICOM segmentation (SEG) of each rater, in any folders",
    ),
}


def find_datasets(
    source: str,
    raw: Path | PhantomOptions,
    *,
    tasks: Sequence[str] = (),
    on_file: OnFile = lambda _, __: None,
) -> list[RawDataset]:
    """The datasets of a source in the folder `raw`; a UserError if there is no scan.

    raw: the source phantom has no files, and takes its options.
    tasks: names of the QUBIQ datasets to keep; all if empty.
    on_file(done, total) is called for each mask of a user's folder and each DICOM file, because reading them
    all takes time.
    """
    if isinstance(raw, PhantomOptions):
        return [_phantom(raw)]
    if source not in SOURCES:
        raise UserError(f"there is no source {source!r}{nearest(source, [*SOURCES, 'phantom'])}")
    find, files = SOURCES[source]
    if not is_folder(raw):
        raise UserError(f"there is no folder {raw}: source {source} looks in it for {files}")
    datasets = find(raw, on_file)
    if not any(dataset.scans or dataset.problems for dataset in datasets):
        unlabelled = sum(dataset.num_unlabelled for dataset in datasets)
        found = f"; {unlabelled} cases were found, but none has a mask" if unlabelled else ""
        raise UserError(f"no scan found in {raw}: source {source} looks for {files}{found}")
    names = [dataset.name for dataset in datasets]
    missing = [task for task in tasks if task not in names]
    if missing:
        there = f"choose from {', '.join(names)}" if any(names) else "leave out --task"
        raise UserError(f"source {source} has no task {', '.join(missing)}: {there}")
    return [dataset for dataset in datasets if not tasks or dataset.name in tasks]


def _phantom(phantom: PhantomOptions) -> RawDataset:
    lesions = tuple(f"lesion_{number}" for number in range(1, phantom.num_classes - 1))
    names = ("lesion",) if phantom.num_classes == 2 else ("organ", *lesions)
    cases = [f"case{number:04d}" for number in range(phantom.num_cases)]
    return RawDataset(
        source="phantom",
        root=Path(),
        read=partial(_read_phantom, phantom),
        class_names=("background", *names),
        raters=tuple(f"rater_{number}" for number in range(1, phantom.num_raters + 1)),
        channels=("CT",),
        scans=tuple(RawScan(case, case, (), {}) for case in cases),
        # intensities are in about [0, 1]; the window keeps the noise outside
        options=PrepareOptions(window=(-0.2, 1.2)),
        made_with=asdict(phantom) | {"size": list(phantom.size)},
    )


def _read_phantom(phantom: PhantomOptions, dataset: RawDataset, scan: RawScan) -> ScanArrays:
    case = phantom.make_case(int(scan.name.removeprefix("case")))
    image, masks = case.image[0].numpy(), case.masks[0].numpy().astype(np.uint8)
    grid = Grid(image.shape[1:])
    return ScanArrays(image, masks, dataset.raters, grid, truth=case.prob[0].numpy())
