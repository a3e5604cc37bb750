"""The cases of a dataset at one size: in the memory of a device, or read from files when needed.

A case lies in the corner of `space`, the size of the largest case rounded up to a multiple of 32; the rest is
zero. Images and masks stay as they are stored on disk: one or two bytes per voxel, and one bit per voxel and
rater. Only the cases of one batch become floats, on the device.
"""

import copy
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, Integer, Shaped, UInt8
from torch import Tensor

from ..arrays import SIZE_MULTIPLE
from .dataset import Dataset
from .intensities import INTENSITY_UNITS, MeanStd, scale_and_shift
from .manifest import Kind, Scan
from .packing import num_planes, unpack_classes


def common_space(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The smallest size that holds all shapes and is a multiple of 32 along every axis.

    >>> common_space([(30, 100), (64, 65)])
    (64, 128)
    """
    largest = np.max(np.array(shapes), axis=0).tolist()
    return tuple(-(-side // SIZE_MULTIPLE) * SIZE_MULTIPLE for side in largest)


def centred(size: Sequence[int], space: Sequence[int]) -> tuple[slice, ...]:
    """Where an image of this size lies in the middle of `space`, along each axis.

    >>> centred((30, 100), (64, 128))
    (slice(17, 47, None), slice(14, 114, None))
    """
    starts = [(whole - part + 1) // 2 for part, whole in zip(size, space, strict=True)]
    return tuple(slice(start, start + part) for start, part in zip(starts, size, strict=True))


def inside(sizes: Integer[Tensor, "N axes"], space: Sequence[int]) -> Bool[Tensor, "N *space"]:
    """True at the voxels of a case of that size, which lies in the corner of `space`."""
    dims = len(space)
    flags = torch.ones(len(sizes), *space, dtype=torch.bool, device=sizes.device)
    for axis, side in enumerate(space):
        index = torch.arange(side, device=sizes.device).view(-1, *[1] * (dims - 1 - axis))
        flags &= index < sizes[:, axis].view(-1, *[1] * dims)
    return flags


class Storage:
    """The cases of a dataset for a device; `Batches` and `WholeCases` take images and masks from it.

    resident: whether all cases are in the memory of the device; None: if they need at most half of its free
    memory. If they are not, `read` reads them from the files; several threads may call it at once.
    mean_std: to normalise the images with; None takes those of the whole dataset.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: torch.device | str,
        *,
        mean_std: MeanStd | None = None,
        resident: bool | None = None,
    ) -> None:
        self.dataset, self.device = dataset, torch.device(device)
        shapes = [scan.shape for scan in dataset.manifest.scans]
        if len({len(shape) for shape in shapes}) != 1:
            raise ValueError(
                f"{dataset.folder.path} holds images and volumes together: prepare them as two datasets"
            )
        self.space = common_space(shapes)
        self.sizes: Int64[Tensor, "cases axes"] = torch.from_numpy(dataset.of_cases(shapes)).to(device)
        self.is_padded = any(shape != self.space for shape in shapes)
        num_raters, planes = len(dataset.manifest.raters), num_planes(dataset.num_classes)
        self._image_shape = (dataset.num_channels, *self.space)
        self._packed_shape = (num_raters, planes, *self.space[:-1], self.space[-1] // 8)
        dtypes = self._image_dtypes()
        # int16 holds the values of both types; `scale` makes up for their units
        self.dtype = torch.uint8 if set(dtypes) == {"uint8"} else torch.int16
        units = np.array([INTENSITY_UNITS[dtype] for dtype in dtypes], dtype=np.float32)
        self._units = torch.from_numpy(dataset.of_cases(units)).to(device)
        self._normalise_with(mean_std or MeanStd(dataset.manifest.mean, dataset.manifest.std))
        total = len(dataset) * self.bytes_per_case()
        self.resident = total <= free_memory(self.device) // 2 if resident is None else resident
        self.images: Tensor | None = None
        self.packed: Tensor | None = None
        if self.resident:
            self._load()

    def with_mean_std(self, mean_std: MeanStd) -> "Storage":
        """The same cases in the same memory, normalised with other numbers."""
        other = copy.copy(self)
        other._normalise_with(mean_std)
        return other

    def _normalise_with(self, mean_std: MeanStd) -> None:
        self.mean, self.std = (
            torch.tensor(numbers, dtype=torch.float32, device=self.device) for numbers in mean_std
        )
        scale, shift = scale_and_shift(self._units.view(-1, 1), self.mean, self.std)
        ones = [1] * len(self.space)
        self.scale, self.shift = scale.view(len(self.dataset), -1, *ones), shift.view(-1, *ones)

    def bytes_per_case(self) -> int:
        """Memory of one stored case."""
        return math.prod(self._image_shape) * self.dtype.itemsize + math.prod(self._packed_shape)

    def read(
        self, cases: Sequence[int]
    ) -> tuple[Shaped[Tensor, "N channels *space"], UInt8[Tensor, "N R planes *packed"]]:
        """Stored images and packed masks of the cases with these numbers, from their files."""
        is_padded = any(self.dataset.cases[number].shape != self.space for number in cases)
        make = torch.zeros if is_padded else torch.empty
        images = make(len(cases), *self._image_shape, dtype=self.dtype)
        packed = make(len(cases), *self._packed_shape, dtype=torch.uint8)
        for row, number in enumerate(cases):
            *rest, width = self.dataset.cases[number].shape
            self._copy("images", number, (*rest, width), images[row].numpy())
            self._copy("masks", number, (*rest, -(-width // 8)), packed[row].numpy())
        return images, packed

    def stored(
        self, case: Int64[Tensor, " N"], image: Tensor | None, packed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Stored images and packed masks of the cases: from memory if resident, else `image` and `packed`."""
        if self.images is not None and self.packed is not None:
            return self.images.index_select(0, case), self.packed.index_select(0, case)
        if image is None or packed is None:
            raise ValueError("the dataset is not resident, so a feed must contain its images and masks")
        return image, packed

    def normalised(
        self, image: Shaped[Tensor, "N channels *space"], case: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N channels *space"]:
        """(intensity - mean) / std of stored images; outside of a case the value has no meaning."""
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
        """True at the voxels of the cases."""
        if not self.is_padded:
            return torch.ones(len(case), *self.space, dtype=torch.bool, device=self.device)
        return inside(self.sizes[case], self.space)

    def _image_dtypes(self) -> list[str]:
        """The stored type of each scan."""
        dataset, dtypes = self.dataset, []
        for scan in dataset.manifest.scans:
            with dataset.array("images", scan) as stored:
                # before memory for the shapes of the manifest is allocated
                self._check_stored("images", scan, stored.shape[1:], (dataset.num_channels, *scan.shape))
                dtypes.append(stored.dtype.name)
        unknown = set(dtypes) - set(INTENSITY_UNITS)
        if unknown:
            raise ValueError(
                f"images of {dataset.folder.path} must be stored as {' or '.join(INTENSITY_UNITS)}; "
                f"got {', '.join(sorted(unknown))}: prepare them again"
            )
        return dtypes

    def _load(self) -> None:
        num_cases = len(self.dataset)
        self.images = torch.empty(num_cases, *self._image_shape, dtype=self.dtype, device=self.device)
        self.packed = torch.empty(num_cases, *self._packed_shape, dtype=torch.uint8, device=self.device)
        # some cases at a time, so that the host does not need memory for the whole dataset
        num_at_once = max(1, 2**26 // self.bytes_per_case())
        for start in range(0, num_cases, num_at_once):
            rows = range(start, min(start + num_at_once, num_cases))
            images, packed = self.read(rows)
            self.images[rows.start : rows.stop].copy_(images)
            self.packed[rows.start : rows.stop].copy_(packed)

    def _copy(self, kind: Kind, number: int, space: Sequence[int], out: np.ndarray) -> None:
        """Read a stored array into the corner of `out`."""
        case = self.dataset.cases[number]
        with self.dataset.array(kind, case.scan) as stored:
            shape = stored.shape[1:]
            self._check_stored(kind, case.scan, shape, (*out.shape[: -len(space)], *space))
            if shape == out.shape and stored.dtype == out.dtype:
                stored.read(case.row, out=out)
            else:
                out[tuple(map(slice, shape))] = stored.read(case.row)

    def _check_stored(self, kind: Kind, scan: Scan, shape: Sequence[int], expected: Sequence[int]) -> None:
        if shape != expected:
            raise ValueError(
                f"{self.dataset.folder.array(kind, scan.name)} holds {shape} for a case, but the manifest "
                f"says {expected}: run `semidice check`, then prepare the dataset again"
            )


def shared_storage(
    dataset: Dataset, device: torch.device | str, mean_std: MeanStd, *, load: bool = True
) -> Storage:
    """A storage of the cases that are loaded once for all folds, as long as the dataset is open.

    load: False takes the cases from their files, unless they are loaded.
    """
    name = str(torch.device(device))
    if name not in dataset.loaded:
        storage = Storage(dataset, device, mean_std=mean_std, resident=None if load else False)
        if load:
            dataset.loaded[name] = storage
        return storage
    return dataset.loaded[name].with_mean_std(mean_std)


def free_memory(device: torch.device) -> int:
    """Free bytes of a device; of the CPU the memory available to this process, 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # Linux; sysconf does not count the page cache, which the system would free
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        of_machine = int(fields["MemAvailable"].split()[0]) * 1024
        return min([of_machine, *_free_in_groups()])
    except (OSError, KeyError, ValueError):
        known = getattr(os, "sysconf_names", {})
        if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(known):
            return 0
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Free bytes of each control group of this process that has a limit: a container, or a job of SLURM."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    # version 2 has one line: 0::/outer/inner
    name = next((Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::/")), Path())
    free = []
    for group in (root / name, *(root / outer for outer in name.parents)):
        try:
            limit, used, facts = (
                (group / f"memory.{file}").read_text().strip() for file in ("max", "current", "stat")
            )
        # the root of all groups has no limit
        except OSError:
            continue
        if limit != "max":
            # the page cache of the group counts as used, but the system would free it
            cached = dict(line.split() for line in facts.splitlines())["file"]
            free.append(max(0, int(limit) - int(used) + int(cached)))
    return free
