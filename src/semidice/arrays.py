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
stand for a float target are read, by a module in its first batch only. To find an error in a batch on a GPU,
call the loss with `.cpu()` of it.
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

Activation = Literal["softmax", "sigmoid", "none"]
# a network halves an image up to five times, so its sides must be multiples of this
SIZE_MULTIPLE = 32
# whether a target sums to one is looked up at this many voxels at most, so that a step is not slower
MAX_SUMMED_VOXELS = 2**14
# more channels than this, with one axis of space, are images without a class axis
MAX_CHANNELS_1D = 32
WAYS_OUT = (
    "apply softmax; take one channel, prob[:, c : c + 1], or give images (N, H, W) a class axis, "
    ".unsqueeze(1); for channels that may overlap, make masks by decide(prob, 'threshold:0.5', "
    "exclusive=False)"
)
FLOAT_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER_TYPES = (torch.int64, torch.uint8, torch.int32, torch.int16, torch.int8, torch.bool)


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


def values_are_readable(tensor: Tensor, *, waits: bool = False) -> bool:
    """Whether values can be read without a device synchronisation, a graph break or an error of vmap.

    waits: also if reading waits for a GPU, unless a CUDA graph is being captured.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.is_cuda:
        return waits and not torch.cuda.is_current_stream_capturing()
    return tensor.device.type == "cpu"


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


def check_prob(prob: Tensor, valid: Tensor | None = None, *, exclusive: bool = True) -> None:
    """Raise unless `prob` (N, C, *space) can be decided or measured: probabilities, or bool masks.

    exclusive: several channels of probabilities must sum to one; masks may overlap. Values of voxels that are
    not valid do not matter. Checked on every device, because a wrong input gives a wrong mask or volume.
    """
    check_tensor("prob", prob)
    is_mask = prob.dtype == torch.bool
    if not (is_mask or prob.is_floating_point()) or prob.ndim < 2 or prob.numel() == 0:
        raise ValueError(
            f"prob must be floats in [0, 1] or bool masks, (N, C, *space) with a voxel; got {describe(prob)}"
        )
    if valid is not None:
        check_valid(prob, valid)
    if prob.ndim == 3 and prob.shape[1] > MAX_CHANNELS_1D and (is_mask or not exclusive):
        raise ValueError(
            f"{describe(prob)} is read as {prob.shape[1]} channels along a line: give images (N, H, W) a "
            "class axis, .unsqueeze(1)"
        )
    if is_mask:
        return
    if values_are_readable(prob):
        check_unit_range("prob", prob, valid, hint=": apply softmax or sigmoid to logits")
    elif values_are_readable(prob, waits=True):
        counted = prob if valid is None else prob.masked_fill(~valid.unsqueeze(1), 0)
        ends = torch.stack(counted.detach().aminmax()).cpu()
        check_unit_range("prob", ends, hint=": apply softmax or sigmoid to logits")
    if exclusive:
        check_distribution("prob", prob, valid, way_out=WAYS_OUT, waits=True)


def read_target(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation | None = None,
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    waits: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`target` as class indices (N, *space) or floats (N, C, *space), and `valid` without the ignored voxels.

    A ValueError says what does not follow the contract. A target in one of these two forms is returned
    unchanged; integers and bool in place of floats get the prediction's type.
    waits: whether these may be read on a GPU, which waits for it; False after the first batch of a module.

    >>> labels = torch.tensor([[[0, 1, 1]]])
    >>> read_target(torch.zeros(1, 2, 3), labels)[0]
    tensor([[0, 1, 1]])
    >>> read_target(torch.zeros(1, 1, 3), labels > 0, activation="sigmoid")[0]
    tensor([[[0., 1., 1.]]])
    """
    check_tensor("target", target)
    if target.device != prediction.device:
        raise ValueError(
            f"target is on {target.device} but prediction on {prediction.device}: move one of them"
        )
    if valid is not None:
        check_valid(prediction, valid)
    num_channels, is_soft = prediction.shape[1], target.is_floating_point()
    has_classes = activation != "sigmoid" and num_channels > 1
    if num_channels == 1 and target.ndim == prediction.ndim - 1:
        target = target.unsqueeze(1)
    is_index = not is_soft and target.dtype != torch.bool
    if is_index and has_classes and target.ndim == prediction.ndim and target.shape[1] == 1:
        target = target.squeeze(1)
    if is_soft:
        if ignore_index is not None:
            raise ValueError(
                f"ignore_index={ignore_index} is for integer targets; got a soft label {describe(target)}: "
                "pass valid=..., bool (N, *space)"
            )
        _check_soft_target(prediction, target, valid, activation)
        return target, valid
    if target.shape != prediction.shape:
        _check_class_map(prediction, target, activation)
        valid = _without_ignored(target, valid, ignore_index)
        _check_class_range(target, valid, num_channels, has_ignored=ignore_index is not None)
        return target, valid
    if num_channels == 1:
        valid = _without_ignored(target.squeeze(1), valid, ignore_index)
    elif ignore_index is not None:
        raise ValueError(
            f"ignore_index={ignore_index} is for class indices, or for the mask of one channel; "
            f"got {describe(target)}: pass valid=..., bool (N, *space)"
        )
    if values_are_readable(target, waits=waits):
        _check_zeros_and_ones(target, valid, one_hot=has_classes)
    return target.to(prediction.dtype), valid


