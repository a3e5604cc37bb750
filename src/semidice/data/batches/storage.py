"""The cases of a dataset at one size: in the memory of a device, or read from files when needed.

A case lies in the corner of `space`, the size of the largest case rounded up to a multiple of 32; the rest is
zero. Images and masks stay as they are stored on disk: one or two bytes per voxel, and one bit per voxel and
rater. Only the cases of one batch become floats, on the device.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer, Shaped, UInt8
from torch import Tensor

from ...arrays import SIZE_MULTIPLE
from ...errors import UserError
from ..dataset import Dataset
from ..intensities import MeanStd, Normaliser
from ..manifest import Kind
from ..packing import num_planes, unpack_classes


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
    """The cases of a dataset for a device, as they are stored; this module alone knows their layout there.

    resident: whether all cases are in the memory of the device; None: if they need at most half of its free
    memory. If they are not, `read` reads them from the files; several threads may call it at once.
    """

    def __init__(self, dataset: Dataset, device: torch.device | str, *, resident: bool | None = None) -> None:
        self.dataset, self.device = dataset, torch.device(device)
        shapes = [scan.shape for scan in dataset.manifest.scans]
        if len({len(shape) for shape in shapes}) != 1:
            raise UserError(
                f"{dataset.folder.path} holds images and volumes together: prepare them as two datasets"
            )
        self.space = common_space(shapes)
        self.sizes: Int64[Tensor, "cases axes"] = torch.from_numpy(dataset.of_cases(shapes)).to(device)
        self.is_padded = any(shape != self.space for shape in shapes)
        num_raters, planes = len(dataset.manifest.raters), num_planes(dataset.num_classes)
        self._image_shape = (dataset.num_channels, *self.space)
        self._packed_shape = (num_raters, planes, *self.space[:-1], self.space[-1] // 8)
        self._dtype: torch.dtype = getattr(torch, dataset.image_dtype)
        total = len(dataset) * self.bytes_per_case()
        self.resident = total <= free_memory(self.device) // 2 if resident is None else resident
        self.images: Tensor | None = None
        self.packed: Tensor | None = None
        if self.resident:
            self._load()

    def normaliser(self, mean_std: MeanStd) -> Normaliser:
        """Makes the input of a network of the stored images."""
        return Normaliser(mean_std, np.dtype(self.dataset.image_dtype), len(self.space), self.device)

    def bytes_per_case(self) -> int:
        """Memory of one stored case."""
        return math.prod(self._image_shape) * self._dtype.itemsize + math.prod(self._packed_shape)

    def read(self, cases: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """Stored images and packed masks of the cases, from their files; None for both if resident."""
        return (None, None) if self.resident else self._read(cases)

    def stored(
        self, case: Int64[Tensor, " N"], image: Tensor | None, packed: Tensor | None
    ) -> tuple[Shaped[Tensor, "N channels *space"], UInt8[Tensor, "N R planes *packed"]]:
        """Stored images and packed masks of the cases: from memory if resident, else what `read` gave."""
        if self.images is not None and self.packed is not None:
            return self.images.index_select(0, case), self.packed.index_select(0, case)
        assert image is not None
        assert packed is not None
        return image, packed

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

    def _load(self) -> None:
        num_cases = len(self.dataset)
        self.images = torch.empty(num_cases, *self._image_shape, dtype=self._dtype, device=self.device)
        self.packed = torch.empty(num_cases, *self._packed_shape, dtype=torch.uint8, device=self.device)
        # some cases at a time, so that the host does not need memory for the whole dataset
        num_at_once = max(1, 2**26 // self.bytes_per_case())
        for start in range(0, num_cases, num_at_once):
            rows = range(start, min(start + num_at_once, num_cases))
            images, packed = self._read(rows)
            self.images[rows.start : rows.stop].copy_(images)
            self.packed[rows.start : rows.stop].copy_(packed)

    def _read(self, cases: Sequence[int]) -> tuple[Tensor, Tensor]:
        is_padded = any(self.dataset.cases[number].shape != self.space for number in cases)
        make = torch.zeros if is_padded else torch.empty
        images = make(len(cases), *self._image_shape, dtype=self._dtype)
        packed = make(len(cases), *self._packed_shape, dtype=torch.uint8)
        for row, number in enumerate(cases):
            self._copy("images", number, images[row].numpy())
            self._copy("masks", number, packed[row].numpy())
        return images, packed

    def _copy(self, kind: Kind, number: int, out: np.ndarray) -> None:
        """Read a stored array into the corner of `out`."""
        shape = self.dataset.row_of(kind, self.dataset.cases[number].scan)[1]
        if shape == out.shape:
            self.dataset.stored(kind, number, out=out)
        else:
            out[tuple(map(slice, shape))] = self.dataset.stored(kind, number)


def shared_storage(dataset: Dataset, device: torch.device | str, *, load: bool = True) -> Storage:
    """A storage of the cases that are loaded once for all folds, as long as the dataset is open.

    load: False takes the cases from their files, unless they are loaded.
    """
    name = str(torch.device(device))
    storage = dataset.loaded.get(name) or Storage(dataset, device, resident=None if load else False)
    if load:
        dataset.loaded[name] = storage
    return storage


def free_memory(device: torch.device) -> int:
    """Bytes of a device that a dataset may take: those free on a GPU, and 2 GB on a CPU.

    The system caches the files that are read on a CPU, and knows better than we do what fits.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return 2**31
