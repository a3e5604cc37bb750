"""Isotonic calibration against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from semidice.calibration import IsotonicCalibrator
from semidice.calibration.isotonic import pool_adjacent_violators

UNITS = 65535


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 100)), min_size=1, max_size=40))
def test_pooling_gives_the_isotonic_regression_of_scikit_learn(pairs):
    values, weights = np.array(pairs).T
    expected = IsotonicRegression().fit_transform(np.arange(len(values)), values, sample_weight=weights)
    np.testing.assert_allclose(pool_adjacent_violators(values, weights), expected, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_calibrator_equals_scikit_learn_between_the_seen_probabilities_too(dtype):
    rng = np.random.default_rng(0)
    # few distinct values, so that many voxels share one
    units = rng.integers(0, 300, 4000) * 200
    label = (rng.uniform(0, 1, 4000) < (units / UNITS) ** 1.5).astype(np.float64)
    prob = torch.from_numpy(units / UNITS).to(dtype).unsqueeze(1)
    calibrator = IsotonicCalibrator().fit(prob, torch.from_numpy(label).unsqueeze(1))
    oracle = IsotonicRegression(out_of_bounds="clip").fit(units, label)
    every = np.arange(UNITS + 1)
    calibrated = calibrator.calibrate(torch.from_numpy(every / UNITS).to(dtype).unsqueeze(1)).flatten()
    precision = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(calibrated.numpy(), oracle.predict(every), atol=precision)
    between = torch.tensor([[1000.5 / UNITS]], dtype=torch.float64)
    assert float(calibrator.calibrate(between)) == pytest.approx(
        float(oracle.predict([1000.5])[0]), abs=1e-12
    )


def test_a_step_between_two_stored_probabilities_is_not_blurred():
    units = torch.arange(30_000, 30_400)
    prob = (units / UNITS).unsqueeze(1)
    target = (units >= 30_200).long().unsqueeze(1)
    assert torch.equal(IsotonicCalibrator().fit(prob, target).calibrate(prob), target.float())


def test_classes_that_all_have_probability_zero_still_sum_to_one():
    prob = torch.tensor([[0.2, 0.3, 0.5], [0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]])
    calibrator = IsotonicCalibrator().fit(prob[1:], torch.tensor([0, 1, 2]))
    calibrated = calibrator.calibrate(torch.tensor([[0.05, 0.05, 0.9], [0.04, 0.05, 0.91]]))
    torch.testing.assert_close(calibrated.sum(1), torch.ones(2))
    assert calibrated[0, 2] > 0.999
