"""The options of a network that a recipe may pass on to smp and timm.

A recipe may come from a stranger, and arguments of timm can name files and addresses: `checkpoint_path`, for
example, is a file that some versions of timm unpickle, which runs code. So the names below are all that is
passed on, and their values are numbers, single words, and lists and mappings of them: never a path, an
address or the name of a repository. Weights have one way in: `model.weights`, see `pretrained`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UserError, nearest

# of the architectures of smp; each takes those that its signature has
_ARCHITECTURE_OPTIONS = {
    "decoder_aspp_dropout",
    "decoder_aspp_separable",
    "decoder_atrous_rates",
    "decoder_attention_type",
    "decoder_channels",
    "decoder_dropout",
    "decoder_fusion_channels",
    "decoder_intermediate_channels",
    "decoder_interpolation",
    "decoder_merge_policy",
    "decoder_pab_channels",
    "decoder_pyramid_channels",
    "decoder_readout",
    "decoder_segmentation_channels",
    "decoder_use_norm",
    "encoder_depth",
    "encoder_output_indices",
    "encoder_output_stride",
    "psp_dropout",
    "psp_out_channels",
    "upsampling",
}
# of the encoders of timm; an encoder that does not take one says so when it is built
_ENCODER_OPTIONS = {
    "act_layer",
    "always_partition",
    "attn_drop_rate",
    "drop_block_rate",
    "drop_path_rate",
    "drop_rate",
    "dynamic_img_pad",
    "dynamic_img_size",
    "img_size",
    "init_values",
    "norm_eps",
    "norm_layer",
    "patch_drop_rate",
    "pos_drop_rate",
    "proj_drop_rate",
    "strict_img_size",
    "window_size",
}
# any number, such as the channels of a layer
_MAX_NUMBER = 4096
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
# timm reads other names, such as hf-hub:OWNER/NAME and local-dir:FOLDER, as addresses
_ENCODER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_]+)?")


def check_encoder_name(encoder: str) -> None:
    """A ValueError if the name is an address or a path: no model of smp or timm is called that."""
    if not _ENCODER_NAME.fullmatch(encoder):
        raise UserError(
            f"encoder {encoder!r} is not a name of smp or timm, such as resnet50: an address or a folder "
            "cannot be an encoder; set model.weights to a .safetensors file for weights of your own"
        )


def check_architecture_options(
    architecture: str, options: Mapping[str, Any], signature: Iterable[str]
) -> None:
    """A ValueError if an option may not be passed to the architecture of smp with this signature."""
    allowed = (_ARCHITECTURE_OPTIONS & set(signature)) | {"encoder_options"}
    check_names(f"option of {architecture}", options, allowed)
    for name, value in options.items():
        if name != "encoder_options":
            _check_value(f"model.options.{name}", value)
    encoder_options = options.get("encoder_options", {})
    if not isinstance(encoder_options, Mapping):
        raise UserError(
            f"model.options.encoder_options must be a mapping, such as {{img_size: 256}}; "
            f"got {encoder_options!r}"
        )
    check_names("option of an encoder", encoder_options, _ENCODER_OPTIONS)
    for name, value in encoder_options.items():
        _check_value(f"model.options.encoder_options.{name}", value)


def check_names(kind: str, options: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """A ValueError for the first option that is not allowed; `kind` says of what it would be an option."""
    for name in options:
        if name not in allowed:
            raise UserError(unknown_name(kind, str(name), sorted(allowed)))


def check_small_unet_options(options: Mapping[str, Any], signature: Iterable[str]) -> None:
    """A ValueError if an option may not be passed to small_unet."""
    check_names("option of small_unet", options, set(signature) - {"num_channels", "num_classes"})
    for name, value in options.items():
        _check_value(f"model.options.{name}", value)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message that a name does not exist, with the names closest to it."""
    return f"there is no {kind} {name!r}{nearest(name, known, most=5)}"


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_value(key, name)
            _check_value(key, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_value(key, item)
    elif isinstance(value, str):
        if not _WORD.fullmatch(value):
            raise UserError(f"{key} must be a number or one word, such as bilinear; got {value!r}")
    elif not (value is None or isinstance(value, bool | int | float)):
        raise UserError(f"{key} must be a number or one word; got {type(value).__name__}")
    # the condition is also false for NaN
    elif value is not None and not abs(value) <= _MAX_NUMBER:
        raise UserError(f"{key} may be {_MAX_NUMBER} at most; got {value}")
