"""Images and masks of a dataset at one size: in the memory of the device, or read when they are asked for.

Cases lie in the corner of `space`, the size of the largest rounded up to a multiple of 32, with zeros beside
them. Stored values travel and stay as they are on disk, one or two bytes a voxel and one bit a voxel and
rater; floats are made on the device, of one batch at a time.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, Integer, Shaped, UInt8
from torch import Tensor

from ..arrays import SIZE_MULTIPLE
from .dataset import Dataset
from .intensities import INTENSITY_UNITS, scale_and_shift
from .packing import num_planes, unpack_classes

# Linux lets a process map 65 000 files
_MAX_MAPPED = 20_000


def common_space(shapes: Sequence[Sequence[int]], multiple: int = SIZE_MULTIPLE) -> tuple[int, ...]:
    """The smallest size that holds all shapes and is a multiple of `multiple` along every axis.

    >>> common_space([(30, 100), (64, 65)])
    (64, 128)
    """
    return tuple(-(-side // multiple) * multiple for side in np.max(np.array(shapes), axis=0).tolist())


def inside(sizes: Integer[Tensor, "N axes"], space: Sequence[int]) -> Bool[Tensor, "N *space"]:
    """True where a case of that size, lying in the corner of `space`, has voxels."""
    dims = len(space)
    flags = torch.ones(len(sizes), *space, dtype=torch.bool, device=sizes.device)
    for axis, side in enumerate(space):
        place = [1] * dims
        place[axis] = side
        index = torch.arange(side, device=sizes.device).view(1, *place)
        flags &= index < sizes[:, axis].view(-1, *[1] * dims)
    return flags


class CaseReader:
    """Reads cases as they are stored into tensors of one size; several threads may do so at once."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        shapes = [case.shape for case in dataset.cases]
        if len({len(shape) for shape in shapes}) != 1:
            raise ValueError(
                f"{dataset.folder.path} holds images and volumes together; prepare them as two datasets"
            )
        self.space = common_space(shapes)
        first_of_scan = [number for number, case in enumerate(dataset.cases) if case.row == 0]
        dtype_of_scan = {
            dataset.cases[number].scan.name: dataset.stored("images", number).dtype.name
            for number in first_of_scan
        }
        dtypes = [dtype_of_scan[case.scan.name] for case in dataset.cases]
        unknown = set(dtypes) - set(INTENSITY_UNITS)
        if unknown:
            raise ValueError(
                f"images of {dataset.folder.path} must be stored as {' or '.join(INTENSITY_UNITS)}; "
                f"got {', '.join(sorted(unknown))}: prepare them again"
            )
        # int16 holds the values of both; what they are worth is in `units`
        self.dtype = torch.uint8 if set(dtypes) == {"uint8"} else torch.int16
        self.units = np.array([INTENSITY_UNITS[dtype] for dtype in dtypes], dtype=np.float32)

        # opening a file takes longer than reading a slice from it
        self._mapped: dict[tuple[str, int], np.ndarray] = {}

    def image_shape(self) -> tuple[int, ...]:
        return (self.dataset.num_channels, *self.space)

    def packed_shape(self) -> tuple[int, ...]:
        planes = num_planes(self.dataset.num_classes)
        return (len(self.dataset.manifest.raters), planes, *self.space[:-1], self.space[-1] // 8)

    def bytes_per_case(self) -> int:
        """Memory of one stored case."""
        return int(np.prod(self.image_shape())) * self.dtype.itemsize + int(np.prod(self.packed_shape()))

    def read(
        self, cases: Sequence[int]
    ) -> tuple[Shaped[Tensor, "N channels *space"], UInt8[Tensor, "N R planes *packed"]]:
        """Stored images and packed masks of the cases with these numbers."""
        padded = any(self.dataset.cases[number].shape != self.space for number in cases)
        make = torch.zeros if padded else torch.empty
        images = make(len(cases), *self.image_shape(), dtype=self.dtype)
        packed = make(len(cases), *self.packed_shape(), dtype=torch.uint8)
        for row, number in enumerate(cases):
            *rest, width = self.dataset.cases[number].shape
            self._copy("images", number, (*rest, width), images[row].numpy())
            self._copy("masks", number, (*rest, -(-width // 8)), packed[row].numpy())
        return images, packed

    def _copy(
        self, kind: Literal["images", "masks"], number: int, space: Sequence[int], place: np.ndarray
    ) -> None:
        """Put a stored array into the corner of `place`."""
        stored = self._mapped.get((kind, number))
        if stored is None:
            stored = self.dataset.stored(kind, number)
            if len(self._mapped) < _MAX_MAPPED:
                self._mapped[kind, number] = stored
        expected = (*place.shape[: -len(space)], *space)
        if stored.shape != expected:
            path = self.dataset.folder.array(kind, self.dataset.cases[number].scan.name)
            raise ValueError(
                f"{path} holds {stored.shape} for a case, but the manifest says {expected}: "
                "run `semidice check`, then prepare again"
            )
        place[tuple(slice(side) for side in stored.shape)] = stored


class Storage:
    """The cases of a dataset on a device: what `Batches` and `WholeCases` take their images and masks from.

    resident: whether all of them are in its memory; None: if they take no more than half of what is free.
    """

    def __init__(self, dataset: Dataset, device: torch.device | str, *, resident: bool | None = None) -> None:
        self.device = torch.device(device)
        self.reader = CaseReader(dataset)
        self.dataset, self.space = dataset, self.reader.space
        self.sizes: Int64[Tensor, "cases axes"] = torch.tensor([case.shape for case in dataset.cases]).to(
            device
        )
        self.is_padded = any(case.shape != self.space for case in dataset.cases)
        manifest = dataset.manifest
        self.mean, self.std = (
            torch.tensor(numbers, dtype=torch.float32, device=device)
            for numbers in (manifest.mean, manifest.std)
        )
        units = torch.from_numpy(self.reader.units).to(device)
        scale, shift = scale_and_shift(units.view(-1, 1), self.mean, self.std)
        ones = [1] * len(self.space)
        self.scale, self.shift = scale.view(len(dataset), -1, *ones), shift.view(-1, *ones)
        total = len(dataset) * self.reader.bytes_per_case()
        self.resident = total <= free_memory(self.device) // 2 if resident is None else resident
        self.images: Tensor | None = None
        self.packed: Tensor | None = None
        if self.resident:
            self._load()

    def _load(self) -> None:
        num_cases = len(self.dataset)
        reader = self.reader
        self.images = torch.empty(num_cases, *reader.image_shape(), dtype=reader.dtype, device=self.device)
        self.packed = torch.empty(num_cases, *reader.packed_shape(), dtype=torch.uint8, device=self.device)
        # a few at a time: the host need not hold what the device does
        at_once = max(1, 2**26 // reader.bytes_per_case())
        for start in range(0, num_cases, at_once):
            rows = range(start, min(start + at_once, num_cases))
            images, packed = reader.read(rows)
            self.images[rows.start : rows.stop].copy_(images)
            self.packed[rows.start : rows.stop].copy_(packed)

    def stored(
        self, case: Int64[Tensor, " N"], image: Tensor | None, packed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Stored images and packed masks: those in memory of the cases `case`, or else those that came."""
        if self.images is not None and self.packed is not None:
            return self.images.index_select(0, case), self.packed.index_select(0, case)
        if image is None or packed is None:
            raise ValueError("the dataset is not resident, so a feed must bring its images and masks")
        return image, packed

    def normalised(
        self, image: Shaped[Tensor, "N channels *space"], case: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N channels *space"]:
        """(intensity - mean) / std of stored images; beside a case something that has no meaning."""
        return image.float().mul_(self.scale[case]).add_(self.shift)

    def masks(self, packed: UInt8[Tensor, "N R planes *packed"]) -> UInt8[Tensor, "N R *space"]:
        """Class maps of all raters."""
        return unpack_classes(
            packed,
            width=self.space[-1],
            num_classes=self.dataset.num_classes,
            num_space_axes=len(self.space),
        )

    def valid(self, case: Int64[Tensor, " N"]) -> Bool[Tensor, "N *space"]:
        """Where the cases have voxels."""
        if not self.is_padded:
            return torch.ones(len(case), *self.space, dtype=torch.bool, device=self.device)
        return inside(self.sizes[case], self.space)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; on the CPU those that programs can have, 0 where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # Linux; sysconf's number there leaves out what the page cache would give back
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        known = getattr(os, "sysconf_names", {})
        if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(known):
            return 0
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
