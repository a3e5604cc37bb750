"""The files of a prediction, on the voxel grid of its input and under the input's name.

NAME is the name of the file, or CASE if the channels are in files CASE_0000, CASE_0001, ..., or that of the
case that `prepare dicom` makes of a series.

NIfTI      NAME_prob.nii.gz         float32. Two classes: the foreground's probability (*space). More classes:
                                    all of them, the background first, on a last axis (X, Y, Z, C)
           NAME_mask.nii.gz         uint8, class numbers 0 .. C - 1. Both have the input's affine and codes
picture    NAME_prob.png            16-bit grey, 65535 is 1. More classes: one NAME_prob_CLASS.png each
           NAME_mask.png            8-bit. Two classes: 0 and 255. More classes: class numbers
           .tif instead, with one page per slice, if the input has several pages
DICOM      NAME_prob.dcm, NAME_mask.dcm   see `dicom_outputs`; NAME_uncertainty is a NIfTI
all        NAME_uncertainty         if asked for: entropy of the probabilities, divided by its largest value,
                                    log C: 0 is certain, 1 is undecided (of two classes, entropy in bits).
                                    Like the probabilities: float32 in a NIfTI, 65535 is 1 in a picture
volumes.csv                         for each input and foreground class: the volume of the mask, the expected
                                    volume, sum p, and if asked for an interval from low to high. In ml if a
                                    voxel has three known sides, and always in voxels (pixels of a 2D image)
prediction.json                     the run and options of all predictions in the folder
"""

import csv
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image

from ..data.sources.dicom_series import series_grid
from ..data.sources.readers import NIFTI_SUFFIXES, suffix_of
from ..decisions.conformal import ConformalInterval
from ..decisions.volumes import volume_interval, voxel_ml
from ..limits import MAX_CSV_BYTES, check_file, read_json
from ..metrics.cells import escaped_row, unescaped_cell
from ..paths import PredictionFolder, atomic_write, write_text
from ..runs.scoring import ONE_ML
from .dicom_outputs import write_segmentations
from .inputs import InputCase, InputImage


class Volume(NamedTuple):
    """One row of volumes.csv; a cell without a value is empty."""

    case: str
    class_name: str
    volume_ml: str
    expected_ml: str
    low_ml: str
    high_ml: str
    volume_voxels: str
    expected_voxels: str
    low_voxels: str
    high_voxels: str
    interval: str
    spacing_mm: str


VOLUME_COLUMNS = tuple("class" if name == "class_name" else name for name in Volume._fields)


@dataclass(frozen=True)
class IntervalOptions:
    """Intervals of volumes: their level, such as 0.9, and the correction, None for those of nested raters."""

    level: float
    correction: ConformalInterval | None = None

    @property
    def name(self) -> str:
        """As volumes.csv names them."""
        return f"{'nested' if self.correction is None else 'conformal'} {self.level:g}"


