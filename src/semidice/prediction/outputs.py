"""The files of a prediction, on the voxel grid of its input and under the input's name.

NAME is the name of the file, or CASE if the channels are in files CASE_0000, CASE_0001, ..., or that of the
case that `prepare dicom` makes of a series.

NIfTI      NAME_prob.nii.gz         float32. Two classes: the foreground's probability (*space). More classes:
                                    all of them, the background first, on a last axis (X, Y, Z, C)
           NAME_mask.nii.gz         uint8, class numbers 0 .. C - 1. Both have the input's affine and codes
picture    NAME_prob.png            16-bit grey, 65535 is 1. More classes: NAME_prob_1.png, ..._2.png, ...
           NAME_mask.png            8-bit. Two classes: 0 and 255. More classes: class numbers
           .tif instead, with one page per slice, if the input has several pages
DICOM      NAME_prob.dcm, NAME_mask.dcm   see `dicom_outputs`; NAME_uncertainty is a NIfTI
all        NAME_uncertainty         if asked for: entropy of the probabilities, divided by its largest value,
                                    log C: 0 is certain, 1 is undecided (of two classes, entropy in bits).
                                    Like the probabilities: float32 in a NIfTI, 65535 is 1 in a picture
volumes.csv                         for each input and foreground class: the volume of the mask, the expected
                                    volume, sum p, and if asked for an interval from low to high. In ml if a
                                    voxel has three known sides, and always in voxels (pixels of a 2D image)
prediction.json                     the run and options of all predictions in the folder, the SHA-256 of the
                                    files of each input, and its volumes, of which volumes.csv is made
"""

import csv
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image
from pydantic import BaseModel, ConfigDict

from ..data.sources.dicom_files import series_grid
from ..data.sources.files import NIFTI_SUFFIXES, read_header, suffix_of
from ..decisions.conformal import ConformalInterval, Intervals
from ..decisions.volumes import volume_interval, voxel_ml
from ..errors import UserError, listing, read_record
from ..paths import PredictionFolder, atomic_write, file_hash, write_text
from ..runs.scoring import ONE_ML
from ..statistics.cases import escaped_cell
from .dicom_outputs import write_segmentations
from .inputs import InputCase, InputImage

# a cell without a value is empty
VOLUME_COLUMNS = (
    "case",
    "class",
    *(f"{number}_{unit}" for unit in ("ml", "voxels") for number in ("volume", "expected", "low", "high")),
    "interval",
    "spacing_mm",
)
Row = dict[str, str]


@dataclass(frozen=True)
class IntervalOptions:
    """Intervals of volumes: their level, such as 0.9, and the correction, None for those of nested raters."""

    level: float
    correction: ConformalInterval | None = None

    @property
    def name(self) -> str:
        """As volumes.csv names them."""
        return f"{'nested' if self.correction is None else 'conformal'} {self.level:g}"


class Finished(BaseModel):
    """An input that was predicted: the hash of its files, and its rows of volumes.csv."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    volumes: tuple[Row, ...]


class PredictionRecord(BaseModel):
    """The content of prediction.json."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    inputs: dict[str, Finished]


