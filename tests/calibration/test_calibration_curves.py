"""Vector scaling, beta and isotonic calibration against scikit-learn and SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from semidice.calibration import BetaCalibrator, IsotonicCalibrator, VectorScaling

UNITS = 65535


def binary(num, *, a, b, c, seed=0):
    """Stored probabilities of the foreground, and labels drawn from sigmoid(a log p - b log(1 - p) + c)."""
    rng = np.random.default_rng(seed)
    prob = rng.integers(200, UNITS - 200, num) / UNITS
    label = rng.uniform(0, 1, num) < special.expit(a * np.log(prob) - b * np.log1p(-prob) + c)
    return prob, label.astype(np.float64)


def columns(*arrays):
    return [torch.from_numpy(array).unsqueeze(1) for array in arrays]


@pytest.mark.parametrize(("scale", "bias"), [(1.0, 0.0), (0.4, 1.0), (2.5, -1.5), (-0.5, 0.3)])
def test_platt_scaling_is_the_logistic_regression_of_scikit_learn(scale, bias):
    prob, label = binary(3000, a=scale, b=scale, c=bias)
    scaling = VectorScaling().fit(*columns(prob, label))
    oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(special.logit(prob)[:, None], label)
    expected = [oracle.coef_[0, 0], oracle.intercept_[0]]
    np.testing.assert_allclose(scaling.parameters[0].numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parameters", [(1, 1, 0), (2, 0.5, 0.7), (0.3, 1.8, -1), (0.6, 0.6, 0.2)])
def test_beta_calibration_is_the_logistic_regression_of_scikit_learn(parameters):
    a, b, c = parameters
    prob, label = binary(3000, a=a, b=b, c=c)
    features = np.stack([np.log(prob), -np.log1p(-prob)], 1)
    oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(features, label)
    assert oracle.coef_.min() > 0
    expected = [*oracle.coef_[0], oracle.intercept_[0]]
    fitted = BetaCalibrator().fit(*columns(prob, label)).parameters[0]
    np.testing.assert_allclose(fitted.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "parameters", [(-1, 1, 0), (1, -0.8, 0.5), (-1, -1, 0), (-0.3, 2, 0), (0.5, -2, 0), (-2, 0.2, 0)]
)
def test_beta_calibration_has_the_best_parameters_that_are_not_negative(parameters):
    a, b, c = parameters
    prob, label = binary(2000, a=a, b=b, c=c, seed=2)
    features = np.stack([np.log(prob), -np.log1p(-prob), np.ones_like(prob)], 1)
    fitted = BetaCalibrator().fit(*columns(prob, label)).parameters[0].numpy()
    gradient = features.T @ (special.expit(features @ fitted) - label) / len(label)
    at_zero = fitted == 0
    # Karush, Kuhn and Tucker: of a convex function, such a point is the minimum
    assert at_zero[:2].any()
    assert fitted[:2].min() >= 0
    assert gradient[at_zero].min() >= -1e-7
    assert np.abs(gradient[~at_zero]).max() < 1e-7


@pytest.mark.parametrize("soft", [False, True])
def test_vector_scaling_of_many_classes_has_the_likelihood_that_scipy_finds(soft):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (1500, 4))
    prob = special.softmax(logits, axis=1)
    log_prob = np.log(np.maximum(prob, 0.5 / UNITS))
    truth = special.softmax(log_prob * [0.5, 1, 2, 1.2] + [0, 1, -1, 0.5], axis=1)
    label = truth if soft else np.eye(4)[[rng.choice(4, p=row) for row in truth]]
    fitted = VectorScaling().fit(torch.from_numpy(prob), torch.from_numpy(label))

    def loss(theta):
        scaled = special.log_softmax(log_prob * theta[:4] + theta[4:], axis=1)
        return -(label * scaled).sum(1).mean()

    oracle = optimize.minimize(loss, [1] * 4 + [0] * 4, method="BFGS", options={"gtol": 1e-9})
    theta = fitted.parameters.t().flatten().numpy()
    assert loss(theta) <= oracle.fun + 1e-9
    # a bias of all classes changes nothing
    np.testing.assert_allclose(theta[:4], oracle.x[:4], atol=1e-4)
    np.testing.assert_allclose(theta[4:] - theta[4], oracle.x[4:] - oracle.x[4], atol=1e-4)
    expected = special.softmax(log_prob * theta[:4] + theta[4:], axis=1)
    np.testing.assert_allclose(fitted.calibrate(torch.from_numpy(prob)).numpy(), expected, atol=1e-12)
    if soft:
        torch.testing.assert_close(
            fitted.calibrate(torch.from_numpy(prob)), torch.from_numpy(truth), atol=1e-3, rtol=0
        )


class ScalingOfFewVoxels(VectorScaling):
    num_voxels = 9000


def test_a_sample_of_a_long_stream_gives_nearly_the_fit_of_all_voxels():
    rng = np.random.default_rng(1)
    # most voxels are certain background, as in a scan
    logits = rng.normal([4, 0, 0], 2, (20_000, 3))
    prob = torch.from_numpy(special.softmax(logits, axis=1))
    truth = torch.from_numpy(special.softmax(logits * 0.5 + [0.0, 1.0, 0.0], axis=1))
    target = torch.multinomial(truth, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    exact, stream = VectorScaling().fit(prob, target), ScalingOfFewVoxels()
    for part, label in zip(prob.split(7000), target.split(7000), strict=True):
        stream.partial_fit(part, label)
    assert not torch.equal(stream.parameters, exact.parameters)
    before = (prob - truth).abs().mean()
    for fitted in (exact, stream):
        assert (fitted.calibrate(prob) - truth).abs().mean() < 0.1 * before


@pytest.mark.parametrize("kind", [VectorScaling, BetaCalibrator])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_separable_and_constant_predictions_give_finite_parameters(kind, num_classes):
    target = torch.arange(60) % num_classes
    separable = 0.1 / num_classes + 0.9 * torch.nn.functional.one_hot(target, num_classes)
    separable = separable / separable.sum(1, keepdim=True)
    constant = torch.full((60, num_classes), 1 / num_classes)
    for prob in (separable, constant, torch.eye(num_classes)[target]):
        for label in (target, torch.zeros_like(target), (target + 1) % num_classes):
            fitted = kind().fit(prob, label)
            assert fitted.parameters.isfinite().all()
            assert fitted.calibrate(prob).isfinite().all()
    certain = kind().fit(separable, target).calibrate(separable)
    assert certain.gather(1, target.unsqueeze(1)).min() > 0.999


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 30)), min_size=1, max_size=40), st.integers(0, 999))
def test_isotonic_calibration_is_that_of_scikit_learn_with_the_number_of_voxels_as_weight(pairs, seed):
    values, counts = np.array(pairs).T
    units = np.sort(np.random.default_rng(seed).choice(UNITS + 1, len(values), replace=False))
    oracle = IsotonicRegression(out_of_bounds="clip").fit(units, values.astype(np.float32), counts)
    repeated = (np.repeat(each, counts.astype(int)) for each in (units / UNITS, values))
    calibrator = IsotonicCalibrator().fit(*columns(*repeated))
    every = np.arange(UNITS + 1)
    calibrated = calibrator.calibrate(torch.from_numpy(every / UNITS).unsqueeze(1)).flatten()
    np.testing.assert_allclose(calibrated.numpy(), oracle.predict(every), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_isotonic_calibration_is_linear_between_the_seen_probabilities(dtype):
    rng = np.random.default_rng(0)
    # few distinct values, so that many voxels share one
    units = rng.integers(0, 300, 4000) * 200
    label = (rng.uniform(0, 1, 4000) < (units / UNITS) ** 1.5).astype(np.float64)
    prob = torch.from_numpy(units / UNITS).to(dtype).unsqueeze(1)
    calibrator = IsotonicCalibrator().fit(prob, torch.from_numpy(label).unsqueeze(1))
    oracle = IsotonicRegression(out_of_bounds="clip").fit(units, label)
    between = np.array([1000.0, 1000.5, 12_345.25, 65_535.0])
    calibrated = calibrator.calibrate(torch.from_numpy(between / UNITS).to(dtype).unsqueeze(1)).flatten()
    precision = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(calibrated.numpy(), oracle.predict(between), atol=precision)


def test_a_step_between_two_stored_probabilities_is_not_blurred():
    units = torch.arange(30_000, 30_400)
    prob = (units / UNITS).unsqueeze(1)
    target = (units >= 30_200).long().unsqueeze(1)
    assert torch.equal(IsotonicCalibrator().fit(prob, target).calibrate(prob), target.float())


def test_classes_that_all_have_probability_zero_still_sum_to_one():
    # below 0.45, no class is ever the right one
    low = torch.tensor([[0.45, 0.5, 0.05], [0.05, 0.45, 0.5], [0.5, 0.05, 0.45]])
    sure = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]])
    calibrator = IsotonicCalibrator().fit(torch.cat([low, sure]), torch.tensor([1, 2, 0, 0, 1, 2]))
    torch.testing.assert_close(
        calibrator.calibrate(torch.tensor([[0.4, 0.4, 0.2]])), torch.full((1, 3), 1 / 3)
    )
    assert calibrator.calibrate(sure).diagonal().min() > 0.999


@pytest.mark.parametrize("kind", [VectorScaling, BetaCalibrator])
def test_a_stored_zero_is_fitted_and_calibrated_as_half_a_unit(kind):
    half = 0.5 / UNITS
    label = torch.tensor([[0.0], [0.2], [1.0], [0.9]])
    of_zero, of_half = (
        kind().fit(torch.tensor([[low], [0.3], [0.6], [0.9]]), label) for low in (0.0, 0.9 * half)
    )
    torch.testing.assert_close(of_zero.parameters, of_half.parameters)
    curve = of_zero.calibrate(torch.tensor([[0.0], [half]]))
    assert float(curve[0]) == pytest.approx(float(curve[1]), rel=1e-5)
