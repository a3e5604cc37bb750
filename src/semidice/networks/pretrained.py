"""Pretrained weights of an encoder, from a .safetensors file or from the hub.

Only safetensors files are read: they hold tensors alone, so a file from a stranger cannot run code. A file
must fit the encoder; a ValueError names every tensor that does not. The check is made here, because timm's
own loader accepts a file with missing tensors and leaves those random.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, reading

_HUB_FILE = "model.safetensors"
_HUB_TIMEOUT_S = 10


def load_pretrained(
    encoder: nn.Module, name: str, weights: str | Path, num_channels: int, encoder_options: Mapping[str, Any]
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


def _weights_file(encoder: str, weights: str | Path) -> Path:
    """The local file of the weights; weights with a name come from the hub's cache, or from the hub."""
    text = str(weights)
    if text.endswith(".safetensors"):
        return Path(weights)
    if os.sep in text or Path(text).suffix:
        raise UserError(
            f"weights must be a .safetensors file, which cannot run code when it is read; got {text}: "
            "convert it with safetensors.torch.save_file"
        )
    repository, revision, filename = _hub_address(encoder, text)
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
            f"the {text} weights of encoder {encoder} are not on this machine, and the hub did not give them "
            f"({type(error).__name__}). Three ways out:\n"
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

    # a feature extractor of timm renames stages.0 to stages_0 and prefixes names with "model."
    def plain(key: str) -> str:
        return key.removeprefix("model.").replace(".", "_")

    settings = timm.get_pretrained_cfg(encoder.name)
    first = (settings and settings.first_conv) or ()
    first_keys = {f"{name}.weight" for name in ([first] if isinstance(first, str) else first)}
    expected = encoder.model.state_dict()
    key_in_file = {plain(key): key for key in tensors}
    all_keys = _timm_keys(encoder.name, options)
    key_in_timm = {plain(key): key for key in all_keys}
    state: dict[str, Tensor] = {}
    missing, misshaped = [], []
    for key, tensor in expected.items():
        file_key = key_in_file.pop(plain(key), None)
        if file_key is None:
            missing.append(key_in_timm.get(plain(key), key))
            continue
        loaded = tensors[file_key]
        if file_key in first_keys and loaded.shape[1] != tensor.shape[1]:
            loaded = timm.models.adapt_input_conv(num_channels, loaded)
        if loaded.shape != tensor.shape:
            misshaped.append(f"{file_key} {tuple(loaded.shape)} for {tuple(tensor.shape)}")
        state[key] = loaded
    unexpected = [key for key in key_in_file.values() if key not in all_keys]
    _check_fit(path, f"timm's {encoder.name}", missing, unexpected, misshaped)
    encoder.model.load_state_dict({**expected, **state})


def _timm_keys(name: str, options: Mapping[str, Any]) -> set[str]:
    """Names of all tensors of timm's network, classifier included."""
    import timm

    try:
        with torch.device("meta"):
            return set(timm.create_model(name, **options).state_dict())
    # some networks compute with their values while they are built, which meta tensors do not have
    except (RuntimeError, NotImplementedError):
        return set(timm.create_model(name, **options).state_dict())


def _load_smp_encoder(
    encoder: nn.Module, name: str, path: Path, tensors: Mapping[str, Tensor], num_channels: int
) -> None:
    """Load a file with smp's names into a full encoder with three channels, then copy what `encoder` has."""
    import segmentation_models_pytorch as smp

    full: Any = smp.encoders.get_encoder(name, weights=None)
    expected = {key: tuple(tensor.shape) for key, tensor in full.state_dict().items()}
    # smp removes the classifier from the mapping that it is given
    remaining = dict(tensors)
    try:
        full.load_state_dict(remaining)
    except RuntimeError as error:
        _check_fit(
            path,
            f"smp's {name}: for a file from timm, take timm's own encoder of this kind, tu-NAME",
            missing=[key for key in expected if key not in remaining],
            unexpected=[key for key in remaining if key not in expected],
            misshaped=[
                f"{key} {tuple(tensor.shape)} for {expected[key]}"
                for key, tensor in remaining.items()
                if key in expected and tuple(tensor.shape) != expected[key]
            ],
        )
        raise UserError(f"weights {path} do not fit encoder {name}: {error}") from error
    full.set_in_channels(num_channels, pretrained=True)
    adapted = full.state_dict()
    encoder.load_state_dict({key: adapted[key] for key in encoder.state_dict()})


def _check_fit(
    path: Path, network: str, missing: Iterable[str], unexpected: Sequence[str], misshaped: Sequence[str]
) -> None:
    """A ValueError that names every tensor that does not fit."""
    # batch counters of a normalisation: many files leave them out, and no value depends on them
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    problems = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped))
    lines = [f"\n  {len(keys)} {kind}: {', '.join(keys)}" for kind, keys in problems if keys]
    if lines:
        raise UserError(f"weights {path} do not fit {network}{''.join(lines)}")