class OutputFolder:
    """The folder of predictions: names of its files, and what is finished in it.

    interval: of the volumes; None writes none. uncertainty: whether to write maps of it.
    """

    def __init__(
        self,
        path: Path,
        class_names: Sequence[str],
        interval: IntervalOptions | None = None,
        *,
        uncertainty: bool = False,
    ) -> None:
        self.folder, self.class_names = PredictionFolder(path), tuple(class_names)
        self.interval, self.uncertainty = interval, uncertainty
        self.record = PredictionRecord(settings={}, inputs={})

    def files(self, case: InputCase) -> list[Path]:
        """The mask, the probabilities (a picture has one file per foreground class), and the uncertainty."""
        suffix, parts = ".nii.gz", [""]
        if case.modality:
            suffix = ".dcm"
        elif suffix_of(case.path) not in NIFTI_SUFFIXES:
            suffix = ".png"
            # `read_input` reports a file that cannot be read
            with suppress(UserError):
                suffix = ".tif" if len(read_header(case.path).shape) > 2 else ".png"
            if len(self.class_names) > 2:
                parts = [f"_{number}" for number in range(1, len(self.class_names))]
        names = [f"{name}{suffix}" for name in ("mask", *(f"prob{part}" for part in parts))]
        if self.uncertainty:
            names.append(f"uncertainty{'.nii.gz' if case.modality else suffix}")
        return [self.folder.path / f"{case.name}_{name}" for name in names]

    def open(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Write the settings; a UserError if the folder has predictions with others, unless `overwrite`."""
        path, advice = self.folder.settings, "remove the file, or choose another folder with -o"
        # as JSON reads them again: tuples are lists
        self.record = PredictionRecord(settings=json.loads(json.dumps(settings)), inputs={})
        if path.is_file():
            earlier = read_record(path, PredictionRecord, advice)
            now, then = self.record.settings, earlier.settings
            different = [name for name in {**then, **now} if then.get(name) != now.get(name)]
            if different and not overwrite:
                raise UserError(
                    f"{self.folder.path} has predictions with other settings ({', '.join(different)}): "
                    "choose another folder with -o, or replace them with --overwrite"
                )
            # predictions with other settings must not count as done, even if this run is killed
            self.record.inputs |= {} if different else earlier.inputs
        elif self.folder.volumes.exists():
            raise UserError(
                f"{self.folder.volumes} was not written by `semidice predict`: choose another folder with -o"
            )
        self.close()

    def remaining(self, cases: Sequence[InputCase], *, overwrite: bool) -> list[InputCase]:
        """The inputs whose results are not all there; a UserError if results are those of other files."""
        finished = [
            case
            for case in cases
            if case.name in self.record.inputs and all(path.is_file() for path in self.files(case))
        ]
        if overwrite:
            return list(cases)
        inputs = self.record.inputs
        changed = [str(case.path) for case in finished if inputs[case.name].sha256 != input_hash(case)]
        if changed:
            raise UserError(
                f"{self.folder.path} has results of other files with the names of "
                f"{listing(changed, 'input')}, or these were changed since: choose another folder with -o, "
                "or replace the results with --overwrite"
            )
        return [case for case in cases if case not in finished]

    def write(
        self, image: InputImage, prob: Float32[np.ndarray, "C *space"], mask: UInt8[np.ndarray, "*space"]
    ) -> None:
        """Write the files of an input; its volumes are written by `close`."""
        case = image.case
        mask_path, *prob_paths = self.files(case)
        uncertainty_path = prob_paths.pop() if self.uncertainty else None
        if case.modality:
            write_segmentations(prob_paths[0], mask_path, case.files, prob, mask, self.class_names)
            if uncertainty_path is not None:
                nifti: Any = nibabel.Nifti1Image
                affine = series_grid(case.files).affine
                _write_stream(uncertainty_path, nifti(uncertainty_of(prob), affine))
        elif suffix_of(case.path) in NIFTI_SUFFIXES:
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
        rows = volumes_of(image, prob, mask, self.class_names, self.interval)
        self.record.inputs[case.name] = Finished(sha256=input_hash(case), volumes=tuple(rows))

    def close(self) -> None:
        """Write what is finished, and its volumes.csv, sorted by case."""
        self.record.inputs = dict(sorted(self.record.inputs.items()))
        write_text(self.folder.settings, json.dumps(self.record.model_dump(), indent=1) + "\n")
        with (
            atomic_write(self.folder.volumes) as temp_path,
            temp_path.open("w", newline="", encoding="utf-8") as file,
        ):
            rows = csv.DictWriter(file, VOLUME_COLUMNS, extrasaction="ignore", lineterminator="\n")
            rows.writeheader()
            for finished in self.record.inputs.values():
                for row in finished.volumes:
                    rows.writerow({name: escaped_cell(cell) for name, cell in row.items()})


def input_hash(case: InputCase) -> str:
    """SHA-256 of the files of an input; "" if one cannot be read."""
    try:
        return hashlib.sha256("".join(map(file_hash, case.files)).encode()).hexdigest()
    except OSError:
        return ""


def volumes_of(
    image: InputImage,
    prob: Float32[np.ndarray, "C *space"],
    mask: UInt8[np.ndarray, "*space"],
    class_names: Sequence[str],
    interval: IntervalOptions | None = None,
) -> list[Row]:
    """One row of volumes.csv per foreground class."""
    sides = image.grid.spacing_mm or ()
    per_voxel = float(voxel_ml(sides)) if len(sides) == 3 else None
    expected = np.array([part.sum(dtype=np.float64) for part in prob[1:]])
    low, high = np.full((2, len(expected)), np.nan)
    if interval is not None:
        # in voxels: a correction is relative to the volume, so it is the same in ml
        ends = volume_interval(torch.from_numpy(prob)[None], interval.level, spacing_mm=ONE_ML)
        low, high = (end[0, 1:].numpy() for end in ends)
        if interval.correction is not None:
            low, high = interval.correction.apply(Intervals(low, high, expected))
    rows = []
    for number, class_name in enumerate(class_names[1:]):
        voxels = (float((mask == number + 1).sum()), expected[number], low[number], high[number])
        cells = [
            image.case.name,
            class_name,
            *("" if per_voxel is None else _cell(n * per_voxel, ".6g") for n in voxels),
            f"{voxels[0]:.0f}",
            *(_cell(n, ".3f") for n in voxels[1:]),
            "" if interval is None else interval.name,
            " x ".join(f"{side:.6g}" for side in sides),
        ]
        rows.append(dict(zip(VOLUME_COLUMNS, cells, strict=True)))
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


def _write_nifti(path: Path, image: InputImage, values: np.ndarray, *, highest: int) -> None:
    """Write values (*space), or (C, *space), as NIfTI with the input's header, reproducible to the byte."""
    source: Any = nibabel.load(image.case.path)
    header, num_axes = source.header.copy(), len(image.grid.shape)
    # the intent and the extensions describe the input's values, not the result
    header.extensions.clear()
    header.set_intent("none")
    header.set_data_dtype(values.dtype)
    header["cal_min"], header["cal_max"], header["descrip"] = 0, highest, b"semidice"
    if values.ndim > num_axes:
        values = np.moveaxis(values, 0, -1)
        # in the file of a single image too, classes are the fourth axis: the third is an axis of space
        if num_axes == 2:
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
