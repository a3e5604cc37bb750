"""Stored predictions are read to within one unit, sum to one, and are never misread."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from start import refused

from semidice.runs.predictions import read_prediction, write_prediction


@given(
    shape=st.tuples(st.integers(2, 5), st.integers(1, 6), st.integers(1, 6)),
    spread=st.floats(0, 30),
    seed=st.integers(0, 2**16),
)
def test_a_stored_prediction_is_read_to_within_one_unit_and_sums_to_one(
    tmp_path_factory, shape, spread, seed
):
    prob = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, shape)).softmax(0).numpy()
    path = tmp_path_factory.mktemp("stored") / "case.npz"
    write_prediction(path, prob)
    stored = read_prediction(path)
    assert stored.dtype == np.float32
    # one unit, plus the rounding of a float32 near 1
    assert np.abs(stored - prob).max() <= 1 / 65535 + 2**-24
    units = stored.astype(np.float64) * 65535
    np.testing.assert_allclose(units, units.round(), atol=0.01)
    assert (units.round().sum(0) == 65535).all()


def test_a_prediction_that_was_read_is_written_again_as_the_same_bytes(tmp_path):
    prob = torch.randn(3, 20, 20, generator=torch.Generator().manual_seed(0)).softmax(0)
    write_prediction(tmp_path / "a.npz", prob)
    write_prediction(tmp_path / "b.npz", torch.from_numpy(read_prediction(tmp_path / "a.npz")))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_two_classes_are_read_to_within_half_a_unit(tmp_path):
    foreground = np.random.default_rng(0).uniform(0, 1, (50, 50))
    write_prediction(tmp_path / "case.npz", np.stack([1 - foreground, foreground]))
    stored = read_prediction(tmp_path / "case.npz")
    assert np.abs(stored[1] - foreground).max() <= 0.5 / 65535 + 2**-24


def test_hard_probabilities_are_stored_exactly(tmp_path):
    prob = np.stack([np.eye(4), 1 - np.eye(4)]).astype(np.float32)
    write_prediction(tmp_path / "case.npz", prob)
    np.testing.assert_array_equal(read_prediction(tmp_path / "case.npz"), prob)


def test_a_softmax_of_bfloat16_is_scaled_to_one(tmp_path):
    prob = torch.randn(6, 30, 30).softmax(0).bfloat16()
    write_prediction(tmp_path / "case.npz", prob)
    exact = prob.double() / prob.double().sum(0)
    assert np.abs(read_prediction(tmp_path / "case.npz") - exact.numpy()).max() <= 1 / 65535 + 2**-24


@pytest.mark.parametrize(
    "prob",
    [np.full((2, 3), np.nan), np.full((2, 3), 0.7), np.array([[1.5], [-0.5]]), np.ones((1, 3))],
    ids=["NaN", "sum", "negative", "one class"],
)
def test_values_that_are_not_probabilities_are_not_stored(tmp_path, prob):
    refused(lambda: write_prediction(tmp_path / "case.npz", prob), "case.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_stored_prediction_that_would_be_misread_is_refused(tmp_path):
    path = tmp_path / "case.npz"
    refused(lambda: read_prediction(path), str(path), "predict again")
    np.savez_compressed(path, foreground=np.full((2, 3), 40000, dtype=np.uint16))
    refused(lambda: read_prediction(path), str(path), "1.22")
    np.savez_compressed(path, foreground=np.zeros((2, 3)))
    refused(lambda: read_prediction(path), str(path), "float64", "predict again")
