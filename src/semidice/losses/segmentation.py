"""Dice, Jaccard and Tversky losses that have their minimum at the soft label, cross entropy, and the mixture.

    region loss = (1 - index)^gamma  or  (-log index)^gamma, averaged over classes and images

where the Tversky index and its four forms are defined in `overlap`. The paper's names:
DML1, JML1, CTL, CFTL are `form="min"`, DML2 and JML2 `"product"`, SDL, SJL, STL `"relaxed"`.
Functions take probabilities, or logits with `activation`; modules take logits and are thin shells
over the functions. Predictions are (N, C, *space); targets follow the contract in `arrays`.
Left out: distances to surfaces, thresholds, and label making (`labels`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import (
    Activation,
    check_choice,
    check_non_negative,
    check_prediction,
    check_result,
    check_target,
    class_weights,
    downsample_target,
    fold_ignored,
)
from ..kernels import fused_applies, fused_may_apply, segmentation_sums
from ..overlap.forms import Form
from .cross_entropy import check_entropy, cross_entropy_of
from .region import Classes, IndexOptions, Over, region_loss_of


class ModuleOptions(IndexOptions, total=False):
    """`IndexOptions`, how overlap is counted, and what depends on the classes of a task."""

    activation: Activation
    form: Form
    sync: bool
    class_weight: Sequence[float] | Tensor | None
    ignore_index: int | None


class LossOptions(ModuleOptions, total=False):
    """`ModuleOptions`, and what comes with every batch."""

    valid: Tensor | None


def tversky_loss(
    prediction: Tensor,
    target: Tensor,
    *,
    alpha: float,
    beta: float,
    activation: Activation = "none",
    form: Form = "min",
    gamma: float = 1.0,
    log: bool = False,
    smooth: float = 0.0,
    over: Over = "batch",
    classes: Classes = "all",
    class_weight: Sequence[float] | Tensor | None = None,
    background: bool = True,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    sync: bool = False,
) -> Float[Tensor, ""]:
    """Tversky loss, 0 at prediction = target: CTL, or CFTL with `gamma` (paper, appendix F).

    Args:
        prediction: probabilities (N, C, *space), or logits if `activation` is softmax or sigmoid.
        target: class indices (N, *space) or soft labels (N, C, *space), see `arrays`.
        alpha: weight of false positives, 0 or more.
        beta: weight of false negatives, 0 or more.
        form: how overlap is counted, see `overlap`; squared needs alpha = beta, else its index exceeds 1.
        gamma: focal exponent; above 1, classes that are segmented badly weigh more.
        log: -log(index) in place of 1 - index; an index below 1e-7 is held there.
        smooth: added above and below in the index.
        over: which voxels share one index. batch: one a class for the whole batch. image: one an image and
            class, averaged over the image's classes, then over images. class: averaged over images first.
        classes: all, or those present in the target; an image or class that is left without any leaves
            the mean.
        class_weight: C weights of the mean over classes, normalised by their sum.
        background: whether class 0 takes part.
        valid: bool (N, *space), False where a voxel does not count.
        ignore_index: the class index that does not count, for integer targets.
        sync: take the statistics of all processes together; needs over="batch".

    Where neither prediction nor label is there, and where no voxel is valid, loss and gradient are 0.

    >>> soft = torch.tensor([[[0.5, 0.8]]])
    >>> float(tversky_loss(soft, soft, alpha=0.7, beta=0.3))
    0.0
    """
    check_region_options(alpha, beta, form, sync, gamma=gamma, smooth=smooth, over=over, classes=classes)
    if ignore_index is not None:
        valid = _check(prediction, target, valid, activation, ignore_index=ignore_index)
    losses = _losses(
        prediction,
        target,
        valid,
        activation,
        form,
        class_weight,
        alpha,
        beta,
        cross_entropy_weight=0.0,
        region_weight=1.0,
        parts=False,
        sync=sync,
        gamma=gamma,
        log=log,
        smooth=smooth,
        over=over,
        classes=classes,
        background=background,
    )
    return losses.total


def dice_loss(prediction: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Float[Tensor, ""]:
    """Dice loss: DML1, DML2 with form="product", SDL with "relaxed". Options as in `tversky_loss`.

    >>> half = torch.tensor([[[0.5]]])
    >>> float(dice_loss(half, half)), float(dice_loss(half, half, form="relaxed"))
    (0.0, 0.5)
    """
    return tversky_loss(prediction, target, alpha=0.5, beta=0.5, **options)


def jaccard_loss(prediction: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Float[Tensor, ""]:
    """Jaccard loss: JML1, JML2 with form="product", SJL with "relaxed". Options as in `tversky_loss`.

    >>> round(float(jaccard_loss(torch.tensor([[[0.25]]]), torch.tensor([[[0.5]]]))), 6)
    0.5
    """
    return tversky_loss(prediction, target, alpha=1.0, beta=1.0, **options)


class TverskyLoss(nn.Module):
    """`tversky_loss` of logits: `TverskyLoss(alpha=0.7, beta=0.3)(logits, target, valid)`.

    Options are those of `tversky_loss`, but for `activation`, which is softmax unless told otherwise.
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
        form: Form = "min",
        class_weight: Sequence[float] | Tensor | None = None,
        ignore_index: int | None = None,
        sync: bool = False,
        **options: Unpack[IndexOptions],
    ) -> None:
        super().__init__()
        check_choice("activation", activation, Activation)
        check_region_options(alpha, beta, form, sync, **options)
        weight = None if class_weight is None else torch.as_tensor(class_weight, dtype=torch.float32)
        self.register_buffer("class_weight", weight, persistent=False)
        self.alpha, self.beta, self.activation, self.form = alpha, beta, activation, form
        self.ignore_index, self.sync, self.options = ignore_index, sync, options

    def forward(self, logits: Tensor, target: Tensor, valid: Tensor | None = None) -> Float[Tensor, ""]:
        return tversky_loss(
            logits,
            target,
            alpha=self.alpha,
            beta=self.beta,
            activation=self.activation,
            form=self.form,
            valid=valid,
            ignore_index=self.ignore_index,
            class_weight=self.class_weight,
            sync=self.sync,
            **self.options,
        )

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name) for name in ("alpha", "beta", "activation", "form")}
        shown.update(self.options)
        if self.sync:
            shown["sync"] = True
        if self.class_weight is not None:
            shown["class_weight"] = self.class_weight.tolist()
        if self.ignore_index is not None:
            shown["ignore_index"] = self.ignore_index
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class DiceLoss(TverskyLoss):
    """`dice_loss` of logits; DML1 as it stands.

    >>> DiceLoss(form="product")
    DiceLoss(alpha=0.5, beta=0.5, activation='softmax', form='product')
    """

    def __init__(self, **options: Unpack[ModuleOptions]) -> None:
        super().__init__(alpha=0.5, beta=0.5, **options)


