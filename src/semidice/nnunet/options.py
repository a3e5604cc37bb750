"""Options of a training by nnU-Net with our trainer: the options of the command, and what the trainer reads.

nnU-Net knows a trainer by the name of its class alone, and names the results after it. So the options of
`SemidiceTrainer_NAME` are a file in the folder of its results. The default name is made of label and loss,
such as `mean_dml1`. This module imports no torch: `semidice --help` reads the records.

The defaults of the loss are nnU-Net's: cross entropy and Dice have weight 1 each, the Dice loss leaves out
the background, and its smoothing term is 1e-5 in numerator and denominator of 2 tp / (2 tp + fp + fn).
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..losses.options import LossOptions, Over
from ..options import Count, check_options
from ..paths import check_name

TRAINER_PREFIX = "SemidiceTrainer_"
Label = Literal["majority", "random", "mean", "dice_weighted", "staple"]
LossName = Literal["dml1", "dml2", "jml1", "jml2", "sdl", "ce", "nnunet"]
# nnU-Net adds 1e-5 to 2 tp and to 2 tp + fp + fn; our index is that divided by 2
_SMOOTH = 0.5e-5
_LOSSES: dict[LossName, dict[str, Any]] = {
    "dml1": {},
    "dml2": {"form": "product"},
    "jml1": {"alpha": 1.0, "beta": 1.0},
    "jml2": {"alpha": 1.0, "beta": 1.0, "form": "product"},
    "sdl": {"form": "relaxed"},
    "ce": {"region_weight": 0.0},
}


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Everything that our trainer changes in nnU-Net's training.

    >>> TrainerOptions().trainer, TrainerOptions(loss="nnunet").trainer
    ('SemidiceTrainer_mean_dml1', 'SemidiceTrainer_nnunet')
    """

    label: Label = "mean"
    """Label, made of all raters."""
    loss: LossName = "dml1"
    """Loss of that label; nnunet is nnU-Net's own, on the majority."""
    name: str | None = None
    """Name of this training. Default: label and loss."""
    epochs: Count | None = None
    """Default: nnU-Net's 1000."""
    iterations: Count | None = None
    """Steps per epoch. Default: nnU-Net's 250."""
    teacher: str | None = None
    """Also learn from a finished training: the name of its trainer."""
    calibration: Literal["kde", "none"] = "kde"
    """Of the teacher's probabilities."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.teacher is not None and not self.uses_raters:
            raise ValueError("teacher is not for nnU-Net's own loss: choose another loss, such as dml1")
        name = check_name(self.trainer)
        if not name.replace("_", "").isalnum() or "__" in name:
            raise ValueError(
                f"name needs letters, digits and single underscores, because nnU-Net separates names by two; "
                f"got {self.name!r}"
            )

    @property
    def uses_raters(self) -> bool:
        return self.loss != "nnunet"

    @property
    def trainer(self) -> str:
        """The name of the trainer's class."""
        name = self.name
        if name is None:
            name = f"{self.label}_{self.loss}" if self.uses_raters else self.loss
            name += "" if self.teacher is None else f"_student_{self.calibration}"
        return TRAINER_PREFIX + name

    def loss_options(self, over: Over = "batch") -> LossOptions:
        """Our loss, with nnU-Net's weights; over: batch if nnU-Net's plans say `batch_dice`, else image.

        >>> TrainerOptions(loss="jml2").loss_options().form
        'product'
        """
        chosen = {"smooth": _SMOOTH, "cross_entropy_weight": 1.0, "region_weight": 1.0, **_LOSSES[self.loss]}
        return LossOptions(over=over, background=False, **chosen)
