"""All public losses in all forms. The law tests run over this table; one test checks that it is complete."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

import semidice
from semidice.arrays import one_hot
from semidice.losses.options import Binning, Form

FORMS: tuple[Form, ...] = get_args(Form)
BINNINGS: tuple[Binning, ...] = get_args(Binning)
REGION_FUNCTIONS = {"dice_loss": {}, "jaccard_loss": {}, "tversky_loss": {"alpha": 0.7, "beta": 0.3}}
REGION_MODULES = {"DiceLoss": {}, "JaccardLoss": {}, "TverskyLoss": {"alpha": 0.7, "beta": 0.3}}

# A loss with its activation and options set; it is called with (prediction, target, valid).
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Entry:
    """One public loss in one form. `build(activation=..., **options)` returns the loss."""

    public: str
    form: Form | None
    build: Callable[..., Call]
    # the soft label minimises the loss
    compatible: bool
    # the loss is 0 at the label; the cross entropy is not
    zero_at_label: bool
    # the gradient also flows to a target that requires it
    target_gradient: bool = True
    # no other prediction has a loss as small; a calibration error is 0 for every calibrated prediction
    unique: bool = True
    # of a loss with bins
    binning: Binning | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.public, self.form, self.binning)))

    @property
    def has_over(self) -> bool:
        """Whether the loss has the option `over`; the cross entropy has not."""
        return self.form is not None or self.binning is not None


def _settings(public: str, form: Form) -> dict[str, float]:
    settings = {**REGION_FUNCTIONS, **REGION_MODULES}[public]
    # the squared form needs alpha = beta: otherwise its index could exceed 1
    return {"alpha": 0.8, "beta": 0.8} if form == "squared" and settings else settings


def _function(public: str, form: Form) -> Entry:
    def build(activation: str = "none", **options: object) -> Call:
        function = getattr(semidice, public)
        keywords = {**_settings(public, form), "form": form, "activation": activation, **options}
        return lambda prediction, target, valid=None: function(prediction, target, valid=valid, **keywords)

    return Entry(public, form, build, compatible=form != "relaxed", zero_at_label=form != "relaxed")


def _module(public: str, form: Form) -> Entry:
    def build(activation: str = "none", **options: object) -> nn.Module:
        keywords = {**_settings(public, form), "form": form, "activation": activation, **options}
        return getattr(semidice, public)(**keywords)

    return Entry(public, form, build, compatible=form != "relaxed", zero_at_label=form != "relaxed")


def _mixture(form: Form) -> Entry:
    def build(activation: str = "none", **options: object) -> nn.Module:
        return semidice.SegmentationLoss(form=form, activation=activation, **options)

    return Entry("SegmentationLoss", form, build, compatible=form != "relaxed", zero_at_label=False)


def _distillation(form: Form) -> Entry:
    """The teacher equals the label; the loss passes no gradient to the teacher."""

    def build(activation: str = "none", **options: object) -> Call:
        mix = semidice.SegmentationLoss(form=form, activation=activation, **options)
        loss = semidice.DistillationLoss(mix)

        def call(prediction: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
            soft = target.is_floating_point()
            teacher = target if soft else one_hot(target, prediction.shape[1]).to(prediction.dtype)
            return loss(prediction, target, teacher, valid)

        return call

    return Entry("DistillationLoss", form, build, form != "relaxed", False, target_gradient=False)


def _cross_entropy() -> Entry:
    def build(activation: str = "none", **options: object) -> Call:
        supported = {
            name: value for name, value in options.items() if name in ("ignore_index", "class_weight")
        }
        return lambda prediction, target, valid=None: semidice.soft_cross_entropy(
            prediction, target, valid=valid, activation=activation, **supported
        )

    return Entry("soft_cross_entropy", None, build, compatible=True, zero_at_label=False)


def _calibration_error(binning: Binning) -> Entry:
    def build(activation: str = "none", **options: object) -> Call:
        keywords = {
            "calibration_binning": binning,
            "activation": activation,
            "calibration_bins": 7,
            **options,
        }
        return semidice.CalibrationErrorLoss(**keywords)

    public = "CalibrationErrorLoss"
    return Entry(public, None, build, compatible=True, zero_at_label=True, unique=False, binning=binning)


def _calibrated_mixture(binning: Binning) -> Entry:
    """The mixture has a unique minimum at the label although one of its terms has not."""

    def build(activation: str = "none", **options: object) -> nn.Module:
        keywords = {"activation": activation, "calibration_weight": 0.5, **options}
        return semidice.SegmentationLoss(calibration_binning=binning, **keywords)

    return Entry("SegmentationLoss", "min", build, compatible=True, zero_at_label=False, binning=binning)


ENTRIES: list[Entry] = [
    # a function is its module, called once; `test_laws` compares them in every form
    *(_function(name, "min") for name in REGION_FUNCTIONS),
    *(_module(name, form) for name in REGION_MODULES for form in FORMS),
    *(_mixture(form) for form in FORMS),
    *(_distillation(form) for form in FORMS),
    _cross_entropy(),
    *(_calibration_error(binning) for binning in BINNINGS),
    *(_calibrated_mixture(binning) for binning in BINNINGS),
]
COMPATIBLE = [entry for entry in ENTRIES if entry.compatible]
UNIQUE = [entry for entry in COMPATIBLE if entry.unique]
NOT_UNIQUE = [entry for entry in COMPATIBLE if not entry.unique]
ZERO_AT_LABEL = [entry for entry in ENTRIES if entry.zero_at_label]


def is_loss(name: str) -> bool:
    """Whether a public name is that of a loss: the names of losses have fixed endings."""
    return name.endswith(("_loss", "Loss", "cross_entropy"))


def soft_label(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random soft label (N, C, *space) that sums to one over classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).mul(2).softmax(1)


def random_logits(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random logits of `shape`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).mul(2)


def class_map(shape: tuple[int, ...], num_classes: int, seed: int = 2) -> Tensor:
    """Random class indices of `shape`."""
    return torch.randint(0, num_classes, shape, generator=torch.Generator().manual_seed(seed))
