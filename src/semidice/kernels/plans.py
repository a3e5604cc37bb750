"""What the kernels of `overlap` are launched with. `fused` makes a plan once for each kind of tensors."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..arrays import Activation
from ..overlap.forms import Form
from ..overlap.options import RegionOptions
from . import overlap, tilings
from .launch import Launch
from .tilings import Tiling, Tilings

NUM_SUMS = 5
# classes of hard labels from which on voxels are added to a table: with 40 it pays, with 32 it does not
_MIN_IN_TABLE = 33
# floats of partial sums that the program of the loss adds up in less time than another launch takes
_FEW_PARTIALS = 2**13
# programs of several warps that are enough for all of a GPU
_ENOUGH_PROGRAMS = 2**9
# of an H200, for which plans are made where there is no GPU
_MULTIPROCESSORS = 132
# voxels of a program that sees a block of classes: with fewer it would spill registers
_MIN_SPREAD = 64


class Layout(NamedTuple):
    """All that decides how a batch is gone through, but for where its tensors are."""

    # images, classes and voxels
    shape: tuple[int, int, int]
    # along images, classes and voxels; classes of class indices have stride 0
    logits_stride: tuple[int, int, int]
    target_stride: tuple[int, int, int]
    logits_dtype: torch.dtype
    target_dtype: torch.dtype
    has_valid: bool
    activation: Activation
    form: Form | None
    entropy: bool
    # of the device
    num_multiprocessors: int = _MULTIPROCESSORS

    @property
    def hard(self) -> bool:
        return not self.target_dtype.is_floating_point

    @property
    def integers(self) -> tuple[int, ...]:
        """Voxels and strides, as the kernels take them."""
        return (self.shape[2], *self.logits_stride, *self.target_stride)

    @property
    def num_programs(self) -> int:
        """That an image has in the forward pass, each with sums of its own.

        So many that the GPU runs all at once, or some whole number of times as many.
        """
        num_images, num_classes, num_voxels = self.shape
        tiling = self.forward
        num_tiles = -(-num_voxels // tiling.voxel_block)
        fewest = -(-num_tiles // tiling.num_tiles)
        at_once = max(1, self.programs_at_once // self.num_blocks)
        num_rounds = -(-num_images * fewest // at_once)
        num_programs = min(num_tiles, num_rounds * at_once // num_images)
        # what the program of the loss can add up by itself stays so
        few = _FEW_PARTIALS // (NUM_SUMS * num_images * num_classes)
        return few if fewest <= few < num_programs else num_programs

    @property
    def num_blocks(self) -> int:
        """Of classes in the forward pass, each for programs of its own."""
        return -(-self.shape[1] // (self.forward.class_block or self.shape[1]))

    @property
    def programs_at_once(self) -> int:
        """That the GPU runs in the forward pass."""
        num_rows = self.forward.class_block or self.shape[1]
        row_bytes = self.logits_dtype.itemsize + (0 if self.hard else self.target_dtype.itemsize)
        return self.num_multiprocessors * self.forward.at_once(num_rows * row_bytes)

    @property
    def forward(self) -> Tiling:
        """How the sums go through the batch."""
        return self._tiling(tilings.HARD_FORWARD if self.has_one_class else tilings.FORWARD)

    @property
    def backward(self) -> Tiling:
        """How the gradient does."""
        return self._spread(self._tiling(tilings.HARD_BACKWARD if self.has_one_class else tilings.BACKWARD))

    def _tiling(self, table: Tilings) -> Tiling:
        return tilings.tiling_of(table, self.shape[1], self.logits_dtype.itemsize)

    @property
    def norms(self) -> Tiling:
        """How the softmax does, where the sums see one block of classes at a time."""
        return self._spread(tilings.NORMS)

    def _spread(self, tiling: Tiling) -> Tiling:
        """With fewer voxels and more classes at a time, where programs are too few to keep the GPU busy."""
        num_images, _, num_voxels = self.shape
        while (
            tiling.class_block is not None
            and tiling.voxel_block > _MIN_SPREAD
            and num_images * -(-num_voxels // tiling.voxel_block) < _ENOUGH_PROGRAMS
        ):
            tiling = tiling._replace(voxel_block=tiling.voxel_block // 2, class_block=tiling.class_block * 2)
        return tiling

    @property
    def has_one_class(self) -> bool:
        """Whether a voxel has one class, and a softmax: the kernels then do less."""
        return self.hard and self.activation == "softmax"

    def constants(self, kernel: Any, tiling: Tiling) -> dict[str, Any]:
        """Constants of a kernel that reads logits."""
        class_block = tiling.class_block
        rows = (
            tilings.split_classes(self.shape[1], tiling.step) if class_block is None else (class_block, 0, 0)
        )
        constants = {
            "ACTIVATION": overlap.ACTIVATIONS[self.activation],
            "FORM": overlap.FORMS[self._form_in_kernel],
            "ENTROPY": self.entropy,
            "HARD": self.hard,
            "HAS_VALID": self.has_valid,
            # offsets within an image; between images they are always 64 bit
            "WIDE": max(map(self._extent, (self.logits_stride, self.target_stride))) >= 2**31,
            # rows and voxels known to the compiler need no masks where there is nothing to mask
            "NUM_CLASSES": self.shape[1],
            "EVEN": self.shape[2] % tiling.voxel_block == 0,
            "ROWS_A": rows[0],
            "ROWS_B": rows[1],
            "ROWS_C": rows[2],
            "CLASS_BLOCK": rows[0],
            "STEP": min(tiling.step, rows[0]),
            "VOXEL_BLOCK": tiling.voxel_block,
            "VECTOR": tiling.vector,
            "NUM_STAGES": tiling.num_stages,
        }
        return {name: value for name, value in constants.items() if name in kernel.arg_names}

    @property
    def _form_in_kernel(self) -> Form | None:
        """On hard labels three forms are one, and this one compares nothing.

        They differ in ties alone, where a probability is 0 or 1 and what it comes from has no gradient.
        """
        same = self.hard and self.activation != "none" and self.form in ("min", "product")
        return "relaxed" if same else self.form

    def _extent(self, stride: tuple[int, int, int]) -> int:
        """One more than the largest offset within an image."""
        return 1 + (self.shape[1] - 1) * stride[1] + (self.shape[2] - 1) * stride[2]


class Inputs(NamedTuple):
    """Logits, target, and valid or None, of any shape, and their layout with one axis of space."""

    logits: Tensor
    target: Tensor
    valid: Tensor | None
    layout: Layout
    # whether one of the tensors was copied
    copied: bool = False


def flat_inputs(
    logits: Tensor,
    target: Tensor,
    valid: Tensor | None,
    *,
    activation: Activation,
    form: Form | None,
    entropy: bool,
) -> Inputs:
    """`Inputs` with one axis of space; copies only what has no single stride along it."""
    layout = _layout(
        logits.shape,
        logits.stride(),
        logits.dtype,
        target.stride(),
        target.dtype,
        None if valid is None else valid.stride(),
        activation,
        form,
        entropy,
        logits.device,
    )
    if layout is not None:
        return Inputs(logits, target, valid, layout)
    flat = flat_tensors(logits, target, valid)
    return flat_inputs(*flat, activation=activation, form=form, entropy=entropy)._replace(copied=True)


def flat_tensors(
    logits: Tensor, target: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors with one axis of space; copies only what has no single stride along it."""
    num_leading = 2 if target.is_floating_point() else 1
    valid = None if valid is None else _flat(valid, 1).contiguous()
    return _flat(logits, 2), _flat(target, num_leading), valid


