"""Sources: where raw scans come from. Each source finds its datasets in a folder.

`find_datasets` looks at file names, and in a user's folder also at the values in the masks. It collects the
problems of single scans, so that one run reports all of them. `scan.read_scan` then reads one scan at a
time, in the same way for all sources.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..manifest import PrepareOptions
from ..phantom import PhantomOptions
from .challenges import find_kits, find_lits, find_qubiq
from .dicom import find_dicom
from .folders import OnFile, find_folder, find_lidc
from .nnunet import find_decathlon, find_nnunet
from .raw import RawDataset, RawScan, is_folder

# the files that each source looks for in the raw folder
SOURCES = {
    "qubiq": "DATASET/caseNN/image.nii.gz and taskNN_segNN.nii.gz, such as brain-growth/Training/case01",
    "lits": "volume-N.nii and segmentation-N.nii, or .nii.gz",
    "kits": "case_NNNNN/imaging.nii.gz and segmentation.nii.gz",
    "lidc": "images/CASE.png, raters/NAME/CASE.png and cases.csv",
    "decathlon": "dataset.json, imagesTr/CASE.nii.gz and labelsTr/CASE.nii.gz",
    "nnunet": "dataset.json, imagesTr/CASE_0000.nii.gz (one file per channel) and labelsTr/CASE.nii.gz",
    "folder": "images/CASE (or one file per channel, images/CASE_0000) and raters/NAME/CASE or masks/CASE, "
    "as PNG, TIFF or NIfTI",
    "dicom": "DICOM files of CT or MR series, and a DICOM segmentation (SEG) of each rater, in any folders",
    "phantom": "no files: it makes its slices",
}


def find_datasets(
    source: str,
    raw: Path,
    *,
    tasks: Sequence[str] = (),
    phantom: PhantomOptions | None = None,
    on_file: OnFile = lambda _, __: None,
) -> list[RawDataset]:
    """The datasets of a source in the folder `raw`; a ValueError if there is no scan.

    tasks: names of the QUBIQ datasets to keep; all if empty.
    phantom: options of the source phantom, which does not look at `raw`.
    on_file(done, total) is called for each mask of a user's folder and each DICOM file, because reading them
    all takes time.
    """
    finders: dict[str, Callable[[], list[RawDataset]]] = {
        "qubiq": lambda: find_qubiq(raw),
        "lits": lambda: find_lits(raw),
        "kits": lambda: find_kits(raw),
        "lidc": lambda: find_lidc(raw),
        "decathlon": lambda: find_decathlon(raw),
        "nnunet": lambda: find_nnunet(raw),
        "folder": lambda: find_folder(raw, on_file=on_file),
        "dicom": lambda: find_dicom(raw, on_file=on_file),
        "phantom": lambda: [_phantom_dataset(raw, phantom or PhantomOptions())],
    }
    if source not in finders:
        raise ValueError(f"source must be one of {', '.join(finders)}; got {source!r}")
    if phantom is not None and source != "phantom":
        raise ValueError(f"options of a phantom need the source phantom; got source {source}")
    if source != "phantom" and not is_folder(raw):
        raise ValueError(f"there is no folder {raw}: source {source} looks in it for {SOURCES[source]}")
    datasets = finders[source]()
    if not any(dataset.scans or dataset.problems for dataset in datasets):
        skipped = sum(dataset.num_skipped for dataset in datasets)
        unlabelled = f"; {skipped} cases were found, but none has a mask" if skipped else ""
        raise ValueError(f"no scan found in {raw}: source {source} looks for {SOURCES[source]}{unlabelled}")
    names = [dataset.name for dataset in datasets]
    if tasks and names == [""]:
        raise ValueError(f"source {source} has no tasks: leave out --task; got {', '.join(tasks)}")
    missing = [task for task in tasks if task not in names]
    if missing:
        raise ValueError(f"there is no task {', '.join(missing)}; choose from {', '.join(names)}")
    return [dataset for dataset in datasets if not tasks or dataset.name in tasks]


def _phantom_dataset(raw: Path, phantom: PhantomOptions) -> RawDataset:
    lesions = tuple(f"lesion_{number}" for number in range(1, phantom.num_classes - 1))
    names = ("lesion",) if phantom.num_classes == 2 else ("organ", *lesions)
    cases = [f"case{number:04d}" for number in range(phantom.num_cases)]
    return RawDataset(
        source="phantom",
        root=raw,
        class_names=("background", *names),
        raters=tuple(f"rater_{number}" for number in range(1, phantom.num_raters + 1)),
        channels=("CT",),
        scans=tuple(RawScan(case, case, (), {}, number) for number, case in enumerate(cases)),
        # intensities are in about [0, 1]; the window keeps the noise outside
        options=PrepareOptions(window=(-0.2, 1.2)),
        phantom=phantom,
    )
