"""The options of a recipe: types, defaults, meanings, and checks of their combinations."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic.fields import FieldInfo

from ..arrays import SIZE_MULTIPLE
from ..data.augment import AugmentOptions
from ..data.label_making import LabelOptions
from ..decisions.decision import Decision
from ..limits import MAX_FOLDS
from ..losses.calibration_error import Binning, CalibrationOptions
from ..losses.distillation import Calibration, KeySource, Term
from ..losses.segmentation import SegmentationLoss
from ..losses.tversky import DiceLoss, JaccardLoss, TverskyLoss
from ..metrics.registry import SCORES
from ..overlap.forms import Form
from ..overlap.options import (
    CROSS_ENTROPY_WEIGHT,
    REGION_WEIGHT,
    Classes,
    Over,
    RegionKeywords,
    RegionOptions,
)

Family = Literal["dice", "jaccard", "tversky"]
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
        close = get_close_matches(text, [FITTED], n=1)
        raise ValueError(f"{error}" + (f"; did you mean {FITTED}?" if close else f", or {FITTED}")) from None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataOptions(_Section):
    """The dataset and its split into folds."""

    dataset: AbsolutePath = Field(description="folder written by `semidice prepare`")
    num_folds: int = Field(
        default=5, ge=2, le=MAX_FOLDS, description="number of parts that the patients are split into"
    )
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
                raise ValueError(f"folds are numbered 0 to {self.num_folds - 1}; got {fold}")
        if len(set(self.folds or ())) != len(self.folds or ()):
            raise ValueError(f"folds contains a fold twice: {list(self.folds or ())}")
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
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="probability to drop a channel before the last layer"
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
            raise ValueError(f"{name} is not an option of an architecture: leave it out")
        return options


class SegmentationLossOptions(_Section):
    """Cross entropy, a region loss and the calibration error; see `losses.SegmentationLoss`."""

    family: Family = Field(default="dice", description="kind of the region loss")
    form: Form = Field(
        default=RegionOptions.form,
        description="how overlap is counted: min is DML1, product DML2, relaxed SDL",
    )
    alpha: float | None = Field(
        default=None, ge=0, description="weight of false positives, for tversky alone"
    )
    beta: float | None = Field(default=None, ge=0, description="weight of false negatives, for tversky alone")
    gamma: float = Field(default=RegionOptions.gamma, gt=0, description="focal exponent")
    log: bool = Field(default=RegionOptions.log, description="-log(index) in place of 1 - index")
    smooth: float = Field(
        default=RegionOptions.smooth, ge=0, description="added to numerator and denominator of the index"
    )
    over: Over = Field(default=RegionOptions.over, description="voxels that are summed into one index")
    classes: Classes = Field(default=RegionOptions.classes, description="all, or those present in the label")
    background: bool = Field(
        default=RegionOptions.background, description="whether the region loss includes class 0"
    )
    cross_entropy_weight: float = Field(
        default=CROSS_ENTROPY_WEIGHT, ge=0, description="weight of the cross entropy"
    )
    region_weight: float = Field(default=REGION_WEIGHT, ge=0, description="weight of the region loss")
    calibration_weight: float = Field(
        default=0.0, ge=0, description="weight of the average calibration error against the label"
    )
    calibration_bins: int = Field(
        default=CalibrationOptions.num_bins, ge=2, description="bins of the average calibration error"
    )
    calibration_binning: Binning = Field(
        default=CalibrationOptions.binning,
        description="a voxel is in one bin (hard), or shared by the two nearest bins (soft)",
    )
    class_weight: tuple[float, ...] | None = Field(default=None, description="one weight per class")

    def build(self, *, sync: bool = False) -> SegmentationLoss:
        """The loss of logits; `sync` takes the statistics of all processes together."""
        options: Any = self.model_dump(include={*RegionKeywords.__annotations__, "class_weight"})
        # one index per image needs no other process: gradients are averaged anyway
        sync = sync and self.over != "image"
        if self.family == "tversky":
            if self.alpha is None or self.beta is None:
                raise ValueError("family tversky needs both alpha and beta")
            region = TverskyLoss(alpha=self.alpha, beta=self.beta, **options, sync=sync)
        else:
            region = (DiceLoss if self.family == "dice" else JaccardLoss)(**options, sync=sync)
        return SegmentationLoss(
            region,
            cross_entropy_weight=self.cross_entropy_weight,
            region_weight=self.region_weight,
            calibration_weight=self.calibration_weight,
            calibration_bins=self.calibration_bins,
            calibration_binning=self.calibration_binning,
        )

    @model_validator(mode="after")
    def _can_be_built(self) -> "SegmentationLossOptions":
        if self.family != "tversky" and (self.alpha, self.beta) != (None, None):
            raise ValueError(f"alpha and beta are for family tversky; {self.family} has its own")
        if self.cross_entropy_weight == self.region_weight == 0:
            raise ValueError("cross_entropy_weight and region_weight are both 0: nothing would be learned")
        self.build()
        return self


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


class TeacherOptions(_Section):
    """A trained run that the network learns from in addition to the label; each fold uses its fold."""

    run: AbsolutePath = Field(description="folder of the teacher's run")
    calibration: Calibration = Field(
        default="kde", description="how the teacher's probabilities are calibrated"
    )
    temperature: float | Literal["fit"] = Field(
        default="fit",
        description="divides the logits; fit maximises the likelihood on cases held out from the teacher",
    )
    bandwidth: float = Field(default=1e-3, gt=0, description="bandwidth of the kernel density estimate")
    num_keys: int = Field(default=1024, ge=1, description="number of key points per batch")
    width: int = Field(
        default=3, ge=0, description="kde is applied within this distance, in voxels, from a label boundary"
    )
    keys_per_image: bool = Field(
        default=False, description="draw key points from each image and not from the whole batch"
    )
    keys_from: KeySource = Field(
        default="region",
        description="draw key points where kde is applied (region), or anywhere (as in the paper)",
    )
    reweight_keys: bool = Field(
        default=True,
        description="weight keys by the voxels they stand for; false as in the paper, see calibration.md",
    )
    label_weight: float = Field(default=0.5, ge=0, description="weight of the loss against the label")
    teacher_weight: float = Field(default=0.5, ge=0, description="weight of the loss against the teacher")
    terms: tuple[Term, ...] = Field(
        default=("cross_entropy", "region"),
        min_length=1,
        description="terms of the loss that compare student and teacher",
    )

    @field_validator("temperature")
    @classmethod
    def _above_zero(cls, temperature: float | str) -> float | str:
        if not isinstance(temperature, str) and temperature <= 0:
            raise ValueError(f"temperature must be above 0, or fit; got {temperature}")
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
    nesterov: bool = Field(default=False, description="Nesterov's momentum, for sgd")
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
    graph: Literal["auto", True, False] = Field(
        default="auto", description="record a step as one CUDA graph: if possible (auto), always, never"
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
    best_by: str = Field(
        default="dice_score", description="the score that decides which checkpoint is the best"
    )
    checkpoint: Literal["last", "best"] = Field(
        default="last",
        description="the checkpoint that is scored; best is optimistic: the same cases choose it",
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

    @field_validator("metrics", "best_by")
    @classmethod
    def _scores_exist(cls, names: Any) -> Any:
        # the truth is known of phantoms only, and is scored there without being asked for
        known = [name for name, score in SCORES.items() if score.reference != "truth"]
        for name in [names] if isinstance(names, str) else names:
            if name not in known:
                close = get_close_matches(name, known, n=1, cutoff=0.5)
                raise ValueError(f"there is no score {name!r}{nearest_hint(close, known)}")
        return names

    @field_validator("best_by")
    @classmethod
    def _needs_no_spacing(cls, name: str) -> str:
        if SCORES[name].needs_spacing:
            raise ValueError(
                f"{name} needs the spacing of voxels, which is not known while training: use another score "
                "such as dice_score, and name this one in validation.metrics"
            )
        return name


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
    loss: SegmentationLossOptions = SegmentationLossOptions()
    system: SystemOptions = SystemOptions()
    teacher: TeacherOptions | None = Field(default=None, description="null trains with the label alone")
    optimiser: OptimiserOptions = OptimiserOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    precision: PrecisionOptions = PrecisionOptions()
    validation: ValidationOptions = ValidationOptions()
    decision: Annotated[str, AfterValidator(checked_rule)] = Field(
        default=str(Decision()),
        description="rule that makes masks from probabilities: argmax, dice, jaccard, nested, mix:W, "
        "threshold:T, or fitted, which chooses one of them; see decisions.md",
    )
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
            raise ValueError(
                f"augment.crop needs multiples of {SIZE_MULTIPLE} for a network; got {list(crop)}"
            )
        if self.batch_size % self.optimiser.accumulate:
            raise ValueError(
                f"batch_size must be a multiple of optimiser.accumulate {self.optimiser.accumulate}; "
                f"got {self.batch_size}"
            )
        if self.system.name == "mc_dropout" and self.model.dropout > 0:
            raise ValueError("mc_dropout has its own dropout: set system.dropout, and set model.dropout to 0")
        if self.label.raters is not None and self.system.name in _LEARN_EACH_RATER:
            raise ValueError(
                f"system {self.system.name} learns from the mask of every rater: leave label.raters out"
            )
        if self.teacher is not None and self.system.name != "standard":
            raise ValueError(f"a recipe with a teacher needs system.name standard; got {self.system.name}")
        if self.teacher is not None:
            weights = {"cross_entropy": self.loss.cross_entropy_weight, "region": self.loss.region_weight}
            if not any(weights[term] for term in self.teacher.terms):
                raise ValueError(f"teacher.terms {list(self.teacher.terms)} have weight 0 in the loss")
        return self


def option_fields(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option with its dotted key, such as `loss.form`, in the order of declaration."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from option_fields(inner, f"{prefix}{name}.")


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


def nearest_hint(close: Sequence[str], known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the close names, or all known ones."""
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}"
