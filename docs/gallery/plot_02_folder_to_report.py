"""
A folder of raters to a report
==============================

Five commands lead from a folder of images and masks to a report. The training here is short: the scores
only show that it works.
"""

# %%
# **The folder.** Images are in ``images``, and the masks of each rater in ``raters/NAME``, with the same
# file names.

import tempfile
from contextlib import chdir
from pathlib import Path

from PIL import Image
from typer.testing import CliRunner

from semidice.cli import app
from semidice.data.phantom import make_phantom

root = Path(tempfile.mkdtemp())
phantom = make_phantom(12, size=(48, 48), num_raters=3, seed=3)
for number, (image, masks) in enumerate(zip(phantom.image, phantom.masks, strict=True)):
    name = f"scan{number:02}.png"
    folder = root / ("my_scans/images" if number < 10 else "new_scans")
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * image[0].clamp(0, 1)).byte().numpy()).save(folder / name)
    for rater, mask in enumerate(masks if number < 10 else ()):
        drawn = root / "my_scans" / "raters" / f"reader{rater}"
        drawn.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 * mask.byte().numpy()).save(drawn / name)

# %%
# **The commands.** Without ``--set schedule.epochs=60`` and ``--set data.num_folds=2``, the recipe ``auto``
# chooses five folds and as many epochs as the dataset needs.

commands = """
semidice prepare folder my_scans data --workers 1
semidice check data
semidice train auto --set data.dataset=data -o runs/first --set schedule.epochs=60 --set data.num_folds=2
semidice predict runs/first new_scans -o predictions
semidice report runs/first -o report.html
"""
with chdir(root):
    for command in commands.strip().splitlines():
        # the same as in a terminal
        done = CliRunner().invoke(app, command.split()[1:], catch_exceptions=False)
        print("$", command, *done.stdout.strip().splitlines()[-2:], sep="\n")

# %%
# **The result.** ``report.html`` has scores, calibration and every case; :doc:`/example_report` is such a
# page. ``predictions`` has the probability and the mask of each new image.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
files = ("new_scans/scan10.png", "predictions/scan10_prob.png", "predictions/scan10_mask.png")
for panel, file in zip(axes, files, strict=True):
    panel.imshow(Image.open(root / file), cmap="gray")
    panel.set(title=file, xticks=[], yticks=[])
plt.show()
