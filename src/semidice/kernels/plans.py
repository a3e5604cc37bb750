"""What is launched for the sums, the mixture of losses and their gradients.

`fused` makes a plan once for each kind of tensors, and keeps it. A plan holds launches that are ready.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..overlap.options import RegionOptions
from . import class_blocks, gradient, index_sums, mixture, sums
from .launch import Launch
from .layout import MAX_LOSS_PARTIALS, NUM_SUMS, Layout, flat_stride
from .tile import FORMS
from .tilings import Tiling

# classes of class indices from which on `index_sums` is faster: it is with 40, and is not with 32
MIN_INDEX_SUMS = 33


def _launch(
    layout: Layout, kernel: Any, tiling: Tiling, num_programs: int, integers: tuple[int, ...]
) -> Launch:
    return Launch(
        kernel,
        (num_programs, layout.shape[0]),
        integers,
        num_warps=tiling.num_warps,
        registers=tiling.registers,
        SPEC=layout.spec(tiling),
    )


def sums_launch(layout: Layout, partials_start: int) -> Launch:
    """Launch that stores partial sums (N, T, 5, C) in a tensor, from its element `partials_start` on."""
    tiling = layout.forward
    num_programs = layout.num_programs
    if tiling.class_block is not None:
        kernel: Any = class_blocks.block_sums_kernel
        num_programs *= layout.num_blocks
    elif layout.has_index_softmax and layout.shape[1] >= MIN_INDEX_SUMS:
        kernel = index_sums.index_sums_kernel
    else:
        kernel = sums.sums_kernel
    return _launch(layout, kernel, tiling, num_programs, (partials_start, *layout.integers))


class Norms:
    """The norms of a softmax, for a kernel with this tiling; nothing if it sees all classes at once."""

    def __init__(self, layout: Layout, tiling: Tiling) -> None:
        self._sees_all = tiling.class_block is None
        num_images, _, num_voxels = layout.shape
        self._shape = (num_images, 2, num_voxels)
        self._launch: Launch | None = None
        if not self._sees_all and layout.activation == "softmax":
            num_programs = -(-num_voxels // layout.norms.voxel_block)
            integers = (num_voxels, *layout.logits_stride)
            self._launch = _launch(
                layout, class_blocks.norms_kernel, layout.norms, num_programs, integers
            )  # fmt: skip

    def __call__(self, logits: Tensor) -> tuple[Tensor | None, ...]:
        """The last argument of the kernel: norms (N, 2, V), or None for another activation."""
        if self._sees_all:
            return ()
        if self._launch is None:
            return (None,)
        norms = logits.new_empty(self._shape, dtype=torch.float32)
        self._launch(logits, norms)
        return (norms,)


def totals_launch(layout: Layout, num_programs: int, totals_start: int) -> Launch:
    """Launch that adds up partial sums, and stores totals (N, 5, C) from element `totals_start` on."""
    num_images, num_classes, _ = layout.shape
    # 32 bytes of a row, the least that memory transfers
    column_block = 8
    return Launch(
        sums.totals_kernel,
        (-(-num_images * NUM_SUMS * num_classes // column_block),),
        (totals_start, num_images, num_programs, num_classes),
        num_warps=4,
        COLUMN_BLOCK=column_block,
        PROGRAM_BLOCK=min(256, triton.next_power_of_2(num_programs)),
    )


def gradient_launch(layout: Layout, gradient_stride: tuple[int, ...]) -> Launch:
    """Launch that stores a gradient with these strides along images, classes and voxels."""
    tiling = layout.backward
    sees_all = tiling.class_block is None
    kernel = gradient.gradient_kernel if sees_all else class_blocks.block_gradient_kernel
    num_programs = -(-layout.shape[2] // tiling.voxel_block)
    return _launch(layout, kernel, tiling, num_programs, (*layout.integers, *gradient_stride))


class _GradientPlan(NamedTuple):
    launch: Launch
    memory_format: torch.memory_format


def _gradient_plan(layout: Layout, like: Tensor) -> _GradientPlan:
    """Plan of a gradient with the memory format of `like`, or contiguous if voxels would have no stride."""
    example = torch.empty_strided(like.shape, like.stride(), device="meta")
    for memory_format in (torch.preserve_format, torch.contiguous_format):
        stride = torch.empty_like(example, memory_format=memory_format).stride()
        flat: Any = flat_stride(like.shape, stride, 2)
        if flat is not None:
            break
    return _GradientPlan(gradient_launch(layout, flat), memory_format)


class SumsPlan:
    """The sums for one layout, and their gradient in `like`."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        num_images, num_classes, _ = layout.shape
        num_programs = layout.num_programs
        self._shape = (num_images, num_programs, NUM_SUMS, num_classes)
        self._sums = sums_launch(layout, 0)
        self._totals = None if num_programs == 1 else totals_launch(layout, num_programs, 0)
        self._norms, self._gradient_norms = Norms(layout, layout.forward), Norms(layout, layout.backward)
        self._gradient = _gradient_plan(layout, like)

    def sums(self, logits: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
        """Sums (N, 5, C); those that were not requested are undefined."""
        partials = logits.new_empty(self._shape, dtype=torch.float32)
        self._sums(logits, target, valid, partials, *self._norms(logits))
        if self._totals is None:
            return partials[:, 0]
        num_images, _, *row = self._shape
        totals = logits.new_empty((num_images, *row), dtype=torch.float32)
        self._totals(partials, totals)
        return totals

    def gradient(
        self, logits: Tensor, target: Tensor, valid: Tensor | None, grad_sums: Tensor, like: Tensor
    ) -> Tensor:
        """Gradient in the logits, with the shape of `like`, from that of the sums (N, 4, C)."""
        launch, memory_format = self._gradient
        result = torch.empty_like(like, memory_format=memory_format)
        scale = torch.ones((), device=like.device)
        launch(logits, target, valid, grad_sums, scale, result, *self._gradient_norms(logits))
        return result


def loss_tile(class_block: int, num_images: int, *, adds_up: bool) -> tuple[int, int]:
    """Warps of the one program of the loss, and images that it processes at once.

    With one class per thread, threads need not wait for each other until every class has one number.
    """
    if class_block >= 128:
        return min(16, class_block // 32), 1
    all_images = triton.next_power_of_2(num_images)
    # partial sums keep more threads busy than one number per image and class
    num_warps = 8 if adds_up else max(1, min(8, class_block * all_images // 256))
    return num_warps, min(all_images, 256 * num_warps // class_block)


class MixturePlan:
    """The mixture of losses for one layout, and its gradient in `like`.

    With `parts` the two losses are stored as well.
    """

    def __init__(self, layout: Layout, like: Tensor, options: RegionOptions, *, parts: bool) -> None:
        num_images, num_classes, _ = layout.shape
        num_sums = num_images * num_classes
        num_programs = layout.num_programs
        self._num_partials = NUM_SUMS * num_sums * num_programs
        # derivatives (N, 4, C) and totals (N, 5, C)
        self._workspace_size = 9 * num_sums
        # None if the loss kernel adds up the partial sums: then they are in the workspace as well
        self._totals: Launch | None = None
        if self._num_partials > MAX_LOSS_PARTIALS:
            self._totals = totals_launch(layout, num_programs, 4 * num_sums)
            self._sums = sums_launch(layout, 0)
        else:
            self._sums = sums_launch(layout, self._workspace_size)
            self._workspace_size += self._num_partials
        self._norms = Norms(layout, layout.forward)
        self._keeps_norms = layout.backward.class_block is not None
        self._gradient = _gradient_plan(layout, like)
        self._parts = parts
        class_block = triton.next_power_of_2(num_classes)
        num_warps, image_block = loss_tile(class_block, num_images, adds_up=self._totals is None)
        column_block = min(512, triton.next_power_of_2(NUM_SUMS * num_sums))
        self._loss = Launch(
            mixture.loss_kernel,
            (1,),
            (num_images, num_programs, num_classes),
            num_warps=num_warps,
            FORM=FORMS[layout.form],
            ENTROPY=layout.entropy,
            LOG=options.log,
            FOCAL=options.gamma != 1,
            PRESENT=options.classes == "present",
            OVER=mixture.OVERS[options.over],
            BACKGROUND=options.background,
            ADDED_UP=self._totals is not None,
            CLASS_BLOCK=class_block,
            IMAGE_BLOCK=image_block,
            COLUMN_BLOCK=column_block,
            PROGRAM_BLOCK=min(triton.next_power_of_2(num_programs), MAX_LOSS_PARTIALS // column_block),
        )

    def losses(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None,
        class_weight: Tensor | None,
        floats: tuple[float, ...],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """Total; cross entropy and region loss (2,), or None; and the tensors that `gradient` needs.

        floats: alpha, beta, gamma, smooth, and the weights of cross entropy and region loss.
        """
        norms = self._norms(logits)
        workspace = logits.new_empty(self._workspace_size, dtype=torch.float32)
        if self._totals is None:
            self._sums(logits, target, valid, workspace, *norms)
        else:
            partials = logits.new_empty(self._num_partials, dtype=torch.float32)
            self._sums(logits, target, valid, partials, *norms)
            self._totals(partials, workspace)
        # tensors of their own, because autograd refuses to change a view in place
        total = logits.new_empty((), dtype=torch.float32)
        terms = logits.new_empty((2,), dtype=torch.float32) if self._parts else None
        self._loss(workspace, class_weight, total, terms, floats=floats)
        return total, terms, (workspace, *norms) if self._keeps_norms else (workspace,)

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None,
        saved: Sequence[Tensor | None],
        scale: Tensor,
        like: Tensor,
    ) -> Tensor:
        """Gradient in the logits of the total times `scale`, with the shape of `like`.

        The saved workspace starts with d total / d sums (N, 4, C).
        """
        launch, memory_format = self._gradient
        result = torch.empty_like(like, memory_format=memory_format)
        workspace, *norms = saved
        launch(logits, target, valid, workspace, scale, result, *norms)
        return result
