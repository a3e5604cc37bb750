"""Scores of the distribution of a volume: their definition, and absent raters."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def crps_in_voxels(p, volumes):
    """The score of one channel against raters of these volumes, in voxels."""
    masks = torch.arange(len(p)) < torch.tensor(volumes).view(1, -1, 1)
    return volume_crps_error_ml(torch.tensor(p).view(1, 1, -1), masks, spacing_mm=(10, 10, 10)).item()


@given(data=st.data(), p=st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=1, max_size=12))
def test_the_crps_is_that_of_an_ensemble_of_nested_raters(data, p):
    volumes = data.draw(st.lists(st.integers(0, len(p)), min_size=1, max_size=4))
    samples = nested_volumes(p, num=64)
    distances = [np.abs(samples - volume).mean() for volume in volumes]
    expected = np.mean(distances) - np.abs(np.subtract.outer(samples, samples)).mean() / 2
    assert crps_in_voxels(p, volumes) == pytest.approx(expected, abs=1e-5)


def test_the_crps_of_many_distinct_probabilities_is_the_integral_of_the_squared_difference_of_distributions():
    p = np.random.default_rng(0).random(400)
    # P(V <= k) = 1 - p_(k+1), on the integers from 0 to 399
    cdf = 1 - np.sort(p)[::-1]
    for volume in (0, 57, 400):
        step = np.arange(400) >= volume
        assert crps_in_voxels(p, [volume]) == pytest.approx(np.square(cdf - step).sum())


def test_no_other_map_has_a_lower_expected_crps_than_the_one_that_raters_are_drawn_from():
    p = np.sort(np.random.default_rng(1).random(60))[::-1].copy()
    volumes = nested_volumes(p, num=1024)
    best = crps_in_voxels(p, volumes)
    assert best == pytest.approx(np.abs(np.subtract.outer(volumes, volumes)).mean() / 2, rel=1e-3)
    for other in (p**1.2, p**0.8, p.round(), np.clip(p + 0.05, 0, 1), np.full(60, p.mean())):
        assert crps_in_voxels(other, volumes) > best


def test_the_scores_of_a_class_are_those_of_sampled_nested_raters():
    prob, masks = soft_label(2, 3, 5, 6), class_map((2, 4, 5, 6), 3)
    scores = {name: score(prob, masks) for name, score in EACH.items()}
    for case, number in np.ndindex(2, 3):
        sampled = nested_volumes(prob[case, number])
        volumes = (masks[case] == number).flatten(1).sum(1).numpy()
        low, high = np.quantile(sampled, [0.05, 0.95], method="inverted_cdf")
        inside = (volumes >= low) & (volumes <= high)
        assert scores["coverage"][case, number].item() == pytest.approx(inside.mean())
        assert scores["width"][case, number].item() == pytest.approx((high - low) * 0.01)
        crps = crps_in_voxels(prob[case, number].flatten().numpy(), volumes)
        assert scores["crps"][case, number].item() == pytest.approx(crps * 0.01, rel=1e-5)


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


def test_the_ends_of_the_interval_belong_to_it():
    # a certain prediction of one voxel: both ends are 1
    prob, masks = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[True, False], [True, True]]])
    assert volume_coverage_score(prob, masks).tolist() == [[0.5]]
