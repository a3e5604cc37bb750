"""
Which label maker?
==================

A phantom knows the probability that a rater draws a voxel. So the error of each label can be measured.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

from semidice import dice_weighted_label, majority_label, mean_label, spatially_smooth_label, staple_label
from semidice.data.phantom import make_phantom

makers = {
    "majority": majority_label,
    "mean": mean_label,
    "mean, smoothed": lambda masks: spatially_smooth_label(mean_label(masks), sigma=1.0),
    "Dice-weighted": dice_weighted_label,
    "STAPLE": staple_label,
}
phantom = make_phantom(12, num_raters=8, seed=1, miss=0.0)
raters = range(1, 9)
errors = {
    name: [
        np.mean(
            [
                float((make(masks[:number])[1] - truth[1]).abs().mean())
                for masks, truth in zip(phantom.masks, phantom.prob, strict=True)
            ]
        )
        for number in raters
    ]
    for name, make in makers.items()
}

# %%
# The mean keeps falling as raters are added. With few raters, smoothing replaces some of them. The majority
# and STAPLE estimate one hidden mask, not a probability. :doc:`/labels` has the same for raters who
# overlook lesions or draw carelessly.

figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
for (name, values), marker in zip(errors.items(), "os^vD", strict=True):
    axes.plot(raters, 100 * np.array(values), marker=marker, label=name)
axes.set(
    xlabel="raters",
    ylabel="mean |label - truth| (%)",
    title="Distance of each label from the truth",
    ylim=(0, None),
)
axes.grid(alpha=0.3)
axes.legend()
plt.show()
