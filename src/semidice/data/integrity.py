"""Compares a prepared dataset with its manifest: files, hashes, shapes and values.

Each function checks one thing and returns messages that name the file or the case. Nothing is raised, so that
one problem does not hide another. Files are named by their path in the dataset. A link that leads out of the
dataset is not followed.
"""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from ..limits import read_json
from ..paths import DatasetFolder, file_hash, write_text
from .dataset import Dataset
from .intensities import INTENSITY_UNITS
from .manifest import Kind, Manifest, Scan
from .packing import num_planes

# float32 sums of a few classes, each rounded once
_SUM_TOLERANCE = 1e-5
# a scan is unusual if its mean is further from the median scan's, in units of the median standard deviation,
# or if its standard deviation is a smaller share of the median one
_MAX_MEAN_DISTANCE = 3.0
_MIN_CONTRAST = 0.1


def scan_problems(manifest: Manifest, scan: Scan) -> list[str]:
    """Problems of a scan's entry in the manifest; with one, its arrays cannot be checked."""
    problems = []
    if len(scan.shape) not in (2, 3) or min(scan.shape) < 1:
        problems.append(f"shape must be 2 or 3 lengths of 1 or more; got {scan.shape}")
    if len(scan.shape) != len(manifest.scans[0].shape):
        problems.append(
            f"it has {len(scan.shape)} axes, but the first scan has {len(manifest.scans[0].shape)}"
        )
    if not scan.case_names():
        problems.append("no slice of it became a case")
    sides = scan.spacing_mm
    if sides is not None and (
        len(sides) < len(scan.shape) or not all(0 < side < math.inf for side in sides[: len(scan.shape)])
    ):
        problems.append(f"spacing_mm must be a length above 0 for each axis; got {scan.spacing_mm}")
    mean, std = scan.mean or (), scan.std or ()
    if not all(map(math.isfinite, mean)) or not all(0 <= number < math.inf for number in std):
        problems.append(f"mean must be finite and std 0 or more; got {mean} and {std}")
    missing = [kind for kind in ("images", "masks") if kind not in scan.arrays]
    if missing:
        problems.append(f"it has no {' and no '.join(missing)}")
    return [f"manifest.json, scan {scan.name}: {problem}" for problem in problems]


def manifest_problems(dataset: Dataset) -> list[str]:
    """Problems of the manifest as a whole; `scan_problems` are those of single scans."""
    manifest = dataset.manifest
    problems = []
    repeated = [name for name, count in Counter(case.name for case in dataset.cases).items() if count > 1]
    if repeated:
        problems.append(f"manifest.json has several cases with the same name: {enumerated(repeated, 'name')}")
    if not all(map(math.isfinite, manifest.mean)) or not all(0 < std < math.inf for std in manifest.std):
        problems.append(
            f"manifest.json: mean must be finite and std above 0; got {manifest.mean} and {manifest.std}"
        )
    if leads_outside(dataset.folder.path, dataset.folder.manifest):
        problems.append("manifest.json is a link that leads out of the dataset: replace it with the file")
    return problems


def open_array(
    folder: DatasetFolder, manifest: Manifest, scan: Scan, kind: Kind, *, owner_of: Mapping[str, str]
) -> tuple[np.ndarray | None, list[str]]:
    """A scan's array, memory-mapped, and its problems; None if it cannot be read as the manifest says.

    owner_of: the file of each SHA-256 in the manifest, to recognise a swapped array.
    """
    path = folder.array(kind, scan.name)
    name = f"{kind}/{path.name}"
    if leads_outside(folder.path, path):
        return None, [f"{name} is a link that leads out of the dataset, and was not read: copy the file"]
    try:
        if not path.is_file():
            return None, [f"{name} is {'not a file' if path.exists() else 'missing'}"]
        digest = file_hash(path)
    except OSError as error:
        return None, [f"{name} cannot be read: {error.strerror}"]
    problems = []
    if digest != scan.arrays[kind]:
        belongs = f"it is the array of {owner_of[digest]}" if digest in owner_of else "it was changed since"
        problems.append(f"{name} is not the file that was prepared: {belongs} (SHA-256 {digest[:12]}...)")
    array, problem = _mapped(path, *_expected(manifest, scan, kind))
    if problem:
        problems.append(f"{name} {problem}")
    return array, problems


