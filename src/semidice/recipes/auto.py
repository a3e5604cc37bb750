"""`auto: true`: options that a recipe leaves out are chosen from the dataset and the device, with a reason.

The keys are the same on every device, so that a run can be resumed on another one.

The rules come from trainings on CT nodules of 64 and 128 pixels, slices of brain MRI and phantoms
(docs/training.md has the tables). The dataset as a whole is read, held-out cases included, but only for
sizes, numbers of cases, and where the foreground lies.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..data.batches.storage import common_space
from ..data.dataset import Dataset
from ..data.foreground import ForegroundFacts, foreground_facts
from ..errors import UserError
from ..networks.pretrained import weights_can_be_had

# foreground is "centred" if its distance from the centre is below this share of the image
_CENTRED = 0.1
# the same order of two classes, or the same side of the image, in this share of the cases: do not mirror
_ORDERED = 0.8
_MAX_CROP = {"cuda": 512, "cpu": 256}
# pixels per side of the coarsest level
_COARSEST = 8
_ENCODER = "tf_efficientnet_lite0"
# on smaller images, a network without pretraining was as good and three times as fast
_PRETRAINED_FROM = 96
_NUM_STEPS = {"cuda": 4000, "cpu": 1500}
_EPOCHS = (10, 300)


class Choice(NamedTuple):
    """The value of an option, and why it was chosen."""

    key: str
    value: Any
    reason: str


def choose_options(
    dataset: Dataset, given: Mapping[str, Any], *, num_folds: int, device: str
) -> list[Choice]:
    """A choice for each option whose key, such as augment.crop, is not in `given`. device: cuda or cpu."""
    space = common_space([scan.shape for scan in dataset.manifest.scans])
    if len(space) != 2:
        raise UserError(
            f"auto is for images and slices, but {dataset.folder.path} has volumes: "
            "prepare it with --slices all"
        )
    facts = foreground_facts(dataset)
    window = tuple(given.get("augment.crop") or [min(side, _MAX_CROP[device]) for side in space])
    num_training = len(dataset) - len(dataset) // num_folds
    choices = [
        *_augmentation(facts, space, window),
        *_network(dataset, window, given, device),
        *_optimisation(num_training, given, device),
        *_loss(facts),
        *_precision(device),
    ]
    return [choice for choice in choices if choice.key not in given]


def _augmentation(facts: ForegroundFacts, space: tuple[int, ...], window: tuple[int, ...]) -> list[Choice]:
    size = " x ".join(map(str, window))
    choices = [
        Choice("augment.scale", [0.7, 1.4], "lesions differ in size; a larger range needs more epochs"),
        Choice("augment.rotate_degrees", 30, "scans are not always straight"),
    ]
    far = max(facts.spread)
    if window != space:
        largest = " x ".join(map(str, space))
        choices += [
            Choice("augment.crop", list(window), f"images of {largest} are too large to train on whole"),
            Choice("augment.foreground", 0.5, "half of the windows show foreground"),
            Choice("augment.shift", 1.0, "windows must cover the image"),
        ]
    else:
        choices += [
            Choice("augment.crop", list(window), f"whole images; the largest fits into {size}"),
            Choice("augment.foreground", 0.0, "a whole image has its foreground"),
        ]
        where = f"foreground lies {far:.0%} of the image from its centre"
        if far < _CENTRED:
            choices.append(Choice("augment.shift", 0.0, f"{where}: keep it centred"))
        else:
            choices.append(Choice("augment.shift", 1.0, f"{where}: it may lie anywhere"))
    return [*choices, _flips(facts)]


def _flips(facts: ForegroundFacts) -> Choice:
    flips, reasons = [], []
    for axis, name in enumerate(("rows", "columns") if len(facts.order) == 2 else ("x", "y", "z")):
        one_sided = abs(facts.offset[axis]) > max(facts.deviation[axis], _CENTRED / 2)
        ordered = facts.order[axis] > _ORDERED
        flips.append(not (one_sided or ordered))
        if ordered:
            reasons.append(f"classes keep their order along {name} in {facts.order[axis]:.0%} of the cases")
        elif one_sided:
            reasons.append(f"foreground lies on one side along {name}")
    return Choice("augment.flip", flips, "; ".join(reasons) or "no side of an image is special")


# whether the hub gave the weights of the encoder: all variants of a grid share one dataset, and ask once
_HUB_ANSWERS: WeakKeyDictionary[Dataset, bool] = WeakKeyDictionary()


def _encoder_can_be_had(dataset: Dataset) -> bool:
    if dataset not in _HUB_ANSWERS:
        _HUB_ANSWERS[dataset] = weights_can_be_had(_ENCODER, "imagenet")
    return _HUB_ANSWERS[dataset]


def _network(
    dataset: Dataset, window: tuple[int, ...], given: Mapping[str, Any], device: str
) -> list[Choice]:
    if "model.architecture" in given or any(key.startswith("model.options.") for key in given):
        return []
    # levels until the coarsest has about 8 pixels, so that it sees the whole image
    depth = max(2, min(5, math.floor(math.log2(min(window) / _COARSEST))))
    wants_encoder = {given.get("model.encoder"), given.get("model.weights")} - {None, "none"}
    is_small = min(window) < _PRETRAINED_FROM
    on_gpu = device == "cuda"
    if wants_encoder or (on_gpu and not is_small and _encoder_can_be_had(dataset)):
        levels = f"{depth} levels: the coarsest has {min(window) >> depth} pixels per side"
        return [
            Choice("model.architecture", "unet", "the network of the paper, with skips for small lesions"),
            Choice("model.encoder", _ENCODER, "small, fast, and pretrained on ImageNet"),
            Choice("model.weights", "imagenet", f"pretraining helps from {_PRETRAINED_FROM} pixels on"),
            Choice(
                "model.options",
                {"encoder_depth": depth, "decoder_channels": [256, 128, 64, 32, 16][:depth]},
                levels,
            ),
        ]
    width, widest = (32, 512) if on_gpu else (16, 256)
    channels = [min(widest, width << level) for level in range(depth + 1)]
    if is_small:
        why = f"below {_PRETRAINED_FROM} pixels, pretraining does not help"
    else:
        reason = "the hub was not reached" if on_gpu else "a CPU trains it in minutes"
        why = f"{reason}; pretrained weights from a file: --set model.weights={_ENCODER}.safetensors"
    return [
        Choice("model.architecture", "small_unet", why),
        Choice("model.encoder", "none", "small_unet has none"),
        Choice("model.weights", "none", "small_unet has none"),
        Choice(
            "model.options",
            {"channels": channels},
            f"{depth + 1} levels: the coarsest has {min(window) >> depth} pixels per side",
        ),
    ]


def _optimisation(num_training: int, given: Mapping[str, Any], device: str) -> list[Choice]:
    batch_size = int(given.get("batch_size", 8 if num_training >= 16 else 4))
    steps_per_epoch = max(1, num_training // batch_size)
    wanted = math.ceil(_NUM_STEPS[device] / steps_per_epoch)
    epochs = int(given.get("schedule.epochs", min(max(wanted, _EPOCHS[0]), _EPOCHS[1])))
    num_steps = epochs * steps_per_epoch
    adamw = [
        Choice("optimiser.name", "adamw", "needs no search for a learning rate"),
        Choice("optimiser.lr", 1e-3, "as good or better than five others that were tried"),
        Choice("optimiser.weight_decay", 1e-2, "the usual one of AdamW"),
        Choice("schedule.warmup_steps", min(50, num_steps // 10), "at most a tenth of the steps"),
    ]
    return [
        *([] if "optimiser.name" in given else adamw),
        Choice("batch_size", batch_size, f"{num_training} cases to train on in each fold"),
        Choice("schedule.epochs", epochs, f"{num_steps} steps of each fold"),
        Choice("validation.every", max(1, epochs // 5), "five times in a training"),
    ]


def _loss(facts: ForegroundFacts) -> list[Choice]:
    empty = f"; {facts.share_empty:.0%} of the cases have no foreground" if facts.share_empty else ""
    return [
        Choice("loss.over", "image", "a small lesion counts as much as a large one"),
        Choice("loss.smooth", 1.0, f"an image without foreground still teaches{empty}"),
    ]


def _precision(device: str) -> list[Choice]:
    dtype = ("bf16", "faster, as accurate") if device == "cuda" else ("fp32", "the precision of a CPU")
    return [
        Choice("precision.dtype", *dtype),
        Choice("precision.channels_last", True, "faster convolutions"),
    ]
