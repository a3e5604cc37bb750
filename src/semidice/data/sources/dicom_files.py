"""Reads one DICOM series, CT or MR, as a volume that knows where its voxels are, and segmentations of it.

The volume is (columns, rows, slices). Slices are sorted along the normal of their plane, the cross product of
the directions of a row and of a column. The affine leads to right, anterior, superior (RAS), where DICOM has
left, posterior, superior. So array, spacing and affine are those of the series written as NIfTI by ITK.
Intensities are stored values times slope plus intercept: HU in CT. MONOCHROME1 changes only how HU are shown;
in MR, whose values have no unit, it is refused. A slice must be at its place in a regular stack to within 0.1
of the slice distance along the normal, and 0.1 pixel across.

Each frame of a segmentation (SEG) is put into the slice at its position; slices without a frame are
background. The class of a segment is that of its label. BINARY: a voxel of two classes is an error.
FRACTIONAL, probability or occupancy: the class with the largest value, background having the rest to one; at
a tie the lowest class, so of two classes the foreground needs more than half.
Left out: a tilted gantry, slices of different distance, several volumes in one series.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8

from ... import errors
from ...errors import UserError, given
from ..geometry import Grid, Placement, placement_difference
from .files import ImageFile, MaskFile, usable_intensities
from .raw import check_size

# classes of objects that hold CT or MR images, the enhanced ones with several frames per file
IMAGE_CLASSES = {
    "1.2.840.10008.5.1.4.1.1.2": "CT",
    "1.2.840.10008.5.1.4.1.1.2.1": "CT",
    "1.2.840.10008.5.1.4.1.1.2.2": "CT",
    "1.2.840.10008.5.1.4.1.1.4": "MR",
    "1.2.840.10008.5.1.4.1.1.4.1": "MR",
    "1.2.840.10008.5.1.4.1.1.4.4": "MR",
}
SEGMENTATION_CLASS = "1.2.840.10008.5.1.4.1.1.66.4"
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
# of the slice distance along the normal, and of a pixel across
_TOLERANCE = 0.1
# of a direction's length, and of the cosine between two of them
_DIRECTION_TOLERANCE = 1e-3
# of the slice distance: slices may be 0.1 away from a regular grid, and a frame as much from its slice
_MAX_BETWEEN = 0.2


@dataclass(frozen=True)
class Plane:
    """One slice in a file. position, directions (along a row, along a column): LPS; lengths in mm.

    spacing: between columns, and between rows. slope, intercept: None if the file does not say.
    thickness: distance of slices, or else their thickness, by the header; 0 if it does not say.
    """

    path: Path
    frame: int
    position: Float64[np.ndarray, "3"]
    directions: Float64[np.ndarray, "2 3"]
    spacing: Float64[np.ndarray, "2"]
    slope: float | None
    intercept: float | None
    thickness: float

    @property
    def placement(self) -> Placement:
        """Steps along columns and rows, and the first voxel: RAS, mm."""
        steps = self.directions * self.spacing[:, None]
        placement: np.ndarray = _LPS_TO_RAS @ np.column_stack([*steps, self.position])
        return placement

    def __str__(self) -> str:
        return f"{self.path.name} frame {self.frame + 1}" if self.frame else self.path.name


@dataclass(frozen=True)
class SeriesGrid:
    """Planes of a series in the order of its slices, and where its voxels are (RAS).

    spacing_mm: between columns, rows and slices; None if a single slice does not say how thick it is.
    """

    planes: tuple[Plane, ...]
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float] | None
    affine: Float64[np.ndarray, "4 4"]


def is_dicom(path: Path) -> bool:
    """Whether a file begins like DICOM: with DICM after 128 bytes."""
    with errors.reading(path), path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """pydicom, without its warnings; its errors become a UserError that names the file."""
    import pydicom

    with warnings.catch_warnings(), errors.reading(path, "correct, copy or export it again"):
        # harmless faults of real files, such as a text that is too long
        warnings.simplefilter("ignore")
        yield pydicom


def read_header(path: Path) -> Any:
    """The elements of a file, without its pixels."""
    with reading(path) as pydicom:
        return pydicom.dcmread(path, stop_before_pixels=True)


def _read_whole(path: Path) -> tuple[Any, np.ndarray, str]:
    """The elements of a file, its stored values (frames, rows, columns), and its SHA-256."""
    with reading(path) as pydicom, path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        dataset = pydicom.dcmread(file)
        if "PixelData" not in dataset:
            raise ValueError("it has no pixels: it is truncated")
        if dataset.SamplesPerPixel != 1:
            raise ValueError(f"it has {dataset.SamplesPerPixel} values per pixel; 1 is expected")
        shape = (int(dataset.get("NumberOfFrames") or 1), int(dataset.Rows), int(dataset.Columns))
        check_size(shape)
        return dataset, dataset.pixel_array.reshape(shape), sha256


def _planes_of(path: Path, dataset: Any) -> list[Plane]:
    """The planes of a file, one per frame, also of a segmentation."""
    if "PerFrameFunctionalGroupsSequence" not in dataset:
        return [_plane(path, 0, dataset, dataset, dataset, dataset)]
    shared = dataset.SharedFunctionalGroupsSequence[0]
    frames = dataset.PerFrameFunctionalGroupsSequence
    if len(frames) != int(dataset.NumberOfFrames):
        raise ValueError(f"it declares {dataset.NumberOfFrames} frames, and describes {len(frames)}")
    names = ("PlanePosition", "PlaneOrientation", "PixelMeasures", "PixelValueTransformation")
    groups = [[_group(f"{name}Sequence", frame, shared) for name in names] for frame in frames]
    return [_plane(path, number, *of_frame) for number, of_frame in enumerate(groups)]


def _group(name: str, frame: Any, shared: Any) -> Any:
    """The functional group of a frame, or that of all frames; empty if there is none."""
    return next((groups[name][0] for groups in (frame, shared) if groups.get(name)), {})


def _plane(path: Path, frame: int, position: Any, orientation: Any, measures: Any, rescale: Any) -> Plane:
    spacing = _numbers(measures, "PixelSpacing", 2)
    if spacing.min() <= 0:
        raise ValueError(f"its PixelSpacing is {spacing.tolist()}; two lengths above 0 are expected")
    depth = measures.get("SpacingBetweenSlices") or measures.get("SliceThickness") or 0.0
    slope, intercept = rescale.get("RescaleSlope"), rescale.get("RescaleIntercept")
    return Plane(
        path=path,
        frame=frame,
        position=_numbers(position, "ImagePositionPatient", 3),
        directions=_numbers(orientation, "ImageOrientationPatient", 6).reshape(2, 3),
        # DICOM has the distance between rows first
        spacing=spacing[::-1],
        slope=None if slope is None else float(slope),
        intercept=None if intercept is None else float(intercept),
        thickness=abs(float(depth)),
    )


def _numbers(item: Any, keyword: str, count: int) -> np.ndarray:
    values = item.get(keyword)
    numbers = np.array([] if values is None else values, dtype=np.float64)
    if numbers.shape != (count,) or not np.isfinite(numbers).all():
        raise ValueError(f"it has no {keyword} with {count} numbers")
    return numbers


def _check_values(header: Any, planes: Sequence[Plane], modality: str) -> None:
    """An error if stored values cannot be turned into intensities."""
    if "ModalityLUTSequence" in header:
        raise ValueError("it has a modality lookup table, which is not supported: export it with a slope")
    if modality == "MR" and header.get("PhotometricInterpretation") == "MONOCHROME1":
        raise ValueError("it is an MR in MONOCHROME1, where low values are bright: export it as MONOCHROME2")
    for plane in planes:
        if modality == "CT" and (plane.slope is None or plane.intercept is None):
            raise ValueError("it is a CT without RescaleSlope and RescaleIntercept: its HU are not known")
        if plane.slope == 0:
            raise ValueError("its RescaleSlope is 0")


def series_grid(paths: Sequence[Path]) -> SeriesGrid:
    """The grid of the series in these files, by their headers; a UserError says which slice is wrong."""
    planes: list[Plane] = []
    sizes: dict[tuple[int, int], Path] = {}
    name = f"series of {len(paths)} files in {paths[0].parent}" if len(paths) > 1 else str(paths[0])
    for path in paths:
        header = read_header(path)
        with reading(path):
            in_file = _planes_of(path, header)
            _check_values(header, in_file, IMAGE_CLASSES[header.SOPClassUID])
            sizes.setdefault((int(header.Columns), int(header.Rows)), path)
        planes += in_file
        if len(in_file) > 1 and len(paths) > 1:
            raise UserError(f"{name}: {path.name} has several frames, so it must be the only file")
    if len(sizes) > 1:
        described = " and ".join(f"{c} x {r} ({path.name})" for (c, r), path in list(sizes.items())[:2])
        raise UserError(f"{name}: its slices have {described} columns and rows")
    (columns, rows), _ = sizes.popitem()
    shape = (columns, rows, len(planes))
    with given(name):
        check_size(shape)
        return _stacked(planes, shape)


def _stacked(planes: Sequence[Plane], shape: tuple[int, int, int]) -> SeriesGrid:
    """The planes in order; a ValueError if they are not a regular stack."""
    first = planes[0]
    for plane in planes:
        turned = np.abs(plane.directions - first.directions).max()
        if turned > _DIRECTION_TOLERANCE or not np.allclose(plane.spacing, first.spacing, rtol=1e-3):
            raise ValueError(
                f"{first} and {plane} have different orientations or pixel sizes: a series must be one volume"
            )
    products = first.directions @ first.directions.T
    if np.abs(products - np.eye(2)).max() > _DIRECTION_TOLERANCE:
        raise ValueError(f"the rows and columns of {first} are not perpendicular: {first.directions}")
    normal = np.cross(*first.directions)
    ordered = sorted(planes, key=lambda plane: (float(plane.position @ normal), str(plane.path), plane.frame))
    positions = np.array([plane.position for plane in ordered])
    step = first.thickness
    if len(ordered) > 1:
        heights = positions @ normal
        step = float(heights[-1] - heights[0]) / (len(heights) - 1)
        along = np.abs(heights - heights[0] - step * np.arange(len(heights)))
        shifts = positions - positions[0]
        across = np.linalg.norm(shifts - np.outer(shifts @ normal, normal), axis=1)
        pixel = float(first.spacing.min())
        is_off = (along > _TOLERANCE * step) | (across > _TOLERANCE * pixel) | (step < 0.01 * pixel)
        if is_off.any():
            worst = int(np.hypot(along, across).argmax())
            raise ValueError(
                f"{ordered[worst]} is {np.hypot(along, across)[worst]:.3g} mm away from its place in a "
                f"regular stack of {len(ordered)} slices {step:.6g} mm apart. Slices are missing, doubled or "
                "of several volumes (copy the whole series, one volume per series), not evenly spaced, or "
                "shifted sideways by a tilted gantry (resample it to a straight grid)"
            )
    column, row = (first.directions * first.spacing[:, None]).round(12)
    affine = np.eye(4)
    # a single slice of unknown thickness gets 1 mm in the affine, which must be invertible
    affine[:3] = _LPS_TO_RAS @ np.column_stack([column, row, normal * (step or 1.0), positions[0]])
    sides = (float(first.spacing[0]), float(first.spacing[1]), step)
    return SeriesGrid(tuple(ordered), shape, sides if step > 0 else None, affine)


def read_series(paths: Sequence[Path]) -> ImageFile:
    """The volume of a series; the digests are in the order of `paths`."""
    series = series_grid(paths)
    columns, rows, num_slices = series.shape
    values = np.empty((num_slices, rows, columns), dtype=np.float32)
    slices_of: dict[Path, list[tuple[int, Plane]]] = {}
    for number, plane in enumerate(series.planes):
        slices_of.setdefault(plane.path, []).append((number, plane))
    digests = []
    for path in paths:
        _, stored, sha256 = _read_whole(path)
        digests.append(sha256)
        for number, plane in slices_of[path]:
            slope = 1.0 if plane.slope is None else plane.slope
            # in float64, as ITK: the slope may be any number
            with np.errstate(over="ignore"):
                values[number] = stored[plane.frame].astype(np.float64) * slope + (plane.intercept or 0.0)
    volume = usable_intensities(paths[0].parent, values.T[None])
    grid = Grid(series.shape, series.spacing_mm, (series.affine[:3],))
    return ImageFile(volume, grid, series.affine, tuple(digests))


def read_segmentation(path: Path, image: ImageFile, class_of_label: Mapping[str, int]) -> MaskFile:
    """The class map in a segmentation of the series `image`; a UserError names the file."""
    dataset, values, sha256 = _read_whole(path)
    with reading(path):
        labels = segment_labels(dataset)
        frames_of_slice: dict[int, list[tuple[int, np.ndarray]]] = {}
        for plane, frame in zip(_planes_of(path, dataset), values, strict=True):
            number = _segment_number(dataset, plane.frame)
            if number not in labels:
                raise ValueError(
                    f"its frame {plane.frame + 1} is of segment {number}, which it does not describe"
                )
            chosen = class_of_label[labels[number]]
            # a segment may be called background
            if chosen:
                frames_of_slice.setdefault(_slice_of(plane, frame, image), []).append((chosen, frame.T))
        highest = _highest_value(dataset)
        classes = np.zeros(image.grid.shape, dtype=np.uint8)
        # of a sum of values that were rounded
        tolerance = 0 if highest == 1 else len(labels) / 2
        for number, frames in frames_of_slice.items():
            classes[:, :, number] = _most_probable(frames, highest, tolerance, number)
    return MaskFile(classes, image.grid, sha256)


def segment_labels(dataset: Any) -> dict[int, str]:
    """The label of each segment by its number."""
    return {int(item.SegmentNumber): str(item.SegmentLabel).strip() for item in dataset.SegmentSequence}


def _highest_value(dataset: Any) -> int:
    kind = dataset.SegmentationType
    if kind == "BINARY":
        return 1
    if kind != "FRACTIONAL" or int(dataset.MaximumFractionalValue) < 1:
        highest = dataset.get("MaximumFractionalValue")
        raise ValueError(
            f"its SegmentationType is {kind} and its MaximumFractionalValue {highest}; BINARY, and "
            "FRACTIONAL with 1 or more, can be read"
        )
    return int(dataset.MaximumFractionalValue)


def _segment_number(dataset: Any, frame: int) -> int:
    frames, shared = dataset.PerFrameFunctionalGroupsSequence, dataset.SharedFunctionalGroupsSequence[0]
    group = _group("SegmentIdentificationSequence", frames[frame], shared)
    if not group:
        raise ValueError(f"its frame {frame + 1} has no segment")
    return int(group.ReferencedSegmentNumber)


def _slice_of(plane: Plane, frame: np.ndarray, image: ImageFile) -> int:
    """The slice of the series at the position of a frame; an error if the grids differ."""
    affine, (columns, rows, num_slices) = image.affine, image.grid.shape
    assert affine is not None
    remedy = "resample it to the grid of the series"
    if frame.shape != (rows, columns):
        raise ValueError(
            f"it has {frame.shape[1]} columns and {frame.shape[0]} rows, but its series has {columns} and "
            f"{rows}: {remedy}"
        )
    placement = plane.placement
    height = float((np.linalg.inv(affine) @ [*placement[:, 2], 1.0])[2])
    number = round(height)
    of_slice = affine[:3, [0, 1, 3]] + np.outer(affine[:3, 2] * height, [0, 0, 1])
    difference = placement_difference(of_slice, placement, (columns, rows))
    if not 0 <= number < num_slices or abs(height - number) > _MAX_BETWEEN or difference:
        raise ValueError(
            f"its frame {plane.frame + 1} is at slice {height:.2f} of its series, which has slices 0 to "
            f"{num_slices - 1}{difference and f', and {difference}'}: {remedy}"
        )
    return number


def _most_probable(
    frames: list[tuple[int, np.ndarray]], highest: int, tolerance: float, number: int
) -> UInt8[np.ndarray, "columns rows"]:
    """The class of each voxel of a slice, from frames (class, values of 0 to `highest`)."""
    values = np.zeros((1 + max(chosen for chosen, _ in frames), *frames[0][1].shape), dtype=np.int32)
    for chosen, frame in frames:
        # several segments may be one class
        np.maximum(values[chosen], frame, out=values[chosen])
    if values.max() > highest:
        raise ValueError(f"it holds {values.max()}, but its MaximumFractionalValue is {highest}")
    total = values.sum(axis=0)
    num_doubled = int((total > highest + tolerance).sum())
    if num_doubled:
        raise ValueError(
            f"in slice {number}, {num_doubled} voxels are in segments of two classes: give each voxel one "
            "class, or both labels one name in classes.csv"
        )
    values[0] = highest - total
    classes: np.ndarray = values.argmax(axis=0).astype(np.uint8)
    return classes
