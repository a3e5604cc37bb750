"""Where raw scans come from: each source finds its datasets in a folder; a scan is read the same way in all.

Finding looks at names, and in a user's folder at the values in masks; problems of single scans are collected,
so that one run tells all of them. Reading is scan by scan, in any process. Files of a scan have one shape and
lie in one place. Nothing is said, and so nothing compared, of the place of a picture or of a NIfTI that sets
neither qform nor sform; where a NIfTI sets both and they differ, one that agrees is enough: after a
registration one holds the old place and the other the new, and programs differ in which they keep.
Left out: changing intensities or size, which is for `prepare`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from .challenges import find_kits, find_lits, find_qubiq
from .folders import OnFile, find_decathlon, find_folder, find_lidc
from .listing import is_folder, natural_order
from .nnunet import find_nnunet
from .options import PrepareOptions
from .phantom import PhantomOptions
from .placement import placement_difference
from .raw import RawDataset, RawScan, ScanArrays
from .readers import ImageFile, MaskFile, read_image, read_mask

# What each source looks for below the raw folder.
SOURCES = {
    "qubiq": "DATASET/caseNN/image.nii.gz and taskNN_segNN.nii.gz, such as brain-growth/Training/case01",
    "lits": "volume-N.nii and segmentation-N.nii, or .nii.gz",
    "kits": "case_NNNNN/imaging.nii.gz and segmentation.nii.gz",
    "lidc": "images/CASE.png, raters/NAME/CASE.png and cases.csv",
    "decathlon": "dataset.json, imagesTr/CASE.nii.gz and labelsTr/CASE.nii.gz",
    "nnunet": "dataset.json, imagesTr/CASE_0000.nii.gz (a file a channel) and labelsTr/CASE.nii.gz",
    "folder": "images/CASE and raters/NAME/CASE or masks/CASE, as PNG, TIFF or NIfTI",
    "phantom": "nothing: its slices are made",
}
_REMEDY = "use --ignore-placement"


def find_datasets(
    source: str,
    raw: Path,
    *,
    tasks: Sequence[str] = (),
    phantom: PhantomOptions | None = None,
    on_file: OnFile = lambda _, __: None,
) -> list[RawDataset]:
    """The datasets of a source in the folder `raw`; if there is none, a ValueError says what was looked for.

    tasks: of QUBIQ, the names of the datasets that are wanted; all if empty.
    phantom: what to make if that is the source, which does not look at `raw`.
    on_file(done, total) is called while a user's masks are looked through, which takes time.
    """
    finders: dict[str, Callable[[], list[RawDataset]]] = {
        "qubiq": lambda: find_qubiq(raw),
        "lits": lambda: find_lits(raw),
        "kits": lambda: find_kits(raw),
        "lidc": lambda: find_lidc(raw),
        "decathlon": lambda: find_decathlon(raw),
        "nnunet": lambda: find_nnunet(raw),
        "folder": lambda: find_folder(raw, on_file=on_file),
        "phantom": lambda: [_phantom_dataset(raw, phantom or PhantomOptions())],
    }
    if source not in finders:
        raise ValueError(f"there is no source {source!r}; it is one of {', '.join(finders)}")
    if phantom is not None and source != "phantom":
        raise ValueError(f"options of a phantom were given, but the source is {source}")
    if source != "phantom" and not is_folder(raw):
        raise ValueError(f"there is no folder {raw}: source {source} looks in it for {SOURCES[source]}")
    datasets = finders[source]()
    if not any(dataset.scans or dataset.problems for dataset in datasets):
        skipped = sum(dataset.num_skipped for dataset in datasets)
        without = f", and the {skipped} cases that were found have no mask" if skipped else ""
        raise ValueError(f"found nothing in {raw}: source {source} looks for {SOURCES[source]}{without}")
    return _chosen(datasets, tasks, source)


def read_scan(dataset: RawDataset, scan: RawScan) -> ScanArrays:
    """A scan's image and masks; a ValueError names the file that is wrong, and what to do."""
    if dataset.phantom is not None:
        return _phantom_scan(dataset, scan, dataset.phantom)
    ignore_placement = dataset.options.ignore_placement
    images = read_channels(
        scan.image,
        num_axes=dataset.num_axes,
        num_channels=len(dataset.channels),
        ignore_placement=ignore_placement,
    )
    inputs = {_relative(path, dataset): image.sha256 for path, image in zip(scan.image, images, strict=True)}
    raters = tuple(sorted(scan.masks, key=natural_order))
    classes = []
    for rater in raters:
        path = scan.masks[rater]
        mask = read_mask(path, num_axes=dataset.num_axes, class_of_value=dataset.class_of_value)
        _check_grid(f"mask {path}", mask, scan.image[0], images[0], ignore_placement=ignore_placement)
        inputs[_relative(path, dataset)] = mask.sha256
        classes.append(mask.classes)
    return ScanArrays(
        image=joined(images),
        masks=np.stack(classes),
        raters=raters,
        spacing_mm=images[0].spacing_mm,
        affine=images[0].affine,
        inputs=inputs,
    )


