"""Small DICOM series and segmentations: pydicom writes the images, highdicom the segmentations."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import highdicom
import numpy as np
from highdicom.sr.coding import CodedConcept
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid
from raw_trees import ellipsoids
from typer.testing import CliRunner

from semidice.cli import app

CT, ENHANCED_CT = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.2.1"
MR = "1.2.840.10008.5.1.4.1.1.4"
# rows and columns are turned about two axes, so that every number of the affine matters
TURNED = np.array([[0.96, 0.28, 0.0], [-0.224, 0.768, 0.6]])
STRAIGHT = np.array([[1.0, 0, 0], [0, 1, 0]])
ORIGIN = np.array([-120.0, -95.5, 40.25])
# between columns, between rows, between slices
SPACING = (0.7, 0.8, 2.5)
SPACE = (36, 40, 6)
TISSUE = CodedConcept("85756007", "SCT", "Tissue")


def new_volume(seed: int = 0, *, num_raters: int = 2, num_classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """HU (columns, rows, slices) int16, and class maps (raters, columns, rows, slices)."""
    image, masks = ellipsoids(seed, SPACE, num_raters=num_raters, num_classes=num_classes)
    return (image * 400 - 150).astype(np.int16), masks


def affine_of(directions: np.ndarray = TURNED, spacing: Sequence[float] = SPACING) -> np.ndarray:
    """From voxels (column, row, slice) to RAS: DICOM's first two axes point the other way."""
    steps = np.column_stack([*directions, np.cross(*directions)]) * spacing
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = steps, ORIGIN
    return np.diag([-1.0, -1, 1, 1]) @ affine


