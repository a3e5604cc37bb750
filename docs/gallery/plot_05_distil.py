"""
Distil a calibrated teacher
===========================

A student learns from one rater's mask, and from a teacher that has seen three raters. The teacher is
calibrated in every batch. Network, steps and learning rate were chosen so that the teacher helps: with
smaller networks and fewer steps, some students became worse.
"""

# %%
import torch

from semidice import DistillationLoss, SegmentationLoss, Teacher, TeacherCalibration, mean_label
from semidice.data.phantom import make_phantom
from semidice.networks.small_unet import SmallUNet

torch.manual_seed(0)
phantom = make_phantom(48, size=(40, 40), num_raters=3, seed=2, bias=0.0, offset=1.6)
known, new = slice(0, 32), slice(32, 48)
image, truth = phantom.image, phantom.prob
mean_of_three = mean_label(phantom.masks, batched=True)
one_rater = phantom.masks[:, 0].long()


def train(loss_of_batch):
    network = SmallUNet(1, 2, channels=(16, 32, 64))
    optimiser = torch.optim.AdamW(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, total_iters=150)
    for _ in range(150):
        batch = torch.randperm(32)[:8]
        optimiser.zero_grad()
        loss_of_batch(network(image[batch]), batch).backward()
        optimiser.step()
        schedule.step()
    return network.eval()


# %%
# First the teacher, then two students: with and without it.

segmentation, distillation = SegmentationLoss(), DistillationLoss()
network = train(lambda logits, batch: segmentation(logits, mean_of_three[batch]))
teacher = Teacher(network, TeacherCalibration("kde"))
plain = train(lambda logits, batch: segmentation(logits, one_rater[batch]))
distilled = train(
    lambda logits, batch: distillation(logits, one_rater[batch], teacher(image[batch], one_rater[batch]))
)

with torch.no_grad():
    probs = {
        "one rater alone": plain(image[new]).softmax(1),
        "one rater and teacher": distilled(image[new]).softmax(1),
        "teacher": network(image[new]).softmax(1),
    }
for name, prob in probs.items():
    print(f"{name:22} error to the truth: {100 * (prob - truth[new]).abs().mean():.2f} %")

# %%
# The picture has one new case. :doc:`/calibration` says why a teacher should be calibrated before a student
# learns from it.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 5, figsize=(12, 2.9), layout="constrained")
axes[0].imshow(image[new][0, 0], cmap="gray")
for panel, prob in zip(axes[1:], (truth[new], *probs.values()), strict=True):
    shown = panel.imshow(prob[0, 1], vmin=0, vmax=1)
for panel, title in zip(axes, ("image", "truth", *probs), strict=True):
    panel.set(title=title, xticks=[], yticks=[])
figure.colorbar(shown, ax=axes, label="probability of lesion")
plt.show()