def read_channels(
    paths: Sequence[Path],
    *,
    num_axes: int,
    num_channels: int,
    ignore_placement: bool,
    remedy: str = _REMEDY,
) -> list[ImageFile]:
    """The image in one file, or in one file for each channel; a ValueError if these are not on one grid.

    remedy: what a user can do about files that lie elsewhere.
    """
    if len(paths) not in (1, num_channels):
        raise ValueError(
            f"{paths[0]} and others are {len(paths)} files, but there are {num_channels} channels"
        )
    inside = num_channels if len(paths) == 1 else 1
    images = [read_image(path, num_axes=num_axes, num_channels=inside) for path in paths]
    for path, image in zip(paths[1:], images[1:], strict=True):
        _check_grid(
            f"image {path}", image, paths[0], images[0], ignore_placement=ignore_placement, remedy=remedy
        )
    return images


def joined(
    images: Sequence[ImageFile],
) -> UInt8[np.ndarray, "channels *space"] | Float32[np.ndarray, "channels *space"]:
    """The channels of all files, in their order."""
    # uint8 and float32 together are float32
    return images[0].values if len(images) == 1 else np.concatenate([image.values for image in images])


def _chosen(datasets: list[RawDataset], tasks: Sequence[str], source: str) -> list[RawDataset]:
    if not tasks:
        return datasets
    names = [dataset.name for dataset in datasets]
    if names == [""]:
        raise ValueError(f"source {source} has no tasks to choose from; got {', '.join(tasks)}")
    missing = [task for task in tasks if task not in names]
    if missing:
        raise ValueError(f"found no task {', '.join(missing)}; found {', '.join(names)}")
    return [dataset for dataset in datasets if dataset.name in tasks]


def _check_grid(
    what: str,
    file: ImageFile | MaskFile,
    path: Path,
    image: ImageFile,
    *,
    ignore_placement: bool,
    remedy: str = _REMEDY,
) -> None:
    """A ValueError where a file has not the shape of the image in `path`, or lies elsewhere."""
    expected = image.values.shape[1:]
    shape = file.values.shape[1:] if isinstance(file, ImageFile) else file.classes.shape
    if shape != expected:
        raise ValueError(
            f"{what} has shape {shape}, but image {path} has {expected}: resample them to one grid"
        )
    if ignore_placement:
        return
    differences = [
        placement_difference(here, there, shape) for here in image.placements for there in file.placements
    ]
    if differences and all(differences):
        raise ValueError(
            f"{what} does not lie where image {path} does: {differences[0]}; resample it to the image's "
            f"grid, or {remedy} if only the headers are wrong"
        )


def _relative(path: Path, dataset: RawDataset) -> str:
    return path.relative_to(dataset.root).as_posix()


def _phantom_dataset(raw: Path, phantom: PhantomOptions) -> RawDataset:
    """Scans to be made; intensities are in about [0, 1], and noise beyond it is kept by the window."""
    lesions = tuple(f"lesion_{number}" for number in range(1, phantom.num_classes - 1))
    names = ("lesion",) if phantom.num_classes == 2 else ("organ", *lesions)
    cases = [f"case{number:04d}" for number in range(phantom.num_cases)]
    return RawDataset(
        name="",
        source="phantom",
        root=raw,
        class_names=("background", *names),
        raters=tuple(f"rater_{number}" for number in range(1, phantom.num_raters + 1)),
        channels=("CT",),
        scans=tuple(RawScan(case, case, (), {}, number) for number, case in enumerate(cases)),
        options=PrepareOptions(window=(-0.2, 1.2)),
        phantom=phantom,
    )


def _phantom_scan(dataset: RawDataset, scan: RawScan, phantom: PhantomOptions) -> ScanArrays:
    case = phantom.make_case(scan.number)
    return ScanArrays(
        image=case.image[0].numpy(),
        masks=case.masks[0].numpy().astype(np.uint8),
        raters=dataset.raters,
        spacing_mm=(1.0, 1.0),
        truth=case.prob[0].numpy(),
    )
