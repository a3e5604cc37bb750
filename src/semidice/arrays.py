"""The axes of arrays, and the checks that every loss, label maker and metric applies to its arguments.

Axes: N case or image, C class, R rater, K key point, *space the voxel axes (none, one, two or three).

The target contract, the same everywhere:
  integers (N, *space)     class indices
  floats   (N, C, *space)  soft labels, or one mask per channel for sigmoid networks
  `valid`  (N, *space)     bool, False for a voxel that does not count; or `ignore_index` for class indices
`read_target` takes other shapes whose meaning is certain, and returns one of these two:
  integers (N, 1, *space)           class indices, if the prediction has classes: softmax and C > 1
  integers or bool (N, C, *space)   one-hot if the prediction has classes: each voxel must have exactly one 1;
                                    one mask of 0 and 1 per channel for sigmoid networks
  any type (N, *space)              the mask of a one-channel prediction; integers may hold `ignore_index`
Anything else is a ValueError that says what was passed and what to do.

Shapes and dtypes are always checked. Values are checked only if reading them needs no device
synchronisation: on the CPU, outside a compiled graph. One exception: on another device, integers or bool that
stand for a float target are read when they come for the first time in a shape and type.
`check_all_values(True)` checks every value on every device, to find an error; it slows a GPU down.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

__all__ = ["check_all_values"]

Activation = Literal["softmax", "sigmoid", "none"]
# a network halves an image up to five times, so its sides must be multiples of this
SIZE_MULTIPLE = 32
# whether a target sums to one is looked up at this many voxels at most, so that a step is not slower
MAX_SUMMED_VOXELS = 2**14
FLOAT_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER_TYPES = (torch.int64, torch.uint8, torch.int32, torch.int16, torch.int8, torch.bool)

_checks_all = False


def check_all_values(enabled: bool) -> None:
    """Check every value of every argument, on a GPU too, for this process; off by default.

    A GPU then waits for each check. Without this, only the CPU checks values, and whether a soft target sums
    to one is looked up at `MAX_SUMMED_VOXELS` voxels.
    """
    global _checks_all
    if not isinstance(enabled, bool):
        raise ValueError(f"check_all_values takes True or False; got {enabled!r}")
    _checks_all = enabled


def checks_all_values() -> bool:
    """Whether `check_all_values` is on."""
    return _checks_all


def describe(tensor: object) -> str:
    """Dtype and shape of a tensor for an error message: `float32 (2, 3, 64, 64)`."""
    if isinstance(tensor, np.ndarray):
        return f"a numpy array of {tensor.dtype} {tensor.shape}"
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise unless `value` is one of the strings of the Literal type `choices`."""
    known = choices.__args__
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")


def check_number(**named: object) -> None:
    """Raise unless every named argument is a finite number."""
    for name, value in named.items():
        if not isinstance(value, (float, int, Real)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number; got {value!r}")


def check_whole_number(**named: object) -> None:
    """Raise unless every named argument is an integer; True and False are not."""
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, (int, Integral)):
            raise ValueError(f"{name} must be a whole number; got {value!r}")


def check_tensor(name: str, tensor: object, way_out: str = "use torch.as_tensor") -> None:
    """Raise unless `tensor` is a tensor that every operation can read: dense, with values, of a usual type.

    way_out: what to do about something that is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor; got {describe(tensor)}: {way_out}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse, {describe(tensor)}: use .to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the device meta and has no values, {describe(tensor)}: give it some")
    if tensor.dtype not in FLOAT_TYPES and tensor.dtype not in INTEGER_TYPES:
        way_out = ".float()" if tensor.dtype.is_floating_point else ".long() or .float()"
        raise ValueError(f"{name} has a type that cannot be used, {describe(tensor)}: use {way_out}")


def values_are_readable(tensor: Tensor) -> bool:
    """Whether values can be read without a device synchronisation, a graph break or an error of vmap.

    With `check_all_values`, a synchronisation is no reason not to read them.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.device.type == "cpu" or (_checks_all and _may_wait_for(tensor))


