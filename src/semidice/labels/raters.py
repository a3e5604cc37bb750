"""Masks of raters, and labels, read from numpy or torch arrays: checked, with a case axis.

`makers` describes the arrays. Every error is a ValueError that names what was passed. Values are read on the
CPU only (`arrays.values_are_readable`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer, UInt8
from torch import Tensor

from ..arrays import (
    check_tensor,
    check_unit_range,
    check_whole_number,
    describe,
    one_hot,
    values_are_readable,
)

Array = TypeVar("Array", np.ndarray, Tensor)
Present = np.ndarray | Tensor | Sequence[Any]


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
        num_cases, num_raters, *space = self.classes.shape
        votes = one_hot(self.classes.flatten(0, 1), self.num_classes)
        votes = votes.view(num_cases, num_raters, self.num_classes, *space)
        return votes * self.present.view(num_cases, num_raters, *[1] * (votes.ndim - 2))

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


def to_input_type(result: Tensor, like: Array | Sequence[Array], batched: bool) -> Array:
    """The result as numpy or torch, like the input; without the case axis unless batched."""
    result = result if batched else result[0]
    first = like if isinstance(like, (Tensor, np.ndarray)) else like[0]
    return result if isinstance(first, Tensor) else result.numpy()


def read_raters(
    masks: Array | Sequence[Array],
    num_classes: int | None,
    present: Present | None,
    batched: bool,
) -> Raters:
    """The raters of masks (N, R, *space), or (R, *space) if not batched; a ValueError names wrong masks."""
    stacked = _stack(masks, batched)
    axes = "(N, R, *space)" if batched else "(R, *space)"
    if stacked.ndim < (2 if batched else 1) or stacked.numel() == 0:
        raise ValueError(f"masks must be {axes} with at least one rater and voxel; got {describe(stacked)}")
    stacked = stacked if batched else stacked.unsqueeze(0)
    flags = _read_present(present, stacked, batched)
    # the mask of an absent rater is neither checked nor counted
    if present is not None:
        stacked = stacked * flags.view(*flags.shape, *[1] * (stacked.ndim - 2))
    if num_classes is not None:
        check_whole_number(num_classes=num_classes)
    if num_classes is None:
        _check_binary(stacked)
        num_classes = 2
    elif num_classes < 2 or (stacked.dtype == torch.bool and num_classes != 2):
        raise ValueError(
            f"num_classes must be 2 or more, and 2 for bool masks; got {num_classes} for {describe(stacked)}"
        )
    classes = stacked.to(torch.uint8) if stacked.dtype == torch.bool else stacked
    if values_are_readable(classes):
        low, high = classes.aminmax()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"masks hold class indices {int(low)} to {int(high)}, but there are {num_classes} classes"
            )
    # one_hot numbers the classes in the dtype of the map
    return Raters(classes.long() if num_classes > 256 else classes, flags, num_classes)


def _stack(masks: Array | Sequence[Array], batched: bool) -> Tensor:
    """A bool, uint8 or int64 tensor of all raters; lists are stacked on the rater axis."""
    if isinstance(masks, (Tensor, np.ndarray)):
        return _integers(masks)
    if isinstance(masks, str) or not isinstance(masks, Sequence):
        raise ValueError(f"masks must be an array, or a list with one per rater; got {describe(masks)}")
    for mask in masks:
        check_array("each mask", mask)
    shapes = list(dict.fromkeys(str(tuple(mask.shape)) for mask in masks))
    if len(shapes) != 1:
        got = f"shapes {', '.join(shapes)}: resample them to one grid" if shapes else "an empty list"
        raise ValueError(f"masks of one case need one shape; got {got}")
    return torch.stack([_integers(mask) for mask in masks], 1 if batched else 0)


def check_array(name: str, array: object) -> None:
    """Raise unless `array` is numpy or torch; a tensor must be dense and have values."""
    if isinstance(array, Tensor) and array.dtype in (torch.uint16, torch.uint32, torch.uint64):
        # converted to int64
        return
    if not isinstance(array, np.ndarray):
        check_tensor(name, array, "use numpy.asarray or torch.as_tensor")


def _integers(masks: np.ndarray | Tensor) -> Tensor:
    check_array("masks", masks)
    if isinstance(masks, np.ndarray) and masks.dtype.kind in "biu":
        dtype = masks.dtype if masks.dtype in (np.bool_, np.uint8) else np.int64
        # a copy: torch accepts neither read-only arrays, nor negative strides, nor a foreign byte order
        return torch.from_numpy(np.array(masks, dtype=dtype, order="C"))
    if isinstance(masks, np.ndarray) or masks.is_floating_point() or masks.is_complex():
        raise ValueError(
            f"masks must be bool, or integers that are class indices; got {describe(masks)}: "
            "use masks > 0.5 for probabilities"
        )
    return masks if masks.dtype in (torch.bool, torch.uint8) else masks.long()


def _read_present(present: Present | None, masks: Tensor, batched: bool) -> Bool[Tensor, "N R"]:
    if present is None:
        return torch.ones(masks.shape[:2], dtype=torch.bool, device=masks.device)
    flags = _read_flags("present", "rater", present, tuple(masks.shape[:2]), batched)
    if values_are_readable(flags) and not bool(flags.any(1).all()):
        absent = (~flags.any(1)).nonzero().flatten().tolist()
        where = f" in cases {absent}" if batched else ""
        raise ValueError(f"present has no rater{where}: leave out cases that nobody looked at")
    return flags.to(masks.device, non_blocking=True)


def _check_binary(masks: Tensor) -> None:
    """Raise unless `masks` are bool, or readable uint8 of 0 and 1."""
    if masks.dtype == torch.bool:
        return
    got = f"got {describe(masks)}"
    if masks.dtype == torch.uint8 and values_are_readable(masks):
        if int(masks.max()) <= 1:
            return
        values = masks.unique().tolist()
        got += f" with values {', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}"
    raise ValueError(
        f"masks without num_classes must be bool, or on the CPU uint8 of 0 and 1; {got}: "
        "use masks > 0 for binary masks such as 0 and 255, num_classes=... for class maps"
    )


def read_label(label: np.ndarray | Tensor, batched: bool, has_space: bool = False) -> Tensor:
    """The label as float32 (N, C, *space); a ValueError if it is not a label."""
    check_array("label", label)
    axes = "(N, C, *space)" if batched else "(C, *space)"
    is_float = label.dtype.kind == "f" if isinstance(label, np.ndarray) else label.is_floating_point()
    num_space = label.ndim - (2 if batched else 1)
    if not is_float or not int(has_space) <= num_space <= (3 if has_space else math.inf):
        limit = ", one to three axes of space" if has_space else ""
        raise ValueError(f"label must be floats {axes}{limit}; got {describe(label)}")
    if isinstance(label, np.ndarray):
        label = torch.from_numpy(np.array(label, dtype=np.float32, order="C"))
    soft = (label if batched else label.unsqueeze(0)).float()
    if soft.numel() == 0 or soft.shape[1] < 2:
        raise ValueError(f"label must be {axes} with two or more classes and a voxel; got {describe(label)}")
    check_unit_range("label", soft)
    if values_are_readable(soft):
        low, high = soft.sum(1).aminmax()
        if low < 1 - 1e-3 or high > 1 + 1e-3:
            raise ValueError(
                f"label must sum to one over its class axis, {axes}; got {describe(label)} with sums from "
                f"{low:.4g} to {high:.4g}: use batched=True if the first axis holds cases"
            )
    return soft


def read_valid(
    valid: np.ndarray | Tensor | None, soft: Tensor, batched: bool
) -> Bool[Tensor, "N *space"] | None:
    """The flags (N, *space) of a label (N, C, *space); a ValueError if they do not fit."""
    if valid is None:
        return None
    return _read_flags("valid", "voxel", valid, (len(soft), *soft.shape[2:]), batched)


def _read_flags(name: str, unit: str, flags: Present, shape: tuple[int, ...], batched: bool) -> Tensor:
    """Flags of a shape with a case axis; the caller's flags have that axis only if batched."""
    try:
        read = flags if isinstance(flags, Tensor) else torch.from_numpy(np.array(flags))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be bool, one flag per {unit}; got {flags!r}") from None
    expected = shape if batched else shape[1:]
    if read.dtype != torch.bool or tuple(read.shape) != expected:
        raise ValueError(f"{name} must be bool {expected}, one flag per {unit}; got {describe(read)}")
    return read if batched else read.unsqueeze(0)
