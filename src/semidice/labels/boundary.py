"""Where classes meet: the band of voxels around the boundaries of a class map."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from ..arrays import describe

_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def boundary_band(
    class_map: Tensor, *, width: int, valid: Bool[Tensor, "N *space"] | None = None
) -> Bool[Tensor, "N *space"]:
    """True at voxels whose window of 2 width + 1 voxels along each axis holds more than one class.

    class_map is integers (N, *space) with one to three axes of space. The window ends at the border of the
    image, which is no boundary. So two touching regions have a band of `width` voxels on either side, in the
    maximum norm; width 0 is nowhere. Any number is a class here, one that means "ignore" included. Where
    `valid` is False there is no image: such voxels are seen by no window and are in no band.

    >>> boundary_band(torch.tensor([[0, 0, 0, 1, 1, 1]]), width=2)
    tensor([[False,  True,  True,  True,  True, False]])
    """
    dims = class_map.ndim - 1
    if class_map.is_floating_point() or class_map.dtype == torch.bool or dims not in _MAX_POOL:
        raise ValueError(
            f"class_map must be integers (N, *space), space of one to three axes; got {describe(class_map)}: "
            "use .long() for a mask, .argmax(1) for a soft label"
        )
    if width < 0:
        raise ValueError(f"width must be 0 voxels or more; got {width}")
    # float32 holds class indices up to 2^24; the largest class and minus the smallest, pooled together
    extremes = torch.stack([class_map, -class_map], dim=1).float()
    if valid is not None:
        extremes = extremes.masked_fill(~valid.unsqueeze(1), -torch.inf)
    for axis in range(dims):
        # one axis after the other: a cube of 7 voxels costs 21 comparisons and not 343
        kernel, padding = [1] * dims, [0] * dims
        kernel[axis], padding[axis] = 2 * width + 1, width
        extremes = _MAX_POOL[dims](extremes, kernel, stride=1, padding=padding)
    band = extremes[:, 0] != -extremes[:, 1]
    return band if valid is None else band & valid
