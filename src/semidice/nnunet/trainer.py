"""nnU-Net's trainer with the masks of all raters, a label of them, and one of our losses.

nnU-Net loads, crops and augments segmentations of 1 + R channels: its own label, then one channel per rater.
Every rater's mask stays hard on the way. The label is made from the augmented masks on the device, so it is a
probability at every voxel, and is averaged to the size of each output of deep supervision. What lies outside
of the image is -1 for every rater and does not count; nnU-Net itself takes it as background.

A batch's target is [nnU-Net's label (N, 1, *space), raters (N, R, *space)]. nnU-Net's online validation takes
the first one, as always.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batchgeneratorsv2.transforms.base.basic_transform import SegOnlyTransform
from batchgeneratorsv2.transforms.nnunet.seg_to_onehot import MoveSegAsOneHotToDataTransform
from batchgeneratorsv2.transforms.utils.compose import ComposeTransforms
from batchgeneratorsv2.transforms.utils.remove_label import RemoveLabelTransform
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import Tensor, nn

from ..data.batches.label_making import LabelOptions, make_labels
from ..errors import UserError, reading
from ..losses.distillation import DistillationLoss, Teacher
from ..losses.options import Over, TeacherCalibration
from ..losses.segmentation import SegmentationLoss
from ..paths import atomic_write
from .folders import read_training
from .options import TrainerOptions
from .raters import RatersDataset, rater_segmentations, read_rater_names

# nnU-Net's checkpoints hold numbers of numpy next to tensors. Versions 1 and 2 of numpy have different names
# for the function that makes a number.
_MAKE_NUMBER = np.float64(0).__reduce__()[0]
_ALLOWED: list[Any] = [
    np.dtype,
    *(type(np.dtype(name)) for name in ("bool", "float32", "float64", "int64")),
    (_MAKE_NUMBER, "numpy._core.multiarray.scalar"),
    (_MAKE_NUMBER, "numpy.core.multiarray.scalar"),
]


class RatersLoss(nn.Module):
    """The loss of nnU-Net's outputs against the label of the raters.

    forward(outputs, [label, raters]): finest output first. `image` is the batch that a teacher sees.
    """

    def __init__(
        self,
        mix: SegmentationLoss,
        options: LabelOptions,
        *,
        num_classes: int,
        ignore_label: int | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self.mix, self.options, self.num_classes, self.ignore_label = mix, options, num_classes, ignore_label
        self.teacher, self.distillation = teacher, DistillationLoss(mix)
        self.image: Tensor | None = None

    def forward(self, outputs: Any, target: list[Tensor]) -> Tensor:
        soft, valid = self.label(*target)
        if self.teacher is None or self.image is None:
            return self.mix(outputs, soft, valid)  # type: ignore[no-any-return]
        return self.distillation(outputs, soft, self.teacher(self.image, soft, valid), valid)  # type: ignore[no-any-return]

    @torch.no_grad()
    def label(self, label: Tensor, raters: Tensor) -> tuple[Tensor, Tensor]:
        """The label of the raters, (N, C, *space), and the voxels that count, (N, *space)."""
        seen = raters >= 0
        valid = seen.any(1)
        if self.ignore_label is not None:
            valid &= label[:, 0] != self.ignore_label
        present = seen.flatten(2).any(2)
        # a patch that nobody annotated has no valid voxel; any rater will do for it
        present |= ~present.any(1, keepdim=True)
        rater = None
        if self.options.maker == "random":
            rater = torch.multinomial(present.float(), 1)[:, 0]
        masks = raters.clamp(min=0).to(torch.uint8)
        # nnU-Net computes losses under autocast, and a probability needs float32
        with torch.autocast(masks.device.type, enabled=False):
            soft = make_labels(
                masks, present, self.options, num_classes=self.num_classes, rater=rater, valid=valid
            )
        return soft, valid


class SplitRaters(SegOnlyTransform):  # type: ignore[misc]
    """The last transform: segmentations (1 + R, *space) to [nnU-Net's label, raters]."""

    def _apply_to_segmentation(self, segmentation: Tensor, **_: Any) -> list[Tensor]:
        return [segmentation[:1], segmentation[1:]]


class SemidiceTrainer(nnUNetTrainer):  # type: ignore[misc]
    """nnU-Net's trainer with the `TrainerOptions` that are stored with its results."""

    semidice: TrainerOptions
    num_raters: int
    # of nnU-Net
    num_epochs: int
    save_every: int

    # no __init__ of our own: nnU-Net reads the names of its arguments

    def initialize(self) -> None:
        if self.was_initialized:
            return
        self.semidice = read_training(Path(self.output_folder_base))
        self.num_epochs = self.semidice.epochs or self.num_epochs
        if self.semidice.iterations is not None:
            # nnU-Net's own ratio of steps of training and of online validation
            self.num_iterations_per_epoch = self.semidice.iterations
            self.num_val_iterations_per_epoch = max(1, self.semidice.iterations // 5)
        # in a short training, ten checkpoints to continue from
        self.save_every = min(self.save_every, max(1, self.num_epochs // 10))
        if self.semidice.uses_raters:
            if self.label_manager.has_regions:
                raise UserError(
                    "this dataset has regions, whose classes overlap, but a label of raters needs classes "
                    "that exclude each other: list plain classes in dataset.json, or train nnU-Net's own loss"
                )
            base = Path(self.preprocessed_dataset_folder_base)
            folder = rater_segmentations(base, self.configuration_manager.data_identifier)
            self.num_raters = len(read_rater_names(folder))
        super().initialize()
        if self.semidice.uses_raters:
            self.dataset_class = RatersDataset

    def _build_loss(self) -> nn.Module:
        own: Any = super()._build_loss()
        if not self.semidice.uses_raters:
            return own  # type: ignore[no-any-return]
        over: Over = "batch" if self.configuration_manager.batch_dice else "image"
        mix = SegmentationLoss(
            **asdict(self.semidice.loss_options(over)),
            # one index per image needs no other process: gradients are averaged anyway
            sync=self.is_ddp and over == "batch",
            # weights of the outputs of deep supervision as in nnU-Net
            scale_weights=tuple(float(weight) for weight in own.weight_factors),
        )
        return RatersLoss(
            mix,
            LabelOptions(maker=self.semidice.label),
            num_classes=self.label_manager.num_segmentation_heads,
            ignore_label=self.label_manager.ignore_label,
            teacher=None if self.semidice.teacher is None else self._teacher(self.semidice.teacher),
        )

    def _teacher(self, trainer: str) -> Teacher:
        """The network of this fold by a finished training of the same configuration."""
        own = Path(self.output_folder_base)
        path = own.with_name(own.name.replace(type(self).__name__, trainer, 1))
        path = path / f"fold_{self.fold}" / "checkpoint_final.pth"
        if not path.is_file():
            raise UserError(
                f"the teacher {trainer} has no {path}: train fold {self.fold} of it first, on the same "
                "configuration"
            )
        weights = read_weights(path, self.device)
        network = self.build_network_architecture(
            self.plans_manager,
            self.configuration_manager,
            self.num_input_channels,
            self.label_manager.num_segmentation_heads,
            enable_deep_supervision=False,
        )
        network.load_state_dict(weights)
        return Teacher(network.to(self.device), TeacherCalibration(self.semidice.calibration))

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.semidice.teacher is not None:
            self.loss.image = batch["data"].to(self.device, non_blocking=True)
        result: dict[str, Any] = super().train_step(batch)
        if self.semidice.teacher is not None:
            self.loss.image = None
        return result

    def save_checkpoint(self, filename: str) -> None:
        """nnU-Net's file gets its name when it is complete: a training that was killed can be continued."""
        if self.local_rank != 0 or self.disable_checkpointing:
            super().save_checkpoint(filename)
            return
        with atomic_write(Path(filename)) as temp_path:
            super().save_checkpoint(str(temp_path))

    def get_training_transforms(self, *args: Any, **options: Any) -> Any:
        return self._with_raters(super().get_training_transforms, args, options, scales_position=2)

    def get_validation_transforms(self, *args: Any, **options: Any) -> Any:
        return self._with_raters(super().get_validation_transforms, args, options, scales_position=0)

    def _with_raters(
        self, make: Any, args: tuple[Any, ...], options: dict[str, Any], *, scales_position: int
    ) -> Any:
        """nnU-Net's transforms for 1 + R channels, without its downsampling of labels."""
        if not self.semidice.uses_raters:
            return make(*args, **options)
        # deep_supervision_scales comes by position: None keeps the target at full size
        args = (*args[:scales_position], None, *args[scales_position + 1 :])
        transforms = make(*args, **options).transforms
        previous_stage = 1 + self.num_raters
        num_removals = 0
        for transform in transforms:
            if isinstance(transform, RemoveLabelTransform):
                num_removals += 1
                transform.segmentation_channels = [0, previous_stage] if self.is_cascaded else [0]
            elif isinstance(transform, MoveSegAsOneHotToDataTransform):
                transform.source_channel_idx = previous_stage
        if num_removals != 1:
            raise RuntimeError(
                "this version of nnU-Net augments in another way than 2.8, which semidice knows: install "
                "'semidice[nnunet]'"
            )
        return ComposeTransforms([*transforms, SplitRaters()])


def read_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    """The network in nnU-Net's checkpoint, a pickle; a UserError if it holds more than numbers."""
    advice = "name a training that nnU-Net finished on this machine, or train the teacher again"
    with reading(path, advice), torch.serialization.safe_globals(_ALLOWED):
        stored = torch.load(path, map_location=device, weights_only=True)
        weights: dict[str, Tensor] = stored["network_weights"]
    return weights