def _mapped(
    path: Path, dtypes: Sequence[str], shape: tuple[int, ...]
) -> tuple[np.ndarray | None, str | None]:
    try:
        # NumPy warns if it has to repair a header, which it never does for its own files
        with warnings.catch_warnings(action="error"):
            # not np.load, which also reads archives and pickles
            array = np.lib.format.open_memmap(path, mode="r")
    # NumPy has no common error for a damaged header: ValueError, SyntaxError, TokenError, ...
    except Exception as error:
        return None, f"cannot be read as an array: {error}"
    if array.dtype.name not in dtypes or array.shape != shape:
        expected = f"{' or '.join(dtypes)} {shape}"
        return None, f"holds {array.dtype.name} {array.shape}, but the manifest says {expected}"
    return array, None


def _expected(manifest: Manifest, scan: Scan, kind: Kind) -> tuple[Sequence[str], tuple[int, ...]]:
    """Possible types and the shape of an array, see `paths.DatasetFolder` and `data.packing`."""
    num_cases, num_classes = len(scan.case_names()), len(manifest.class_names)
    if kind == "images":
        return tuple(INTENSITY_UNITS), (num_cases, len(manifest.channels), *scan.shape)
    if kind == "truth":
        return ("float32",), (num_cases, num_classes, *scan.shape)
    *rows, width = scan.shape
    axes = (num_cases, len(manifest.raters), num_planes(num_classes), *rows, -(-width // 8))
    return ("uint8",), axes


def mask_problems(
    packed: UInt8[np.ndarray, "R B *packed"],
    classes: UInt8[np.ndarray, "R *space"],
    class_names: Sequence[str],
) -> list[str]:
    """Problems of a case's masks: the bits that fill up the last byte of each row, and the class indices."""
    problems = []
    filling = (1 << (-classes.shape[-1] % 8)) - 1
    if (packed[..., -1] & filling).any():
        problems.append("bits after the last voxel of a row are set")
    highest = int(classes.max(initial=0))
    if highest >= len(class_names):
        names = ", ".join(class_names)
        problems.append(f"masks hold class {highest}, but the dataset has {len(class_names)}: {names}")
    return problems


def image_problem(stored: np.ndarray) -> str | None:
    """The problem of stored intensities, if any: values of int16 start at 0."""
    lowest = int(stored.min())
    return None if lowest >= 0 else f"stored intensities must be 0 or more; got {lowest}"


def kind_warnings(scans: Sequence[Scan], dtype_of: Mapping[str, str]) -> list[str]:
    """Warnings about scans whose intensities are of another kind than those of the other scans.

    dtype_of: the type of each scan's stored images.
    """
    warnings = []
    by_dtype: dict[str, list[str]] = {}
    for name, dtype in dtype_of.items():
        by_dtype.setdefault(dtype, []).append(name)
    if len(by_dtype) > 1:
        kinds = " and ".join(f"{enumerated(names, 'scan')} as {dtype}" for dtype, names in by_dtype.items())
        warnings.append(
            f"intensities are scaled in two ways, {kinds}: prepare the raw files again, in a new folder"
        )
    measured = [scan for scan in scans if scan.mean and scan.std and scan.name in dtype_of]
    if not measured:
        return warnings
    means, stds = np.array([scan.mean for scan in measured]), np.array([scan.std for scan in measured])
    usual_mean, usual_std = np.median(means, axis=0), np.median(stds, axis=0)
    is_other = (np.abs(means - usual_mean) > _MAX_MEAN_DISTANCE * usual_std) | (
        stds < _MIN_CONTRAST * usual_std
    )
    others = [scan.name for scan, flags in zip(measured, is_other, strict=True) if flags.any()]
    if others and len(by_dtype) == 1:
        warnings.append(
            f"intensities of {enumerated(others, 'scan')} are far from those of the other scans: "
            "look whether the raw files have the same unit and range"
        )
    return warnings


def truth_problem(truth: Float32[np.ndarray, "C *space"]) -> str | None:
    """The problem of true probabilities, if any."""
    low, high = float(truth.min()), float(truth.max())
    # NaN fails too
    if not (low >= 0 and high <= 1):
        return f"true probabilities must lie in [0, 1]; got {low:.6g} to {high:.6g}"
    sums = truth.sum(axis=0, dtype=np.float64)
    off = max(1 - float(sums.min()), float(sums.max()) - 1)
    if not off <= _SUM_TOLERANCE:
        return f"true probabilities must sum to 1 over the classes; the sums are off by up to {off:.2g}"
    return None


def check_arrays(
    dataset: Dataset,
    seen: Path,
    *,
    known: Mapping[str, Any] | None = None,
    on_bytes: Callable[[int, int], object] = lambda _, __: None,
) -> dict[str, Any]:
    """Size, times and SHA-256 of each array; a ValueError if one is not the one that was prepared.

    seen: a file with these facts of each array whose SHA-256 was right; those that still have the same size
    and times are not read again. It is written here. known: the same facts from another call.
    on_bytes(done, all) is called while arrays are read.
    """
    arrays = {str(path.relative_to(dataset.folder.path)): digest for digest, path in listed_arrays(dataset)}
    stored = read_seen(seen)
    known = {**stored, **(known or {})}
    present: dict[str, list[Any]] = {}
    for name, digest in arrays.items():
        try:
            status = (dataset.folder.path / name).stat()
        except OSError as error:
            raise ValueError(f"cannot read {dataset.folder.path / name}: {error.strerror}") from error
        # a copy can have the time of the change, but not the time of the last change of its entry
        present[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest]
    new = [name for name, facts in present.items() if known.get(name) != facts]
    changed, done, total = [], 0, sum(present[name][0] for name in new)
    # hashing leaves the interpreter, so threads use all processors
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda name: file_hash(dataset.folder.path / name), new)
        for name, digest in zip(new, found, strict=True):
            if digest != arrays[name]:
                changed.append(name)
            done += present[name][0]
            on_bytes(done, total)
    if changed:
        raise ValueError(
            f"{dataset.folder.path} has {enumerated(changed, 'array')} that `semidice prepare` did not "
            "write, or that changed since: look at it with `semidice check`, then prepare it again"
        )
    if stored != present:
        write_text(seen, json.dumps(present) + "\n")
    return present


def read_seen(path: Path) -> dict[str, Any]:
    """The content of a file that `check_arrays` wrote; empty if there is none."""
    try:
        seen = read_json(path)
    # missing or damaged: the arrays are compared again
    except (OSError, ValueError):
        return {}
    return seen if isinstance(seen, dict) else {}


def unlisted_files(dataset: Dataset) -> list[str]:
    """Files in the dataset's folder that the manifest does not list, by their path in the folder."""
    folder = dataset.folder
    known = {folder.manifest, folder.checked, *(path for _, path in listed_arrays(dataset))}
    files = (Path(parent, name) for parent, _, names in os.walk(folder.path) for name in names)
    return sorted(path.relative_to(folder.path).as_posix() for path in files if path not in known)


def listed_arrays(dataset: Dataset) -> Iterator[tuple[str, Path]]:
    """SHA-256 and path of every array in the manifest."""
    for scan in dataset.manifest.scans:
        for kind, digest in scan.arrays.items():
            yield digest, dataset.folder.array(kind, scan.name)


def leads_outside(folder: Path, path: Path) -> bool:
    """Whether links on the way to `path` lead out of `folder`, or form a loop."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    # a loop of links: RuntimeError up to Python 3.12, OSError from 3.13
    except (RuntimeError, OSError):
        return True


def enumerated(names: Sequence[str], what: str, *, most: int = 5) -> str:
    """The number of things, and the first of their names.

    >>> enumerated(["a", "b", "c"], "case", most=2)
    '3 cases (a, b, ...)'
    """
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'} ({shown})"
