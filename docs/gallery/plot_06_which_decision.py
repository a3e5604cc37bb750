"""
Which decision?
===============

A probability map becomes a mask. Comparing with 0.5 is one way, and often not the best one for Dice.
"""

# %%
import torch

from semidice.data.phantom import make_phantom
from semidice.decisions import decide, fit_decision
from semidice.metrics import dice_score

phantom = make_phantom(40, size=(48, 48), num_raters=5, seed=7, offset=1.8)
prob = phantom.prob[:, 1:] * 0.7  # a network that is too timid
majority = (phantom.masks.float().mean(1, keepdim=True) > 0.5).long()

masks = {rule: decide(prob, rule) for rule in ("argmax", "threshold:0.3", "dice", "nested")}
scores = {name: dice_score(mask.float(), majority)[:, 0] for name, mask in masks.items()}
for name, score in scores.items():
    print(f"{name:14} Dice against the majority: {100 * score.mean():.1f} %")

# %%
# Which rule is best depends on the network and the raters. So fit it, on cases that the network did not
# see.

cases = (
    (p, m[0], None, f"patient {number}") for number, (p, m) in enumerate(zip(prob, majority, strict=True))
)
fitted = fit_decision(cases)
print("fitted rule:", fitted.decision)

# %%
# One case and the outline of each rule. :doc:`/decisions` says what each of them maximises.

import matplotlib.pyplot as plt

case = int(torch.argmax(scores["dice"] - scores["argmax"]))
figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
shown = axes[0].imshow(prob[case, 0], vmin=0, vmax=1, cmap="gray")
lines = []
for (name, mask), colour in zip(masks.items(), ("#E69F00", "#56B4E9", "#009E73", "#CC79A7"), strict=True):
    axes[0].contour(mask[case, 0].float(), levels=[0.5], colors=[colour])
    lines.append(plt.Line2D([], [], color=colour, label=name))
axes[0].legend(handles=lines, loc="upper left")
axes[0].set(title="masks of four rules", xticks=[], yticks=[])
axes[1].boxplot([100 * score.numpy() for score in scores.values()], tick_labels=list(scores))
axes[1].set(ylabel="Dice against the majority (%)", title="40 cases")
axes[1].grid(axis="y", alpha=0.3)
plt.show()
