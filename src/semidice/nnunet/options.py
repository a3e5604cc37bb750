"""Options of a training by nnU-Net with our trainer: label, loss, schedule and teacher.

nnU-Net knows a trainer by the name of its class alone, and names the results after it. So the options of
`SemidiceTrainer_NAME` are a file NAME.json next to nnU-Net's preprocessed data. The default name
is made of label and loss, such as `mean_dml1`.

The defaults of the loss are nnU-Net's: cross entropy and Dice have weight 1 each, the Dice loss leaves out
the background, and its smoothing term is 1e-5 in numerator and denominator of 2 tp / (2 tp + fp + fn). One
index is taken over the batch if the plans say so (`batch_dice`), and one per image otherwise.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator

from ..arrays import check_choice
from ..data.label_making import LabelOptions, Maker
from ..data.manifest import Record
from ..limits import read_bytes
from ..losses.distillation import Calibration
from ..paths import check_name, write_text
from ..recipes.options import SegmentationLossOptions
from .folders import TRAINER_PREFIX, trainer_options_file

LossName = Literal["dml1", "dml2", "jml1", "jml2", "sdl", "ce", "nnunet"]
# nnU-Net adds 1e-5 to 2 tp and to 2 tp + fp + fn; our index is that divided by 2
_SMOOTH = 0.5e-5
_FORMS: dict[str, dict[str, Any]] = {
    "dml1": {"family": "dice", "form": "min"},
    "dml2": {"family": "dice", "form": "product"},
    "jml1": {"family": "jaccard", "form": "min"},
    "jml2": {"family": "jaccard", "form": "product"},
    "sdl": {"family": "dice", "form": "relaxed"},
    "ce": {"region_weight": 0.0},
}


class NnunetTeacher(Record):
    """A finished training of the same dataset, plans and configuration, each fold by its own fold."""

    trainer: str = Field(description="name of the class, such as nnUNetTrainer or SemidiceTrainer_mean_dml1")
    calibration: Calibration = "kde"
    bandwidth: float = Field(default=1e-3, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    weight: float = Field(default=0.5, ge=0, le=1, description="of the loss against the teacher")


class TrainerOptions(Record):
    """Everything that our trainer changes in nnU-Net's training.

    loss: None is nnU-Net's own loss on its own label, which needs no raters. epochs, iterations: None keeps
    nnU-Net's 1000 epochs of 250 steps.
    """

    label: LabelOptions = LabelOptions.model_validate({})
    loss: SegmentationLossOptions | None = None
    epochs: int | None = Field(default=None, ge=1)
    iterations: int | None = Field(default=None, ge=1)
    teacher: NnunetTeacher | None = None

    @field_validator("label")
    @classmethod
    def _of_all_raters(cls, label: LabelOptions) -> LabelOptions:
        if label.raters is not None:
            raise ValueError(
                f"nnU-Net learns from all raters of the dataset: leave raters out; got {label.raters}"
            )
        return label


class ShortOptions(NamedTuple):
    """What the command line names, checked."""

    label: Maker
    loss: LossName
    teacher: NnunetTeacher | None


def short_options(label: str, loss: str, teacher: str | None, calibration: str) -> ShortOptions:
    """The names of the command line; a ValueError for a name that does not exist."""
    check_choice("--label", label, Maker)
    check_choice("--loss", loss, LossName)
    check_choice("--calibration", calibration, Calibration)
    chosen = (
        None
        if teacher is None
        else NnunetTeacher.model_validate({"trainer": teacher, "calibration": calibration})
    )
    return ShortOptions(label, loss, chosen)  # type: ignore[arg-type]


def trainer_options(
    label: Maker,
    loss: LossName,
    *,
    epochs: int | None = None,
    iterations: int | None = None,
    teacher: NnunetTeacher | None = None,
) -> TrainerOptions:
    """The options by the short names of the command line.

    >>> trainer_options("mean", "dml1").loss.form
    'min'
    """
    chosen = None
    if loss != "nnunet":
        chosen = SegmentationLossOptions.model_validate(
            {
                "background": False,
                "smooth": _SMOOTH,
                "cross_entropy_weight": 1.0,
                "region_weight": 1.0,
                **_FORMS[loss],
            }
        )
    elif teacher is not None:
        raise ValueError("nnU-Net's own loss takes no teacher: choose another --loss, such as dml1")
    return TrainerOptions(
        label=LabelOptions(maker=label), loss=chosen, epochs=epochs, iterations=iterations, teacher=teacher
    )


def trainer_name(label: Maker, loss: LossName, name: str | None, teacher: NnunetTeacher | None) -> str:
    """The name of the trainer's class; nnU-Net uses two underscores as a separator, so a name has none.

    >>> trainer_name("mean", "dml1", None, None), trainer_name("mean", "nnunet", None, None)
    ('SemidiceTrainer_mean_dml1', 'SemidiceTrainer_nnunet')
    """
    if name is None:
        name = "nnunet" if loss == "nnunet" else f"{label}_{loss}"
        name += "" if teacher is None else f"_student_{teacher.calibration}"
    if not check_name(name).isidentifier() and not name.replace("_", "").isalnum():
        raise ValueError(f"a trainer's name has letters, digits and underscores; got {name!r}")
    if "__" in name:
        raise ValueError(f"nnU-Net separates names by two underscores, so {name!r} must not have them")
    return TRAINER_PREFIX + name


def write_options(preprocessed: Path, trainer: str, options: TrainerOptions, *, has_results: bool) -> None:
    """Store the options; a ValueError if results of the trainer were made with others."""
    path = trainer_options_file(preprocessed, trainer)
    if path.is_file() and has_results and read_options(preprocessed, trainer) != options:
        raise ValueError(
            f"{trainer} has results with other options, see {path}: choose another name with --name, or "
            "remove its results"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(options.model_dump(mode="json"), indent=1) + "\n")


def read_options(preprocessed: Path, trainer: str) -> TrainerOptions:
    """The stored options; a ValueError names the file if it is missing or wrong."""
    path = trainer_options_file(preprocessed, trainer)
    try:
        return TrainerOptions.model_validate_json(read_bytes(path))
    except OSError as error:
        raise ValueError(
            f"{trainer} has no options in {path}: start the training with `semidice nnunet train`"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} does not hold options of a trainer: {where}: {first['msg']}") from error
