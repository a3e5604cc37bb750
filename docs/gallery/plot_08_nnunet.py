"""
nnU-Net with raters
===================

nnU-Net takes one label per scan. semidice gives it the masks of all raters, a soft label made of them and a
loss for it. nnU-Net itself is not installed where this page is built: the example exports a dataset, and
shows the label and the loss that our trainer would use.
"""

# %%
# **Export.** A prepared dataset becomes nnU-Net's raw layout, with the masks of each rater beside nnU-Net's
# own label.

import tempfile
from contextlib import chdir
from pathlib import Path

from typer.testing import CliRunner

from semidice.cli import app

root = Path(tempfile.mkdtemp())
commands = """
semidice prepare phantom data --cases 6 --size 64x64 --raters 4 --workers 1
semidice nnunet export data Dataset101_Phantom --work nnunet
"""
with chdir(root):
    for command in commands.strip().splitlines():
        # the same as in a terminal
        print(CliRunner().invoke(app, command.split()[1:], catch_exceptions=False).stdout.strip())
raw = root / "nnunet" / "raw" / "Dataset101_Phantom"
for path in sorted(path for path in raw.rglob("*") if path.is_dir()):
    print(path.relative_to(raw), len(list(path.glob("*.png"))), "files")

# %%
# **Label and loss.** ``semidice nnunet train ... --label mean --loss dml1`` trains with these options. The
# label is made from the augmented masks in every step, and the loss has its minimum there: at the mean of
# the raters.

from dataclasses import asdict

import numpy as np
import torch
from PIL import Image

from semidice import SegmentationLoss, mean_label
from semidice.nnunet.options import TrainerOptions

options = TrainerOptions(label="mean", loss="dml1").loss_options()
print(options)

case = sorted((raw / "labelsTr").glob("*.png"))[0].name
masks = np.stack([np.asarray(Image.open(folder / case)) for folder in sorted((raw / "ratersTr").iterdir())])
own_label = torch.from_numpy(np.asarray(Image.open(raw / "labelsTr" / case)).astype(np.int64))
soft = mean_label(torch.from_numpy(masks).bool())
loss = SegmentationLoss(**asdict(options))
prob = soft.clamp(1e-4, 1)[None]
print(f"loss at the mean of the raters: {loss(prob.log(), soft[None]):.3f} with the soft label")
print(f"                                {loss(prob.log(), own_label[None]):.3f} with nnU-Net's own label")

# %%
# :doc:`/nnunet` has the other commands, and what changes on real data.

import matplotlib.pyplot as plt

from semidice.report.figures import draw_outlines

image = Image.open(raw / "imagesTr" / case.replace(".png", "_0000.png"))
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
axes[0].imshow(image, cmap="gray")
draw_outlines(axes[0], masks.astype(bool))
axes[1].imshow(own_label, cmap="gray")
shown = axes[2].imshow(soft[1], vmin=0, vmax=1)
for panel, title in zip(axes, ("four raters", "label of nnU-Net", "label of our trainer"), strict=True):
    panel.set(title=title, xticks=[], yticks=[])
figure.colorbar(shown, ax=axes[2], label="probability of lesion")
plt.show()