def slice_dataset(pixels: np.ndarray, position: np.ndarray, **changes: Any) -> Dataset:
    """One CT slice (rows, columns); stored values are HU + 1024. changes: other elements."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    elements = {
        "SOPClassUID": CT,
        "SOPInstanceUID": generate_uid(),
        "Modality": "CT",
        "PatientID": "P1",
        "PatientName": "Doe^Jane",
        "PatientBirthDate": "",
        "PatientSex": "",
        "StudyInstanceUID": "1.2.3.4",
        "StudyDate": "20200101",
        "StudyTime": "",
        "StudyID": "",
        "AccessionNumber": "",
        "ReferringPhysicianName": "",
        "SeriesInstanceUID": "1.2.3.4.5",
        "FrameOfReferenceUID": "1.2.3.4.6",
        "PositionReferenceIndicator": "",
        "InstanceNumber": 1,
        "Manufacturer": "",
        "ImageType": ["ORIGINAL", "PRIMARY", "AXIAL"],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "Rows": pixels.shape[-2],
        "Columns": pixels.shape[-1],
        "BitsAllocated": 16,
        "BitsStored": 16,
        "HighBit": 15,
        "PixelRepresentation": 0,
        "PixelSpacing": [SPACING[1], SPACING[0]],
        "SliceThickness": SPACING[2],
        "ImageOrientationPatient": TURNED.reshape(-1).tolist(),
        "ImagePositionPatient": [float(f"{number:.9g}") for number in position],
        "RescaleSlope": 1,
        "RescaleIntercept": -1024,
    }
    for name, value in (elements | changes).items():
        setattr(dataset, name, value)
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    dataset.PixelData = (pixels.astype(np.int32) + 1024).astype(np.uint16).tobytes()
    return dataset


def series_datasets(
    volume: np.ndarray,
    *,
    directions: np.ndarray = TURNED,
    spacing: Sequence[float] = SPACING,
    shear: float = 0.0,
    **changes: Any,
) -> list[Dataset]:
    """The slices of a volume (columns, rows, slices). shear: mm of each slice along the rows."""
    normal = np.cross(*directions)
    step = normal * spacing[2] + directions[1] * shear
    changes = {
        "ImageOrientationPatient": directions.reshape(-1).tolist(),
        "PixelSpacing": [spacing[1], spacing[0]],
        "SliceThickness": spacing[2],
    } | changes
    return [
        slice_dataset(volume[:, :, number].T, ORIGIN + number * step, InstanceNumber=number + 1, **changes)
        for number in range(volume.shape[2])
    ]


def enhanced(volume: np.ndarray, order: Sequence[int]) -> Dataset:
    """A multi-frame CT whose frames are the slices in this order; the rescale of each frame differs."""
    frames = np.stack([volume[:, :, number].T for number in order])
    dataset = slice_dataset(frames, ORIGIN, SOPClassUID=ENHANCED_CT, NumberOfFrames=len(order))
    for name in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness"):
        delattr(dataset, name)
    del dataset.RescaleSlope, dataset.RescaleIntercept
    stored = np.empty(frames.shape, dtype=np.uint16)
    shared, per_frame = Dataset(), []
    shared.PixelMeasuresSequence = [Dataset()]
    shared.PixelMeasuresSequence[0].PixelSpacing = [SPACING[1], SPACING[0]]
    shared.PixelMeasuresSequence[0].SliceThickness = SPACING[2]
    shared.PlaneOrientationSequence = [Dataset()]
    shared.PlaneOrientationSequence[0].ImageOrientationPatient = TURNED.reshape(-1).tolist()
    for index, number in enumerate(order):
        frame = Dataset()
        frame.PlanePositionSequence = [Dataset()]
        position = ORIGIN + number * SPACING[2] * np.cross(*TURNED)
        frame.PlanePositionSequence[0].ImagePositionPatient = [float(f"{part:.9g}") for part in position]
        frame.PixelValueTransformationSequence = [Dataset()]
        frame.PixelValueTransformationSequence[0].RescaleSlope = 0.5
        frame.PixelValueTransformationSequence[0].RescaleIntercept = -1000 - 10 * number
        frame.PixelValueTransformationSequence[0].RescaleType = "HU"
        stored[index] = (frames[index].astype(np.int32) + 1000 + 10 * number) * 2
        per_frame.append(frame)
    dataset.SharedFunctionalGroupsSequence = [shared]
    dataset.PerFrameFunctionalGroupsSequence = per_frame
    dataset.PixelData = stored.tobytes()
    return dataset


def save(dataset: Dataset, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def write_series(folder: Path, datasets: Sequence[Dataset], seed: int = 0) -> list[Path]:
    """Write slices under names that say nothing of their order."""
    names = np.random.default_rng(seed).permutation(len(datasets))
    return [save(each, folder / f"IM{name:04d}") for name, each in zip(names, datasets, strict=True)]


def segmentation(
    sources: Sequence[Dataset],
    values: np.ndarray,
    *,
    creator: str | None = None,
    description: str | None = None,
    labels: Sequence[str] = ("nodule",),
    kind: str = "BINARY",
    **options: Any,
) -> Any:
    """A segmentation by highdicom of values (columns, rows, slices), or with segments first."""
    array = values.T
    with warnings.catch_warnings():
        # of UIDs and names that are not as they should be
        warnings.simplefilter("ignore")
        return highdicom.seg.Segmentation(
            source_images=list(sources),
            pixel_array=np.ascontiguousarray(array),
            segmentation_type=kind,
            segment_descriptions=[
                highdicom.seg.SegmentDescription(number, label, TISSUE, TISSUE, "MANUAL")
                for number, label in enumerate(labels, start=1)
            ],
            series_instance_uid=generate_uid(),
            series_number=100,
            sop_instance_uid=generate_uid(),
            instance_number=1,
            manufacturer="test",
            manufacturer_model_name="test",
            software_versions="1",
            device_serial_number="1",
            content_creator_name=creator,
            series_description=description,
            **options,
        )


def write_tree(
    root: Path,
    *,
    patients: Sequence[str] = ("P1", "P2"),
    raters: Sequence[str] = ("Ada", "Bob"),
    num_classes: int = 2,
    change: Callable[[Dataset], None] = lambda dataset: None,
) -> Path:
    """One series per entry of `patients`, and a binary segmentation of each rater."""
    labels = ("nodule",) if num_classes == 2 else tuple(f"part {n}" for n in range(1, num_classes))
    for number, patient in enumerate(patients):
        image, masks = new_volume(number, num_raters=len(raters), num_classes=num_classes)
        datasets = series_datasets(
            image,
            PatientID=patient,
            SeriesInstanceUID=f"1.2.3.4.{number + 10}",
            StudyInstanceUID=f"1.2.3.{number}",
        )
        write_series(root / f"scan{number}" / "images", datasets, seed=number)
        for rater, mask in zip(raters, masks, strict=True):
            drawn = segmentation(datasets, mask, creator=f"{rater}^Dr", labels=labels)
            change(drawn)
            save(drawn, root / f"scan{number}" / f"{rater}.dcm")
    return root


def problem_of(root: Path) -> str:
    """The message of `semidice prepare dicom`, which must fail."""
    result = CliRunner().invoke(
        app, ["prepare", "dicom", str(root), str(root.parent / "out"), "--workers", "1"]
    )
    assert result.exit_code == 1, result.output
    assert "Doe" not in result.output
    return " ".join(result.output.split())
