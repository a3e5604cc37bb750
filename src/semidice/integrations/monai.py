"""MONAI: metrics of soft labels for its loops and evaluators, and transforms from raters' masks to labels.

Scores come from `semidice.metrics`, labels from `semidice.labels`, and resizing from `data.resample`. Losses
need no adapter: name `semidice.SegmentationLoss` in a bundle.
"""

from ..errors import UserError
from ..extras import need

need("monai", "semidice.integrations.monai")

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch
from monai.data.meta_tensor import MetaTensor
from monai.data.utils import to_affine_nd
from monai.metrics.metric import CumulativeIterationMetric
from monai.metrics.utils import do_metric_reduction
from monai.transforms.transform import MapTransform, RandomizableTransform
from monai.transforms.utils import scale_affine
from monai.utils.enums import MetricReduction
from monai.utils.misc import fall_back_tuple
from monai.utils.module import look_up_option
from monai.utils.type_conversion import convert_to_dst_type
from torch import Tensor

from .. import labels
from ..arrays import check_unit_range, describe
from ..data.resample import resize_soft_label
from ..metrics import binarized_dice_score, calibration_error, soft_dice_score

_MAKERS = ("majority", "mean", "dice_weighted", "staple")


class SoftDiceMetric(CumulativeIterationMetric):
    """`metrics.soft_dice_score`, 1 - DML1, of each case and class: 1 only if prediction and label are equal.

    Call it with probabilities and a label, then `aggregate`. include_background, reduction, get_not_nans: as
    in MONAI's DiceMetric. options: of the score. `valid` of a call: bool (N, *space).

    >>> metric = SoftDiceMetric(include_background=False)
    >>> soft = torch.tensor([[[0.8, 0.3], [0.2, 0.7]]])
    >>> _ = metric(soft, soft)
    >>> float(metric.aggregate())
    1.0
    """

    score: ClassVar[Callable[..., Tensor]] = staticmethod(soft_dice_score)

    def __init__(
        self,
        *,
        include_background: bool = True,
        reduction: MetricReduction | str = "mean",
        get_not_nans: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.reduction = look_up_option(reduction, MetricReduction)
        self.include_background, self.get_not_nans, self.options = include_background, get_not_nans, options

    def _compute_tensor(self, y_pred: Tensor, y: Tensor | None = None, **references: Any) -> Tensor:
        if y is None:
            raise UserError(f"{type(self).__name__} needs y, the label; got None")
        scores = type(self).score(_plain(y_pred), _plain(y), **references, **self.options).float()
        scores = scores.reshape(len(scores), -1)
        return scores if self.include_background or scores.shape[1] == 1 else scores[:, 1:]

    def aggregate(self, reduction: MetricReduction | str | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The scores of all calls and processes, reduced; NaN where no score is defined."""
        scores = self.get_buffer()  # type: ignore[no-untyped-call]
        if scores is None:
            raise UserError(f"{type(self).__name__} has no scores: call it with predictions and labels")
        reduction = look_up_option(reduction or self.reduction, MetricReduction)
        reduced, num_defined = do_metric_reduction(scores, reduction)
        # MONAI's mean of nothing is 0, the worst score
        if reduction != MetricReduction.NONE:
            reduced = torch.where(num_defined > 0, reduced, torch.nan)
        return (reduced, num_defined) if self.get_not_nans else reduced


class BinarizedDiceMetric(SoftDiceMetric):
    """`metrics.binarized_dice_score`, BDice: Dice of both cut at 0.1, ..., 0.9, averaged."""

    score = staticmethod(binarized_dice_score)


class RaterCalibrationMetric(SoftDiceMetric):
    """`metrics.calibration_error` of the top class; the label is the raters' mean. One number per case."""

    score = staticmethod(calibration_error)


class RatersToSoftLabeld(MapTransform):
    """Adds a soft label (C, *space) made of raters' masks, with the affine of the first mask.

    keys: one key with masks (R, *space), or one key per rater with (1, *space), of class indices. With
    allow_missing_keys, a key that a case lacks is a rater who did not look at it. maker: majority, mean,
    dice_weighted, staple, or a function such as those of `semidice.labels`. background: False leaves channel
    0 out, for a sigmoid network. options: of the maker.
    """

    def __init__(
        self,
        keys: Any,
        label_key: str = "label",
        maker: str | Callable[..., Tensor] = "mean",
        *,
        num_classes: int = 2,
        background: bool = True,
        allow_missing_keys: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        if not callable(maker) and maker not in _MAKERS:
            raise UserError(
                f"maker must be one of {', '.join(_MAKERS)}, a function, or RandRaterLabeld; got {maker!r}"
            )
        self.maker = maker if callable(maker) else getattr(labels, f"{maker}_label")
        self.label_key, self.background = label_key, background
        self.options = {"num_classes": num_classes, **options}

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        masks = [(key, data[key]) for key in self.key_iterator(dict(data))]
        if not masks:
            raise UserError(f"a case has none of the raters' keys {', '.join(map(str, self.keys))}")
        first_key, first = masks[0]
        for key, mask in masks[1:]:
            if mask.shape[1:] != first.shape[1:] or not _aligned(mask, first):
                raise UserError(
                    f"masks {key!r} and {first_key!r} need one shape and affine; got {tuple(mask.shape)} and "
                    f"{tuple(first.shape)}: use ResampleToMatchd with mode='nearest'"
                )
        label = self.maker(torch.cat([_class_indices(key, mask) for key, mask in masks]), **self.options)
        label = label if self.background else label[1:]
        return {**data, self.label_key: convert_to_dst_type(label, first, dtype=torch.float32)[0]}


class RandRaterLabeld(RandomizableTransform, RatersToSoftLabeld):
    """Adds the one-hot label of one rater, drawn again at every call; options as in `RatersToSoftLabeld`."""

    def __init__(self, keys: Any, label_key: str = "label", **options: Any) -> None:
        RandomizableTransform.__init__(self)
        RatersToSoftLabeld.__init__(self, keys, label_key, labels.random_rater_label, **options)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        self.options["generator"] = int(self.R.randint(2**31 - 1))
        return RatersToSoftLabeld.__call__(self, data)


class ResizeSoftLabeld(MapTransform):
    """Resizes soft labels (C, *space), which stay probabilities; see `data.resample.resize_soft_label`.

    spatial_size: a number, or one per axis; -1 keeps an axis. valid_key: bool (1, *space) or (*space), False
    for voxels that do not count, such as padding; it is resized, too.
    """

    def __init__(
        self, keys: Any, spatial_size: Any, valid_key: str | None = None, allow_missing_keys: bool = False
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.spatial_size, self.valid_key = spatial_size, valid_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        resized = dict(data)
        for key in self.key_iterator(resized):
            label, soft = data[key], _plain(torch.as_tensor(data[key]))
            if not soft.is_floating_point() or soft.ndim < 2:
                raise UserError(f"{key!r} must be a soft label, floats (C, *space); got {describe(soft)}")
            check_unit_range(repr(key), soft)
            old_size = tuple(soft.shape[1:])
            size = fall_back_tuple(self.spatial_size, old_size)
            flags = None if self.valid_key is None else torch.as_tensor(data[self.valid_key])
            valid = None if flags is None else _plain(flags).cpu().bool().reshape(old_size).numpy()
            new, new_valid = resize_soft_label(soft.cpu().numpy(), size, valid=valid)
            resized[key] = convert_to_dst_type(new, label, dtype=torch.float32)[0]
            if isinstance(label, MetaTensor):
                scale = to_affine_nd(len(label.affine) - 1, scale_affine(old_size, size))
                resized[key].affine = label.affine @ torch.as_tensor(scale, dtype=label.affine.dtype)
            if flags is not None:
                new_flags = torch.as_tensor(new_valid).reshape(*flags.shape[: -len(size)], *size)
                resized[self.valid_key] = new_flags.to(flags.device)
        return resized


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def _aligned(*masks: Any) -> bool:
    affines = [mask.affine.double() for mask in masks if isinstance(mask, MetaTensor)]
    return all(torch.allclose(affine, affines[0], atol=1e-3) for affine in affines)


def _class_indices(key: Hashable, mask: Any) -> Tensor:
    """The mask as integers; MONAI reads files as floats."""
    values = _plain(torch.as_tensor(mask))
    if not values.is_floating_point():
        return values
    if bool((values % 1).any()):
        raise UserError(
            f"{key!r} must hold class indices; got {describe(values)} with values such as "
            f"{float(values[values % 1 != 0][0]):.4g}: resample masks with mode='nearest'"
        )
    return values.long()
