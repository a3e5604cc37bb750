"""From probabilities to a decision: masks, class maps, and volumes in millilitres.

The rule: one channel is foreground where prob > threshold (1/2 by default; a tie is background, as in
`labels.majority_label`). Several channels take the most probable class, the lowest one at a tie. Several
sigmoid channels are each compared with the threshold if decision="threshold".
A volume is a number of voxels, or a sum of probabilities, times the volume of a voxel.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from ..arrays import check_choice, check_prediction, one_hot
from .checks import nan_without_voxels

Decision = Literal["argmax", "threshold"]
VolumeOf = Literal["mask", "probability"]


def chosen_rule(decision: Decision | None, num_channels: int) -> Decision:
    """The rule that applies: `decision`, or if it is None threshold for one channel and argmax for several.

    >>> chosen_rule(None, 1), chosen_rule(None, 3)
    ('threshold', 'argmax')
    """
    if decision is None:
        return "threshold" if num_channels == 1 else "argmax"
    check_choice("decision", decision, Decision)
    if decision == "argmax" and num_channels == 1:
        raise ValueError("decision='argmax' of one channel is 0 everywhere: use decision='threshold'")
    return decision


def decided_classes(
    prob: Float[Tensor, "N C *space"], *, threshold: float | None = None
) -> Integer[Tensor, "N *space"]:
    """Class map of the most probable class of each voxel, the lowest one at a tie; uint8 up to 256 classes.

    With a threshold, a voxel is foreground if its foreground classes together have a higher probability; it
    gets the most probable of them. For two classes, argmax equals the threshold 0.5.

    >>> prob = torch.tensor([[[0.5, 0.6, 0.2], [0.1, 0.1, 0.5], [0.4, 0.3, 0.3]]])
    >>> decided_classes(prob), decided_classes(prob, threshold=0.45)
    (tensor([[0, 0, 1]], dtype=torch.uint8), tensor([[2, 0, 1]], dtype=torch.uint8))
    """
    num_classes = prob.shape[1]
    first = 0 if threshold is None else 1
    highest = prob[:, first]
    dtype = torch.uint8 if num_classes <= 256 else torch.int64
    classes = torch.full_like(highest, first, dtype=dtype)
    # comparisons one class after the other are several times faster than argmax on a CPU
    for number in range(first + 1, num_classes):
        higher = prob[:, number] > highest
        classes.masked_fill_(higher, number)
        highest = torch.where(higher, prob[:, number], highest)
    if threshold is None:
        return classes
    foreground = prob[:, 1]
    for number in range(2, num_classes):
        foreground = foreground + prob[:, number]
    return torch.where(foreground > threshold, classes, 0)


def decided_masks(prob: Tensor, *, rule: Decision, threshold: float) -> Iterator[Tensor]:
    """The decided mask, bool (N, *space), of each channel in turn; one mask is in memory at a time."""
    classes = decided_classes(prob) if rule == "argmax" else None
    for channel in range(prob.shape[1]):
        yield prob[:, channel] > threshold if classes is None else classes == channel


def decide(prob: Tensor, *, decision: Decision | None = None, threshold: float = 0.5) -> Tensor:
    """Float32 masks (N, C, *space) of 0 and 1, as hard metrics compare them.

    >>> decide(torch.tensor([[0.2, 0.5, 0.3]])), decide(torch.tensor([[0.5]]))
    (tensor([[0., 1., 0.]]), tensor([[0.]]))
    """
    check_prediction(prob)
    if chosen_rule(decision, prob.shape[1]) == "threshold":
        return (prob > threshold).float()
    return one_hot(decided_classes(prob), prob.shape[1]).float()


def volume_ml(
    prob: Tensor,
    *,
    spacing_mm: Sequence[float] | Tensor,
    of: VolumeOf = "mask",
    decision: Decision | None = None,
    threshold: float = 0.5,
    valid: Tensor | None = None,
) -> Float[Tensor, "N C"]:
    """Volume of each case and class in ml: of the decided mask, or expected from the probabilities.

    spacing_mm: the three sides of a voxel, or (N, 3), one triple per case; a 2D image needs its slice
    thickness. of: "mask" counts decided voxels, "probability" sums prob, which is unbiased if prob is
    calibrated. A case without a valid voxel has NaN.

    >>> float(volume_ml(torch.full((1, 1, 10, 10, 10), 0.4), spacing_mm=(1, 1, 2), of="probability"))
    0.800000011920929
    """
    check_choice("of", of, VolumeOf)
    check_prediction(prob)
    per_voxel = voxel_ml(spacing_mm, num_cases=len(prob)).to(prob.device)
    masses: Iterable[Tensor] = prob.unbind(1)
    if of == "mask":
        masses = decided_masks(prob, rule=chosen_rule(decision, prob.shape[1]), threshold=threshold)
    voxels = [sum_voxels(mass, valid) for mass in masses]
    return nan_without_voxels((torch.stack(voxels, 1) * per_voxel).float(), valid)


def sum_voxels(mass: Tensor, valid: Tensor | None) -> Float[Tensor, " N"]:
    """Float64 sum over the valid voxels of a mask, or of probabilities, (N, *space)."""
    mass = mass if valid is None else torch.where(valid, mass, 0)
    return mass.reshape(len(mass), -1).sum(1, dtype=torch.float64)


def voxel_ml(spacing_mm: Sequence[float] | Tensor, *, num_cases: int = 1) -> Float[Tensor, "N 1"]:
    """Volume of a voxel in ml, float64, of each case, from three sides or one triple per case.

    >>> float(voxel_ml((1.0, 1.0, 5.0)))
    0.005
    """
    spacing = torch.as_tensor(spacing_mm, dtype=torch.float64)
    if tuple(spacing.shape) not in ((3,), (num_cases, 3)) or not bool((spacing > 0).all()):
        raise ValueError(
            f"spacing_mm needs three positive sides of a voxel, or (N, 3) = ({num_cases}, 3); got "
            f"{spacing.tolist()}: give a 2D image its slice thickness as the third"
        )
    return (spacing.prod(-1) / 1000).expand(num_cases).unsqueeze(1)
