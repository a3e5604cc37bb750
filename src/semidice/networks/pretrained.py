"""Pretrained weights of an encoder, from a .safetensors file or from the hub.

Only safetensors files are read: they hold tensors alone, so a file from a stranger cannot run code. A file
must fit the encoder; a UserError names every tensor that does not. The check is made here, because timm's
own loader accepts a file with missing tensors and leaves those random.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, reading

_HUB_FILE = "model.safetensors"
_HUB_TIMEOUT_S = 10


def load_pretrained(
    encoder: nn.Module, name: str, weights: str, num_channels: int, encoder_options: Mapping[str, Any]
) -> None:
    """Load weights into an encoder of smp.

    name: of the encoder in smp, "tu-" and a name for timm's. weights: a name, or the path of a .safetensors
    file. encoder_options: with which timm built the encoder.
    """
    import safetensors.torch

    path = _weights_file(name, weights)
    with reading(path, "a complete safetensors file is expected: download it again"):
        tensors = safetensors.torch.load_file(path)
    if hasattr(encoder, "model"):
        _load_timm_encoder(encoder, path, tensors, num_channels, encoder_options)
    else:
        _load_smp_encoder(encoder, name, path, tensors, num_channels)


def weights_can_be_had(encoder: str, weights: str) -> bool:
    """Whether the weights of an encoder of timm are on this machine, or the hub gives them."""
    try:
        return _weights_file(f"tu-{encoder}", weights).is_file()
    except ValueError:
        return False


def _weights_file(encoder: str, weights: str) -> Path:
    """The local file of the weights; weights with a name come from the hub's cache, or from the hub."""
    if weights.endswith(".safetensors"):
        return Path(weights)
    if os.sep in weights or Path(weights).suffix:
        raise UserError(
            f"weights must be a .safetensors file, which cannot run code when it is read; got {weights}: "
            "convert it with safetensors.torch.save_file"
        )
    repository, revision, filename = _hub_address(encoder, weights)
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(repository, filename, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        # one request with a timeout first: without a network, the retries of a download take half a minute
        url = hub.hf_hub_url(repository, filename, revision=revision)
        hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
        return Path(hub.hf_hub_download(repository, filename, revision=revision))
    # versions of the hub's client raise different exceptions; all mean that the file is not available
    except Exception as error:
        raise UserError(
            f"the {weights} weights of encoder {encoder} are not on this machine, and the hub did not give "
            f"them ({type(error).__name__}). Three ways out:\n"
            "  connect once: they are downloaded, and later runs find them in the hub's cache;\n"
            f"  download {filename} of {repository} on another machine and set weights to its path;\n"
            "  set weights to none and train from random values."
        ) from error


def _hub_address(encoder: str, weights: str) -> tuple[str, str | None, str]:
    """Repository, revision and file on the hub."""
    import segmentation_models_pytorch as smp
    import timm

    choices = smp.encoders.encoders.get(encoder, {}).get("pretrained_settings", {})
    if weights in choices:
        return choices[weights]["repo_id"], choices[weights]["revision"], _HUB_FILE
    if not encoder.startswith("tu-") or weights != "imagenet":
        known = ", ".join(choices) or "imagenet"
        raise UserError(
            f"weights of encoder {encoder} are {known}, none, or the path of a .safetensors file; "
            f"got {weights!r}"
        )
    name = encoder.removeprefix("tu-")
    settings = timm.get_pretrained_cfg(name)
    filename = (settings and settings.hf_hub_filename) or _HUB_FILE
    if settings is None or not settings.hf_hub_id or not filename.endswith(".safetensors"):
        raise UserError(
            f"the hub has no .safetensors weights of timm's {name}: choose another encoder, "
            "give the path of a .safetensors file, or set weights to none"
        )
    repository, _, revision = settings.hf_hub_id.partition("@")
    return repository, revision or None, filename


def _load_timm_encoder(
    encoder: Any, path: Path, tensors: Mapping[str, Tensor], num_channels: int, options: Mapping[str, Any]
) -> None:
    """Load a file with timm's names. Tensors after the last feature map may be present or missing."""
    import timm

    full = _timm_network(encoder.name, options).state_dict()
    # a feature extractor of timm renames stages.0 to stages_0
    full_name = {name.replace(".", "_"): name for name in full}
    names = {key: full_name[key.replace(".", "_")] for key in encoder.model.state_dict()}
    problems = {
        # many files leave out the batch counters of a normalisation, and no value depends on them
        "missing": [
            name
            for name in names.values()
            if name not in tensors and not name.endswith("num_batches_tracked")
        ],
        "unexpected": [name for name in tensors if name not in full],
        "of another shape": [
            f"{name} {tuple(tensors[name].shape)} for {tuple(full[name].shape)}"
            for name in names.values()
            if name in tensors and tensors[name].shape != full[name].shape
        ],
    }
    lines = [f"\n  {len(found)} {kind}: {', '.join(found)}" for kind, found in problems.items() if found]
    if lines:
        raise UserError(f"weights {path} do not fit timm's {encoder.name}{''.join(lines)}")
    settings = timm.get_pretrained_cfg(encoder.name)
    first = (settings and settings.first_conv) or ()
    reads_image = {f"{layer}.weight" for layer in ([first] if isinstance(first, str) else first)}
    loaded = {
        key: timm.models.adapt_input_conv(num_channels, tensors[name])
        if name in reads_image
        else tensors[name]
        for key, name in names.items()
        if name in tensors
    }
    # batch counters that are not in the file stay 0
    encoder.model.load_state_dict(loaded, strict=False)


def _timm_network(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The complete network of timm, for three channels and with its classifier; its values do not matter."""
    import timm

    try:
        with torch.device("meta"):
            return timm.create_model(name, **options)
    # some networks compute with their values while they are built, which meta tensors do not have
    except (RuntimeError, NotImplementedError):
        return timm.create_model(name, **options)


def _load_smp_encoder(
    encoder: nn.Module, name: str, path: Path, tensors: Mapping[str, Tensor], num_channels: int
) -> None:
    """Load a file with smp's names into a full encoder with three channels, then copy what `encoder` has."""
    import segmentation_models_pytorch as smp

    full: Any = smp.encoders.get_encoder(name, weights=None)
    try:
        # smp removes the classifier from the mapping that it is given
        full.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise UserError(
            f"weights {path} do not fit smp's {name}: for a file from timm, take timm's own encoder of this "
            f"kind, tu-NAME; {error}"
        ) from error
    full.set_in_channels(num_channels, pretrained=True)
    adapted = full.state_dict()
    encoder.load_state_dict({key: adapted[key] for key in encoder.state_dict()})
