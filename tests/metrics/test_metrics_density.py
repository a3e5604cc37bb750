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
    options = {"bandwidth": 0.02, "num_keys": 4096, "num_points": 2048}
    assert kde_calibration_error(prob, target, **options).item() < 0.03
    overconfident = torch.sigmoid(3 * torch.logit(prob))
    by_bins = calibration_error(overconfident, target, num_bins=15).item()
    assert kde_calibration_error(overconfident, target, **options).item() == pytest.approx(by_bins, abs=0.03)


def test_the_error_of_a_constant_prediction_is_its_distance_to_the_target():
    prob, target = torch.full((1, 1, 1000), 0.7), torch.ones(1, 1, 1000)
    assert kde_calibration_error(prob, target).item() == pytest.approx(0.3, abs=1e-5)
    assert kde_calibration_error(prob, target, p=2).item() == pytest.approx(0.09, abs=1e-5)


def test_the_error_of_a_case_depends_on_the_seed_and_not_on_the_batch():
    prob, target = soft_label(3, 3, 20, 20), class_map((3, 20, 20), 3)
    full_error = kde_calibration_error(prob, target)
    assert torch.equal(full_error, kde_calibration_error(prob, target))
    torch.testing.assert_close(full_error[1:2], kde_calibration_error(prob[1:2], target[1:2]), rtol=0, atol=0)
    assert not torch.equal(full_error, kde_calibration_error(prob, target, seed=1, num_points=50))


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


def test_ignored_voxels_do_not_count_and_a_case_without_valid_voxels_is_nan():
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
