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

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from .options import check_value

Activation = Literal["softmax", "sigmoid", "none"]
# a network halves an image up to five times, so its sides must be multiples of this
SIZE_MULTIPLE = 32
# more channels than this, with one axis of space, are images without a class axis
MAX_CHANNELS_1D = 32
WAYS_OUT = (
    "apply softmax; take one channel, prob[:, c : c + 1], or give images (N, H, W) a class axis, "
    ".unsqueeze(1); for channels that may overlap, make masks by decide(prob, 'threshold:0.5', "
    "exclusive=False)"
)
SOFT_WAYS_OUT = (
    "divide it by its sum, mark padding in valid, or use activation='sigmoid' if each channel is a "
    "separate mask"
)
# whether a target sums to one is looked up at this many voxels at most, so that a step is not slower
_MAX_SUMMED_VOXELS = 2**14


def describe(tensor: object) -> str:
    """Dtype and shape of a tensor for an error message: `float32 (2, 3, 64, 64)`."""
    if isinstance(tensor, np.ndarray):
        return f"a numpy array of {tensor.dtype} {tensor.shape}"
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def check_tensor(name: str, tensor: object, way_out: str = "use torch.as_tensor") -> None:
    """Raise unless `tensor` is one, of integers, bool or real numbers; way_out: what to do otherwise."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor; got {describe(tensor)}: {way_out}")
    if tensor.is_complex() or tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be dense and real; got {describe(tensor)}: use .to_dense() or .real")


def values_are_readable(tensor: Tensor, *, waits: bool = False) -> bool:
    """Whether values can be read without a device synchronisation, a graph break or an error of vmap.

    waits: also if reading waits for a GPU, unless a CUDA graph is being captured.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.is_cuda:
        return waits and not torch.cuda.is_current_stream_capturing()
    return tensor.device.type == "cpu"


def check_unit_range(
    name: str, tensor: Tensor, valid: Tensor | None = None, *, hint: str = "", waits: bool = False
) -> None:
    """Raise unless every valid value lies in [0, 1]; NaN does not. No check if values are not readable.

    hint: what to do about other values, for the message. waits: also where reading waits for a GPU.
    """
    if not values_are_readable(tensor, waits=waits):
        return
    if valid is not None:
        tensor = tensor.masked_fill(~valid.unsqueeze(1), 0)
    low, high = torch.stack(tensor.detach().aminmax()).tolist()
    # NaN fails both comparisons
    if not (low >= 0 and high <= 1):
        raise ValueError(f"{name} must lie in [0, 1]; got values from {low:.4g} to {high:.4g}{hint}")


def check_prediction(prediction: Tensor, activation: Activation | None = None) -> None:
    """Raise unless `prediction` is a non-empty float tensor (N, C, *space) that fits `activation`.

    activation: None if the caller takes probabilities only and has no such option.
    """
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
    if activation in (None, "none"):
        check_unit_range("prediction", prediction, hint=": apply softmax or sigmoid to logits")


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
    check_unit_range("prob", prob, valid, hint=": apply softmax or sigmoid to logits", waits=True)
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
    any_size: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`target` as class indices (N, *space) or floats (N, C, *space), and `valid` without the ignored voxels.

    A ValueError says what does not follow the contract. A target in one of these two forms is returned
    unchanged; class indices lose a class axis of one, and integers and bool in place of floats get the
    prediction's type.
    waits: whether these may be read on a GPU, which waits for it; False after the first batch of a module.
    any_size: whether the target may be larger than the prediction; see `downsample_target`.

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
    num_images, num_channels, *space = prediction.shape
    if any_size:
        space = list(target.shape[target.ndim - len(space) :])
    shape, map_shape = (num_images, num_channels, *space), (num_images, *space)
    if valid is not None:
        check_valid(prediction, valid, space=space)
    is_soft = target.is_floating_point()
    has_classes = activation != "sigmoid" and num_channels > 1
    if num_channels == 1 and target.shape == map_shape:
        target = target.unsqueeze(1)
    is_index = not is_soft and target.dtype != torch.bool
    if is_index and has_classes and target.shape == (num_images, 1, *space):
        target = target.squeeze(1)
    _check_shape(prediction, target, shape, has_classes=has_classes)
    is_map = target.shape == map_shape
    if ignore_index is not None:
        if is_soft or (not is_map and num_channels > 1):
            raise ValueError(
                f"ignore_index={ignore_index} is for class indices, or for the mask of one channel; "
                f"got {describe(target)}: pass valid=..., bool (N, *space)"
            )
        counted = _differs_from(ignore_index, target if is_map else target.squeeze(1))
        valid = counted if valid is None else valid & counted
    if is_soft:
        check_unit_range("target", target, valid)
        if activation == "softmax":
            check_distribution("a soft target of a softmax", target, valid, way_out=SOFT_WAYS_OUT)
    elif is_map:
        _check_class_range(target, valid, num_channels)
    else:
        if values_are_readable(target, waits=waits):
            _check_zeros_and_ones(target, valid, one_hot=has_classes)
        target = target.to(prediction.dtype)
    return target, valid


