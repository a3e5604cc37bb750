"""
A soft label in ten lines
=========================

Five raters outline the same lesion. Their mean is a label between 0 and 1, and the loss takes it as it is.
"""

# %%
import torch

from semidice import SegmentationLoss, mean_label
from semidice.data.phantom import make_phantom

phantom = make_phantom(1, num_raters=5, seed=4, offset=2.0)
label = mean_label(phantom.masks, batched=True)  # (1, 2, 64, 64): background, lesion
logits = torch.zeros(1, 2, 64, 64, requires_grad=True)
optimiser = torch.optim.Adam([logits], lr=0.3)
for _ in range(200):
    optimiser.zero_grad()
    SegmentationLoss()(logits, label).backward()
    optimiser.step()
print(f"largest difference to the label: {(logits.softmax(1) - label).abs().max():.3f}")

# %%
# The minimum of the loss is the label itself: free predictions end there.

import matplotlib.pyplot as plt

from semidice.report.figures import draw_outlines

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
axes[0].imshow(phantom.image[0, 0], cmap="gray")
draw_outlines(axes[0], phantom.masks[0].numpy())
axes[1].imshow(label[0, 1], vmin=0, vmax=1)
shown = axes[2].imshow(logits.detach().softmax(1)[0, 1], vmin=0, vmax=1)
for panel, title in zip(axes, ("five raters", "soft label", "prediction after 200 steps"), strict=True):
    panel.set(title=title, xticks=[], yticks=[])
figure.colorbar(shown, ax=axes, label="probability of lesion")
plt.show()
