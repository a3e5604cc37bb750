"""
Calibrate a teacher
===================

A teacher that draws too much is far from the raters' frequencies. A calibrator learns the correction from
cases with raters.
"""

# %%
import torch

from semidice import IsotonicCalibrator, KDECalibrator, TemperatureScaling, mean_label
from semidice.data.phantom import make_phantom

phantom = make_phantom(40, size=(48, 48), num_raters=2, seed=5, bias=0.0, offset=1.2, wobble=1.5, miss=0.0)
label = mean_label(phantom.masks, batched=True)
odds = phantom.prob.clamp(min=1e-6).log()
teacher = (odds + torch.tensor([0.0, 2.0]).view(1, 2, 1, 1)).softmax(1)  # p* distorted: too much lesion

known, new = slice(0, 30), slice(30, 40)
calibrators = {"temperature": TemperatureScaling(), "isotonic": IsotonicCalibrator(), "KDE": KDECalibrator()}
predictions = {"uncalibrated": teacher[new]}
for name, calibrator in calibrators.items():
    predictions[name] = calibrator.fit(teacher[known], label[known]).calibrate(teacher[new])
for name, prob in predictions.items():
    print(f"{name:13} error to the truth: {100 * (prob - phantom.prob[new]).abs().mean():.2f} %")

# %%
# A temperature changes only the confidence, so it does not help a teacher that draws too much. Isotonic
# regression and kernel density do. :doc:`/calibration` says which to take when.

import matplotlib.pyplot as plt
import numpy as np

edges = np.linspace(0, 1, 11)
figure, axes = plt.subplots(figsize=(5.5, 5), layout="constrained")
axes.plot([0, 1], [0, 1], color="0.5", linewidth=1)
for (name, prob), marker in zip(predictions.items(), "os^D", strict=True):
    said, drawn = prob[:, 1].flatten().numpy(), label[new][:, 1].flatten().numpy()
    number = np.clip(np.digitize(said, edges) - 1, 0, 9)
    used = [k for k in range(10) if (number == k).sum() > 20]
    axes.plot(
        [said[number == k].mean() for k in used],
        [drawn[number == k].mean() for k in used],
        marker=marker,
        label=name,
    )
axes.set(
    xlabel="probability",
    ylabel="share of raters who drew it",
    title="New cases, before and after calibration",
)
axes.legend()
plt.show()
