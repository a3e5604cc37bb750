"""Random scale, flip, crop and rotation of image and label together; then intensities.

Output voxel o shows the image at position p = A o + t, in voxels from the centre of the first voxel. The CPU
draws A and t. The device of the batch does the work, with shapes that do not depend on the draw:

    params = draw_augmentation(options, rng, sizes, out_size)              (N, P), a few numbers per case
    grid, valid = sampling_grid(params, sizes, options, out_size=...)
    image = augment_image(image, grid, valid, params, options, ...)       linear interpolation
    label = resample_label(label, grid, hard=...)                          linear, or nearest for hard labels

A voxel is valid if p lies inside the image, its outermost half voxels included. A hard label stays hard: each
voxel has the label of its nearest neighbour. Otherwise the label is a weighted mean of labels, hence a
probability. Other voxels have image 0 and label background. Shrinking does not filter first, so it aliases,
as in the usual pipelines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Integer
from torch import Tensor

from ...errors import UserError
from ...options import Bounds, Share, Weight, check_options


@dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    """How batches are augmented; see `data.batches.augment`."""

    crop: tuple[int, ...] | None = None
    """size of the images in a batch, rows and columns; null is that of the dataset's largest case, rounded up
    to a multiple of 32"""
    scale: tuple[float, float] = (0.5, 2.0)
    """range of the magnification, the same along all axes of a case"""
    shift: Share = 1.0
    """how far a window moves in a larger image, or a smaller image in the window: 1 anywhere, 0 always
    centred"""
    foreground: Share = 0.0
    """share of windows that are centred on a voxel which some rater marked, as far as the image allows; for
    images larger than `crop`"""
    flip: bool | tuple[bool, ...] = True
    """mirror with a chance of one half: along all axes, none, or one answer per axis, such as [false, true]
    for left and right alone"""
    rotate_degrees: Annotated[float, Bounds(at_least=0, at_most=180)] = 0.0
    """largest rotation either way, in each plane of a volume"""
    gamma: Weight = 0.0
    """intensities in [0, 1] are raised to a power from exp(-gamma) to exp(gamma)"""
    contrast: Weight = 0.0
    """normalised intensities are multiplied by a number from exp(-contrast) to exp(contrast)"""
    brightness: Weight = 0.0
    """largest number added to all intensities of an image, in units of the training cases' standard
    deviation"""
    noise: Weight = 0.0
    """standard deviation of added noise, in units of that of the training cases"""

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.scale[0] <= self.scale[1] < math.inf:
            raise ValueError(f"scale needs two numbers above 0, the smaller one first; got {self.scale}")
        if self.crop is not None and not (2 <= len(self.crop) <= 3 and min(self.crop) >= 1):
            raise ValueError(f"crop needs a size of 1 or more for each of 2 or 3 axes; got {self.crop}")
        if not isinstance(self.flip, bool) and len(self.flip) not in (2, 3):
            raise ValueError(
                f"flip needs true, false, or one of them for each of 2 or 3 axes; got {self.flip}"
            )

    def flip_axes(self, num_axes: int) -> tuple[int, ...]:
        """The spatial axes that are mirrored; a ValueError if `flip` is for another number of axes.

        >>> AugmentOptions(flip=(False, True)).flip_axes(2), AugmentOptions().flip_axes(3)
        ((1,), (0, 1, 2))
        """
        flags = (self.flip,) * num_axes if isinstance(self.flip, bool) else self.flip
        if len(flags) != num_axes:
            raise UserError(
                f"augment.flip has {len(flags)} answers, but the images have {num_axes} spatial axes"
            )
        return tuple(axis for axis, flag in enumerate(flags) if flag)


def draw_augmentation(
    options: AugmentOptions,
    rng: np.random.Generator,
    sizes: Integer[np.ndarray, "N axes"],
    out_size: Sequence[int],
    *,
    foreground: Integer[np.ndarray, "N axes"] | None = None,
) -> Float32[np.ndarray, "N params"]:
    """Parameters of N cases of these sizes: A row by row, t, log gamma, noise seed, log contrast, brightness.

    If a magnified image is larger than the output, a random window of it is taken; a smaller one is placed at
    random in the output. Both move by whole output voxels, so scale (1, 1) without rotation does not blur.
    foreground: a voxel of each case for `options.foreground`; negative for a case without one.
    An option does not change the random numbers of the others.
    """
    num_cases, dims = sizes.shape
    planes = [(first, second) for first in range(dims) for second in range(first + 1, dims)]
    draw = rng.random((num_cases, 2 + 2 * dims + len(planes)))
    later = rng.random((num_cases, 3))
    low, high = options.scale
    scale = low + (high - low) * draw[:, :1]
    log_gamma = options.gamma * (2 * draw[:, 1:2] - 1)
    mirrored = np.isin(np.arange(dims), options.flip_axes(dims))
    flip = np.where(mirrored & (draw[:, 2 : 2 + dims] < 0.5), -1.0, 1.0)
    angles = math.radians(options.rotate_degrees) * (2 * draw[:, 2 + 2 * dims :] - 1)
    matrix = np.eye(dims) / scale[:, :, None]
    for plane, angle in zip(planes, angles.T, strict=True):
        matrix = matrix @ _rotation(dims, plane, angle)
    matrix = flip[:, :, None] * matrix
    # how far the window can move inside the image, or the image inside the window
    margin = sizes * scale - np.array(out_size)
    room = np.floor(np.abs(margin))
    steps = np.floor(draw[:, 2 + dims : 2 + 2 * dims] * (room + 1))
    steps = np.floor(room / 2 + options.shift * (steps - room / 2) + 0.5)
    if foreground is not None:
        # the voxel's distance from the centre of the image, in output voxels, moves the window
        from_centre = np.linalg.solve(matrix, (foreground - (sizes - 1) / 2)[..., None])[..., 0]
        wanted = np.clip(np.floor(margin / 2 + from_centre + 0.5), 0, room)
        chosen = (later[:, :1] < options.foreground) & (foreground >= 0).all(1, keepdims=True)
        steps = np.where(chosen & (margin > 0), wanted, steps)
    centre = sizes * scale / 2 - np.sign(margin) * steps - 0.5
    shift = (sizes - 1) / 2 - np.einsum("nij,nj->ni", matrix, centre)
    # the lowest 24 of the 53 random bits: as many as float32 holds, and without visible effect on the scale
    noise_seed = np.floor(draw[:, :1] * 2**53) % 2**24
    log_contrast = options.contrast * (2 * later[:, 1:2] - 1)
    brightness = options.brightness * (2 * later[:, 2:3] - 1)
    parts = [matrix.reshape(num_cases, -1), shift, log_gamma, noise_seed, log_contrast, brightness]
    return np.concatenate(parts, 1).astype(np.float32)


def sampling_grid(
    params: Float32[Tensor, "N params"],
    sizes: Integer[Tensor, "N axes"],
    options: AugmentOptions,
    *,
    space: Sequence[int],
    out_size: Sequence[int],
) -> tuple[Float32[Tensor, "N *out axes"], Bool[Tensor, "N *out"]]:
    """Where output voxels look in images of size `space`, in the units of grid_sample; and which are valid.

    A case of size `sizes` lies in the corner of `space`; voxels outside of it are not used. Nothing is random
    here: a case looks the same in any batch.
    """
    positions = _positions(params, out_size, options)
    return _grid(positions, sizes, out_size, _fine(space))


def augment_image(
    image: Float32[Tensor, "N channels *space"],
    grid: Float32[Tensor, "N *out axes"],
    valid: Bool[Tensor, "N *out"],
    params: Float32[Tensor, "N params"],
    options: AugmentOptions,
    *,
    mean: Float32[Tensor, " channels"],
    std: Float32[Tensor, " channels"],
) -> Float32[Tensor, "N channels *out"]:
    """The image at the positions of `grid`, with changed intensities; 0 where it is not valid.

    image: normalised, (intensity - mean) / std.
    """
    dims = valid.ndim - 1
    changed = resample(image, grid, hard=False)
    of_case = params[:, dims * (dims + 1) :].view(len(params), -1, *[1] * (dims + 1))
    log_gamma, noise_seed, log_contrast, brightness = of_case.unbind(1)
    if options.gamma > 0:
        mean, std = (number.view(-1, *[1] * dims) for number in (mean, std))
        changed = ((changed * std + mean).clamp_(0, 1) ** log_gamma.exp() - mean) / std
    if options.contrast > 0 or options.brightness > 0:
        changed = changed * log_contrast.exp() + brightness
    if options.noise > 0:
        changed = changed.add_(_noise(noise_seed.flatten(), changed.shape), alpha=options.noise)
    if options.gamma > 0 or options.contrast > 0 or options.brightness > 0 or options.noise > 0:
        changed = changed * valid.unsqueeze(1)
    return changed


def resample_label(
    label: Float32[Tensor, "N C *space"], grid: Float32[Tensor, "N *out axes"], *, hard: bool
) -> Float32[Tensor, "N C *out"]:
    """The label at the positions of `grid`: of the nearest voxel if `hard`, else interpolated linearly.

    Class 0 is the background: 1 minus the other classes, and 1 outside of the image.
    """
    sampled = resample(label[:, 1:], grid, hard=hard)
    target = torch.empty(len(label), label.shape[1], *grid.shape[1:-1], device=label.device)
    # because of rounding, the weights of neighbours and the classes of a voxel may sum to more than 1
    torch.clamp(sampled, max=1, out=target[:, 1:])
    foreground = target[:, 1] if label.shape[1] == 2 else target[:, 1:].sum(1).clamp_(max=1)
    torch.sub(1, foreground, out=target[:, 0])
    return target


def resample(
    tensor: Float32[Tensor, "N C *space"], grid: Float32[Tensor, "N *out axes"], *, hard: bool
) -> Float32[Tensor, "N C *out"]:
    """Values at the positions of `grid`: of the nearest voxel if `hard`, else linear; 0 outside."""
    tensor = fit_to(tensor, _fine(tensor.shape[2:]))
    mode = "nearest" if hard else "bilinear"
    return F.grid_sample(tensor, grid, mode=mode, padding_mode="zeros", align_corners=False)


def _fine(space: Sequence[int]) -> list[int]:
    """Powers of two: with these sizes, grid_sample computes whole positions without rounding errors."""
    return [1 << (side - 1).bit_length() for side in space]


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
    rotation = np.zeros((len(angle), dims, dims))
    rotation[:, range(dims), range(dims)] = 1
    first, second = plane
    rotation[:, first, first] = rotation[:, second, second] = np.cos(angle)
    rotation[:, first, second], rotation[:, second, first] = -np.sin(angle), np.sin(angle)
    return rotation


def _positions(params: Tensor, out_size: Sequence[int], options: AugmentOptions) -> list[Tensor]:
    """A o + t for each axis, shaped (N, *out), with length 1 along axes it does not depend on."""
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
        if options.rotate_degrees > 0:
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
