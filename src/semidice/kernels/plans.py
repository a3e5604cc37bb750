"""What is launched for tensors of one kind: a plan, which `fused` makes once per kind, and its launches.

Kernels take tensors with one axis of space. A tensor is copied only if its axes of space have no common
stride. Tiles are chosen by the number of classes (`tilings`), and there are as many programs in the forward
pass as the GPU runs at once, or a multiple of that.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..losses.options import LossOptions
from ..overlap import SumsOptions
from . import gradient, index_sums, mixture, sums, tilings
from .tile import ACTIVATIONS, FORMS, Spec
from .tilings import Tiles, Tiling

NUM_SUMS = 5
# partial sums that the loss kernel adds up in less time than another launch takes
MAX_LOSS_PARTIALS = 2**13
# classes of class indices from which on `index_sums` is faster: it is with 40, and is not with 32
MIN_INDEX_SUMS = 33
# of an H200, for which plans are made without a GPU
_NUM_MULTIPROCESSORS = 132

# logits, target and valid voxels
Batch = tuple[Tensor, Tensor, Tensor | None]
Strides = tuple[int, ...]


class Plan(NamedTuple):
    """All that stays the same from launch to launch."""

    # images, classes and voxels
    shape: tuple[int, int, int]
    # strides along images, classes and voxels; the class stride of class indices is 0
    logits_stride: Strides
    target_stride: Strides
    gradient_stride: Strides
    gradient_format: torch.memory_format
    # whether a tensor must be copied because its voxels have no single stride
    copies: bool
    # per image in the forward pass; each stores sums of its own
    num_programs: int
    # whether the sums are those of `index_sums`
    by_index: bool
    forward: Spec
    backward: Spec

    @property
    def integers(self) -> tuple[int, ...]:
        """Number of voxels and strides, in the order of the kernels' arguments."""
        return (self.shape[2], *self.logits_stride, *self.target_stride)

    @property
    def num_partials(self) -> int:
        """Number of the sums of all programs."""
        return NUM_SUMS * self.shape[0] * self.shape[1] * self.num_programs


