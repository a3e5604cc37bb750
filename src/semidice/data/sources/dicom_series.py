"""Reads one DICOM series, CT or MR, as a volume, and knows where its voxels are.

The volume is (columns, rows, slices). Slices are sorted along the normal of their plane, the cross product of
the directions of a row and of a column. The affine leads to right, anterior, superior (RAS), where DICOM has
left, posterior, superior. So array, spacing and affine are those of the series written as NIfTI by ITK.
Intensities are stored values times slope plus intercept: HU in CT. MONOCHROME1 changes only how HU are shown;
in MR, whose values have no unit, it is refused. A slice must be at its place in a regular stack to within 0.1
of the slice distance along the normal, and 0.1 pixel across.
Left out: a tilted gantry, slices of different distance, several volumes in one series.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from ...limits import MAX_DICOM_HEADER_BYTES, check_shape
from .readers import ImageFile, Placement, open_file, unreadable, usable_intensities

# classes of objects that hold CT or MR images, the enhanced ones with several frames per file
IMAGE_CLASSES = {
    "1.2.840.10008.5.1.4.1.1.2": "CT",
    "1.2.840.10008.5.1.4.1.1.2.1": "CT",
    "1.2.840.10008.5.1.4.1.1.2.2": "CT",
    "1.2.840.10008.5.1.4.1.1.4": "MR",
    "1.2.840.10008.5.1.4.1.1.4.1": "MR",
    "1.2.840.10008.5.1.4.1.1.4.4": "MR",
}
# expands in memory without a bound
_DEFLATED = "1.2.840.10008.1.2.1.99"
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
# of a voxel; see `placement`
_TOLERANCE = 0.1
# of a direction's length, and of the cosine between two of them
_DIRECTION_TOLERANCE = 1e-3
_PLANE_TAGS = (
    "SOPClassUID",
    "Rows",
    "Columns",
    "NumberOfFrames",
    "PhotometricInterpretation",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
    "SpacingBetweenSlices",
    "SliceThickness",
    "RescaleSlope",
    "RescaleIntercept",
    "ModalityLUTSequence",
    "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
)


class RefusedError(ValueError):
    """A file that can be read but not used; `reading` adds its name."""


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
    """Whether a file begins like DICOM: with DICM after 128 bytes. A pipe or a broken link is an error."""
    with open_file(path) as file:
        return file.read(132)[128:] == b"DICM"


def read_header(path: Path, tags: Sequence[str]) -> Any:
    """The elements of a file named by `tags`, as far as it has them."""
    with reading(path) as pydicom, open_file(path) as file:
        return pydicom.dcmread(_BoundedHeader(file), stop_before_pixels=True, specific_tags=list(tags))


def read_whole(path: Path) -> tuple[Any, np.ndarray, str]:
    """The elements of a file, its stored values (frames, rows, columns), and its SHA-256."""
    with reading(path) as pydicom, open_file(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        dataset = pydicom.dcmread(file)
        if "PixelData" not in dataset:
            raise ValueError("it has no pixels: it is truncated")
        if dataset.SamplesPerPixel != 1:
            raise RefusedError(f"it has {dataset.SamplesPerPixel} values per pixel; 1 is expected")
        shape = (int(dataset.get("NumberOfFrames") or 1), int(dataset.Rows), int(dataset.Columns))
        check_shape(shape, "it")
        _check_decoder(pydicom, dataset.file_meta.TransferSyntaxUID)
        return dataset, dataset.pixel_array.reshape(shape), sha256


def planes_of(path: Path, dataset: Any) -> list[Plane]:
    """The planes of a file, one per frame, also of a segmentation."""
    if "PerFrameFunctionalGroupsSequence" not in dataset:
        return [_plane(path, 0, dataset, dataset, dataset, dataset)]
    shared = dataset.SharedFunctionalGroupsSequence[0]
    frames = dataset.PerFrameFunctionalGroupsSequence
    if len(frames) != int(dataset.NumberOfFrames):
        raise RefusedError(f"it declares {dataset.NumberOfFrames} frames, and describes {len(frames)}")
    groups = ("PlanePosition", "PlaneOrientation", "PixelMeasures", "PixelValueTransformation")
    planes = []
    for number, frame in enumerate(frames):
        planes.append(_plane(path, number, *(_group(f"{name}Sequence", frame, shared) for name in groups)))
    return planes


def series_grid(paths: Sequence[Path]) -> SeriesGrid:
    """The grid of the series in these files, by their headers; a ValueError says which slice is wrong."""
    planes: list[Plane] = []
    sizes: dict[tuple[int, int], Path] = {}
    for path in paths:
        header = read_header(path, _PLANE_TAGS)
        with reading(path):
            modality = IMAGE_CLASSES[header.SOPClassUID]
            in_file = planes_of(path, header)
            _check_values(header, in_file, modality)
            sizes.setdefault((int(header.Columns), int(header.Rows)), path)
        if len(in_file) > 1 and len(paths) > 1:
            raise ValueError(f"{_name(paths)}: {path.name} has several frames, so it must be the only file")
        planes += in_file
    if len(sizes) > 1:
        described = " and ".join(f"{c} x {r} ({path.name})" for (c, r), path in list(sizes.items())[:2])
        raise ValueError(f"{_name(paths)}: its slices have {described} columns and rows")
    (columns, rows), _ = sizes.popitem()
    shape = (columns, rows, len(planes))
    check_shape(shape, _name(paths))
    try:
        return _grid(planes, shape)
    except ValueError as error:
        raise ValueError(f"{_name(paths)}: {error}") from error


def read_series(paths: Sequence[Path]) -> ImageFile:
    """The volume of a series; the digests are in the order of `paths`."""
    grid = series_grid(paths)
    columns, rows, num_slices = grid.shape
    values = np.empty((num_slices, rows, columns), dtype=np.float32)
    slices_of: dict[Path, list[tuple[int, Plane]]] = {}
    for number, plane in enumerate(grid.planes):
        slices_of.setdefault(plane.path, []).append((number, plane))
    digests = []
    for path in paths:
        _, stored, sha256 = read_whole(path)
        digests.append(sha256)
        for number, plane in slices_of[path]:
            slope = 1.0 if plane.slope is None else plane.slope
            # in float64, as ITK: the slope may be any number
            with np.errstate(over="ignore"):
                values[number] = stored[plane.frame].astype(np.float64) * slope + (plane.intercept or 0.0)
    volume = usable_intensities(paths[0].parent, values.T[None])
    return ImageFile(volume, grid.spacing_mm, grid.affine, (grid.affine[:3],), tuple(digests))


class _BoundedHeader:
    """A file of which only a header of bounded length can be read: each item takes 100 times its bytes."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or self.tell() + size > MAX_DICOM_HEADER_BYTES:
            raise RefusedError(
                f"its header has more than {MAX_DICOM_HEADER_BYTES} bytes, which is not supported"
            )
        return self._file.read(size)


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """pydicom, without its warnings; its errors become a ValueError that names the file."""
    import pydicom
    from pydicom.filereader import read_file_meta_info

    with warnings.catch_warnings():
        # harmless faults of real files, such as a text that is too long
        warnings.simplefilter("ignore")
        try:
            if read_file_meta_info(path).get("TransferSyntaxUID") == _DEFLATED:
                raise RefusedError("it is deflated as a whole, which is not supported: export it without")
            yield pydicom
        except RefusedError as error:
            raise ValueError(f"{path}: {error}") from error
        # pydicom has no common error for a damaged file
        except Exception as error:
            raise unreadable(path, error) from error


