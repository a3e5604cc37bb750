"""
Is the difference real?
=======================

Two means differ. Would they differ again with other patients? Methods are compared on the same cases, and
patients are drawn again.
"""

# %%
# Three methods score 24 cases of 12 patients. The second is a little better in every case; the third only
# in a few.

import numpy as np
import pandas as pd

from semidice.statistics import case_table, compare_cases, means_table, pairs_table

generator = np.random.default_rng(0)
difficulty = generator.normal(0.8, 0.06, 24)
scores = {
    "baseline": difficulty,
    "a little better everywhere": difficulty + 0.02 + generator.normal(0, 0.01, 24),
    "much better in three cases": difficulty + 0.15 * (np.arange(24) < 3) + generator.normal(0, 0.02, 24),
}
wide = pd.DataFrame(scores).clip(0, 1)
wide["case"] = [f"case{number:02}" for number in range(24)]
wide["patient"] = [f"patient{number // 2:02}" for number in range(24)]
table = wide.melt(["case", "patient"], var_name="method").assign(metric="dice_score")
comparison = compare_cases(case_table(table), "dice_score")
print(means_table([comparison]).markdown())
print()
print(pairs_table(comparison).markdown())

# %%
# Both are about two points better on average, and only one of these differences would be seen again.
# :doc:`/metrics` explains the test, the correction for several pairs, and the star. ``semidice compare``
# prints the same tables for trained networks.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for row, method in enumerate(list(scores)[1:]):
    difference = 100 * (np.clip(scores[method], 0, 1) - difficulty)
    pair = 100 * comparison.pairs.loc[(method, "baseline"), ["difference", "low", "high"]].astype(float)
    mean, low, high = pair
    axes.plot(difference, row + generator.uniform(-0.12, 0.12, 24), "o", color="#56B4E9", markersize=4)
    axes.errorbar(mean, row + 0.28, xerr=[[mean - low], [high - mean]], fmt="s", color="#D55E00", capsize=4)
axes.axvline(0, color="0.4", linewidth=1)
axes.set(
    yticks=[0, 1],
    yticklabels=list(scores)[1:],
    ylim=(-0.5, 1.6),
    xlabel="difference to the baseline (points of Dice); squares: mean and its corrected interval",
)
plt.show()