class OutputFolder:
    """The folder of predictions: file names, settings, and the rows of volumes.csv by case.

    interval: of the volumes; None writes none. uncertainty: whether to write maps of it.
    """

    def __init__(
        self,
        path: Path,
        class_names: Sequence[str],
        *,
        interval: IntervalOptions | None = None,
        uncertainty: bool = False,
    ) -> None:
        self.folder, self.class_names = PredictionFolder(path), tuple(class_names)
        self.interval, self.uncertainty = interval, uncertainty
        self.volumes = read_volumes(self.folder.volumes)

    def files(self, case: InputCase) -> list[Path]:
        """The mask, the probabilities (a picture has one file per foreground class), and the uncertainty."""
        suffix, parts = ".nii.gz", [""]
        if case.modality:
            suffix = ".dcm"
        elif suffix_of(case.path) not in NIFTI_SUFFIXES:
            suffix = ".tif" if _num_pages(case.path) > 1 else ".png"
            parts = self._class_parts()
        names = [f"{name}{suffix}" for name in ("mask", *(f"prob{part}" for part in parts))]
        if self.uncertainty:
            names.append(f"uncertainty{'.nii.gz' if case.modality else suffix}")
        return [self.folder.path / f"{case.name}_{name}" for name in names]

    def _class_parts(self) -> list[str]:
        """What distinguishes the file names of the foreground classes; empty if there is one class."""
        foreground = self.class_names[1:]
        if len(foreground) == 1:
            return [""]
        parts = ["_" + re.sub(r"[^A-Za-z0-9+=@.-]+", "_", name) for name in foreground]
        are_equal = len({part.casefold() for part in parts}) < len(parts)
        return [f"_{number}" for number in range(1, len(parts) + 1)] if are_equal else parts

    def is_done(self, case: InputCase) -> bool:
        """Whether all files of a prediction exist, and its volumes are in volumes.csv."""
        return case.name in self.volumes and all(path.is_file() for path in self.files(case))

    def check_settings(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Write the settings; a ValueError if the folder has predictions with others, unless `overwrite`."""
        path = self.folder.settings
        previous = _read_settings(path) if path.is_file() else settings
        different = [name for name in settings if previous.get(name) != settings[name]]
        if different:
            if not overwrite:
                raise ValueError(
                    f"{self.folder.path} has predictions with other settings ({', '.join(different)}): "
                    "choose another folder with -o, or replace them with --overwrite"
                )
            # predictions with other settings must not count as done, even if this run is killed
            self.volumes = {}
            self.folder.volumes.unlink(missing_ok=True)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings, indent=1) + "\n")

    def write(
        self, image: InputImage, prob: Float32[np.ndarray, "C *space"], mask: UInt8[np.ndarray, "*space"]
    ) -> None:
        """Write the files of an input; its volumes are written by `close`."""
        mask_path, *prob_paths = self.files(image.case)
        uncertainty_path = prob_paths.pop() if self.uncertainty else None
        if image.case.modality:
            write_segmentations(prob_paths[0], mask_path, image.case.files, prob, mask, self.class_names)
            if uncertainty_path is not None:
                nifti: Any = nibabel.Nifti1Image
                affine = series_grid(image.case.files).affine
                _write_stream(uncertainty_path, nifti(uncertainty_of(prob), affine))
        elif suffix_of(image.case.path) in NIFTI_SUFFIXES:
            _write_nifti(prob_paths[0], image, prob[1] if len(prob) == 2 else prob, highest=1)
            _write_nifti(mask_path, image, mask, highest=len(prob) - 1)
            if uncertainty_path is not None:
                _write_nifti(uncertainty_path, image, uncertainty_of(prob), highest=1)
        else:
            for path, foreground in zip(prob_paths, prob[1:], strict=True):
                _write_picture(path, _in_16_bits(foreground))
            _write_picture(mask_path, mask * np.uint8(255) if len(prob) == 2 else mask)
            if uncertainty_path is not None:
                _write_picture(uncertainty_path, _in_16_bits(uncertainty_of(prob)))
        self.volumes[image.case.name] = volumes_of(image, prob, mask, self.class_names, self.interval)

    def close(self) -> None:
        """Write volumes.csv, sorted by case."""
        if not self.volumes:
            return
        with (
            atomic_write(self.folder.volumes) as temp_path,
            temp_path.open("w", newline="", encoding="utf-8") as file,
        ):
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(VOLUME_COLUMNS)
            for case in sorted(self.volumes):
                for row in self.volumes[case]:
                    # the other columns are numbers
                    rows.writerow((*escaped_row(row[:2]), *row[2:]))


def volumes_of(
    image: InputImage,
    prob: Float32[np.ndarray, "C *space"],
    mask: UInt8[np.ndarray, "*space"],
    class_names: Sequence[str],
    interval: IntervalOptions | None = None,
) -> list[Volume]:
    """One row per foreground class."""
    sides = image.spacing_mm or ()
    per_voxel = float(voxel_ml(sides)) if len(sides) == 3 else None
    expected = np.array([part.sum(dtype=np.float64) for part in prob[1:]])
    low, high = np.full((2, len(expected)), np.nan)
    if interval is not None:
        # in voxels: a correction is relative to the volume, so it is the same in ml
        ends = volume_interval(torch.from_numpy(prob)[None], interval.level, spacing_mm=ONE_ML)
        low, high = (end[0, 1:].numpy() for end in ends)
        if interval.correction is not None:
            low, high = interval.correction.apply(low, high, expected=expected)
    rows = []
    for number, class_name in enumerate(class_names[1:]):
        voxels = (float((mask == number + 1).sum()), expected[number], low[number], high[number])
        in_ml = ["" if per_voxel is None else _cell(n * per_voxel, ".6g") for n in voxels]
        in_voxels = [f"{voxels[0]:.0f}", *(_cell(n, ".3f") for n in voxels[1:])]
        name = "" if interval is None else interval.name
        spacing = " x ".join(f"{side:.6g}" for side in sides)
        rows.append(Volume._make((image.case.name, class_name, *in_ml, *in_voxels, name, spacing)))
    return rows


def _cell(number: float, layout: str) -> str:
    return "" if np.isnan(number) else f"{number:{layout}}"


def uncertainty_of(prob: Float32[np.ndarray, "C *space"]) -> Float32[np.ndarray, "*space"]:
    """Entropy of the class probabilities of each voxel divided by log C: 0 is certain, 1 is undecided.

    >>> uncertainty_of(np.array([[1, 0.5, 0.11], [0, 0.5, 0.89]], dtype=np.float32)).round(2).tolist()
    [0.0, 1.0, 0.5]
    """
    # one class after the other: the copies of all classes of a volume would not fit
    entropy = np.zeros(prob.shape[1:], dtype=np.float32)
    for part in prob:
        # 0 log 0 is 0
        entropy -= part * np.log(np.maximum(part, np.finfo(np.float32).tiny))
    share: np.ndarray = np.clip(entropy / np.float32(np.log(len(prob))), 0, 1)
    return share


def _in_16_bits(share: Float32[np.ndarray, "*space"]) -> np.ndarray:
    return np.rint(share * np.float32(65535)).astype(np.uint16)


def read_volumes(path: Path) -> dict[str, list[Volume]]:
    """The rows of a volumes.csv by case; empty if there is no such file."""
    if not path.is_file():
        return {}
    check_file(path, max_bytes=MAX_CSV_BYTES)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = [*csv.reader(file)] or [[]]
    except (UnicodeDecodeError, csv.Error):
        # not a table at all
        header, rows = [], []
    if tuple(header) != VOLUME_COLUMNS or any(len(row) != len(VOLUME_COLUMNS) for row in rows):
        raise ValueError(
            f"{path} was not written by this version of semidice: its columns must be "
            f"{', '.join(VOLUME_COLUMNS)}; move the file, or choose another folder with -o"
        )
    volumes: dict[str, list[Volume]] = {}
    for row in rows:
        volume = Volume(*map(unescaped_cell, row[:2]), *row[2:])
        volumes.setdefault(volume.case, []).append(volume)
    return volumes


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = read_json(path)
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _write_nifti(path: Path, image: InputImage, values: np.ndarray, *, highest: int) -> None:
    """Write values (*space), or (C, *space), as NIfTI with the input's header, reproducible to the byte."""
    source: Any = nibabel.load(image.case.path)
    header = source.header.copy()
    # the intent and the extensions describe the input's values, not the result
    header.extensions.clear()
    header.set_intent("none")
    header.set_data_dtype(values.dtype)
    header["cal_min"], header["cal_max"], header["descrip"] = 0, highest, b"semidice"
    if values.ndim > len(image.space):
        values = np.moveaxis(values, 0, -1)
        # in the file of a single image too, classes are the fourth axis: the third is an axis of space
        if len(image.space) == 2:
            values = values[:, :, None]
        # an axis that the input lacks may have the voxel size 0, which other readers refuse
        header["pixdim"][3:5] = np.where(header["pixdim"][3:5] > 0, header["pixdim"][3:5], 1)
    _write_stream(path, type(source)(values, None, header))


def _write_stream(path: Path, image: Any) -> None:
    with (
        atomic_write(path) as temp_path,
        temp_path.open("wb") as file,
        # level 1, like nibabel: higher levels are slower and hardly make noisy values smaller
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as stream,
    ):
        image.to_stream(stream)


def _write_picture(path: Path, pixels: np.ndarray) -> None:
    stack = np.ascontiguousarray(pixels).reshape(-1, *pixels.shape[-2:])
    first, *others = (Image.fromarray(page) for page in stack)
    options: dict[str, Any] = {"format": "PNG"}
    if path.suffix == ".tif":
        options = {"format": "TIFF", "save_all": True, "append_images": others, "compression": "tiff_deflate"}
    with atomic_write(path) as temp_path:
        first.save(temp_path, **options)


def _num_pages(source: Path) -> int:
    try:
        check_file(source)
        with Image.open(source, formats=("PNG", "TIFF")) as picture:
            return int(getattr(picture, "n_frames", 1))
    # `read_input` reports a file that cannot be read
    except Exception:
        return 1
