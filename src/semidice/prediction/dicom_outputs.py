"""Writes probabilities and masks of a DICOM series as DICOM segmentations (SEG) that refer to its images.

Probabilities are FRACTIONAL with 255 steps, masks BINARY. Each foreground class is a segment with the name of
the class as its label; slices without foreground have no frame. Patient and study are those of the series.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from .. import __version__
from ..data.sources.dicom_files import IMAGE_CLASSES, reading, series_grid
from ..errors import UserError
from ..paths import atomic_write

# a label in DICOM has at most 64 characters
_MAX_LABEL = 64
# elements of the patient and study that a segmentation must have and an anonymised image may lack
_MAY_BE_EMPTY = (
    "PatientID",
    "PatientName",
    "PatientBirthDate",
    "PatientSex",
    "AccessionNumber",
    "StudyID",
    "StudyDate",
    "StudyTime",
)
_SERIES_NUMBERS = {"FRACTIONAL": 9001, "BINARY": 9002}


def write_segmentations(
    prob_path: Path,
    mask_path: Path,
    files: Sequence[Path],
    prob: Float32[np.ndarray, "C columns rows slices"],
    mask: UInt8[np.ndarray, "columns rows slices"],
    class_names: Sequence[str],
) -> None:
    """Write both segmentations of the series in `files`, on the grid of `series_grid`."""
    grid = series_grid(files)
    sources = [_source(path) for path in dict.fromkeys(plane.path for plane in grid.planes)]
    # highdicom takes the frames of a single file in their order in the file
    order = np.argsort([plane.frame for plane in grid.planes], kind="stable")
    shares = np.ascontiguousarray(np.clip(prob[1:], 0, 1).T[order])
    try:
        _write(prob_path, "FRACTIONAL", sources, shares, class_names)
        _write(mask_path, "BINARY", sources, np.ascontiguousarray(mask.T[order]), class_names)
    # highdicom has no common error for images that it cannot refer to
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the segmentation of {files[0]} cannot be written: {error}") from error


def _source(path: Path) -> Any:
    """The elements of an image without its pixels."""
    with reading(path) as pydicom:
        dataset = pydicom.dcmread(path, stop_before_pixels=True)
        for name in _MAY_BE_EMPTY:
            if name not in dataset:
                setattr(dataset, name, None)
        if "Modality" not in dataset:
            dataset.Modality = IMAGE_CLASSES[dataset.SOPClassUID]
        return dataset


def _write(path: Path, kind: str, sources: Sequence[Any], values: np.ndarray, names: Sequence[str]) -> None:
    import highdicom
    from highdicom.sr.coding import CodedConcept

    tissue = CodedConcept("85756007", "SCT", "Tissue")
    intelligence = CodedConcept("123109", "DCM", "Artificial Intelligence")
    algorithm = highdicom.AlgorithmIdentificationSequence(
        name="semidice", family=intelligence, version=__version__
    )
    segments = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:_MAX_LABEL],
            segmented_property_category=tissue,
            segmented_property_type=tissue,
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
        )
        for number, name in enumerate(names[1:], start=1)
    ]
    description = "semidice probabilities" if kind == "FRACTIONAL" else "semidice masks"
    with warnings.catch_warnings():
        # harmless faults of the source images
        warnings.simplefilter("ignore")
        segmentation = highdicom.seg.Segmentation(
            source_images=sources,
            pixel_array=values,
            segmentation_type=kind,
            segment_descriptions=segments,
            series_instance_uid=highdicom.UID(),
            series_number=_SERIES_NUMBERS[kind],
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer="semidice",
            manufacturer_model_name="semidice",
            software_versions=__version__,
            device_serial_number="0",
            fractional_type="PROBABILITY",
            max_fractional_value=255,
            content_description=description,
            series_description=description,
            # a segmentation must have a frame
            omit_empty_frames=bool(values.any()),
        )
        with atomic_write(path) as temp_path:
            segmentation.save_as(temp_path)