def _check_shape(prediction: Tensor, target: Tensor, shape: tuple[int, ...], *, has_classes: bool) -> None:
    """Raise unless `target` has `shape`, (N, C, *space), or is a class map of a prediction with classes."""
    map_shape = shape[:1] + shape[2:]
    if target.shape == shape:
        return
    problem, way_out = "target and prediction differ in shape", ""
    if target.is_floating_point():
        if target.shape == map_shape:
            problem, way_out = "a float target needs a class axis", ": use .long() if it holds class indices"
        elif target.shape == (shape[0], 1, *shape[2:]):
            problem = "a float target needs the channels of the prediction"
            way_out = (
                ": use .long() if it holds class indices, torch.cat([1 - target, target], 1) if it is the "
                "probability of the foreground"
            )
    elif not has_classes:
        problem = "a sigmoid or one-channel prediction needs one mask per channel, (N, C, *space)"
    elif target.dtype == torch.bool:
        problem = "target must hold class indices, one-hot classes or soft labels"
        way_out = ": use .long() for class indices, .float() for soft labels"
    elif target.shape == map_shape:
        return
    got = f"got target {describe(target)} for prediction {describe(prediction)}"
    raise ValueError(f"{problem}; {got}{way_out}")


def check_valid(
    channels: Tensor, valid: Tensor, *, name: str = "valid", space: Sequence[int] | None = None
) -> None:
    """Raise unless `valid` is bool (N, *space), for a prediction or target (N, C, *space).

    space: the size of the image, if `channels` has another.
    """
    shape = (channels.shape[0], *(channels.shape[2:] if space is None else space))
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != shape:
        raise ValueError(
            f"{name} must be bool {shape}, one flag per voxel and no channel axis; got {describe(valid)}"
        )
    if valid.device != channels.device:
        raise ValueError(f"{name} is on {valid.device} but prediction on {channels.device}: move one of them")


def _differs_from(index: int, target: Tensor) -> Tensor:
    """Which voxels hold another class than `index`, which must be a value of the target's type."""
    check_value(int, ignore_index=index)
    limits = torch.iinfo(torch.uint8 if target.dtype == torch.bool else target.dtype)
    if not limits.min <= index <= limits.max:
        raise ValueError(
            f"ignore_index={index} cannot occur in a target of {describe(target)}, whose values are "
            f"{limits.min} to {limits.max}: use target.long(), or the value that the target holds"
        )
    return target != index


def _check_zeros_and_ones(target: Tensor, valid: Tensor | None, *, one_hot: bool) -> None:
    """Raise unless the valid voxels hold 0 and 1 only and, if `one_hot`, exactly one 1 each."""
    # one byte for bool, which has no minimum
    target = target.byte() if target.dtype == torch.bool else target
    counted = target if valid is None else target.masked_fill(~valid.unsqueeze(1), 0)
    low, high = torch.stack(counted.aminmax()).tolist()
    several = counted.sum(1) != 1 if one_hot else counted.new_zeros((), dtype=torch.bool)
    num_wrong = int((several if valid is None else several & valid).sum())
    if low < 0 or high > 1 or num_wrong:
        meaning = "be one-hot" if one_hot else "hold one mask per channel"
        raise ValueError(
            f"target has the channels of the prediction and no floats, so it must {meaning}, 0 and 1; got "
            f"{describe(target)} with values from {low} to {high}, and {num_wrong} voxels of no class or of "
            "several: use .float() for a soft label, and valid for voxels that do not count"
        )


def _check_class_range(target: Tensor, valid: Tensor | None, num_classes: int) -> None:
    if not values_are_readable(target):
        return
    low, high = (target if valid is None else target.masked_fill(~valid, 0)).aminmax()
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"target holds class indices {int(low)} to {int(high)}, but there are {num_classes} classes: "
            "leave out voxels that do not count by ignore_index or valid"
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
    low, high = _sums_of_classes(prob, valid)
    # bfloat16 rounds each probability by up to 0.4 %
    if not (low >= 1 - 2e-2 and high <= 1 + 2e-2):
        raise ValueError(
            f"{name} must sum to one over its classes; got {describe(prob)} with sums from {low:.4g} to "
            f"{high:.4g}: {way_out}"
        )


def is_distribution(prob: Tensor) -> bool:
    """Whether all values lie in [0, 1] and sum to one over the classes; reads values on any device."""
    low, high = torch.stack(prob.detach().aminmax()).tolist()
    lowest, highest = _sums_of_classes(prob, None)
    return bool(low >= 0 and high <= 1 and lowest > 0.99 and highest < 1.01)


def _sums_of_classes(prob: Tensor, valid: Tensor | None) -> tuple[float, float]:
    """The lowest and the highest sum over the classes, at some of the valid voxels."""
    prob = prob.detach().flatten(2) if prob.ndim > 2 else prob.detach().unsqueeze(2)
    step = max(1, prob.shape[0] * prob.shape[2] // _MAX_SUMMED_VOXELS)
    # float32: half precision would round the sum itself
    total = prob[:, :, ::step].sum(1, dtype=torch.promote_types(prob.dtype, torch.float32))
    if valid is not None:
        total = torch.where(valid.reshape(len(prob), -1)[:, ::step], total, 1)
    low, high = torch.stack(total.aminmax()).tolist()
    return low, high


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


def class_weights(weight: Tensor | None, prediction: Tensor) -> Float[Tensor, " C"]:
    """The weights of the C classes on the prediction's device; ones for None."""
    if weight is None:
        return torch.ones(prediction.shape[1], device=prediction.device)
    if tuple(weight.shape) != (prediction.shape[1],):
        raise ValueError(
            f"class_weight needs one number for each of the {prediction.shape[1]} classes; "
            f"got shape {tuple(weight.shape)}"
        )
    return weight.to(prediction.device)


def read_numbers(name: str, numbers: object, dtype: torch.dtype = torch.float64) -> Tensor:
    """A list of numbers, or of lists of them, as a tensor; a ValueError names what is not a number."""
    try:
        return torch.as_tensor(numbers, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be numbers; got {numbers!r}") from None


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
