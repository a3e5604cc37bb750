"""A student learns from the label and from a calibrated teacher.

    loss = w_label mix(student, label) + w_teacher mix(student, teacher),    mix = 0.25 CE + 0.75 DML1

The teacher's probabilities are unchanged, softened by a temperature, or recalibrated by kernel density to
E[y | f] near boundaries and errors (paper, appendix E). Nothing here waits for the device or branches on a
value, so a CUDA graph can capture a training step with it. Left out: training the two networks.
"""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import (
    Activation,
    check_choice,
    check_non_negative,
    check_number,
    check_prediction,
    check_tensor,
    check_whole_number,
    describe,
    read_target,
)
from ..calibration.keypoints import calibration_region, sample_keys, take_keys
from ..calibration.recalibration import kde_recalibrate
from .segmentation import MixtureKeywords, Outputs, SegmentationLoss, read_targets
from .tversky import check_options

Calibration = Literal["none", "temperature", "kde"]
Term = Literal["cross_entropy", "region"]
KeySource = Literal["region", "batch"]


class Teacher(nn.Module):
    """Probabilities of a frozen network: `teacher(image, target, valid)` for the batch the student sees.

    The network stays in eval mode and has no gradients, also if it is part of a module in train mode.
    If it has several outputs (deep supervision), the first is used.

    calibration: "none"; "temperature", logits / `temperature`; or "kde": E[y | f] at `bandwidth` from
    `num_keys` key points of the batch (or of each image, `keys_per_image`). Keys are balanced over classes
    and labelled by `target`. "kde" changes only voxels of a region: where the network is wrong, or within
    `width` voxels of a label boundary.
    keys_from: "region" draws the keys from that region, so that the estimate is E[y | f] there; "batch",
    as in the paper, draws from all voxels, most of them far from any boundary.
    reweight_keys: each key stands for the number of voxels it was drawn from, which makes the estimate
    consistent. False is the paper's recipe: all classes have equal weight, however rare they are.
    generator: for drawing the keys, on the device of the batch; None is the default generator.

    >>> teacher = Teacher(nn.Conv1d(1, 2, 1), calibration="temperature", temperature=4.0)
    >>> tuple(teacher.train()(torch.ones(1, 1, 5)).shape), teacher.network.training
    ((1, 2, 5), False)
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        activation: Activation = "softmax",
        calibration: Calibration = "none",
        temperature: float = 1.0,
        bandwidth: float = 1e-3,
        num_keys: int = 1024,
        width: int = 3,
        keys_per_image: bool = False,
        keys_from: KeySource = "region",
        reweight_keys: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, Activation)
        check_choice("calibration", calibration, Calibration)
        check_choice("keys_from", keys_from, KeySource)
        if not isinstance(network, nn.Module):
            raise ValueError(f"network must be a torch.nn.Module; got {type(network).__name__}")
        check_number(temperature=temperature, bandwidth=bandwidth)
        check_whole_number(num_keys=num_keys, width=width)
        check_non_negative(width=width)
        for name, value in {"temperature": temperature, "bandwidth": bandwidth, "num_keys": num_keys}.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0; got {value}")
        if calibration == "temperature" and activation == "none":
            raise ValueError(
                "calibration='temperature' divides logits, but activation is 'none': "
                "activation must be 'softmax' or 'sigmoid'"
            )
        self.network = network.requires_grad_(False)
        self.activation, self.calibration, self.temperature = activation, calibration, temperature
        self.bandwidth, self.num_keys, self.width = bandwidth, num_keys, width
        self.keys_per_image, self.keys_from, self.reweight_keys = keys_per_image, keys_from, reweight_keys
        self.generator = generator
        self.train(False)

    def train(self, mode: bool = True) -> "Teacher":
        """Keep eval mode: with dropout and batch statistics the teacher would give other probabilities."""
        return super().train(False)

    @torch.no_grad()
    def forward(
        self, image: Tensor, target: Tensor | None = None, valid: Tensor | None = None
    ) -> Float[Tensor, "N C *space"]:
        """The teacher's probabilities, at least float32; for "kde", `target` holds the labels of the keys."""
        output = self.network(image)
        output = output if isinstance(output, Tensor) else output[0]
        check_prediction(output, self.activation)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.calibration == "temperature":
            output = output / self.temperature
        prob = output
        if self.activation != "none":
            prob = output.softmax(1) if self.activation == "softmax" else output.sigmoid()
        if self.calibration != "kde":
            return prob
        if target is None:
            raise ValueError("calibration='kde' needs the target of the batch: teacher(image, target)")
        return self._recalibrated(prob, target, valid)

    def _recalibrated(self, prob: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
        if prob.shape[1] > 1 and self.activation == "sigmoid":
            raise ValueError(
                f"calibration='kde' needs classes that exclude each other; got {prob.shape[1]} sigmoid "
                "channels: use 'temperature', or a softmax network"
            )
        target, valid = read_target(prob, target, activation=self.activation, valid=valid)
        if prob.shape[1] == 1:
            both, both_target = (torch.cat([1 - channel, channel], dim=1) for channel in (prob, target))
            return self._recalibrated_classes(both, both_target, valid)[:, 1:]
        return self._recalibrated_classes(prob, target, valid)

    def _recalibrated_classes(self, prob: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
        region = calibration_region(prob, target, width=self.width, valid=valid)
        keys = sample_keys(
            target,
            self.num_keys,
            valid=valid if self.keys_from == "batch" else self._key_region(region, valid),
            generator=self.generator,
            per_image=self.keys_per_image,
        )
        return kde_recalibrate(
            prob,
            take_keys(prob, keys),
            take_keys(target, keys),
            bandwidth=self.bandwidth,
            key_weight=keys.weight if self.reweight_keys else keys.mask,
            region=region,
        )

    def _key_region(self, region: Tensor, valid: Tensor | None) -> Tensor:
        """The region to draw keys from; all valid voxels of a batch (or image) whose region is empty."""
        everywhere = torch.ones_like(region) if valid is None else valid
        axes = tuple(range(1 if self.keys_per_image else 0, region.ndim))
        return torch.where(region.any(axes, keepdim=True), region, everywhere)


class DistillationLoss(nn.Module):
    """The loss of student logits against the label and the teacher's probabilities; 0.5 each by default.

    mix: the loss of both parts, with its region loss, activation, ignore_index and weights; by default a
    `SegmentationLoss` with the options given here.
    terms: which terms of the mix compare student and teacher. The paper's ablation is ("cross_entropy",),
    then both, then both with a Teacher of calibration "kde". Voxels that the label ignores count in no part.

    >>> logits, label = torch.zeros(1, 2, 4), torch.zeros(1, 4, dtype=torch.long)
    >>> total, parts = DistillationLoss()(logits, label, torch.full((1, 2, 4), 0.5), parts=True)
    >>> sorted(parts)
    ['label_cross_entropy', 'label_region', 'teacher_cross_entropy', 'teacher_region']
    """

    def __init__(
        self,
        mix: SegmentationLoss | None = None,
        *,
        label_weight: float = 0.5,
        teacher_weight: float = 0.5,
        terms: Sequence[Term] = ("cross_entropy", "region"),
        **options: Unpack[MixtureKeywords],
    ) -> None:
        super().__init__()
        check_options("DistillationLoss", options, MixtureKeywords.__annotations__)
        if mix is not None and options:
            raise ValueError(
                f"got a mix and options of its region loss: {', '.join(options)}; give them to mix"
            )
        check_non_negative(label_weight=label_weight, teacher_weight=teacher_weight)
        if label_weight == teacher_weight == 0:
            raise ValueError("label_weight and teacher_weight are both 0: nothing would be learned")
        for term in terms:
            check_choice("terms", term, Term)
        if not terms:
            raise ValueError("terms is empty: name cross_entropy, region or both, or use SegmentationLoss")
        self.label_loss = SegmentationLoss(**options) if mix is None else mix
        self.teacher_loss = SegmentationLoss(
            self.label_loss.region,
            cross_entropy_weight=self.label_loss.cross_entropy_weight * ("cross_entropy" in terms),
            region_weight=self.label_loss.region_weight * ("region" in terms),
            scale_weights=self.label_loss.scale_weights,
        )
        self.label_weight, self.teacher_weight = label_weight, teacher_weight

    @overload
    def forward(
        self,
        logits: Outputs,
        target: Tensor,
        teacher_prob: Tensor,
        valid: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        logits: Outputs,
        target: Tensor,
        teacher_prob: Tensor,
        valid: Tensor | None = None,
        *,
        parts: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(
        self,
        logits: Outputs,
        target: Tensor,
        teacher_prob: Tensor,
        valid: Tensor | None = None,
        *,
        parts: bool = False,
    ) -> Any:
        """The total; with `parts`, also the unweighted terms by name, detached, for a log."""
        if not isinstance(target, Tensor):
            raise ValueError(f"target must be one tensor, as the teacher's output is; got {describe(target)}")
        check_tensor("teacher_prob", teacher_prob)
        if not teacher_prob.is_floating_point():
            raise ValueError(
                f"teacher_prob must be probabilities; got {describe(teacher_prob)}: call Teacher"
            )
        label, counted = read_targets(logits, target, valid, self.label_loss.region)
        label_loss, label_parts = self.label_loss.total_and_terms(logits, label, counted)
        # detached: the teacher must not learn from its student
        teacher_loss, teacher_parts = self.teacher_loss.total_and_terms(
            logits, teacher_prob.detach(), counted
        )
        total = self.label_weight * label_loss + self.teacher_weight * teacher_loss
        if not parts:
            return total
        named = {f"label_{name}": part for name, part in label_parts.items()}
        return total, {**named, **{f"teacher_{name}": part for name, part in teacher_parts.items()}}

    def extra_repr(self) -> str:
        return f"label_weight={self.label_weight}, teacher_weight={self.teacher_weight}"