def _layout(
    shape: tuple[int, ...],
    logits_stride: tuple[int, ...],
    logits_dtype: torch.dtype,
    target_stride: tuple[int, ...],
    target_dtype: torch.dtype,
    valid_stride: tuple[int, ...] | None,
    activation: Activation,
    form: Form | None,
    entropy: bool,
    device: torch.device,
) -> Layout | None:
    """Layout of tensors of these strides, None if one of them has to be copied."""
    num_images, num_classes, *space = shape
    num_voxels = math.prod(space)
    hard = not target_dtype.is_floating_point
    logits_flat: Any = _flat_stride(shape, logits_stride, 2)
    target_flat: Any = _flat_stride((num_images, *space) if hard else shape, target_stride, 1 if hard else 2)
    if logits_flat is None or target_flat is None:
        return None
    if valid_stride is not None:
        valid_flat = _flat_stride((num_images, *space), valid_stride, 1)
        # the kernels take a mask as contiguous; the stride of a single image does not matter
        if valid_flat is None or valid_flat[1] != 1 or (num_images > 1 and valid_flat[0] != num_voxels):
            return None
    if hard:
        target_flat = (target_flat[0], 0, target_flat[1])
    flat_shape = (num_images, num_classes, num_voxels)
    has_valid = valid_stride is not None
    return Layout(
        flat_shape,
        logits_flat,
        target_flat,
        logits_dtype,
        target_dtype,
        has_valid,
        activation,
        form,
        entropy,
        _num_multiprocessors(device),
    )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _flat_stride(shape: tuple[int, ...], stride: tuple[int, ...], num_leading: int) -> tuple[int, ...] | None:
    """Strides with the axes from `num_leading` on as one; None if those have no single stride."""
    space = list(zip(shape, stride, strict=True))[num_leading:]
    along = [(size, step) for size, step in space if size > 1] or [(1, 1)]
    for (_, outer), (size, inner) in pairwise(along):
        if outer != size * inner:
            return None
    return (*stride[:num_leading], along[-1][1])