def _check_decoder(pydicom: Any, syntax: Any) -> None:
    """A ValueError if the pixels are compressed in a way that no installed package can read."""
    try:
        is_available = pydicom.pixels.get_decoder(syntax).is_available
    except NotImplementedError:
        is_available = False
    if not is_available:
        raise RefusedError(
            f"its pixels are compressed as {syntax.name}, for which no decoder is installed: decompress it, "
            "or run: pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg"
        )


def _group(name: str, frame: Any, shared: Any) -> Any:
    """The functional group of a frame, or that of all frames; empty if there is none."""
    for groups in (frame, shared):
        if groups.get(name):
            return groups[name][0]
    return {}


def _plane(path: Path, frame: int, position: Any, orientation: Any, measures: Any, rescale: Any) -> Plane:
    spacing = _numbers(measures, "PixelSpacing", 2)
    if spacing.min() <= 0:
        raise RefusedError(f"its PixelSpacing is {spacing.tolist()}; two lengths above 0 are expected")
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
        raise RefusedError(f"it has no {keyword} with {count} numbers")
    return numbers


def _check_values(header: Any, planes: Sequence[Plane], modality: str) -> None:
    """A ValueError if stored values cannot be turned into intensities."""
    if "ModalityLUTSequence" in header:
        raise RefusedError("it has a modality lookup table, which is not supported: export it with a slope")
    if modality == "MR" and header.get("PhotometricInterpretation") == "MONOCHROME1":
        raise RefusedError(
            "it is an MR in MONOCHROME1, where low values are bright: export it as MONOCHROME2"
        )
    for plane in planes:
        if modality == "CT" and (plane.slope is None or plane.intercept is None):
            raise RefusedError("it is a CT without RescaleSlope and RescaleIntercept: its HU are not known")
        if not np.isfinite([plane.slope or 1.0, plane.intercept or 0.0]).all() or plane.slope == 0:
            raise RefusedError(f"its RescaleSlope is {plane.slope} and RescaleIntercept {plane.intercept}")