def _check_zeros_and_ones(target: Tensor, valid: Tensor | None, *, one_hot: bool) -> None:
    """Raise unless the valid voxels hold 0 and 1 only and, if `one_hot`, exactly one 1 each."""
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


def _without_ignored(target: Tensor, valid: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """`valid` without the voxels whose class index is `ignore_index`."""
    if ignore_index is None:
        return valid
    check_whole_number(ignore_index=ignore_index)
    limits = torch.iinfo(torch.uint8 if target.dtype == torch.bool else target.dtype)
    highest = 1 if target.dtype == torch.bool else limits.max
    if not limits.min <= ignore_index <= highest:
        raise ValueError(
            f"ignore_index={ignore_index} cannot occur in a target of {describe(target)}, whose values are "
            f"{limits.min} to {highest}: use target.long(), or the value that the target holds"
        )
    counted = target != ignore_index
    return counted if valid is None else valid & counted


def check_valid(channels: Tensor, valid: Tensor) -> None:
    """Raise unless `valid` is bool (N, *space), for a prediction or target (N, C, *space)."""
    space_shape = (channels.shape[0], *channels.shape[2:])
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != space_shape:
        raise ValueError(
            f"valid must be bool {space_shape}, one flag per voxel and no channel axis; got {describe(valid)}"
        )
    if valid.device != channels.device:
        raise ValueError(f"valid is on {valid.device} but prediction on {channels.device}: move one of them")


def _check_soft_target(
    prediction: Tensor, target: Tensor, valid: Tensor | None, activation: Activation | None
) -> None:
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
    check_unit_range("target", target, valid)
    if activation == "softmax":
        check_distribution(
            "a soft target of a softmax",
            target,
            valid,
            way_out="divide it by its sum, mark padding in valid, or use activation='sigmoid' if each "
            "channel is a separate mask",
        )


def check_distribution(
    name: str,
    prob: Tensor,
    valid: Tensor | None = None,
    *,
    way_out: str = "apply softmax to logits",
    waits: bool = False,
) -> None:
    """Raise unless several classes of `prob` (N, C, *space) sum to one, at the voxels that are looked up.

    way_out: what to do about other sums, for the message. waits: also where reading waits for a GPU.
    """
    if prob.shape[1] == 1 or not values_are_readable(prob, waits=waits):
        return
    low, high = _sums_of_classes(prob, valid).aminmax()
    # bfloat16 rounds each probability by up to 0.4 %
    if not (low >= 1 - 2e-2 and high <= 1 + 2e-2):
        raise ValueError(
            f"{name} must sum to one over its classes; got {describe(prob)} with sums from {low:.4g} to "
            f"{high:.4g}: {way_out}"
        )


def is_distribution(prob: Tensor) -> bool:
    """Whether all values lie in [0, 1] and sum to one over the classes; reads values on any device."""
    low, high = prob.detach().aminmax()
    return bool(low >= 0) and bool(high <= 1) and bool((_sums_of_classes(prob, None) - 1).abs().max() < 1e-2)


def _sums_of_classes(prob: Tensor, valid: Tensor | None) -> Tensor:
    """Sums over the classes at some voxels, 1 where a voxel is not valid."""
    prob = prob.detach().flatten(2) if prob.ndim > 2 else prob.detach().unsqueeze(2)
    step = max(1, prob.shape[0] * prob.shape[2] // MAX_SUMMED_VOXELS)
    # float32: half precision would round the sum itself
    total = prob[:, :, ::step].sum(1, dtype=torch.promote_types(prob.dtype, torch.float32))
    return total if valid is None else torch.where(valid.reshape(len(prob), -1)[:, ::step], total, 1)


def _check_class_map(prediction: Tensor, target: Tensor, activation: Activation | None) -> None:
    got = f"got target {describe(target)} for prediction {describe(prediction)}"
    if activation == "sigmoid" or prediction.shape[1] == 1:
        raise ValueError(
            "a sigmoid or one-channel prediction needs one mask per channel, (N, C, *space); " + got
        )
    if target.dtype == torch.bool:
        raise ValueError(
            f"target must hold class indices, one-hot classes or soft labels; {got}: "
            "use .long() for class indices, .float() for soft labels"
        )
    if target.shape != prediction.shape[:1] + prediction.shape[2:]:
        raise ValueError(f"class indices must have shape (N, *space) of the prediction; {got}")


def _check_class_range(target: Tensor, valid: Tensor | None, num_classes: int, *, has_ignored: bool) -> None:
    if not values_are_readable(target):
        return
    low, high = (target if valid is None else target.masked_fill(~valid, 0)).aminmax()
    if low < 0 or high >= num_classes:
        way_out = ": leave out voxels that do not count by ignore_index or valid"
        raise ValueError(
            f"target holds class indices {int(low)} to {int(high)}, but there are {num_classes} classes"
            + ("" if has_ignored else way_out)
        )


class NotFiniteError(ValueError):
    """A loss is NaN; a training stops and stores the weights before it."""


def check_result(loss: Tensor, prediction: Tensor) -> Tensor:
    """Return `loss`; raise if it is NaN. No check if values are not readable."""
    if values_are_readable(loss) and bool(loss.detach().isnan()):
        num_infinite = int(prediction.isinf().sum())
        raise NotFiniteError(
            f"the loss is NaN: prediction {describe(prediction)} holds {int(prediction.isnan().sum())} NaN "
            f"and {num_infinite} infinite values"
            + (": mask a class by a large number such as -1e4, not by -inf" if num_infinite else "")
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


def as_fine(prediction: Tensor, target: Tensor) -> Tensor:
    """A stand-in for a prediction in the size of its target, for `read_target`: it has no values."""
    num_axes = prediction.ndim - 2
    if not isinstance(target, Tensor) or target.ndim not in (num_axes + 1, num_axes + 2):
        return prediction
    space = target.shape[target.ndim - num_axes :]
    one_element = prediction.detach().flatten()[:1].view([1] * prediction.ndim)
    return one_element.expand(*prediction.shape[:2], *space)


def downsample_target(
    target: Tensor, valid: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """`target` and `valid` at the size of an output of `shape` (N, C, *space), averaged by area.

    A coarse label is the mean over its valid voxels; it is valid if it has one. A target that already has
    the size is returned unchanged, also if it holds class indices.
    """
    size, num_leading = shape[2:], 2 if target.is_floating_point() else 1
    fine = target.shape[num_leading:]
    if fine == size:
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
