"""Random scale, flip, crop and rotation of image and soft label together, by one linear resampling.

Output voxel o shows the image at position p = A o + t, both in voxels from the centre of the first voxel. The
CPU draws A and t. The device of the batch does the work, with shapes that do not depend on the draw:

    params = draw_augmentation(options, rng, sizes, out_size)          (N, P), a few numbers per case
    image, label, valid = augment(image, label, sizes, params, ...)

A voxel is valid if p lies inside the image, its outermost half voxels included. The label of a valid voxel is
a weighted mean of labels, hence a probability. Other voxels have image 0 and label background.
Shrinking does not filter first, so it aliases, as in the usual pipelines. Left out: elastic deformation.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Integer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor


class AugmentOptions(BaseModel):
    """How batches are augmented; see `data.augment`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    crop: tuple[int, ...] | None = Field(
        default=None,
        description="size of the images in a batch, rows and columns; null is that of the dataset's largest "
        "case, rounded up to a multiple of 32",
    )
    scale: tuple[float, float] = Field(
        default=(0.5, 2.0), description="range of the magnification, the same along all axes of a case"
    )
    flip: bool = Field(default=True, description="mirror along each axis with a chance of one half")
    rotate_degrees: float = Field(
        default=0.0, ge=0, le=180, description="largest rotation either way, in each plane of a volume"
    )
    gamma: float = Field(
        default=0.0,
        ge=0,
        description="intensities in [0, 1] are raised to a power from exp(-gamma) to exp(gamma)",
    )
    noise: float = Field(
        default=0.0, ge=0, description="standard deviation of added noise, in units of the dataset's own"
    )

    @model_validator(mode="after")
    def _sensible(self) -> "AugmentOptions":
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale needs two numbers above 0, the smaller one first; got {self.scale}")
        if self.crop is not None and not (2 <= len(self.crop) <= 3 and min(self.crop) >= 1):
            raise ValueError(f"crop needs a size of 1 or more for each of 2 or 3 axes; got {self.crop}")
        return self


def draw_augmentation(
    options: AugmentOptions,
    rng: np.random.Generator,
    sizes: Integer[np.ndarray, "N axes"],
    out_size: Sequence[int],
) -> Float32[np.ndarray, "N params"]:
    """Parameters of `augment` for N cases of these sizes: A row by row, t, log gamma, noise seed.

    If a magnified image is larger than the output, a random window of it is taken; a smaller one is placed at
    random in the output. Both move by whole output voxels, so scale (1, 1) without rotation does not blur.
    An option does not change the random numbers of the others.
    """
    num_cases, dims = sizes.shape
    planes = [(first, second) for first in range(dims) for second in range(first + 1, dims)]
    draw = rng.random((num_cases, 2 + 2 * dims + len(planes)))
    low, high = options.scale
    scale = low + (high - low) * draw[:, :1]
    log_gamma = options.gamma * (2 * draw[:, 1:2] - 1)
    flip = np.where(options.flip & (draw[:, 2 : 2 + dims] < 0.5), -1.0, 1.0)
    angles = math.radians(options.rotate_degrees) * (2 * draw[:, 2 + 2 * dims :] - 1)
    matrix = np.eye(dims) / scale[:, :, None]
    for plane, angle in zip(planes, angles.T, strict=True):
        matrix = matrix @ _rotation(dims, plane, angle)
    matrix = flip[:, :, None] * matrix
    # how far the window can move inside the image, or the image inside the window
    margin = sizes * scale - np.array(out_size)
    steps = np.floor(draw[:, 2 + dims : 2 + 2 * dims] * (np.floor(np.abs(margin)) + 1))
    centre = sizes * scale / 2 - np.sign(margin) * steps - 0.5
    shift = (sizes - 1) / 2 - np.einsum("nij,nj->ni", matrix, centre)
    # the lowest 24 of the 53 random bits: as many as float32 holds, and without visible effect on the scale
    noise_seed = np.floor(draw[:, :1] * 2**53) % 2**24
    return np.concatenate([matrix.reshape(num_cases, -1), shift, log_gamma, noise_seed], 1).astype(np.float32)


