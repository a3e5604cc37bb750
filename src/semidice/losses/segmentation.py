"""Cross entropy, a region loss, and the calibration error: a mixture of three terms, or one of them alone.

    cross entropy   -sum_c w_c y_c log p_c  /  sum_c w_c y_c      both sums over the valid voxels as well
    region loss     (1 - index)^gamma  or  (-log index)^gamma, averaged over classes and images
    calibration     see `calibration_error`

`overlap` defines the Tversky index and its four forms. The paper's names: DML1, JML1, CTL and CFTL are
`form="min"`, DML2 and JML2 are `"product"`, SDL, SJL and STL are `"relaxed"`. Functions take probabilities,
or logits with `activation`; modules take logits. Predictions are (N, C, *space); targets follow the contract
in `arrays`. Left out: distances to surfaces, thresholds, and label making (`labels`).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import (
    MAX_CHANNELS_1D,
    Activation,
    check_prediction,
    check_result,
    class_weights,
    describe,
    downsample_target,
    is_distribution,
    read_numbers,
    read_target,
    values_are_readable,
)
from ..kernels import segmentation_terms, segmentation_total
from ..options import check_value
from ..overlap import total_of
from .calibration_error import calibration_error_of
from .options import LossOptions, check_weights

__all__ = [
    "CalibrationErrorLoss",
    "DiceLoss",
    "JaccardLoss",
    "SegmentationLoss",
    "TverskyLoss",
    "dice_loss",
    "jaccard_loss",
    "soft_cross_entropy",
    "tversky_loss",
]

# of one output or, for deep supervision, of several, the finest first
Outputs = Tensor | Sequence[Tensor]

_OF_REGION = ("alpha", "beta", "form", "gamma", "log", "smooth")
_OF_CALIBRATION = ("calibration_bins", "calibration_binning")
_ALONE = {"cross_entropy_weight": 0.0, "region_weight": 0.0, "calibration_weight": 0.0}


def _defaults(names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(LossOptions, name) for name in names}


class SegmentationLoss(nn.Module):
    """Cross entropy and a region loss of logits: 0.25 CE + 0.75 DML1 by default (paper, section 3).

    The options are those of `options.LossOptions`. A term of weight 0 is not computed. For a list of outputs
    (deep supervision, finest first), the target is averaged by area to the size of each output, and the
    losses are summed with `scale_weights`; the default is 1, 1/2, 1/4, ... divided by their sum.

    Args:
        activation: softmax, sigmoid, or none for probabilities.
        ignore_index: the class index that does not count, for integer targets.
        sync: take the statistics of all processes together; needs over="batch".

    Sums are float32 for inputs of lower precision; float64 stays float64. If prediction and target are both
    empty, or no voxel is valid, loss and gradient are 0. The class weights are a buffer and move with the
    module. The first batch of a module is looked at closely: on a GPU this waits once.

    >>> loss = SegmentationLoss(alpha=0.7, beta=0.3, ignore_index=255)
    >>> terms = loss.terms(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
    >>> sorted(terms)
    ['cross_entropy', 'region']
    """

    # options that a loss does not have, with their values; options with another default
    fixed: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    class_weight: Tensor | None

    def __init__(
        self,
        *,
        activation: Activation = "softmax",
        ignore_index: int | None = None,
        sync: bool = False,
        scale_weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        weight = options.pop("class_weight", None)
        if weight is not None:
            dtype = torch.float32 if isinstance(weight, Tensor) else torch.float64
            weight = read_numbers("class_weight", weight, dtype).flatten()
            # not while a compiler traces the loss: it has no values
            if values_are_readable(weight, waits=True):
                options["class_weight"] = tuple(weight.tolist())
            weight = weight.float()
        self.register_buffer("class_weight", weight, persistent=False)
        self.options = _record(type(self), activation, ignore_index, sync, options)
        self.activation, self.ignore_index, self.sync = activation, ignore_index, sync
        self.scale_weights = None
        if scale_weights is not None:
            self.scale_weights = tuple(read_numbers("scale_weights", scale_weights).flatten().tolist())
            check_weights("scale_weights", self.scale_weights)
        # whether no batch was seen yet
        self._is_first = True

    def forward(self, logits: Outputs, target: Tensor, valid: Tensor | None = None) -> Float[Tensor, ""]:
        """The weighted sum of the terms."""
        totals = [self._total(*batch) for batch in self._read(logits, target, valid)]
        return totals[0] if isinstance(logits, Tensor) else self._over_scales(totals)

    def terms(self, logits: Outputs, target: Tensor, valid: Tensor | None = None) -> dict[str, Tensor]:
        """The terms by name, each without its weight; a term of weight 0 is left out.

        They have gradients: `total` of them can be minimised. Detach what goes into a log.
        """
        terms = [self._terms(*batch) for batch in self._read(logits, target, valid)]
        if isinstance(logits, Tensor):
            return terms[0]
        return {name: self._over_scales([each[name] for each in terms]) for name in terms[0]}

    def total(self, terms: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """The sum of what `terms` returned, each times its weight."""
        return total_of(terms, self.options)

    def _read(
        self, logits: Outputs, target: Tensor, valid: Tensor | None, *, looks: bool = True
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Each output with its target and valid voxels, all checked.

        looks: whether to warn of the first batch.
        """
        several = isinstance(logits, (list, tuple))
        outputs: Any = logits if several else [logits]
        for output in outputs:
            check_prediction(output, self.activation)
        if several:
            _check_outputs(outputs)
        finest = outputs[0]
        if finest.shape[1] == 1 and not self.options.background:
            raise ValueError(
                "background=False leaves no class of a one-channel prediction; "
                f"got {describe(finest)}: use background=True"
            )
        if finest.shape[1] == 1 and self.activation == "none" and self.options.cross_entropy_weight > 0:
            raise ValueError(
                f"cross entropy of one channel needs logits and activation='sigmoid'; got {describe(finest)}"
            )
        is_first = not torch.compiler.is_compiling() and self._is_first
        target, valid = read_target(
            finest,
            target,
            activation=self.activation,
            valid=valid,
            ignore_index=self.ignore_index,
            waits=is_first,
            any_size=several,
        )
        if is_first and looks and values_are_readable(finest, waits=True):
            self._is_first = False
            self._look_at(finest)
        return [(output, *downsample_target(target, valid, output.shape)) for output in outputs]

    def _total(self, prediction: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
        """The loss of one output."""
        if self.options.calibration_weight > 0:
            return self.total(self._terms(prediction, target, valid))
        total = segmentation_total(prediction, target, valid, *self._setting(prediction))
        return check_result(total, prediction)

    def _terms(self, prediction: Tensor, target: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """The terms of one output."""
        setting = self._setting(prediction)
        terms = {}
        if self.options.cross_entropy_weight > 0 or self.options.region_weight > 0:
            terms = segmentation_terms(prediction, target, valid, *setting)
        if self.options.calibration_weight > 0:
            terms["calibration"] = calibration_error_of(prediction, target, valid, *setting)
        return {name: check_result(term, prediction) for name, term in terms.items()}

    def _setting(self, prediction: Tensor) -> tuple[Tensor | None, LossOptions, Activation, bool]:
        weight = None if self.class_weight is None else class_weights(self.class_weight, prediction)
        return weight, self.options, self.activation, self.sync

    def _look_at(self, logits: Tensor) -> None:
        """Warn about what a network would learn from without an error, but badly."""
        name = type(self).__name__
        if self.activation == "softmax" and is_distribution(logits):
            warnings.warn(
                f"{name} takes logits, but the first batch {describe(logits)} holds probabilities: pass the "
                f"output before the softmax, or use {name}(activation='none')",
                stacklevel=6,
            )
        if self.activation == "sigmoid" and logits.ndim == 3 and logits.shape[1] > MAX_CHANNELS_1D:
            warnings.warn(
                f"{name} reads the prediction {describe(logits)} as {logits.shape[1]} masks along one axis: "
                "use .unsqueeze(1) of prediction and target if these are images (N, H, W) of one mask",
                stacklevel=6,
            )

    def _over_scales(self, values: Sequence[Tensor]) -> Tensor:
        halved = [0.5**level for level in range(len(values))]
        weights = self.scale_weights or [weight / sum(halved) for weight in halved]
        if len(weights) != len(values):
            raise ValueError(
                f"scale_weights needs one number per output; got {len(weights)} for {len(values)} outputs"
            )
        return torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum()

    def extra_repr(self) -> str:
        shown: dict[str, Any] = {"activation": self.activation}
        for field in fields(self.options):
            value = getattr(self.options, field.name)
            if field.name not in self.fixed and value != field.default:
                shown[field.name] = value
        if self.ignore_index is not None:
            shown["ignore_index"] = self.ignore_index
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class TverskyLoss(SegmentationLoss):
    """`tversky_loss` of logits: `TverskyLoss(alpha=0.7, beta=0.3)(logits, target, valid)`.

    >>> loss = TverskyLoss(alpha=0.7, beta=0.3, gamma=2)
    >>> bool(loss(torch.zeros(1, 2, 4), torch.full((1, 2, 4), 0.5)) < 1e-6)
    True
    """

    fixed: ClassVar[Mapping[str, Any]] = {**_ALONE, "region_weight": 1.0, **_defaults(_OF_CALIBRATION)}

    def __init__(self, *, alpha: float, beta: float, **options: Any) -> None:
        super().__init__(alpha=alpha, beta=beta, **options)


class DiceLoss(SegmentationLoss):
    """`dice_loss` of logits; DML1 by default.

    >>> DiceLoss(form="product")
    DiceLoss(activation='softmax', form='product')
    """

    fixed: ClassVar[Mapping[str, Any]] = {**TverskyLoss.fixed, "alpha": 0.5, "beta": 0.5}


class JaccardLoss(SegmentationLoss):
    """`jaccard_loss` of logits; JML1 by default."""

    fixed: ClassVar[Mapping[str, Any]] = {**TverskyLoss.fixed, "alpha": 1.0, "beta": 1.0}


class CalibrationErrorLoss(SegmentationLoss):
    """The average calibration error of logits; of each image by default, as published.

    >>> loss = CalibrationErrorLoss(calibration_binning="soft")
    >>> float(loss(torch.zeros(1, 2, 4), torch.full((1, 2, 4), 0.5)))
    0.0
    """

    fixed: ClassVar[Mapping[str, Any]] = {**_ALONE, "calibration_weight": 1.0, **_defaults(_OF_REGION)}
    defaults: ClassVar[Mapping[str, Any]] = {"over": "image"}


def tversky_loss(
    prediction: Tensor,
    target: Tensor,
    *,
    alpha: float,
    beta: float,
    valid: Tensor | None = None,
    **options: Any,
) -> Float[Tensor, ""]:
    """Tversky loss, 0 at prediction = target: CTL, or CFTL with `gamma` (paper, appendix D).

    prediction: probabilities (N, C, *space), or logits if `activation` is softmax or sigmoid.
    target: class indices (N, *space) or soft labels (N, C, *space); other shapes: see `arrays`.
    valid: bool (N, *space), False for a voxel that does not count.
    Other options are those of `TverskyLoss`: form, gamma, log, smooth, over, classes, background,
    class_weight, ignore_index, sync.

    >>> soft = torch.tensor([[[0.5, 0.8]]])
    >>> float(tversky_loss(soft, soft, alpha=0.7, beta=0.3))
    0.0
    """
    return _loss(TverskyLoss, prediction, target, valid, options | {"alpha": alpha, "beta": beta})


def dice_loss(
    prediction: Tensor, target: Tensor, *, valid: Tensor | None = None, **options: Any
) -> Float[Tensor, ""]:
    """Dice loss: DML1, DML2 with form="product", SDL with "relaxed". Options as in `tversky_loss`.

    >>> half = torch.tensor([[[0.5]]])
    >>> float(dice_loss(half, half)), float(dice_loss(half, half, form="relaxed"))
    (0.0, 0.5)
    """
    return _loss(DiceLoss, prediction, target, valid, options)


def jaccard_loss(
    prediction: Tensor, target: Tensor, *, valid: Tensor | None = None, **options: Any
) -> Float[Tensor, ""]:
    """Jaccard loss: JML1, JML2 with form="product", SJL with "relaxed". Options as in `tversky_loss`.

    >>> round(float(jaccard_loss(torch.tensor([[[0.25]]]), torch.tensor([[[0.5]]]))), 6)
    0.5
    """
    return _loss(JaccardLoss, prediction, target, valid, options)


def soft_cross_entropy(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation = "none",
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    class_weight: Sequence[float] | Tensor | None = None,
    sync: bool = False,
) -> Float[Tensor, ""]:
    """Mean cross entropy over the valid voxels, of hard or soft targets alike, in nats.

    softmax and none: the sum of -w_c y_c log p_c over voxels and classes, divided by that of w_c y_c, so
    that class indices and their one-hot label give the same number. sigmoid: the binary cross entropy of
    each channel, averaged over channels with weights w_c. Without a valid voxel it is 0.

    >>> round(float(soft_cross_entropy(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))), 4)
    0.6931
    """
    options: dict[str, Any] = {"activation": activation, "ignore_index": ignore_index, "sync": sync}
    options |= {**_ALONE, "cross_entropy_weight": 1.0, "class_weight": class_weight}
    return _loss(SegmentationLoss, prediction, target, valid, options)


def _record(
    kind: type[SegmentationLoss],
    activation: Activation,
    ignore_index: int | None,
    sync: bool,
    options: Mapping[str, Any],
) -> LossOptions:
    """The options of a loss, all checked."""
    check_value(Activation, activation=activation)
    if ignore_index is not None:
        check_value(int, ignore_index=ignore_index)
    known = [field.name for field in fields(LossOptions) if field.name not in kind.fixed]
    for name in options:
        if name not in known:
            raise TypeError(
                f"{kind.__name__} has no option {name!r}; it has activation, ignore_index, sync, "
                f"{', '.join(known)}; docs/peers.md has the arguments of other libraries"
            )
    record = LossOptions(**{**kind.defaults, **kind.fixed, **options})
    if sync and record.over != "batch":
        raise ValueError(
            f"sync sums the statistics of the whole batch and needs over='batch'; got {record.over!r}"
        )
    return record


# torch.compile takes the record as a constant; torch.compiler.assume_constant_result sets the same flag, but
# importing this module would then import the compiler, which takes as long as torch
_record._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _loss(
    kind: type[SegmentationLoss],
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """A loss of one prediction, of probabilities by default; it warns of nothing."""
    loss = kind(**{"activation": "none", **options})
    (batch,) = loss._read(prediction, target, valid, looks=False)
    return loss._total(*batch)


def _check_outputs(outputs: Sequence[Tensor]) -> None:
    """Raise unless the outputs of deep supervision have the same images and channels, the finest first."""
    shapes = [tuple(output.shape) for output in outputs]
    if not shapes:
        raise ValueError("the list of outputs is empty: pass the logits, the finest first")
    for finer, coarser in pairwise(shapes):
        if len(finer) != len(coarser) or finer[:2] != coarser[:2]:
            raise ValueError(f"all outputs need the same images, channels and number of axes; got {shapes}")
        if any(length > limit for length, limit in zip(coarser, finer, strict=True)):
            raise ValueError(f"outputs must come finest first; got {shapes}: reverse the list")
