"""Hugging Face: our losses in `transformers.Trainer`, and trained networks on the hub.

    Trainer(model, args, compute_loss_func=compute_loss_func, ...)      SegFormer and similar models
    HubNetwork.from_run("runs/dml1", fold=0).push_to_hub("me/lesions")  then HubNetwork.from_pretrained(...)

Loading a network from the hub runs no code and reads no pickle. Left out: reading image files (`semidice
predict`), and the calibrator and the fitted rule of a run.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ..arrays import describe, downsample_target, read_target
from ..errors import UserError, given
from ..extras import need
from ..losses.segmentation import SegmentationLoss
from ..networks.predictor import network_probability
from ..networks.windows import windowed_probability
from ..options import check_value
from ..paths import RunFolder
from ..recipes import Recipe
from ..runs.run import DatasetFacts, TrainedRun, mirrored_axes, open_run

need("huggingface_hub", __name__)

from huggingface_hub import PyTorchModelHubMixin
from safetensors import SafetensorError

__all__ = ["HubNetwork", "compute_loss_func"]

_CARD = """---
{{ card_data }}
pipeline_tag: image-segmentation
---

A segmentation network of semidice. Its classes, channels and the options of its training are in config.json.

    from semidice.integrations.huggingface import HubNetwork
    prob = HubNetwork.from_pretrained(REPOSITORY)(image)  # (N, channels, H, W), intensities in [0, 1]
"""


# fmt: off
def compute_loss_func(
    outputs: object, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None, *,
    loss: Callable[..., Tensor] | None = None, resize: str = "logits", ignore_index: int = 255,
) -> Float[Tensor, ""]:
    # fmt: on
    """The loss of a model with `logits` (N, C, h, w); set the options with `functools.partial`.

    labels: class indices (N, H, W), or soft labels, floats (N, C, H, W). A voxel that is `ignore_index`, in a
    soft label in all channels, does not count. num_items_in_batch: Trainer adds the losses of the batches of
    a step, so a loss is multiplied by the share of its batch in the labels of the step.
    loss: of logits, target and valid voxels; None is `SegmentationLoss()`.
    resize: the logits to the size of the labels, or the target to that of the logits, averaged by area.
    """
    check_value(Literal["logits", "target"], resize=resize)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if not isinstance(logits, Tensor) or logits.ndim != 4:
        got = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise UserError(f"the model must return logits (N, C, h, w), as SegFormer does; got {got}")
    if labels is None:
        raise UserError("there are no labels: the dataset needs a column `labels`")
    loss = SegmentationLoss() if loss is None else loss
    valid = labels.ne(ignore_index).any(1) if labels.ndim == 4 else labels.ne(ignore_index)
    activation = getattr(loss, "activation", None)
    target, _ = read_target(
        logits, labels, activation=activation, valid=valid, waits=False, any_size=True
    )
    if resize == "target":
        value = loss(logits, *downsample_target(target, valid, logits.shape))
    else:
        value = loss(nn.functional.interpolate(logits, target.shape[-2:], mode="bilinear"), target, valid)
    if num_items_in_batch is None:
        return value
    # Trainer counts the labels that are not -100; a tensor has the number once for each GPU of the process
    num_items = torch.as_tensor(num_items_in_batch, device=value.device).sum().clamp_min(1)
    return value * (labels.ne(-100).sum() / num_items)


class HubNetwork(nn.Module, PyTorchModelHubMixin, library_name="semidice", model_card_template=_CARD):
    """The network of a fold with its normalisation, from images to probabilities.

    recipe: the options of the training. dataset: `DatasetFacts`, with mean and std of the fold.
    `network` is the network itself, for normalised images.
    """

    def __init__(self, recipe: Any = None, dataset: Any = None) -> None:
        super().__init__()
        with given("config.json is not of this version of semidice"):
            facts = DatasetFacts.model_validate(dataset)
            self.run = TrainedRun(RunFolder(Path()), Recipe.model_validate(recipe), facts)
        self.network, self.class_names = self.run.new_network(weights="none"), facts.class_names

    @classmethod
    def from_run(cls, run: str | Path, fold: int = 0) -> "HubNetwork":
        """The trained network of a fold of a run folder."""
        trained = open_run(Path(run))
        dataset = trained.facts.model_dump(mode="json")
        # of this fold alone
        dataset |= {f"fold_{name}": [value] for name, value in trained.facts.mean_std(fold)._asdict().items()}
        recipe = trained.recipe.model_dump(mode="json")
        # names of folders of this machine are not published
        for section, name in (("data", "dataset"), ("model", "weights"), ("teacher", "run")):
            if recipe[section] is not None:
                recipe[section][name] = Path(recipe[section][name]).name
        made = cls(recipe=recipe, dataset=dataset)
        made.network = trained.network(fold, device="cpu")
        return made.eval()

    def forward(self, image: Float[Tensor, "N channels H W"]) -> Float32[Tensor, "N C H W"]:
        """Probabilities of images of any size, without gradients. image: intensities in [0, 1]."""
        recipe, facts = self.run.recipe, self.run.facts
        if image.shape[1] != len(facts.channels):
            raise UserError(f"image needs the channels {', '.join(facts.channels)}; got {describe(image)}")
        mean, std = (image.new_tensor(numbers).view(-1, 1, 1) for numbers in facts.mean_std(0))
        dtype = "fp32" if image.device.type == "cpu" else recipe.precision.dtype
        predictor = partial(network_probability, self.network, dtype=dtype, flips=mirrored_axes(recipe, 2))
        window = 1024 if facts.options.size is None else None
        prob = windowed_probability(predictor, (image - mean) / std, device=image.device, window=window)
        return prob.to(image.device)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "HubNetwork":
        """With every weight; the method of the hub would also take a part of them, or read a pickle."""
        try:
            made: HubNetwork = super()._from_pretrained(model_id=model_id, **options | {"strict": True})
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{model_id} has no model.safetensors for its config.json: {error}") from error
        # older versions of the hub leave it in training mode
        return made.eval()

    @classmethod
    def _load_as_pickle(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a pickle is not read")
