"""Segmentation networks by name: images (N, channels, H, W) to logits (N, C, H, W).

    architecture   any of segmentation_models_pytorch (unet, unetplusplus, deeplabv3plus, fpn, ...) on any
                   encoder of smp ("resnet50", "efficientnet-b0") or timm ("tf_efficientnet_lite0"; where
                   smp has one of the same name, "tu-resnet50" is timm's); or small_unet, which has no encoder
    weights        of the encoder: "imagenet" from the hub, the path of a .safetensors file, or "none"

Height and width are multiples of 32 (`SIZE_MULTIPLE`) for every network. Initial values come from torch's
generator: call torch.manual_seed before. Weights are read from safetensors alone; nothing is unpickled.
Left out: normalising images, which belongs to the dataset.
"""

import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# what build_model sets itself; and a network that ends in a softmax would give no logits
_NOT_OPTIONS = {
    "encoder_name",
    "encoder_weights",
    "in_channels",
    "classes",
    "activation",
    "aux_params",
    "kwargs",
}
_HUB_FILE = "model.safetensors"
_HUB_TIMEOUT_S = 10


def build_model(
    *,
    architecture: str,
    encoder: str,
    weights: str | Path | None,
    num_channels: int,
    num_classes: int,
    dropout: float = 0.0,
    **options: Any,
) -> nn.Module:
    """The network, in training mode, on the CPU.

    Args:
        encoder: "none" for small_unet.
        weights: see the module; another name than "imagenet" works where smp has weights under it. Fewer or
            more than three channels: the first convolution is summed or repeated, as smp and timm do.
        dropout: probability that a channel is dropped before the last layer. It has no parameters, so
            a checkpoint of the network without it fits.
        options: of the architecture in smp, such as `decoder_channels`; `encoder_options`, a mapping,
            goes to timm, such as `img_size`. Of small_unet: `channels` and `norm`.

    >>> network = build_model(
    ...     architecture="small_unet", encoder="none", weights=None, num_channels=1, num_classes=2
    ... )
    >>> tuple(network(torch.zeros(1, 1, 64, 64)).shape)
    (1, 2, 64, 64)
    """
    if num_channels < 1 or num_classes < 2:
        raise ValueError(
            f"a network needs 1 or more channels and 2 or more classes; got {num_channels} and {num_classes}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability in [0, 1); got {dropout}")
    weights = None if weights in (None, "none") else weights
    if architecture == "small_unet":
        if encoder != "none" or weights is not None:
            raise ValueError(
                "small_unet has neither an encoder nor pretrained weights: set both to 'none'; "
                f"got {encoder!r} and {str(weights or 'none')!r}"
            )
        _check_options("small_unet", options, _parameters(SmallUNet) - {"num_channels", "num_classes"})
        network: nn.Module = SmallUNet(num_channels, num_classes, **options)
    else:
        network = _smp_network(architecture, encoder, num_channels, num_classes, options)
        if weights is not None:
            _load_encoder(network, _encoder_name(encoder), weights, num_channels, options)
    if dropout > 0:
        _drop_before_head(network, dropout)
    return network


