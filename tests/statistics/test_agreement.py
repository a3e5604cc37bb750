"""Raters as rows of a case table, and scored like methods."""

import numpy as np
import pytest
import torch

from semidice.labels import rater_agreement
from semidice.statistics import agreement_rows, case_table
from semidice.statistics.agreement import drawn_voxels, raters_own_scores

NAMES = ("background", "a", "b", "never drawn")


def test_the_agreement_of_raters_is_a_row_of_each_who_looked():
    masks = torch.tensor([[[True, True, False], [True, True, False], [False, True, True]]] * 2)
    present = torch.tensor([[True, True, True], [True, False, True]])
    dice = rater_agreement(masks, present=present, batched=True).majority
    rows = [row for case in (0, 1) for row in agreement_rows(f"c{case}", "p0", "xyz", dice[case])]
    table = case_table(rows)
    found = list(zip(table["case"], table["method"], table["value"].round(3), strict=True))
    # of two raters, a voxel that one of them drew is a tie, and background
    assert found == [("c0", "x", 1), ("c0", "y", 1), ("c0", "z", 0.5), ("c1", "x", 0.667), ("c1", "z", 0.667)]
    assert set(table["patient"]) == {"p0"}


def test_voxels_that_nobody_drew_change_no_agreement():
    masks = np.random.default_rng(0).integers(0, 3, (4, 9, 9), dtype=np.uint8)
    masks[:, 3:6] = 0
    of_all, of_drawn = (
        rater_agreement(torch.from_numpy(each), num_classes=3) for each in (masks, drawn_voxels(masks))
    )
    torch.testing.assert_close(of_all.majority, of_drawn.majority)
    torch.testing.assert_close(of_all.pairwise, of_drawn.pairwise)


def test_a_class_that_nobody_ever_drew_is_left_out_of_the_raters_means():
    masks = [np.random.default_rng(seed).integers(0, 3, (3, 40)) for seed in range(3)]
    metrics = ("dice_score", "rater_dice_score")
    three = raters_own_scores(masks, class_names=NAMES[:3], metrics=metrics)
    drawn = (True, True, True, False)
    four = raters_own_scores(masks, class_names=NAMES, metrics=metrics, drawn=drawn)
    for key in (("dice_score", "mean"), ("rater_dice_score", "all"), ("dice_score", "b")):
        assert four[key] == pytest.approx(three[key], abs=1e-6)
    counted = raters_own_scores(masks, class_names=NAMES, metrics=metrics)
    assert counted["dice_score", "mean"] > three["dice_score", "mean"] + 0.05