def _flat(tensor: Tensor, num_leading: int) -> Tensor:
    if tensor.ndim == num_leading:
        return tensor.unsqueeze(-1)
    # flatten merges axes that have one stride, as those of channels-last do, and copies others
    return tensor.flatten(num_leading)


def _sums_launch(layout: Layout, first: int) -> Launch:
    """Of a batch and the tensor that takes the partial sums (N, T, 5, C), from its float `first` on."""
    tiling = layout.forward
    num_programs = layout.num_programs
    if tiling.class_block is not None:
        kernel: Any = overlap.sums_by_class_kernel
        num_programs *= layout.num_blocks
    elif layout.has_one_class and layout.shape[1] >= _MIN_IN_TABLE:
        kernel = overlap.sums_of_indices_kernel
    else:
        kernel = overlap.sums_kernel
    return _launch(layout, kernel, tiling, num_programs, (first, *layout.integers))


def _launch(
    layout: Layout, kernel: Any, tiling: Tiling, num_programs: int, integers: tuple[int, ...]
) -> Launch:
    return Launch(
        kernel,
        (num_programs, layout.shape[0]),
        integers,
        num_warps=tiling.num_warps,
        registers=tiling.registers,
        **layout.constants(kernel, tiling),
    )


def _norms_launch(layout: Layout) -> Launch:
    num_voxels = layout.shape[2]
    num_programs = -(-num_voxels // layout.norms.voxel_block)
    return _launch(
        layout, overlap.norms_kernel, layout.norms, num_programs, (num_voxels, *layout.logits_stride)
    )


class Norms:
    """What a kernel of `tiling` must know of all classes; nothing if it sees them all at once."""

    def __init__(self, layout: Layout, tiling: Tiling) -> None:
        self.sees_all = tiling.class_block is None
        num_images, _, num_voxels = layout.shape
        self._shape = (num_images, 2, num_voxels)
        needed = not self.sees_all and layout.activation == "softmax"
        self._launch = _norms_launch(layout) if needed else None

    def __call__(self, logits: Tensor) -> tuple[Tensor | None, ...]:
        """Largest logits and log2 of the totals (N, 2, V); None if there is no softmax."""
        if self.sees_all:
            return ()
        if self._launch is None:
            return (None,)
        norms = logits.new_empty(self._shape, dtype=torch.float32)
        self._launch(logits, norms)
        return (norms,)


def _totals_launch(layout: Layout, num_programs: int, first: int) -> Launch:
    """Of partial sums and the tensor that takes the totals, from its float `first` on."""
    num_images, num_classes, _ = layout.shape
    # 32 bytes of a row, the least that memory gives
    column_block = 8
    return Launch(
        overlap.totals_kernel,
        (-(-num_images * NUM_SUMS * num_classes // column_block),),
        (first, num_images, num_programs, num_classes),
        num_warps=4,
        COLUMN_BLOCK=column_block,
        PROGRAM_BLOCK=min(256, triton.next_power_of_2(num_programs)),
    )


def _gradient_launch(layout: Layout, gradient_stride: tuple[int, ...]) -> Launch:
    tiling = layout.backward
    kernel = overlap.gradient_kernel if tiling.class_block is None else overlap.gradient_by_class_kernel
    num_programs = -(-layout.shape[2] // tiling.voxel_block)
    return _launch(layout, kernel, tiling, num_programs, (*layout.integers, *gradient_stride))


class _GradientPlan(NamedTuple):
    launch: Launch
    memory_format: torch.memory_format


def _gradient_plan(layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...]) -> _GradientPlan:
    """Of a gradient in the layout of such logits, or contiguous where its axes of space would not be one."""
    like = torch.empty_strided(shape, stride, device="meta")
    for memory_format in (torch.preserve_format, torch.contiguous_format):
        flat: Any = _flat_stride(shape, torch.empty_like(like, memory_format=memory_format).stride(), 2)
        if flat is not None:
            break
    return _GradientPlan(_gradient_launch(layout, flat), memory_format)


class SumsPlan:
    """The sums of inputs of one layout, and their gradient in `like`, ready to launch."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        num_images, num_classes, _ = layout.shape
        num_programs = layout.num_programs
        self._shape = (num_images, num_programs, NUM_SUMS, num_classes)
        self._sums = _sums_launch(layout, 0)
        self._totals = None if num_programs == 1 else _totals_launch(layout, num_programs, 0)
        self._norms, self._gradient_norms = Norms(layout, layout.forward), Norms(layout, layout.backward)
        self._gradient = _gradient_plan(layout, like.shape, like.stride())

    def sums(self, logits: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
        """Sums (N, 5, C); those that were not asked for hold anything."""
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
        """Gradient in the logits, in the shape of `like`, from that of the sums (N, 4, C)."""
        launch, memory_format = self._gradient
        gradient = torch.empty_like(like, memory_format=memory_format)
        scale = torch.ones((), device=like.device)
        launch(logits, target, valid, grad_sums, scale, gradient, *self._gradient_norms(logits))
        return gradient


def _loss_tile(class_block: int, num_images: int, *, adds_up: bool) -> tuple[int, int]:
    """Warps of the one program of the loss, and images that it takes at a time.

    A thread with a class of its own need not wait for others until there is one number of each class.
    """
    if class_block >= 128:
        return min(16, class_block // 32), 1
    all_images = triton.next_power_of_2(num_images)
    # partial sums are for more threads than one number each of some images and classes
    num_warps = 8 if adds_up else max(1, min(8, class_block * all_images // 256))
    return num_warps, min(all_images, 256 * num_warps // class_block)


class MixturePlan:
    """The mixture of losses of inputs of one layout, and its gradient in `like`, ready to launch.

    With `parts` the two losses are kept apart as well.
    """

    def __init__(
        self, layout: Layout, like: Tensor, options: RegionOptions, *, has_weight: bool, parts: bool
    ) -> None:
        num_images, num_classes, _ = layout.shape
        num_sums = num_images * num_classes
        num_programs = layout.num_programs
        self._num_partials = NUM_SUMS * num_sums * num_programs
        # derivatives (N, 4, C), and totals (N, 5, C)
        self._room = 9 * num_sums
        # None where the loss adds them up: then they lie in the room as well
        self._totals: Launch | None = None
        if self._num_partials > _FEW_PARTIALS:
            self._totals = _totals_launch(layout, num_programs, 4 * num_sums)
            self._sums = _sums_launch(layout, 0)
        else:
            self._sums = _sums_launch(layout, self._room)
            self._room += self._num_partials
        self._norms = Norms(layout, layout.forward)
        self._keeps_norms = layout.backward.class_block is not None
        self._gradient = _gradient_plan(layout, like.shape, like.stride())
        self._parts = parts
        class_block = triton.next_power_of_2(num_classes)
        num_warps, image_block = _loss_tile(class_block, num_images, adds_up=self._totals is None)
        column_block = min(512, triton.next_power_of_2(NUM_SUMS * num_sums))
        self._loss = Launch(
            overlap.loss_kernel,
            (1,),
            (num_images, num_programs, num_classes),
            num_warps=num_warps,
            FORM=overlap.FORMS[layout.form],
            ENTROPY=layout.entropy,
            HAS_WEIGHT=has_weight,
            LOG=options.log,
            FOCAL=options.gamma != 1,
            PRESENT=options.classes == "present",
            OVER=overlap.OVERS[options.over],
            BACKGROUND=options.background,
            TERMS=parts,
            ADDED_UP=self._totals is not None,
            CLASS_BLOCK=class_block,
            IMAGE_BLOCK=image_block,
            COLUMN_BLOCK=column_block,
            PROGRAM_BLOCK=min(triton.next_power_of_2(num_programs), _FEW_PARTIALS // column_block),
        )

    def losses(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None,
        class_weight: Tensor | None,
        floats: tuple[float, ...],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """Total; cross entropy and region loss, as a tensor of two; and what `gradient` needs.

        floats: alpha, beta, gamma, smooth, and the weights of cross entropy and region loss.
        """
        norms = self._norms(logits)
        room = logits.new_empty(self._room, dtype=torch.float32)
        if self._totals is None:
            self._sums(logits, target, valid, room, *norms)
        else:
            partials = logits.new_empty(self._num_partials, dtype=torch.float32)
            self._sums(logits, target, valid, partials, *norms)
            self._totals(partials, room)
        # of their own, for what is a view cannot be added to in place
        total = logits.new_empty((), dtype=torch.float32)
        terms = logits.new_empty((2,), dtype=torch.float32) if self._parts else None
        self._loss(room, class_weight, total, terms, floats=floats)
        return total, terms, (room, *norms) if self._keeps_norms else (room,)

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None,
        kept: Sequence[Tensor | None],
        scale: Tensor,
        like: Tensor,
    ) -> Tensor:
        """In the logits, of the total times `scale`; in the shape of `like`. The room kept begins with
        d total / d sums (N, 4, C)."""
        launch, memory_format = self._gradient
        gradient = torch.empty_like(like, memory_format=memory_format)
        room, *norms = kept
        launch(logits, target, valid, room, scale, gradient, *norms)
        return gradient