def count_parameters(network: nn.Module) -> int:
    """Number of values that training changes.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


class SmallUNet(nn.Module):
    """A UNet without pretraining for demonstrations: 0.3 million parameters, quick at 64 x 64 on a CPU.

    Two convolutions a level on the way down; on the way up one, after the level below has been brought to
    this level's width and size and added. Adding costs half of what concatenating does.
    channels: of each level, halving height and width from one to the next. norm: "group" keeps images of a
    batch apart and works with a batch of one.
    """

    def __init__(
        self,
        num_channels: int,
        num_classes: int,
        *,
        channels: Sequence[int] = (16, 32, 64, 128),
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if norm not in ("batch", "group") or not channels or any(width % 8 for width in channels):
            raise ValueError(
                "small_unet needs norm 'batch' or 'group' and channels that are multiples of 8; "
                f"got {norm!r} and {tuple(channels)}"
            )
        self.multiple = 2 ** (len(channels) - 1)
        self.level_channels = tuple(channels)
        into = [num_channels, *channels[:-1]]
        self.down = nn.ModuleList(
            nn.Sequential(_block(before, width, norm), _block(width, width, norm))
            for before, width in zip(into, channels, strict=True)
        )
        self.lift = nn.ModuleList(nn.Conv2d(below, width, 1) for width, below in pairwise(channels))
        self.up = nn.ModuleList(_block(width, width, norm) for width in channels[:-1])
        self.segmentation_head: nn.Module = nn.Sequential(nn.Conv2d(channels[0], num_classes, 1))

    def forward(self, image: Float[Tensor, "N channels H W"]) -> Float[Tensor, "N C H W"]:
        logits: Tensor = self.segmentation_head(self.decode(self.encode(image)))
        return logits

    def encode(self, image: Float[Tensor, "N channels H W"]) -> list[Tensor]:
        """Features of every level, the finest first."""
        if image.shape[-1] % self.multiple or image.shape[-2] % self.multiple:
            raise ValueError(
                f"height and width must be multiples of {self.multiple}; got {tuple(image.shape[-2:])}"
            )
        levels: list[Tensor] = []
        for number, down in enumerate(self.down):
            image = down(image if number == 0 else F.max_pool2d(image, 2))
            levels.append(image)
        return levels

    def decode(self, levels: Sequence[Tensor]) -> Float[Tensor, "N width H W"]:
        """What the last layer is given, from the levels of `encode`."""
        *finer, below = levels
        for level, lift, up in zip(reversed(finer), reversed(self.lift), reversed(self.up), strict=True):
            below = up(level + F.interpolate(lift(below), scale_factor=2.0))
        return below


def _block(before: int, width: int, norm: str) -> nn.Sequential:
    # a bias would be taken away again by the normalisation
    normalise = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width)
    return nn.Sequential(nn.Conv2d(before, width, 3, padding=1, bias=False), normalise, nn.ReLU(inplace=True))


def _smp_network(
    architecture: str, encoder: str, num_channels: int, num_classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """The network of smp with initial values."""
    # smp and timm take seconds to import, which a command without a network need not wait for
    import segmentation_models_pytorch as smp

    known = smp.MODEL_ARCHITECTURES_MAPPING
    if architecture not in known:
        raise ValueError(_unknown("architecture", architecture, [*known, "small_unet"]))
    name = _encoder_name(encoder)
    accepted = _parameters(known[architecture]) - _NOT_OPTIONS | {"encoder_options"}
    _check_options(architecture, options, accepted)
    own = {key: value for key, value in options.items() if key != "encoder_options"}
    with warnings.catch_warnings():
        # smp's older names for timm's encoders stay usable
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="segmentation_models_pytorch")
        try:
            network: nn.Module = known[architecture](
                encoder_name=name,
                encoder_weights=None,
                in_channels=num_channels,
                classes=num_classes,
                **own,
                **options.get("encoder_options", {}),
            )
        # smp and timm refuse a combination in many ways, down to a missing attribute
        except Exception as error:
            raise ValueError(
                f"{architecture} cannot be built on encoder {encoder} with options {dict(options)}: {error}"
            ) from error
    return network


def _encoder_name(encoder: str) -> str:
    """What smp calls the encoder: its own name, or "tu-" and timm's."""
    import segmentation_models_pytorch as smp
    import timm

    if encoder in smp.encoders.encoders:
        return encoder
    plain = encoder.removeprefix("tu-").removeprefix("timm-")
    if not timm.is_model(plain):
        raise ValueError(_unknown("encoder", encoder, [*smp.encoders.encoders, *timm.list_models()]))
    return f"tu-{plain}"


def _load_encoder(
    network: Any, encoder: str, weights: str | Path, num_channels: int, options: Mapping[str, Any]
) -> None:
    """Put pretrained weights into the encoder; a ValueError names every tensor that does not fit."""
    path = _weights_file(encoder, weights)
    tensors = _read_tensors(path)
    if hasattr(network.encoder, "model"):
        _load_timm_encoder(network.encoder, path, tensors, num_channels, options.get("encoder_options", {}))
    else:
        _load_smp_encoder(network.encoder, encoder, path, tensors, num_channels)


