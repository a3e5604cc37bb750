"""The axes of arrays, and the checks that every loss, label maker and metric applies to its arguments.

Axes: N case or image, C class, R rater, K key point, *space the voxel axes (none, one, two or three).

The target contract, the same everywhere:
  integers (N, *space)     class indices
  floats   (N, C, *space)  soft labels, or one mask per channel for sigmoid networks
  `valid`  (N, *space)     bool, False for a voxel that does not count; or `ignore_index` for class indices
Anything else is a ValueError that says what was passed and what to do.

Shapes and dtypes are always checked. Values are checked only if reading them needs no device
synchronisation: on the CPU, outside a compiled graph.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

Activation = Literal["softmax", "sigmoid", "none"]
# a network halves an image up to five times, so its sides must be multiples of this
SIZE_MULTIPLE = 32


def describe(tensor: object) -> str:
    """Dtype and shape of a tensor for an error message: `float32 (2, 3, 64, 64)`."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise unless `value` is one of the strings of the Literal type `choices`."""
    known = choices.__args__
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")


def values_are_readable(tensor: Tensor) -> bool:
    """Whether values can be read without a device synchronisation, a graph break or an error of vmap."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_unit_range(name: str, tensor: Tensor, valid: Tensor | None = None) -> None:
    """Raise unless every valid value lies in [0, 1]; NaN does not. No check if values are not readable."""
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
    hint = ": for logits, use activation='softmax' or 'sigmoid'" if name == "prediction" else ""
    raise ValueError(f"{name} must lie in [0, 1]; got values from {low:.4g} to {high:.4g}{hint}")


def check_prediction(prediction: Tensor, activation: Activation) -> None:
    """Raise unless `prediction` is a non-empty float tensor (N, C, *space) that fits `activation`."""
    check_choice("activation", activation, Activation)
    if not isinstance(prediction, Tensor) or not prediction.is_floating_point() or prediction.ndim < 2:
        raise ValueError(f"prediction must be a float tensor (N, C, *space); got {describe(prediction)}")
    if prediction.numel() == 0:
        raise ValueError(f"prediction is empty: {describe(prediction)}; skip batches without voxels")
    if activation == "softmax" and prediction.size(1) == 1:
        raise ValueError(
            f"softmax over one channel is 1 everywhere; got prediction {describe(prediction)}: "
            "use activation='sigmoid', or two channels"
        )
    if activation == "none":
        check_unit_range("prediction", prediction)


def check_target(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation = "none",
    valid: Tensor | None = None,
    ignore_index: int | None = None,
) -> Tensor | None:
    """Raise unless `target` and `valid` follow the contract; return `valid` without the ignored voxels."""
    if not isinstance(target, Tensor):
        raise ValueError(f"target must be a tensor; got {describe(target)}")
    if target.device != prediction.device:
        raise ValueError(
            f"target is on {target.device} but prediction on {prediction.device}: move one of them"
        )
    if valid is not None:
        _check_valid(prediction, valid)
    if target.is_floating_point():
        _check_soft_target(prediction, target)
        valid = fold_ignored(target, valid, ignore_index)
        check_unit_range("target", target, valid)
        return valid
    if target.dtype == torch.bool or target.is_complex():
        raise ValueError(
            f"target must hold integers (class indices) or floats (soft labels); got {describe(target)}: "
            "use .float() for one mask per channel, .long() for class indices"
        )
    _check_class_map(prediction, target, activation)
    valid = fold_ignored(target, valid, ignore_index)
    _check_class_range(target, valid, prediction.shape[1], ignore_index)
    return valid


def fold_ignored(target: Tensor, valid: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """`valid` without the voxels whose class index is `ignore_index`; an error for a soft target."""
    if ignore_index is None:
        return valid
    if target.is_floating_point():
        raise ValueError(
            f"ignore_index={ignore_index} is for integer targets; got a soft label {describe(target)}: "
            "pass valid=..., bool (N, *space)"
        )
    if valid is not None and valid.shape != target.shape:
        raise ValueError(
            f"valid must be bool {tuple(target.shape)}, the shape of the target; got {describe(valid)}"
        )
    counted = target != ignore_index
    return counted if valid is None else valid & counted


def _check_valid(prediction: Tensor, valid: Tensor) -> None:
    space_shape = (prediction.shape[0], *prediction.shape[2:])
    if valid.dtype != torch.bool or tuple(valid.shape) != space_shape:
        raise ValueError(
            f"valid must be bool {space_shape}, one flag per voxel and no channel axis; got {describe(valid)}"
        )
    if valid.device != prediction.device:
        raise ValueError(
            f"valid is on {valid.device} but prediction on {prediction.device}: move one of them"
        )


def _check_soft_target(prediction: Tensor, target: Tensor) -> None:
    if target.shape != prediction.shape:
        got = f"got target {describe(target)} for prediction {describe(prediction)}"
        if target.shape == prediction.shape[:1] + prediction.shape[2:]:
            raise ValueError(
                f"a float target needs a class axis; {got}: "
                "use .long() for class indices, .unsqueeze(1) for the one channel of a sigmoid network"
            )
        if target.ndim == prediction.ndim and target.shape[2:] == prediction.shape[2:]:
            raise ValueError(f"target and prediction differ in images or channels; {got}")
        raise ValueError(f"target and prediction differ in shape; {got}")


def _check_class_map(prediction: Tensor, target: Tensor, activation: Activation) -> None:
    is_map = target.shape == prediction.shape[:1] + prediction.shape[2:]
    if is_map and activation != "sigmoid" and prediction.size(1) > 1:
        return
    got = f"got target {describe(target)} for prediction {describe(prediction)}"
    if activation == "sigmoid" or prediction.shape[1] == 1:
        raise ValueError(
            "a sigmoid or one-channel prediction needs a float target (N, C, *space), one mask per channel; "
            f"{got}"
        )
    if target.shape == prediction.shape:
        raise ValueError(f"an integer target holds class indices, without a class axis; {got}: use .float()")
    raise ValueError(f"class indices must have shape (N, *space) of the prediction; {got}")


def _check_class_range(
    target: Tensor, valid: Tensor | None, num_classes: int, ignore_index: int | None
) -> None:
    if not values_are_readable(target):
        return
    low, high = (target if valid is None else target.masked_fill(~valid, 0)).aminmax()
    if low < 0 or high >= num_classes:
        hint = "" if ignore_index is not None else ": pass ignore_index if one of them means 'do not count'"
        raise ValueError(
            f"target holds class indices {int(low)} to {int(high)}, but there are {num_classes} classes{hint}"
        )


def check_result(loss: Tensor, prediction: Tensor) -> Tensor:
    """Return `loss`; raise if it is NaN. No check if values are not readable."""
    if values_are_readable(loss) and bool(loss.detach().isnan()):
        raise ValueError(
            f"the loss is NaN: prediction {describe(prediction)} holds {int(prediction.isnan().sum())} NaN "
            f"and {int(prediction.isinf().sum())} infinite values"
        )
    return loss


def check_non_negative(**named: float) -> None:
    """Raise unless every named number is zero or more."""
    for name, value in named.items():
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more; got {value}")


def class_weights(weight: Sequence[float] | Tensor | None, prediction: Tensor) -> Float[Tensor, " C"]:
    """Float32 weights of the C classes on the prediction's device, checked; ones for None."""
    if weight is None:
        return torch.ones(prediction.shape[1], device=prediction.device)
    weight = torch.as_tensor(weight, dtype=torch.float32, device=prediction.device)
    if tuple(weight.shape) != (prediction.shape[1],):
        raise ValueError(
            f"class_weight needs one number for each of the {prediction.shape[1]} classes; "
            f"got shape {tuple(weight.shape)}"
        )
    if values_are_readable(weight) and not bool((weight >= 0).all() and weight.sum() > 0):
        raise ValueError(f"class_weight must be 0 or more and not all 0; got {weight.tolist()}")
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
