"""Labels of batches: the makers of `semidice.labels` by their names in a recipe, and a faster table of them.

With every maker, the label of a voxel depends only on the case and on the votes of the raters at this voxel:
weights and confusion matrices belong to the case. So each maker runs once, and its labels are stored for
every combination of votes. A training step looks them up: STAPLE then costs as little as the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float32, Integer, UInt8
from torch import Tensor

from ...arrays import one_hot
from ...errors import UserError
from ...labels import (
    boundary_smooth_label,
    dice_weighted_label,
    majority_label,
    mean_label,
    smooth_label,
    spatially_smooth_label,
    staple_label,
)
from ...labels.smoothing import MAX_SIGMA
from ...options import Bounds, Count, Share, check_options
from ..dataset import Dataset
from ..packing import num_planes

Maker = Literal["majority", "random", "mean", "dice_weighted", "staple"]
Smoothing = Literal["none", "uniform", "boundary", "spatial"]
_MAKERS = {
    "majority": majority_label,
    "mean": mean_label,
    "dice_weighted": dice_weighted_label,
    "staple": staple_label,
}
# the smoothing that an option is for
_SMOOTHING_OF = {"eps": ("uniform", "boundary"), "width": ("boundary",), "sigma": ("spatial",)}
# a table has 2^bits columns: at most a few kilobytes per case
_MAX_BITS = 10


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """How the raters' masks become the label that is learned; see labels.md."""

    maker: Maker = "mean"
    """random draws one rater per case, again in every epoch"""
    smoothing: Smoothing = "none"
    """of the made label: everywhere alike, near boundaries, or by a Gaussian"""
    eps: Share | None = None
    """share of a voxel spread over the classes; null is 0.1 for uniform, 0.5 for boundary"""
    width: Count = 3
    """of the band of boundary smoothing, in voxels, odd"""
    sigma: Annotated[float, Bounds(above=0, at_most=MAX_SIGMA)] = 1.0
    """of spatial smoothing, in voxels"""
    raters: tuple[int, ...] | None = None
    """raters whose masks make the label, from 0, such as [0, 1]; null takes all. One of them must have looked
    at each case. Scores always use all raters"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.width % 2 == 0:
            raise ValueError(f"width must be odd, so that a voxel is in the middle; got {self.width}")
        raters = () if self.raters is None else self.raters
        if self.raters == () or len(set(raters)) < len(raters) or min(raters, default=0) < 0:
            raise ValueError(f"raters must be different numbers, 0 for the first rater; got {list(raters)}")

    def ignored(self) -> dict[str, str]:
        """Why an option has no effect, by its name; it has none with another smoothing than its own."""
        return {
            name: f"no effect with smoothing {self.smoothing}: leave it out, or use label.smoothing="
            + " or ".join(kinds)
            for name, kinds in _SMOOTHING_OF.items()
            if getattr(self, name) != getattr(LabelOptions, name) and self.smoothing not in kinds
        }

    @property
    def is_hard(self) -> bool:
        """Whether a voxel has one class before smoothing; it is then resampled to the nearest neighbour."""
        return self.maker in ("majority", "random")


def make_labels(
    masks: UInt8[Tensor, "N R *space"],
    present: Bool[Tensor, "N R"],
    options: LabelOptions,
    *,
    num_classes: int,
    rater: Integer[Tensor, " N"] | None = None,
    valid: Bool[Tensor, "N *space"] | None = None,
) -> Float32[Tensor, "N C *space"]:
    """The labels of N cases by the functions of `semidice.labels`: the definition for `LabelTables`.

    rater: the rater of each case, only for the maker `random`, who need not be in `options.raters`. valid:
    False outside of an image; smoothing ignores these voxels.
    """
    if options.maker == "random":
        if rater is None:
            raise UserError("the label maker random needs rater=..., the number of a rater for each case")
        chosen = masks[torch.arange(len(masks), device=masks.device), rater]
        label = one_hot(chosen, num_classes).float()
    else:
        maker = _MAKERS[options.maker]
        label = maker(masks, num_classes=num_classes, present=_of_label(present, options), batched=True)
    return smooth_in_space(_smooth_uniformly(label, options), options, valid)


def raters_of_label(dataset: Dataset, options: LabelOptions) -> Bool[np.ndarray, "cases R"]:
    """Whose masks make the label of each case: of `options.raters`, those who looked at it.

    A ValueError if the dataset has fewer raters, or if none of them looked at some case.
    """
    names = dataset.manifest.raters
    if options.raters is not None and max(options.raters) >= len(names):
        raise UserError(
            f"label.raters {list(options.raters)} needs {max(options.raters) + 1} raters, but the dataset "
            f"has {len(names)}: {', '.join(names)}; they are numbered from 0"
        )
    used: np.ndarray = _of_label(torch.from_numpy(dataset.present), options).numpy()
    without = np.flatnonzero(~used.any(1))
    if len(without):
        named = ", ".join(names[number] for number in options.raters or range(len(names)))
        raise UserError(
            f"case {dataset.cases[without[0]].name} has no mask of label.raters ({named}), nor have "
            f"{len(without) - 1} others: name more raters, or leave label.raters out"
        )
    return used


class LabelTables:
    """Labels of the cases `cases` of a dataset, looked up by the votes of the raters.

    Followed by `smooth_in_space` they equal `make_labels`.

    With too many raters and classes for a table, labels are made at each step; STAPLE is too slow for that.
    The makers dice_weighted and staple read the masks of each case once.
    """

    def __init__(
        self, dataset: Dataset, cases: Sequence[int], options: LabelOptions, *, device: torch.device | str
    ) -> None:
        self.options, self.num_classes = options, dataset.num_classes
        self.present = torch.from_numpy(dataset.present).to(device)
        self.raters = raters_of_label(dataset, options)
        self.bits = num_planes(dataset.num_classes)
        num_raters = len(dataset.manifest.raters)
        self.num_columns = 1 << (num_raters * self.bits)
        self.tables: Float32[Tensor, "C entries"] | None = None
        if num_raters * self.bits <= _MAX_BITS:
            # row: the table of each case; the maker random has one table per rater instead
            tables, row = self._make(dataset, cases)
            tables = _smooth_uniformly(tables, options)
            self.tables = tables.transpose(0, 1).flatten(1).contiguous().to(device)
            self.row: Integer[Tensor, " cases"] = row.int().to(device)
        elif options.maker == "staple":
            raise UserError(
                f"STAPLE labels of {num_raters} raters and {dataset.num_classes} classes need a table of "
                f"{self.num_columns} columns per case, but {1 << _MAX_BITS} is the maximum: "
                "use label.maker=dice_weighted"
            )

    def __call__(
        self,
        masks: UInt8[Tensor, "N R *space"],
        case: Integer[Tensor, " N"],
        *,
        rater: Integer[Tensor, " N"],
    ) -> Float32[Tensor, "N C *space"]:
        """The labels of the cases `case` with these masks, before `smooth_in_space`."""
        if self.tables is None:
            options = self.options
            if options.smoothing != "uniform":
                options = replace(options, smoothing="none")
            return make_labels(masks, self.present[case], options, num_classes=self.num_classes, rater=rater)
        row = rater.int() if self.options.maker == "random" else self.row[case]
        start = (row * self.num_columns).view(-1, *[1] * (masks.ndim - 2))
        entry = (_votes(masks, self.bits) + start).flatten()
        label = torch.empty(len(masks), self.num_classes, *masks.shape[2:], device=masks.device)
        for index, table in enumerate(self.tables):
            label[:, index] = table.index_select(0, entry).view(len(masks), *masks.shape[2:])
        return label

    def _make(
        self, dataset: Dataset, cases: Sequence[int]
    ) -> tuple[Float32[Tensor, "tables C columns"], Integer[Tensor, " cases"]]:
        """One table per rater, per group of raters of a case, or per case; and the table of each case."""
        maker, row = self.options.maker, torch.zeros(len(dataset), dtype=torch.int64)
        # class maps of all raters in which voxel number k has the votes of column k of a table
        shifts = self.bits * torch.arange(self.present.shape[1]).unsqueeze(1)
        votes = (torch.arange(self.num_columns) >> shifts) & ((1 << self.bits) - 1)
        # two bits for three classes can also say 3, which never occurs but must be a class
        every = votes.where(votes < self.num_classes, 0).to(torch.uint8)
        if maker == "random":
            return one_hot(every, self.num_classes).float(), row
        if maker in ("majority", "mean"):
            groups, row = torch.from_numpy(self.raters).unique(dim=0, return_inverse=True)
            repeated = every.expand(len(groups), *every.shape)
            options = LabelOptions(maker=maker)
            return make_labels(repeated, groups, options, num_classes=self.num_classes), row
        numbers = sorted(set(cases))
        row[numbers] = torch.arange(len(numbers))
        tables = torch.zeros(len(numbers), self.num_classes, self.num_columns)
        # votes that do not occur in a case are never looked up; background keeps them valid labels
        tables[:, 0] = 1
        for table, number in zip(tables, numbers, strict=True):
            voxels = torch.from_numpy(dataset.masks(number)).flatten(1)
            if maker == "dice_weighted":
                # Dice does not depend on voxels that nobody drew, which are most of an image
                voxels = voxels[:, voxels.any(0).bool()]
            if voxels.shape[1] == 0:
                continue
            present = torch.from_numpy(self.raters[number])
            label = _MAKERS[maker](voxels, num_classes=self.num_classes, present=present)
            table[:, _votes(voxels.unsqueeze(0), self.bits)[0]] = label
        return tables, row


def _of_label(present: Bool[Tensor, "N R"], options: LabelOptions) -> Bool[Tensor, "N R"]:
    """Who is present and makes the label."""
    if options.raters is None:
        return present
    used = present.clone()
    # one column at a time: a list of numbers would be copied to the device, which a CUDA graph does not allow
    for number in set(range(present.shape[1])) - set(options.raters):
        used[:, number] = False
    return used


def _votes(masks: UInt8[Tensor, "N R *space"], bits: int) -> Integer[Tensor, "N *space"]:
    """The votes of all raters at a voxel as one number: `bits` bits per rater, the first rater lowest."""
    # eight bits are mostly enough, and take a quarter of the memory and time
    wide = masks if masks.shape[1] * bits <= 8 else masks.int()
    votes = wide[:, 0]
    for number in range(1, masks.shape[1]):
        votes = votes | (wide[:, number] << (bits * number))
    return votes.int()


def _smooth_uniformly(label: Tensor, options: LabelOptions) -> Tensor:
    if options.smoothing != "uniform":
        return label
    return smooth_label(label, eps=0.1 if options.eps is None else options.eps, batched=True)


def smooth_in_space(
    label: Float32[Tensor, "N C *space"], options: LabelOptions, valid: Bool[Tensor, "N *space"] | None
) -> Float32[Tensor, "N C *space"]:
    """The label after smoothing that looks at neighbours; in training, this comes after augmentation."""
    if options.smoothing == "boundary":
        eps = 0.5 if options.eps is None else options.eps
        return boundary_smooth_label(label, eps=eps, width=options.width, valid=valid, batched=True)
    if options.smoothing == "spatial":
        return spatially_smooth_label(label, sigma=options.sigma, valid=valid, batched=True)
    return label
