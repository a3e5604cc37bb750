"""The kernel density estimate of a case's calibration error: limits, seed, and agreement with bins."""

import pytest
import torch
from laws import class_map, soft_label

from semidice.metrics import calibration_error, kde_calibration_error


def sampled(prob, seed=99):
    """A hard reference drawn from `prob`, so that prob is calibrated."""
    return (torch.rand(prob.shape, generator=torch.Generator().manual_seed(seed)) < prob).float()


def test_the_error_is_near_0_if_calibrated_and_near_the_binned_error_otherwise():
    prob = torch.rand(1, 1, 20_000) * 0.8 + 0.1
    target = sampled(prob)
    assert kde_calibration_error(prob, target, bandwidth=0.02).item() < 0.03
    overconfident = torch.sigmoid(3 * torch.logit(prob))
    by_bins = calibration_error(overconfident, target, num_bins=15).item()
    error = kde_calibration_error(overconfident, target, bandwidth=0.02).item()
    assert error == pytest.approx(by_bins, abs=0.03)


def test_the_error_of_a_constant_prediction_is_its_distance_to_the_target():
    prob, target = torch.full((1, 1, 1000), 0.7), torch.ones(1, 1, 1000)
    assert kde_calibration_error(prob, target).item() == pytest.approx(0.3, abs=1e-5)


def test_the_error_of_a_case_is_the_same_each_time_and_in_every_batch():
    prob, target = soft_label(3, 3, 20, 20), class_map((3, 20, 20), 3)
    full_error = kde_calibration_error(prob, target)
    assert torch.equal(full_error, kde_calibration_error(prob, target))
    torch.testing.assert_close(full_error[1:2], kde_calibration_error(prob[1:2], target[1:2]), rtol=0, atol=0)


def test_one_channel_equals_two_classes_for_soft_and_hard_references():
    prob = torch.rand(1, 1, 500)
    two_channels = torch.cat([1 - prob, prob], 1)
    torch.testing.assert_close(
        kde_calibration_error(prob, prob), kde_calibration_error(two_channels, two_channels)
    )
    hard = sampled(prob)
    torch.testing.assert_close(
        kde_calibration_error(prob, hard), kde_calibration_error(two_channels, hard.squeeze(1).long())
    )


def test_a_sample_of_a_large_case_gives_nearly_the_same_estimate(monkeypatch):
    prob = torch.rand(1, 1, 200_000)
    target = sampled(prob.square())
    full_error = kde_calibration_error(prob, target)
    monkeypatch.setattr("semidice.metrics.density.MAX_VOXELS", 20_000)
    sample_error = kde_calibration_error(prob, target)
    assert sample_error.item() != full_error.item()
    torch.testing.assert_close(sample_error, full_error, rtol=0, atol=0.03)
    # only half of the drawn voxels are valid
    valid = torch.arange(200_000).unsqueeze(0) % 2 == 0
    torch.testing.assert_close(
        kde_calibration_error(prob, target, valid=valid), full_error, rtol=0, atol=0.03
    )