def _weights_file(encoder: str, weights: str | Path) -> Path:
    """The local file; from the hub's cache or, if it is not there, from the hub."""
    text = str(weights)
    if text.endswith(".safetensors"):
        return Path(weights)
    if os.sep in text or Path(text).suffix:
        raise ValueError(
            f"weights must be a .safetensors file, which cannot run code when it is read; got {text}: "
            "convert it with safetensors.torch.save_file"
        )
    repository, revision, filename = _hub_address(encoder, text)
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(repository, filename, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        # asked once and without the retries of a download, which take half a minute where there is no network
        url = hub.hf_hub_url(repository, filename, revision=revision)
        hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
        return Path(hub.hf_hub_download(repository, filename, revision=revision))
    # each version of the hub's client has exceptions of its own, and all of them mean that there is no file
    except Exception as error:
        raise ValueError(
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
        raise ValueError(
            f"weights of encoder {encoder} are {known}, none, or the path of a .safetensors file; "
            f"got {weights!r}"
        )
    settings = timm.get_pretrained_cfg(encoder.removeprefix("tu-"))
    filename = (settings and settings.hf_hub_filename) or _HUB_FILE
    if settings is None or not settings.hf_hub_id or not filename.endswith(".safetensors"):
        raise ValueError(
            f"the hub has no .safetensors weights of timm's {encoder.removeprefix('tu-')}: "
            "choose another encoder, give the path of a .safetensors file, or set weights to none"
        )
    repository, _, revision = settings.hf_hub_id.partition("@")
    return repository, revision or None, filename


def _read_tensors(path: Path) -> dict[str, Tensor]:
    import safetensors.torch

    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except OSError as error:
        raise ValueError(f"cannot read weights {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}): download it again") from error
    return tensors


def _load_timm_encoder(
    encoder: Any, path: Path, tensors: Mapping[str, Tensor], num_channels: int, options: Mapping[str, Any]
) -> None:
    """Load a file in timm's naming; only what lies behind the last feature map may be left over."""
    import timm

    # As a feature extractor a network writes stages_0 for stages.0, and model. before every name.
    def plain(key: str) -> str:
        return key.removeprefix("model.").replace(".", "_")

    settings = timm.get_pretrained_cfg(encoder.name)
    first = settings.first_conv if settings is not None else None
    first_keys = {f"{name}.weight" for name in ([first] if isinstance(first, str) else first or ())}
    wanted = {plain(key): (key, tensor) for key, tensor in encoder.model.state_dict().items()}
    named = {plain(key): key for key in tensors}
    whole = _whole_timm_network(encoder.name, options)
    whole_named = {plain(key): key for key in whole}
    state: dict[str, Tensor] = {}
    misshaped: list[str] = []
    for name, (key, tensor) in wanted.items():
        if name not in named:
            continue
        loaded = tensors[named[name]]
        if named[name] in first_keys and loaded.shape[1] != tensor.shape[1]:
            loaded = timm.models.adapt_input_conv(num_channels, loaded)
        if loaded.shape == tensor.shape:
            state[key] = loaded
        else:
            misshaped.append(f"{named[name]} {tuple(loaded.shape)} for {tuple(tensor.shape)}")
    missing = [whole_named.get(name, key) for name, (key, _) in wanted.items() if name not in named]
    unexpected = [key for name, key in named.items() if name not in wanted and key not in whole]
    missing = _without_counters(missing)
    if missing or unexpected or misshaped:
        _refuse(path, f"timm's {encoder.name}", missing, unexpected, misshaped)
    counters = {key: tensor for key, tensor in wanted.values() if key not in state}
    encoder.model.load_state_dict({**counters, **state})


def _whole_timm_network(name: str, options: Mapping[str, Any]) -> set[str]:
    """Names of all tensors of the network, classifier included."""
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
    """Load a file in the naming of smp's own encoder, through a donor with three channels and all levels."""
    import segmentation_models_pytorch as smp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="segmentation_models_pytorch")
        donor: Any = smp.encoders.get_encoder(name, weights=None)
    expected = {key: tuple(tensor.shape) for key, tensor in donor.state_dict().items()}
    # smp takes the classifier out of what it is given, under the name that it has in this network
    left = dict(tensors)
    try:
        donor.load_state_dict(left)
    except RuntimeError as error:
        missing = _without_counters([key for key in expected if key not in left])
        unexpected = [key for key in left if key not in expected]
        misshaped = [
            f"{key} {tuple(tensor.shape)} for {expected[key]}"
            for key, tensor in left.items()
            if key in expected and tuple(tensor.shape) != expected[key]
        ]
        if not (missing or unexpected or misshaped):
            raise ValueError(f"weights {path} do not fit encoder {name}: {error}") from error
        hint = ": for a file from timm, take timm's own encoder of this kind, tu-NAME"
        _refuse(path, f"smp's {name}", missing, unexpected, misshaped, hint)
    donor.set_in_channels(num_channels, pretrained=True)
    adapted = donor.state_dict()
    encoder.load_state_dict({key: adapted[key] for key in encoder.state_dict()})


def _without_counters(keys: Iterable[str]) -> list[str]:
    # batches counted by a normalisation: many files leave them out, and nothing is computed with them
    return [key for key in keys if not key.endswith("num_batches_tracked")]


def _refuse(
    path: Path,
    network: str,
    missing: Sequence[str],
    unexpected: Sequence[str],
    misshaped: Sequence[str],
    hint: str = "",
) -> NoReturn:
    parts = [
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped))
        if names
    ]
    raise ValueError(f"weights {path} do not fit {network}{hint}\n  " + "\n  ".join(parts))


def _drop_before_head(network: Any, dropout: float) -> None:
    head = network.segmentation_head
    # children keep their names, so the names in a checkpoint do not depend on dropout
    layers = list(head.named_children()) if isinstance(head, nn.Sequential) else [("head", head)]
    network.segmentation_head = nn.Sequential(OrderedDict([("dropout", nn.Dropout2d(dropout)), *layers]))


def _parameters(network: Any) -> set[str]:
    return set(inspect.signature(network).parameters)


def _check_options(architecture: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in options:
        if name not in known:
            raise ValueError(_unknown(f"option of {architecture}", name, sorted(known)))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Message that there is no such thing, and what comes nearest."""
    known = list(dict.fromkeys(known))
    close = get_close_matches(name.lower(), known, n=5, cutoff=0.5)
    if close:
        return f"there is no {what} {name!r}; did you mean {', '.join(close)}?"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"there is no {what} {name!r}; there are {shown}"