def plan_of(
    prediction: Tensor, target: Tensor, valid: Tensor | None, options: SumsOptions, tiles: Tiles | None = None
) -> Plan:
    """The plan for tensors like these; with other tiles than those of the tables, if they are given."""
    strides = _strides(prediction, target, valid)
    copies = strides is None
    if strides is None:
        strides = _strides(*flat_tensors(prediction, target, valid))
        assert strides is not None
    logits_stride, target_stride = strides
    shape = (*prediction.shape[:2], math.prod(prediction.shape[2:]))
    hard = not target.is_floating_point()
    voxel_bytes = shape[1] * (prediction.element_size() + (0 if hard else target.element_size()))
    index_softmax = hard and options.activation == "softmax"
    forward, backward = tiles or tilings.tiles_of(shape[1], voxel_bytes, by_index=index_softmax)
    extents = [1 + (shape[1] - 1) * stride[1] + (shape[2] - 1) * stride[2] for stride in strides]
    wide = max(extents) >= 2**31
    at_once = num_multiprocessors(prediction.device) * forward.programs_at_once(voxel_bytes)
    return Plan(
        shape,
        logits_stride,
        target_stride,
        *_gradient_memory(prediction),
        copies,
        num_programs(shape, forward, at_once),
        index_softmax and shape[1] >= MIN_INDEX_SUMS,
        _spec(shape, hard, wide, forward, options),
        _spec(shape, hard, wide, backward, options),
    )


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _NUM_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(shape: tuple[int, int, int], tiling: Tiling, at_once: int) -> int:
    """Programs per image in the forward pass.

    If the GPU runs `at_once` of them, their number is a multiple of that, or nearly.
    """
    num_images, num_classes, num_voxels = shape
    num_tiles = -(-num_voxels // tiling.voxel_block)
    min_programs = -(-num_tiles // tiling.num_tiles)
    num_rounds = -(-num_images * min_programs // at_once)
    most = min(num_tiles, num_rounds * at_once // num_images)
    # as few as the loss kernel can add up, if that suffices
    few = MAX_LOSS_PARTIALS // (NUM_SUMS * num_images * num_classes)
    return few if min_programs <= few < most else most


def _spec(shape: tuple[int, int, int], hard: bool, wide: bool, tiling: Tiling, options: SumsOptions) -> Spec:
    """Constants of the kernels that read logits."""
    activation, form, entropy = options
    # On hard labels three forms are equal, and relaxed compares nothing. They differ only at ties, where a
    # probability is 0 or 1 and the activation has no gradient.
    if hard and activation != "none" and form in ("min", "product"):
        form = "relaxed"
    chunks = tilings.class_chunks(shape[1], tiling.step)
    return Spec(
        activation=ACTIVATIONS[activation],
        form=FORMS[form],
        entropy=entropy,
        hard=hard,
        wide=wide,
        num_classes=shape[1],
        even=shape[2] % tiling.voxel_block == 0,
        chunks=chunks,
        step=min(tiling.step, chunks[0][1]),
        voxel_block=tiling.voxel_block,
        vector=tiling.vector,
        num_stages=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def _strides(prediction: Tensor, target: Tensor, valid: Tensor | None) -> tuple[Strides, Strides] | None:
    """Strides of logits and target along images, classes and voxels; None if a tensor has to be copied."""
    hard = not target.is_floating_point()
    logits_flat = flat_stride(prediction.shape, prediction.stride(), 2)
    target_flat = flat_stride(target.shape, target.stride(), 1 if hard else 2)
    if logits_flat is None or target_flat is None:
        return None
    if valid is not None:
        valid_flat = flat_stride(valid.shape, valid.stride(), 1)
        # the kernels take a contiguous mask; the stride of a single image does not matter
        if valid_flat is None or valid_flat[1] != 1:
            return None
        if len(valid) > 1 and valid_flat[0] != valid[0].numel():
            return None
    if hard:
        target_flat = (target_flat[0], 0, target_flat[1])
    return logits_flat, target_flat


def flat_stride(shape: tuple[int, ...], stride: Strides, num_leading: int) -> Strides | None:
    """Strides with the axes from `num_leading` on as one; None if those have no common stride."""
    space = list(zip(shape, stride, strict=True))[num_leading:]
    axes = [(size, step) for size, step in space if size > 1] or [(1, 1)]
    for (_, outer), (size, inner) in pairwise(axes):
        if outer != size * inner:
            return None
    return (*stride[:num_leading], axes[-1][1])


def flat_tensors(prediction: Tensor, target: Tensor, valid: Tensor | None) -> Batch:
    """The tensors with one axis of space, copied only if their axes have no common stride."""
    num_leading = 2 if target.is_floating_point() else 1
    valid = None if valid is None else _flat(valid, 1).contiguous()
    return _flat(prediction, 2), _flat(target, num_leading), valid


def _flat(tensor: Tensor, num_leading: int) -> Tensor:
    if tensor.ndim == num_leading:
        return tensor.unsqueeze(-1)
    # no copy if the axes have a common stride, as in the channels-last format
    return tensor.flatten(num_leading)


def _gradient_memory(like: Tensor) -> tuple[Strides, torch.memory_format]:
    """Flat strides and memory format of the gradient: those of `like`, or contiguous if they are not flat."""
    example = torch.empty_strided(like.shape, like.stride(), device="meta")
    for memory_format in (torch.preserve_format, torch.contiguous_format):
        stride = torch.empty_like(example, memory_format=memory_format).stride()
        flat = flat_stride(like.shape, stride, 2)
        if flat is not None:
            return flat, memory_format
    raise AssertionError("a contiguous tensor has one stride")


def launch_sums(plan: Plan, batch: Batch, partials: Tensor, start: int) -> None:
    """Store partial sums (N, T, 5, C) of T programs per image, from element `start` on."""
    kernel = index_sums.index_sums_kernel if plan.by_index else sums.sums_kernel
    grid = (plan.num_programs, plan.shape[0])
    kernel[grid](*batch, partials, start, *plan.integers, SPEC=plan.forward, num_warps=plan.forward.num_warps)


def launch_totals(plan: Plan, partials: Tensor, totals: Tensor, start: int) -> None:
    """Add up the sums of all programs, and store totals (N, 5, C) from element `start` on."""
    num_images, num_classes, _ = plan.shape
    # 32 bytes of a row, the least that memory transfers
    column_block = 8
    grid = (-(-num_images * NUM_SUMS * num_classes // column_block),)
    sums.totals_kernel[grid](
        partials, totals, start, num_images, plan.num_programs, num_classes,
        COLUMN_BLOCK=column_block, PROGRAM_BLOCK=min(256, triton.next_power_of_2(plan.num_programs)),
        num_warps=4,
    )  # fmt: skip


def launch_gradient(plan: Plan, batch: Batch, grad_sums: Tensor, scale: Tensor, prediction: Tensor) -> Tensor:
    """Gradient in the prediction from that of the sums, the first (N, 4, C) elements, times `scale`."""
    result = torch.empty_like(prediction, memory_format=plan.gradient_format)
    grid = (-(-plan.shape[2] // plan.backward.voxel_block), plan.shape[0])
    gradient.gradient_kernel[grid](
        *batch, grad_sums, scale, result, *plan.integers, *plan.gradient_stride,
        SPEC=plan.backward, num_warps=plan.backward.num_warps,
    )  # fmt: skip
    return result


def loss_spec(plan: Plan, options: LossOptions) -> mixture.LossSpec:
    """Constants of the kernel that computes the losses from the sums."""
    num_images, num_classes, _ = plan.shape
    added_up = plan.num_partials > MAX_LOSS_PARTIALS
    class_block = triton.next_power_of_2(num_classes)
    if class_block >= 128:
        # with one class per thread, threads need not wait for each other until every class has one number
        num_warps, image_block = class_block // 32, 1
    else:
        all_images = triton.next_power_of_2(num_images)
        # partial sums keep more threads busy than one number per image and class
        num_warps = max(1, min(8, class_block * all_images // 256)) if added_up else 8
        image_block = min(all_images, 256 * num_warps // class_block)
    column_block = min(512, triton.next_power_of_2(NUM_SUMS * num_images * num_classes))
    return mixture.LossSpec(
        has_region=plan.forward.form != FORMS[None],
        entropy=plan.forward.entropy,
        log=options.log,
        focal=options.gamma != 1,
        present=options.classes == "present",
        over=mixture.OVERS[options.over],
        background=options.background,
        added_up=added_up,
        class_block=class_block,
        image_block=image_block,
        column_block=column_block,
        program_block=min(triton.next_power_of_2(plan.num_programs), MAX_LOSS_PARTIALS // column_block),
        num_warps=num_warps,
    )


def launch_loss(
    plan: Plan,
    spec: mixture.LossSpec,
    batch: Batch,
    class_weight: Tensor | None,
    floats: tuple[float, ...],
    *,
    parts: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Total; cross entropy and region loss (2,), or None; and d total / d sums for `launch_gradient`.

    floats: alpha, beta, gamma, smooth, and the weights of cross entropy and region loss.
    """
    logits = batch[0]
    num_images, num_classes, _ = plan.shape
    num_sums = num_images * num_classes
    # derivatives (N, 4, C) and totals (N, 5, C), and the partial sums if the loss kernel adds them up
    if spec.added_up:
        workspace = logits.new_empty(9 * num_sums, dtype=torch.float32)
        partials = logits.new_empty(plan.num_partials, dtype=torch.float32)
        launch_sums(plan, batch, partials, 0)
        launch_totals(plan, partials, workspace, 4 * num_sums)
    else:
        workspace = logits.new_empty(9 * num_sums + plan.num_partials, dtype=torch.float32)
        launch_sums(plan, batch, workspace, 9 * num_sums)
    # tensors of their own, because autograd refuses to change a view in place
    total = logits.new_empty((), dtype=torch.float32)
    terms = logits.new_empty((2,), dtype=torch.float32) if parts else None
    mixture.loss_kernel[(1,)](
        workspace, class_weight, total, terms, num_images, plan.num_programs, num_classes,
        # Triton would compile again for an integer
        *map(float, floats),
        SPEC=spec, num_warps=spec.num_warps,
    )  # fmt: skip
    return total, terms, workspace
