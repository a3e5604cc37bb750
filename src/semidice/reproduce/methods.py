"""The trainings of the paper by name: a shipped recipe, what is different in it, and whose student it is.

A name is a run folder, so what two tables share is trained once. Tumours are those of LiTS and KiTS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..paths import ReproductionFolder
from ..recipes import read_recipe
from ..recipes.grid import Variant
from .figures import NETWORKS, TUMOURS, column_name, paper_yaml


@dataclass(frozen=True)
class Method:
    """options: KEY to value in YAML, over the recipe. teacher: the method that must be run before."""

    recipe: str
    options: Mapping[str, str] = field(default_factory=dict)
    teacher: str | None = None


TEACHER = "unet_resnet50_hard"
_STUDENT = "unet_resnet18_distillation"
_ENCODERS = dict(
    zip(
        NETWORKS,
        ("tu-resnet50", "tu-resnet18", "tu-efficientnet_b0", "tu-mobilenetv2_100", "tu-resnet18"),
        strict=True,
    )
)
_CROSS_ENTROPY = {"loss.cross_entropy_weight": "1", "loss.region_weight": "0"}
_NO_KDE = {"teacher.calibration": "none"}

QUBIQ_METHODS: dict[str, Method] = {
    "majority": Method("qubiq_labels", {"label.maker": "majority"}),
    "random": Method("qubiq_labels", {"label.maker": "random"}),
    "uniform": Method("qubiq_labels", {"label.maker": "mean"}),
    "weighted": Method("qubiq_labels", {"label.maker": "dice_weighted"}),
    "smoothing": Method("qubiq_labels", {"label.maker": "majority", "label.smoothing": "uniform"}),
    "ce": Method("qubiq_losses", {"label.maker": "majority", **_CROSS_ENTROPY}),
    "weighted_sdl": Method("qubiq_losses", {"loss.form": "relaxed"}),
    "weighted_dml2": Method("qubiq_losses", {"loss.form": "product"}),
    "mc_dropout": Method("qubiq_systems", {"system.name": "mc_dropout"}),
    "multi_head": Method("qubiq_systems", {"system.name": "multi_head"}),
    "mrnet": Method("qubiq_systems", {"system.name": "mrnet", **_CROSS_ENTROPY}),
    "softseg": Method("qubiq_systems", {"system.name": "softseg", "label.maker": "mean"}),
}


def distillation_method(bandwidth: str) -> str:
    """The student that learned from a teacher calibrated with this bandwidth; 0 is without calibration.

    >>> distillation_method("1e-3"), distillation_method("5e-5"), distillation_method("0")
    ('unet_resnet18_distillation', 'unet_resnet18_distillation_h5e-5', 'unet_resnet18_distillation_dml1')
    """
    return f"{_STUDENT}{ {'0': '_dml1', '1e-3': ''}.get(bandwidth, f'_h{bandwidth}') }"


@cache
def tumour_methods() -> dict[str, Method]:
    """Those on LiTS and KiTS; every student has the same teacher."""
    methods: dict[str, Method] = {}
    for network in NETWORKS:
        model = {"model.architecture": network.partition("_")[0], "model.encoder": _ENCODERS[network]}
        methods[f"{network}_hard"] = Method("tumours", model)
        methods[f"{network}_smoothing"] = Method("tumours", {**model, "label.smoothing": "uniform"})
        if network != NETWORKS[0]:
            methods[f"{network}_distillation"] = Method("tumour_distillation", model, TEACHER)
    methods["unet_resnet50_ce"] = Method("tumours", _CROSS_ENTROPY)
    ablations = {
        "ce": {**_NO_KDE, "teacher.terms": "[cross_entropy]"},
        "dml1": _NO_KDE,
        "dml2": {**_NO_KDE, "loss.form": "product"},
        "sdl": {**_NO_KDE, "loss.form": "relaxed"},
    }
    for name, options in ablations.items():
        methods[f"{_STUDENT}_{name}"] = Method("tumour_distillation", options, TEACHER)
    for number in paper_yaml()["kde_bandwidth"]["columns"]:
        if number not in (0, 1e-3):
            name = distillation_method(column_name(number))
            methods[name] = Method("tumour_distillation", {"teacher.bandwidth": repr(number)}, TEACHER)
    return methods


def method_of(name: str, dataset: str) -> Method:
    """The method of a name on a dataset."""
    return (tumour_methods() if dataset in TUMOURS else QUBIQ_METHODS)[name]


def variant_of(name: str, dataset: str, *, data: Path, out: Path, overrides: Sequence[str] = ()) -> Variant:
    """The method on the dataset prepared in data/DATASET, run in out/DATASET/NAME."""
    method = method_of(name, dataset)
    options = [f"{key}={value}" for key, value in method.options.items()]
    if method.teacher is not None:
        options.append(f"teacher.run={ReproductionFolder(out).run(dataset, method.teacher).absolute()}")
    fixed = [f"name={name}", f"data.dataset={(data / dataset).absolute()}"]
    recipe = read_recipe(method.recipe, [*options, *fixed, *overrides])
    return Variant(recipe, ReproductionFolder(out).run(dataset, name), method.teacher)
