"""
MONAI, Lightning, Hugging Face
==============================

The same soft labels in three frameworks. In each of them, a few lines of glue are enough.
"""

# %%
# **MONAI.** A dictionary transform makes the label from the raters' masks, and a metric scores soft
# predictions. The loss needs no adapter. :doc:`/monai` also has a bundle.

import torch
from monai.data import DataLoader, Dataset
from monai.networks.nets import BasicUNet

from semidice import SegmentationLoss
from semidice.data.phantom import make_phantom
from semidice.integrations.monai import RatersToSoftLabeld, SoftDiceMetric

torch.manual_seed(0)
phantom = make_phantom(24, size=(32, 32), num_raters=3, seed=2, offset=1.6)
cases = [
    {"image": image, "raters": masks.byte(), "name": f"case{number:02}"}
    for number, (image, masks) in enumerate(zip(phantom.image, phantom.masks, strict=True))
]
dataset = Dataset(cases, RatersToSoftLabeld("raters", "label", "mean"))
network = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(8, 16, 32, 64, 64, 8))
optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
loss, metric = SegmentationLoss(), SoftDiceMetric(include_background=False)
for _ in range(40):
    for batch in DataLoader(dataset, batch_size=8, shuffle=True):
        optimiser.zero_grad()
        loss(network(batch["image"]), batch["label"]).backward()
        optimiser.step()
with torch.no_grad():
    for batch in DataLoader(dataset, batch_size=8):
        metric(network(batch["image"]).softmax(1), batch["label"])
print(f"MONAI: soft Dice of the training cases {100 * metric.aggregate().item():.1f} %")

# %%
# **Lightning.** A callback scores every case of the validation loop, and writes the table that ``semidice
# report`` and ``semidice compare`` read. :doc:`/lightning` has a module to copy.

import logging
import tempfile
import warnings
from pathlib import Path

import lightning

from semidice.integrations.lightning import CaseTableCallback
from semidice.networks.small_unet import SmallUNet

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# small data need no workers; the other one is about a call inside of lightning
warnings.filterwarnings("ignore", message=".*(many workers|LeafSpec).*")
root = Path(tempfile.mkdtemp())


class SoftSegmentation(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.loss = SmallUNet(1, 2, channels=(16, 32, 64)), SegmentationLoss()

    def training_step(self, batch, _):
        return self.loss(self.network(batch["image"]), batch["label"])

    def validation_step(self, batch, _):
        return {
            "prob": self.network(batch["image"]).softmax(1),
            "soft_target": batch["label"],
            "case": batch["name"],
        }

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


table = CaseTableCallback(
    root / "cases.csv", ["soft_dice_score"], class_names=["background", "lesion"], method="DML1"
)
module = SoftSegmentation()
trainer = lightning.Trainer(
    max_epochs=40,
    accelerator="cpu",
    callbacks=[table],
    check_val_every_n_epoch=40,
    default_root_dir=root,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8))
print("Lightning:", *(root / "cases.csv").read_text().splitlines()[:3], sep="\n")

# %%
# **Hugging Face.** ``Trainer`` takes the loss as a function. The logits of SegFormer are smaller than the
# label and are resized. :doc:`/huggingface` also puts a trained network on the hub.

from transformers import SegformerConfig, SegformerForSemanticSegmentation, Trainer, TrainingArguments

from semidice.integrations.huggingface import compute_loss_func

rows = [{"pixel_values": case["image"].repeat(3, 1, 1), "labels": case["label"]} for case in dataset]
config = SegformerConfig(num_labels=2, depths=[1] * 4, hidden_sizes=[16] * 4, num_attention_heads=[1] * 4)
segformer = SegformerForSemanticSegmentation(config)
arguments = TrainingArguments(
    str(root / "segformer"),
    max_steps=80,
    learning_rate=5e-3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    logging_strategy="no",
    save_strategy="no",
    seed=0,
)
trained = Trainer(segformer, arguments, train_dataset=rows, compute_loss_func=compute_loss_func).train()
print(f"Hugging Face: mean loss of {trained.global_step} steps {trained.training_loss:.3f}")

# %%
# Predictions of one case after these short trainings.

import matplotlib.pyplot as plt

case = rows[3]
with torch.no_grad():
    image = case["pixel_values"][None]
    small = segformer.eval()(image).logits
    probs = {
        "soft label": case["labels"],
        "MONAI": network.eval()(image[:, :1]).softmax(1)[0],
        "Lightning": module.eval().network(image[:, :1]).softmax(1)[0],
        "Hugging Face": torch.nn.functional.interpolate(small, (32, 32), mode="bilinear").softmax(1)[0],
    }
figure, axes = plt.subplots(1, 5, figsize=(12, 2.9), layout="constrained")
axes[0].imshow(case["pixel_values"][0], cmap="gray")
axes[0].set_title("image")
for panel, (name, prob) in zip(axes[1:], probs.items(), strict=True):
    shown = panel.imshow(prob[1], vmin=0, vmax=1)
    panel.set_title(name)
for panel in axes:
    panel.set(xticks=[], yticks=[])
figure.colorbar(shown, ax=axes, label="probability of lesion")
plt.show()
