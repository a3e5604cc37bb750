"""Segmentation networks by name: images (N, channels, H, W) to logits (N, C, H, W).

    architecture   any of segmentation_models_pytorch (unet, unetplusplus, deeplabv3plus, fpn, ...) with any
                   encoder of smp ("resnet50", "efficientnet-b0") or timm ("tf_efficientnet_lite0"); if both
                   have the name, "resnet50" is smp's and "tu-resnet50" timm's. Or small_unet, without encoder
    weights        of the encoder: "imagenet" from the hub, the path of a .safetensors file, or "none"

For every network, height and width must be multiples of 32 (`SIZE_MULTIPLE`). Initial values come from
torch's default generator: call torch.manual_seed first. Not here: normalising images, see `data.dataset`.

A recipe may come from a stranger, and arguments of timm can name files and addresses: `checkpoint_path`, for
example, is a file that some versions of timm unpickle, which runs code. So no argument of the functions with
which timm builds a network is passed on, and values are numbers, single words, and lists and mappings of
them. Weights have one way in: `model.weights`, see `pretrained`.
"""

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from ..errors import UserError, nearest
from .pretrained import load_pretrained
from .small_unet import SmallUNet

# of the architectures in smp: what semidice sets itself, and what changes the output
_SET_BY_US = {"encoder_name", "encoder_weights", "in_channels", "classes", "activation", "aux_params"}
# of the encoders in timm, besides the arguments of its building functions
_REFUSED = {"features_only", "out_indices", "feature_cls", "pruned"}
_REFUSED_WORD = re.compile(r"pretrained|checkpoint|weights|cfg|(path|dir|file|url)$")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
# timm reads other names, such as hf-hub:OWNER/NAME and local-dir:FOLDER, as addresses
_ENCODER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_]+)?")


class Task(NamedTuple):
    """What a network is for: channels of the images, classes with the background, and raters."""

    channels: int
    classes: int
    raters: int = 1


@dataclass(frozen=True)
class ModelOptions:
    """The network; see `networks.build`."""

    architecture: str = "unet"
    """Name in segmentation_models_pytorch, such as deeplabv3plus; or small_unet."""
    encoder: str = "resnet50"
    """Name in smp or timm; none for small_unet."""
    weights: str = "imagenet"
    """Weights of the encoder: imagenet (from the hub), a .safetensors file, or none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the architecture, such as decoder_channels; see smp."""


def build_model(model: ModelOptions, task: Task) -> nn.Module:
    """The network, in training mode, on the CPU.

    `model.options` are those of the architecture in smp, such as `decoder_channels`; the mapping
    `encoder_options` is passed to timm, such as `img_size`. Of small_unet: `channels` and `norm`. Weights of
    another name than "imagenet" work if smp has some of that name. If images do not have three channels, the
    first convolution is summed or repeated, as smp and timm do.

    >>> import torch
    >>> network = build_model(ModelOptions("small_unet", "none", "none"), Task(channels=1, classes=2))
    >>> tuple(network(torch.zeros(1, 1, 64, 64)).shape)
    (1, 2, 64, 64)
    """
    if task.channels < 1 or task.classes < 2:
        raise UserError(
            "a network needs 1 or more channels and 2 or more classes; "
            f"got {task.channels} and {task.classes}"
        )
    if model.architecture != "small_unet":
        return _build_smp(model, task)
    if (model.encoder, model.weights) != ("none", "none"):
        raise UserError(
            "small_unet has neither an encoder nor pretrained weights: set both to 'none'; "
            f"got {model.encoder!r} and {model.weights!r}"
        )
    _check_options("small_unet", model.options, _parameters(SmallUNet) - {"num_channels", "num_classes"})
    return SmallUNet(task.channels, task.classes, **model.options)


def _build_smp(model: ModelOptions, task: Task) -> nn.Module:
    """The network of smp, with random initial values or a pretrained encoder."""
    # imported here: smp and timm take seconds to import, and commands without a network do not need them
    import segmentation_models_pytorch as smp

    architectures = smp.MODEL_ARCHITECTURES_MAPPING
    if model.architecture not in architectures:
        known = [*architectures, "small_unet"]
        raise UserError(
            f"there is no architecture {model.architecture!r}{nearest(model.architecture, known, most=5)}"
        )
    make = architectures[model.architecture]
    name = _encoder_name(model.encoder)
    own_options = dict(model.options)
    encoder_options = own_options.pop("encoder_options", {})
    _check_options(model.architecture, own_options, _parameters(make) - _SET_BY_US)
    _check_encoder_options(encoder_options)
    with warnings.catch_warnings():
        # smp's older names of timm's encoders stay usable
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="segmentation_models_pytorch")
        try:
            network: Any = make(
                encoder_name=name,
                encoder_weights=None,
                in_channels=task.channels,
                classes=task.classes,
                **own_options,
                **encoder_options,
            )
        # smp and timm refuse a combination with many kinds of errors, such as an AttributeError
        except Exception as error:
            raise UserError(
                f"{model.architecture} cannot be built on encoder {model.encoder} with options "
                f"{model.options}: {error}"
            ) from error
        if model.weights != "none":
            load_pretrained(network.encoder, name, model.weights, task.channels, encoder_options)
    return network  # type: ignore[no-any-return]


def _encoder_name(encoder: str) -> str:
    """The encoder's name in smp: for an encoder of timm, "tu-" and timm's name."""
    import segmentation_models_pytorch as smp
    import timm

    if not _ENCODER_NAME.fullmatch(encoder):
        raise UserError(
            f"encoder {encoder!r} is not a name of smp or timm, such as resnet50: an address or a folder "
            "cannot be an encoder; set model.weights to a .safetensors file for weights of your own"
        )
    if encoder in smp.encoders.encoders:
        return encoder
    name = encoder.removeprefix("tu-").removeprefix("timm-")
    if not timm.is_model(name):
        known = [*smp.encoders.encoders, *timm.list_models()]
        raise UserError(f"there is no encoder {encoder!r}{nearest(encoder, known, most=5)}")
    return f"tu-{name}"


def _parameters(network: Any) -> set[str]:
    """The options that a class or function names."""
    parameters = inspect.signature(network).parameters.values()
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}


@cache
def _arguments_of_timm() -> set[str]:
    """The arguments of the functions with which timm builds a network."""
    from timm.models import build_model_with_cfg, create_model

    return _parameters(create_model) | _parameters(build_model_with_cfg)


def _check_options(architecture: str, options: Mapping[str, Any], allowed: Iterable[str]) -> None:
    for name, value in options.items():
        if name not in allowed:
            close = nearest(name, sorted(allowed), most=5)
            raise UserError(f"there is no option of {architecture} {name!r}{close}")
        _check_value(f"model.options.{name}", value)


def _check_encoder_options(options: Any) -> None:
    if not isinstance(options, Mapping):
        raise UserError(
            f"model.options.encoder_options must be a mapping, such as {{img_size: 256}}; got {options!r}"
        )
    for name, value in options.items():
        if name in _REFUSED | _arguments_of_timm() or _REFUSED_WORD.search(name):
            raise UserError(f"option {name!r} of an encoder cannot be set by a recipe: leave it out")
        _check_value(f"model.options.encoder_options.{name}", value)


def _check_value(key: str, value: Any) -> None:
    """A UserError unless the value is a number, a word, or made of them."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            _check_value(key, item)
    elif not (
        value is None or isinstance(value, int | float) or (isinstance(value, str) and _WORD.fullmatch(value))
    ):
        raise UserError(f"{key} must be a number or one word, such as bilinear; got {value!r}")