def augment(
    image: Float32[Tensor, "N channels *space"],
    label: Float32[Tensor, "N C *space"],
    sizes: Integer[Tensor, "N axes"],
    params: Float32[Tensor, "N params"],
    options: AugmentOptions,
    *,
    out_size: Sequence[int],
    mean: Float32[Tensor, " channels"],
    std: Float32[Tensor, " channels"],
) -> tuple[Float32[Tensor, "N channels *out"], Float32[Tensor, "N C *out"], Bool[Tensor, "N *out"]]:
    """Image, label and valid of size `out_size`; `params` are those of `draw_augmentation`.

    image: normalised, (intensity - mean) / std. A case of size `sizes` lies in the corner of `space`; voxels
    outside of it are not used. Nothing is random here: a case looks the same in any batch.
    """
    dims, num_channels = len(out_size), image.shape[1]
    positions = _positions(params, out_size, rotates=options.rotate_degrees > 0)
    # powers of two: with these sizes, grid_sample computes whole positions without rounding errors
    fine = [1 << (side - 1).bit_length() for side in image.shape[2:]]
    grid, valid = _grid(positions, sizes, out_size, fine)
    # the background follows from the other classes
    stack = fit_to(torch.cat([image, label[:, 1:]], 1), fine)
    sampled = F.grid_sample(stack, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    changed = sampled[:, :num_channels].contiguous()
    if options.gamma > 0:
        log_gamma = params[:, dims * (dims + 1)].view(-1, *[1] * (image.ndim - 1))
        mean, std = (number.view(-1, *[1] * dims) for number in (mean, std))
        changed = ((changed * std + mean).clamp_(0, 1) ** log_gamma.exp() - mean) / std
    if options.noise > 0:
        changed = changed.add_(_noise(params[:, dims * (dims + 1) + 1], changed.shape), alpha=options.noise)
    if options.gamma > 0 or options.noise > 0:
        changed = changed * valid.unsqueeze(1)
    target = torch.empty(len(image), label.shape[1], *out_size, device=image.device)
    # because of rounding, the weights of neighbours and the classes of a voxel may sum to more than 1
    torch.clamp(sampled[:, num_channels:], max=1, out=target[:, 1:])
    foreground = target[:, 1] if label.shape[1] == 2 else target[:, 1:].sum(1).clamp_(max=1)
    torch.sub(1, foreground, out=target[:, 0])
    return changed, target, valid


def _noise(seed: Float32[Tensor, " N"], shape: torch.Size) -> Float32[Tensor, "N channels *space"]:
    """Standard normal numbers; each depends only on the seed of its case and its index in the case."""
    index = torch.arange(math.prod(shape[1:]), device=seed.device, dtype=torch.int32)
    bits = _mixed(_mixed(seed.to(torch.int32)).unsqueeze(1) ^ index)
    # the centres of 2^23 equal parts of (-1, 1), then the inverse of the normal distribution
    uniform = ((bits >> 9) + 0.5) * 2.0**-22
    return uniform.erfinv_().mul_(math.sqrt(2)).view(shape)


def _mixed(number: Tensor) -> Tensor:
    """A hash of 32 bits, whose high bits depend on all bits of the number: odd factors and shifts."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        # the shift fills up with the sign, which is masked out
        number = (number ^ ((number >> shift) & (2 ** (32 - shift) - 1))) * factor
    return number


def _rotation(dims: int, plane: tuple[int, int], angle: np.ndarray) -> np.ndarray:
    """Matrices (N, dims, dims) that rotate in one plane."""
    rotation = np.tile(np.eye(dims), (len(angle), 1, 1))
    first, second = plane
    rotation[:, first, first] = rotation[:, second, second] = np.cos(angle)
    rotation[:, first, second], rotation[:, second, first] = -np.sin(angle), np.sin(angle)
    return rotation


def _positions(params: Tensor, out_size: Sequence[int], *, rotates: bool) -> list[Tensor]:
    """A o + t for each spatial axis, shaped (N, *out), with length 1 along axes it does not depend on."""
    dims = len(out_size)
    index = [
        torch.arange(side, dtype=torch.float32, device=params.device).view(-1, *[1] * (dims - 1 - axis))
        for axis, side in enumerate(out_size)
    ]
    entry = params.view(*params.shape, *[1] * dims)
    positions = []
    for axis in range(dims):
        # the terms of other axes come last, because they enlarge the tensor
        position = entry[:, axis * dims + axis] * index[axis] + entry[:, dims * dims + axis]
        if rotates:
            for other in range(dims):
                if other != axis:
                    position = position + entry[:, axis * dims + other] * index[other]
        positions.append(position)
    return positions


def _grid(
    positions: Sequence[Tensor], sizes: Tensor, out_size: Sequence[int], fine: Sequence[int]
) -> tuple[Float32[Tensor, "N *out axes"], Bool[Tensor, "N *out"]]:
    """Sampling positions in the units of grid_sample for an image of size `fine`, and which are valid."""
    dims = len(out_size)
    grid = torch.empty(len(sizes), *out_size, dims, device=sizes.device)
    valid = torch.ones(1, *[1] * dims, dtype=torch.bool, device=sizes.device)
    for axis, position in enumerate(positions):
        last = (sizes[:, axis] - 1).to(position.dtype).view(-1, *[1] * dims)
        # a position outside moves to the nearest voxel, so that the label stays a probability
        nearest = position.clamp(min=torch.zeros_like(last), max=last)
        inside = (position - nearest).abs_() <= 0.5
        valid = valid & inside
        # grid_sample counts from -1 to 1, with the last axis first; at -3 it finds zeros
        coordinate = (nearest * (2 / fine[axis])).add_(1 / fine[axis] - 1)
        grid[..., dims - 1 - axis] = torch.where(inside, coordinate, -3)
    return grid, valid


def fit_to(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """A tensor (N, C, *any) cut or padded with zeros at the end of each spatial axis, to size `size`."""
    if tuple(tensor.shape[2:]) == tuple(size):
        return tensor
    missing = [new - old for new, old in zip(size, tensor.shape[2:], strict=True)]
    return F.pad(tensor, [number for side in reversed(missing) for number in (0, side)])
