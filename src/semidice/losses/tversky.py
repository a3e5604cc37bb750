"""Dice, Jaccard and Tversky losses that have their minimum at the soft label.

    region loss = (1 - index)^gamma  or  (-log index)^gamma, averaged over classes and images

`overlap` defines the Tversky index and its four forms. The paper's names: DML1, JML1, CTL and CFTL are
`form="min"`, DML2 and JML2 are `"product"`, SDL, SJL and STL are `"relaxed"`. Functions take probabilities,
or logits with `activation`. Modules take logits. Predictions are (N, C, *space); targets follow the
contract in `arrays`. Left out: distances to surfaces, thresholds, and label making (`labels`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Unpack

from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import Activation, check_choice, check_whole_number, read_target, read_weights
from ..kernels import segmentation_losses
from ..overlap.forms import Form
from ..overlap.options import Classes, MixtureOptions, Over, RegionKeywords, RegionOptions


class ModuleKeywords(RegionKeywords, total=False):
    """`RegionKeywords`, and the options that depend on the task."""

    activation: Activation
    class_weight: Sequence[float] | Tensor | None
    ignore_index: int | None


class LossKeywords(ModuleKeywords, total=False):
    """`ModuleKeywords`, and what comes with every batch."""

    valid: Tensor | None


# what to do about arguments of MONAI and smp; docs/peers.md has all of them
_OF_PEERS = {
    "softmax": "use activation='softmax'",
    "sigmoid": "use activation='sigmoid'",
    "from_logits": "use activation='softmax' or 'sigmoid' for logits, 'none' for probabilities",
    "mode": "use activation='softmax' for multiclass, 'sigmoid' for binary and multilabel",
    "to_onehot_y": "leave it out: integers (N, 1, *space) are class indices",
    "include_background": "use background",
    "squared_pred": "use form='squared'",
    "batch": "use over='batch' for True, over='image' for False",
    "weight": "use class_weight",
    "class_weights": "use class_weight",
    "soft_label": "leave it out: every loss takes soft labels",
    "log_loss": "use log",
    "lambda_dice": "use region_weight of SegmentationLoss",
    "lambda_ce": "use cross_entropy_weight of SegmentationLoss",
}


def check_options(
    loss: str, options: Iterable[str], known: Collection[str], *, hints: Mapping[str, str] = _OF_PEERS
) -> None:
    """Raise unless `loss` has all these options; the message lists those it has, or gives the hint."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"{loss} has no option {name!r}; " + hints.get(name, f"it has {', '.join(known)}")
            )


def tversky_loss(
    prediction: Tensor,
    target: Tensor,
    *,
    alpha: float,
    beta: float,
    activation: Activation = "none",
    form: Form = RegionOptions.form,
    gamma: float = RegionOptions.gamma,
    log: bool = RegionOptions.log,
    smooth: float = RegionOptions.smooth,
    over: Over = RegionOptions.over,
    classes: Classes = RegionOptions.classes,
    class_weight: Sequence[float] | Tensor | None = None,
    background: bool = RegionOptions.background,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    sync: bool = RegionOptions.sync,
) -> Float[Tensor, ""]:
    """Tversky loss, 0 at prediction = target: CTL, or CFTL with `gamma` (paper, appendix D).

    Args:
        prediction: probabilities (N, C, *space), or logits if `activation` is softmax or sigmoid.
        target: class indices (N, *space) or soft labels (N, C, *space); other shapes: see `arrays`.
        alpha: weight of false positives, 0 or more.
        beta: weight of false negatives, 0 or more.
        form: how overlap is counted, see `overlap`; squared needs alpha = beta, else its index exceeds 1.
        gamma: focal exponent; above 1, classes that are segmented badly weigh more.
        log: -log(index) in place of 1 - index; an index below 1e-7 counts as 1e-7.
        smooth: added to the numerator and the denominator of the index.
        over: which voxels share one index. batch: one index per class for the whole batch. image: one per
            image and class, averaged over the image's classes, then over images. class: over images first.
        classes: all, or those present in the target; an image or class with no present class leaves the mean.
        class_weight: C weights of the mean over classes, normalised by their sum.
        background: whether class 0 takes part.
        valid: bool (N, *space), False for a voxel that does not count.
        ignore_index: the class index that does not count, for integer targets.
        sync: take the statistics of all processes together; needs over="batch".

    If prediction and target are both empty, or no voxel is valid, loss and gradient are 0.

    >>> soft = torch.tensor([[[0.5, 0.8]]])
    >>> float(tversky_loss(soft, soft, alpha=0.7, beta=0.3))
    0.0
    """
    options = RegionOptions(
        alpha=alpha, beta=beta, form=form, gamma=gamma, log=log, smooth=smooth,
        over=over, classes=classes, background=background, sync=sync,
    )  # fmt: skip
    return _region_loss(prediction, target, valid, activation, options, class_weight, ignore_index)


