"""Compares a prepared dataset with its manifest: hashes, unlisted files, and scans of another kind.

An array whose SHA-256 is that of the manifest is what `prepare` wrote, so its values need no check. Each
function returns messages that name the file or the case, so that one problem does not hide another. Files are
named by their path in the dataset. A link that leads out of the dataset is not followed.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import listing
from ..paths import DatasetFolder, file_hash, leads_outside
from .dataset import Dataset
from .manifest import Kind, Scan

# a scan is unusual if its mean is further from the median scan's, in units of the median standard deviation,
# or if its standard deviation is a smaller share of the median one
_MAX_MEAN_DISTANCE = 3.0
_MIN_CONTRAST = 0.1


def manifest_problems(dataset: Dataset) -> list[str]:
    """Problems of the manifest, which belong to no array."""
    problems = []
    repeated = [name for name, count in Counter(case.name for case in dataset.cases).items() if count > 1]
    if repeated:
        problems.append(f"manifest.json has several cases with the same name: {listing(repeated, 'name')}")
    if leads_outside(dataset.folder.path, dataset.folder.manifest):
        problems.append("manifest.json is a link that leads out of the dataset: replace it with the file")
    return problems


def array_problem(folder: DatasetFolder, scan: Scan, kind: Kind) -> str:
    """Why an array is not the file that was prepared; "" if it is."""
    path = folder.array(kind, scan.name)
    name = f"{kind}/{path.name}"
    if leads_outside(folder.path, path):
        return f"{name} is a link that leads out of the dataset, and was not read: copy the file"
    try:
        if not path.is_file():
            return f"{name} is {'not a file' if path.exists() else 'missing'}"
        digest = file_hash(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if digest == scan.arrays[kind]:
        return ""
    return f"{name} is not the file that was prepared (SHA-256 {digest[:12]}...): it was changed or swapped"


def unlisted_files(dataset: Dataset) -> list[str]:
    """Files in the dataset's folder that the manifest does not list, by their path in the folder."""
    folder = dataset.folder
    known = {folder.manifest, folder.lock, folder.lock_owner, *listed_arrays(dataset)}
    files = (path for path in folder.path.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder.path).as_posix() for path in files if path not in known)


def listed_arrays(dataset: Dataset) -> list[Path]:
    """The path of every array in the manifest."""
    folder = dataset.folder
    return [folder.array(kind, scan.name) for scan in dataset.manifest.scans for kind in scan.arrays]


def kind_warnings(scans: Sequence[Scan]) -> list[str]:
    """Warnings about scans whose intensities are of another kind than those of the other scans."""
    means, stds = np.array([scan.mean for scan in scans]), np.array([scan.std for scan in scans])
    usual_mean, usual_std = np.median(means, axis=0), np.median(stds, axis=0)
    is_other = np.abs(means - usual_mean) > _MAX_MEAN_DISTANCE * usual_std
    is_other |= stds < _MIN_CONTRAST * usual_std
    others = [scan.name for scan, flags in zip(scans, is_other, strict=True) if flags.any()]
    return others and [
        f"intensities of {listing(others, 'scan')} are far from those of the other scans: "
        "look whether the raw files have the same unit and range"
    ]
