"""The options of a recipe: types, defaults, meanings, and checks of their combinations.

A section is a record of the part that uses it, such as `LossOptions`. What only a training uses is here. The
docstring below an option is its meaning in docs/recipes.md. Pydantic reads the records, see `Bounds`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..arrays import SIZE_MULTIPLE
from ..data.batches.augment import AugmentOptions
from ..data.batches.label_making import LabelOptions
from ..decisions.decision import Decision
from ..errors import UserError, nearest
from ..losses.distillation import Term
from ..losses.options import Calibration, LossOptions, TeacherCalibration
from ..metrics.registry import SCORES
from ..networks.build import ModelOptions
from ..networks.systems import SystemOptions
from ..options import Bounds, Count, Positive, Weight, meanings, members

# the rule that `semidice evaluate --decide fitted` chooses from the out-of-fold predictions of a run
FITTED = "fitted"

Number = Annotated[int, Bounds(at_least=0)]
AbsolutePath = Annotated[Path, AfterValidator(lambda path: Path(os.path.abspath(path.expanduser())))]


def checked_rule(text: str) -> str:
    """The rule as tables and files name it; a ValueError if it is neither `fitted` nor a `Decision`.

    >>> checked_rule("threshold:0.40"), checked_rule("fitted")
    ('threshold:0.4', 'fitted')
    """
    if text == FITTED:
        return text
    try:
        return str(Decision.parse(text))
    except ValueError as error:
        raise UserError(f"{error} ({FITTED} takes the rule that fits the other folds best)") from None


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The dataset and its split into folds."""

    dataset: AbsolutePath
    """Folder written by `semidice prepare`."""
    num_folds: Annotated[int, Bounds(at_least=2)] = 5
    """Number of parts that the patients are split into."""
    fold_seed: Number = 0
    """Seed of the split; use the same for methods that are compared."""
    folds: tuple[int, ...] | None = None
    """Folds to run, such as [0, 1]; null runs all folds."""

    def __post_init__(self) -> None:
        folds = list(self.fold_numbers)
        if not folds or len(set(folds)) < len(folds) or not {*folds} <= {*range(self.num_folds)}:
            raise ValueError(f"folds must be different numbers from 0 to {self.num_folds - 1}; got {folds}")

    @property
    def fold_numbers(self) -> tuple[int, ...]:
        """The folds to run, in ascending order."""
        return tuple(range(self.num_folds)) if self.folds is None else tuple(sorted(self.folds))


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(TeacherCalibration):
    """A trained run that the network learns from in addition to the label; each fold uses its fold."""

    run: AbsolutePath
    """Folder of the teacher's run."""
    calibration: Calibration = "kde"
    """How the teacher's probabilities are calibrated."""
    label_weight: Weight = 0.5
    """Weight of the loss against the label."""
    teacher_weight: Weight = 0.5
    """Weight of the loss against the teacher."""
    terms: Annotated[tuple[Term, ...], Field(min_length=1)] = ("cross_entropy", "region")
    """Terms of the loss that compare student and teacher."""


@dataclass(frozen=True)
class OptimiserOptions:
    """How weights are updated."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Sgd as in the paper; adamw needs a lower lr."""
    lr: Positive = 0.01
    """Learning rate at the start."""
    decoder_lr_factor: Positive = 1.0
    """Decoder and last layer learn at lr times this number."""
    momentum: Annotated[float, Bounds(at_least=0, below=1)] = 0.9
    """Momentum of sgd."""
    weight_decay: Weight = 5e-4
    """Weight decay."""
    decay_one_dimensional: bool = True
    """Whether biases and the weights of normalisations decay too."""
    clip_norm: Positive | None = None
    """Maximum norm of the gradient; null for no limit."""
    accumulate: Count = 1
    """Number of pieces of a batch that are processed one after the other."""


@dataclass(frozen=True)
class ScheduleOptions:
    """The number of epochs, and the decay of the learning rate: lr (1 - step / steps)^power."""

    epochs: Count = 150
    """Passes over the training cases, in whole batches: a remainder is dropped."""
    power: Weight = 0.9
    """Exponent of the decay; 0 keeps the rate constant."""
    warmup_steps: Number = 0
    """Steps in which the rate first rises from 0."""


@dataclass(frozen=True)
class PrecisionOptions:
    """Speed against precision. The paper uses fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the network; losses are always float32."""
    channels_last: bool = False
    """Memory format channels_last, faster on most devices."""
    compile: bool = False
    """Compile the network, which takes a minute at the start."""
    graph: Literal["auto", False] = "auto"
    """Record a step as one CUDA graph: if possible (auto), or never."""


@dataclass(frozen=True)
class ValidationOptions:
    """How the held-out cases of a fold are scored."""

    every: Count = 10
    """Epochs between validations; the last epoch is always validated."""
    metrics: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "dice_score",
        "binarized_dice_score",
        "soft_dice_score",
        "calibration_error",
        "brier_error",
    )
    """Scores of every case in the case table; names as in metrics.md."""
    flips: bool = False
    """Held-out cases are predicted as the mean over mirrored images, along the axes of augment.flip, which
    takes 2 or 4 times as long; `predict` does the same."""
    unit: Literal["scan", "slice"] = "scan"
    """What is scored as one case: a scan, with the slices of a volume put together, or each slice on its
    own, as `reproduce` does on LiTS and KiTS; such scores are named per slice."""
    tolerance: Weight = 1.0
    """Of surface_dice_score, in mm, or in voxels if the spacing is unknown."""

    def __post_init__(self) -> None:
        # the truth is known of phantoms only, and is scored there without being asked for
        known = [name for name, score in SCORES.items() if score.reference != "truth"]
        for name in self.metrics:
            if name not in known:
                raise ValueError(f"there is no score {name!r}{nearest(name, known)}")


