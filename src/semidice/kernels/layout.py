"""How a batch lies in memory, and what that decides: tiling, number of programs, constants of the kernels.

Kernels take tensors with one axis of space. `flat_inputs` finds the strides of that axis, and copies a tensor
only if its axes of space have no common stride.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import Activation
from ..overlap.forms import Form
from ..overlap.options import SumsOptions
from . import tiling_tables, tilings
from .tile import ACTIVATIONS, FORMS, Spec
from .tilings import Tiling, Tilings

NUM_SUMS = 5
# partial sums that the loss kernel adds up in less time than another launch takes
MAX_LOSS_PARTIALS = 2**13
# programs of several warps that keep all of a GPU busy
_MIN_PROGRAMS = 2**9
# of an H200, for which plans are made without a GPU
_NUM_MULTIPROCESSORS = 132
# voxels of a program that sees one block of classes: with fewer it would spill registers
_MIN_VOXEL_BLOCK = 64


class Layout(NamedTuple):
    """All that decides how a batch is processed, except the addresses of its tensors."""

    # images, classes and voxels
    shape: tuple[int, int, int]
    # along images, classes and voxels; the class stride of class indices is 0
    logits_stride: tuple[int, int, int]
    target_stride: tuple[int, int, int]
    logits_dtype: torch.dtype
    target_dtype: torch.dtype
    has_valid: bool
    activation: Activation
    form: Form | None
    entropy: bool
    # of the device
    num_multiprocessors: int = _NUM_MULTIPROCESSORS

    @property
    def hard(self) -> bool:
        return not self.target_dtype.is_floating_point

    @property
    def integers(self) -> tuple[int, ...]:
        """Number of voxels and strides, in the order of the kernels' arguments."""
        return (self.shape[2], *self.logits_stride, *self.target_stride)

    @property
    def num_programs(self) -> int:
        """Programs per image in the forward pass, each of which stores sums of its own.

        If the GPU runs `at_once` of them, their number is a multiple of that, or nearly.
        """
        num_images, num_classes, num_voxels = self.shape
        tiling = self.forward
        num_tiles = -(-num_voxels // tiling.voxel_block)
        min_programs = -(-num_tiles // tiling.num_tiles)
        at_once = max(1, self.programs_at_once // self.num_blocks)
        num_rounds = -(-num_images * min_programs // at_once)
        num_programs = min(num_tiles, num_rounds * at_once // num_images)
        # as few as the loss kernel can add up, if that suffices
        num_few = MAX_LOSS_PARTIALS // (NUM_SUMS * num_images * num_classes)
        return num_few if min_programs <= num_few < num_programs else num_programs

    @property
    def num_blocks(self) -> int:
        """Blocks of classes in the forward pass; each has programs of its own."""
        return -(-self.shape[1] // (self.forward.class_block or self.shape[1]))

    @property
    def programs_at_once(self) -> int:
        """Programs that the GPU runs at once in the forward pass."""
        num_rows = self.forward.class_block or self.shape[1]
        row_bytes = self.logits_dtype.itemsize + (0 if self.hard else self.target_dtype.itemsize)
        return self.num_multiprocessors * self.forward.programs_at_once(num_rows * row_bytes)

    @property
    def forward(self) -> Tiling:
        """Tiling of the sums."""
        return self._tiling(tiling_tables.HARD_FORWARD if self.has_index_softmax else tiling_tables.FORWARD)

    @property
    def backward(self) -> Tiling:
        """Tiling of the gradient."""
        table = tiling_tables.HARD_BACKWARD if self.has_index_softmax else tiling_tables.BACKWARD
        return self._spread(self._tiling(table))

    @property
    def norms(self) -> Tiling:
        """Tiling of the softmax, where the sums see one block of classes at a time."""
        return self._spread(tilings.NORMS)

    def _tiling(self, table: Tilings) -> Tiling:
        return tilings.tiling_of(table, self.shape[1], self.logits_dtype.itemsize)

    def _spread(self, tiling: Tiling) -> Tiling:
        """The tiling with fewer voxels and larger blocks of classes, if programs are too few for the GPU."""
        num_images, _, num_voxels = self.shape
        while (
            tiling.class_block is not None
            and tiling.voxel_block > _MIN_VOXEL_BLOCK
            and num_images * -(-num_voxels // tiling.voxel_block) < _MIN_PROGRAMS
        ):
            tiling = tiling._replace(voxel_block=tiling.voxel_block // 2, class_block=tiling.class_block * 2)
        return tiling

    @property
    def has_index_softmax(self) -> bool:
        """Whether the target has class indices and the activation is a softmax: then kernels do less work."""
        return self.hard and self.activation == "softmax"

    def spec(self, tiling: Tiling) -> Spec:
        """Constants of the kernels that read logits."""
        chunks = tilings.class_chunks(self.shape[1], tiling.step)
        return Spec(
            activation=ACTIVATIONS[self.activation],
            form=FORMS[self._kernel_form],
            entropy=self.entropy,
            hard=self.hard,
            wide=max(map(self._extent, (self.logits_stride, self.target_stride))) >= 2**31,
            num_classes=self.shape[1],
            even=self.shape[2] % tiling.voxel_block == 0,
            chunks=chunks,
            class_block=tiling.class_block,
            step=min(tiling.step, tiling.class_block or chunks[0][1]),
            voxel_block=tiling.voxel_block,
            vector=tiling.vector,
            num_stages=tiling.num_stages,
        )

    @property
    def _kernel_form(self) -> Form | None:
        """The form to compute: on hard labels three are equal, and relaxed compares nothing.

        They differ only at ties, where a probability is 0 or 1 and the activation has no gradient.
        """
        is_relaxed = self.hard and self.activation != "none" and self.form in ("min", "product")
        return "relaxed" if is_relaxed else self.form

    def _extent(self, stride: tuple[int, int, int]) -> int:
        """One more than the largest offset within an image."""
        return 1 + (self.shape[1] - 1) * stride[1] + (self.shape[2] - 1) * stride[2]


class Inputs(NamedTuple):
    """Tensors of any shape, and their layout with one axis of space."""

    logits: Tensor
    target: Tensor
    valid: Tensor | None
    layout: Layout
    # whether one of the tensors was copied
    copied: bool = False


def flat_inputs(logits: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions) -> Inputs:
    """`Inputs`, with a copy of each tensor whose axes of space have no common stride."""
    layout = _layout(logits, target, valid, options)
    if layout is not None:
        return Inputs(logits, target, valid, layout)
    flat = flat_tensors(logits, target, valid)
    return flat_inputs(*flat, options)._replace(copied=True)


def flat_tensors(
    logits: Tensor, target: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors with one axis of space, copied only if their axes have no common stride."""
    num_leading = 2 if target.is_floating_point() else 1
    valid = None if valid is None else _flat(valid, 1).contiguous()
    return _flat(logits, 2), _flat(target, num_leading), valid


def _layout(logits: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions) -> Layout | None:
    """Layout of these tensors, None if one of them has to be copied."""
    num_images, num_classes, *space = logits.shape
    num_voxels = math.prod(space)
    hard = not target.is_floating_point()
    logits_flat: Any = flat_stride(logits.shape, logits.stride(), 2)
    target_flat: Any = flat_stride(target.shape, target.stride(), 1 if hard else 2)
    if logits_flat is None or target_flat is None:
        return None
    if valid is not None:
        valid_flat = flat_stride(valid.shape, valid.stride(), 1)
        # the kernels take a contiguous mask; the stride of a single image does not matter
        if valid_flat is None or valid_flat[1] != 1 or (num_images > 1 and valid_flat[0] != num_voxels):
            return None
    if hard:
        target_flat = (target_flat[0], 0, target_flat[1])
    return Layout(
        (num_images, num_classes, num_voxels),
        logits_flat,
        target_flat,
        logits.dtype,
        target.dtype,
        valid is not None,
        *options,
        _num_multiprocessors(logits.device),
    )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _NUM_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def flat_stride(shape: tuple[int, ...], stride: tuple[int, ...], num_leading: int) -> tuple[int, ...] | None:
    """Strides with the axes from `num_leading` on as one; None if those have no common stride."""
    space = list(zip(shape, stride, strict=True))[num_leading:]
    axes = [(size, step) for size, step in space if size > 1] or [(1, 1)]
    for (_, outer), (size, inner) in pairwise(axes):
        if outer != size * inner:
            return None
    return (*stride[:num_leading], axes[-1][1])


def _flat(tensor: Tensor, num_leading: int) -> Tensor:
    if tensor.ndim == num_leading:
        return tensor.unsqueeze(-1)
    # no copy if the axes have a common stride, as in the channels-last format
    return tensor.flatten(num_leading)
