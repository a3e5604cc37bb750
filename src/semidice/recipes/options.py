"""The options of a recipe: types, defaults, meanings, and checks of their combinations."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic.fields import FieldInfo

from ..arrays import SIZE_MULTIPLE
from ..data.batches.augment import AugmentOptions
from ..data.batches.label_making import LabelOptions
from ..decisions.decision import Decision
from ..errors import UserError, nearest
from ..losses.distillation import Term
from ..losses.options import Calibration, KeySource, LossOptions, TeacherCalibration
from ..metrics.registry import SCORES
from ..options import meanings

SystemName = Literal["standard", "mc_dropout", "multi_head", "softseg", "mrnet", "learned_reliability"]

# systems that do not use `label`
_LEARN_EACH_RATER = ("multi_head", "mrnet", "learned_reliability")
# the rule that `semidice evaluate --decide fitted` chooses from the out-of-fold predictions of a run
FITTED = "fitted"

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


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataOptions(_Section):
    """The dataset and its split into folds."""

    dataset: AbsolutePath = Field(description="folder written by `semidice prepare`")
    num_folds: int = Field(default=5, ge=2, description="number of parts that the patients are split into")
    fold_seed: int = Field(
        default=0, ge=0, description="seed of the split; use the same for methods that are compared"
    )
    folds: tuple[int, ...] | None = Field(
        default=None, min_length=1, description="folds to run, such as [0, 1]; null runs all folds"
    )

    @model_validator(mode="after")
    def _folds_exist(self) -> "DataOptions":
        for fold in self.folds or ():
            if not 0 <= fold < self.num_folds:
                raise UserError(f"folds are numbered 0 to {self.num_folds - 1}; got {fold}")
        if len(set(self.folds or ())) != len(self.folds or ()):
            raise UserError(f"folds contains a fold twice: {list(self.folds or ())}")
        return self

    @property
    def fold_numbers(self) -> tuple[int, ...]:
        """The folds to run, in ascending order."""
        return tuple(range(self.num_folds)) if self.folds is None else tuple(sorted(self.folds))


class ModelOptions(_Section):
    """The network; see `networks.build.build_model`."""

    architecture: str = Field(
        default="unet",
        description="name in segmentation_models_pytorch, such as deeplabv3plus; or small_unet",
    )
    encoder: str = Field(default="resnet50", description="name in smp or timm; none for small_unet")
    weights: str = Field(
        default="imagenet",
        description="weights of the encoder: imagenet (from the hub), a .safetensors file, or none",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="options of the architecture, such as decoder_channels; see smp"
    )

    def build_options(self) -> dict[str, Any]:
        """Keyword arguments of `networks.build.build_model`, except the numbers of channels and classes."""
        return {**self.model_dump(exclude={"options"}), **self.options}

    @field_validator("options")
    @classmethod
    def _no_option_twice(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options.keys() & (cls.model_fields.keys() | {"num_channels", "num_classes"}):
            raise UserError(f"{name} is not an option of an architecture: leave it out")
        return options


class SystemOptions(_Section):
    """The system to train: a plain network, or one for several raters; see systems.md."""

    name: SystemName = Field(
        default="standard", description="standard is a plain network; the others are explained in systems.md"
    )
    dropout: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="mc_dropout: probability to drop a channel in the two deepest levels",
    )
    num_samples: int = Field(
        default=20, ge=1, description="mc_dropout: number of predictions that are averaged"
    )
    trace_weight: float = Field(
        default=0.01,
        ge=0,
        description="learned_reliability: weight of the mean trace of the confusion matrices",
    )


def _as_declared(name: str, default: Any = None, **bounds: Any) -> Any:
    """The field of a recipe for an option that `TeacherCalibration` declares."""
    meaning = meanings(TeacherCalibration)[name].removesuffix(".")
    default = getattr(TeacherCalibration, name) if default is None else default
    return Field(default=default, description=meaning[0].lower() + meaning[1:], **bounds)


class TeacherOptions(_Section):
    """A trained run that the network learns from in addition to the label; each fold uses its fold."""

    run: AbsolutePath = Field(description="folder of the teacher's run")
    calibration: Calibration = _as_declared("calibration", "kde")
    temperature: float | Literal["fit"] = _as_declared("temperature")
    bandwidth: float = _as_declared("bandwidth", gt=0)
    num_keys: int = _as_declared("num_keys", ge=1)
    width: int = _as_declared("width", ge=0)
    keys_per_image: bool = _as_declared("keys_per_image")
    keys_from: KeySource = _as_declared("keys_from")
    reweight_keys: bool = _as_declared("reweight_keys")
    label_weight: float = Field(default=0.5, ge=0, description="weight of the loss against the label")
    teacher_weight: float = Field(default=0.5, ge=0, description="weight of the loss against the teacher")
    terms: tuple[Term, ...] = Field(
        default=("cross_entropy", "region"),
        min_length=1,
        description="terms of the loss that compare student and teacher",
    )

    def of_teacher(self) -> TeacherCalibration:
        """The options that a `losses.Teacher` takes."""
        return TeacherCalibration(
            **{each.name: getattr(self, each.name) for each in fields(TeacherCalibration)}
        )

    @field_validator("temperature")
    @classmethod
    def _above_zero(cls, temperature: float | str) -> float | str:
        if not isinstance(temperature, str) and temperature <= 0:
            raise UserError(f"temperature must be above 0, or fit; got {temperature}")
        return temperature


class OptimiserOptions(_Section):
    """How weights are updated."""

    name: Literal["sgd", "adamw"] = Field(
        default="sgd", description="sgd as in the paper; adamw needs a lower lr"
    )
    lr: float = Field(default=0.01, gt=0, description="learning rate at the start")
    decoder_lr_factor: float = Field(
        default=1.0, gt=0, description="decoder and last layer learn at lr times this number"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(default=5e-4, ge=0, description="weight decay")
    decay_one_dimensional: bool = Field(
        default=True, description="whether biases and the weights of normalisations decay too"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="maximum norm of the gradient; null for no limit"
    )
    accumulate: int = Field(
        default=1, ge=1, description="number of pieces of a batch that are processed one after the other"
    )


class ScheduleOptions(_Section):
    """The number of epochs, and the decay of the learning rate: lr (1 - step / steps)^power."""

    epochs: int = Field(
        default=150,
        ge=1,
        description="passes over the training cases, in whole batches: a remainder is dropped",
    )
    power: float = Field(default=0.9, ge=0, description="exponent of the decay; 0 keeps the rate constant")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate first rises from 0")


class PrecisionOptions(_Section):
    """Speed against precision. The paper uses fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="precision of the network; losses are always float32"
    )
    channels_last: bool = Field(
        default=False, description="memory format channels_last, faster on most devices"
    )
    compile: bool = Field(default=False, description="compile the network, which takes a minute at the start")
    graph: Literal["auto", False] = Field(
        default="auto", description="record a step as one CUDA graph: if possible (auto), or never"
    )


