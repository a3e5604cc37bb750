"""Class maps as bit planes, eight voxels per byte: the format on disk and in the memory of a GPU.

A map of C classes takes B = ceil(log2 C) planes, so two classes take one bit per voxel. Axes:
    classes (..., *space) uint8        packed (..., B, *space[:-1], ceil(W / 8)) uint8
The first voxel of eight is in the highest bit. The last byte is filled up with zeros.
"""

import numpy as np
import torch
from jaxtyping import Integer, UInt8
from torch import Tensor

from ..errors import UserError


def num_planes(num_classes: int) -> int:
    """Number of bits for the indices of `num_classes` classes, 2 to 256.

    >>> [num_planes(classes) for classes in (2, 3, 4, 5, 256)]
    [1, 2, 2, 3, 8]
    """
    if not 2 <= num_classes <= 256:
        raise UserError(f"masks must have 2 to 256 classes; got {num_classes}")
    return (num_classes - 1).bit_length()


def pack_classes(classes: Integer[np.ndarray, "..."], *, num_classes: int, num_space_axes: int) -> np.ndarray:
    """Bit planes of class maps, see the module.

    >>> pack_classes(np.array([[0, 1, 0, 0, 0, 0, 0, 0, 1]]), num_classes=2, num_space_axes=1)
    array([[[ 64, 128]]], dtype=uint8)
    """
    # uint8, because a wider type would make the planes below eight times larger
    bits = np.arange(num_planes(num_classes), dtype=np.uint8)
    # the plane axis comes before the spatial axes
    bits = bits.reshape(-1, *[1] * num_space_axes)
    planes = (np.expand_dims(classes, -num_space_axes - 1) >> bits) & np.uint8(1)
    return np.packbits(planes.astype(bool), axis=-1)


def unpack_classes(
    packed: UInt8[Tensor, "..."], *, width: int, num_classes: int, num_space_axes: int
) -> UInt8[Tensor, "..."]:
    """The class maps that were packed, uint8; `width` is the length of their last axis.

    >>> packed = torch.tensor([[[64, 128]]], dtype=torch.uint8)
    >>> unpack_classes(packed, width=9, num_classes=2, num_space_axes=1)
    tensor([[0, 1, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.uint8)
    """
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    numbers = torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    # looks up the eight voxels of a byte as one int64: four times as fast as shifting
    voxels_of_byte = ((numbers >> shifts) & 1).view(torch.int64).flatten()
    voxels = voxels_of_byte.index_select(0, packed.flatten().int()).view(packed.shape)
    bits = voxels.view(torch.uint8)[..., :width]
    axis = -num_space_axes - 1
    classes = bits.select(axis, 0)
    for plane in range(1, num_planes(num_classes)):
        classes = classes | (bits.select(axis, plane) << plane)
    return classes


def unpack_case(packed: UInt8[np.ndarray, "R B *packed"], *, width: int) -> UInt8[np.ndarray, "R *space"]:
    """`unpack_classes` for the masks of one case, by NumPy.

    On a busy machine torch waits for its threads: for a small case forty times longer than it works.

    >>> unpack_case(np.array([[[64, 128]]], dtype=np.uint8), width=9)
    array([[0, 1, 0, 0, 0, 0, 0, 0, 1]], dtype=uint8)
    """
    bits = np.unpackbits(packed, axis=-1, count=width)
    classes: np.ndarray = bits[:, 0]
    for plane in range(1, bits.shape[1]):
        classes = classes | (bits[:, plane] << plane)
    return classes
