"""Scores of the distribution of a volume: their definition, and absent raters."""

import numpy as np
import pytest
import torch
from laws import class_map, soft_label

from semidice.data.phantom import make_phantom
from semidice.metrics import volume_coverage_score, volume_crps_error_ml, volume_width_ml

SPACING = (1.0, 2.0, 5.0)
EACH = {
    "crps": lambda *a, **k: volume_crps_error_ml(*a, spacing_mm=SPACING, **k),
    "coverage": volume_coverage_score,
    "width": lambda prob, _, present=None, **k: volume_width_ml(prob, spacing_mm=SPACING, **k),
}
each_score = pytest.mark.parametrize("score", EACH.values(), ids=list(EACH))


def nested_volumes(prob, num=20_000):
    """Volumes in voxels of many nested raters, by definition."""
    levels = (np.arange(num) + 0.5) / num
    return (np.asarray(prob).ravel()[None] >= levels[:, None]).sum(1)


def test_the_scores_of_a_class_are_those_of_sampled_nested_raters():
    prob, masks = soft_label(2, 3, 5, 6), class_map((2, 4, 5, 6), 3)
    scores = {name: score(prob, masks) for name, score in EACH.items()}
    for case, number in np.ndindex(2, 3):
        sampled = nested_volumes(prob[case, number])
        volumes = (masks[case] == number).flatten(1).sum(1).numpy()
        low, high = np.quantile(sampled, [0.05, 0.95], method="inverted_cdf")
        pair = np.abs(np.subtract.outer(sampled[::20], sampled[::20])).mean() / 2
        crps = np.mean([np.abs(sampled - volume).mean() for volume in volumes]) - pair
        inside = (volumes >= low) & (volumes <= high)
        assert scores["coverage"][case, number].item() == pytest.approx(inside.mean())
        assert scores["width"][case, number].item() == pytest.approx((high - low) * 0.01)
        assert scores["crps"][case, number].item() == pytest.approx(crps * 0.01, abs=1e-4)


@pytest.mark.parametrize(
    ("level", "options"), [(0.9, {}), (0.9, {"coverage": 0.9}), (0.5, {"coverage": 0.5})]
)
def test_the_covered_share_of_nested_raters_is_the_level(level, options):
    prob = torch.rand(3, 1, 1000)
    # rater r marks the voxels whose probability reaches the r-th of 200 thresholds
    masks = prob >= (torch.arange(200).view(1, -1, 1) + 0.5) / 200
    coverage = volume_coverage_score(prob, masks, **options)
    torch.testing.assert_close(coverage, torch.full((3, 1), level), rtol=0, atol=0.02)


def test_the_true_probability_of_a_phantom_has_a_lower_crps_than_its_decided_mask():
    phantom = make_phantom(40, size=(32, 32), seed=3)
    prob = phantom.prob[:, 1:]
    truth, mask = (EACH["crps"](p, phantom.masks).mean() for p in (prob, (prob > 0.5).float()))
    assert truth < 0.9 * mask


@each_score
def test_an_absent_rater_does_not_count_and_bool_masks_are_class_1(score):
    prob, masks = soft_label(2, 2, 20), torch.rand(2, 3, 20) < 0.5
    present = torch.tensor([[True, False, True]] * 2)
    expected = score(prob, masks[:, [0, 2]])
    torch.testing.assert_close(score(prob, masks, present=present), expected)
    torch.testing.assert_close(score(prob, masks.long(), present=present), expected)
    torch.testing.assert_close(score(prob[:, 1:], masks, present=present), expected[:, 1:])