def check_unit_range(name: str, tensor: Tensor, valid: Tensor | None = None, *, hint: str = "") -> None:
    """Raise unless every valid value lies in [0, 1]; NaN does not. No check if values are not readable.

    hint: what to do about other values, for the message.
    """
    if not values_are_readable(tensor):
        return
    if valid is not None:
        tensor = tensor.masked_fill(~valid.unsqueeze(1), 0)
    low, high = tensor.detach().aminmax()
    if low >= 0 and high <= 1:
        return
    # NaN fails both comparisons
    if low.isnan():
        num_nan = int(tensor.isnan().sum())
        raise ValueError(
            f"{name} holds NaN in {num_nan} of {tensor.numel()} values; every value must lie in [0, 1]"
        )
    raise ValueError(f"{name} must lie in [0, 1]; got values from {low:.4g} to {high:.4g}{hint}")


def check_prediction(prediction: Tensor, activation: Activation | None = None) -> None:
    """Raise unless `prediction` is a non-empty float tensor (N, C, *space) that fits `activation`.

    activation: None if the caller takes probabilities only and has no such option.
    """
    if activation is not None:
        check_choice("activation", activation, Activation)
    check_tensor("prediction", prediction)
    if not prediction.is_floating_point() or prediction.ndim < 2:
        raise ValueError(f"prediction must be a float tensor (N, C, *space); got {describe(prediction)}")
    if prediction.numel() == 0:
        raise ValueError(f"prediction is empty: {describe(prediction)}; skip batches without voxels")
    if activation == "softmax" and prediction.size(1) == 1:
        raise ValueError(
            f"softmax over one channel is 1 everywhere; got prediction {describe(prediction)}: "
            "use activation='sigmoid', or two channels"
        )
    if activation is None:
        check_unit_range("prediction", prediction, hint=": apply softmax or sigmoid to logits")
    elif activation == "none":
        check_unit_range("prediction", prediction, hint=": for logits, use activation='softmax' or 'sigmoid'")