class ValidationOptions(_Section):
    """How the held-out cases of a fold are scored."""

    every: int = Field(
        default=10, ge=1, description="epochs between validations; the last epoch is always validated"
    )
    metrics: tuple[str, ...] = Field(
        default=("dice_score", "binarized_dice_score", "soft_dice_score", "calibration_error", "brier_error"),
        min_length=1,
        description="scores of every case in the case table; names as in metrics.md",
    )
    flips: bool = Field(
        default=False,
        description="held-out cases are predicted as the mean over mirrored images, along the axes of "
        "augment.flip, which takes 2 or 4 times as long; `predict` does the same",
    )

    unit: Literal["scan", "slice"] = Field(
        default="scan",
        description="what is scored as one case: a scan, with the slices of a volume put together, or each "
        "slice on its own, as `reproduce` does on LiTS and KiTS; such scores are named per slice",
    )
    tolerance: float = Field(
        default=1.0, ge=0, description="of surface_dice_score, in mm, or in voxels if the spacing is unknown"
    )

    @field_validator("metrics")
    @classmethod
    def _scores_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        # the truth is known of phantoms only, and is scored there without being asked for
        known = [name for name, score in SCORES.items() if score.reference != "truth"]
        for name in names:
            if name not in known:
                raise UserError(f"there is no score {name!r}{nearest(name, known)}")
        return names


