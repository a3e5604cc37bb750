"""A student learns from the label and from a calibrated teacher.

    loss = w_label mix(student, label) + w_teacher mix(student, teacher),    mix = 0.25 CE + 0.75 DML1

The teacher's probabilities are unchanged, softened by a temperature, or recalibrated by kernel density to
E[y | f] near boundaries and errors (paper, appendix E). Nothing here waits for the device or branches on a
value, so a CUDA graph can capture a training step with it. Left out: training the two networks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..arrays import Activation, check_prediction, check_tensor, describe, read_target
from ..calibration.kde import kde_recalibrate
from ..calibration.keypoints import calibration_region, draw_keys
from ..options import Weight, check_value
from ..overlap import probability
from .options import TeacherCalibration
from .segmentation import Outputs, SegmentationLoss

__all__ = ["DistillationLoss", "Teacher"]

Term = Literal["cross_entropy", "region"]


class Teacher(nn.Module):
    """Probabilities of a network for the batch the student sees: `teacher(image, target, valid)`.

    The network is evaluated in eval mode and without gradients, whatever mode it is in, and is not changed:
    it may be the student itself, or be trained elsewhere. If it has several outputs (deep supervision), the
    first is used.
    generator: for drawing the keys of kde, on the device of the batch; None is the default generator.

    >>> teacher = Teacher(nn.Conv1d(1, 2, 1), TeacherCalibration("temperature", temperature=4.0))
    >>> tuple(teacher(torch.ones(1, 1, 5)).shape)
    (1, 2, 5)
    """

    def __init__(
        self,
        network: nn.Module,
        calibration: TeacherCalibration = TeacherCalibration(),  # noqa: B008
        *,
        activation: Activation = "softmax",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_value(Activation, activation=activation)
        if not isinstance(calibration, TeacherCalibration):
            raise ValueError(f"calibration must be a TeacherCalibration; got {calibration!r}")
        if calibration.calibration == "temperature" and activation == "none":
            raise ValueError("calibration by temperature divides logits: activation must not be 'none'")
        if calibration.calibration == "temperature" and calibration.temperature == "fit":
            raise ValueError(
                "calibration by temperature needs temperature=NUMBER: fit one with TemperatureScaling to "
                "cases that the network was not trained on"
            )
        self.network = network
        self.calibration, self.activation, self.generator = calibration, activation, generator

    @torch.no_grad()
    def forward(
        self, image: Tensor, target: Tensor | None = None, valid: Tensor | None = None
    ) -> Float[Tensor, "N C *space"]:
        """The teacher's probabilities, at least float32; for kde, `target` holds the labels of the keys."""
        output = self._evaluated(image)
        check_prediction(output, self.activation)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.temperature != 1:
            output = output / self.temperature
        prob = probability(output, self.activation)
        if self.calibration.calibration != "kde":
            return prob
        if target is None:
            raise ValueError("calibration by kde needs the target of the batch: teacher(image, target)")
        return self._recalibrated(prob, target, valid)

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        is_scaled = self.calibration.calibration == "temperature"
        return float(self.calibration.temperature) if is_scaled else 1.0

    def _evaluated(self, image: Tensor) -> Tensor:
        """The first output in eval mode; afterwards every part of the network is in the mode it was in.

        With dropout and batch statistics the teacher would give other probabilities.
        """
        training = [module for module in self.network.modules() if module.training]
        try:
            for module in training:
                module.training = False
            output = self.network(image)
        finally:
            for module in training:
                module.training = True
        return output if isinstance(output, Tensor) else output[0]

    def _recalibrated(self, prob: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
        if prob.shape[1] > 1 and self.activation == "sigmoid":
            raise ValueError(
                f"calibration by kde needs classes that exclude each other; got {prob.shape[1]} sigmoid "
                "channels: use temperature, or a softmax network"
            )
        target, valid = read_target(prob, target, activation=self.activation, valid=valid)
        is_binary = prob.shape[1] == 1
        if is_binary:
            # the density is that of two classes
            prob, target = (torch.cat([1 - channel, channel], dim=1) for channel in (prob, target))
        options = self.calibration
        region = calibration_region(prob, target, width=options.width, valid=valid)
        keys = draw_keys(
            prob,
            target,
            options.num_keys,
            valid=valid if options.keys_from == "batch" else self._key_region(region, valid),
            generator=self.generator,
            per_image=options.keys_per_image,
        )
        if not options.reweight_keys:
            # the paper's recipe: all classes have equal weight, however rare they are
            keys = keys.unweighted()
        recalibrated = kde_recalibrate(prob, keys, bandwidth=options.bandwidth, region=region)
        return recalibrated[:, 1:] if is_binary else recalibrated

    def _key_region(self, region: Tensor, valid: Tensor | None) -> Tensor:
        """The region to draw keys from; all valid voxels of a batch (or image) whose region is empty."""
        everywhere = torch.ones_like(region) if valid is None else valid
        axes = tuple(range(1 if self.calibration.keys_per_image else 0, region.ndim))
        return torch.where(region.any(axes, keepdim=True), region, everywhere)


class DistillationLoss(nn.Module):
    """The loss of student logits against the label and the teacher's probabilities; 0.5 each by default.

    mix: the loss of both parts, with its options, activation, ignore_index and weights.
    terms: which terms of the mix compare student and teacher. The paper's ablation is ("cross_entropy",),
    then both, then both with a Teacher of calibration "kde". Voxels that the label ignores count in no part.

    >>> logits, label = torch.zeros(1, 2, 4), torch.zeros(1, 4, dtype=torch.long)
    >>> sorted(DistillationLoss().terms(logits, label, torch.full((1, 2, 4), 0.5)))
    ['label_cross_entropy', 'label_region', 'teacher_cross_entropy', 'teacher_region']
    """

    def __init__(
        self,
        mix: SegmentationLoss | None = None,
        *,
        label_weight: float = 0.5,
        teacher_weight: float = 0.5,
        terms: Sequence[Term] = ("cross_entropy", "region"),
    ) -> None:
        super().__init__()
        check_value(Weight, label_weight=label_weight, teacher_weight=teacher_weight)
        if label_weight == teacher_weight == 0:
            raise ValueError("label_weight and teacher_weight are both 0: nothing would be learned")
        for term in terms:
            check_value(Term, terms=term)
        if not terms:
            raise ValueError("terms is empty: name cross_entropy, region or both, or use SegmentationLoss")
        self.label_loss = mix = SegmentationLoss() if mix is None else mix
        of_teacher = asdict(mix.options) | {
            "cross_entropy_weight": mix.options.cross_entropy_weight * ("cross_entropy" in terms),
            "region_weight": mix.options.region_weight * ("region" in terms),
            # the reference of the calibration error is the label
            "calibration_weight": 0.0,
        }
        self.teacher_loss = SegmentationLoss(
            activation=mix.activation, sync=mix.sync, scale_weights=mix.scale_weights, **of_teacher
        )
        self.label_weight, self.teacher_weight = label_weight, teacher_weight

    def forward(
        self, logits: Outputs, target: Tensor, teacher_prob: Tensor, valid: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """The weighted sum of the losses against label and teacher."""
        of_label: Tensor = self.label_loss(logits, target, valid)
        of_teacher: Tensor = self.teacher_loss(logits, *self._of_teacher(logits, target, teacher_prob, valid))
        return self.label_weight * of_label + self.teacher_weight * of_teacher

    def terms(
        self, logits: Outputs, target: Tensor, teacher_prob: Tensor, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The terms of both parts by name, each without its weight; see `SegmentationLoss.terms`."""
        of_label = self.label_loss.terms(logits, target, valid)
        of_teacher = self.teacher_loss.terms(logits, *self._of_teacher(logits, target, teacher_prob, valid))
        return {f"label_{name}": term for name, term in of_label.items()} | {
            f"teacher_{name}": term for name, term in of_teacher.items()
        }

    def total(self, terms: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """The sum of what `terms` returned, each times its weights."""
        label, teacher = (
            loss.total({name.removeprefix(part): terms[name] for name in terms if name.startswith(part)})
            for part, loss in (("label_", self.label_loss), ("teacher_", self.teacher_loss))
        )
        return self.label_weight * label + self.teacher_weight * teacher

    def _of_teacher(
        self, logits: Outputs, target: Tensor, teacher_prob: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The teacher's label, and `valid` without the voxels that the label ignores."""
        check_tensor("teacher_prob", teacher_prob)
        if not teacher_prob.is_floating_point():
            raise ValueError(
                f"teacher_prob must be probabilities; got {describe(teacher_prob)}: call Teacher"
            )
        mix = self.label_loss
        if mix.ignore_index is not None:
            finest = logits if isinstance(logits, Tensor) else logits[0]
            _, valid = read_target(
                finest,
                target,
                activation=mix.activation,
                valid=valid,
                ignore_index=mix.ignore_index,
                waits=False,
                any_size=True,
            )
        # detached: the teacher must not learn from its student
        return teacher_prob.detach(), valid

    def extra_repr(self) -> str:
        return f"label_weight={self.label_weight}, teacher_weight={self.teacher_weight}"
