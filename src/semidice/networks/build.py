"""Segmentation networks by name: images (N, channels, H, W) to logits (N, C, H, W).

    architecture   any of segmentation_models_pytorch (unet, unetplusplus, deeplabv3plus, fpn, ...) with any
                   encoder of smp ("resnet50", "efficientnet-b0") or timm ("tf_efficientnet_lite0"); if both
                   have the name, "resnet50" is smp's and "tu-resnet50" timm's. Or small_unet, without encoder
    weights        of the encoder: "imagenet" from the hub, the path of a .safetensors file, or "none"

For every network, height and width must be multiples of 32 (`SIZE_MULTIPLE`). Initial values come from
torch's default generator: call torch.manual_seed first. Not here: normalising images, see `data.dataset`.
"""

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UserError
from .options import (
    check_architecture_options,
    check_encoder_name,
    check_small_unet_options,
    unknown_name,
)
from .pretrained import load_pretrained
from .small_unet import SmallUNet


def build_model(
    *,
    architecture: str,
    encoder: str,
    weights: str | Path | None,
    num_channels: int,
    num_classes: int,
    **options: Any,
) -> nn.Module:
    """The network, in training mode, on the CPU.

    Args:
        encoder: "none" for small_unet.
        weights: see the module; a name other than "imagenet" works if smp has weights of that name. If
            num_channels is not three, the first convolution is summed or repeated, as smp and timm do.
        options: of the architecture in smp, such as `decoder_channels`; the mapping `encoder_options`
            is passed to timm, such as `img_size`. Only those listed in `options` pass: none names a file
            or an address. Of small_unet: `channels` and `norm`.

    >>> import torch
    >>> network = build_model(
    ...     architecture="small_unet", encoder="none", weights=None, num_channels=1, num_classes=2
    ... )
    >>> tuple(network(torch.zeros(1, 1, 64, 64)).shape)
    (1, 2, 64, 64)
    """
    if num_channels < 1 or num_classes < 2:
        raise UserError(
            f"a network needs 1 or more channels and 2 or more classes; got {num_channels} and {num_classes}"
        )
    weights = None if weights in (None, "none") else weights
    if architecture == "small_unet":
        if encoder != "none" or weights is not None:
            raise UserError(
                "small_unet has neither an encoder nor pretrained weights: set both to 'none'; "
                f"got {encoder!r} and {str(weights or 'none')!r}"
            )
        check_small_unet_options(options, _parameters(SmallUNet))
        return SmallUNet(num_channels, num_classes, **options)
    return _build_smp(architecture, encoder, weights, num_channels, num_classes, options)


def _build_smp(
    architecture: str,
    encoder: str,
    weights: str | Path | None,
    num_channels: int,
    num_classes: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """The network of smp, with random initial values or a pretrained encoder."""
    # imported here: smp and timm take seconds to import, and commands without a network do not need them
    import segmentation_models_pytorch as smp

    architectures = smp.MODEL_ARCHITECTURES_MAPPING
    if architecture not in architectures:
        raise UserError(unknown_name("architecture", architecture, [*architectures, "small_unet"]))
    name = _encoder_name(encoder)
    check_architecture_options(architecture, options, _parameters(architectures[architecture]))
    own_options = dict(options)
    encoder_options = own_options.pop("encoder_options", {})
    with warnings.catch_warnings():
        # smp's older names of timm's encoders stay usable
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="segmentation_models_pytorch")
        try:
            network: Any = architectures[architecture](
                encoder_name=name,
                encoder_weights=None,
                in_channels=num_channels,
                classes=num_classes,
                **own_options,
                **encoder_options,
            )
        # smp and timm refuse a combination with many kinds of errors, such as an AttributeError
        except Exception as error:
            raise UserError(
                f"{architecture} cannot be built on encoder {encoder} with options {dict(options)}: {error}"
            ) from error
        if weights is not None:
            load_pretrained(network.encoder, name, weights, num_channels, encoder_options)
    return network  # type: ignore[no-any-return]


def _encoder_name(encoder: str) -> str:
    """The encoder's name in smp: for an encoder of timm, "tu-" and timm's name."""
    import segmentation_models_pytorch as smp
    import timm

    check_encoder_name(encoder)
    if encoder in smp.encoders.encoders:
        return encoder
    name = encoder.removeprefix("tu-").removeprefix("timm-")
    if not timm.is_model(name):
        raise UserError(unknown_name("encoder", encoder, [*smp.encoders.encoders, *timm.list_models()]))
    return f"tu-{name}"


def _parameters(network: Any) -> set[str]:
    return set(inspect.signature(network).parameters)
