"""Labels made softer: everywhere, in a band around class boundaries, or by a Gaussian filter over space."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..arrays import describe
from ..options import Bounds, Count, Share, check_value
from .raters import Array, read_flags, read_label

# a wider filter averages over more than any image has
MAX_SIGMA = 1000
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def smooth_label(label: Array, *, eps: float, batched: bool = False) -> Tensor:
    """(1 - eps) label + eps / C: a share `eps` of every voxel is spread evenly over the classes.

    eps in [0, 1]: 0 keeps the label, 1 makes all classes equal.

    >>> smooth_label(np.array([[1.0, 0.0], [0.0, 1.0]]), eps=0.2)[1]
    tensor([0.1000, 0.9000])
    """
    smoothed = _smoothed(read_label(label, batched), eps)
    return smoothed if batched else smoothed[0]


def boundary_smooth_label(
    label: Array, *, eps: float = 0.5, width: int = 3, valid: Array | None = None, batched: bool = False
) -> Tensor:
    """The label smoothed by `eps` in a band around class boundaries, and unchanged elsewhere.

    A voxel is in the band if the cube of `width` voxels per side around it holds more than one class, where
    the class of a voxel is its most probable one, the lowest at a tie. The cube ends at the border of the
    image. So width 3 takes one voxel on each side of a boundary, diagonals included, width 5 two, and width 1
    none. The width is odd. valid: bool (*space) or (N, *space), False outside the image.

    >>> label = np.stack([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    >>> boundary_smooth_label(label)[1]
    tensor([0.0000, 0.0000, 0.2500, 0.7500])
    """
    soft, inside = _read(label, valid, batched)
    check_value(Count, width=width)
    if width % 2 == 0:
        raise ValueError(f"width must be odd, so that the cube has a centre; got {width}")
    near = boundary_band(soft.argmax(1), width=width // 2, valid=inside).unsqueeze(1)
    smoothed = torch.where(near, _smoothed(soft, eps), soft)
    return smoothed if batched else smoothed[0]


def spatially_smooth_label(
    label: Array, *, sigma: float = 1.0, valid: Array | None = None, batched: bool = False
) -> Tensor:
    """The label filtered with a Gaussian over its one to three axes of space.

    sigma: standard deviation in voxels, above 0; the filter ends at int(4 sigma + 0.5) voxels. Near the
    border the weights inside the image are scaled to sum to one, so values outside do not matter.
    valid: bool (*space) or (N, *space), False outside the image, where the label is not changed.

    >>> spatially_smooth_label(np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]), sigma=0.5)[1]
    tensor([2.9539e-04, 1.0674e-01, 8.9326e-01, 9.9970e-01])
    """
    soft, inside = _read(label, valid, batched)
    check_value(Annotated[float, Bounds(above=0, at_most=MAX_SIGMA)], sigma=sigma)
    filtered = soft if inside is None else soft * inside.unsqueeze(1)
    for axis in range(2, soft.ndim):
        filtered = _gaussian_along(filtered, axis, sigma)
    # the sum over the classes is the weight inside the image
    filtered = filtered / filtered.sum(1, keepdim=True)
    filtered = filtered if inside is None else torch.where(inside.unsqueeze(1), filtered, soft)
    return filtered if batched else filtered[0]


def boundary_band(
    class_map: Tensor, *, width: int, valid: Bool[Tensor, "N *space"] | None = None
) -> Bool[Tensor, "N *space"]:
    """True at voxels whose window of 2 width + 1 voxels along each axis holds more than one class.

    class_map is integers (N, *space) with one to three axes of space. The window ends at the border of the
    image, which is not a boundary. So two touching regions have a band of `width` voxels on each side, in the
    maximum norm; width 0 gives no band. Every number counts as a class, also one that means "ignore". Voxels
    where `valid` is False are in no window and in no band.
    """
    dims = class_map.ndim - 1
    check_value(int, width=width)
    if width < 0 or dims not in _MAX_POOL:
        raise ValueError(
            "a band needs a width of 0 voxels or more and one to three axes of space; got "
            f"{width} and {describe(class_map)}"
        )
    # a window that is wider than the image sees all of it
    width = min(width, max(class_map.shape[1:]))
    # the largest class and minus the smallest, pooled together; float32 is exact up to 2^24
    extremes = torch.stack([class_map, -class_map], dim=1).float()
    if valid is not None:
        extremes = extremes.masked_fill(~valid.unsqueeze(1), -torch.inf)
    for axis in range(dims):
        # one axis after the other: a cube of 7 voxels per side costs 21 comparisons instead of 343
        kernel, padding = [1] * dims, [0] * dims
        kernel[axis], padding[axis] = 2 * width + 1, width
        extremes = _MAX_POOL[dims](extremes, kernel, stride=1, padding=padding)
    band = extremes[:, 0] != -extremes[:, 1]
    return band if valid is None else band & valid


def _read(
    label: Array, valid: Array | None, batched: bool
) -> tuple[Float[Tensor, "N C *space"], Bool[Tensor, "N *space"] | None]:
    soft = read_label(label, batched)
    shape = (len(soft), *soft.shape[2:])
    return soft, None if valid is None else read_flags("valid", valid, shape, batched)


def _smoothed(soft: Tensor, eps: float) -> Tensor:
    check_value(Share, eps=eps)
    return (1 - eps) * soft + eps / soft.shape[1]


def _gaussian_along(soft: Tensor, axis: int, sigma: float) -> Tensor:
    """Gaussian filter along one axis, zero outside. A convolution might be rounded to TF32 on a GPU."""
    length = soft.shape[axis]
    radius = int(4 * sigma + 0.5)
    weights = [math.exp(-0.5 * (shift / sigma) ** 2) for shift in range(radius + 1)]
    total = weights[0] + 2 * sum(weights[1:])
    filtered = soft * (weights[0] / total)
    for shift in range(1, min(radius, length - 1) + 1):
        inside = length - shift
        for start, source in ((shift, 0), (0, shift)):
            shifted = soft.narrow(axis, source, inside)
            filtered.narrow(axis, start, inside).add_(shifted, alpha=weights[shift] / total)
    return filtered
