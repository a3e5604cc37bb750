"""Every option of every loss that a recipe may set, declared once.

What depends on the task and not on the recipe stays an argument of a loss: the activation, the index of
ignored voxels, and whether statistics are summed over processes. This module imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from ..options import Bounds, Count, Positive, Weight, check_options

__all__ = ["TeacherCalibration"]

Form = Literal["min", "product", "squared", "relaxed"]
Over = Literal["batch", "image", "class"]
Classes = Literal["all", "present"]
Binning = Literal["hard", "soft"]
Calibration = Literal["none", "temperature", "kde"]
KeySource = Literal["region", "batch"]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Cross entropy, a region loss of the Tversky family, and the calibration error.

    alpha = beta = 0.5 is Dice, 1 is Jaccard.

    >>> LossOptions(alpha=1, beta=1).form
    'min'
    """

    alpha: Weight = 0.5
    """Weight of false positives."""
    beta: Weight = 0.5
    """Weight of false negatives."""
    form: Form = "min"
    """How overlap is counted: min is DML1, product DML2, relaxed SDL."""
    gamma: Positive = 1.0
    """Focal exponent; above 1, classes that are segmented badly weigh more."""
    log: bool = False
    """-log(index) in place of 1 - index; an index below 1e-7 counts as 1e-7."""
    smooth: Weight = 0.0
    """Added to numerator and denominator of the index."""
    over: Over = "batch"
    """Voxels that share one index or one set of bins: those of the batch, or of one image, averaged over the
    image's classes, then over images; class averages over images first."""
    classes: Classes = "all"
    """All, or those present in the label; an image or class with none of them leaves the mean."""
    background: bool = True
    """Whether the region loss and the calibration error include class 0."""
    class_weight: tuple[float, ...] | None = None
    """One weight per class, normalised by their sum."""
    cross_entropy_weight: Weight = 0.25
    """Weight of the cross entropy."""
    region_weight: Weight = 0.75
    """Weight of the region loss."""
    calibration_weight: Weight = 0.0
    """Weight of the average calibration error against the label."""
    calibration_bins: Annotated[int, Bounds(at_least=2)] = 20
    """Bins of the average calibration error."""
    calibration_binning: Binning = "hard"
    """A voxel is in one bin (hard), or shared by the two nearest bins (soft)."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.alpha == self.beta == 0:
            raise ValueError("alpha and beta are both 0, so no error costs anything: make one greater than 0")
        if self.class_weight is not None:
            check_weights("class_weight", self.class_weight)
        if self.form == "squared" and self.alpha != self.beta:
            raise ValueError(
                f"form squared needs alpha = beta, or its index exceeds 1; got alpha={self.alpha}, "
                f"beta={self.beta}: use form min"
            )
        if self.cross_entropy_weight == self.region_weight == self.calibration_weight == 0:
            raise ValueError(
                "cross_entropy_weight, region_weight and calibration_weight are all 0: "
                "nothing would be learned"
            )


def check_weights(name: str, weights: Sequence[float]) -> None:
    """Raise unless the weights are finite and 0 or more, and not all 0."""
    if not (all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf):
        raise ValueError(f"{name} must be finite, 0 or more and not all 0; got {list(weights)}")


@dataclass(frozen=True)
class TeacherCalibration:
    """How the probabilities of a teacher are calibrated.

    kde gives E[y | f] from key points of the batch, which are balanced over classes and labelled by the
    target. It changes only voxels of a region: where the network is wrong, or near a boundary of the label.

    >>> TeacherCalibration("kde", bandwidth=1e-2).num_keys
    1024
    """

    calibration: Calibration = "none"
    """How the teacher's probabilities are calibrated."""
    temperature: Positive | Literal["fit"] = "fit"
    """Divides the logits; fit maximises the likelihood on cases held out from the teacher."""
    bandwidth: Positive = 1e-3
    """Bandwidth of the kernel density estimate."""
    num_keys: Count = 1024
    """Number of key points per batch."""
    width: Annotated[int, Bounds(at_least=0)] = 3
    """Kde is applied within this distance, in voxels, from a label boundary."""
    keys_per_image: bool = False
    """Draw key points from each image and not from the whole batch."""
    keys_from: KeySource = "region"
    """Draw key points where kde is applied (region), or anywhere (as in the paper)."""
    reweight_keys: bool = True
    """Weight keys by the voxels they stand for; false as in the paper, see calibration.md."""

    def __post_init__(self) -> None:
        check_options(self)
