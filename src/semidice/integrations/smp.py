"""Dice, Jaccard and Tversky losses with the arguments of segmentation_models_pytorch.

    from semidice.integrations.smp import DiceLoss      in place of segmentation_models_pytorch.losses
    DiceLoss("multiclass", ignore_index=255)(logits, target)

On hard labels, value and gradient are those of smp; soft labels are right in every mode. docs/smp.md lists
the differences. smp itself is not needed. Left out: smp's losses without a Tversky index.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import (
    Activation,
    check_choice,
    check_tensor,
    check_whole_number,
    describe,
    one_hot,
    read_target,
    read_weights,
)
from ..losses.tversky import check_options, tversky_loss
from ..overlap.mixture import focal
from ..overlap.options import RegionOptions

__all__ = ["DiceLoss", "JaccardLoss", "TverskyLoss"]

Mode = Literal["binary", "multiclass", "multilabel"]
_ARGUMENTS = ("mode", "classes", "log_loss", "from_logits", "smooth", "ignore_index", "eps", "class_weights")


class DiceLoss(nn.Module):
    """`semidice.DiceLoss`, called as smp's: y_pred (N, C, *space), y_true as in smp.

    For multiclass, y_true may also be soft labels (N, C, *space). eps has no effect: 0 / 0 is defined.

    >>> soft = torch.tensor([[[0.25, 0.5], [0.75, 0.5]]])
    >>> bool(DiceLoss("multiclass")(soft.log(), soft) < 1e-6)
    True
    """

    alpha, beta, gamma = 0.5, 0.5, 1.0
    class_weights: Tensor | None

    # fmt: off
    def __init__(
        self, mode: str, classes: Sequence[int] | None = None, log_loss: bool = False,
        from_logits: bool = True, smooth: float = 0.0, ignore_index: int | None = None, eps: float = 1e-7,
        class_weights: Sequence[float] | Tensor | None = None, **unknown: object,
    ) -> None:
        # fmt: on
        super().__init__()
        check_options(type(self).__name__, unknown, _ARGUMENTS, hints={})
        check_choice("mode", mode, Mode)
        if mode == "binary" and not (classes is None and class_weights is None):
            raise ValueError("mode='binary' has one class: leave classes and class_weights out")
        if ignore_index is not None:
            check_whole_number(ignore_index=ignore_index)
        self.options = RegionOptions(
            alpha=self.alpha, beta=self.beta, gamma=self.gamma, log=log_loss, smooth=smooth
        )
        self.mode, self.from_logits, self.ignore_index = mode, from_logits, ignore_index
        self.classes = None if classes is None else torch.as_tensor(classes).tolist()
        weights = None if class_weights is None else read_weights(class_weights)
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Float[Tensor, ""]:
        prob, target, valid, activation = self._read(y_pred, y_true)
        weight, options = self._weight(prob), self.options
        loss = tversky_loss(
            prob, target, valid=valid, activation=activation, class_weight=weight, classes="present",
            alpha=options.alpha, beta=options.beta, log=options.log, smooth=options.smooth,
        )  # fmt: skip
        if len(weight) > 1:
            # smp counts a class that is absent from the target as a loss of 0; semidice leaves it out
            soft = target if target.is_floating_point() else one_hot(target, len(weight))
            soft = soft if valid is None else torch.where(valid.unsqueeze(1), soft, 0)
            weight = weight.to(loss.dtype)
            loss = loss * (weight * soft.transpose(0, 1).flatten(1).any(1)).sum() / weight.sum()
        # in smp, gamma is an exponent of the mean over the classes; in semidice, of each class
        return focal(loss, options.gamma)

    def _read(self, y_pred: Tensor, y_true: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Activation]:
        """Prediction, target, valid voxels, and the activation that is still to be applied."""
        check_tensor("y_pred", y_pred)
        check_tensor("y_true", y_true)
        channels = range(y_pred.shape[1] if y_pred.ndim > 1 else 0)
        activation: Activation = "sigmoid" if self.from_logits else "none"
        valid = None if self.ignore_index is None else y_true != self.ignore_index
        if self.mode == "multiclass":
            if len(channels) < 2:
                raise ValueError(f"mode='multiclass' needs two or more channels; got {describe(y_pred)}")
            if y_true.is_floating_point() and self.ignore_index in channels:
                raise ValueError(
                    f"ignore_index={self.ignore_index} is a class, and a voxel of a soft label has several: "
                    "set ignored voxels to 255 in all channels, and ignore_index to 255"
                )
            valid = valid.any(1) if valid is not None and valid.ndim == y_pred.ndim else valid
            activation = "softmax" if self.from_logits else "none"
            return y_pred, *read_target(y_pred, y_true, activation=activation, valid=valid), activation
        # floats, because integers (N, C, *space) without an activation would have to be one-hot
        y_true = y_true if y_true.is_floating_point() else y_true.to(y_pred.dtype)
        if self.mode == "binary":
            if len(channels) != 1 and y_pred.shape != y_true.shape:
                raise ValueError(f"mode='binary' needs one channel; got {describe(y_pred)}: use 'multiclass'")
            valid = None if valid is None else valid.flatten(1)
            return y_pred.flatten(1).unsqueeze(1), y_true.flatten(1).unsqueeze(1), valid, activation
        if valid is None or y_true.shape != y_pred.shape:
            return y_pred, y_true, None, activation
        # a voxel may be ignored in some of its channels: 0 against 0 adds nothing and has no gradient
        zero = -torch.inf if self.from_logits else 0.0
        return y_pred.masked_fill(~valid, zero), y_true.masked_fill(~valid, 0), None, activation

    def _weight(self, prediction: Tensor) -> Float[Tensor, " C"]:
        """The weight of each class in the mean; a class that is listed twice in `classes` counts twice."""
        device, weight = prediction.device, self.class_weights
        weight = torch.ones(prediction.shape[1], device=device) if weight is None else weight.to(device)
        if self.classes is None:
            return weight
        if not self.classes or not all(number in range(len(weight)) for number in self.classes):
            raise ValueError(f"classes must be a list of numbers below {len(weight)}; got {self.classes}")
        return weight * torch.tensor([self.classes.count(n) for n in range(len(weight))], device=device)


class JaccardLoss(DiceLoss):
    """`semidice.JaccardLoss`, called as smp's; arguments as in `DiceLoss`."""

    alpha, beta = 1.0, 1.0


class TverskyLoss(DiceLoss):
    """`semidice.TverskyLoss`, called as smp's; gamma is an exponent of the mean over the classes."""

    # fmt: off
    def __init__(
        self, mode: str, classes: Sequence[int] | None = None, log_loss: bool = False,
        from_logits: bool = True, smooth: float = 0.0, ignore_index: int | None = None, eps: float = 1e-7,
        alpha: float = 0.5, beta: float = 0.5, gamma: float = 1.0,
        class_weights: Sequence[float] | Tensor | None = None, **unknown: object,
    ) -> None:
        # fmt: on
        check_options("TverskyLoss", unknown, (*_ARGUMENTS, "alpha", "beta", "gamma"), hints={})
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        super().__init__(mode, classes, log_loss, from_logits, smooth, ignore_index, eps, class_weights)
