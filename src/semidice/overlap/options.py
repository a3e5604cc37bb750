"""The options of a loss, in records that the losses, the kernels and the recipes read.

Left out: what depends on the classes of a task (weights, the ignored index) or on the batch (`valid`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypedDict

from ..arrays import Activation, check_choice, check_non_negative, check_number
from .forms import Form

Over = Literal["batch", "image", "class"]
Classes = Literal["all", "present"]
# of the mixture in the paper (section 3)
CROSS_ENTROPY_WEIGHT = 0.25
REGION_WEIGHT = 0.75


@dataclass(frozen=True, kw_only=True)
class RegionOptions:
    """How a region loss counts overlap, what it makes of the index, and how it averages.

    `losses.tversky_loss` explains every option. An unknown choice or a number out of range is a ValueError.

    >>> RegionOptions(alpha=0.5, beta=0.5).over
    'batch'
    """

    alpha: float
    beta: float
    form: Form = "min"
    gamma: float = 1.0
    log: bool = False
    smooth: float = 0.0
    over: Over = "batch"
    classes: Classes = "all"
    background: bool = True
    sync: bool = False

    def __post_init__(self) -> None:
        check_choice("form", self.form, Form)
        check_averaging(self.over, self.classes, sync=self.sync)
        check_non_negative(alpha=self.alpha, beta=self.beta, smooth=self.smooth)
        if self.alpha == self.beta == 0:
            raise ValueError("alpha and beta are both 0, so no error costs anything: make one greater than 0")
        check_number(gamma=self.gamma)
        if not self.gamma > 0:
            raise ValueError(f"gamma must be greater than 0; got {self.gamma}")
        if self.form == "squared" and self.alpha != self.beta:
            raise ValueError(
                "form='squared' needs alpha = beta, or its index exceeds 1; "
                f"got alpha={self.alpha}, beta={self.beta}: use form='min'"
            )

    @cached_property
    def choices(self) -> tuple[object, ...]:
        """The options that a kernel is compiled for. The numbers are arguments of each launch."""
        return (self.form, self.gamma != 1, self.log, self.over, self.classes, self.background)


def check_averaging(over: Over, classes: Classes, *, sync: bool) -> None:
    """Raise unless these options of an average over classes and images exist and fit together."""
    check_choice("over", over, Over)
    check_choice("classes", classes, Classes)
    if sync and over != "batch":
        raise ValueError(f"sync sums the statistics of the whole batch and needs over='batch'; got {over!r}")


class RegionKeywords(TypedDict, total=False):
    """The options of `RegionOptions` that have a default, as the types of keyword arguments."""

    form: Form
    gamma: float
    log: bool
    smooth: float
    over: Over
    classes: Classes
    background: bool
    sync: bool


class SumsOptions(NamedTuple):
    """Which sums over the voxels are needed: overlap unless `form` is None; entropy and mass if `entropy`."""

    activation: Activation
    form: Form | None
    entropy: bool


class MixtureOptions(NamedTuple):
    """The weighted sum of cross entropy and a region loss; a term of weight 0 is not computed."""

    activation: Activation
    region: RegionOptions
    cross_entropy_weight: float = CROSS_ENTROPY_WEIGHT
    region_weight: float = REGION_WEIGHT

    @property
    def sums(self) -> SumsOptions:
        """The sums that the terms are made of."""
        form = self.region.form if self.region_weight > 0 else None
        return SumsOptions(self.activation, form, self.cross_entropy_weight > 0)
