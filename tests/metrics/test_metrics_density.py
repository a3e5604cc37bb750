"""The kernel estimate of a case's calibration error: its limits, its seed, and what it is near."""

import pytest
import torch
from laws import class_map, soft_label

from semidice.metrics import calibration_error, kde_calibration_error


def sampled(prob, seed=99):
    """A hard reference drawn from `prob`, so that prob is calibrated."""
    return (torch.rand(prob.shape, generator=torch.Generator().manual_seed(seed)) < prob).float()


def test_it_is_near_0_for_a_calibrated_prediction_and_near_the_bins_for_one_that_is_not():
    prob = torch.rand(1, 1, 20_000) * 0.8 + 0.1
    target = sampled(prob)
    options = {"bandwidth": 0.02, "num_keys": 4096, "num_points": 2048}
    assert kde_calibration_error(prob, target, **options).item() < 0.03
    overconfident = torch.sigmoid(3 * torch.logit(prob))
    by_bins = calibration_error(overconfident, target, num_bins=15).item()
    assert kde_calibration_error(overconfident, target, **options).item() == pytest.approx(by_bins, abs=0.03)


def test_a_constant_prediction_is_off_by_exactly_its_gap():
    prob, target = torch.full((1, 1, 1000), 0.7), torch.ones(1, 1, 1000)
    assert kde_calibration_error(prob, target).item() == pytest.approx(0.3, abs=1e-5)
    assert kde_calibration_error(prob, target, p=2).item() == pytest.approx(0.09, abs=1e-5)


def test_a_case_has_the_same_error_in_any_batch_and_one_seed_the_same_points():
    prob, target = soft_label(3, 3, 20, 20), class_map((3, 20, 20), 3)
    whole = kde_calibration_error(prob, target)
    assert torch.equal(whole, kde_calibration_error(prob, target))
    torch.testing.assert_close(whole[1:2], kde_calibration_error(prob[1:2], target[1:2]), rtol=0, atol=0)
    assert not torch.equal(whole, kde_calibration_error(prob, target, seed=1, num_points=50))


def test_one_channel_equals_two_classes_and_soft_references_are_welcome():
    prob = torch.rand(1, 1, 500)
    both = torch.cat([1 - prob, prob], 1)
    torch.testing.assert_close(kde_calibration_error(prob, prob), kde_calibration_error(both, both))
    hard = sampled(prob)
    torch.testing.assert_close(
        kde_calibration_error(prob, hard), kde_calibration_error(both, hard.squeeze(1).long())
    )


def test_ignored_voxels_do_not_count_and_a_case_without_voxels_is_nan():
    prob, target = soft_label(2, 3, 400), class_map((2, 400), 3)
    valid = torch.ones(2, 400, dtype=torch.bool)
    valid[0] = False
    valid[1, 200:] = False
    error = kde_calibration_error(prob, target, valid=valid)
    assert error[0].isnan()
    changed = torch.where(valid.unsqueeze(1), prob, soft_label(2, 3, 400, seed=7))
    assert torch.equal(error[1], kde_calibration_error(changed, target, valid=valid)[1])
    ignored = torch.where(valid, target, 255)
    assert torch.equal(error[1], kde_calibration_error(prob, ignored, ignore_index=255)[1])


def test_of_a_large_case_some_voxels_are_drawn_and_the_estimate_stays_near(monkeypatch):
    prob = torch.rand(1, 1, 200_000)
    target = sampled(prob.square())
    whole = kde_calibration_error(prob, target)
    monkeypatch.setattr("semidice.metrics.density.MAX_VOXELS", 20_000)
    part = kde_calibration_error(prob, target)
    assert part.item() != whole.item()
    torch.testing.assert_close(part, whole, rtol=0, atol=0.03)
    # only half of what is drawn is valid
    valid = torch.arange(200_000).unsqueeze(0) % 2 == 0
    torch.testing.assert_close(kde_calibration_error(prob, target, valid=valid), whole, rtol=0, atol=0.03)