class Recipe(_Section):
    """All options of a training."""

    name: str = Field(
        min_length=1, description="name of the method in tables; by default the name of the file"
    )
    data: DataOptions
    # not LabelOptions(): a type checker without pydantic's plugin would report missing arguments
    label: LabelOptions = LabelOptions.model_validate({})
    augment: AugmentOptions = AugmentOptions.model_validate({})
    model: ModelOptions = ModelOptions()
    loss: LossOptions = LossOptions()
    system: SystemOptions = SystemOptions()
    teacher: TeacherOptions | None = Field(default=None, description="null trains with the label alone")
    optimiser: OptimiserOptions = OptimiserOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    precision: PrecisionOptions = PrecisionOptions()
    validation: ValidationOptions = ValidationOptions()
    batch_size: int = Field(default=8, ge=1, description="images per batch, over all processes")
    log_every: int = Field(default=10, ge=1, description="steps between lines of the log")
    workers: int = Field(
        default=2, ge=0, description="threads that load data ahead, for a dataset too large for the device"
    )
    seed: int = Field(
        default=0, ge=0, description="seed of initial weights, order of cases, augmentation and dropout"
    )

    auto: bool = Field(
        default=False,
        description="choose every option that the recipe leaves out from the dataset and the device; "
        "false in the recipe of a run, which has the chosen values",
    )
    reasons: dict[str, str] = Field(
        default_factory=dict, description="why `auto` chose an option, by its key; written by semidice"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        crop = self.augment.crop
        if crop is not None and any(size < 1 or size % SIZE_MULTIPLE for size in crop):
            raise UserError(
                f"augment.crop needs multiples of {SIZE_MULTIPLE} for a network; got {list(crop)}"
            )
        if self.batch_size % self.optimiser.accumulate:
            raise UserError(
                f"batch_size must be a multiple of optimiser.accumulate {self.optimiser.accumulate}; "
                f"got {self.batch_size}"
            )
        if self.label.raters is not None and self.system.name in _LEARN_EACH_RATER:
            raise UserError(
                f"system {self.system.name} learns from the mask of every rater: leave label.raters out"
            )
        if self.teacher is not None and self.system.name != "standard":
            raise UserError(f"a recipe with a teacher needs system.name standard; got {self.system.name}")
        if self.loss.cross_entropy_weight == self.loss.region_weight == 0:
            raise UserError(
                "loss.cross_entropy_weight and loss.region_weight are both 0, but the calibration error "
                "is 0 for every calibrated prediction, also for the mean label everywhere"
            )
        if self.teacher is not None:
            weights = {"cross_entropy": self.loss.cross_entropy_weight, "region": self.loss.region_weight}
            if not any(weights[term] for term in self.teacher.terms):
                raise UserError(f"teacher.terms {list(self.teacher.terms)} have weight 0 in the loss")
        return self


def option_fields(section: Any = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option with its dotted key, such as `loss.form`, in the order of declaration."""
    for name, field in section_fields(section).items():
        yield f"{prefix}{name}", field
        inner = section_of(field)
        if inner is not None:
            yield from option_fields(inner, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> Any:
    """The section that an option is, or None."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)):
            return kind
    return None


def section_fields(section: Any) -> dict[str, FieldInfo]:
    """The options of a section by name: of a pydantic model, or of a record with docstrings of its fields."""
    if issubclass(section, BaseModel):
        return dict(section.model_fields)
    found: dict[str, FieldInfo] = {}
    hints, texts = get_type_hints(section, include_extras=True), meanings(section)
    for each in fields(section):
        found[each.name] = field = FieldInfo.from_annotated_attribute(hints[each.name], each.default)
        field.description = texts[each.name][:1].lower() + texts[each.name][1:].removesuffix(".")
    return found


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

    >>> differing_keys(*(Recipe(name=name, data={"dataset": "prepared"}) for name in ("a", "b")))
    ['name']
    """
    a, b = flat_options(first), flat_options(second)
    return [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]


def flattened(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of nested mappings, with its dotted key."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
