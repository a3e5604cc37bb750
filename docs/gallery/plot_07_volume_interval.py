"""
A volume with its interval
==========================

The volume of a lesion, and where the volume of a rater would lie. The correction is learned from patients
with raters, and keeps its promise also for a network that is too sure.
"""

# %%
import numpy as np
import torch

from semidice.data.phantom import make_phantom
from semidice.decisions import Intervals, fit_conformal, rater_volumes_ml, volume_interval, volume_ml

spacing = (1.0, 1.0, 5.0)  # mm
phantom = make_phantom(80, size=(48, 48), num_raters=4, seed=1)
prob = torch.sigmoid(torch.logit(phantom.prob[:, 1:], eps=1e-6) / 0.3)  # a network that is too sure

expected = volume_ml(prob, spacing_mm=spacing).double().numpy()
low, high = (end.numpy() for end in volume_interval(prob, 0.9, spacing_mm=spacing))
of_raters = rater_volumes_ml(phantom.masks, num_channels=1, spacing_mm=spacing).numpy()

known, new = slice(0, 50), slice(50, 80)
intervals = Intervals(low, high, expected, voxel=0.005)
patients = [f"patient {number}" for number in range(50)]
conformal = fit_conformal(intervals.part(known), of_raters[known], patients, level=0.9)
corrected = conformal.apply(intervals.part(new))


def covered(low, high):
    return np.mean((of_raters[new] >= low[..., None]) & (of_raters[new] <= high[..., None]))


for name, ends in (("map", (low[new], high[new])), ("corrected", corrected)):
    print(f"{name:10} covers {100 * covered(*ends):.0f} % of the raters; 90 % are promised on average")

# %%
# Thirty new patients, sorted by volume. :doc:`/volumes` has the promise and its conditions.

import matplotlib.pyplot as plt

order = np.argsort(expected[new, 0])
position = np.arange(len(order))
figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
for ends, width, name in (
    (corrected, 7, "corrected interval"),
    ((low[new], high[new]), 2.5, "interval of the map"),
):
    axes.vlines(
        position,
        ends[0][order, 0],
        ends[1][order, 0],
        linewidth=width,
        color="#56B4E9" if width > 5 else "#0072B2",
        label=name,
    )
axes.plot(position, expected[new][order, 0], "o", color="#D55E00", markersize=4, label="expected volume")
for rater in range(4):
    axes.plot(
        position,
        of_raters[new][order, 0, rater],
        "x",
        color="0.2",
        markersize=4,
        label="raters" if rater == 0 else None,
    )
axes.set(xlabel="new patient", ylabel="volume (ml)", title="Volumes of new patients, nominal 90 %")
axes.legend()
plt.show()