def _grid(planes: Sequence[Plane], shape: tuple[int, int, int]) -> SeriesGrid:
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
        step = _slice_distance(ordered, positions @ normal, float(first.spacing.min()))
        _check_straight(ordered, positions, normal)
    column, row = (first.directions * first.spacing[:, None]).round(12)
    affine = np.eye(4)
    # a single slice of unknown thickness gets 1 mm in the affine, which must be invertible
    affine[:3] = _LPS_TO_RAS @ np.column_stack([column, row, normal * (step or 1.0), positions[0]])
    sides = (float(first.spacing[0]), float(first.spacing[1]), step)
    return SeriesGrid(tuple(ordered), shape, sides if step > 0 else None, affine)


def _slice_distance(planes: Sequence[Plane], heights: np.ndarray, pixel: float) -> float:
    """The distance of the slices; a ValueError names slices that are doubled, missing or irregular."""
    gaps = np.diff(heights)
    doubled = np.flatnonzero(gaps < 0.01 * pixel)
    if doubled.size:
        at = doubled[0]
        raise ValueError(
            f"{planes[at]} and {planes[at + 1]} are at the same position, {heights[at]:.6g} mm along the "
            f"normal ({doubled.size} such pairs): remove copies, and keep one volume per series"
        )
    usual = float(np.median(gaps))
    uneven = np.flatnonzero(np.abs(gaps - usual) > _TOLERANCE * usual)
    if not uneven.size:
        return _mean_distance(planes, heights)
    ends = [(at, at + 1) for at in uneven[:3]]
    shown = [f"{heights[a]:.6g} and {heights[b]:.6g} mm ({planes[a]}, {planes[b]})" for a, b in ends]
    steps = np.rint(gaps[uneven] / usual)
    if steps.min() > 1 and (np.abs(gaps[uneven] - steps * usual) <= _TOLERANCE * usual).all():
        raise ValueError(
            f"{int((steps - 1).sum())} slices are missing: the others are {usual:.6g} mm apart, but there is "
            f"nothing between {'; '.join(shown)}: copy the whole series"
        )
    raise ValueError(
        f"its slices are not evenly spaced: most are {usual:.6g} mm apart, but not {'; '.join(shown)}: "
        "resample it"
    )


def _mean_distance(planes: Sequence[Plane], heights: np.ndarray) -> float:
    """The mean distance of slices; a ValueError if many small differences add up."""
    mean = float(heights[-1] - heights[0]) / (len(heights) - 1)
    apart = np.abs(heights - heights[0] - mean * np.arange(len(heights)))
    worst = int(apart.argmax())
    if apart[worst] > _TOLERANCE * mean:
        raise ValueError(
            f"its slices are not evenly spaced: {planes[worst]} is {apart[worst]:.3g} mm away from its place "
            f"among slices that are {mean:.6g} mm apart: resample it"
        )
    return mean


def _check_straight(planes: Sequence[Plane], positions: np.ndarray, normal: np.ndarray) -> None:
    """A ValueError if the slices are not stacked along their normal."""
    along = positions[-1] - positions[0]
    shifts = positions - positions[0]
    sideways = np.linalg.norm(shifts - np.outer(shifts @ normal, normal), axis=1)
    worst = int(sideways.argmax())
    if sideways[worst] > _TOLERANCE * planes[0].spacing.min():
        cosine = min(1.0, float(along @ normal) / float(np.linalg.norm(along)))
        raise ValueError(
            f"its slices are shifted sideways, {planes[worst]} by {sideways[worst]:.3g} mm (a gantry tilted "
            f"by {np.degrees(np.arccos(cosine)):.3g} degrees): resample it to a straight grid"
        )


def _name(paths: Sequence[Path]) -> str:
    return f"series of {len(paths)} files in {paths[0].parent}" if len(paths) > 1 else str(paths[0])
