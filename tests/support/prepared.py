"""Small prepared datasets for tests: phantoms, written as `semidice prepare` would, without raw files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from semidice.data.dataset import Dataset
from semidice.data.intensities import INTENSITY_UNITS
from semidice.data.manifest import Manifest, PrepareOptions, Scan
from semidice.data.packing import pack_classes
from semidice.data.phantom import make_phantom
from semidice.paths import DatasetFolder


def make_prepared(
    path: Path,
    *,
    num_cases: int = 6,
    size: Sequence[int] = (32, 32),
    num_raters: int = 3,
    num_classes: int = 2,
    num_channels: int = 1,
    cases_per_patient: int = 2,
    sizes: Sequence[Sequence[int]] | None = None,
    slices_per_scan: int | None = None,
    depth: int | None = None,
    dtype: str = "uint8",
    absent: bool = False,
    truth: bool = True,
    seed: int = 0,
) -> Dataset:
    """Write a dataset to `path` and open it; by default six cases of three patients.

    sizes: used in turn instead of `size`, so that scans differ. slices_per_scan: number of cases of a
    scan, as slices of a volume; a patient then has `cases_per_patient` scans. depth: cases are volumes
    (depth, *size) of unrelated slices. absent: for every second scan n, rater n % R has no mask.
    truth: store the phantom's probabilities. Channel k is the image plus k / 10.
    """
    folder = DatasetFolder(path)
    for kind in ("images", "masks", "truth") if truth else ("images", "masks"):
        (path / kind).mkdir(parents=True)
    raters = tuple(f"rater{number}" for number in range(num_raters))
    num_slices = slices_per_scan or 1
    # one phantom per size; the same seed gives raters the same habits in all of them
    phantoms = {
        tuple(space): _phantom(num_cases, space, depth, num_raters, num_classes, seed)
        for space in sizes or [size]
    }
    scans, intensities = [], []
    for number in range(-(-num_cases // num_slices)):
        space = tuple(sizes[number % len(sizes)] if sizes else size)
        rows = slice(number * num_slices, min((number + 1) * num_slices, num_cases))
        image, prob, classes = (array[rows] for array in phantoms[space])
        image = np.concatenate([image + channel / 10 for channel in range(num_channels)], 1)
        unit = INTENSITY_UNITS[dtype]
        stored = (image.clip(0, 1) / unit).round().astype(dtype)
        intensities.append(np.moveaxis(stored * unit, 1, 0).reshape(num_channels, -1))
        is_present = np.ones(num_raters, dtype=bool)
        if absent and number % 2 and num_raters > 1:
            is_present[number % num_raters] = False
        classes = classes * is_present.reshape(-1, *[1] * (classes.ndim - 2))
        arrays = {
            "images": stored,
            "masks": pack_classes(classes, num_classes=num_classes, num_space_axes=classes.ndim - 2),
        }
        if truth:
            arrays["truth"] = prob.astype(np.float32)
        name = f"scan{number:03d}"
        for kind, array in arrays.items():
            np.save(folder.array(kind, name), array)
        scans.append(
            Scan(
                name=name,
                patient=f"patient{number // cases_per_patient:03d}",
                slices=tuple(range(3, 3 + len(image))) if slices_per_scan else None,
                shape=classes.shape[2:],
                spacing_mm=(0.7,) * (classes.ndim - 2),
                thickness_mm=2.5 if slices_per_scan else None,
                affine=((0.7, 0, 0, 0), (0, 0.7, 0, 0), (0, 0, 2.5, 0), (0, 0, 0, 1)),
                raw_shape=(*classes.shape[2:], 8) if slices_per_scan else classes.shape[2:],
                raters=tuple(rater for rater, present in zip(raters, is_present, strict=True) if present),
                drawn=tuple(np.unique(classes).tolist()),
                inputs={f"{name}.raw": hashlib.sha256(stored.tobytes()).hexdigest()},
                mean=tuple(intensities[-1].mean(1).tolist()),
                std=tuple(intensities[-1].std(1).tolist()),
                arrays={
                    kind: hashlib.sha256(folder.array(kind, name).read_bytes()).hexdigest() for kind in arrays
                },
                num_bytes={kind: folder.array(kind, name).stat().st_size for kind in arrays},
            )
        )
    values = np.concatenate(intensities, 1)
    manifest = Manifest(
        source="phantom",
        class_names=("background", *(f"class{number}" for number in range(1, num_classes))),
        raters=raters,
        channels=tuple(f"channel{number}" for number in range(num_channels)),
        mean=tuple(values.mean(1).tolist()),
        std=tuple(values.std(1).tolist()),
        # as `prepare` stores the values of 8-bit pictures
        options=PrepareOptions(keep_bytes=dtype == "uint8"),
        scans=tuple(scans),
    )
    folder.manifest.write_text(manifest.model_dump_json(indent=1))
    return Dataset(path)


def rehash(dataset: Dataset) -> None:
    """Write the manifest again after arrays were changed, as if they had been prepared like that."""
    drawn = {}
    for number, case in enumerate(dataset.cases):
        drawn.setdefault(case.scan.name, set()).update(np.unique(dataset.masks(number)).tolist())
    scans = []
    for scan in dataset.manifest.scans:
        files = {kind: dataset.folder.array(kind, scan.name) for kind in scan.arrays}
        arrays = {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in files.items()}
        sizes = {kind: path.stat().st_size for kind, path in files.items()}
        changes = {"arrays": arrays, "num_bytes": sizes, "drawn": tuple(sorted(drawn[scan.name]))}
        scans.append(scan.model_copy(update=changes))
    manifest = dataset.manifest.model_copy(update={"scans": tuple(scans)})
    dataset.folder.manifest.write_text(manifest.model_dump_json(indent=1))


def dataset_with(path: Path, masks: np.ndarray, num_classes: int = 2) -> Dataset:
    """A dataset of phantoms whose masks are replaced by (cases, rows, columns), the same for all raters."""
    dataset = make_prepared(path, num_cases=len(masks), size=masks.shape[1:], num_classes=num_classes)
    for number, mask in enumerate(masks):
        packed = pack_classes(np.stack([[mask] * 3]), num_classes=num_classes, num_space_axes=2)
        np.save(dataset.folder.array("masks", dataset.cases[number].scan.name), packed)
    rehash(dataset)
    return Dataset(path)


def _phantom(num_cases, space, depth, num_raters, num_classes, seed):
    """Images (N, 1, *space), probabilities (N, C, *space) and class maps (N, R, *space)."""
    phantom = make_phantom(
        num_cases * (depth or 1), size=space, num_raters=num_raters, num_classes=num_classes, seed=seed
    )
    arrays = [phantom.image.numpy(), phantom.prob.numpy(), phantom.masks.numpy().astype(np.uint8)]
    if depth is None:
        return arrays
    # the slices of a volume become its first spatial axis
    return [np.moveaxis(array.reshape(num_cases, depth, *array.shape[1:]), 1, 2) for array in arrays]