class Recipe(BaseModel):
    """All options of a training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    """Name of the method in tables; by default the name of the file."""
    data: DataOptions
    # not LabelOptions(): a type checker without pydantic's plugin would report missing arguments
    label: LabelOptions = LabelOptions()
    augment: AugmentOptions = AugmentOptions()
    model: ModelOptions = ModelOptions()
    loss: LossOptions = LossOptions()
    system: SystemOptions = SystemOptions()
    teacher: TeacherOptions | None = None
    optimiser: OptimiserOptions = OptimiserOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    precision: PrecisionOptions = PrecisionOptions()
    validation: ValidationOptions = ValidationOptions()
    batch_size: Count = 8
    """Images per batch, over all processes."""
    log_every: Count = 10
    """Steps between lines of the log."""
    workers: Number = 2
    """Threads that load data ahead, for a dataset too large for the device."""
    seed: Number = 0
    """Seed of initial weights, order of cases, augmentation and dropout."""
    auto: bool = False
    """Choose every option that the recipe leaves out from the dataset and the device; false in the recipe of
    a run, which has the chosen values."""
    reasons: dict[str, str] = {}
    """Why `auto` chose an option, by its key; written by semidice."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        crop, accumulate, loss = self.augment.crop, self.optimiser.accumulate, self.loss
        if crop is not None and any(size < 1 or size % SIZE_MULTIPLE for size in crop):
            raise ValueError(
                f"augment.crop needs multiples of {SIZE_MULTIPLE} for a network; got {list(crop)}"
            )
        if self.batch_size % accumulate:
            raise ValueError(
                f"batch_size must be a multiple of optimiser.accumulate {accumulate}; got {self.batch_size}"
            )
        if self.label.raters is not None and self.system.learns_each_rater:
            raise ValueError(
                f"system {self.system.name} learns from the mask of every rater: leave label.raters out"
            )
        if loss.cross_entropy_weight == loss.region_weight == 0:
            raise ValueError(
                "loss.cross_entropy_weight and loss.region_weight are both 0, but the calibration error "
                "is 0 for every calibrated prediction, also for the mean label everywhere"
            )
        if self.teacher is not None:
            if self.system.name != "standard":
                raise ValueError(
                    f"a recipe with a teacher needs system.name standard; got {self.system.name}"
                )
            weights = {"cross_entropy": loss.cross_entropy_weight, "region": loss.region_weight}
            if not any(weights[term] for term in self.teacher.terms):
                raise ValueError(f"teacher.terms {list(self.teacher.terms)} have weight 0 in the loss")
        return self


@dataclass(frozen=True)
class Option:
    """An option, or a section of them. meaning: what its docstring says; default: ... if it is needed."""

    key: str
    kind: Any
    default: Any
    meaning: str

    @property
    def section(self) -> Any:
        """The record that a section is; None for an option."""
        return next((kind for kind in members(self.kind) if is_dataclass(kind)), None)


def options_of(section: Any = Recipe, prefix: str = "") -> Iterator[Option]:
    """Every section, and below it its options, in the order of declaration."""
    texts = meanings(section)
    for name, kind, default in _declared(section):
        option = Option(f"{prefix}{name}", kind, default, texts.get(name, ""))
        yield option
        if option.section is not None:
            yield from options_of(option.section, f"{option.key}.")


def _declared(section: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each option of a section."""
    if section is Recipe:
        for name, field in Recipe.model_fields.items():
            yield name, Recipe.__annotations__[name], ... if field.is_required() else field.default
        return
    for each in fields(section):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        yield each.name, each.type, ... if default is MISSING else default


def option_value(recipe: Recipe, key: str) -> Any:
    """The value of the option of a dotted key, as in a recipe file."""
    value: Any = recipe.model_dump(mode="json")
    for name in key.split("."):
        value = value[name]
    return value


def flat_options(recipe: Recipe) -> dict[str, Any]:
    """Every option of a recipe by its key, such as `loss.form`, with values as in a recipe file.

    Without `auto` and its reasons, which do not change a training.
    """
    return dict(flattened(recipe.model_dump(mode="json", exclude={"auto", "reasons"})))


def differing_keys(first: Recipe, second: Recipe) -> list[str]:
    """Keys of the options in which two recipes differ, such as `loss.form`.

    >>> differing_keys(*(Recipe(name=name, data=DataOptions(dataset=Path("data"))) for name in ("a", "b")))
    ['name']
    """
    a, b = flat_options(first), flat_options(second)
    return [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]


def flattened(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of nested mappings, with its dotted key."""
    for name, value in options.items():
        # the reasons of `auto` have keys of options themselves
        if isinstance(value, dict) and name != "reasons":
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