def dice_loss(prediction: Tensor, target: Tensor, **options: Unpack[LossKeywords]) -> Float[Tensor, ""]:
    """Dice loss: DML1, DML2 with form="product", SDL with "relaxed". Options as in `tversky_loss`.

    >>> half = torch.tensor([[[0.5]]])
    >>> float(dice_loss(half, half)), float(dice_loss(half, half, form="relaxed"))
    (0.0, 0.5)
    """
    return tversky_loss(prediction, target, alpha=0.5, beta=0.5, **options)


def jaccard_loss(prediction: Tensor, target: Tensor, **options: Unpack[LossKeywords]) -> Float[Tensor, ""]:
    """Jaccard loss: JML1, JML2 with form="product", SJL with "relaxed". Options as in `tversky_loss`.

    >>> round(float(jaccard_loss(torch.tensor([[[0.25]]]), torch.tensor([[[0.5]]]))), 6)
    0.5
    """
    return tversky_loss(prediction, target, alpha=1.0, beta=1.0, **options)


class TverskyLoss(nn.Module):
    """`tversky_loss` of logits: `TverskyLoss(alpha=0.7, beta=0.3)(logits, target, valid)`.

    The options are those of `tversky_loss`, but `activation` is softmax by default.
    The class weights are a buffer and move with the module.

    >>> loss = TverskyLoss(alpha=0.7, beta=0.3, gamma=2)
    >>> bool(loss(torch.zeros(1, 2, 4), torch.full((1, 2, 4), 0.5)) < 1e-6)
    True
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        activation: Activation = "softmax",
        class_weight: Sequence[float] | Tensor | None = None,
        ignore_index: int | None = None,
        **options: Unpack[RegionKeywords],
    ) -> None:
        super().__init__()
        check_choice("activation", activation, Activation)
        check_options(type(self).__name__, options, ("alpha", "beta", *ModuleKeywords.__annotations__))
        self.options = RegionOptions(alpha=alpha, beta=beta, **options)
        if ignore_index is not None:
            check_whole_number(ignore_index=ignore_index)
        weight = None if class_weight is None else read_weights(class_weight)
        self.register_buffer("class_weight", weight, persistent=False)
        self.activation, self.ignore_index = activation, ignore_index

    def forward(self, logits: Tensor, target: Tensor, valid: Tensor | None = None) -> Float[Tensor, ""]:
        return _region_loss(
            logits, target, valid, self.activation, self.options, self.class_weight, self.ignore_index
        )

    def extra_repr(self) -> str:
        options = self.options
        shown: dict[str, object] = {"alpha": options.alpha, "beta": options.beta}
        shown |= {"activation": self.activation, "form": options.form}
        for field in fields(options):
            if getattr(options, field.name) != field.default:
                shown[field.name] = getattr(options, field.name)
        if self.class_weight is not None:
            shown["class_weight"] = self.class_weight.tolist()
        if self.ignore_index is not None:
            shown["ignore_index"] = self.ignore_index
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class DiceLoss(TverskyLoss):
    """`dice_loss` of logits; DML1 by default.

    >>> DiceLoss(form="product")
    DiceLoss(alpha=0.5, beta=0.5, activation='softmax', form='product')
    """

    def __init__(self, **options: Unpack[ModuleKeywords]) -> None:
        check_options("DiceLoss", options, ModuleKeywords.__annotations__)
        super().__init__(alpha=0.5, beta=0.5, **options)


class JaccardLoss(TverskyLoss):
    """`jaccard_loss` of logits; JML1 by default.

    >>> JaccardLoss()
    JaccardLoss(alpha=1.0, beta=1.0, activation='softmax', form='min')
    """

    def __init__(self, **options: Unpack[ModuleKeywords]) -> None:
        check_options("JaccardLoss", options, ModuleKeywords.__annotations__)
        super().__init__(alpha=1.0, beta=1.0, **options)


def _region_loss(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    activation: Activation,
    options: RegionOptions,
    class_weight: Sequence[float] | Tensor | None,
    ignore_index: int | None,
) -> Tensor:
    if ignore_index is not None:
        target, valid = read_target(
            prediction, target, activation=activation, valid=valid, ignore_index=ignore_index
        )
    # weights of the cross entropy and of the region loss
    alone = MixtureOptions(activation, options, 0.0, 1.0)
    return segmentation_losses(prediction, target, valid, alone, class_weight=class_weight, parts=False).total