class JaccardLoss(TverskyLoss):
    """`jaccard_loss` of logits; JML1 as it stands.

    >>> JaccardLoss()
    JaccardLoss(alpha=1.0, beta=1.0, activation='softmax', form='min')
    """

    def __init__(self, **options: Unpack[ModuleOptions]) -> None:
        super().__init__(alpha=1.0, beta=1.0, **options)


class SegmentationLoss(nn.Module):
    """Cross entropy and a region loss in one: 0.25 CE + 0.75 DML1 unless told otherwise (paper, section 4).

    The activation, ignore_index, class_weight and sync of `region` hold for both terms. A term of
    weight 0 is not computed. Given a list of outputs (deep supervision, finest first), the target is averaged
    by area to the size of each one as a probability, and the losses are summed with `scale_weights`, by
    default 1, 1/2, 1/4, ... divided by their sum.

    >>> loss = SegmentationLoss(TverskyLoss(alpha=0.7, beta=0.3))
    >>> total, parts = loss(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long), parts=True)
    >>> sorted(parts)
    ['cross_entropy', 'region']
    """

    def __init__(
        self,
        region: TverskyLoss | None = None,
        *,
        cross_entropy_weight: float = 0.25,
        region_weight: float = 0.75,
        scale_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_non_negative(cross_entropy_weight=cross_entropy_weight, region_weight=region_weight)
        self.region = DiceLoss() if region is None else region
        self.cross_entropy_weight, self.region_weight = cross_entropy_weight, region_weight
        self.scale_weights = None if scale_weights is None else tuple(scale_weights)

    @overload
    def forward(
        self, logits: Tensor | Sequence[Tensor], target: Tensor, valid: Tensor | None = None
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        logits: Tensor | Sequence[Tensor],
        target: Tensor,
        valid: Tensor | None = None,
        *,
        parts: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self,
        logits: Tensor | Sequence[Tensor],
        target: Tensor,
        valid: Tensor | None = None,
        *,
        parts: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The total; with `parts`, also the unweighted terms by name, detached, for a log."""
        # attributes that are modules take long to find
        region = self.region
        if region.ignore_index is not None:
            valid = fold_ignored(target, valid, region.ignore_index)
        if parts:
            return self.over_valid(logits, target, valid)
        if isinstance(logits, Tensor):
            return self._losses(region, logits, target, valid, parts=False).total
        return self._losses_of_all(logits, target, valid, parts=False).total

    def over_valid(
        self, logits: Tensor | Sequence[Tensor], target: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Total and terms, whose ignored voxels are in `valid` already: `ignore_index` is not looked at."""
        total, (cross_entropy, region) = self._losses_of_all(logits, target, valid, parts=True)
        return total, {"cross_entropy": cross_entropy.detach(), "region": region.detach()}

    def _losses_of_all(
        self, logits: Tensor | Sequence[Tensor], target: Tensor, valid: Tensor | None, *, parts: bool
    ) -> "Losses":
        """The losses of one output, or the weighted sums of those of several."""
        if isinstance(logits, Tensor):
            return self._losses(self.region, logits, target, valid, parts=parts)
        weights = self._weights_of_scales(len(logits))
        each = [
            self._losses(self.region, scale, *downsample_target(target, valid, scale.shape), parts=parts)
            for scale in logits
        ]
        total = _weighted_sum(weights, [losses.total for losses in each])
        terms = zip(*(losses.terms for losses in each), strict=True)
        return Losses(total, tuple(_weighted_sum(weights, term) for term in terms))

    def _losses(
        self, region: TverskyLoss, logits: Tensor, target: Tensor, valid: Tensor | None, *, parts: bool
    ) -> "Losses":
        """The losses of one output, from one pass over it."""
        return _losses(
            logits,
            target,
            valid,
            region.activation,
            region.form,
            region.class_weight,
            region.alpha,
            region.beta,
            cross_entropy_weight=self.cross_entropy_weight,
            region_weight=self.region_weight,
            parts=parts,
            sync=region.sync,
            **region.options,
        )

    def _weights_of_scales(self, num_scales: int) -> Sequence[float]:
        halved = [0.5**level for level in range(num_scales)]
        weights = self.scale_weights or [weight / sum(halved) for weight in halved]
        if num_scales == 0 or len(weights) != num_scales:
            raise ValueError(
                f"scale_weights needs one number an output; got {len(weights)} for {num_scales} outputs"
            )
        return weights

    def extra_repr(self) -> str:
        return f"cross_entropy_weight={self.cross_entropy_weight}, region_weight={self.region_weight}"


class Losses(NamedTuple):
    """The weighted total, and if asked for its terms, cross entropy and region; one of weight 0 is 0."""

    total: Tensor
    terms: tuple[Tensor, ...]


def _losses(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    activation: Activation,
    form: Form,
    class_weight: Sequence[float] | Tensor | None,
    alpha: float,
    beta: float,
    *,
    cross_entropy_weight: float,
    region_weight: float,
    parts: bool,
    sync: bool,
    **options: Unpack[IndexOptions],
) -> Losses:
    """Both losses: by one kernel, or from the sums of a batch."""
    with_entropy, with_region = cross_entropy_weight > 0, region_weight > 0
    counted = form if with_region else None

    def check() -> None:
        _check(prediction, target, valid, activation, with_entropy=with_entropy)
        if with_region and not options.get("background", True) and prediction.shape[1] == 1:
            raise ValueError("background=False leaves no class of a one-channel prediction")

    def validate_once() -> bool:
        check()
        return fused_applies(prediction, target)

    # Compiled, the sums are an operator and the rest is for the compiler; synced, others must be asked first.
    if not sync and fused_may_apply(prediction, target) and not torch.compiler.is_compiling():
        fused = _fused_kernels()
        found = fused.fused_mixture(
            prediction,
            target,
            activation=activation,
            valid=valid,
            form=counted,
            entropy=with_entropy,
            class_weight=None if class_weight is None else class_weights(class_weight, prediction),
            options=fused.MixtureOptions(alpha, beta, cross_entropy_weight, region_weight, **options),
            parts=parts,
            validate_once=validate_once,
        )
        if found is not None:
            return Losses(found[0], found[1:])
    check()
    sums = segmentation_sums(
        prediction, target, activation=activation, valid=valid, form=counted, entropy=with_entropy
    )
    weight = class_weights(class_weight, prediction)
    entropy_term = region_term = torch.zeros((), device=prediction.device)
    if with_entropy:
        entropy_term = cross_entropy_of(sums, weight, sync)
    if with_region:
        region_term = region_loss_of(sums, weight, alpha, beta, sync=sync, **options)
    total = region_term
    if parts or with_entropy or region_weight != 1:
        total = cross_entropy_weight * entropy_term + region_weight * region_term
    check_result(total, prediction)
    return Losses(total, (entropy_term, region_term) if parts else ())


def _check(
    prediction: Tensor,
    target: Tensor,
    valid: Tensor | None,
    activation: Activation,
    *,
    with_entropy: bool = False,
    ignore_index: int | None = None,
) -> Tensor | None:
    """Raise on what cannot be taken; `valid`, without the voxels of `ignore_index`."""
    check_prediction(prediction, activation)
    valid = check_target(prediction, target, activation=activation, valid=valid, ignore_index=ignore_index)
    if with_entropy:
        check_entropy(prediction, activation)
    return valid


@cache
def _fused_kernels() -> Any:
    """The module, imported when first needed, for Triton comes with it, and found quickly from then on."""
    from ..kernels import fused

    return fused


def _weighted_sum(weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()


def check_region_options(
    alpha: float, beta: float, form: Form, sync: bool, **options: Unpack[IndexOptions]
) -> None:
    """Raise on the first option of a region loss that is unknown or out of its range."""
    known = LossOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"a region loss has no option {name!r}; it has alpha, beta, {', '.join(known)}")
    over = options.get("over", "batch")
    check_choice("form", form, Form)
    check_choice("over", over, Over)
    check_choice("classes", options.get("classes", "all"), Classes)
    check_non_negative(alpha=alpha, beta=beta, smooth=options.get("smooth", 0.0))
    if alpha == beta == 0:
        raise ValueError("alpha and beta are both 0: nothing would be penalised")
    if not options.get("gamma", 1.0) > 0:
        raise ValueError(f"gamma must be greater than 0; got {options['gamma']}")
    if form == "squared" and alpha != beta:
        raise ValueError(
            f"form='squared' needs alpha = beta, or its index exceeds 1; got alpha={alpha}, beta={beta}: "
            "use form='min'"
        )
    if sync and over != "batch":
        raise ValueError(f"sync sums the statistics of the whole batch and needs over='batch'; got {over!r}")