def check_target(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation | None = None,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    has_ignore_index: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Raise unless `target` and `valid` follow the contract; return both as `read_target` does.

    has_ignore_index: whether the caller has that option, so that a message may name it.
    """
    if isinstance(target, Tensor) and target.device != prediction.device:
        raise ValueError(
            f"target is on {target.device} but prediction on {prediction.device}: move one of them"
        )
    check_tensor("target", target)
    if valid is not None:
        check_valid(prediction, valid)
    target, counted = read_target(
        prediction, target, activation=activation, valid=valid, ignore_index=ignore_index
    )
    if target.is_floating_point():
        _check_soft_target(prediction, target)
        check_unit_range("target", target, counted)
        if activation == "softmax":
            _check_sums_to_one(target, counted)
        return target, counted
    _check_class_map(prediction, target, activation)
    way_out = ""
    if ignore_index is None:
        option = "ignore_index or valid" if has_ignore_index else "valid"
        way_out = f": pass {option} if one of them means 'do not count'"
    _check_class_range(target, counted, prediction.shape[1], way_out)
    return target, counted


def read_target(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation | None = None,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`target` as class indices (N, *space) or floats (N, C, *space), and `valid` without the ignored voxels.

    A target in one of these two forms is returned unchanged, with any size of space, and so is one that
    `check_target` will refuse. Integers and bool in place of floats get the prediction's type.

    >>> labels = torch.tensor([[[0, 1, 1]]])
    >>> read_target(torch.zeros(1, 2, 3), labels)[0]
    tensor([[0, 1, 1]])
    >>> read_target(torch.zeros(1, 1, 3), labels > 0, activation="sigmoid")[0]
    tensor([[[0., 1., 1.]]])
    """
    are_tensors = isinstance(target, Tensor) and isinstance(prediction, Tensor)
    if not are_tensors or prediction.ndim < 2 or not prediction.is_floating_point():
        return target, valid
    if target.layout is not torch.strided or target.dtype not in FLOAT_TYPES + INTEGER_TYPES:
        return target, valid
    num_channels, has_channels = prediction.shape[1], target.ndim == prediction.ndim
    if num_channels == 1 and target.ndim == prediction.ndim - 1:
        target, has_channels = target.unsqueeze(1), True
    if target.is_floating_point() or not has_channels:
        return target, fold_ignored(target, valid, ignore_index)
    has_classes = activation != "sigmoid" and num_channels > 1
    if has_classes and target.shape[1] == 1 and target.dtype != torch.bool:
        target = target.squeeze(1)
        return target, fold_ignored(target, valid, ignore_index)
    if target.shape[1] != num_channels or target.is_complex() or target.numel() == 0:
        return target, valid
    if num_channels == 1:
        valid = fold_ignored(target.squeeze(1), valid, ignore_index)
    elif ignore_index is not None:
        raise ValueError(
            f"ignore_index={ignore_index} is for class indices, or for the mask of one channel; "
            f"got {describe(target)}: pass valid=..., bool (N, *space)"
        )
    _check_zeros_and_ones(target, valid, one_hot=has_classes)
    return target.to(prediction.dtype), valid


# kinds of targets that were read on a device: shape, type, device, and whether they must be one-hot
_read_kinds: set[tuple[object, ...]] = set()


def _check_zeros_and_ones(target: Tensor, valid: Tensor | None, *, one_hot: bool) -> None:
    """Raise unless the valid voxels hold 0 and 1 only and, if `one_hot`, exactly one 1 each.

    On a device other than the CPU this waits for the device, so only the first target of a kind is read.
    """
    if valid is not None:
        check_valid(target, valid)
    kind = (target.shape, target.dtype, target.device, one_hot)
    if not values_are_readable(target) and (kind in _read_kinds or not _may_wait_for(target)):
        return
    counted = target if valid is None else target.masked_fill(~valid.unsqueeze(1), 0)
    low, high = (0, 1) if target.dtype == torch.bool else (int(bound) for bound in counted.aminmax())
    if low < 0 or high > 1:
        meaning = "one-hot classes" if one_hot else "one mask per channel"
        raise ValueError(
            f"an integer target with the channels of the prediction holds {meaning}, 0 and 1; got "
            f"{describe(target)} with values from {low} to {high}: use floats for a soft label"
        )
    if one_hot:
        wrong = counted.sum(1) != 1
        num_wrong = int((wrong if valid is None else wrong & valid).sum())
        if num_wrong:
            raise ValueError(
                f"an integer or bool target with a class axis must be one-hot; got {describe(target)} where "
                f"{num_wrong} voxels hold no class or several: use .float() if they are a soft label, and "
                "valid for voxels that do not count"
            )
    if target.is_cuda:
        _read_kinds.add(kind)


def _may_wait_for(tensor: Tensor) -> bool:
    """Whether values can be read at all: not in a compiled or captured graph, under vmap or without data."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


def fold_ignored(target: Tensor, valid: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """`valid` without the voxels whose class index is `ignore_index`; an error for a soft target."""
    if ignore_index is None:
        return valid
    check_whole_number(ignore_index=ignore_index)
    if target.is_floating_point():
        raise ValueError(
            f"ignore_index={ignore_index} is for integer targets; got a soft label {describe(target)}: "
            "pass valid=..., bool (N, *space)"
        )
    lowest, highest = _limits(target.dtype)
    if not lowest <= ignore_index <= highest:
        raise ValueError(
            f"ignore_index={ignore_index} cannot occur in a target of {describe(target)}, whose values are "
            f"{lowest} to {highest}: use target.long(), or the value that the target holds"
        )
    is_flags = isinstance(valid, Tensor) and valid.dtype == torch.bool
    if valid is not None and (not is_flags or valid.shape != target.shape):
        raise ValueError(
            f"valid must be bool {tuple(target.shape)}, the shape of the target; got {describe(valid)}"
        )
    counted = target != ignore_index
    return counted if valid is None else valid & counted


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def check_valid(channels: Tensor, valid: Tensor) -> None:
    """Raise unless `valid` is bool (N, *space), for a prediction or target (N, C, *space)."""
    space_shape = (channels.shape[0], *channels.shape[2:])
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != space_shape:
        raise ValueError(
            f"valid must be bool {space_shape}, one flag per voxel and no channel axis; got {describe(valid)}"
        )
    if valid.device != channels.device:
        raise ValueError(f"valid is on {valid.device} but prediction on {channels.device}: move one of them")


def _check_soft_target(prediction: Tensor, target: Tensor) -> None:
    if target.shape != prediction.shape:
        got = f"got target {describe(target)} for prediction {describe(prediction)}"
        if target.shape == prediction.shape[:1] + prediction.shape[2:]:
            raise ValueError(
                f"a float target needs a class axis; {got}: use .long() if it holds class indices"
            )
        if target.shape == (prediction.shape[0], 1, *prediction.shape[2:]):
            raise ValueError(
                f"a float target needs the channels of the prediction; {got}: use .long() if it holds "
                "class indices, torch.cat([1 - target, target], 1) if it is the probability of the foreground"
            )
        if target.ndim == prediction.ndim and target.shape[2:] == prediction.shape[2:]:
            raise ValueError(f"target and prediction differ in images or channels; {got}")
        raise ValueError(f"target and prediction differ in shape; {got}")


def _check_sums_to_one(target: Tensor, valid: Tensor | None) -> None:
    """Raise unless the classes of a soft target sum to one, at the voxels that are looked up."""
    if not values_are_readable(target):
        return
    soft = target.detach().flatten(2) if target.ndim > 2 else target.detach().unsqueeze(2)
    step = 1 if _checks_all else max(1, soft.shape[0] * soft.shape[2] // MAX_SUMMED_VOXELS)
    # float32: half precision would round the sum itself
    total = soft[:, :, ::step].sum(1, dtype=torch.promote_types(target.dtype, torch.float32))
    if valid is not None:
        total = torch.where(valid.reshape(len(soft), -1)[:, ::step], total, 1)
    low, high = total.aminmax()
    # bfloat16 rounds each probability by up to 0.4 %
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 2e-2
    if not (low >= 1 - tolerance and high <= 1 + tolerance):
        raise ValueError(
            f"a soft target of a softmax must sum to one over its classes; got {describe(target)} with sums "
            f"from {low:.4g} to {high:.4g}: divide it by its sum, mark padding in valid, or use "
            "activation='sigmoid' if each channel is a separate mask"
        )


def _check_class_map(prediction: Tensor, target: Tensor, activation: Activation | None) -> None:
    got = f"got target {describe(target)} for prediction {describe(prediction)}"
    if target.dtype == torch.bool or target.is_complex():
        raise ValueError(
            f"target must hold class indices, one-hot classes or soft labels; {got}: "
            "use .long() for class indices, .float() for soft labels"
        )
    is_map = target.shape == prediction.shape[:1] + prediction.shape[2:]
    if is_map and activation != "sigmoid" and prediction.size(1) > 1:
        return
    if activation == "sigmoid" or prediction.shape[1] == 1:
        raise ValueError(
            "a sigmoid or one-channel prediction needs one mask per channel, (N, C, *space); " + got
        )
    raise ValueError(f"class indices must have shape (N, *space) of the prediction; {got}")


def _check_class_range(target: Tensor, valid: Tensor | None, num_classes: int, way_out: str) -> None:
    if not values_are_readable(target):
        return
    low, high = (target if valid is None else target.masked_fill(~valid, 0)).aminmax()
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"target holds class indices {int(low)} to {int(high)}, but there are {num_classes} classes"
            + way_out
        )


class NotFiniteError(ValueError):
    """A loss is NaN; a training stops and stores the weights before it."""


def check_result(loss: Tensor, prediction: Tensor) -> Tensor:
    """Return `loss`; raise if it is NaN. No check if values are not readable."""
    if values_are_readable(loss) and bool(loss.detach().isnan()):
        raise NotFiniteError(
            f"the loss is NaN: prediction {describe(prediction)} holds {int(prediction.isnan().sum())} NaN "
            f"and {int(prediction.isinf().sum())} infinite values"
        )
    return loss


def check_non_negative(**named: float) -> None:
    """Raise unless every named number is finite and zero or more."""
    check_number(**named)
    for name, value in named.items():
        if value < 0:
            raise ValueError(f"{name} must be 0 or more; got {value}")


def class_weights(weight: Sequence[float] | Tensor | None, prediction: Tensor) -> Float[Tensor, " C"]:
    """Float32 weights of the C classes on the prediction's device, checked; ones for None."""
    if weight is None:
        return torch.ones(prediction.shape[1], device=prediction.device)
    weight = read_weights(weight).to(prediction.device)
    if tuple(weight.shape) != (prediction.shape[1],):
        raise ValueError(
            f"class_weight needs one number for each of the {prediction.shape[1]} classes; "
            f"got shape {tuple(weight.shape)}"
        )
    return weight


def read_numbers(name: str, numbers: object, dtype: torch.dtype = torch.float64) -> Tensor:
    """A list of numbers, or of lists of them, as a tensor; a ValueError names what is not a number."""
    try:
        return torch.as_tensor(numbers, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be numbers; got {numbers!r}") from None


def read_weights(weight: Sequence[float] | Tensor) -> Float[Tensor, " C"]:
    """Weights of classes in float32: finite, 0 or more, and not all 0."""
    weight = read_numbers("class_weight", weight, torch.float32)
    if values_are_readable(weight) and not (
        bool((weight >= 0).all()) and weight.numel() and 0 < float(weight.sum()) < math.inf
    ):
        raise ValueError(f"class_weight must be finite, 0 or more and not all 0; got {weight.tolist()}")
    return weight


def one_hot(class_map: Tensor, num_classes: int) -> UInt8[Tensor, "N C *space"]:
    """One-hot bytes of a class map (N, *space); an index that is not a class gives zeros only."""
    classes = torch.arange(num_classes, device=class_map.device, dtype=class_map.dtype)
    classes = classes.view(-1, *[1] * (class_map.ndim - 1))
    return (class_map.unsqueeze(1) == classes).to(torch.uint8)


def downsample_target(
    target: Tensor, valid: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """`target` and `valid` at the size of an output of `shape` (N, C, *space), averaged by area.

    A coarse label is the mean over its valid voxels; it is valid if it has one. A target that already has
    the size is returned unchanged, also if it holds class indices.
    """
    size, num_leading = shape[2:], 2 if target.is_floating_point() else 1
    fine = target.shape[num_leading:]
    # check_target will refuse a wrong number of axes, with a better message
    if fine == size or len(fine) != len(size):
        return target, valid
    if any(coarse > full for coarse, full in zip(size, fine, strict=True)):
        raise ValueError(
            f"an output of size {tuple(size)} is finer than the target {describe(target)}; "
            "outputs of deep supervision must be as large as the target or smaller"
        )
    soft = target if target.is_floating_point() else one_hot(target, shape[1])
    soft = soft.to(torch.promote_types(soft.dtype, torch.float32))
    if valid is None:
        return F.interpolate(soft, size, mode="area"), None
    share = F.interpolate(valid.unsqueeze(1).to(soft.dtype), size, mode="area")
    mean = F.interpolate(torch.where(valid.unsqueeze(1), soft, 0), size, mode="area")
    return mean / torch.where(share > 0, share, 1), share.squeeze(1) > 0


def nan_without_voxels(scores: Tensor, valid: Tensor | None) -> Tensor:
    """The scores (N,) or (N, C), with NaN for a case that has no valid voxel."""
    if valid is None:
        return scores
    has_voxels = valid.flatten(1).any(1) if valid.ndim > 1 else valid
    return torch.where(has_voxels.view(-1, *[1] * (scores.ndim - 1)), scores, torch.nan)
