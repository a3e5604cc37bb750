"""Masks of raters, and labels, read from numpy or torch arrays: checked, as tensors with a case axis.

`makers` describes the arrays. Every error is a ValueError that names what was passed. Values are read on the
CPU. On a GPU, where reading waits for the device, those of masks of one type are read until some hold a
foreground, and not again: masks of 0 and 255 would all be background.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer, UInt8
from torch import Tensor

from ..arrays import (
    check_distribution,
    check_tensor,
    check_unit_range,
    describe,
    one_hot,
    values_are_readable,
)
from ..options import Bounds, check_value

_Classes = Annotated[int, Bounds(at_least=2)]
Array = np.ndarray | Tensor
Flags = np.ndarray | Tensor | Sequence[Any]
# masks whose values were read on a GPU: device, type and number of classes
_READ_ON_GPU: set[tuple[torch.device, torch.dtype, int]] = set()


@dataclass(frozen=True)
class Raters:
    """What the raters of N cases chose: class maps, 0 for absent raters, and which raters are present.

    `majority` and `mean` are the reference labels that predictions are scored against.
    """

    classes: Integer[Tensor, "N R *space"]
    present: Bool[Tensor, "N R"]
    num_classes: int

    def votes(self) -> UInt8[Tensor, "N R C *space"]:
        """1 where a present rater chose the class."""
        votes = one_hot(self.classes.flatten(0, 1), self.num_classes)
        votes = votes.view(*self.present.shape, *votes.shape[1:])
        return votes * self.present.view(*self.present.shape, *[1] * (votes.ndim - 2))

    def majority(self) -> Integer[Tensor, "N *space"]:
        """The class that most present raters chose, the lowest at a tie."""
        # argmax returns the first of equal counts
        return self.votes().sum(1).argmax(1)

    def mean(self) -> Float[Tensor, "N C *space"]:
        """The share of the present raters that chose each class."""
        return self.weighted_mean(self.present.float())

    def weighted_mean(self, weight: Float[Tensor, "N R"]) -> Float[Tensor, "N C *space"]:
        """Weighted mean of the votes; exactly 0 or 1 where all raters agree."""
        votes = self.votes()
        weight = weight.view(*weight.shape, *[1] * (votes.ndim - 2))
        # one rater after the other: the same votes give the same bits at every position in memory
        total = votes[:, 0] * weight[:, 0]
        for rater in range(1, votes.shape[1]):
            total = total + votes[:, rater] * weight[:, rater]
        # divided by the sum over classes, not of weights: their rounding may differ, and x / (x + 0) is 1
        return total / total.sum(1, keepdim=True)


def read_raters(masks: Array, num_classes: int | None, present: Flags | None, batched: bool) -> Raters:
    """The raters of masks (N, R, *space), or (R, *space) if not batched; a ValueError names wrong masks."""
    way_out = "use masks > 0.5 for probabilities, batched=True for several cases"
    stacked = _read("masks", masks, "bool or class indices", "R", batched, way_out)
    if present is None:
        flags = torch.ones(stacked.shape[:2], dtype=torch.bool, device=stacked.device)
    else:
        flags = read_flags("present", present, stacked.shape[:2], batched)
        if values_are_readable(flags) and not bool(flags.any(1).all()):
            absent = (~flags.any(1)).nonzero().flatten().tolist()
            where = f" in cases {absent}" if batched else ""
            raise ValueError(f"present has no rater{where}: leave out cases that nobody looked at")
        flags = flags.to(stacked.device, non_blocking=True)
        # the mask of an absent rater is neither checked nor counted
        stacked = stacked * flags.view(*flags.shape, *[1] * (stacked.ndim - 2))
    num_classes = _check_classes(stacked, num_classes)
    # one_hot numbers the classes in the dtype of the map
    is_small = stacked.dtype in (torch.bool, torch.uint8) and num_classes <= 256
    return Raters(stacked.to(torch.uint8 if is_small else torch.int64), flags, num_classes)


def read_label(label: Array, batched: bool) -> Float[Tensor, "N C *space"]:
    """The label in float32; a ValueError if it is not a label."""
    way_out = "it needs two or more classes, and batched=True if the first axis holds cases"
    soft = _read("label", label, "floats", "C", batched, way_out).float()
    if soft.shape[1] < 2:
        raise ValueError(f"label has one class; got {describe(label)}: {way_out}")
    check_unit_range("label", soft)
    if values_are_readable(soft):
        check_distribution("label", soft, way_out=way_out)
    return soft


def read_flags(name: str, flags: Flags, shape: Sequence[int], batched: bool) -> Bool[Tensor, "..."]:
    """Flags of a shape with a case axis; the caller's flags have that axis only if batched."""
    read = _tensor(name, flags if isinstance(flags, Tensor) else np.array(flags))
    expected = tuple(shape if batched else shape[1:])
    if read.dtype != torch.bool or tuple(read.shape) != expected:
        raise ValueError(f"{name} must be bool {expected}; got {describe(read)}")
    return read if batched else read.unsqueeze(0)


def _read(name: str, array: Array, kind: str, axis: str, batched: bool, way_out: str) -> Tensor:
    """The array as a tensor with a case axis; an error if it has another type, or other axes."""
    read = _tensor(name, array)
    is_right = read.is_floating_point() == (kind == "floats") and read.numel() > 0
    if not is_right or not 0 <= read.ndim - 1 - batched <= 3:
        axes = f"(N, {axis}, *space)" if batched else f"({axis}, *space)"
        raise ValueError(
            f"{name} must be {kind} {axes} with up to three axes of space; got {describe(array)}: {way_out}"
        )
    return read if batched else read.unsqueeze(0)


def _tensor(name: str, array: Array) -> Tensor:
    """A dense tensor of an array of bool, integers or floats; other integers than bytes are int64."""
    if not isinstance(array, np.ndarray):
        check_tensor(name, array, "use np.stack or torch.stack for a list with one array per rater")
        return array
    types = {"b": np.bool_, "u": np.int64, "i": np.int64, "f": np.float32}
    if array.dtype.kind not in types:
        raise ValueError(f"{name} must be bool, integers or floats; got {describe(array)}")
    dtype = np.uint8 if array.dtype == np.uint8 else types[array.dtype.kind]
    # a copy: torch accepts neither read-only arrays, nor negative strides, nor a foreign byte order
    return torch.from_numpy(np.array(array, dtype=dtype, order="C"))


def _check_classes(masks: Tensor, num_classes: int | None) -> int:
    """The number of classes, 2 if it is not given; an error if the masks do not hold their indices."""
    is_bool = masks.dtype == torch.bool
    number = 2 if num_classes is None else num_classes
    check_value(_Classes, num_classes=number)
    kind = (masks.device, masks.dtype, number)
    is_read = not is_bool and values_are_readable(masks, waits=kind not in _READ_ON_GPU)
    low, high = torch.stack(masks.aminmax()).tolist() if is_read else (0, 0)
    is_certain_byte = masks.dtype == torch.uint8 and (is_read or kind in _READ_ON_GPU)
    is_certain = number == 2 if is_bool else num_classes is not None or is_certain_byte
    if not is_certain or low < 0 or high >= number:
        raise ValueError(
            f"masks must be bool of two classes, uint8 of 0 and 1, or indices of the {number} classes; got "
            f"{describe(masks)} with values from {low} to {high}: use masks > 0 for binary masks such as 0 "
            "and 255, num_classes=... for class maps"
        )
    if masks.is_cuda and high > 0:
        _READ_ON_GPU.add(kind)
    return number
