"""Reads one DICOM segmentation (SEG) as a class map on the grid of its series.

Each frame is put into the slice at its position; slices without a frame are background. The class of a
segment is that of its label. BINARY: a voxel of two classes is an error. FRACTIONAL, probability or
occupancy: the class with the largest value, background having the rest to one; at a tie the lowest class, so
of two classes the foreground needs more than half.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from .dicom_series import Plane, RefusedError, planes_of, read_whole, reading
from .placement import placement_difference
from .readers import ImageFile, MaskFile

SEGMENTATION_CLASS = "1.2.840.10008.5.1.4.1.1.66.4"
# of the slice distance: slices may be 0.1 away from a regular grid, and a frame as much from its slice
_MAX_BETWEEN = 0.2


def read_segmentation(path: Path, image: ImageFile, class_of_label: Mapping[str, int]) -> MaskFile:
    """The class map in a segmentation of the series `image`; a ValueError names the file."""
    dataset, values, sha256 = read_whole(path)
    with reading(path):
        labels = segment_labels(dataset)
        planes = planes_of(path, dataset)
        frames_of_slice: dict[int, list[tuple[int, np.ndarray]]] = {}
        for plane, frame in zip(planes, values, strict=True):
            number = _segment_number(dataset, plane.frame)
            if number not in labels:
                raise RefusedError(
                    f"its frame {plane.frame + 1} is of segment {number}, which it does not describe"
                )
            chosen = class_of_label[labels[number]]
            # a segment may be called background
            if chosen:
                frames_of_slice.setdefault(_slice_of(plane, frame, image), []).append((chosen, frame.T))
        highest = _highest_value(dataset)
        classes = np.zeros(image.values.shape[1:], dtype=np.uint8)
        # of a sum of values that were rounded
        tolerance = 0 if highest == 1 else len(labels) / 2
        for number, frames in frames_of_slice.items():
            classes[:, :, number] = _most_probable(frames, highest, tolerance, number)
    return MaskFile(classes, (), sha256)


def segment_labels(dataset: Any) -> dict[int, str]:
    """The label of each segment by its number."""
    return {int(item.SegmentNumber): str(item.SegmentLabel).strip() for item in dataset.SegmentSequence}


def _highest_value(dataset: Any) -> int:
    kind = dataset.SegmentationType
    if kind == "BINARY":
        return 1
    if kind != "FRACTIONAL":
        raise RefusedError(f"its SegmentationType is {kind}; BINARY and FRACTIONAL can be read")
    highest = int(dataset.MaximumFractionalValue)
    if highest < 1:
        raise RefusedError(f"its MaximumFractionalValue is {highest}; 1 or more is expected")
    return highest


def _segment_number(dataset: Any, frame: int) -> int:
    for groups in (
        dataset.PerFrameFunctionalGroupsSequence[frame],
        dataset.SharedFunctionalGroupsSequence[0],
    ):
        if "SegmentIdentificationSequence" in groups:
            return int(groups.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
    raise RefusedError(f"its frame {frame + 1} has no segment")


def _slice_of(plane: Plane, frame: np.ndarray, image: ImageFile) -> int:
    """The slice of the series at the position of a frame; a ValueError if the grids differ."""
    affine, (columns, rows, num_slices) = image.affine, image.values.shape[1:]
    assert affine is not None
    if frame.shape != (rows, columns):
        raise RefusedError(
            f"it has {frame.shape[1]} columns and {frame.shape[0]} rows, but its series has {columns} and "
            f"{rows}: resample it to the grid of the series"
        )
    placement = plane.placement
    height = float((np.linalg.inv(affine) @ [*placement[:, 2], 1.0])[2])
    number = round(height)
    if not 0 <= number < num_slices or abs(height - number) > _MAX_BETWEEN:
        raise RefusedError(
            f"its frame {plane.frame + 1} is at slice {height:.2f} of its series, which has slices 0 to "
            f"{num_slices - 1}: resample it to the grid of the series"
        )
    of_slice = affine[:3, [0, 1, 3]] + np.outer(affine[:3, 2] * height, [0, 0, 1])
    difference = placement_difference(of_slice, placement, (columns, rows))
    if difference:
        raise RefusedError(
            f"its frame {plane.frame + 1} is not on slice {number} of its series: {difference}: resample it "
            "to the grid of the series"
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
        raise RefusedError(f"it holds {values.max()}, but its MaximumFractionalValue is {highest}")
    total = values.sum(axis=0)
    num_doubled = int((total > highest + tolerance).sum())
    if num_doubled:
        raise RefusedError(
            f"in slice {number}, {num_doubled} voxels are in segments of two classes: give each voxel one "
            "class, or both labels one name in classes.csv"
        )
    values[0] = highest - total
    classes: np.ndarray = values.argmax(axis=0).astype(np.uint8)
    return classes
